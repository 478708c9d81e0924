"""What the service keeps: jobs, commands to them, background operations; and how they are written as text."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import Any

import msgspec

from statebackend.errors import InvalidRequest

ENDED_STATES = frozenset({"FINISHED", "CANCELED", "FAILED"})
JOB_STATES = ENDED_STATES | {"INITIALIZING", "CREATED", "RUNNING", "RESTARTING", "CANCELLING", "SUSPENDED"}


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def new_id() -> str:
    return uuid.uuid4().hex


@dataclass(frozen=True)
class JobRecord:
    """A job as last heard of. `lost`: it was running and has stopped reporting."""

    id: str
    name: str
    state: str
    start_time: int
    end_time: int
    last_seen: int
    registration: dict[str, Any]
    live: dict[str, Any]
    lost: bool = False

    @property
    def running(self) -> bool:
        return self.state not in ENDED_STATES

    @property
    def only_launched(self) -> bool:
        """The service was to start it, and it has never reported."""
        return bool(self.registration.get("only_launched"))

    @property
    def incarnation(self) -> tuple[Any, ...]:
        """What differs between two runs of the same job: its process and when that started."""
        return tuple(self.registration.get(name) for name in ("host", "pid", "start_time"))


@dataclass(frozen=True)
class Command:
    """Something a job is asked to do, once. IN_PROGRESS until the job reports, or the job ends without doing it."""

    request_id: str
    job_id: str
    kind: str
    arguments: dict[str, Any]
    status: str
    result: dict[str, Any]
    created: int


@dataclass(frozen=True)
class Operation:
    """Background work of the service: QUEUED, RUNNING, COMPLETED, FAILED or CANCELED."""

    id: str
    kind: str
    arguments: dict[str, Any]
    status: str
    progress: float
    result: dict[str, Any]
    created: int
    ended: int | None


@dataclass(frozen=True)
class Beat:
    """One report of a job, checked: a batch of them is written at once, so none may fail while it is written."""

    job_id: str
    state: str
    live: dict[str, Any]
    checkpoints: list[tuple[int, str]]
    exceptions: list[tuple[int, str]]
    moment: int

    @classmethod
    def of(cls, job_id: str, state: str, live: dict[str, Any], checkpoints: list[dict[str, Any]],
           exceptions: list[dict[str, Any]]) -> Beat:
        if state not in JOB_STATES:
            raise InvalidRequest("unknown job state", found=state, expected=sorted(JOB_STATES))
        moment = now_ms()
        return cls(job_id, state, live, [(_checkpoint_id(record), to_text(record)) for record in checkpoints],
                   [(_timestamp(item, moment), str(item.get("message", ""))) for item in exceptions], moment)


def request_id(chosen: str | None) -> str:
    """A trigger id: the caller's, checked, or a fresh one."""
    if chosen is None:
        return new_id()
    if len(chosen) != 32 or any(digit not in "0123456789abcdef" for digit in chosen):
        raise InvalidRequest("a trigger id has 32 lower-case hex digits", found=chosen)
    return chosen


def to_text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def from_text(text: str) -> dict[str, Any]:
    decoded: dict[str, Any] = msgspec.json.decode(text)
    return decoded


def _checkpoint_id(record: dict[str, Any]) -> int:
    number = record.get("id")
    if not isinstance(number, int) or not 0 <= number < 2**62:
        raise InvalidRequest("a checkpoint record needs a numeric id", found=number)
    return number


def _timestamp(item: dict[str, Any], moment: int) -> int:
    number = item.get("timestamp", moment)
    if not isinstance(number, (int, float)) or not 0 <= number < 2**62:
        raise InvalidRequest("an exception's timestamp is a number of milliseconds", found=number)
    return int(number)

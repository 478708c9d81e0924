"""When a state entry expires: the configuration, and the rules as pure functions of times that are passed in."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum, StrEnum
from typing import Any, TypeVar

from statebackend.durations import duration_ms
from statebackend.errors import InvalidRequest

NEVER = 2**63 - 1
"""The `expires_at` of an entry that does not expire."""
NO_TIME_YET = -(2**63)
"""Event time before the first watermark: an entry written then stays until it is written again."""


_Choice = TypeVar("_Choice", bound=Enum)


class UpdateType(StrEnum):
    """Which accesses restart an entry's time to live."""

    ON_CREATE_AND_WRITE = "on_create_and_write"
    ON_READ_AND_WRITE = "on_read_and_write"


class Visibility(StrEnum):
    """Whether an entry that has expired but is still stored may be returned."""

    NEVER_RETURN_EXPIRED = "never_return_expired"
    RETURN_EXPIRED_IF_NOT_CLEANED_UP = "return_expired_if_not_cleaned_up"


class TimeDomain(StrEnum):
    """Which clock TTL counts: the wall clock, or the operator's watermark."""

    PROCESSING = "processing"
    EVENT = "event"


@dataclass(frozen=True)
class Cleanup:
    """Which clean-up strategies run. Each is on by default and can be switched off.

    on_read         an expired entry is removed when it is read
    full_snapshot   expired entries are left out of full snapshots
    incremental     entries examined per state access (0 switches it off; memory and filesystem backends)
    every_record    examine `incremental` entries at every `set_current_key` too
    background      RocksDB sweeps a few thousand entries a tick; removed bytes leave by compaction
    """

    on_read: bool = True
    full_snapshot: bool = True
    incremental: int = 5
    every_record: bool = False
    background: bool = True

    @classmethod
    def none(cls) -> Cleanup:
        """No clean-up at all: expired entries are hidden but stay stored."""
        return cls(on_read=False, full_snapshot=False, incremental=0, every_record=False, background=False)


@dataclass(frozen=True)
class TtlConfig:
    """Time to live of a state's entries: of the value, of each list element, of each map entry.

    `ttl` takes a timedelta, milliseconds, or text such as `"7d"`.
    """

    ttl: timedelta | int | str
    update: UpdateType = UpdateType.ON_CREATE_AND_WRITE
    visibility: Visibility = Visibility.NEVER_RETURN_EXPIRED
    time: TimeDomain = TimeDomain.PROCESSING
    cleanup: Cleanup = field(default_factory=Cleanup)

    def __post_init__(self) -> None:
        milliseconds = duration_ms(self.ttl)
        if milliseconds > timedelta.max // timedelta(milliseconds=1):
            raise InvalidRequest("a TTL is too long", found=self.ttl, expected=f"at most {timedelta.max.days} days",
                                 hint="leave the TTL out where entries never expire")
        object.__setattr__(self, "ttl", timedelta(milliseconds=milliseconds))
        object.__setattr__(self, "update", _member(UpdateType, self.update))
        object.__setattr__(self, "visibility", _member(Visibility, self.visibility))
        object.__setattr__(self, "time", _member(TimeDomain, self.time))
        if self.ttl_ms <= 0:
            raise InvalidRequest("a TTL must be longer than zero", found=str(self.ttl))

    @property
    def ttl_ms(self) -> int:
        return duration_ms(self.ttl)

    @property
    def updates_on_read(self) -> bool:
        return self.update is UpdateType.ON_READ_AND_WRITE

    @property
    def returns_expired(self) -> bool:
        return self.visibility is Visibility.RETURN_EXPIRED_IF_NOT_CLEANED_UP

    def to_json(self) -> dict[str, Any]:
        return {"ttl_ms": self.ttl_ms, "update": self.update.value, "visibility": self.visibility.value,
                "time": self.time.value}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TtlConfig:
        return cls(int(data["ttl_ms"]), UpdateType(data["update"]), Visibility(data["visibility"]),
                   TimeDomain(data["time"]))


def _member(kind: type[_Choice], value: Any) -> _Choice:
    try:
        return kind(value)
    except ValueError:
        choices = ", ".join(str(member.value) for member in kind)
        raise InvalidRequest(f"{value!r} is no {kind.__name__}", hint=f"use one of {choices}") from None


def expires_at(now_ms: int, ttl_ms: int) -> int:
    """The moment at which an entry written now expires; never overflows.

    Where there is no time yet, none: counted from the smallest number, it would be gone at the first watermark.
    """
    return NEVER if now_ms == NO_TIME_YET else min(now_ms + ttl_ms, NEVER)


def is_expired(expires_at_ms: int, now_ms: int) -> bool:
    """An entry is expired from its `expires_at` on."""
    return now_ms >= expires_at_ms

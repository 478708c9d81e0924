"""Which run of a job is the newest, what the job began from, and what a running restore holds: claims and pins as files."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from checkpoint.storage import layout
from checkpoint.storage.registry import GenerationRecord
from checkpoint.storage.store import FileStore
from statebackend.clock import Clock
from statebackend.errors import Conflict, CorruptData, NotFound

CLAIM_VERSION = 1
PIN_TTL_MS = 3_600_000
_KEPT_CLAIMS = 16
_WAY_OUT = ("name the checkpoint to go on from with --restore PATH; `latest` works again once the file is put back, or "
            "the job's folder is moved away")


class PinRecord(msgspec.Struct, frozen=True):
    """A pin: which checkpoint a restore is reading, and until when it may be believed."""

    path: str
    checkpoint_id: int
    expires_ms: int


class Origin(msgspec.Struct, frozen=True):
    """The checkpoint or savepoint outside its own folder that a job began from, or stopped with, and when.

    stopped_with  number of the savepoint that it stopped with: newer than its checkpoints up to that number. 0: it began.
    generation    the run that stopped: void once a newer one has claimed the job, for then it was refused to commit.
    """

    job_name: str
    url: str
    started_at: int
    version: int = CLAIM_VERSION
    stopped_with: int = 0
    generation: int = 0


def record_origin(store: FileStore, origin: Origin) -> None:
    """Write down what a job has to go back to until it has a checkpoint of its own that is newer."""
    store.write(layout.ORIGIN, msgspec.json.encode(origin))


def read_origin(store: FileStore) -> Origin | None:
    """What a job began from, or stopped with; None for one that began with nothing."""
    try:
        return msgspec.json.decode(store.read(layout.ORIGIN), type=Origin)
    except NotFound:
        return None
    except msgspec.DecodeError as error:
        raise CorruptData("the record of what a job began from or stopped with can't be read",
                          path=store.url_of(layout.ORIGIN), hint=_WAY_OUT) from error


def read_claims(store: FileStore) -> list[GenerationRecord]:
    """All claims on a job, oldest first, with the checkpoint that each started from."""
    numbers: set[int] = set()
    based: set[int] = set()
    for info in store.list(layout.GENERATIONS):
        number, base = layout.generation_of(info.path), layout.base_generation_of(info.path)
        if number is not None:
            numbers.add(number)
        if base is not None:
            based.add(base)
    return [GenerationRecord(number, _read_base(store, number) if number in based else None)
            for number in sorted(numbers)]


def newest_generation(store: FileStore) -> int:
    """The highest generation that was ever claimed; 0 where none was."""
    numbers = [layout.generation_of(info.path) for info in store.list(layout.GENERATIONS)]
    return max((number for number in numbers if number is not None), default=0)


def claim(store: FileStore, clock: Clock, job_name: str = "") -> int:
    """Become the newest generation of a job: every older one is fenced off from the moment this returns."""
    body = {"version": CLAIM_VERSION, "token": secrets.token_hex(16), "host": socket.gethostname(),
            "pid": os.getpid(), "claimed_at": clock.now_ms(), "job_name": job_name}
    while True:
        number = newest_generation(store) + 1
        try:
            store.create(layout.generation_file(number), json.dumps({**body, "generation": number}).encode())
        except Conflict:
            continue  # somebody claimed it first: look again
        if newest_generation(store) != number:
            raise Conflict("another run of this job was started at the same time and has taken over", path=store.url,
                           generation=number)
        _forget_old_claims(store, number)
        return number


def claimed_job_name(store: FileStore) -> str | None:
    """The name of the flow as its newest run gave it; None where no run has claimed the job."""
    newest = newest_generation(store)
    if newest == 0:
        return None
    try:
        return str(json.loads(store.read(layout.generation_file(newest))).get("job_name", ""))
    except (NotFound, ValueError, AttributeError):
        return None


def record_base(store: FileStore, generation: int, checkpoint_id: int) -> None:
    """Write down which checkpoint a generation starts from (0: none); what older ones publish beyond it is void."""
    store.create(layout.generation_base_file(generation),
                 json.dumps({"version": CLAIM_VERSION, "generation": generation, "base": checkpoint_id,
                             "token": secrets.token_hex(8)}).encode())


def require_newest(store: FileStore, generation: int) -> None:
    """Refuse to go on if a newer run has taken over."""
    newest = newest_generation(store)
    if newest > generation:
        raise Conflict("a newer run of this job has taken over, so this one may neither publish nor delete",
                       path=store.url, generation=generation, newest=newest,
                       hint="stop this run; the newer one goes on from the last completed checkpoint")


@contextmanager
def pinned(store: FileStore, checkpoint_id: int, clock: Clock, *, ttl_ms: int = PIN_TTL_MS) -> Iterator[str]:
    """Keep a checkpoint's files from being deleted while the block runs. Read its metadata inside the block."""
    path = layout.new_pin_file()
    store.write(path, json.dumps({"version": CLAIM_VERSION, "checkpoint_id": checkpoint_id,
                                  "expires_at": clock.now_ms() + ttl_ms}).encode())
    try:
        yield path
    finally:
        store.delete([path])


def read_pins(store: FileStore) -> list[PinRecord]:
    """All pins, expired ones included."""
    found: list[PinRecord] = []
    for info in store.list(layout.PINS):
        try:
            data = json.loads(store.read(info.path))
            found.append(PinRecord(info.path, int(data["checkpoint_id"]), int(data["expires_at"])))
        except NotFound:
            continue  # released meanwhile
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptData("a pin file can't be read", path=store.url_of(info.path),
                              hint="delete it if no restore is running") from error
    return found


def live_pins(store: FileStore, now_ms: int) -> frozenset[int]:
    """The checkpoints that a running restore holds."""
    return frozenset(pin.checkpoint_id for pin in read_pins(store) if pin.expires_ms > now_ms)


def _read_base(store: FileStore, generation: int) -> int | None:
    path = layout.generation_base_file(generation)
    try:
        return int(json.loads(store.read(path))["base"])
    except NotFound:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptData("the record of a generation's start can't be read", path=store.url_of(path),
                          hint=_WAY_OUT) from error


def _forget_old_claims(store: FileStore, newest: int) -> None:
    """Drop claims far behind: a checkpoint that they could make void is long gone."""
    old = [info.path for info in store.list(layout.GENERATIONS)
           if (layout.generation_of(info.path) or layout.base_generation_of(info.path) or newest)
           <= newest - _KEPT_CLAIMS]
    if old:
        store.delete(old)

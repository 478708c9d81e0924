"""Proof by doing that a store keeps the promises Holdfast relies on; what `holdfast checkpoint probe URL` runs."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from checkpoint.storage.store import CHUNK, FileStore
from statebackend.errors import Conflict, HoldfastError, InvalidRequest, NotFound, Unavailable

_RACERS = 8


@dataclass(frozen=True)
class ProbeCheck:
    """One promise: whether the store kept it, and what was seen. `fencing`: only safe takeovers depend on it."""

    name: str
    ok: bool
    detail: str
    seconds: float
    fencing: bool = False


@dataclass(frozen=True)
class ProbeReport:
    """A row per check."""

    url: str
    protocol: str
    checks: tuple[ProbeCheck, ...]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def fenced(self) -> bool:
        return all(check.ok for check in self.checks if check.fencing)

    def require(self, *, unfenced: bool = False) -> None:
        """Raise for the first promise that was broken; with `unfenced`, conditional creation is not asked for."""
        for check in self.checks:
            if not check.ok and not (unfenced and check.fencing):
                kind = InvalidRequest if check.fencing else Unavailable
                raise kind(f"the store failed the check {check.name!r}: {check.detail}", path=self.url,
                           hint="say unfenced=true to use it without protection from a second writer"
                           if check.fencing else "see docs/storage.md for what a store must do")


def probe_store(store: FileStore, *, quick: bool = False) -> ProbeReport:
    """Run every check in a folder of its own, which is removed at the end; `quick`: only what a job start needs."""
    folder = f"holdfast-probe-{secrets.token_hex(6)}"
    room = store.child(folder)
    try:
        checks = [_run(name, check, room, fencing) for name, check, fencing in (_QUICK if quick else _CHECKS)]
    finally:
        with contextlib.suppress(HoldfastError):
            store.delete_tree(folder)
    return ProbeReport(store.url, store.protocol, tuple(checks))


def _run(name: str, check: Callable[[FileStore], str], room: FileStore, fencing: bool) -> ProbeCheck:
    started = time.perf_counter()
    try:
        detail, ok = check(room), True
    except HoldfastError as error:
        detail, ok = str(error), False
    except _Broken as error:
        detail, ok = str(error), False
    return ProbeCheck(name, ok, detail, time.perf_counter() - started, fencing)


class _Broken(Exception):
    """A promise was not kept."""


def _read_after_write(room: FileStore, times: int = 3) -> str:
    for number in range(times):
        data = secrets.token_bytes(64)
        room.write(f"written-{number}", data)
        if room.read(f"written-{number}") != data or room.size(f"written-{number}") != 64:
            raise _Broken("a file just written reads back differently")
    return "a file reads back as soon as it is written"


def _list_after_write(room: FileStore) -> str:
    names = {f"listed/{number}" for number in range(5)}
    for name in names:
        room.write(name, b"x")
    found = {info.path for info in room.list("listed")}
    if found != names or room.folders() != ["listed"]:
        raise _Broken(f"a listing shows {len(found)} of {len(names)} files just written")
    return "a listing shows every file as soon as it is written"


def _listing_has_times(room: FileStore) -> str:
    room.write("timed", b"x")
    age = time.time() * 1000 - next(info for info in room.list() if info.path == "timed").modified_ms
    if abs(age) > 300_000:
        raise _Broken(f"the store's clock is {age / 1000:.0f} s from ours, or it keeps no times: "
                      "garbage collection goes by the age of files")
    return f"times of files are known, {age / 1000:+.1f} s from our clock"


def _delete(room: FileStore) -> str:
    room.write("deleted", b"x")
    room.delete(["deleted", "never-there"])
    if room.exists("deleted") or any(info.path == "deleted" for info in room.list()):
        raise _Broken("a deleted file is still there")
    with contextlib.suppress(NotFound):
        room.read("deleted")
        raise _Broken("a deleted file can still be read")
    return "a deleted file is gone at once"


def _streaming(room: FileStore) -> str:
    part = secrets.token_bytes(1 << 20)
    size = 2 * CHUNK + (1 << 20)
    with room.writer("streamed") as writer:
        for _ in range(size >> 20):
            writer.write(part)
        if room.exists("streamed"):
            raise _Broken("a file is visible before it is finished")
    if room.size("streamed") != size or room.read_range("streamed", size - 8, size) != part[-8:]:
        raise _Broken("a file written in parts reads back differently")
    return f"{size >> 20} MiB in parts, read by range"


def _conditional_create(room: FileStore) -> str:
    room.create("created", b"first")
    try:
        room.create("created", b"second")
    except Conflict:
        if room.read("created") != b"first":
            raise _Broken("a refused create has replaced the file") from None
        return "a second create is refused and changes nothing"
    raise _Broken("a second create was not refused: the store ignores the condition")


def _one_winner(room: FileStore) -> str:
    def attempt(number: int) -> int | None:
        try:
            room.create("raced", str(number).encode())
        except Conflict:
            return None
        return number

    with ThreadPoolExecutor(_RACERS) as pool:
        winners = [number for number in pool.map(attempt, range(_RACERS)) if number is not None]
    if len(winners) != 1 or room.read("raced") != str(winners[0]).encode():
        raise _Broken(f"{len(winners)} of {_RACERS} writers at the same time were told that they had won")
    return f"of {_RACERS} writers at the same time one wins"


_CHECKS: tuple[tuple[str, Callable[[FileStore], str], bool], ...] = (
    ("read after write", _read_after_write, False),
    ("list after write", _list_after_write, False),
    ("times of files", _listing_has_times, False),
    ("delete", _delete, False),
    ("write in parts", _streaming, False),
    ("conditional create", _conditional_create, True),
    ("one winner", _one_winner, True),
)
_QUICK: tuple[tuple[str, Callable[[FileStore], str], bool], ...] = (
    ("read after write", partial(_read_after_write, times=1), False),
    ("conditional create", _conditional_create, True),
)

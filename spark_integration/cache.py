"""Open backends of a Python worker, by operator and key-group range: a cache, never the truth.

Spark hands a partition to any worker, and a worker may die at any time. What a cached backend holds is known by its
*position*: the attempt that made it and the snapshot handle of that moment. A backend is used as it is only if the
epoch to start from names that very attempt; it is brought forward if that epoch only added entry files to what it
holds; anything else (a retried batch, a replay, a lost race) is thrown away and restored from storage. So local
state never runs ahead of the manifests.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from spark_integration.bases import BaseTarget, Making, begin
from spark_integration.epochs import Manifest
from spark_integration.host_files import WarmFiles
from statebackend.backend import Backend, KeyedBackend, KeyedHandle, create_backend
from statebackend.clock import ManualClock
from statebackend.files import SnapshotSource
from statebackend.keygroups import KeyGroupRange
from statebackend.types import StateType

FOLDER_PREFIX = "holdfast-"
PATIENCE = 3
"""How many times the size of its base a log may reach: at one a new base is begun, at this a batch has to store it."""


class Position(NamedTuple):
    """What a backend holds: the state that an attempt stored, and the handle it stored it under."""

    attempt: str
    handle: KeyedHandle
    checkpoint_id: int


@dataclass(frozen=True)
class UseAsIs:
    """The cached backend holds exactly the wanted state."""


@dataclass(frozen=True)
class CatchUp:
    """The wanted state is the cached one and some entry files more."""

    handle: KeyedHandle


@dataclass(frozen=True)
class Restore:
    """Nothing cached is of use: start from these handles, or empty."""

    handles: tuple[KeyedHandle, ...]


def decide_warmth(position: Position | None, wanted: Manifest | None,
                  key_groups: KeyGroupRange) -> UseAsIs | CatchUp | Restore:
    """How a backend at `position` gets to the state of `key_groups` in an epoch (None: before the first one)."""
    if wanted is None:
        return Restore(())
    part = wanted.part(key_groups)
    if part is None or position is None:
        return Restore(tuple(one.handle for one in wanted.overlapping(key_groups)))
    if position.attempt == part.attempt:
        return UseAsIs()
    if _continues(position.handle, part.handle):
        return CatchUp(part.handle)
    return Restore((part.handle,))


def _continues(held: KeyedHandle, wanted: KeyedHandle) -> bool:
    """Whether `wanted` is `held` with more files after it, on the same base or a new one, and under the same state ids.

    A file is one attempt's alone: where the last one is named, the state after it is the one held.
    """
    return held.format == wanted.format and set(held.schemas) == set(wanted.schemas) and \
        (not held.files or held.files[-1] in wanted.files)


@dataclass
class Slot:
    """One open backend. `position` is None while a task changes it, and stays None if that task fails."""

    backend: Backend
    keyed: KeyedBackend
    clock: ManualClock
    directory: Path | None
    position: Position | None = None
    base: Making | None = None


@dataclass(frozen=True)
class SlotKey:
    """What a slot is for: where the operator's state lives, and which key groups."""

    url: str
    uid: str
    key_groups: KeyGroupRange
    backend: str


@dataclass
class Lease:
    """A backend at the wanted epoch, in the hands of one task. `settle` gives it back; without it, it is discarded."""

    slot: Slot
    restored: str
    milliseconds: int
    settled: Position | None = None

    @property
    def keyed(self) -> KeyedBackend:
        return self.slot.keyed

    @property
    def clock(self) -> ManualClock:
        return self.slot.clock

    def settle(self, attempt: str, handle: KeyedHandle, checkpoint_id: int) -> None:
        """The state is stored under this handle: the next batch may go on from here if its epoch names the attempt."""
        self.settled = Position(attempt, handle, checkpoint_id)


@dataclass
class Wanted:
    """What a task needs of the cache."""

    key: SlotKey
    key_type: StateType
    max_parallelism: int
    base: Manifest | None
    source: SnapshotSource
    options: Mapping[str, Any] = field(default_factory=dict)
    epoch: int = 0
    new_base: BaseTarget | None = None
    """Where a new base of the state after this epoch may go, made beside later batches."""


class WorkerCache:
    """The slots of this process. `limit` is how many stay open; the least recently used are closed first."""

    def __init__(self, limit: int = 8) -> None:
        self.limit = limit
        self._slots: OrderedDict[SlotKey, Slot] = OrderedDict()

    @contextlib.contextmanager
    def lease(self, wanted: Wanted) -> Iterator[Lease]:
        """A backend that holds the wanted state; kept afterwards only if the lease was settled."""
        began = time.perf_counter()
        slot, how = self._ready(wanted)
        lease = Lease(slot, how, round((time.perf_counter() - began) * 1000))
        slot.position = None
        try:
            yield lease
        finally:
            if lease.settled is None:
                _close(slot)
            else:
                slot.position = lease.settled
                self._slots[wanted.key] = slot
                self._evict()
                if slot.base is None and wanted.new_base is not None and wanted.key in self._slots:
                    slot.base = begin(slot.keyed, wanted.new_base, wanted.epoch)

    def _ready(self, wanted: Wanted) -> tuple[Slot, str]:
        """The slot for a task, taken out of the cache."""
        slot = self._slots.pop(wanted.key, None)
        decision = decide_warmth(slot.position if slot else None, wanted.base, wanted.key.key_groups)
        if slot is not None and isinstance(decision, UseAsIs):
            assert slot.position is not None
            slot.keyed.checkpoint_completed(slot.position.checkpoint_id)
            _adopt_base(slot, wanted.epoch)
            return slot, "cached"
        if slot is not None and isinstance(decision, CatchUp):
            if slot.keyed.catch_up(decision.handle, wanted.source):
                _adopt_base(slot, wanted.epoch)
                return slot, "caught up"
            decision = Restore((decision.handle,))
        if slot is not None:
            _close(slot)
        assert isinstance(decision, Restore)
        return self._restored(wanted, decision.handles), "restored" if decision.handles else "empty"

    def _restored(self, wanted: Wanted, handles: Sequence[KeyedHandle]) -> Slot:
        options = dict(wanted.options)
        directory = None
        if wanted.key.backend == "rocksdb":
            directory = local_folder() / f"{wanted.key.key_groups}-{time.time_ns():x}"
            options["directory"] = str(directory)
        backend = create_backend(wanted.key.backend, **options)
        clock = ManualClock(0)
        try:
            if isinstance(wanted.source, WarmFiles):
                wanted.source.bring(file for handle in handles for file in handle.files)
            keyed = backend.keyed(uid=wanted.key.uid, key_type=wanted.key_type,
                                  max_parallelism=wanted.max_parallelism, key_groups=wanted.key.key_groups,
                                  clock=clock, restore=list(handles), source=wanted.source)
            if wanted.new_base is not None:
                keyed.log_patience = PATIENCE
            if len(handles) == 1:
                keyed.build_on(handles[0])
        except BaseException:
            backend.close()
            if directory is not None:
                shutil.rmtree(directory, ignore_errors=True)
            raise
        return Slot(backend, keyed, clock, directory)

    def _evict(self) -> None:
        while len(self._slots) > self.limit:
            _, slot = self._slots.popitem(last=False)
            _close(slot)

    def close(self) -> None:
        while self._slots:
            _close(self._slots.popitem()[1])


def _adopt_base(slot: Slot, epoch: int) -> None:
    """Build on the new base from this epoch on, if there is one; one that came to nothing makes way for the next."""
    if slot.base is not None and slot.base.is_over(epoch):
        slot.base = None


def _close(slot: Slot) -> None:
    if slot.base is not None:
        slot.base.give_up()
    try:
        slot.backend.close()
    finally:
        if slot.directory is not None:
            shutil.rmtree(slot.directory, ignore_errors=True)



_folder: Path | None = None


def local_folder() -> Path:
    """This process' folder below Spark's local directories; removed at exit, or by the next worker that finds us gone."""
    global _folder
    if _folder is None or not _folder.exists():
        root = local_root()
        sweep_dead(root)
        _folder = root / f"{FOLDER_PREFIX}{os.getpid()}-{_started(os.getpid())}"
        _folder.mkdir(parents=True, exist_ok=True)
        atexit.register(shutil.rmtree, str(_folder), ignore_errors=True)
    return _folder


def local_root() -> Path:
    """The first of Spark's local directories as the worker sees them, else the system's temporary folder."""
    import tempfile

    configured = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0].strip()
    return Path(configured) if configured else Path(tempfile.gettempdir())


def sweep_dead(root: Path) -> None:
    """Remove the folders of workers that are no more."""
    for folder in root.glob(f"{FOLDER_PREFIX}*-*") if root.is_dir() else ():
        pid, _, started = folder.name.removeprefix(FOLDER_PREFIX).partition("-")
        if pid.isdigit() and _started(int(pid)) != started:
            shutil.rmtree(folder, ignore_errors=True)


def _started(pid: int) -> str:
    """When a process started, in its kernel's ticks; empty if there is no such process. A pid alone may be reused."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return ""
        except OSError:
            pass
        return "0"

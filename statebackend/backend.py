"""The contract of a backend: where keyed and operator state live, how they are snapshotted, how they come back.

A snapshot has two parts. `snapshot()` is the synchronous one: it fixes what is in the snapshot, in time that does
not grow with the state, on the thread that owns the backend. `PendingSnapshot.run()` is the asynchronous one: it
writes files, on any thread, while the owner goes on. Later writes are never in it.

Restore takes any set of handles, written by any backend, and keeps what falls into the key-group range.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any

from statebackend.clock import Clock
from statebackend.descriptors import StateDescriptor
from statebackend.errors import InvalidRequest
from statebackend.files import SnapshotSource, SnapshotTarget, StateFile
from statebackend.keygroups import KeyGroupRange
from statebackend.operator_state import OperatorStateStore
from statebackend.schema import StateSchema
from statebackend.state import State
from statebackend.timers import TimerService
from statebackend.types import StateType


@dataclass(frozen=True)
class KeyedHandle:
    """A finished snapshot of one keyed backend: enough to restore it, or any part of it, anywhere.

    format    "entries": `files` are entry files (docs/formats/entries.md) replayed in order; or the native format
              of a backend, e.g. "rocksdb": table files, then entry files on top, as `meta` tells.
    key_type  JSON form of the key's type; schemas carry all other types.
    meta      JSON values that the writing format needs, e.g. its version and the next list sequence.
    new_bytes bytes this snapshot stored anew; the rest was stored by earlier ones.
    """

    format: str
    key_groups: KeyGroupRange
    max_parallelism: int
    key_type: Mapping[str, Any]
    schemas: tuple[StateSchema, ...]
    files: tuple[StateFile, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)
    new_bytes: int = 0

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": self.format,
            "key_groups": [self.key_groups.first, self.key_groups.last],
            "max_parallelism": self.max_parallelism,
            "key_type": dict(self.key_type),
            "schemas": [schema.to_json() for schema in self.schemas],
            "files": [file.to_json() for file in self.files],
            "meta": dict(self.meta),
            "new_bytes": self.new_bytes,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> KeyedHandle:
        first, last = data["key_groups"]
        return cls(
            str(data["format"]), KeyGroupRange(int(first), int(last)), int(data["max_parallelism"]),
            dict(data["key_type"]), tuple(StateSchema.from_json(schema) for schema in data["schemas"]),
            tuple(StateFile.from_json(file) for file in data["files"]), dict(data["meta"]), int(data["new_bytes"]))


class PendingSnapshot(ABC):
    """A snapshot whose content is fixed and whose files are still to be written."""

    @abstractmethod
    def run(self) -> KeyedHandle:
        """Write the files; once, on any thread. A failure leaves the backend usable and the next snapshot right."""

    @abstractmethod
    def cancel(self) -> None:
        """Give it up, before or while `run` goes on; `run` then raises `Conflict`. Idempotent."""


class PendingBase(ABC):
    """A new base for incremental snapshots: what the last snapshot holds, whole, and still to be written."""

    @abstractmethod
    def run(self) -> None:
        """Write the files; once, on any thread. A failure leaves the backend as it is, on its old base."""

    @abstractmethod
    def cancel(self) -> None:
        """Give it up, before or while `run` goes on; `run` then raises `Conflict`. Idempotent."""

    @abstractmethod
    def adopt(self) -> bool:
        """On the owner's thread, after `run`: the next snapshot is this base and the changes since.

        False: the backend has left the chain that this was to replace, and nothing will name its files.
        """


class KeyedBackend(ABC):
    """The keyed state of one operator subtask, for a range of key groups. Belongs to one thread.

    log_patience  how many times its usual size the log of incremental snapshots may reach before a snapshot stores
                  everything anew. Callers that see to new bases (`new_base`) raise it, so that no snapshot has to.
    """

    log_patience: int = 1
    uid: str
    key_type: StateType
    max_parallelism: int
    key_groups: KeyGroupRange
    clock: Clock

    @abstractmethod
    def state(self, descriptor: StateDescriptor, *, namespace_type: Any = None) -> State:
        """Register a state, or get it again. Restored state of that name is checked, migrated or refused here.

        A second registration under one name with other types is `InvalidRequest`.
        """

    @abstractmethod
    def set_current_key(self, key: Any) -> None:
        """The key of the following per-record calls. None and keys of another type are refused."""

    @property
    @abstractmethod
    def current_key(self) -> Any: ...

    def unset_current_key(self) -> None:
        """From now on there is no current key, and per-record calls are refused. A backend may leave the last one."""

    @property
    @abstractmethod
    def timers(self) -> TimerService:
        """The timers of this operator: keyed state like any other, and part of each snapshot."""

    @property
    @abstractmethod
    def watermark(self) -> int:
        """Event time of this operator: what event-time TTL counts. Starts at the smallest 64-bit number."""

    @abstractmethod
    def advance_watermark(self, watermark_ms: int) -> None:
        """Move event time forward; never back."""

    @abstractmethod
    def schemas(self) -> tuple[StateSchema, ...]:
        """Every state held here, registered or only restored, timers included where there are any."""

    @abstractmethod
    def entry_counts(self) -> dict[str, int]:
        """Stored entries by state name (an estimate where counting would scan)."""

    @abstractmethod
    def snapshot(self, checkpoint_id: int, target: SnapshotTarget, *, full: bool = False) -> PendingSnapshot:
        """The synchronous part. Incremental over the last completed snapshot where the backend can; not if `full`."""

    @abstractmethod
    def checkpoint_completed(self, checkpoint_id: int) -> None:
        """The checkpoint is durable: later snapshots may build on it. Older ones are no longer built upon."""

    @abstractmethod
    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        """The checkpoint will never be: nothing may build on it, and its changes belong to the next one."""

    def build_on(self, handle: KeyedHandle) -> bool:
        """The next incremental snapshot may build on the files of `handle`, from which alone this was just restored.

        For callers that keep those files as long as any snapshot names them. False: the next one stores all anew.
        """
        return False

    def catch_up(self, handle: KeyedHandle, source: SnapshotSource) -> bool:
        """Bring a backend, unchanged since its last snapshot, forward to `handle`, which is that snapshot and more.

        The last file of the last snapshot's handle is among the files of `handle`; those behind it are entry files. They
        are applied as stored state, not as changes, and the next incremental snapshot builds on `handle`. False: this
        backend can't; nothing has changed, and the caller restores anew.
        """
        return False

    def new_base(self, target: SnapshotTarget) -> PendingBase | None:
        """The synchronous part of a new base, right after a snapshot has run; None where the log is not long enough.

        Like a snapshot it takes as long for any state. One at a time.
        """
        return None

    @abstractmethod
    def sweep(self, limit: int = 2048) -> int:
        """One tick of background clean-up: examine up to `limit` entries, remove the expired, return how many."""

    @abstractmethod
    def close(self) -> None: ...


class Backend(ABC):
    """Keyed and operator state of one process or subtask. A fourth backend registers under `holdfast.backends`."""

    name: str

    @abstractmethod
    def keyed(self, *, uid: str, key_type: Any, max_parallelism: int = 128, key_groups: KeyGroupRange | None = None,
              clock: Clock | None = None, restore: Sequence[KeyedHandle] = (),
              source: SnapshotSource | None = None) -> KeyedBackend:
        """The keyed state of an operator; all key groups unless told. One per uid and range."""

    def operator(self, *, uid: str) -> OperatorStateStore:
        """The operator (list, union, broadcast) state of an operator subtask; held in memory by every backend."""
        return OperatorStateStore(uid)

    @abstractmethod
    def close(self) -> None:
        """Release everything. Idempotent; any later use raises `Closed`."""

    def __enter__(self) -> Backend:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def backend_names() -> list[str]:
    """The names that `create_backend` knows: ours and those of installed plug-ins."""
    return sorted({*_BUILT_IN, *(entry.name for entry in entry_points(group="holdfast.backends"))})


def create_backend(name: str, **options: Any) -> Backend:
    """A backend by name: `memory`, `filesystem`, `rocksdb`, or one that a plug-in registered."""
    if name in _BUILT_IN:
        module, attribute = _BUILT_IN[name].split(":")
        factory = getattr(__import__(module, fromlist=[attribute]), attribute)
    else:
        found = [entry for entry in entry_points(group="holdfast.backends") if entry.name == name]
        if not found:
            raise InvalidRequest(f"there is no state backend {name!r}", hint=f"use one of {', '.join(backend_names())}")
        factory = found[0].load()
    try:
        backend: Backend = factory(**options)
    except TypeError as error:
        raise InvalidRequest(f"the {name} backend does not take these options: {error}") from error
    return backend


_BUILT_IN = {
    "memory": "statebackend.memory:MemoryBackend",
    "filesystem": "statebackend.filesystem:FilesystemBackend",
    "rocksdb": "statebackend.rocksdb:RocksDBBackend",
}

__all__ = ["Backend", "KeyedBackend", "KeyedHandle", "PendingBase", "PendingSnapshot", "backend_names", "create_backend"]

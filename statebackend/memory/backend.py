"""The memory backend: state as Python objects, full snapshots, capped in size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from statebackend.backend import Backend, KeyedBackend, KeyedHandle
from statebackend.clock import Clock, SystemClock
from statebackend.durations import size_bytes
from statebackend.errors import Closed, Conflict, InvalidRequest
from statebackend.files import SnapshotSource
from statebackend.keygroups import KeyGroupRange, require_max_parallelism
from statebackend.memory.keyed import MemoryKeyed, keyed_type
from statebackend.operator_state import OperatorStateStore


class TablesBackend(Backend):
    """What the memory and the filesystem backend share: they differ in their snapshots only."""

    incremental = False

    def __init__(self, *, max_state_size: int | None, max_value_bytes: int | str) -> None:
        self._max_state_size = max_state_size
        self._max_value_bytes = size_bytes(max_value_bytes)
        self._keyed: dict[tuple[str, KeyGroupRange], MemoryKeyed] = {}
        self._closed = False

    def keyed(self, *, uid: str, key_type: Any, max_parallelism: int = 128, key_groups: KeyGroupRange | None = None,
              clock: Clock | None = None, restore: Sequence[KeyedHandle] = (),
              source: SnapshotSource | None = None) -> KeyedBackend:
        self._require_open()
        require_max_parallelism(max_parallelism)
        held = key_groups if key_groups is not None else KeyGroupRange(0, max_parallelism - 1)
        if held.last >= max_parallelism:
            raise InvalidRequest("a key-group range lies outside the max parallelism", operator=uid, found=str(held),
                                 expected=f"0-{max_parallelism - 1}")
        known = self._keyed.get((uid, held))
        if known is not None and not known.closed:
            raise Conflict("this operator's keyed state is already open here", operator=uid, found=str(held),
                           hint="close it first, or use another uid")
        if restore and source is None:
            raise InvalidRequest("a restore needs the source of its files", operator=uid)
        keyed = MemoryKeyed(uid=uid, key_type=keyed_type(key_type), max_parallelism=max_parallelism, key_groups=held,
                            clock=clock or SystemClock(), incremental=self.incremental,
                            max_state_size=self._max_state_size, max_value_bytes=self._max_value_bytes)
        if restore and source is not None:
            keyed.restore(restore, source)
        self._keyed[uid, held] = keyed
        return keyed

    def operator(self, *, uid: str) -> OperatorStateStore:
        self._require_open()
        return super().operator(uid=uid)

    def _require_open(self) -> None:
        if self._closed:
            raise Closed(f"the {self.name} backend has been closed")

    def close(self) -> None:
        self._closed = True
        for keyed in self._keyed.values():
            keyed.close()
        self._keyed = {}


class MemoryBackend(TablesBackend):
    """State in memory; snapshots are full, and refused for a state that is larger than `max_state_size`.

    `directory` is taken, so that one call serves every backend, and not used: nothing of the state is on disk.
    """

    name = "memory"

    def __init__(self, directory: str | Path | None = None, *, max_state_size: int | str = "5MiB",
                 max_value_bytes: int | str = "64MiB") -> None:
        super().__init__(max_state_size=size_bytes(max_state_size), max_value_bytes=max_value_bytes)

"""The RocksDB backend: where its databases live, and what they share."""

from __future__ import annotations

import re
import shutil
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from statebackend.backend import Backend, KeyedHandle
from statebackend.clock import Clock, SystemClock
from statebackend.errors import Closed, Conflict, InvalidRequest
from statebackend.files import SnapshotSource
from statebackend.keygroups import KeyGroupRange, require_max_parallelism
from statebackend.operator_state import OperatorStateStore
from statebackend.rocksdb.keyed import RocksDBKeyed
from statebackend.rocksdb.lock import FolderLock
from statebackend.rocksdb.options import RocksDBOptions
from statebackend.rocksdb.store import shared_memory
from statebackend.types import state_type


class RocksDBBackend(Backend):
    """State larger than memory, in RocksDB databases below `directory` (a temporary folder unless told).

    The folder is working space: what is durable is in checkpoints. One process holds it at a time. Options are those
    of `RocksDBOptions`.
    """

    name = "rocksdb"

    def __init__(self, directory: str | Path | None = None, **options: Any) -> None:
        try:
            self.options = RocksDBOptions(**options)
        except TypeError as error:
            raise InvalidRequest(f"the rocksdb backend does not take these options: {error}") from error
        limit = self.options.memory_limit
        self.memory = shared_memory(int(limit) if limit is not None else None)
        self._temporary = directory is None
        self.directory = Path(tempfile.mkdtemp(prefix="holdfast-rocksdb-")) if directory is None else Path(directory)
        self._lock = FolderLock(self.directory)
        self._keyed: list[RocksDBKeyed] = []
        self._closed = False

    def keyed(self, *, uid: str, key_type: Any, max_parallelism: int = 128, key_groups: KeyGroupRange | None = None,
              clock: Clock | None = None, restore: Sequence[KeyedHandle] = (),
              source: SnapshotSource | None = None) -> RocksDBKeyed:
        self._require_open()
        require_max_parallelism(max_parallelism)
        groups = key_groups or KeyGroupRange(0, max_parallelism - 1)
        if groups.last >= max_parallelism:
            raise InvalidRequest("a key-group range lies outside the max parallelism", uid=uid, found=str(groups),
                                 expected=f"0..{max_parallelism - 1}")
        kind = state_type(key_type)
        kind.require_key()
        for other in self._keyed:
            if other.uid == uid and other.key_groups.intersect(groups) is not None:
                raise Conflict("the keyed state of this operator is open already", uid=uid, found=str(other.key_groups))
        home = self.directory / f"{_folder_name(uid)}-{groups}-{uuid.uuid4().hex[:8]}"
        try:
            keyed = RocksDBKeyed(home, self.options, uid=uid, key_type=kind, max_parallelism=max_parallelism,
                                 key_groups=groups, clock=clock or SystemClock(), handles=tuple(restore),
                                 source=source, on_close=self._forget)
        except BaseException:
            shutil.rmtree(home, ignore_errors=True)
            raise
        self._keyed.append(keyed)
        return keyed

    def operator(self, *, uid: str) -> OperatorStateStore:
        self._require_open()
        return super().operator(uid=uid)

    def _forget(self, keyed: RocksDBKeyed) -> None:
        if keyed in self._keyed:
            self._keyed.remove(keyed)

    def _require_open(self) -> None:
        if self._closed:
            raise Closed("this state backend has been closed", path=str(self.directory))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for keyed in list(self._keyed):
            keyed.close()
        self._lock.release()
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)


def _folder_name(uid: str) -> str:
    """A readable folder name for an operator; uniqueness comes from what follows it."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", uid)[:40] or "operator"

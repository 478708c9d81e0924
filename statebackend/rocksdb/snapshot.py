"""The asynchronous part of a snapshot: settle what was frozen, then store a materialisation, a delta, or all entries."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from statebackend.backend import KeyedHandle, PendingSnapshot
from statebackend.entries import write_entries
from statebackend.errors import Conflict, HoldfastError, Unavailable
from statebackend.files import SnapshotTarget, StateFile
from statebackend.keygroups import KeyGroupRange
from statebackend.rocksdb.changelog import Changelog, batch_of, merged_changes
from statebackend.rocksdb.handles import FORMAT, Chain, StoredPart
from statebackend.rocksdb.store import Row, Store
from statebackend.rocksdb.writeback import Generation, WriteBack
from statebackend.schema import StateSchema
from statebackend.types import StateType

if TYPE_CHECKING:
    from collections.abc import Iterable

ROWS = 8_192
KEPT = ("CURRENT", "IDENTITY", "rocksdict-config.json")
LIVE = Callable[[bytes, bytes], bool]
"""Whether an entry, given its state id and its value, belongs into a full snapshot."""


@dataclass(frozen=True)
class Description:
    """What a handle says beside its files, fixed at the barrier."""

    key_groups: KeyGroupRange
    max_parallelism: int
    key_type: StateType
    schemas: tuple[StateSchema, ...]
    next_sequence: int

    def handle(self, format: str, chain: Chain, new_bytes: int) -> KeyedHandle:
        return KeyedHandle(format, self.key_groups, self.max_parallelism, self.key_type.to_json(), self.schemas,
                           chain.files(), chain.meta(self.next_sequence), new_bytes)


class RocksSnapshot(PendingSnapshot):
    """Common to the three ways: run once, cancel at any time, tell the backend what came of it."""

    def __init__(self, checkpoint_id: int, engine: WriteBack, generation: Generation, target: SnapshotTarget,
                 description: Description, finished: Callable[[int, Generation, Chain | None], None]) -> None:
        self._checkpoint_id = checkpoint_id
        self._engine = engine
        self._generation = generation
        self._target = target
        self._description = description
        self._finished = finished
        self._lock = threading.Lock()
        self._started = False
        self._cancelled = False

    def run(self) -> KeyedHandle:
        self._go_on()
        with self._lock:
            if self._started:
                raise Conflict("a snapshot can run only once", checkpoint_id=self._checkpoint_id)
            self._started = True
        try:
            self._go_on()
            self._engine.settle(self._generation)
            self._go_on()
            handle, chain = self._store()
            self._go_on()
        except HoldfastError as error:
            error.context.setdefault("checkpoint_id", self._checkpoint_id)
            raise
        except OSError as error:
            raise Unavailable(f"a snapshot can't be written: {error}", checkpoint_id=self._checkpoint_id) from error
        finally:
            self._drop_capture()
        self._finished(self._checkpoint_id, self._generation, chain)
        return handle

    def cancel(self) -> None:
        self._cancelled = True
        with self._lock:
            started, self._started = self._started, True
        if not started:
            self._drop_capture()

    def _go_on(self) -> None:
        if self._cancelled:
            raise Conflict("the snapshot was cancelled", checkpoint_id=self._checkpoint_id)

    def _drop_capture(self) -> None:
        """A capture is only links; one that was not made yet is no longer wanted."""
        directory, self._generation.capture = self._generation.capture, None
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)

    @property
    def _capture(self) -> Path:
        directory = self._generation.capture
        assert directory is not None
        return directory

    def _store(self) -> tuple[KeyedHandle, Chain | None]:
        raise NotImplementedError

    def _checked(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            self._go_on()
            yield batch


class DeltaSnapshot(RocksSnapshot):
    """The changes since the last completed checkpoint, on top of its files."""

    def since(self, chain: Chain, logs: list[Changelog]) -> DeltaSnapshot:
        self._chain, self._logs = chain, logs
        return self

    def _store(self) -> tuple[KeyedHandle, Chain | None]:
        log = self._chain.log
        added = self._upload_changes()
        chain = Chain(self._chain.parts, log if added is None else (*log, added))
        format = FORMAT if chain.parts else "entries"
        return self._description.handle(format, chain, 0 if added is None else added.size), chain

    def _upload_changes(self) -> StateFile | None:
        logs = [log for log in self._logs if log.rows]
        if not logs:
            return None
        hint = f"delta-{self._description.key_groups}"
        if len(logs) == 1 and logs[0].runs == 1:
            return self._target.upload(logs[0].path, hint, shared=True)
        return write_entries(self._target, hint, self._checked(merged_changes(logs)), shared=True)


class MaterialisedSnapshot(RocksSnapshot):
    """The table files of all databases; those that the last completed checkpoint stored are not stored again."""

    def reusing(self, stored: Mapping[tuple[int, str, int], StateFile]) -> MaterialisedSnapshot:
        self._stored = stored
        self.uploaded: dict[tuple[int, str, int], StateFile] = {}
        return self

    def _store(self) -> tuple[KeyedHandle, Chain | None]:
        parts, new_bytes = [], 0
        for part in self._engine.parts.parts:
            files: dict[str, StateFile] = {}
            for path in sorted((self._capture / str(part.number)).iterdir()):
                if not _belongs(path):
                    continue
                self._go_on()
                identity = (part.number, path.name, path.stat().st_size)
                file = self._stored.get(identity) if path.suffix == ".sst" else None
                if file is None:
                    file = self._target.upload(path, f"{part.number}-{path.name}", shared=True)
                    new_bytes += file.size
                if path.suffix == ".sst":
                    self.uploaded[identity] = file
                files[path.name] = file
            parts.append(StoredPart(part.key_groups, files))
        chain = Chain(tuple(parts))
        return self._description.handle(FORMAT, chain, new_bytes), chain


class FullSnapshot(RocksSnapshot):
    """Every entry in one entry file that needs nothing else; what has expired is left out."""

    def keeping(self, live: LIVE | None) -> FullSnapshot:
        self._live = live
        return self

    def _store(self) -> tuple[KeyedHandle, Chain | None]:
        file = write_entries(self._target, f"full-{self._description.key_groups}", self._checked(self._batches()),
                             shared=False)
        return self._description.handle("entries", Chain(log=(file,)), file.size), None

    def _batches(self) -> Iterator[pa.RecordBatch]:
        for part in self._engine.parts.parts:
            yield from part_batches(self._capture / str(part.number), part.key_groups, self._live)


def part_batches(directory: Path, key_groups: KeyGroupRange, live: LIVE | None = None) -> Iterator[pa.RecordBatch]:
    """The entries of a stored database in a range of key groups, sorted, as batches."""
    store = Store(directory, read_only=True, create=False)
    try:
        scan = store.scan(key_groups.first.to_bytes(2, "big"), (key_groups.last + 1).to_bytes(2, "big"),
                          readahead=2 << 20)
        while rows := scan.take(ROWS):
            kept: list[Row] = rows if live is None else [row for row in rows if live(row[0][2:4], row[1])]
            if kept:
                yield batch_of(kept)
    finally:
        store.close()


def _belongs(path: Path) -> bool:
    """Whether a file of a capture is needed to open it again; write-ahead logs are empty and left out."""
    return path.suffix == ".sst" or path.name in KEPT or path.name.startswith(("MANIFEST-", "OPTIONS-"))

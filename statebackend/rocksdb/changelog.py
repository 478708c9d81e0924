"""The changes of one epoch (the time between two barriers) in a local file: what an incremental snapshot uploads.

Entries reach it as they are written to RocksDB, in runs that are each sorted by key. An epoch with a single run is
uploaded as it is; several runs, or several epochs, are merged so that each key appears once.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from statebackend.entries import BATCH_ROWS, ENTRY_SCHEMA, OP_DELETE, OP_PUT, entry_batch, merge_entries
from statebackend.errors import Unavailable
from statebackend.rocksdb.store import Operation


class Changelog:
    """Sorted runs of operations in one local entry file. Written by one thread at a time; read once sealed."""

    def __init__(self, path: Path, *, enabled: bool) -> None:
        self.path = path
        self.rows = 0
        self.complete = enabled
        """False once changes were left out: the epoch can then only be covered by a materialisation."""
        self._runs: list[int] = []
        self._batches = 0
        self._sealed_bytes = 0
        self._writer: Any = None
        self._sink: Any = None
        self._unlink = weakref.finalize(self, _unlink, str(path))

    @property
    def bytes(self) -> int:
        """What the file holds so far. Asking a file that is being written lets other threads take the interpreter: the
        owner may ask while a snapshot's thread seals it."""
        sink = self._sink
        try:
            return self._sealed_bytes if sink is None else int(sink.tell())
        except ValueError:  # it was closed meanwhile
            return self._sealed_bytes

    @property
    def runs(self) -> int:
        return sum(begin < self._batches for begin in self._runs)

    def start_run(self) -> None:
        """The operations that follow are sorted among themselves."""
        if self.complete and (not self._runs or self._runs[-1] != self._batches):
            self._runs.append(self._batches)

    def append(self, operations: Sequence[Operation]) -> None:
        if not self.complete or not operations:
            return
        try:
            if self._writer is None:
                self._sink = pa.OSFile(str(self.path), "wb")
                self._writer = pa.ipc.new_file(self._sink, ENTRY_SCHEMA,
                                               options=pa.ipc.IpcWriteOptions(compression="lz4"))
            for begin in range(0, len(operations), BATCH_ROWS):
                self._writer.write_batch(batch_of(operations[begin:begin + BATCH_ROWS]))
                self._batches += 1
        except OSError as error:
            raise Unavailable(f"the local log of changes can't be written: {error}", path=str(self.path),
                              hint="check free space") from error
        self.rows += len(operations)

    def give_up(self) -> None:
        """Stop recording, because a materialisation will cover the epoch; the file is removed."""
        self.complete = False
        self.seal()
        self._runs, self._batches, self._sealed_bytes, self.rows = [], 0, 0, 0
        _unlink(str(self.path))

    def seal(self) -> None:
        """No more operations will come."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(OSError):
                writer.close()
                self._sealed_bytes = self._sink.tell()
            sink, self._sink = self._sink, None
            sink.close()

    def read_runs(self) -> list[Iterator[pa.RecordBatch]]:
        """Each run, oldest first, as sorted batches."""
        self.seal()
        if not self._batches:
            return []
        reader = pa.ipc.open_file(pa.memory_map(str(self.path), "r"))
        ends = [*self._runs[1:], self._batches]
        return [_batches(reader, begin, end) for begin, end in zip(self._runs, ends) if begin < end]


def merged_changes(logs: Sequence[Changelog]) -> Iterator[pa.RecordBatch]:
    """The last operation of each key over several epochs (oldest first), sorted by key; deletes are kept."""
    return merge_entries([run for log in logs for run in log.read_runs()], keep_deletes=True)


def _batches(reader: Any, begin: int, end: int) -> Iterator[pa.RecordBatch]:
    for index in range(begin, end):
        yield reader.get_batch(index)


def batch_of(operations: Sequence[Operation]) -> pa.RecordBatch:
    """Operations as an entry batch. Not by `zip(*operations)`: an iterator for each row, all alive at once, has the
    interpreter collect garbage in everything the process holds, which stops every thread for tens of milliseconds."""
    keys = pa.array([key for key, _ in operations], pa.binary())
    values = pa.array([value for _, value in operations], pa.binary())
    ops = [OP_DELETE if value is None else OP_PUT for _, value in operations] if values.null_count else None
    return entry_batch(keys, values, ops)


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)

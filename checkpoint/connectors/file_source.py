"""A source of files: JSON lines, CSV or Parquet, by path, glob or fsspec URL; positions are operator state."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import xxhash

from checkpoint.connectors.base import Source, SourceBatch, SourceReader
from checkpoint.connectors.file_formats import FORMATS, FileReader, open_reader
from checkpoint.connectors.files import expand, is_local, local_path
from checkpoint.dataflow.functions import OpenContext, ProcessContext
from checkpoint.runtime.contracts import SourceStatus
from statebackend.descriptors import ListStateDescriptor
from statebackend.durations import duration_ms
from statebackend.errors import CorruptData, InvalidRequest

log = logging.getLogger("holdfast.connectors")
_STATE = ListStateDescriptor("files", tuple[str, int, bool])


class FileSource(Source):
    """All records of some files, each file read in order by one subtask.

    paths    a path, glob, folder or fsspec URL, or several
    format   jsonl, csv or parquet; by the file's suffix unless given
    watch    look for new files and new lines at this interval, without end; None reads what is there and ends

    A restored job goes on where it was, and also reads files (and lines) that have come since.
    """

    def __init__(self, paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, format: str | None = None,
                 watch: str | int | timedelta | None = None, record_type: Any = None) -> None:
        given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
        if not given:
            raise InvalidRequest("FileSource needs at least one path")
        if format is not None and format not in FORMATS:
            raise InvalidRequest("FileSource does not know this format", expected=" or ".join(FORMATS), found=format)
        named = [os.fspath(path) for path in given]
        self.paths = [local_path(path) if is_local(path) else path for path in named]
        self.format, self.record_type = format, record_type
        self.watch_ms = duration_ms(watch) if watch is not None else None
        self.bounded = watch is None

    def enumerate(self) -> list[str]:
        found = expand(self.paths)
        if not found and self.bounded:
            log.warning("FileSource found no file: %s", ", ".join(self.paths))
        return found

    def reader(self, ctx: OpenContext) -> SourceReader:
        return _FilesReader(self, ctx)


class _FilesReader(SourceReader):
    """State: (path, position, read to its end) of each file; every subtask restores all and takes its share."""

    def __init__(self, source: FileSource, ctx: OpenContext) -> None:
        self._source, self._ctx = source, ctx
        self._state = ctx.operator_state.union_list_state(_STATE)
        restored = {path: (position, done) for path, position, done in self._state.get()}
        listed = ctx.enumeration if ctx.enumeration is not None else source.enumerate()
        known = sorted(set(restored) | set(listed))
        self._known = set(known)
        self._positions = {path: restored.get(path, (0, False))[0]
                           for index, path in enumerate(known) if index % ctx.parallelism == ctx.subtask_index}
        self._ended = {path for path, (_, done) in restored.items() if done}
        gone = set(restored) - set(listed)
        self._queue = [path for path in self._positions if path not in gone or not restored[path][1]]
        self._done = set(self._positions) - set(self._queue)
        self._reader: FileReader | None = None
        self._told: set[str] = set()
        self._clock = ctx.timer_service().current_processing_time if isinstance(ctx, ProcessContext) else None
        self._looked_at = self._clock() if self._clock is not None else 0

    def poll(self, limit: int) -> SourceBatch:
        while True:
            if self._reader is None and not self._open_next():
                return self._at_end()
            assert self._reader is not None
            values = self._reader.read(limit)
            if values:
                return SourceBatch(values, SourceStatus.MORE)
            self._leave()

    def snapshot(self, checkpoint_id: int) -> None:
        if self._reader is not None:
            self._positions[self._reader.path] = self._reader.position
        self._state.update((path, position, path in self._done) for path, position in self._positions.items())

    def wake_at_ms(self) -> int | None:
        if self._source.watch_ms is None or self._queue or self._reader is not None:
            return None
        return self._looked_at + self._source.watch_ms

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()

    def _open_next(self) -> bool:
        if not self._queue:
            return False
        path = self._queue.pop(0)
        self._reader = open_reader(path, self._positions[path], self._source.format, self._source.record_type,
                                   growing=self._source.watch_ms is not None)
        if self._reader.is_short:
            self._tell_short(path)
        return True

    def _tell_short(self, path: str) -> None:
        """A file that was read to its end may be emptied by whoever owns it; of another one, records are missing."""
        if path not in self._ended:
            raise CorruptData("a file is shorter than what was read of it", path=path, position=self._positions[path],
                              hint="put the file back as it was, or give the new records a file of their own")
        if path not in self._told:
            self._told.add(path)
            log.warning("%s is shorter than what was read of it (up to %d): it was cut or replaced, and what it holds "
                        "before that position is not read; give new records a file of their own",
                        path, self._positions[path])

    def _leave(self) -> None:
        assert self._reader is not None
        path = self._reader.path
        self._positions[path] = self._reader.position
        self._done.add(path)
        self._ended.add(path)
        self._reader.close()
        self._reader = None

    def _at_end(self) -> SourceBatch:
        watch = self._source.watch_ms
        if watch is None or self._clock is None:
            return SourceBatch([], SourceStatus.ENDED)
        now = self._clock()
        if now < self._looked_at or now - self._looked_at >= watch:
            self._looked_at = now
            self._look_again()
        return SourceBatch([], SourceStatus.MORE if self._queue else SourceStatus.IDLE)

    def _look_again(self) -> None:
        """New files go to the subtask that a hash of their name says, so that all decide alike; own files may have grown."""
        index, parallelism = self._ctx.subtask_index, self._ctx.parallelism
        for path in self._source.enumerate():
            if path in self._positions:
                self._queue.append(path)
            elif path not in self._known and xxhash.xxh64_intdigest(path.encode()) % parallelism == index:
                self._positions[path] = 0
                self._queue.append(path)
            self._known.add(path)

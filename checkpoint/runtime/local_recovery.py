"""Second copies of a subtask's state files on this machine's disk, so that a restart need not fetch them again.

A copy is used only where it is there and its checksum is right; otherwise the checkpoint's own file is read. Copies live
as long as the process that wrote them: a worker that died takes them along.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from pathlib import Path
from typing import BinaryIO

import xxhash

from checkpoint.runtime.contracts import OperatorSnapshot
from statebackend.errors import CorruptData
from statebackend.files import FileWriter, SnapshotSource, SnapshotTarget, StateFile, verify_local


class LocalCopies:
    """The copies of one subtask. Calls come from its thread and from snapshot threads."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.hits = 0
        self._needed: dict[int, set[str]] = {}
        self._made: dict[str, int] = {}
        self._lock = threading.Lock()

    def path_of(self, file_path: str) -> Path:
        return self.directory / xxhash.xxh3_128_hexdigest(file_path.encode())

    def target(self, checkpoint_id: int, target: SnapshotTarget) -> SnapshotTarget:
        """The same target, which leaves a copy of every file here."""
        self.directory.mkdir(parents=True, exist_ok=True)
        return _CopyingTarget(self, checkpoint_id, target)

    def source(self, source: SnapshotSource) -> SnapshotSource:
        return _LocalFirst(self, source)

    def taken(self, checkpoint_id: int, snapshots: tuple[OperatorSnapshot, ...]) -> None:
        """What a snapshot consists of, files of earlier ones included."""
        files = {file.path for snapshot in snapshots for handle in snapshot.keyed for file in handle.files}
        files |= {snapshot.operator.path for snapshot in snapshots if snapshot.operator is not None}
        with self._lock:
            self._needed[checkpoint_id] = files

    def completed(self, checkpoint_id: int) -> None:
        """Only this checkpoint and later ones can be restored from now on: drop what none of them has."""
        with self._lock:
            self._needed = {taken: files for taken, files in self._needed.items() if taken >= checkpoint_id}
            if checkpoint_id not in self._needed:
                return
            keep = {path for files in self._needed.values() for path in files}
            dropped = [path for path, made_for in self._made.items() if made_for <= checkpoint_id and path not in keep]
            for path in dropped:
                del self._made[path]
        for path in dropped:
            self.path_of(path).unlink(missing_ok=True)

    def made(self, file_path: str, checkpoint_id: int) -> None:
        with self._lock:
            self._made[file_path] = checkpoint_id

    def close(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)


class _CopyingTarget:
    def __init__(self, copies: LocalCopies, checkpoint_id: int, target: SnapshotTarget) -> None:
        self._copies, self._checkpoint_id, self._target = copies, checkpoint_id, target

    def create(self, hint: str, *, shared: bool) -> FileWriter:
        return _CopyingWriter(self._copies, self._checkpoint_id, self._target.create(hint, shared=shared))

    def upload(self, local: Path, hint: str, *, shared: bool) -> StateFile:
        stored = self._target.upload(local, hint, shared=shared)
        if stored.inline is None:
            with contextlib.suppress(OSError):  # a copy is a help, never a condition
                os.link(local, self._copies.path_of(stored.path))
                self._copies.made(stored.path, self._checkpoint_id)
        return stored


class _CopyingWriter:
    def __init__(self, copies: LocalCopies, checkpoint_id: int, writer: FileWriter) -> None:
        self._copies, self._checkpoint_id, self._writer = copies, checkpoint_id, writer
        self._temporary = copies.directory / f"{id(self):x}.writing"
        self._stream: BinaryIO | None = None
        with contextlib.suppress(OSError):
            self._stream = open(self._temporary, "wb")  # noqa: SIM115

    def write(self, data: bytes | memoryview) -> int:
        written = self._writer.write(data)
        if self._stream is not None:
            try:
                self._stream.write(data)
            except OSError:
                self._drop()
        return written

    def finish(self) -> StateFile:
        stored = self._writer.finish()
        if self._stream is not None:
            self._stream.close()
            if stored.inline is None:
                with contextlib.suppress(OSError):
                    os.replace(self._temporary, self._copies.path_of(stored.path))
                    self._copies.made(stored.path, self._checkpoint_id)
            self._temporary.unlink(missing_ok=True)
        return stored

    def abort(self) -> None:
        self._writer.abort()
        self._drop()

    def _drop(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self._temporary.unlink(missing_ok=True)


class _LocalFirst:
    def __init__(self, copies: LocalCopies, source: SnapshotSource) -> None:
        self._copies, self._source = copies, source

    def open(self, file: StateFile) -> BinaryIO:
        path = self._good_copy(file)
        return open(path, "rb") if path is not None else self._source.open(file)

    def fetch(self, file: StateFile, local: Path) -> None:
        path = self._good_copy(file)
        if path is None:
            self._source.fetch(file, local)
            return
        try:
            os.link(path, local)
        except OSError:
            shutil.copyfile(path, local)

    def _good_copy(self, file: StateFile) -> Path | None:
        path = self._copies.path_of(file.path)
        if file.inline is not None or not path.is_file():
            return None
        try:
            verify_local(path, file)
        except (CorruptData, OSError):
            return None
        self._copies.hits += 1
        return path

"""Many files at once: parallel upload and download with progress and cancellation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from checkpoint.storage.store import FileStore
from statebackend.errors import Conflict
from statebackend.files import StateFile


@dataclass(frozen=True)
class Progress:
    """How far a transfer has come."""

    files_done: int
    files: int
    bytes_done: int
    bytes: int


class Transfer:
    """Files moved in parallel by a store's threads. `cancel` may be called from any thread; `Conflict` follows.

    `on_progress` is called from the threads that copy, one call at a time.
    """

    def __init__(self, store: FileStore, *, on_progress: Callable[[Progress], None] | None = None) -> None:
        self._store, self._on_progress = store, on_progress
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._files = self._files_done = self._bytes = self._bytes_done = 0

    def cancel(self) -> None:
        """Give the transfer up at its next chunk. Idempotent."""
        self._cancelled.set()

    def upload(self, files: Sequence[tuple[Path, str]], *, shared: bool = False, link: bool = False) -> list[StateFile]:
        """Store local files under paths that are fresh; what was stored before a failure is removed again."""
        self._begin(len(files), sum(local.stat().st_size for local, _ in files))
        try:
            return self._store.map(lambda pair: self._upload_one(pair, shared, link), files)
        except BaseException:
            self._store.delete([path for _, path in files])
            raise

    def download(self, files: Sequence[tuple[StateFile, Path]]) -> None:
        """Copy stored files to local ones, each verified on the way."""
        self._begin(len(files), sum(file.size for file, _ in files))
        self._store.map(self._download_one, files)

    def _upload_one(self, pair: tuple[Path, str], shared: bool, link: bool) -> StateFile:
        local, path = pair
        self._step(0)
        stored = self._store.upload(local, path, shared=shared, link=link, progress=self._step)
        self._end_one()
        return stored

    def _download_one(self, pair: tuple[StateFile, Path]) -> None:
        file, local = pair
        self._step(0)
        if file.inline is not None:
            local.write_bytes(file.inline_verified())
            self._step(file.size)
        else:
            self._store.download(file.path, local, file, progress=self._step)
        self._end_one()

    def _begin(self, files: int, size: int) -> None:
        with self._lock:
            self._files, self._bytes, self._files_done, self._bytes_done = files, size, 0, 0

    def _step(self, size: int) -> None:
        if self._cancelled.is_set():
            raise Conflict("the transfer was cancelled", path=self._store.url)
        with self._lock:
            self._bytes_done += size
            self._report()

    def _end_one(self) -> None:
        with self._lock:
            self._files_done += 1
            self._report()

    def _report(self) -> None:
        if self._on_progress is not None:
            self._on_progress(Progress(self._files_done, self._files, self._bytes_done, self._bytes))

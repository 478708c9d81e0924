"""Where a subtask's snapshot files go and come from: the snapshot target and source over a store."""

from __future__ import annotations

import contextlib
import io
import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, cast

import xxhash

from checkpoint.storage import layout
from checkpoint.storage.store import FileStore
from checkpoint.storage.streams import StoreWriter
from statebackend.errors import Closed, CorruptData, HoldfastError, NotFound
from statebackend.files import FileWriter, StateFile, verify_local

_SPOOL_IN_MEMORY = 8 << 20


class CheckpointTarget:
    """Files of one subtask in one checkpoint (a `SnapshotTarget`): shared ones to shared/, others to the checkpoint's
    folder, small ones into the reference itself. Usable from several threads, and by pickle in other processes.
    """

    def __init__(self, store: FileStore, folder: str, uid: str, subtask: int, *, inline_threshold: int,
                 self_contained: bool = False, generation: int = 0,
                 created: Callable[[str], None] | None = None) -> None:
        self._store, self._folder, self._uid, self._subtask = store, folder, uid, subtask
        self._generation = generation
        self._threshold, self._self_contained, self._created = inline_threshold, self_contained, created

    def create(self, hint: str, *, shared: bool) -> FileWriter:
        return _InliningWriter(self._store, self._new_path(hint, shared), self._threshold, self._is_shared(shared))

    def upload(self, local: Path, hint: str, *, shared: bool) -> StateFile:
        path, shared = self._new_path(hint, shared), self._is_shared(shared)
        if local.stat().st_size < self._threshold:
            return _inline(path, local.read_bytes(), shared)
        return self._store.upload(local, path, shared=shared, link=True)

    def put(self, hint: str, data: bytes) -> StateFile:
        """Store bytes of this checkpoint alone in one call."""
        writer = self.create(hint, shared=False)
        try:
            writer.write(data)
            return writer.finish()
        except BaseException:
            writer.abort()
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt_target, (self._store, self._folder, self._uid, self._subtask, self._threshold,
                                 self._self_contained, self._generation)

    def _is_shared(self, shared: bool) -> bool:
        return shared and not self._self_contained

    def _new_path(self, hint: str, shared: bool) -> str:
        if not self._is_shared(shared):
            return layout.private_file(self._folder, self._uid, self._subtask, hint, self._generation)
        path = layout.shared_file(hint)
        if self._created is not None:
            self._created(path)
        return path


def _rebuilt_target(store: FileStore, folder: str, uid: str, subtask: int, threshold: int,
                    self_contained: bool, generation: int) -> CheckpointTarget:
    return CheckpointTarget(store, folder, uid, subtask, inline_threshold=threshold, self_contained=self_contained,
                            generation=generation)


class _InliningWriter:
    """Holds back the first bytes: a file that stays below the threshold never becomes one."""

    def __init__(self, store: FileStore, path: str, threshold: int, shared: bool) -> None:
        self._store, self._path, self._threshold, self._shared = store, path, threshold, shared
        self._buffer = bytearray()
        self._writer: StoreWriter | None = None
        self._ended = False

    def write(self, data: bytes | memoryview) -> int:
        if self._ended:
            raise Closed("the file has been finished or given up", path=self._path)
        if self._writer is not None:
            return self._writer.write(data)
        view = memoryview(data).cast("B")
        if len(self._buffer) + len(view) < self._threshold:
            self._buffer += view
            return len(view)
        self._writer = self._store.writer(self._path, shared=self._shared)
        if self._buffer:
            self._writer.write(bytes(self._buffer))
            self._buffer = bytearray()
        return self._writer.write(view)

    def finish(self) -> StateFile:
        if self._ended:
            raise Closed("the file has been finished or given up", path=self._path)
        self._ended = True
        if self._writer is not None:
            return self._writer.finish()
        if self._threshold <= 0:  # an empty file where nothing is kept inline
            return self._store.writer(self._path, shared=self._shared).finish()
        return _inline(self._path, bytes(self._buffer), self._shared)

    def abort(self) -> None:
        self._ended = True
        if self._writer is not None:
            self._writer.abort()


def _inline(path: str, data: bytes, shared: bool) -> StateFile:
    return StateFile(path, len(data), xxhash.xxh3_128_hexdigest(data), shared, data)


class CheckpointSource:
    """The files of a checkpoint or savepoint (a `SnapshotSource`). Usable from several threads and, by pickle, in
    other processes.

    Copies are verified on the way. A file that is linked in place is checked for its size at once and for its checksum
    in the background; a mismatch goes to `on_damage`, or, without one, is raised by the next call.
    """

    def __init__(self, store: FileStore, *, on_damage: Callable[[CorruptData], None] | None = None,
                 way_out: Callable[[], str | None] | None = None, owns_store: bool = False,
                 on_close: Callable[[], None] | None = None) -> None:
        self.store = store
        self.on_damage = on_damage
        self._way_out, self._owns_store, self._on_close = way_out, owns_store, on_close
        self._verified: set[str] = set()
        self._damage: CorruptData | None = None
        self._background: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def open(self, file: StateFile) -> BinaryIO:
        self._raise_damage()
        if file.inline is not None:
            return io.BytesIO(file.inline_verified())
        with self._naming_the_way_out():
            local = self.store.local_path(file.path)
            if local is None:
                return self._spooled(file)
            if file.path not in self._verified:
                self._require(local)
                verify_local(local, file)
                self._verified.add(file.path)
            return open(local, "rb")

    def read(self, file: StateFile) -> bytes:
        """The whole file, verified; for small ones."""
        with self.open(file) as stream:
            return stream.read()

    def fetch(self, file: StateFile, local: Path) -> None:
        self._raise_damage()
        if file.inline is not None:
            local.write_bytes(file.inline_verified())
            return
        with self._naming_the_way_out():
            linked = self.store.link_or_copy(file.path, local, file)
        if linked and file.path not in self._verified:
            self._verify_in_background(file, local)

    def fetch_all(self, files: Iterable[tuple[StateFile, Path]]) -> None:
        """Fetch many files in parallel."""
        self.store.map(lambda pair: self.fetch(*pair), files)

    def wait(self) -> None:
        """Wait for background verification; damage that it found is raised here if nobody was told."""
        background, self._background = self._background, None
        if background is not None:
            background.shutdown(wait=True)
        self._raise_damage()

    def close(self) -> None:
        """Stop verifying and release what is ours. Idempotent."""
        background, self._background = self._background, None
        if background is not None:
            background.shutdown(wait=True, cancel_futures=True)
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()
        if self._owns_store:
            self.store.close()

    def __enter__(self) -> CheckpointSource:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return CheckpointSource, (self.store,)

    def _require(self, local: Path) -> None:
        if not local.is_file():
            raise NotFound("a state file is missing", path=str(local))

    def _spooled(self, file: StateFile) -> BinaryIO:
        """A verified copy that lives until it is closed: in memory if small, else in a temporary file."""
        spool = tempfile.SpooledTemporaryFile(max_size=_SPOOL_IN_MEMORY)  # noqa: SIM115 - the caller closes it
        digest, size = xxhash.xxh3_128(), 0
        try:
            for chunk in self.store.chunks(file.path, file.size):
                digest.update(chunk)
                size += len(chunk)
                spool.write(chunk)
            if size != file.size or digest.hexdigest() != file.checksum:
                raise CorruptData("a state file is damaged: its checksum differs", path=self.store.url_of(file.path),
                                  expected=file.checksum, found=digest.hexdigest())
        except BaseException:
            spool.close()
            raise
        spool.seek(0)
        return cast(BinaryIO, spool)

    def _verify_in_background(self, file: StateFile, local: Path) -> None:
        self._verified.add(file.path)
        stored = self.store.local_path(file.path)
        with self._lock:
            if self._background is None:
                self._background = ThreadPoolExecutor(1, thread_name_prefix="holdfast-verify")
            self._background.submit(self._verify, file, stored or local)

    def _verify(self, file: StateFile, path: Path) -> None:
        try:
            verify_local(path, file)
        except FileNotFoundError:
            return  # deleted meanwhile by its owner; whoever opened it still has it
        except CorruptData as error:
            self._add_hint(error)
            if self.on_damage is not None:
                self.on_damage(error)
            else:
                self._damage = self._damage or error

    def _raise_damage(self) -> None:
        damage, self._damage = self._damage, None
        if damage is not None:
            raise damage

    @contextlib.contextmanager
    def _naming_the_way_out(self) -> Any:
        try:
            yield
        except (CorruptData, NotFound) as error:
            self._add_hint(error)
            raise

    def _add_hint(self, error: HoldfastError) -> None:
        if error.hint is None and self._way_out is not None:
            with contextlib.suppress(HoldfastError):
                error.hint = self._way_out()


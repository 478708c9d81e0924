"""The one storage interface: whole files, conditional creation, checksummed streams, over any fsspec URL.

    store = FileStore.at("s3://bucket/jobs")        # or file:///data, a plain path, memory://x, gs://..., hdfs://...
    store.create("a/claim", b"...")                 # exactly one writer wins; the others get Conflict
    with store.writer("a/part-1") as writer: ...    # parts, checksum, bounded memory

Errors are those of `statebackend.errors`: `NotFound`, `Conflict`, `Unavailable` after retries, `CorruptData`. Calls may
come from several threads. Nothing half written is ever visible under its final name.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import xxhash

from checkpoint.storage.drivers import Driver, FileInfo, FsspecDriver, LocalDriver, MemoryDriver, Upload, is_temporary
from checkpoint.storage.retry import RetryPolicy, is_transient, retrying, translated
from checkpoint.storage.streams import RangeReader, StoreIO, StoreWriter
from checkpoint.storage.urls import join_url, local_path_of, protocol_of, redacted, scrubber
from statebackend.errors import Closed, Conflict, CorruptData, HoldfastError, InvalidRequest, NotFound
from statebackend.files import StateFile, relative_path

if TYPE_CHECKING:
    from checkpoint.storage.probe import ProbeReport

T = TypeVar("T")

CHUNK = 8 << 20
_CHUNKS_AHEAD = 3
_READ_BUFFER = 1 << 20
_DELETE_BATCH = 1000
_EXCLUSIVE_PROTOCOLS = frozenset({"gs", "gcs", "abfs", "abfss", "az", "adl"})
"""Stores whose fsspec filesystem turns `pipe_file(mode="create")` into one conditional request (not s3: s3.py)."""


class FileStore:
    """Files below one URL. Make one with `FileStore.at`; `close` it at the end."""

    def __init__(self, driver: Driver, url: str, *, unfenced: bool = False, retry: RetryPolicy | None = None,
                 workers: int = 8, options: dict[str, Any] | None = None, prefix: str = "") -> None:
        self._driver, self._raw_url, self._options = driver, url, dict(options or {})
        self._unfenced, self._workers = unfenced, workers
        self._retry = retry if retry is not None else RetryPolicy(timeout=driver.default_timeout)
        self._scrub = scrubber(self._options)
        self._prefix = prefix.strip("/")
        self._pools: dict[str, ThreadPoolExecutor] = {}
        self._lock = threading.Lock()
        self._owner: FileStore = self
        self._closed = False

    @classmethod
    def at(cls, url: str | os.PathLike[str], *, unfenced: bool = False, retry: RetryPolicy | None = None,
           workers: int = 8, **options: Any) -> FileStore:
        """The store at a URL. `options` go to the fsspec filesystem (for S3: key, secret, endpoint_url, ...)."""
        text = os.fspath(url)
        if "://" not in text:
            text = local_path_of(text)
        return cls(_driver_for(text, options), text, unfenced=unfenced, retry=retry, workers=workers, options=options)

    @property
    def url(self) -> str:
        """Where this is, fit to be shown: without user, password and query."""
        return join_url(redacted(self._raw_url), self._prefix)

    @property
    def fenced(self) -> bool:
        """Whether `create` is atomic here."""
        return self._driver.conditional

    @property
    def protocol(self) -> str:
        return self._driver.protocol

    @property
    def driver(self) -> Driver:
        return self._driver

    def __repr__(self) -> str:
        return f"FileStore({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self._raw_url, self._prefix, self._unfenced, self._workers, self._options)

    def child(self, path: str) -> FileStore:
        """The same store seen from a folder below; it shares connections and is closed with its parent."""
        store = FileStore(self._driver, self._raw_url, unfenced=self._unfenced, retry=self._retry,
                          workers=self._workers, options=self._options, prefix=self._full(path))
        store._owner = self._owner
        return store

    def url_of(self, path: str) -> str:
        """The URL of a file, fit to be shown."""
        return join_url(self.url, path)

    # whole files

    def read(self, path: str) -> bytes:
        return self._call("read", path, lambda: self._driver.read(self._full(path)))

    def read_range(self, path: str, start: int, end: int) -> bytes:
        """Bytes `start` to `end` (excluded)."""
        return self._call("read", path, lambda: self._driver.read(self._full(path), start, end))

    def create(self, path: str, data: bytes) -> None:
        """Store a file that must not exist: of any number of writers exactly one returns, the others get `Conflict`.

        Data should be unique to the writer (a token, a generation): a reply that was lost is settled by reading back,
        and a file that holds exactly our bytes is taken for ours. A store without conditional creation is refused
        unless the store was opened with `unfenced=True`.
        """
        if not self._driver.conditional and not self._unfenced:
            raise InvalidRequest(f"{self._driver.protocol} storage has no conditional create, so a writer that lost "
                                 "its job to a newer one could still publish", path=self.url_of(path),
                                 hint="use file, s3, gs or abfs storage, or say unfenced=true to do without")
        unsettled: list[bool] = []

        def note(error: BaseException) -> None:
            if is_transient(error):
                unsettled.append(True)

        try:
            self._call("create", path, lambda: self._driver.create(self._full(path), data), on_failure=note)
        except HoldfastError:
            if not (unsettled and self._holds(path, data)):
                raise

    def write(self, path: str, data: bytes) -> None:
        """Store a whole file under a name that is this writer's alone (unique names; nothing is checked)."""
        self._call("write", path, lambda: self._driver.put(self._full(path), data))

    def size(self, path: str) -> int:
        return self.info(path).size

    def info(self, path: str) -> FileInfo:
        found = self._call("look at", path, lambda: self._driver.info(self._full(path)))
        return replace(found, path=path)

    def exists(self, path: str) -> bool:
        """Whether this is a file (folders do not count)."""
        try:
            self.info(path)
        except NotFound:
            return False
        return True

    def list(self, prefix: str = "", *, temporary: bool = False) -> list[FileInfo]:
        """Every file below a folder, by path; those of interrupted writes only if asked for."""
        found = self._call("list", prefix, lambda: list(self._driver.files(self._full(prefix))))
        cut = len(self._prefix) + 1 if self._prefix else 0
        return sorted((replace(info, path=info.path[cut:]) for info in found
                       if temporary or not is_temporary(info.path)), key=lambda info: info.path)

    def folders(self, prefix: str = "") -> builtins.list[str]:
        """Names of the folders right below a folder."""
        return self._call("list", prefix, lambda: self._driver.folders(self._full(prefix)))

    def delete(self, paths: Iterable[str]) -> None:
        """Remove files; those that are gone already are no error."""
        full = [self._full(path) for path in paths]
        for first in range(0, len(full), _DELETE_BATCH):
            batch = full[first:first + _DELETE_BATCH]
            self._call("delete", batch[0], lambda batch=batch: self._driver.delete(batch))  # type: ignore[misc]

    def delete_tree(self, prefix: str) -> None:
        """Remove a folder and everything below it."""
        if not self._full(prefix):
            raise InvalidRequest("the root of a store is not deleted", path=self.url)
        self._call("delete", prefix, lambda: self._driver.delete_tree(self._full(prefix)))

    # streams

    def writer(self, path: str, *, shared: bool = False) -> StoreWriter:
        """A stream into a new file, with checksum; the result's path is `path`."""
        relative_path(path)
        store = StoreIO(self._call, self._open_upload, self.write, self._complete, lambda: self._pool("parts"))
        return StoreWriter(store, path, CHUNK if self._driver.local("") is None else 1 << 20, shared=shared)

    def open(self, path: str) -> BinaryIO:
        """A seekable reader; its bytes are not verified (see `download` and the snapshot sources for that)."""
        local = self.local_path(path)
        if local is not None:
            return self._call("open", path, lambda: open(local, "rb"))
        size = self.size(path)
        return io.BufferedReader(RangeReader(lambda start, end: self.read_range(path, start, end), size), _READ_BUFFER)

    def local_path(self, path: str) -> Path | None:
        """Where the file lies on this machine, if it does."""
        return self._driver.local(self._full(path))

    def upload(self, local: str | os.PathLike[str], path: str, *, shared: bool = False, link: bool = False,
               progress: Callable[[int], None] | None = None) -> StateFile:
        """Store a local file. With `link`, a finished, immutable file is hard-linked where the store is local."""
        if link and isinstance(self._driver, LocalDriver):
            linked = self._upload_by_link(self._driver, Path(local), path, shared)
            if linked is not None:
                if progress is not None:
                    progress(linked.size)
                return linked
        writer = self.writer(path, shared=shared)
        try:
            for chunk in _chunks_of(Path(local)):
                writer.write(chunk)
                if progress is not None:
                    progress(len(chunk))
            return writer.finish()
        except BaseException:
            writer.abort()
            raise

    def download(self, path: str, local: str | os.PathLike[str], expected: StateFile | None = None, *,
                 progress: Callable[[int], None] | None = None) -> None:
        """Copy a stored file to `local`, verified against `expected` on the way; nothing is left of a bad copy."""
        target = Path(local)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.{id(target):x}.tmp")
        digest, size = xxhash.xxh3_128(), 0
        try:
            with open(temporary, "wb") as stream:
                for chunk in self.chunks(path, expected.size if expected is not None else None):
                    digest.update(chunk)
                    size += len(chunk)
                    stream.write(chunk)
                    if progress is not None:
                        progress(len(chunk))
            if expected is not None:
                _verify(self.url_of(path), expected, size, digest.hexdigest())
            os.replace(temporary, target)
        except OSError as error:
            raise translated(error, path=str(target), what="be copied from", scrub=self._scrub, attempts=1) from error
        finally:
            temporary.unlink(missing_ok=True)

    def chunks(self, path: str, size: int | None = None) -> Iterator[bytes]:
        """The bytes of a file in order, read ahead where the store is remote. `size` is what is to be expected."""
        local = self.local_path(path)
        if local is not None:
            with self._call("open", path, lambda: open(local, "rb")) as stream:
                while chunk := stream.read(1 << 20):
                    yield chunk
            return
        stream_from = getattr(self._driver, "stream", None)
        if stream_from is not None:
            yield from self._resumed(path, stream_from)
            return
        actual = self.size(path)
        if size is not None and actual != size:
            raise CorruptData("a state file has another size than recorded", path=self.url_of(path), expected=size,
                              found=actual)
        yield from self._read_ahead(path, actual)

    def verify(self, path: str, expected: StateFile) -> None:
        """Read the file and compare size and checksum."""
        digest, size = xxhash.xxh3_128(), 0
        if self.info(path).size != expected.size:
            _verify(self.url_of(path), expected, self.info(path).size, "")
        for chunk in self.chunks(path):
            digest.update(chunk)
            size += len(chunk)
        _verify(self.url_of(path), expected, size, digest.hexdigest())

    def link_or_copy(self, path: str, local: str | os.PathLike[str], expected: StateFile) -> bool:
        """Place a file at `local`: True if linked (size checked, checksum not), False if copied and verified."""
        source = self.local_path(path)
        if source is None:
            self.download(path, local, expected)
            return False
        size = self.size(path)
        if size != expected.size:
            raise CorruptData("a state file has another size than recorded", path=self.url_of(path),
                              expected=expected.size, found=size)
        try:
            os.link(source, local)
        except OSError:
            self.download(path, local, expected)
            return False
        return True

    def map(self, function: Callable[..., T], items: Iterable[Any]) -> builtins.list[T]:
        """Run a function on all items, in this store's threads; the first error is raised after all have ended."""
        futures = [self._pool("files").submit(function, item) for item in items]
        results: builtins.list[T] = []
        failure: BaseException | None = None
        for future in futures:
            try:
                results.append(future.result())
            except BaseException as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return results

    def probe(self, *, quick: bool = False) -> ProbeReport:
        """Prove by doing that the store keeps the promises Holdfast relies on; `quick`: only what a start needs."""
        from checkpoint.storage.probe import probe_store
        return probe_store(self, quick=quick)

    def abandoned_uploads(self, before_ms: int) -> builtins.list[tuple[str, str]]:
        """Uploads in parts that were begun here before a moment and never ended: (path, upload id); S3 only."""
        find = getattr(self._driver, "stale_uploads", None)
        if find is None:
            return []
        found = self._call("list", "", lambda: find(self._prefix, before_ms))
        cut = len(self._prefix) + 1 if self._prefix else 0
        return [(path[cut:], upload_id) for path, upload_id in found]

    def abort_upload(self, path: str, upload_id: str) -> None:
        """End an abandoned upload."""
        abort = getattr(self._driver, "abort_upload", None)
        if abort is not None:
            self._call("delete", path, lambda: abort(self._full(path), upload_id))

    def close(self) -> None:
        """Release connections and threads. Idempotent."""
        if self._owner is not self or self._closed:
            return
        self._closed = True
        for pool in self._pools.values():
            pool.shutdown(wait=True, cancel_futures=True)
        self._driver.close()

    def __enter__(self) -> FileStore:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    # inner workings

    def _pool(self, kind: str) -> ThreadPoolExecutor:
        """Threads for whole files ("files") and, apart from them so that no one waits for himself, for their parts."""
        owner = self._owner
        if owner._closed:
            raise Closed("the store has been closed", path=self.url)
        if kind not in owner._pools:
            with owner._lock:
                if kind not in owner._pools:
                    owner._pools[kind] = ThreadPoolExecutor(self._workers, thread_name_prefix=f"holdfast-{kind}")
        return owner._pools[kind]

    def _full(self, path: str) -> str:
        path = path.strip("/")
        if path:
            relative_path(path)
        return f"{self._prefix}/{path}".strip("/") if self._prefix else path

    def _call(self, what: str, path: str, call: Callable[[], T], *, once: bool = False,
              on_failure: Callable[[BaseException], None] | None = None) -> T:
        if self._owner._closed:
            raise Closed("the store has been closed", path=self.url)
        policy = replace(self._retry, attempts=1) if once else self._retry
        try:
            return retrying(call, policy, on_failure=on_failure)
        except HoldfastError:
            raise
        except Exception as error:
            clean = self._scrub(str(error)) == str(error)
            raise translated(error, path=self.url_of(path), what=what, scrub=self._scrub,
                             attempts=policy.attempts) from (error if clean else None)

    def _holds(self, path: str, data: bytes) -> bool:
        try:
            return self.read(path) == data
        except NotFound:
            return False

    def _open_upload(self, path: str) -> Upload:
        return self._call("write", path, lambda: self._driver.upload(self._full(path)))

    def _complete(self, path: str, upload: Upload, size: int) -> None:
        """End an upload; where the reply was lost and the upload is gone, the file itself tells that it is whole."""
        unsettled: list[bool] = []
        try:
            self._call("write", path, upload.complete, once=not upload.repeatable,
                       on_failure=lambda error: unsettled.append(True) if is_transient(error) else None)
        except HoldfastError:
            whole = False
            with contextlib.suppress(HoldfastError):
                whole = bool(unsettled) and self.info(path).size == size
            if not whole:
                raise

    def _resumed(self, path: str, stream_from: Callable[[str, int], Iterator[bytes]]) -> Iterator[bytes]:
        """A stream that goes on where it broke; every chunk that arrives gives it all its attempts back."""
        position, stream = 0, None

        def next_chunk() -> bytes:
            nonlocal stream
            if stream is None:
                stream = stream_from(self._full(path), position)
            try:
                return next(stream, b"")
            except BaseException:
                stream = None
                raise

        while chunk := self._call("read", path, next_chunk):
            position += len(chunk)
            yield chunk

    def _read_ahead(self, path: str, size: int) -> Iterator[bytes]:
        ranges = iter([(start, min(start + CHUNK, size)) for start in range(0, size, CHUNK)])
        if size <= CHUNK:
            yield from (self.read_range(path, start, end) for start, end in ranges)
            return
        flying: deque[Future[bytes]] = deque()
        try:
            for start, end in ranges:
                flying.append(self._pool("parts").submit(self.read_range, path, start, end))
                if len(flying) > _CHUNKS_AHEAD:
                    yield flying.popleft().result()
            while flying:
                yield flying.popleft().result()
        finally:
            for future in flying:
                future.cancel()

    def _upload_by_link(self, driver: LocalDriver, local: Path, path: str, shared: bool) -> StateFile | None:
        digest, size = xxhash.xxh3_128(), 0
        for chunk in _chunks_of(local):
            digest.update(chunk)
            size += len(chunk)
        try:
            self._call("write", path, lambda: driver.link(local, self._full(path)), once=True)
        except HoldfastError as error:
            if isinstance(error.__cause__, OSError) and not isinstance(error, Conflict):
                return None  # another filesystem, or one without hard links: copy
            raise
        return StateFile(path, size, digest.hexdigest(), shared)


def _driver_for(url: str, options: dict[str, Any]) -> Driver:
    protocol = protocol_of(url)
    if protocol in ("file", "local"):
        if options:
            raise InvalidRequest(f"local storage takes no options: {', '.join(options)}")
        return LocalDriver(local_path_of(url))
    if protocol in ("s3", "s3a"):
        from checkpoint.storage.s3 import S3Driver
        root = redacted(url).split("://", 1)[1].strip("/")
        if not root:
            raise InvalidRequest("an S3 URL must name a bucket", found=redacted(url), hint="write s3://bucket/folder")
        return S3Driver(options, root)
    return _fsspec_driver(url, protocol, options)


def _fsspec_driver(url: str, protocol: str, options: dict[str, Any]) -> Driver:
    import fsspec
    try:
        filesystem, root = fsspec.core.url_to_fs(url, **options)
    except (ValueError, ImportError) as error:
        raise InvalidRequest(f"there is no storage for {redacted(url)}: {scrubber(options)(str(error))}") from None
    if protocol == "memory":
        return MemoryDriver(filesystem, root)
    return FsspecDriver(filesystem, root, protocol, exclusive=protocol in _EXCLUSIVE_PROTOCOLS)


def _reopened(url: str, prefix: str, unfenced: bool, workers: int, options: dict[str, Any]) -> FileStore:
    store = FileStore(_driver_for(url, options), url, unfenced=unfenced, workers=workers, options=options,
                      prefix=prefix)
    return store


def _chunks_of(local: Path) -> Iterator[bytes]:
    with open(local, "rb") as stream:
        while chunk := stream.read(1 << 20):
            yield chunk


def _verify(path: str, expected: StateFile, size: int, checksum: str) -> None:
    if size != expected.size:
        raise CorruptData("a state file has another size than recorded", path=path, expected=expected.size, found=size)
    if checksum != expected.checksum:
        raise CorruptData("a state file is damaged: its checksum differs", path=path, expected=expected.checksum,
                          found=checksum)


__all__: Sequence[str] = ["FileInfo", "FileStore", "RetryPolicy", "StoreWriter"]

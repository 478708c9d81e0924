"""Files being written to and read from a store: checksummed on the way, in parts, within bounded memory."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import xxhash

from checkpoint.storage.drivers import Upload
from statebackend.errors import Closed
from statebackend.files import StateFile

_PARTS_IN_FLIGHT = 3
_GROW_EVERY = 1000  # S3 allows 10,000 parts: part n is 2^(n // 1000) times the first, which reaches 8 TiB


class StoreIO:
    """What a stream needs of its store: calls that are retried, and threads for parts."""

    def __init__(self, call: Callable[..., Any], open_upload: Callable[[str], Upload],
                 put: Callable[[str, bytes], None], complete: Callable[[str, Upload, int], None],
                 executor: Callable[[], Executor]) -> None:
        self.call, self.open_upload, self.put, self.complete, self.executor = call, open_upload, put, complete, executor


class StoreWriter:
    """A file on its way into a store (a `FileWriter`). It does not exist before `finish`. Belongs to one thread.

    Memory is bounded by a few parts, whatever the size. A file that fits into one part is stored by one request.
    """

    def __init__(self, store: StoreIO, path: str, part_size: int, *, shared: bool = False) -> None:
        self._store, self._path, self._shared, self._part_size = store, path, shared, part_size
        self._digest = xxhash.xxh3_128()
        self._buffer = bytearray()
        self._size = self._stored = self._number = 0
        self._upload: Upload | None = None
        self._flying: deque[Future[None]] = deque()
        self._ended = False

    def write(self, data: bytes | memoryview) -> int:
        if self._ended:
            raise Closed("the file has been finished or given up", path=self._path)
        view = memoryview(data).cast("B")
        self._digest.update(view)
        self._size += len(view)
        self._buffer += view
        # Parts begin only beyond two of them, so that a file a little larger than one is still one request.
        while len(self._buffer) >= (2 if self._upload is None else 1) * self._part_size:
            size = self._part_size
            self._send(bytes(memoryview(self._buffer)[:size]))
            del self._buffer[:size]
        return len(view)

    def finish(self) -> StateFile:
        if self._ended:
            raise Closed("the file has been finished or given up", path=self._path)
        if self._upload is None:
            self._store.put(self._path, bytes(self._buffer))
        else:
            if self._buffer:
                self._send(bytes(self._buffer))
            self._settle(0)
            self._store.complete(self._path, self._upload, self._size)
        self._ended, self._buffer = True, bytearray()
        return StateFile(self._path, self._size, self._digest.hexdigest(), self._shared)

    def abort(self) -> None:
        """Give the file up; idempotent. What can't be removed now is left to garbage collection."""
        if self._ended:
            return
        self._ended, self._buffer = True, bytearray()
        for future in self._flying:
            future.cancel()
        if self._upload is not None:
            try:
                self._upload.abort()
            except Exception:
                return  # the reason for giving up is the error that counts; gc finds what is left

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, kind: Any, *_rest: Any) -> None:
        if kind is not None:
            self.abort()
        elif not self._ended:
            self.finish()

    def _send(self, data: bytes) -> None:
        if self._upload is None:
            self._upload = self._store.open_upload(self._path)
        self._number += 1
        upload, number, offset = self._upload, self._number, self._stored
        self._stored += len(data)
        if self._number % _GROW_EVERY == 0:
            self._part_size *= 2
        if not upload.concurrent:
            self._put(upload, number, offset, data)
            return
        self._settle(_PARTS_IN_FLIGHT - 1)
        self._flying.append(self._store.executor().submit(self._put, upload, number, offset, data))

    def _put(self, upload: Upload, number: int, offset: int, data: bytes) -> None:
        self._store.call("write", self._path, lambda: upload.put(number, offset, data), once=not upload.repeatable)

    def _settle(self, leave: int) -> None:
        while len(self._flying) > leave:
            self._flying.popleft().result()


class RangeReader(io.RawIOBase):
    """A stored file read by ranges, with seek. Wrap it in `io.BufferedReader`."""

    def __init__(self, read: Callable[[int, int], bytes], size: int) -> None:
        self._read, self._size, self._position = read, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError("seek before the start of the file")
        self._position = base + offset
        return self._position

    def readall(self) -> bytes:
        """The rest in one request; the inherited one would ask for 8 KiB at a time."""
        data = self._read(self._position, self._size) if self._position < self._size else b""
        self._position += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        end = min(self._position + len(view), self._size)
        if end <= self._position:
            return 0
        data = self._read(self._position, end)
        view[:len(data)] = data
        self._position += len(data)
        return len(data)

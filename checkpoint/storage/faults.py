"""The failing twin of a store: a driver that fails, hangs, fills up or loses replies when told to. For tests.

    faults = FaultyDriver(store.driver)
    faults.fail("create", at=1, error=ConnectionError("reset"), after=True)     # done, but the reply is lost
    failing = FileStore(faults, "memory://x", retry=RetryPolicy(first_pause=0.001))
"""

from __future__ import annotations

import errno
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from checkpoint.storage.drivers import Driver, FileInfo, Upload

T = TypeVar("T")


@dataclass
class Fault:
    """What happens to the calls `at` .. `at + times - 1` of one operation, counted from 1."""

    operation: str
    at: int
    times: int
    error: BaseException | None
    after: bool
    pause: float | None

    def covers(self, operation: str, number: int) -> bool:
        return self.operation in (operation, "*") and self.at <= number < self.at + self.times


def disk_full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


class FaultyDriver:
    """A driver around another; operations are those of `Driver`, and "part" and "complete" of uploads."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.protocol, self.conditional, self.default_timeout = driver.protocol, driver.conditional, 5.0
        self.calls: Counter[str] = Counter()
        self.released = threading.Event()
        self._faults: list[Fault] = []
        self._lock = threading.Lock()

    def fail(self, operation: str, *, at: int = 1, times: int = 1, error: BaseException | None = None,
             after: bool = False) -> None:
        """Calls of an operation ("*": any) raise; with `after` the call is carried out first: its reply is lost.

        `at` counts calls from now on.
        """
        self._add(operation, at, times, error or ConnectionError("injected"), after, None)

    def hang(self, operation: str, *, at: int = 1, times: int = 1, seconds: float = 60.0) -> None:
        """Calls of an operation wait, until `released` is set or `seconds` have gone, and then go on."""
        self._add(operation, at, times, None, False, seconds)

    def heal(self) -> None:
        """No more faults; calls that hang go on."""
        with self._lock:
            self._faults.clear()
        self.released.set()

    def read(self, path: str, start: int = 0, end: int | None = None) -> bytes:
        return self._run("read", lambda: self._driver.read(path, start, end))

    def create(self, path: str, data: bytes) -> None:
        self._run("create", lambda: self._driver.create(path, data))

    def put(self, path: str, data: bytes) -> None:
        self._run("put", lambda: self._driver.put(path, data))

    def upload(self, path: str) -> Upload:
        return _FaultyUpload(self, self._run("upload", lambda: self._driver.upload(path)))

    def info(self, path: str) -> FileInfo:
        return self._run("info", lambda: self._driver.info(path))

    def files(self, prefix: str) -> Iterable[FileInfo]:
        return self._run("files", lambda: self._driver.files(prefix))

    def folders(self, prefix: str) -> list[str]:
        return self._run("folders", lambda: self._driver.folders(prefix))

    def delete(self, paths: Sequence[str]) -> None:
        self._run("delete", lambda: self._driver.delete(paths))

    def delete_tree(self, prefix: str) -> None:
        self._run("delete_tree", lambda: self._driver.delete_tree(prefix))

    def local(self, path: str) -> Path | None:
        return None  # everything goes through the calls above

    def close(self) -> None:
        self.released.set()
        self._driver.close()

    def _add(self, operation: str, at: int, times: int, error: BaseException | None, after: bool,
             pause: float | None) -> None:
        with self._lock:
            self._faults.append(Fault(operation, self.calls[operation] + at, times, error, after, pause))

    def _run(self, operation: str, call: Callable[[], T]) -> T:
        with self._lock:
            self.calls[operation] += 1
            self.calls["*"] += 1
            numbers = {operation: self.calls[operation], "*": self.calls["*"]}
            fault = next((fault for fault in self._faults
                          if fault.covers(operation, numbers.get(fault.operation, 0))), None)
        if fault is None:
            return call()
        if fault.pause is not None:
            self.released.wait(fault.pause)
            return call()
        if fault.after:
            call()
        assert fault.error is not None
        raise fault.error


class _FaultyUpload:
    def __init__(self, driver: FaultyDriver, upload: Upload) -> None:
        self._driver, self._upload = driver, upload
        self.part_size, self.repeatable, self.concurrent = upload.part_size, upload.repeatable, upload.concurrent

    def put(self, number: int, offset: int, data: bytes | memoryview) -> None:
        self._driver._run("part", lambda: self._upload.put(number, offset, data))

    def complete(self) -> None:
        self._driver._run("complete", self._upload.complete)

    def abort(self) -> None:
        self._upload.abort()

"""One service at a time on one database: a second one would take up the first one's operations and run them twice."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from statebackend.errors import Conflict


class InstanceLock:
    """A file lock that ends with the process, however it ends."""

    def __init__(self, path: Path, patience: float = 15.0) -> None:
        self._path, self._patience = path, patience
        self._descriptor: int | None = None

    def take(self) -> None:
        """Wait a little for a service that is just ending, then refuse."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + self._patience
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    os.close(descriptor)
                    raise Conflict("another service uses this database", path=str(self._path),
                                   hint="end it first, or start with another --database") from None
                time.sleep(0.1)
            else:
                self._descriptor = descriptor
                return

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

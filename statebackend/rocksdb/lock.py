"""One process per backend folder: a file lock that the system releases when the holder dies."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from statebackend.errors import Conflict, Unavailable

NAME = "HOLDFAST-LOCK"


class FolderLock:
    """Held from construction to `release`. A second holder is refused with the first one's process id.

    A forked child does not hold it: closing the file there leaves the parent's lock alone.
    """

    def __init__(self, directory: Path) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._descriptor: int | None = os.open(directory / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise Unavailable(f"the folder of the RocksDB backend can't be used: {error}", path=str(directory)) from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._descriptor, 32, 0).decode(errors="replace").strip()
            os.close(self._descriptor)
            raise Conflict("the RocksDB folder is in use by another backend or process", path=str(directory),
                           process=holder or None,
                           hint="close the other one, or give this backend a folder of its own") from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

"""Copies of state files on this host: a range that moves to another worker starts from local files, not from storage.

A copy is known by checksum and size, which the manifests name, and is verified each time it is used. So it does not
matter who left it there, whether he died on the way, or who removes it meanwhile: what is missing or damaged is read
from storage. All workers below one folder share it and keep it below its limit, the longest unused going first.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol

from statebackend.errors import CorruptData, HoldfastError
from statebackend.files import FileWriter, SnapshotSource, SnapshotTarget, StateFile, verify_local

UNUSED_S = 86_400
"""A copy that nobody used for a day goes, however much room there is."""
ABANDONED_S = 3_600
"""A copy that has been in the making for so long never will be one."""
LOOK_EVERY = 64
"""A process adds up its folder after this many copies, or this part of its limit in bytes."""
FETCHERS = 8
_TEMPORARY = "."
_WHOLE_BYTES = 32 << 20


class StateFiles(SnapshotTarget, SnapshotSource, Protocol):
    """Where an attempt's files go, and where all files come from."""


@dataclass
class HostFiles:
    """A folder of copies. Never raises for the folder's sake: without room or rights there is just no copy.

    `limit` bytes may lie here, give or take what the workers add between two looks (a 64th each).
    """

    folder: Path
    limit: int
    _added: int = field(default=0, init=False)
    _count: int = field(default=LOOK_EVERY, init=False)

    @classmethod
    def at(cls, folder: Path, limit: int) -> HostFiles | None:
        """The copies in a folder that is ours alone; None if there is no such folder or nothing may be kept."""
        if limit <= 0:
            return None
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.lstat()
        except OSError:
            return None
        own = not folder.is_symlink() and found.st_uid == os.getuid() and found.st_mode & 0o077 == 0
        return cls(folder, limit) if own else None

    def find(self, file: StateFile) -> Path | None:
        """A verified copy; a damaged one is removed."""
        path = self._path(file)
        try:
            verify_local(path, file)
            os.utime(path)
        except CorruptData:
            path.unlink(missing_ok=True)
            return None
        except OSError:
            return None
        return path

    def has(self, file: StateFile) -> bool:
        """Whether there is a copy, good or not."""
        return self._path(file).exists()

    def keep(self, local: Path, file: StateFile) -> None:
        """Keep a finished, immutable local file: linked, or copied from another filesystem."""
        if file.size > self.limit or self.has(file):
            return
        with self._arriving(file) as arriving:
            try:
                os.link(local, arriving)
            except OSError:
                shutil.copyfile(local, arriving)

    def keep_bytes(self, data: bytes, file: StateFile) -> None:
        if file.size <= self.limit:
            with self._arriving(file) as arriving:
                arriving.write_bytes(data)

    def temporary(self) -> Path:
        """A name for a copy in the making, which `settle` ends."""
        return self.folder / f"{_TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"

    def settle(self, arriving: Path, file: StateFile) -> None:
        """A copy is complete: from now on others find it."""
        with contextlib.suppress(OSError):
            os.replace(arriving, self._path(file))
            os.utime(self._path(file))
            self._note(file.size)
        arriving.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _arriving(self, file: StateFile) -> Iterator[Path]:
        arriving = self.temporary()
        try:
            yield arriving
            self.settle(arriving, file)
        except OSError:
            with contextlib.suppress(OSError):
                arriving.unlink(missing_ok=True)

    def _path(self, file: StateFile) -> Path:
        name = f"{file.checksum}-{file.size}"
        if not name.replace("-", "").isalnum():
            raise CorruptData("a file reference has a checksum that is none", path=file.path, found=file.checksum[:80])
        return self.folder / name

    def _note(self, size: int) -> None:
        self._added, self._count = self._added + size, self._count + 1
        if self._count >= LOOK_EVERY or self._added >= self.limit // LOOK_EVERY:
            self._added = self._count = 0
            self.make_room()

    def make_room(self) -> None:
        """Remove what is over the limit, longest unused first, what nobody uses, and what others left unfinished."""
        now, total, copies = time.time(), 0, list[tuple[float, int, str]]()
        with contextlib.suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    found = entry.stat(follow_symlinks=False)
                    total += found.st_size
                    age = now - max(found.st_mtime, found.st_ctime)
                    if age > (ABANDONED_S if entry.name.startswith(_TEMPORARY) else UNUSED_S):
                        os.unlink(entry.path)
                        total -= found.st_size
                    elif not entry.name.startswith(_TEMPORARY):
                        copies.append((found.st_mtime, found.st_size, entry.path))
        for _, size, path in sorted(copies) if total > self.limit else ():
            with contextlib.suppress(OSError):
                os.unlink(path)
            total -= size
            if total <= self.limit - self.limit // 8:
                break


class WarmFiles:
    """State files of storage with copies on this host: what is stored or read is kept, what is kept is not read again.

    `found` and `read` count the files that came from the host and from storage.
    """

    def __init__(self, files: StateFiles, host: HostFiles) -> None:
        self._files, self._host = files, host
        self.found = self.read = 0

    @property
    def warm(self) -> bool:
        """Whether all that was asked for was on this host."""
        return self.found > 0 and self.read == 0

    def bring(self, files: Iterable[StateFile]) -> None:
        """Copy what is missing here from storage, several at once: a restore then waits for storage once, not per file.

        Best effort: whoever reads a file that could not be copied is told why.
        """
        missing = {file.path: file for file in files if file.inline is None and not self._host.has(file)}
        if len(missing) > 1 and sum(file.size for file in missing.values()) <= self._host.limit // 2:
            with ThreadPoolExecutor(FETCHERS) as pool:
                self.read += sum(pool.map(self._brought, missing.values()))

    def _brought(self, file: StateFile) -> bool:
        with contextlib.suppress(HoldfastError, OSError):
            self._downloaded(file).close()
            return True
        return False

    def create(self, hint: str, *, shared: bool) -> FileWriter:
        return _KeptWriter(self._files.create(hint, shared=shared), self._host)

    def upload(self, local: Path, hint: str, *, shared: bool) -> StateFile:
        file = self._files.upload(local, hint, shared=shared)
        self._host.keep(local, file)
        return file

    def open(self, file: StateFile) -> BinaryIO:
        if file.inline is not None:
            return self._files.open(file)
        copy = self._host.find(file)
        if copy is not None:
            with contextlib.suppress(FileNotFoundError):
                self.found += 1
                return open(copy, "rb")
        self.read += 1
        if _WHOLE_BYTES < file.size <= self._host.limit:
            with contextlib.suppress(HoldfastError, OSError):  # no room here, say: storage is asked once more, and tells
                return self._downloaded(file)
        stream = self._files.open(file)
        if file.size > min(_WHOLE_BYTES, self._host.limit):
            return stream
        with stream:
            data = stream.read()
        self._host.keep_bytes(data, file)
        return io.BytesIO(data)

    def _downloaded(self, file: StateFile) -> BinaryIO:
        arriving = self._host.temporary()
        try:
            self._files.fetch(file, arriving)
            stream = open(arriving, "rb")  # noqa: SIM115
            self._host.settle(arriving, file)
            return stream
        finally:
            arriving.unlink(missing_ok=True)

    def fetch(self, file: StateFile, local: Path) -> None:
        copy = self._host.find(file) if file.inline is None else None
        if copy is not None and _placed(copy, local):
            self.found += 1
            return
        self._files.fetch(file, local)
        if file.inline is None:
            self.read += 1
            self._host.keep(local, file)


def _placed(copy: Path, local: Path) -> bool:
    """Whether a copy could be placed elsewhere: linked, or copied to another filesystem."""
    try:
        local.unlink(missing_ok=True)
        try:
            os.link(copy, local)
        except OSError:
            shutil.copyfile(copy, local)
    except OSError:
        local.unlink(missing_ok=True)
        return False
    return True


class _KeptWriter:
    """A stored file that is also written down here, as long as that works."""

    def __init__(self, writer: FileWriter, host: HostFiles) -> None:
        self._writer, self._host = writer, host
        self._arriving, self._size = host.temporary(), 0
        self._stream: BinaryIO | None = None
        with contextlib.suppress(OSError):
            self._stream = open(self._arriving, "wb")  # noqa: SIM115

    def write(self, data: bytes | memoryview) -> int:
        if self._stream is not None:
            try:
                self._size += self._stream.write(data)
                if self._size > self._host.limit:
                    self._give_up()
            except OSError:
                self._give_up()
        return self._writer.write(data)

    def finish(self) -> StateFile:
        try:
            file = self._writer.finish()
            if self._stream is not None:
                with contextlib.suppress(OSError):
                    self._stream.close()
                    self._host.settle(self._arriving, file)
        finally:
            self._give_up()
        return file

    def abort(self) -> None:
        self._give_up()
        self._writer.abort()

    def _give_up(self) -> None:
        stream, self._stream = self._stream, None
        with contextlib.suppress(OSError):
            if stream is not None:
                stream.close()
        with contextlib.suppress(OSError):
            self._arriving.unlink(missing_ok=True)


def linkable(path: Path, folder: Path) -> bool:
    """Whether two paths, or what there is of them, lie on one filesystem: a hard link then is as good as a copy."""
    return _device(path) == _device(folder)


def _device(path: Path) -> int:
    while True:
        try:
            return path.stat().st_dev
        except OSError:
            if path == path.parent:
                return -1
            path = path.parent

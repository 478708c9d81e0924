"""What a store must be able to do, one attempt at a time: the contract, and its local, memory and fsspec forms.

A driver neither retries nor translates errors; `FileStore` does both, so that a failing twin (faults.py) is put
between them and everything above is exercised by it. Paths are relative to the driver's root, with `/` between names.
"""

from __future__ import annotations

import errno
import io
import os
import secrets
import shutil
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Protocol

TEMPORARY_SUFFIX = ".tmp"


def is_temporary(path: str) -> bool:
    """Whether this is the name of a file that an interrupted write has left behind."""
    name = path.rpartition("/")[2]
    return name.startswith(".") and name.endswith(TEMPORARY_SUFFIX)


def temporary_name(path: str) -> str:
    """A fresh name next to `path` that nobody takes for a finished file."""
    parent, slash, name = path.rpartition("/")
    return f"{parent}{slash}.{name}.{secrets.token_hex(6)}{TEMPORARY_SUFFIX}"


@dataclass(frozen=True)
class FileInfo:
    """A file in a store: path relative to the store's root, size, and time of last change in ms (0: not known)."""

    path: str
    size: int
    modified_ms: int = 0


class Upload(Protocol):
    """A file being written in parts. `put` of one part may be repeated if `repeatable`."""

    part_size: int
    repeatable: bool
    concurrent: bool

    def put(self, number: int, offset: int, data: bytes | memoryview) -> None: ...
    def complete(self) -> None: ...
    def abort(self) -> None: ...


class Driver(Protocol):
    """Raw operations of one store; any exception may come out of them. Calls may come from several threads."""

    protocol: str
    conditional: bool
    """Whether `create` is atomic: of several writers exactly one succeeds."""
    default_timeout: float | None

    def read(self, path: str, start: int = 0, end: int | None = None) -> bytes: ...
    def create(self, path: str, data: bytes) -> None:
        """Store a whole file, or raise FileExistsError; nothing half written is ever visible."""
    def put(self, path: str, data: bytes) -> None:
        """Store a whole file under a name that is the caller's alone; nothing half written is ever visible."""
    def upload(self, path: str) -> Upload: ...
    def info(self, path: str) -> FileInfo: ...
    def files(self, prefix: str) -> Iterable[FileInfo]:
        """Every file below the folder `prefix`, temporary ones included; nothing where there is no such folder."""
    def folders(self, prefix: str) -> list[str]:
        """Names of the folders right below the folder `prefix`."""
    def delete(self, paths: Sequence[str]) -> None:
        """Remove files; those that are gone already are no error."""
    def delete_tree(self, prefix: str) -> None: ...
    def local(self, path: str) -> Path | None:
        """The file's place on this machine, where it has one."""
    def close(self) -> None: ...


class LocalDriver:
    """A folder on this machine. Durable: files and their folders are synced before a call returns."""

    protocol, conditional = "file", True
    default_timeout: float | None = None

    def __init__(self, root: str) -> None:
        self.root = Path(root)

    def read(self, path: str, start: int = 0, end: int | None = None) -> bytes:
        with open(self._at(path), "rb") as stream:
            if start:
                stream.seek(start)
            return stream.read() if end is None else stream.read(end - start)

    def create(self, path: str, data: bytes) -> None:
        temporary = self._write_temporary(path, data)
        try:
            os.link(temporary, self._at(path))
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(temporary.parent)

    def put(self, path: str, data: bytes) -> None:
        temporary = self._write_temporary(path, data)
        os.replace(temporary, self._at(path))
        _sync_folder(temporary.parent)

    def upload(self, path: str) -> Upload:
        return _LocalUpload(self._at(path), self._at(temporary_name(path)))

    def info(self, path: str) -> FileInfo:
        stat = self._at(path).stat()
        if not os.path.isfile(self._at(path)):
            raise IsADirectoryError(errno.EISDIR, "is a folder", path)
        return FileInfo(path, stat.st_size, stat.st_mtime_ns // 1_000_000)

    def files(self, prefix: str) -> Iterable[FileInfo]:
        return list(self._walk(prefix))

    def folders(self, prefix: str) -> list[str]:
        try:
            with os.scandir(self._at(prefix)) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            self._at(path).unlink(missing_ok=True)

    def delete_tree(self, prefix: str) -> None:
        # A file that appears while the tree is removed makes rmtree stumble; it belongs to a writer that lost.
        for _ in range(3):
            try:
                shutil.rmtree(self._at(prefix))
                return
            except FileNotFoundError:
                return
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:
                    raise

    def local(self, path: str) -> Path | None:
        return self._at(path)

    def link(self, local: Path, path: str) -> None:
        """Make a hard link of a local file the stored one, durably."""
        target = self._at(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(local, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.link(local, target)
        _sync_folder(target.parent)

    def close(self) -> None:
        pass

    def _at(self, path: str) -> Path:
        return self.root / path if path else self.root

    def _write_temporary(self, path: str, data: bytes) -> Path:
        upload = _LocalUpload(self._at(path), self._at(temporary_name(path)))
        try:
            upload.put(1, 0, data)
            upload.sync()
        except BaseException:
            upload.abort()
            raise
        return upload.temporary

    def _walk(self, prefix: str) -> Iterable[FileInfo]:
        pending = [prefix.strip("/")]
        while pending:
            folder = pending.pop()
            try:
                entries = list(os.scandir(self._at(folder)))
            except (FileNotFoundError, NotADirectoryError):
                continue
            for entry in entries:
                path = f"{folder}/{entry.name}" if folder else entry.name
                try:
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(path)
                    else:
                        stat = entry.stat()
                        yield FileInfo(path, stat.st_size, stat.st_mtime_ns // 1_000_000)
                except FileNotFoundError:
                    continue


class _LocalUpload:
    part_size, repeatable, concurrent = 1 << 20, True, False

    def __init__(self, final: Path, temporary: Path) -> None:
        self.final, self.temporary = final, temporary
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(final.parent)) from error
        self._descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def put(self, number: int, offset: int, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(self._descriptor, view, offset)
            view, offset = view[written:], offset + written

    def sync(self) -> None:
        os.fsync(self._descriptor)
        self._close()

    def complete(self) -> None:
        self.sync()
        os.replace(self.temporary, self.final)
        _sync_folder(self.final.parent)

    def abort(self) -> None:
        self._close()
        self.temporary.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _sync_folder(folder: Path) -> None:
    """Make new names in a folder survive a power cut; filesystems that can't do it are left alone."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


class FsspecDriver:
    """Any fsspec filesystem. `exclusive` tells that its `pipe_file(mode="create")` is atomic on the server."""

    default_timeout: float | None = 60.0

    def __init__(self, filesystem: Any, root: str, protocol: str, *, exclusive: bool = False) -> None:
        self.filesystem, self.root, self.protocol, self.conditional = filesystem, root.rstrip("/"), protocol, exclusive

    def read(self, path: str, start: int = 0, end: int | None = None) -> bytes:
        whole = start == 0 and end is None
        data = self.filesystem.cat_file(self._at(path), **({} if whole else {"start": start, "end": end}))
        return bytes(data)

    def create(self, path: str, data: bytes) -> None:
        if self.conditional:
            self.filesystem.pipe_file(self._at(path), data, mode="create")
            return
        if self.filesystem.exists(self._at(path)):
            raise FileExistsError(path)
        self.put(path, data)

    def put(self, path: str, data: bytes) -> None:
        if self.conditional:  # an object store: a put is whole or not there
            self.filesystem.pipe_file(self._at(path), data)
            return
        temporary = self._at(temporary_name(path))
        self.filesystem.makedirs(temporary.rpartition("/")[0], exist_ok=True)
        self.filesystem.pipe_file(temporary, data)
        self.filesystem.mv(temporary, self._at(path))

    def upload(self, path: str) -> Upload:
        if self.conditional:  # an object store: the object appears when its stream is closed
            return _FsspecUpload(self.filesystem, self._at(path), self._at(path))
        self.filesystem.makedirs(self._at(path).rpartition("/")[0], exist_ok=True)
        return _FsspecUpload(self.filesystem, self._at(path), self._at(temporary_name(path)))

    def info(self, path: str) -> FileInfo:
        info = self.filesystem.info(self._at(path))
        if info.get("type") == "directory":
            raise IsADirectoryError(errno.EISDIR, "is a folder", path)
        return FileInfo(path, int(info["size"]), _modified_ms(info))

    def files(self, prefix: str) -> Iterable[FileInfo]:
        try:
            found = self.filesystem.find(self._at(prefix), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [FileInfo(self._relative(name), int(info["size"]), _modified_ms(info))
                for name, info in found.items() if name.rstrip("/") != self._at(prefix)]

    def folders(self, prefix: str) -> list[str]:
        try:
            found = self.filesystem.ls(self._at(prefix), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(info["name"].rstrip("/").rpartition("/")[2] for info in found if info["type"] == "directory")

    def delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            try:
                self.filesystem.rm_file(self._at(path))
            except FileNotFoundError:
                continue

    def delete_tree(self, prefix: str) -> None:
        try:
            self.filesystem.rm(self._at(prefix), recursive=True)
        except FileNotFoundError:
            return

    def local(self, path: str) -> Path | None:
        return None

    def close(self) -> None:
        pass

    def _at(self, path: str) -> str:
        return f"{self.root}/{path.strip('/')}" if path.strip("/") else self.root

    def _relative(self, name: str) -> str:
        root = self.root.lstrip("/")
        name = name.lstrip("/")
        return name[len(root):].lstrip("/") if name.startswith(root) else name


class _FsspecUpload:
    """Parts are appended to the filesystem's own stream, which is not repeatable."""

    part_size, repeatable, concurrent = 4 << 20, False, False

    def __init__(self, filesystem: Any, final: str, written: str) -> None:
        self._filesystem, self._final, self._written = filesystem, final, written
        self._stream: BinaryIO | None = filesystem.open(written, "wb")

    def put(self, number: int, offset: int, data: bytes | memoryview) -> None:
        if self._stream is None:
            raise ValueError("the upload has ended")
        self._stream.write(data)

    def complete(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None
            if self._written != self._final:
                self._filesystem.mv(self._written, self._final)

    def abort(self) -> None:
        stream, self._stream = self._stream, None
        if stream is None:
            return
        if hasattr(stream, "discard"):
            stream.discard()
        else:
            stream.close()
        try:
            self._filesystem.rm_file(self._written)
        except FileNotFoundError:
            return


class MemoryDriver(FsspecDriver):
    """fsspec's memory filesystem, which every part of a process shares; conditional by a lock of the process."""

    default_timeout: float | None = None
    _lock = threading.RLock()

    def __init__(self, filesystem: Any, root: str) -> None:
        super().__init__(filesystem, root, "memory", exclusive=True)

    def create(self, path: str, data: bytes) -> None:
        with self._lock:
            if self.filesystem.exists(self._at(path)):
                raise FileExistsError(path)
            self.filesystem.pipe_file(self._at(path), data)

    def put(self, path: str, data: bytes) -> None:
        with self._lock:
            self.filesystem.pipe_file(self._at(path), data)

    def upload(self, path: str) -> Upload:
        return _MemoryUpload(self, path)

    def files(self, prefix: str) -> Iterable[FileInfo]:
        with self._lock:
            return super().files(prefix)

    def folders(self, prefix: str) -> list[str]:
        with self._lock:
            return super().folders(prefix)

    def delete_tree(self, prefix: str) -> None:
        with self._lock:
            super().delete_tree(prefix)


class _MemoryUpload:
    part_size, repeatable, concurrent = 1 << 20, True, False

    def __init__(self, driver: MemoryDriver, path: str) -> None:
        self._driver, self._path, self._buffer = driver, path, io.BytesIO()

    def put(self, number: int, offset: int, data: bytes | memoryview) -> None:
        self._buffer.seek(offset)
        self._buffer.write(data)

    def complete(self) -> None:
        self._driver.put(self._path, self._buffer.getvalue())

    def abort(self) -> None:
        self._buffer = io.BytesIO()


def _modified_ms(info: dict[str, Any]) -> int:
    for name in ("mtime", "LastModified", "last_modified", "updated", "modified", "created"):
        value = info.get(name)
        if isinstance(value, datetime):
            aware = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
            return int(aware.timestamp() * 1000)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return int(value * 1000)
        if isinstance(value, str):
            return int(datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp() * 1000)
    return 0

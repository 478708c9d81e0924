"""What a snapshot's files are and where they go: contracts that the checkpoint layer fulfils, and a local twin."""

from __future__ import annotations

import base64
import io
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import xxhash

from statebackend.errors import CorruptData, InvalidRequest, NotFound

_CHUNK = 1 << 20
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class StateFile:
    """A stored file: a path relative to whatever store holds it, its size, and its XXH3-128 checksum in hex.

    `shared` files may be referenced by several checkpoints; the others belong to one. The path is refused if it is
    absolute or climbs (`..`), because it is read back from data. A small file may be carried `inline`; its path is
    then only a name.
    """

    path: str
    size: int
    checksum: str
    shared: bool = False
    inline: bytes | None = None

    def __post_init__(self) -> None:
        relative_path(self.path)
        if self.size < 0:
            raise CorruptData("a file reference has a negative size", path=self.path, found=self.size)

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {"path": self.path, "size": self.size, "checksum": self.checksum}
        if self.shared:
            data["shared"] = True
        if self.inline is not None:
            data["inline"] = base64.b64encode(self.inline).decode()
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StateFile:
        try:
            inline = base64.b64decode(data["inline"], validate=True) if "inline" in data else None
            path, size, checksum = str(data["path"]), int(data["size"]), str(data["checksum"])
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptData(f"a file reference can't be read: {error!r}", path=data.get("path")) from error
        return cls(path, size, checksum, bool(data.get("shared", False)), inline)

    def inline_verified(self) -> bytes:
        """The bytes of a file that is stored inside its reference."""
        if self.inline is None or len(self.inline) != self.size or \
                xxhash.xxh3_128_hexdigest(self.inline) != self.checksum:
            raise CorruptData("a file stored inside the metadata is damaged", path=self.path)
        return self.inline


def relative_path(path: str) -> str:
    """The path itself if it stays below its root; refused otherwise."""
    # Plain string tests: a large checkpoint refers to a hundred thousand files.
    if not path or path == "." or path[0] == "/" or (".." in path and ".." in path.split("/")) \
            or "\\" in path or "\0" in path or "://" in path:
        raise CorruptData("a file reference points outside its folder", path=path)
    return path


class FileWriter(Protocol):
    """A file being written. `finish` makes it durable and tells what it became; `abort` leaves nothing behind."""

    def write(self, data: bytes | memoryview) -> int: ...
    def finish(self) -> StateFile: ...
    def abort(self) -> None: ...


class SnapshotTarget(Protocol):
    """Where a snapshot's files go. Calls may come from several threads; errors are `Unavailable`."""

    def create(self, hint: str, *, shared: bool) -> FileWriter:
        """Start a new file; `hint` (letters, digits, `-_.`) becomes part of its unique name."""

    def upload(self, local: Path, hint: str, *, shared: bool) -> StateFile:
        """Store a copy (or a hard link) of a finished, immutable local file."""


class SnapshotSource(Protocol):
    """Where a snapshot's files come from. Damage is `CorruptData`, absence `NotFound`, both naming the file."""

    def open(self, file: StateFile) -> BinaryIO:
        """Open for reading with seek; size and checksum have been, or are while reading, verified."""

    def fetch(self, file: StateFile, local: Path) -> None:
        """Place the file at `local`: linked where possible, else copied and verified on the way."""


@contextmanager
def writing(target: SnapshotTarget, hint: str, *, shared: bool) -> Iterator[tuple[FileWriter, list[StateFile]]]:
    """A file that is finished when the block ends and aborted when it raises; the list receives the result."""
    writer, done = target.create(hint, shared=shared), list[StateFile]()
    try:
        yield writer, done
        done.append(writer.finish())
    except BaseException:
        writer.abort()
        raise


class LocalFiles:
    """A folder as snapshot target and source: for embedded use, tests and local copies."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)

    def create(self, hint: str, *, shared: bool) -> FileWriter:
        if not _PLAIN_NAME.fullmatch(hint):
            raise InvalidRequest("a file hint must be a plain name", found=hint)
        return _LocalWriter(self.directory, f"{hint}-{uuid.uuid4().hex}", shared)

    def upload(self, local: Path, hint: str, *, shared: bool) -> StateFile:
        writer = self.create(hint, shared=shared)
        try:
            with open(local, "rb") as source:
                while chunk := source.read(_CHUNK):
                    writer.write(chunk)
            return writer.finish()
        except BaseException:
            writer.abort()
            raise

    def open(self, file: StateFile) -> BinaryIO:
        if file.inline is not None:
            return io.BytesIO(file.inline_verified())
        path = self._existing(file)
        verify_local(path, file)
        return open(path, "rb")

    def fetch(self, file: StateFile, local: Path) -> None:
        if file.inline is not None:
            data = file.inline_verified()
            local.unlink(missing_ok=True)  # it may be a link to a stored file, which must not be written through
            local.write_bytes(data)
            return
        path = self._existing(file)
        verify_local(path, file)
        local.unlink(missing_ok=True)
        try:
            os.link(path, local)
        except OSError:
            shutil.copyfile(path, local)

    def _existing(self, file: StateFile) -> Path:
        path = self.directory / relative_path(file.path)
        if not path.is_file():
            raise NotFound("a state file is missing", path=str(path))
        return path


def verify_local(path: Path, file: StateFile) -> None:
    """Compare size, then checksum, of a local file with its reference."""
    size = path.stat().st_size
    if size != file.size:
        raise CorruptData("a state file has another size than recorded", path=str(path), expected=file.size, found=size)
    digest = xxhash.xxh3_128()
    with open(path, "rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != file.checksum:
        raise CorruptData("a state file is damaged: its checksum differs", path=str(path), expected=file.checksum,
                          found=digest.hexdigest())


class _LocalWriter:
    def __init__(self, directory: Path, name: str, shared: bool) -> None:
        self._final = directory / name
        self._temporary = directory / f".{name}.tmp"
        self._shared = shared
        self._stream = open(self._temporary, "wb")  # noqa: SIM115
        self._digest = xxhash.xxh3_128()
        self._size = 0

    def write(self, data: bytes | memoryview) -> int:
        self._digest.update(data)
        written = self._stream.write(data)
        self._size += written
        return written

    def finish(self) -> StateFile:
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        os.replace(self._temporary, self._final)
        return StateFile(self._final.name, self._size, self._digest.hexdigest(), self._shared)

    def abort(self) -> None:
        try:
            self._stream.close()  # writes what is buffered, which fails once more on a full disk
        except OSError:
            pass
        finally:
            self._temporary.unlink(missing_ok=True)

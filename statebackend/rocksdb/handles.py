"""What a RocksDB snapshot handle says: databases as table files, and a log of entry files on top.

The grammar is in docs/formats/rocksdb.md. This module only builds and reads the JSON; it touches no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from statebackend.backend import KeyedHandle
from statebackend.errors import CorruptData, IncompatibleState
from statebackend.files import StateFile
from statebackend.keygroups import KeyGroupRange

FORMAT = "rocksdb"
FORMAT_VERSION = 1
MAX_NAME = 64


@dataclass(frozen=True)
class StoredPart:
    """One database as stored: the key groups it holds, and its files by the names RocksDB knows them by."""

    key_groups: KeyGroupRange
    files: Mapping[str, StateFile]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files.values())


@dataclass(frozen=True)
class Chain:
    """A materialisation and the log of changes on top: what a completed checkpoint holds and the next builds on."""

    parts: tuple[StoredPart, ...] = ()
    log: tuple[StateFile, ...] = ()

    @property
    def log_bytes(self) -> int:
        return sum(file.size for file in self.log)

    def files(self) -> tuple[StateFile, ...]:
        return (*(file for part in self.parts for file in part.files.values()), *self.log)

    def meta(self, next_sequence: int) -> dict[str, Any]:
        """The `meta` of a handle whose files are `files()`."""
        meta: dict[str, Any] = {"version": FORMAT_VERSION, "next_sequence": next_sequence}
        if not self.parts:
            return meta
        position, parts = 0, []
        for part in self.parts:
            parts.append({"key_groups": [part.key_groups.first, part.key_groups.last], "names": list(part.files)})
            position += len(part.files)
        return {**meta, "parts": parts, "log": len(self.log)}


def chain_of(handle: KeyedHandle) -> Chain:
    """The chain that a handle of this format describes."""
    version = handle.meta.get("version")
    if version != FORMAT_VERSION:
        raise IncompatibleState("a RocksDB snapshot has a version that this release does not read",
                                expected=FORMAT_VERSION, found=version, hint="use a newer release of holdfast")
    try:
        position, parts = 0, list[StoredPart]()
        for part in handle.meta["parts"]:
            first, last = part["key_groups"]
            names = [_plain(str(name)) for name in part["names"]]
            files = handle.files[position:position + len(names)]
            parts.append(StoredPart(KeyGroupRange(int(first), int(last)), dict(zip(names, files, strict=True))))
            position += len(names)
        log = handle.files[position:]
        if len(log) != int(handle.meta["log"]):
            raise ValueError(f"{len(log)} log files where {handle.meta['log']} are named")
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptData(f"a RocksDB snapshot handle can't be read: {error!r}") from error
    return Chain(tuple(parts), tuple(log))


def _plain(name: str) -> str:
    """A file name that stays in its folder; it comes from data."""
    if not name or len(name) > MAX_NAME or name.startswith(".") or not all(c.isalnum() or c in "-_." for c in name):
        raise ValueError(f"{name!r} is no file name of a database")
    return name

"""How a snapshot handle of any format is read as entries, so that every backend restores from every other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.metadata import entry_points
from typing import Protocol

import pyarrow as pa

from statebackend.backend import KeyedHandle
from statebackend.entries import merge_entries, read_entries
from statebackend.errors import IncompatibleState
from statebackend.files import SnapshotSource
from statebackend.keygroups import KeyGroupRange


class SnapshotFormat(Protocol):
    """Reads one handle format. A plug-in registers a factory under the entry point group `holdfast.formats`."""

    def layers(self, handle: KeyedHandle, source: SnapshotSource,
               key_groups: KeyGroupRange) -> list[Iterable[pa.RecordBatch]]:
        """Entry batches to be replayed oldest layer first, each layer sorted by key group and cut to the range."""


class EntriesFormat:
    """Handles whose files are entry files, oldest first."""

    def layers(self, handle: KeyedHandle, source: SnapshotSource,
               key_groups: KeyGroupRange) -> list[Iterable[pa.RecordBatch]]:
        return [read_entries(source, file, key_groups) for file in handle.files]


_BUILT_IN = {
    "entries": "statebackend.formats:EntriesFormat",
    "rocksdb": "statebackend.rocksdb:RocksDBFormat",
}


def format_of(handle: KeyedHandle) -> SnapshotFormat:
    """The reader of a handle's format."""
    if handle.format in _BUILT_IN:
        module, attribute = _BUILT_IN[handle.format].split(":")
        reader: SnapshotFormat = getattr(__import__(module, fromlist=[attribute]), attribute)()
        return reader
    for entry in entry_points(group="holdfast.formats"):
        if entry.name == handle.format:
            loaded: SnapshotFormat = entry.load()()
            return loaded
    raise IncompatibleState("a snapshot is stored in a format that is not installed here", found=handle.format)


def handle_layers(handle: KeyedHandle, source: SnapshotSource,
                  key_groups: KeyGroupRange) -> list[Iterable[pa.RecordBatch]]:
    """The layers of a handle, cut to a range of key groups."""
    return format_of(handle).layers(handle, source, key_groups)


def merged_entries(handle: KeyedHandle, source: SnapshotSource,
                   key_groups: KeyGroupRange | None = None) -> Iterator[pa.RecordBatch]:
    """The final entries of a handle: puts only, sorted by entry key; memory is bounded by the largest key group."""
    return merge_entries(handle_layers(handle, source, key_groups or handle.key_groups))

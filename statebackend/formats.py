"""How a snapshot handle of any format is read as entries, so that every backend restores from every other."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from itertools import pairwise
from typing import Any, Protocol

import pyarrow as pa

from statebackend.backend import KeyedHandle
from statebackend.entries import merge_entries, read_entries
from statebackend.errors import CorruptData, IncompatibleState
from statebackend.files import SnapshotSource, StateFile
from statebackend.keygroups import KeyGroupRange
from statebackend.operator_state import OperatorStateSnapshot
from statebackend.schema import require_key_type
from statebackend.types import StateType, state_type_from_json

ChannelPart = tuple[str, int, int, bool, list[bytes], tuple[int, ...]]
"""Records in flight on one channel: edge, sender, receiver, output, batches as the records codec wrote them, and how many
receivers the operator had at the checkpoint and after each re-cut since; empty where it was never re-cut."""


class SnapshotFormat(Protocol):
    """Reads one handle format. A plug-in registers a factory under the entry point group `holdfast.formats`."""

    def layers(self, handle: KeyedHandle, source: SnapshotSource,
               key_groups: KeyGroupRange) -> list[Iterable[pa.RecordBatch]]:
        """Entry batches to be replayed oldest layer first, each layer sorted by key group and cut to the range."""


class OperatorStateFormat(Protocol):
    """What a format has besides where it keeps operator state in files of its own."""

    def operator_state(self, note: Mapping[str, Any], source: SnapshotSource) -> OperatorStateSnapshot:
        """The operator state that `note`, left in its place, points to."""


class ChannelStateFormat(Protocol):
    """What a format has besides where it keeps records in flight in files of its own."""

    def channel_state(self, note: Mapping[str, Any], source: SnapshotSource) -> list[ChannelPart]:
        """The records in flight that `note`, left in their place, points to."""


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
    plugged: SnapshotFormat = _plug_in(handle.format)
    return plugged


def _plug_in(name: str) -> Any:
    for entry in entry_points(group="holdfast.formats"):
        if entry.name == name:
            return entry.load()()
    raise IncompatibleState("a snapshot is stored in a format that is not installed here", found=name)


def require_restorable(handles: Sequence[KeyedHandle], key_type: StateType, max_parallelism: int, uid: str) -> None:
    """Refuse handles that don't fit the operator, and two that hold the same key group: which is right, none can tell."""
    for handle in handles:
        require_key_type(state_type_from_json(handle.key_type), key_type, uid)
        if handle.max_parallelism != max_parallelism:
            raise IncompatibleState("a snapshot was taken with another max parallelism", operator=uid,
                                    expected=max_parallelism, found=handle.max_parallelism,
                                    hint="keep the max parallelism, or change it with `holdfast savepoint rescale`")
    for left, right in pairwise(sorted((handle.key_groups for handle in handles), key=lambda held: held.first)):
        if left.last >= right.first:
            raise IncompatibleState("two parts of a snapshot hold the same key group", operator=uid,
                                    key_group=right.first, hint="give each part once, and parts of one checkpoint only")


def handle_layers(handle: KeyedHandle, source: SnapshotSource,
                  key_groups: KeyGroupRange) -> list[Iterable[pa.RecordBatch]]:
    """The layers of a handle, cut to a range of key groups."""
    return format_of(handle).layers(handle, source, key_groups)


def merged_entries(handle: KeyedHandle, source: SnapshotSource,
                   key_groups: KeyGroupRange | None = None) -> Iterator[pa.RecordBatch]:
    """The final entries of a handle: puts only, sorted by entry key; memory is bounded by the largest key group."""
    return merge_entries(handle_layers(handle, source, key_groups or handle.key_groups))


def operator_state(file: StateFile, source: SnapshotSource) -> OperatorStateSnapshot:
    """The operator state that a subtask's file holds: the state itself, or a note of where another format keeps it."""
    with source.open(file) as stream:
        data = stream.read()
    if data[:1] != b"{":
        return OperatorStateSnapshot.from_bytes(data)
    note = _note(data, file)
    reader: OperatorStateFormat = _plug_in(str(note["format"]))
    return reader.operator_state(note, source)


def noted_channel_state(data: bytes, file: StateFile, source: SnapshotSource) -> list[ChannelPart] | None:
    """The records in flight that `data`, the bytes of a subtask's file, points to; None where it is no note."""
    if data[:1] != b"{":
        return None
    note = _note(data, file)
    reader: ChannelStateFormat = _plug_in(str(note["format"]))
    return reader.channel_state(note, source)


def _note(data: bytes, file: StateFile) -> Mapping[str, Any]:
    try:
        note = json.loads(data)
        note["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptData(f"a note of where state is kept can't be decoded: {error}", path=file.path) from error
    return note  # type: ignore[no-any-return]

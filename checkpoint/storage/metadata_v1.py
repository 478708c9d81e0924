"""Format version 1 of `_metadata` (docs/formats/metadata.md): frozen. A later version gets a module of its own.

JSON with the version first and a checksum last: the XXH3-128 of every byte before `,"checksum":`. What many subtasks
share (schemas, key types, handle heads) is stored once per operator and referred to by position, and equal parts
become one object again on reading: 10,000 subtasks are read in well under a second.
"""

from __future__ import annotations

import base64
import binascii
import gc
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import xxhash

from checkpoint.storage.metadata import (
    ChannelStateEntry,
    CheckpointMetadata,
    MetadataSummary,
    OperatorEntry,
    SubtaskEntry,
)
from statebackend.backend import KeyedHandle
from statebackend.errors import CorruptData, HoldfastError, InvalidRequest
from statebackend.files import StateFile
from statebackend.keygroups import KeyGroupRange
from statebackend.schema import StateSchema

VERSION = 1
_TAIL = re.compile(rb',"checksum":"([0-9a-f]{32})"\}\s*$')
_TAIL_LENGTH = 64

_encoder = msgspec.json.Encoder()


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Hundreds of thousands of small objects and no cycle among them: the collector would take most of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Table:
    """Values stored once and referred to by position."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._positions: dict[bytes, int] = {}
        self._by_identity: dict[int, tuple[Any, int]] = {}

    def position(self, thing: Any, to_json: Callable[[Any], Any]) -> int:
        known = self._by_identity.get(id(thing))
        if known is not None and known[0] is thing:
            return known[1]
        value = to_json(thing)
        encoded = _encoder.encode(value)
        position = self._positions.get(encoded)
        if position is None:
            position = self._positions[encoded] = len(self.values)
            self.values.append(value)
        self._by_identity[id(thing)] = (thing, position)
        return position


# the format

class _FileV1(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    path: str
    size: int
    checksum: str
    shared: bool = False
    inline: str | None = None


class _HandleV1(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    format: str
    key_groups: tuple[int, int]
    max_parallelism: int
    key_type: int
    schemas: tuple[int, ...]
    files: tuple[_FileV1, ...]
    new_bytes: int = 0
    meta: dict[str, Any] = {}


class _ChannelV1(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    edge: str
    sender: int
    receiver: int
    file: _FileV1


class _SubtaskV1(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    index: int
    finished: bool = False
    keyed: tuple[_HandleV1, ...] = ()
    operator: _FileV1 | None = None
    in_flight: _FileV1 | None = None
    input_channels: tuple[_ChannelV1, ...] = ()
    output_channels: tuple[_ChannelV1, ...] = ()
    operator_files: tuple[_FileV1, ...] = ()


class _OperatorV1(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    uid: str
    name: str
    parallelism: int
    max_parallelism: int
    schemas: list[dict[str, Any]] = []
    key_types: list[dict[str, Any]] = []
    subtasks: tuple[_SubtaskV1, ...] = ()


class _HeadV1(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, kw_only=True):
    version: int
    kind: str
    format: str
    job_id: str
    job_name: str
    checkpoint_id: int
    generation: int
    trigger_timestamp: int
    completed_timestamp: int
    parent: int | None = None


class _MetadataV1(_HeadV1, frozen=True, omit_defaults=True, gc=False, kw_only=True):
    unaligned: bool = False
    properties: dict[str, Any] = {}
    operators: tuple[_OperatorV1, ...] = ()


# writing

def encode(metadata: CheckpointMetadata) -> bytes:
    """The bytes of `_metadata`."""
    with _collector_paused():
        raw = _MetadataV1(
            version=VERSION, kind=metadata.kind, format=metadata.format, job_id=str(metadata.job_id),
            job_name=str(metadata.job_name), checkpoint_id=int(metadata.checkpoint_id),
            generation=metadata.generation, parent=metadata.parent, trigger_timestamp=metadata.trigger_timestamp,
            completed_timestamp=metadata.completed_timestamp, unaligned=metadata.unaligned,
            properties=dict(metadata.properties),
            operators=tuple([_operator(operator) for operator in metadata.operators]))
        try:
            body = _encoder.encode(raw)[:-1]
        except TypeError as error:
            raise InvalidRequest(f"metadata holds a value that is not JSON: {error}",
                                 checkpoint_id=metadata.checkpoint_id) from error
    return body + b',"checksum":"' + xxhash.xxh3_128_hexdigest(body).encode() + b'"}'


def _operator(operator: OperatorEntry) -> _OperatorV1:
    schemas, key_types = _Table(), _Table()
    subtasks = tuple([_subtask(subtask, schemas, key_types) for subtask in operator.subtasks])
    return _OperatorV1(operator.uid, operator.name, operator.parallelism, operator.max_parallelism, schemas.values,
                       key_types.values, subtasks)


def _subtask(subtask: SubtaskEntry, schemas: _Table, key_types: _Table) -> _SubtaskV1:
    return _SubtaskV1(
        subtask.index, subtask.finished,
        tuple([_handle(handle, schemas, key_types) for handle in subtask.keyed]),
        None if subtask.operator is None else _file(subtask.operator),
        None if subtask.in_flight is None else _file(subtask.in_flight),
        tuple([_channel(channel) for channel in subtask.input_channels]),
        tuple([_channel(channel) for channel in subtask.output_channels]),
        tuple([_file(file) for file in subtask.operator_files]))


def _handle(handle: KeyedHandle, schemas: _Table, key_types: _Table) -> _HandleV1:
    return _HandleV1(
        handle.format, (handle.key_groups.first, handle.key_groups.last), handle.max_parallelism,
        key_types.position(handle.key_type, dict),
        tuple([schemas.position(schema, StateSchema.to_json) for schema in handle.schemas]),
        tuple([_file(file) for file in handle.files]), handle.new_bytes, dict(handle.meta))


def _file(file: StateFile) -> _FileV1:
    inline = None if file.inline is None else base64.b64encode(file.inline).decode()
    return _FileV1(file.path, file.size, file.checksum, file.shared, inline)


def _channel(channel: ChannelStateEntry) -> _ChannelV1:
    return _ChannelV1(channel.edge, channel.sender, channel.receiver, _file(channel.file))


# reading

_head_decoder = msgspec.json.Decoder(_HeadV1)
_decoder = msgspec.json.Decoder(_MetadataV1)


def decode(data: bytes, path: str) -> CheckpointMetadata:
    """The metadata in a file, or what is wrong with it."""
    _require_whole(data, path)
    try:
        with _collector_paused():
            return _metadata(_decoder.decode(data))
    except (msgspec.MsgspecError, IndexError, KeyError, binascii.Error, ValueError) as error:
        raise CorruptData(f"the checkpoint's metadata can't be read: {error}", path=path) from error
    except HoldfastError as error:
        error.context.setdefault("metadata", path)
        raise


def summary(data: bytes, path: str) -> MetadataSummary:
    """The head alone, of a file whose checksum is right."""
    _require_whole(data, path)
    try:
        head = _head_decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise CorruptData(f"the checkpoint's metadata can't be read: {error}", path=path) from error
    return MetadataSummary(head.job_id, head.job_name, head.checkpoint_id, head.generation, head.kind, head.format,
                           head.trigger_timestamp, head.completed_timestamp, head.parent)


def _require_whole(data: bytes, path: str) -> None:
    start = max(0, len(data) - _TAIL_LENGTH)
    tail = _TAIL.search(data, start)
    if tail is None:
        raise CorruptData("the checkpoint's metadata is cut short or was changed by hand", path=path, size=len(data),
                          hint="use an older checkpoint, or copy it again from where it came")
    found = xxhash.xxh3_128_hexdigest(memoryview(data)[:tail.start()])
    if found != tail[1].decode():
        raise CorruptData("the checkpoint's metadata is damaged: its checksum differs", path=path,
                          expected=tail[1].decode(), found=found, hint="use an older checkpoint")


def _metadata(raw: _MetadataV1) -> CheckpointMetadata:
    return CheckpointMetadata(
        raw.job_id, raw.job_name, raw.checkpoint_id, raw.generation, raw.kind, raw.format, raw.trigger_timestamp,
        raw.completed_timestamp, raw.unaligned, raw.parent, tuple([_read_operator(item) for item in raw.operators]),
        raw.properties)


def _read_operator(raw: _OperatorV1) -> OperatorEntry:
    schemas = [StateSchema.from_json(schema) for schema in raw.schemas]
    combinations: dict[tuple[int, ...], tuple[StateSchema, ...]] = {}

    def schemas_at(positions: tuple[int, ...]) -> tuple[StateSchema, ...]:
        known = combinations.get(positions)
        if known is None:
            known = combinations[positions] = tuple(schemas[position] for position in positions)
        return known

    def handle(item: _HandleV1) -> KeyedHandle:
        first, last = item.key_groups
        return KeyedHandle(item.format, KeyGroupRange(first, last), item.max_parallelism, raw.key_types[item.key_type],
                           schemas_at(item.schemas), tuple([_read_file(file) for file in item.files]), item.meta,
                           item.new_bytes)

    subtasks = tuple([
        SubtaskEntry(item.index, item.finished, tuple([handle(part) for part in item.keyed]),
                     None if item.operator is None else _read_file(item.operator),
                     tuple([_read_channel(channel) for channel in item.input_channels]),
                     tuple([_read_channel(channel) for channel in item.output_channels]),
                     None if item.in_flight is None else _read_file(item.in_flight),
                     tuple([_read_file(file) for file in item.operator_files]))
        for item in raw.subtasks])
    return OperatorEntry(raw.uid, raw.name, raw.parallelism, raw.max_parallelism, subtasks)


def _read_file(raw: _FileV1) -> StateFile:
    inline = None if raw.inline is None else base64.b64decode(raw.inline, validate=True)
    return StateFile(raw.path, raw.size, raw.checksum, raw.shared, inline)


def _read_channel(raw: _ChannelV1) -> ChannelStateEntry:
    return ChannelStateEntry(raw.edge, raw.sender, raw.receiver, _read_file(raw.file))

"""Entry bytes to typed columns and back, without a Python object per row.

An entry key is `key group | state id | key | namespace | suffix` (statebackend/entries.py). The parts lie one behind
the other in the Arrow buffer of a batch, so splitting a column is finding offsets, not copying bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from savepoint.format import (
    EXPIRES_AT,
    EXPIRES_TYPE,
    KEY,
    KEY_GROUP,
    KEY_GROUP_TYPE,
    LIST_INDEX,
    LIST_INDEX_TYPE,
    MAP_KEY,
    MAP_VALUE,
    NAMESPACE,
    TIMER_TYPE,
    TIMESTAMP,
    VALUE,
)
from statebackend.codecs.arrays import pieces, rows_of_one_width
from statebackend.codecs.containers import OptionalType
from statebackend.codecs.records import FieldsType
from statebackend.descriptors import StateKind
from statebackend.entries import entry_batch
from statebackend.errors import CorruptData
from statebackend.schema import StateSchema
from statebackend.ttl import NEVER
from statebackend.types import StateType

Offsets = npt.NDArray[np.int64]
_SIGN = np.uint64(1 << 63)
_PREFIX = 4


@dataclass(frozen=True)
class StateLayout:
    """The columns of one keyed state or of timers, and how entries become them. `decoder()` is for one sorted pass."""

    schema: StateSchema
    key_type: StateType

    @cached_property
    def arrow_schema(self) -> pa.Schema:
        """The columns in file order; those that this state has no use for are left out."""
        schema, fields = self.schema, [pa.field(KEY_GROUP, KEY_GROUP_TYPE, False)]
        if schema.kind == StateKind.TIMER:
            fields.append(pa.field(TIMESTAMP, TIMER_TYPE, False))
        fields.append(pa.field(KEY, self.key_type.arrow_type, False))
        if schema.namespace_type is not None:
            fields.append(pa.field(NAMESPACE, schema.namespace_type.arrow_type))
        if schema.kind == StateKind.LIST:
            fields.append(pa.field(LIST_INDEX, LIST_INDEX_TYPE, False))
        if schema.kind == StateKind.MAP:
            fields.append(pa.field(MAP_KEY, _present(schema.map_key_type).arrow_type))
        if schema.kind != StateKind.TIMER:
            name = MAP_VALUE if schema.kind == StateKind.MAP else VALUE
            fields.append(pa.field(name, schema.value_type.arrow_type))
            if schema.ttl is not None:
                fields.append(pa.field(EXPIRES_AT, EXPIRES_TYPE))
        return pa.schema(fields)

    @cached_property
    def key_columns(self) -> list[str]:
        """The columns that together name an entry."""
        names = [KEY, NAMESPACE, LIST_INDEX, MAP_KEY, TIMESTAMP]
        return [name for name in names if name in self.arrow_schema.names]

    @cached_property
    def value_columns(self) -> list[str]:
        return [name for name in (VALUE, MAP_VALUE, EXPIRES_AT) if name in self.arrow_schema.names]

    def decoder(self) -> EntryDecoder:
        return EntryDecoder(self)

    def encode(self, batch: pa.RecordBatch, state_id: int) -> pa.RecordBatch:
        """Entries of a batch of rows; list indexes become sequences."""
        columns = {name: batch.column(name) for name in batch.schema.names}
        keys = self.encode_keys(columns, len(batch), columns[KEY_GROUP].to_numpy(), state_id)
        return entry_batch(keys, self._encode_values(columns, len(batch)))

    def encode_keys(self, columns: dict[str, pa.Array], rows: int, groups: npt.NDArray[Any],
                    state_id: int) -> pa.BinaryArray:
        """Entry keys of rows in these key groups."""
        prefix = np.empty((rows, _PREFIX), np.uint8)
        prefix[:, :2] = np.ascontiguousarray(groups.astype(">u2")).view(np.uint8).reshape(rows, 2)
        prefix[:, 2:] = np.frombuffer(state_id.to_bytes(2, "big"), np.uint8)
        parts: list[Any] = [prefix]
        if self.schema.kind == StateKind.TIMER:
            parts.append(_ordered_bytes(columns[TIMESTAMP]))
        parts += [self.key_type.encode_key_array(columns[KEY]), self._encode_namespace(columns, rows)]
        if self.schema.kind == StateKind.LIST:
            parts.append(np.ascontiguousarray(columns[LIST_INDEX].to_numpy().astype(">u8")).view(np.uint8).reshape(rows, 8))
        if self.schema.kind == StateKind.MAP:
            parts.append(_present(self.schema.map_key_type).encode_key_array(columns[MAP_KEY]))
        return join_parts(parts, rows)

    def _encode_namespace(self, columns: dict[str, pa.Array], rows: int) -> Any:
        if self.schema.namespace_type is None:
            return np.zeros((rows, 1), np.uint8)
        encoded = self.schema.namespace_type.encode_key_array(columns[NAMESPACE])
        marked = pc.binary_join_element_wise(pa.scalar(b"\x01", pa.binary()), encoded, pa.scalar(b"", pa.binary()))
        return pc.fill_null(marked, b"\x00")

    def _encode_values(self, columns: dict[str, pa.Array], rows: int) -> pa.BinaryArray:
        if self.schema.kind == StateKind.TIMER:
            return pa.array([b""] * rows, pa.binary())
        column = columns[MAP_VALUE if self.schema.kind == StateKind.MAP else VALUE]
        values = self.schema.value_type.encode_array(column)
        if values.null_count:
            values = pc.fill_null(values, self._null_value())
        if self.schema.ttl is None:
            return values
        times = pc.fill_null(columns[EXPIRES_AT].cast(pa.int64()), NEVER)
        return join_parts([_ordered_bytes(times), values], rows)

    def _null_value(self) -> bytes:
        if not self.schema.value_type.nullable:
            raise CorruptData("a state has null where its type takes none", state=self.schema.name,
                              expected=str(self.schema.value_type))
        return self.schema.value_type.encode(None)


class EntryDecoder:
    """Entries of one state to rows, in one pass over sorted batches; it numbers list elements as it goes."""

    def __init__(self, layout: StateLayout) -> None:
        self._layout = layout
        self._last_head: bytes | None = None
        self._next_index = 0

    def decode(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        layout, schema = self._layout, self._layout.schema
        rows = batch.num_rows
        split = _SplitKeys(batch.column(0), layout)
        columns: dict[str, pa.Array] = {KEY_GROUP: pa.array(split.groups.astype(np.int32))}
        if schema.kind == StateKind.TIMER:
            columns[TIMESTAMP] = pa.array(_numbers(split.timestamp()))
        columns[KEY] = decode_keys(layout.key_type, split.key())
        if schema.namespace_type is not None:
            columns[NAMESPACE] = decode_keys(schema.namespace_type, split.namespace())
        elif split.named.any():
            raise CorruptData("a state without namespaces holds an entry with one", state=schema.name)
        if schema.kind == StateKind.LIST:
            columns[LIST_INDEX] = pa.array(self._list_indexes(split.head(), rows))
        if schema.kind == StateKind.MAP:
            columns[MAP_KEY] = decode_keys(_present(schema.map_key_type), split.suffix())
        if schema.kind != StateKind.TIMER:
            self._decode_values(batch.column(1), columns)
        arrow_schema = layout.arrow_schema
        return pa.RecordBatch.from_arrays([columns[name] for name in arrow_schema.names], schema=arrow_schema)

    def _decode_values(self, values: pa.BinaryArray, columns: dict[str, pa.Array]) -> None:
        schema = self._layout.schema
        if schema.ttl is not None:
            head, values = split_at(values, 8, "a value with TTL")
            times = _numbers(head)
            columns[EXPIRES_AT] = pa.array(times, mask=times == NEVER).cast(EXPIRES_TYPE)
        name = MAP_VALUE if schema.kind == StateKind.MAP else VALUE
        columns[name] = schema.value_type.decode_array(values)

    def _list_indexes(self, heads: pa.BinaryArray, rows: int) -> npt.NDArray[np.int64]:
        """The position of each element in its list: the sequences of the entries may have gaps."""
        if rows == 0:
            return np.zeros(0, np.int64)
        starts = np.empty(rows, np.bool_)
        first = heads[0].as_py()
        starts[0] = True
        starts[1:] = pc.not_equal(heads.slice(0, rows - 1), heads.slice(1)).to_numpy(zero_copy_only=False)
        numbers = np.arange(rows, dtype=np.int64)
        run_start = np.maximum.accumulate(np.where(starts, numbers, 0))
        indexes = numbers - run_start
        if first == self._last_head:
            indexes[:_run_end(starts)] += self._next_index
        self._last_head, self._next_index = heads[rows - 1].as_py(), int(indexes[-1]) + 1
        return indexes


def _run_end(starts: npt.NDArray[np.bool_]) -> int:
    later = np.flatnonzero(starts[1:])
    return int(later[0]) + 1 if len(later) else len(starts)


class _SplitKeys:
    """Where the parts of each entry key lie in the data buffer."""

    def __init__(self, keys: pa.BinaryArray, layout: StateLayout) -> None:
        rows = len(keys)
        buffers = keys.buffers()
        self._buffer = buffers[2] if buffers[2] is not None else pa.py_buffer(b"")
        self._data = np.frombuffer(self._buffer, np.uint8)
        bounds = np.frombuffer(buffers[1], np.int32, rows + 1, keys.offset * 4).astype(np.int64) if rows else \
            np.zeros(1, np.int64)
        self._begin, self._end = bounds[:-1], bounds[1:]
        self._last = bounds[-1]
        if rows and int((self._end - self._begin).min()) < _PREFIX + 1:
            raise CorruptData("an entry key is too short", state=layout.schema.name)
        self.groups = self._data[self._begin].astype(np.uint16) << 8 | self._data[self._begin + 1]
        self._key_begin = self._begin + _PREFIX + (8 if layout.schema.kind == StateKind.TIMER else 0)
        try:
            self._key_end = self._key_ends(layout)
            flags = self._data[self._key_end]
            self.named = flags == 1
            if rows and int(flags.max()) > 1:
                raise IndexError("a namespace starts with neither 00 nor 01")
            self._namespace_end = self._key_end + 1
            if self.named.any():
                kind = _present(layout.schema.namespace_type, layout.schema.name)
                self._namespace_end[self.named] = key_ends(kind, self._data, self._key_end[self.named] + 1)
        except IndexError as error:
            raise CorruptData(f"an entry key can't be split: {error}", state=layout.schema.name) from error
        if (self._namespace_end > self._end).any():
            raise CorruptData("an entry key ends too early", state=layout.schema.name)

    def _key_ends(self, layout: StateLayout) -> Offsets:
        """Counted from the end of the row where what follows the key has a fixed length; else looked for."""
        after = _suffix_width(layout.schema)
        if layout.key_type.fixed_key_width is None and layout.schema.namespace_type is None and after is not None:
            return np.maximum(self._end - after - 1, self._begin)
        return key_ends(layout.key_type, self._data, self._key_begin)

    def key(self) -> pa.BinaryArray:
        return self._piece(self._key_begin, self._key_end)

    def timestamp(self) -> pa.BinaryArray:
        return self._piece(self._key_begin - 8, self._key_begin)

    def namespace(self) -> pa.BinaryArray:
        piece = self._piece(self._key_end + 1, self._namespace_end)
        return piece if self.named.all() else pc.if_else(pa.array(self.named), piece, pa.scalar(None, pa.binary()))

    def suffix(self) -> pa.BinaryArray:
        return self._piece(self._namespace_end, self._end)

    def head(self) -> pa.BinaryArray:
        """Everything before the suffix: what all elements of one list share."""
        return self._piece(self._begin, self._namespace_end)

    def _piece(self, begin: Offsets, end: Offsets) -> pa.BinaryArray:
        return slices(self._buffer, self._data, begin, end)


def _suffix_width(schema: StateSchema) -> int | None:
    if schema.kind == StateKind.MAP:
        return None if schema.map_key_type is None else schema.map_key_type.fixed_key_width
    return 8 if schema.kind == StateKind.LIST else 0


def slices(buffer: pa.Buffer, data: npt.NDArray[np.uint8], begin: Offsets, end: Offsets) -> pa.BinaryArray:
    """A binary array of `data[begin[i]:end[i]]`; the slices are in order and do not overlap."""
    rows = len(begin)
    if rows == 0:
        return pa.array([], pa.binary())
    width, step = int(end[0] - begin[0]), int(begin[1] - begin[0]) if rows > 1 else 0
    if rows > 1 and (end - begin == width).all() and (np.diff(begin) == step).all() and step >= width:
        view = np.lib.stride_tricks.as_strided(data[int(begin[0]):], (rows, width), (step, 1), writeable=False)
        return fixed_rows(view)
    return pieces(buffer, begin, end)


def fixed_rows(matrix: npt.NDArray[np.uint8]) -> pa.BinaryArray:
    """A binary array of the rows of an (n, width) matrix."""
    rows, width = matrix.shape
    offsets = np.arange(rows + 1, dtype=np.int32) * np.int32(width)
    return pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(offsets),
                                                     pa.py_buffer(np.ascontiguousarray(matrix))])


def join_parts(parts: Sequence[Any], rows: int) -> pa.BinaryArray:
    """Row by row concatenation of byte matrices and binary arrays."""
    matrices = [part if isinstance(part, np.ndarray) else rows_of_one_width(part) for part in parts]
    if rows == 0:
        return pa.array([], pa.binary())
    if all(matrix is not None for matrix in matrices):
        return fixed_rows(np.hstack([matrix for matrix in matrices if matrix is not None]))
    arrays = [fixed_rows(part) if isinstance(part, np.ndarray) else part for part in parts]
    return pc.binary_join_element_wise(*arrays, pa.scalar(b"", pa.binary()))


def split_at(array: pa.BinaryArray, width: int, what: str) -> tuple[pa.BinaryArray, pa.BinaryArray]:
    """The first `width` bytes of each row, and the rest."""
    rows = len(array)
    if rows == 0:
        return array, array
    buffers = array.buffers()
    bounds = np.frombuffer(buffers[1], np.int32, rows + 1, array.offset * 4).astype(np.int64)
    begin, end = bounds[:-1], bounds[1:]
    if int((end - begin).min()) < width or buffers[2] is None:
        raise CorruptData(f"stored bytes are no {what}: they are too short")
    data = np.frombuffer(buffers[2], np.uint8)
    return slices(buffers[2], data, begin, begin + width), slices(buffers[2], data, begin + width, end)


def key_ends(kind: StateType, data: npt.NDArray[np.uint8], begin: Offsets) -> Offsets:
    """Where the key encodings that start at `begin` end; reading past the data is an IndexError."""
    if kind.fixed_key_width is not None:
        return begin + kind.fixed_key_width
    if kind.tag in ("str", "bytes", "enum"):
        return _text_ends(data, begin)
    if isinstance(kind, FieldsType):
        for field in kind.types:
            begin = key_ends(field, data, begin)
        return begin
    if isinstance(kind, OptionalType):
        ends, there = begin + 1, data[begin] == 1
        ends[there] = key_ends(kind.item, data, begin[there] + 1)
        return ends
    return _ends_one_by_one(kind, data, begin)


def decode_keys(kind: StateType, encoded: pa.BinaryArray) -> pa.Array:
    """`decode_key_array`, also for records and tuples without a Python object per row."""
    if not isinstance(kind, FieldsType) or encoded.null_count or len(encoded) == 0:
        return kind.decode_key_array(encoded)
    buffers, rows = encoded.buffers(), len(encoded)
    data = np.frombuffer(buffers[2], np.uint8)
    bounds = np.frombuffer(buffers[1], np.int32, rows + 1, encoded.offset * 4).astype(np.int64)
    begin, columns = bounds[:-1], list[pa.Array]()
    for field in kind.types:
        end = key_ends(field, data, begin)
        columns.append(decode_keys(field, slices(buffers[2], data, begin, end)))
        begin = end
    if (begin != bounds[1:]).any():
        raise CorruptData(f"stored bytes are no {kind}: they go on after the last field")
    return pa.StructArray.from_arrays(columns, fields=list(kind.arrow_type))


def _text_ends(data: npt.NDArray[np.uint8], begin: Offsets) -> Offsets:
    """Text ends at the first 00 00: inside it, 00 is always followed by FF."""
    if len(begin) == 0:
        return begin
    zero = data == 0
    pairs = np.flatnonzero(zero[:-1] & zero[1:])
    return np.asarray(pairs[np.searchsorted(pairs, begin)] + 2, np.int64)


def _ends_one_by_one(kind: StateType, data: npt.NDArray[np.uint8], begin: Offsets) -> Offsets:
    raw = data.tobytes()
    return np.fromiter((kind.decode_key_from(raw, int(start))[1] for start in begin), np.int64, len(begin))


def _ordered_bytes(times: pa.Array) -> npt.NDArray[np.uint8]:
    """Eight bytes that sort like the signed numbers."""
    numbers = np.ascontiguousarray(times.to_numpy(zero_copy_only=False), np.int64).view(np.uint64) ^ _SIGN
    return numbers.byteswap().view(np.uint8).reshape(len(numbers), 8)


def _numbers(ordered: pa.BinaryArray) -> npt.NDArray[np.int64]:
    matrix = rows_of_one_width(ordered)
    if matrix is None or matrix.shape[1] != 8:
        return np.zeros(0, np.int64)
    return (np.ascontiguousarray(matrix).reshape(-1).view(">u8").astype(np.uint64) ^ _SIGN).view(np.int64)


def _present(kind: StateType | None, state: str = "") -> StateType:
    if kind is None:
        raise CorruptData("a schema lacks the type of its namespaces or map keys", state=state)
    return kind

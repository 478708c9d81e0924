"""Optional values, lists and maps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from statebackend.codecs import hashing
from statebackend.codecs.arrays import I64, ByteColumn, byte_ranges, joined, spread
from statebackend.codecs.base import Conversion, StateType, encode_wire

_NONE, _SOME = b"\x00", b"\x01"
_ALL = 2**31 - 1  # an open end makes binary_slice fail on some arrays (pyarrow 26)


class OptionalType(StateType):
    """A value or None. Alone: 00, or 01 and the value; keys alike, so that None comes first."""

    tag: ClassVar[str] = "optional"
    can_be_key = False
    nullable = True

    def __init__(self, item: StateType) -> None:
        self.item = item
        self.arrow_type, self.immutable = item.arrow_type, item.immutable
        self.wire_type = None | item.wire_type if item.wire_type is not None else None
        if item.to_wire is not None:
            to_wire = item.to_wire
            self.to_wire = lambda value: None if value is None else to_wire(value)
        if item.from_wire is not None:
            from_wire = item.from_wire
            self.from_wire = lambda value: None if value is None else from_wire(value)

    def check(self, value: Any) -> None:
        if value is not None:
            self.item.check(value)

    def copy(self, value: Any) -> Any:
        return None if value is None else self.item.copy(value)

    def encode(self, value: Any) -> bytes:
        return _NONE if value is None else _SOME + self.item.encode(value)

    def decode(self, data: bytes) -> Any:
        if data == _NONE:
            return None
        if data[:1] != _SOME:
            self.corrupt(data, "it starts neither with 00 nor with 01")
        return self.item.decode(data[1:])

    def encode_key(self, value: Any) -> bytes:
        return _NONE if value is None else _SOME + self.item.encode_key(value)

    def decode_key_from(self, data: bytes, offset: int = 0) -> tuple[Any, int]:
        mark = data[offset:offset + 1]
        if mark == _NONE:
            return None, offset + 1
        if mark != _SOME:
            self.corrupt(data[offset:], "it starts neither with 00 nor with 01")
        return self.item.decode_key_from(data, offset + 1)

    def encode_array(self, array: Any) -> pa.BinaryArray:
        return _marked(self.item.encode_array(array))

    def decode_array(self, array: pa.BinaryArray) -> pa.Array:
        return self.item.decode_array(self._unmarked(array))

    def encode_key_array(self, array: Any) -> pa.BinaryArray:
        return _marked(self.item.encode_key_array(array))

    def decode_key_array(self, array: pa.BinaryArray) -> pa.Array:
        return self.item.decode_key_array(self._unmarked(array))

    def _unmarked(self, array: pa.BinaryArray) -> pa.BinaryArray:
        if len(array) == 0:
            return array
        some = pc.starts_with(array, _SOME)
        if pc.all(pc.or_(some, pc.equal(array, _NONE))).as_py() is False:
            self.corrupt(b"", "a row starts neither with 00 nor with 01")
        return pc.if_else(some, pc.binary_slice(array, 1, _ALL), pa.scalar(None, pa.binary()))

    def hash_unsigned(self, value: Any, seed: int) -> int:
        return seed if value is None else self.item.hash_unsigned(value, seed)

    def hash_array(self, array: Any, seeds: Any = hashing.FIRST_SEED) -> hashing.U64:
        return self.item.hash_array(array, seeds)

    def read_keys(self, column: ByteColumn, positions: I64, ends: I64) -> tuple[pa.Array, I64]:
        marks = column.rows(positions, 1, ends, str(self)).reshape(-1)
        if marks.size and marks.max() > 1:
            self.corrupt(b"", "it starts neither with 00 nor with 01")
        some, after = marks == 1, positions + 1
        values, after[some] = self.item.read_keys(column, after[some], ends[some])
        return spread(values, some), after

    def arrow_to_wire(self, array: Any) -> list[Any]:
        return self.item.arrow_to_wire(array)

    def wire_to_arrow(self, wires: Sequence[Any]) -> pa.Array:
        return self.item.wire_to_arrow(wires)

    def to_arrow(self, values: Sequence[Any]) -> pa.Array:
        return self.item.to_arrow(values)

    def from_arrow(self, array: Any) -> list[Any]:
        return self.item.from_arrow(array)

    def shape(self) -> dict[str, Any]:
        return {"type": "optional", "item": self.item.shape()}

    def describe(self) -> dict[str, Any]:
        return {"type": "optional", "item": self.item.describe()}

    def arguments(self) -> tuple[Any, ...]:
        return (self.item,)

    def __str__(self) -> str:
        return f"{self.item} | None"


def _marked(encoded: pa.BinaryArray) -> pa.BinaryArray:
    return joined([pa.scalar(_SOME, pa.binary()), encoded], len(encoded)).fill_null(_NONE)


class WireType(StateType):
    """Types whose value codec is one msgpack value."""

    def _prepare(self) -> None:
        self._decoder = msgspec.msgpack.Decoder(self.wire_type)
        self._column_decoder = msgspec.msgpack.Decoder(list[self.wire_type | None])  # type: ignore[name-defined]

    def encode(self, value: Any) -> bytes:
        return encode_wire(value if self.to_wire is None else self.to_wire(value))

    def decode(self, data: bytes) -> Any:
        try:
            wire = self._decoder.decode(data)
        except (msgspec.DecodeError, ValueError) as error:
            self.corrupt(data, str(error))
        return wire if self.from_wire is None else self.from_wire(wire)

    def encode_array(self, array: Any) -> pa.BinaryArray:
        return pa.array([None if wire is None else encode_wire(wire) for wire in self.arrow_to_wire(array)], pa.binary())

    def decode_array(self, array: pa.BinaryArray) -> pa.Array:
        """One call for the whole column: its values in a row, behind the head of a msgpack array."""
        filled = array.fill_null(b"\xc0") if array.null_count else array
        data, begins, lengths = byte_ranges(filled)
        end = int(begins[-1] + lengths[-1]) if len(begins) else 0
        begin = int(begins[0]) if len(begins) else 0
        whole = b"\xdd" + len(array).to_bytes(4, "big") + data[begin:end].tobytes()
        try:
            wires = self._column_decoder.decode(whole)
        except (msgspec.DecodeError, ValueError) as error:
            self.corrupt(b"", str(error))
        return self.wire_to_arrow(wires)


class ListType(WireType):
    """A list, or with `container=tuple` a tuple of any length, of one type."""

    tag: ClassVar[str] = "list"
    can_be_key = False

    def __init__(self, item: StateType, container: type = list) -> None:
        self.item, self.container = item, container
        self.python_type = container
        self.arrow_type = pa.list_(item.arrow_type)
        self.immutable = container is tuple and item.immutable
        self.wire_type = list[item.wire_type] if container is list else tuple[item.wire_type, ...]  # type: ignore[name-defined]
        if item.to_wire is not None:
            to_wire = item.to_wire
            self.to_wire = lambda values: [to_wire(value) for value in values]
        if item.from_wire is not None:
            from_wire = item.from_wire
            self.from_wire = lambda values: container([from_wire(value) for value in values])
        self._prepare()

    def check(self, value: Any) -> None:
        if type(value) is not self.container:
            self.refuse(value)
        check = self.item.check
        for item in value:  # type: ignore[attr-defined]
            check(item)

    def copy(self, value: Any) -> Any:
        if self.immutable:
            return value
        if self.item.immutable:
            return self.container(value)
        copy = self.item.copy
        return self.container([copy(item) for item in value])

    def to_arrow(self, values: Sequence[Any]) -> pa.Array:
        return self._nest(values, self.item.to_arrow)

    def wire_to_arrow(self, wires: Sequence[Any]) -> pa.Array:
        return self._nest(wires, self.item.wire_to_arrow)

    def _nest(self, values: Sequence[Any], convert: Conversion) -> pa.Array:
        flat = convert([item for value in values if value is not None for item in value])
        lengths = np.fromiter((0 if value is None else len(value) for value in values), np.int64, len(values))
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        mask = pa.array([value is None for value in values]) if any(value is None for value in values) else None
        return pa.ListArray.from_arrays(pa.array(offsets), flat, type=self.arrow_type, mask=mask)

    def from_arrow(self, array: Any) -> list[Any]:
        return self._unnest(array, self.item.from_arrow)

    def arrow_to_wire(self, array: Any) -> list[Any]:
        return self._unnest(array, self.item.arrow_to_wire)

    def _unnest(self, array: Any, convert: Conversion) -> list[Any]:
        array = self.conform(array)
        if len(array) == 0:
            return []
        offsets = np.asarray(array.offsets).tolist()
        base = offsets[0]
        items = convert(array.values.slice(base, offsets[-1] - base))
        container = self.container
        rows = [container(items[begin - base:end - base]) for begin, end in pairwise(offsets)]
        return _nulled(array, rows)

    def shape(self) -> dict[str, Any]:
        return {"type": "list", "item": self.item.shape()}

    def describe(self) -> dict[str, Any]:
        return {"type": "list", "item": self.item.describe()}

    def arguments(self) -> tuple[Any, ...]:
        return self.item, self.container

    def __str__(self) -> str:
        return f"list[{self.item}]" if self.container is list else f"tuple[{self.item}, ...]"


def _nulled(array: pa.Array, rows: list[Any]) -> list[Any]:
    if array.null_count:
        for index in np.flatnonzero(pc.is_null(array).to_numpy(zero_copy_only=False)).tolist():
            rows[index] = None
    return rows


class MapType(WireType):
    """A dict; its keys must be of a type that can be a key. The order of insertion is kept."""

    tag: ClassVar[str] = "map"
    can_be_key = False
    python_type = dict
    immutable = False
    _key_of: Conversion | None = None

    def __init__(self, key: StateType, value: StateType) -> None:
        key.require_key()
        self.key, self.value = key, value
        self.arrow_type = pa.map_(key.arrow_type, value.arrow_type)
        self.wire_type = dict[key.wire_type, value.wire_type]  # type: ignore[name-defined]
        key_to, value_to = key.to_wire or _same, value.to_wire or _same
        if key.to_wire is not None or value.to_wire is not None:
            self.to_wire = lambda entries: {key_to(k): value_to(v) for k, v in entries.items()}
        key_from, value_from = key.from_wire or _same, value.from_wire or _same
        if _decodes_to_dicts(key):
            plain_key = key_from
            key_from = lambda wire: hashable(plain_key(wire))  # noqa: E731
            self._key_of = hashable
        if key.from_wire is not None or value.from_wire is not None:
            self.from_wire = lambda entries: {key_from(k): value_from(v) for k, v in entries.items()}
        self._prepare()

    def check(self, value: Any) -> None:
        if type(value) is not dict:
            self.refuse(value)
        check_key, check_value = self.key.check, self.value.check
        for key, item in value.items():
            check_key(key)
            check_value(item)

    def copy(self, value: Any) -> Any:
        if self.value.immutable:
            return dict(value)
        copy = self.value.copy
        return {key: copy(item) for key, item in value.items()}

    def to_arrow(self, values: Sequence[Any]) -> pa.Array:
        return self._nest(values, self.key.to_arrow, self.value.to_arrow)

    def wire_to_arrow(self, wires: Sequence[Any]) -> pa.Array:
        return self._nest(wires, self.key.wire_to_arrow, self.value.wire_to_arrow)

    def _nest(self, values: Sequence[Any], to_keys: Conversion, to_items: Conversion) -> pa.Array:
        present = [value for value in values if value is not None]
        keys = to_keys([key for value in present for key in value])
        items = to_items([item for value in present for item in value.values()])
        lengths = np.fromiter((0 if value is None else len(value) for value in values), np.int64, len(values))
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        mask = pa.array([value is None for value in values]) if len(present) < len(values) else None
        return pa.MapArray.from_arrays(offsets, keys, items, type=self.arrow_type, mask=mask)

    def from_arrow(self, array: Any) -> list[Any]:
        return self._unnest(array, self._keys_from_arrow, self.value.from_arrow)

    def _keys_from_arrow(self, array: Any) -> list[Any]:
        keys = self.key.from_arrow(array)
        return keys if self._key_of is None else [self._key_of(key) for key in keys]

    def arrow_to_wire(self, array: Any) -> list[Any]:
        return self._unnest(array, self.key.arrow_to_wire, self.value.arrow_to_wire)

    def _unnest(self, array: Any, from_keys: Conversion, from_items: Conversion) -> list[Any]:
        array = self.conform(array)
        if len(array) == 0:
            return []
        offsets = np.asarray(array.offsets).tolist()
        base, count = offsets[0], offsets[-1] - offsets[0]
        keys, items = from_keys(array.keys.slice(base, count)), from_items(array.items.slice(base, count))
        rows = [dict(zip(keys[begin - base:end - base], items[begin - base:end - base]))
                for begin, end in pairwise(offsets)]
        return _nulled(array, rows)

    def shape(self) -> dict[str, Any]:
        return {"type": "map", "key": self.key.shape(), "value": self.value.shape()}

    def describe(self) -> dict[str, Any]:
        return {"type": "map", "key": self.key.describe(), "value": self.value.describe()}

    def arguments(self) -> tuple[Any, ...]:
        return self.key, self.value

    def __str__(self) -> str:
        return f"dict[{self.key}, {self.value}]"


class RecordKey(dict[str, Any]):
    """A record without its class where it is a key: a dict that can be hashed and must not be changed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.values()))


def hashable(value: Any) -> Any:
    """The value with every dict in it as a `RecordKey`."""
    if isinstance(value, dict):
        return RecordKey({name: hashable(field) for name, field in value.items()})
    return tuple(hashable(field) for field in value) if type(value) is tuple else value


def _decodes_to_dicts(kind: StateType) -> bool:
    if kind.python_type is dict:
        return True
    return any(_decodes_to_dicts(inner) for inner in getattr(kind, "types", ()))


def _same(value: Any) -> Any:
    return value

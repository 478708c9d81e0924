"""How keys and values of a type are held in Python dicts: as they are where that is safe, else by their encoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from statebackend.codecs.containers import OptionalType
from statebackend.codecs.records import TupleType
from statebackend.codecs.scalars import BoolType, FloatType, IntType
from statebackend.codecs.text import BytesType, StrType
from statebackend.errors import InvalidRequest
from statebackend.types import StateType


def is_direct(kind: StateType) -> bool:
    """Whether equality of Python values is equality of stored keys, and their order the codec's.

    NaN is not equal to itself and 1.00 is equal to 1.0, so floats, decimals and the like go by their encoding.
    """
    return type(kind) in (IntType, StrType, BytesType, BoolType)


def _hashable_as_is(kind: StateType) -> bool:
    if type(kind) is TupleType:
        return all(is_direct(item) for item in kind.types)
    return is_direct(kind)


class KeyForm:
    """Keys of one type as dict keys (`hold`), as the caller's values (`give`) and as encoded columns.

    sortable  whether dict keys sort like the codec; the others are sorted by their encoding
    """

    __slots__ = ("direct", "kind", "sortable")

    def __init__(self, kind: StateType) -> None:
        kind.require_key()
        self.kind = kind
        self.direct = _hashable_as_is(kind)
        self.sortable = not self.direct or is_direct(kind)

    def hold(self, key: Any) -> Any:
        """The dict key of a value, which is checked."""
        self.kind.check(key)
        return key if self.direct else self.kind.encode_key(key)

    def give(self, held: Any) -> Any:
        return held if self.direct else self.kind.decode_key(held)

    def encode(self, held: Any) -> bytes:
        return self.kind.encode_key(held) if self.direct else held

    def ordered(self, held: Sequence[Any]) -> list[Any]:
        return sorted(held) if self.sortable else sorted(held, key=self.kind.encode_key)

    def encoded(self, held: Sequence[Any]) -> pa.BinaryArray:
        """The key encoding of a column of dict keys."""
        if self.direct:
            return self.kind.encode_key_array(self.kind.to_arrow(held))
        return pa.array(held, pa.binary())

    def column_and_encoded(self, held: Sequence[Any]) -> tuple[pa.Array, pa.BinaryArray]:
        """An Arrow column of the type from dict keys, and their key encoding."""
        if self.direct:
            column = self.kind.to_arrow(held)
            return column, self.kind.encode_key_array(column)
        encoded = pa.array(held, pa.binary())
        return self.kind.decode_key_array(encoded), encoded

    def held(self, column: Any, what: str = "key") -> list[Any]:
        """Dict keys from an Arrow column that a caller passed; nulls are refused."""
        column = self.kind.conform(column)
        if column.null_count:
            raise InvalidRequest(f"a {what} must not be null", row=column.is_null().index(True).as_py())
        if self.direct:
            return self.kind.from_arrow(column)
        held: list[Any] = self.kind.encode_key_array(column).to_pylist()
        return held

    def from_encoded(self, encoded: pa.BinaryArray) -> list[Any]:
        """Dict keys from their encodings, as stored."""
        if self.direct:
            return self.kind.from_arrow(self.kind.decode_key_array(encoded))
        values: list[Any] = encoded.to_pylist()
        return values


def incoming(kind: StateType, limit: int) -> Callable[[Any], Any]:
    """Check a value and make it what the codec would give back: nothing of it is shared with the caller.

    A value whose encoding is larger than `limit` bytes is refused.
    """
    check, encode, decode = kind.check, kind.encode, kind.decode
    item = kind.item if isinstance(kind, OptionalType) else kind
    if _is_exact(item) or (kind.fixed_value_width is not None and is_direct(kind)):
        def as_is(value: Any) -> Any:
            check(value)
            return value
        return as_is
    if isinstance(kind, FloatType):
        def as_float(value: Any) -> Any:
            check(value)
            return float(value)
        return as_float
    if is_direct(item):
        def as_sized(value: Any) -> Any:
            check(value)
            if value is not None and 4 * len(value) > limit:
                _require_small(len(encode(value)), limit)
            return value
        return as_sized

    def normal(value: Any) -> Any:
        check(value)
        data = encode(value)
        if len(data) > limit:
            _require_small(len(data), limit)
        return decode(data)
    return normal


def _is_exact(kind: StateType) -> bool:
    """Whether a checked value is what the codec would give back, and small: whole numbers, and tuples of them."""
    return type(kind) in (IntType, BoolType) or (type(kind) is TupleType and all(map(_is_exact, kind.types)))


def _require_small(size: int, limit: int) -> None:
    if size > limit:
        raise InvalidRequest("a value is larger than the limit", found=size, expected=limit,
                             hint="store it in parts, or raise max_value_bytes")


def encoder(kind: StateType) -> Callable[[Sequence[Any]], pa.BinaryArray]:
    """The value codec over a list of values, by column where the type can, else value by value."""
    if type(kind).encode_array is not StateType.encode_array and kind.immutable:
        return lambda values: kind.encode_array(kind.to_arrow(values))
    encode = kind.encode
    return lambda values: pa.array([encode(value) for value in values], pa.binary())


def decoder(kind: StateType) -> Callable[[pa.BinaryArray], list[Any]]:
    """The values of a column of value bytes."""
    if type(kind).decode_array is not StateType.decode_array:
        return lambda data: kind.from_arrow(kind.decode_array(data))
    decode = kind.decode
    return lambda data: [decode(value) for value in data.to_pylist()]


def outgoing(kind: StateType) -> Callable[[Any], Any] | None:
    """How a stored value is handed out: None means as it is."""
    return None if kind.immutable else kind.copy


def is_int64(kind: StateType) -> bool:
    return isinstance(kind, IntType) and kind.bits == 64 and kind.signed

"""Decimals, UUIDs, enums, and the explicit opt-in to pickle."""

from __future__ import annotations

import decimal
import pickle
import uuid
from collections.abc import Sequence
from decimal import Decimal
from enum import Enum
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from statebackend.codecs import hashing
from statebackend.codecs.arrays import binary_rows, from_numbers, numbers_of, rows_of
from statebackend.codecs.base import StateType
from statebackend.codecs.text import StrType, read_escaped, values_or_none
from statebackend.errors import InvalidRequest

_SIGN_128 = 1 << 127
_WIDE = decimal.Context(prec=80)


class SixteenBytes(StateType):
    """Types that msgpack holds as the bytes of their value codec."""

    wire_type = bytes

    def arrow_to_wire(self, array: Any) -> list[Any]:
        return self.encode_array(array).to_pylist()  # type: ignore[no-any-return]

    def wire_to_arrow(self, wires: Sequence[Any]) -> pa.Array:
        return self.decode_array(pa.array(wires, pa.binary()))


class DecimalType(SixteenBytes):
    """A decimal number of at most 38 digits with a declared number of digits after the point.

    Sixteen bytes: the number without its point, two's complement, little-endian as a value; big-endian with the sign
    flipped as a key. 1.5 in a type of scale 2 comes back as 1.50.
    """

    tag: ClassVar[str] = "decimal"
    python_type = Decimal
    fixed_value_width = fixed_key_width = 16

    def __init__(self, precision: int = 38, scale: int = 18) -> None:
        if not 1 <= precision <= 38 or not 0 <= scale <= precision:
            raise InvalidRequest("a decimal has 1 to 38 digits, of which 0 to all are after the point",
                                 found=f"precision {precision}, scale {scale}")
        self.precision, self.scale = precision, scale
        self.arrow_type = pa.decimal128(precision, scale)
        self.to_wire, self.from_wire = self.encode, self.decode

    def check(self, value: Any) -> None:
        if type(value) is not Decimal:
            self.refuse(value, hint="convert it with Decimal(...)")
        if not value.is_finite():
            self.refuse(value, "a decimal must be a number")
        if value and (value.adjusted() >= self.precision - self.scale or self._too_fine(value)):
            self.refuse(value, "a decimal does not fit its declared digits exactly",
                        "round it with quantize, or declare more digits")

    def _too_fine(self, value: Decimal) -> bool:
        _, digits, exponent = value.as_tuple()
        surplus = -int(exponent) - self.scale
        return surplus > 0 and any(digits[max(len(digits) - surplus, 0):])

    def _unscaled(self, value: Decimal) -> int:
        return int(value.scaleb(self.scale, _WIDE))

    def _scaled(self, number: int) -> Decimal:
        return Decimal(number).scaleb(-self.scale, _WIDE)

    def encode(self, value: Decimal) -> bytes:
        return self._unscaled(value).to_bytes(16, "little", signed=True)

    def decode(self, data: bytes) -> Decimal:
        if len(data) != 16:
            self.corrupt(data, "expected 16 bytes")
        return self._scaled(int.from_bytes(data, "little", signed=True))

    def encode_key(self, value: Decimal) -> bytes:
        return (self._unscaled(value) + _SIGN_128).to_bytes(16, "big")

    def decode_key_from(self, data: bytes, offset: int = 0) -> tuple[Decimal, int]:
        raw = data[offset:offset + 16]
        if len(raw) != 16:
            self.corrupt(raw, "expected 16 bytes")
        return self._scaled(int.from_bytes(raw, "big") - _SIGN_128), offset + 16

    def encode_array(self, array: Any) -> pa.BinaryArray:
        array = self.conform(array)
        return binary_rows(_sixteen(array), array)

    def decode_array(self, array: pa.BinaryArray) -> pa.Array:
        return from_numbers(rows_of(array, 16, str(self)), self.arrow_type, array)

    def encode_key_array(self, array: Any) -> pa.BinaryArray:
        array = self.conform(array)
        rows = _sixteen(array)[:, ::-1].copy()
        rows[:, 0] ^= 0x80
        return binary_rows(rows, array)

    def decode_key_array(self, array: pa.BinaryArray) -> pa.Array:
        rows = rows_of(array, 16, str(self)).copy()
        rows[:, 0] ^= 0x80
        return from_numbers(rows[:, ::-1], self.arrow_type, array)

    def hash_unsigned(self, value: Decimal, seed: int) -> int:
        number = self._unscaled(value)
        if self.precision <= 18:
            return hashing.hash_long(number, seed)
        return hashing.hash_bytes(_java_bytes(number), seed)

    def _hash_rows(self, array: pa.Array, seeds: Any) -> hashing.U64:
        if self.precision <= 18:
            return hashing.hash_longs(_sixteen(array)[:, :8].copy().view(np.uint64).reshape(-1), seeds)
        numbers = [int.from_bytes(row.tobytes(), "little", signed=True) for row in _sixteen(array)]
        return hashing.hash_strings(pa.array([_java_bytes(number) for number in numbers], pa.binary()), seeds)

    def to_arrow(self, values: Sequence[Any]) -> pa.Array:
        rows = pa.array(values_or_none(values, self.encode), pa.binary())
        return self.decode_array(rows)

    def shape(self) -> dict[str, Any]:
        return {"type": "decimal", "precision": self.precision, "scale": self.scale}

    def arguments(self) -> tuple[Any, ...]:
        return self.precision, self.scale

    def __str__(self) -> str:
        return f"decimal({self.precision}, {self.scale})"


def _sixteen(array: pa.Array) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return numbers_of(array, "V16").view(np.uint8).reshape(len(array), 16)


def _java_bytes(number: int) -> bytes:
    """What Java's BigInteger.toByteArray gives: the shortest big-endian two's complement."""
    length = ((number if number >= 0 else ~number).bit_length()) // 8 + 1
    return number.to_bytes(length, "big", signed=True)


class UuidType(SixteenBytes):
    """A UUID: its sixteen bytes, as a value and as a key."""

    tag: ClassVar[str] = "uuid"
    python_type = uuid.UUID
    arrow_type = pa.binary(16)
    fixed_value_width = fixed_key_width = 16

    def __init__(self) -> None:
        self.to_wire, self.from_wire = self.encode, self.decode

    def check(self, value: Any) -> None:
        if type(value) is not uuid.UUID:
            self.refuse(value)

    def encode(self, value: uuid.UUID) -> bytes:
        return value.bytes

    def decode(self, data: bytes) -> uuid.UUID:
        if len(data) != 16:
            self.corrupt(data, "expected 16 bytes")
        return uuid.UUID(bytes=bytes(data))

    encode_key = encode

    def decode_key_from(self, data: bytes, offset: int = 0) -> tuple[uuid.UUID, int]:
        return self.decode(data[offset:offset + 16]), offset + 16

    def encode_array(self, array: Any) -> pa.BinaryArray:
        array = self.conform(array)
        return binary_rows(_sixteen(array), array)

    def decode_array(self, array: pa.BinaryArray) -> pa.Array:
        return from_numbers(rows_of(array, 16, str(self)), self.arrow_type, array)

    encode_key_array, decode_key_array = encode_array, decode_array

    def to_arrow(self, values: Sequence[Any]) -> pa.Array:
        return pa.array(values_or_none(values, self.encode), self.arrow_type)

    def from_arrow(self, array: Any) -> list[Any]:
        return values_or_none(self.conform(array).to_pylist(), self.decode)

    def hash_unsigned(self, value: uuid.UUID, seed: int) -> int:
        return hashing.hash_bytes(value.bytes, seed)

    def _hash_rows(self, array: pa.Array, seeds: Any) -> hashing.U64:
        return hashing.hash_strings(array, seeds)

    def shape(self) -> dict[str, Any]:
        return {"type": "uuid"}

    def arguments(self) -> tuple[Any, ...]:
        return ()

    def __str__(self) -> str:
        return "uuid"


class EnumType(StrType):
    """A member of an enum, stored by name; without the class (read from JSON) the name itself."""

    tag: ClassVar[str] = "enum"

    def __init__(self, names: tuple[str, ...], cls: type[Enum] | None = None, class_name: str | None = None) -> None:
        self.names, self.cls = tuple(names), cls
        self.class_name = class_name if cls is None else f"{cls.__module__}.{cls.__qualname__}"
        self.python_type = cls if cls is not None else str  # type: ignore[assignment]
        self._known = frozenset(self.names)
        if cls is not None:
            self.to_wire, self.from_wire = (lambda member: member.name), self._member

    @classmethod
    def of(cls, enum: type[Enum]) -> EnumType:
        return cls(tuple(enum.__members__), enum)

    def check(self, value: Any) -> None:
        if self.cls is None:
            if value not in self._known:
                self.refuse(value, f"no member of {self.class_name or 'the enum'} has this name")
        elif not isinstance(value, self.cls):
            self.refuse(value)
        elif value.name not in self._known:
            self.refuse(value, "combinations of flags can't be stored")

    def _name(self, value: Any) -> str:
        return value if self.cls is None else value.name  # type: ignore[no-any-return]

    def _member(self, name: str) -> Any:
        if self.cls is None:
            return name
        try:
            return self.cls[name]
        except KeyError:
            self.corrupt(name.encode(), f"{self.class_name} has no member {name!r}")

    def encode(self, value: Any) -> bytes:
        return self._name(value).encode()

    def decode(self, data: bytes) -> Any:
        return self._member(super().decode(data))

    def encode_key(self, value: Any) -> bytes:
        return super().encode_key(self._name(value))

    def decode_key(self, data: bytes) -> Any:
        return self._member(super().decode_key(data)) if 0 not in data[:-2] else StateType.decode_key(self, data)

    def decode_key_from(self, data: bytes, offset: int = 0) -> tuple[Any, int]:
        raw, end = read_escaped(self, data, offset)
        return self.decode(raw), end

    def hash_unsigned(self, value: Any, seed: int) -> int:
        return hashing.hash_bytes(self._name(value).encode(), seed)

    def to_arrow(self, values: Sequence[Any]) -> pa.Array:
        return pa.array(values_or_none(values, self._name), pa.string())

    def from_arrow(self, array: Any) -> list[Any]:
        return values_or_none(self.conform(array).to_pylist(), self._member)

    def arrow_to_wire(self, array: Any) -> list[Any]:
        return self.conform(array).to_pylist()  # type: ignore[no-any-return]

    def wire_to_arrow(self, wires: Sequence[Any]) -> pa.Array:
        return pa.array(wires, pa.string())

    def shape(self) -> dict[str, Any]:
        return {"type": "enum", "names": list(self.names)}

    def describe(self) -> dict[str, Any]:
        return {**self.shape(), "class": self.class_name}

    def arguments(self) -> tuple[Any, ...]:
        return self.names, self.cls, self.class_name

    def __str__(self) -> str:
        return f"enum {(self.class_name or '').rpartition('.')[2] or '|'.join(self.names)}"


class PickledType(StateType):
    """Any object, pickled: the explicit opt-in. Read from JSON it is opaque bytes, and nothing is ever unpickled."""

    tag: ClassVar[str] = "pickled"
    can_be_key = False
    arrow_type = pa.binary()
    immutable = False
    wire_type = bytes

    def __init__(self, cls: type | None = None, class_name: str | None = None) -> None:
        self.cls = cls
        self.class_name = class_name if cls is None else f"{cls.__module__}.{cls.__qualname__}"
        self.python_type = cls if cls is not None else bytes
        self.immutable = cls is None
        self.to_wire, self.from_wire = self.encode, self.decode

    def check(self, value: Any) -> None:
        if not isinstance(value, self.cls or bytes):
            self.refuse(value)

    def copy(self, value: Any) -> Any:
        return value if self.cls is None else pickle.loads(pickle.dumps(value, 5))

    def encode(self, value: Any) -> bytes:
        if self.cls is None:
            return bytes(value)
        try:
            return pickle.dumps(value, 5)
        except Exception as error:
            self.refuse(value, f"a value can't be pickled: {error}")

    def decode(self, data: bytes) -> Any:
        if self.cls is None:
            return data
        try:
            value = pickle.loads(data)
        except Exception as error:
            self.corrupt(data, f"it can't be unpickled: {error}")
        return value

    def to_arrow(self, values: Sequence[Any]) -> pa.Array:
        return pa.array(values_or_none(values, self.encode), pa.binary())

    def from_arrow(self, array: Any) -> list[Any]:
        return values_or_none(self.conform(array).to_pylist(), self.decode)

    def arrow_to_wire(self, array: Any) -> list[Any]:
        return self.conform(array).to_pylist()  # type: ignore[no-any-return]

    def wire_to_arrow(self, wires: Sequence[Any]) -> pa.Array:
        return pa.array(wires, pa.binary())

    def encode_array(self, array: Any) -> pa.BinaryArray:
        return self.conform(array)

    def decode_array(self, array: pa.BinaryArray) -> pa.Array:
        return array

    def shape(self) -> dict[str, Any]:
        return {"type": "pickled"}

    def describe(self) -> dict[str, Any]:
        return {"type": "pickled", "class": self.class_name}

    def arguments(self) -> tuple[Any, ...]:
        return self.cls, self.class_name

    def __str__(self) -> str:
        return f"pickled {(self.class_name or 'object').rpartition('.')[2]}"

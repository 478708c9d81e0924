"""Integers, floats and booleans."""

from __future__ import annotations

import math
import struct
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from statebackend.codecs import hashing
from statebackend.codecs.arrays import binary_rows, from_numbers, numbers_of, rows_of
from statebackend.codecs.base import StateType

_SIGN = 1 << 63
_KEY = struct.Struct(">Q")
_DOUBLE = struct.Struct("<d")
_pack_key, _unpack_key = _KEY.pack, _KEY.unpack
_FORMATS = {(8, True): "<b", (16, True): "<h", (32, True): "<i", (64, True): "<q",
            (8, False): "<B", (16, False): "<H", (32, False): "<I", (64, False): "<Q"}


class FixedWidth(StateType):
    """Types whose Arrow data, little-endian, is their value codec."""

    dtype: Any

    def encode_array(self, array: Any) -> pa.BinaryArray:
        array = self.conform(array)
        numbers = numbers_of(array, self.dtype)
        return binary_rows(numbers.view(np.uint8).reshape(len(array), numbers.dtype.itemsize), array)

    def decode_array(self, array: pa.BinaryArray) -> pa.Array:
        rows = rows_of(array, np.dtype(self.dtype).itemsize, str(self))
        return from_numbers(np.ascontiguousarray(rows).reshape(-1).view(self.dtype), self.arrow_type, array)

    def from_arrow(self, array: Any) -> list[Any]:
        array = self.conform(array)
        if array.null_count:
            return array.to_pylist()  # type: ignore[no-any-return]
        return numbers_of(array, self.dtype).tolist()  # type: ignore[no-any-return]


class IntType(FixedWidth):
    """A signed or unsigned integer of 8 to 64 bits."""

    tag: ClassVar[str] = "int"
    python_type = int
    wire_type = int

    def __init__(self, bits: int = 64, signed: bool = True) -> None:
        self.bits, self.signed = bits, signed
        self.minimum, self.maximum = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
        self.arrow_type = pa.type_for_alias(f"{'' if signed else 'u'}int{bits}")
        self.dtype = np.dtype(f"<{'i' if signed else 'u'}{bits // 8}")
        self.fixed_value_width, self.fixed_key_width = bits // 8, 8
        self._value = struct.Struct(_FORMATS[bits, signed])
        self._bias = _SIGN if signed else 0
        self._pack_long = struct.Struct("<q" if signed else "<Q").pack
        self.encode = self._value.pack  # type: ignore[method-assign, assignment]

    def check(self, value: Any) -> None:
        if type(value) is not int:
            self.refuse(value, hint="convert it with int(...)" if hasattr(value, "__index__") else None)
        if not self.minimum <= value <= self.maximum:
            self.refuse(value, f"an integer is out of the range of {self.bits} bits")

    def encode(self, value: int) -> bytes:
        return self._value.pack(value)

    def decode(self, data: bytes) -> int:
        try:
            return self._value.unpack(data)[0]  # type: ignore[no-any-return]
        except struct.error as error:
            self.corrupt(data, str(error))

    def encode_key(self, value: int) -> bytes:
        return _pack_key(value + self._bias)

    def decode_key(self, data: bytes) -> int:
        try:
            return _unpack_key(data)[0] - self._bias  # type: ignore[no-any-return]
        except struct.error as error:
            self.corrupt(data, str(error))

    def decode_key_from(self, data: bytes, offset: int = 0) -> tuple[int, int]:
        try:
            return _KEY.unpack_from(data, offset)[0] - self._bias, offset + 8
        except struct.error as error:
            self.corrupt(data, str(error))

    def encode_key_array(self, array: Any) -> pa.BinaryArray:
        array = self.conform(array)
        numbers = _as_u64(numbers_of(array, self.dtype))
        if self.signed:
            numbers = numbers ^ np.uint64(_SIGN)
        return binary_rows(numbers.byteswap().view(np.uint8).reshape(len(array), 8), array)

    def decode_key_array(self, array: pa.BinaryArray) -> pa.Array:
        numbers = np.ascontiguousarray(rows_of(array, 8, str(self))).reshape(-1).view(">u8").astype("<u8")
        if self.signed:
            numbers ^= np.uint64(_SIGN)
        return from_numbers(numbers.astype(self.dtype), self.arrow_type, array)

    def hash_unsigned(self, value: int, seed: int) -> int:
        return hashing.hash_bytes(self._pack_long(value), seed)

    def _hash_rows(self, array: pa.Array, seeds: Any) -> hashing.U64:
        return hashing.hash_longs(_as_u64(numbers_of(array, self.dtype)), seeds)

    def shape(self) -> dict[str, Any]:
        return {"type": "int", "bits": self.bits, "signed": self.signed}

    def arguments(self) -> tuple[Any, ...]:
        return self.bits, self.signed

    def __str__(self) -> str:
        return "int" if self.bits == 64 and self.signed else str(self.arrow_type)


def _as_u64(numbers: np.ndarray[Any, Any]) -> hashing.U64:
    if numbers.dtype.itemsize == 8:
        return numbers.view(np.uint64)
    return numbers.astype(np.int64 if numbers.dtype.kind == "i" else np.uint64).view(np.uint64)


class FloatType(FixedWidth):
    """An IEEE number of 64 or 32 bits. Integers that a float holds exactly are taken too and come back as floats.

    As a key and in the hash, -0.0 is 0.0 and every NaN is the same one, after all numbers.
    """

    tag: ClassVar[str] = "float"
    python_type = float
    wire_type = float

    def __init__(self, bits: int = 64) -> None:
        self.bits = bits
        self.arrow_type = pa.float64() if bits == 64 else pa.float32()
        self.dtype = np.dtype(f"<f{bits // 8}")
        self.fixed_value_width, self.fixed_key_width = bits // 8, 8
        self._value = struct.Struct("<d" if bits == 64 else "<f")
        self.encode = self._value.pack  # type: ignore[method-assign, assignment]

    def check(self, value: Any) -> None:
        if type(value) is float:
            if self.bits == 32 and value == value and not math.isinf(value) and not _is_single(value):
                self.refuse(value, "a number does not fit a 32-bit float exactly", "use float (64 bits), or round it")
            return
        if type(value) is not int:
            self.refuse(value, hint="convert it with float(...)" if hasattr(value, "__float__") else None)
        if not _is_exact(value, self.bits):
            self.refuse(value, f"an integer is out of the exact range of a {self.bits}-bit float")

    def encode(self, value: float) -> bytes:
        return self._value.pack(value)

    def decode(self, data: bytes) -> float:
        try:
            return self._value.unpack(data)[0]  # type: ignore[no-any-return]
        except struct.error as error:
            self.corrupt(data, str(error))

    def encode_key(self, value: float) -> bytes:
        bits = _double_bits(value)
        return _KEY.pack(bits ^ 0xFFFFFFFFFFFFFFFF if bits >= _SIGN else bits | _SIGN)

    def decode_key_from(self, data: bytes, offset: int = 0) -> tuple[float, int]:
        try:
            bits = _KEY.unpack_from(data, offset)[0]
        except struct.error as error:
            self.corrupt(data, str(error))
        bits = bits ^ _SIGN if bits >= _SIGN else bits ^ 0xFFFFFFFFFFFFFFFF
        return _DOUBLE.unpack(bits.to_bytes(8, "little"))[0], offset + 8

    def encode_key_array(self, array: Any) -> pa.BinaryArray:
        array = self.conform(array)
        bits = _double_bits_of(numbers_of(array, self.dtype))
        bits ^= (bits.view(np.int64) >> np.int64(63)).view(np.uint64) | np.uint64(_SIGN)
        return binary_rows(bits.byteswap().view(np.uint8).reshape(len(array), 8), array)

    def decode_key_array(self, array: pa.BinaryArray) -> pa.Array:
        bits = np.ascontiguousarray(rows_of(array, 8, str(self))).reshape(-1).view(">u8").astype("<u8")
        bits = np.where(bits >= np.uint64(_SIGN), bits ^ np.uint64(_SIGN), ~bits)
        with np.errstate(all="ignore"):  # bytes that no 32-bit float encodes to
            numbers = bits.view("<f8").astype(self.dtype)
        return from_numbers(numbers, self.arrow_type, array)

    def hash_unsigned(self, value: float, seed: int) -> int:
        return hashing.hash_bytes(_double_bits(value).to_bytes(8, "little"), seed)

    def _hash_rows(self, array: pa.Array, seeds: Any) -> hashing.U64:
        return hashing.hash_longs(_double_bits_of(numbers_of(array, self.dtype)), seeds)

    def shape(self) -> dict[str, Any]:
        return {"type": "float", "bits": self.bits}

    def arguments(self) -> tuple[Any, ...]:
        return (self.bits,)

    def __str__(self) -> str:
        return "float" if self.bits == 64 else "float32"


_CANONICAL_NAN = 0x7FF8000000000000


def _double_bits(value: float) -> int:
    if value != value:
        return _CANONICAL_NAN
    return int.from_bytes(_DOUBLE.pack(value or 0.0), "little")


def _double_bits_of(numbers: np.ndarray[Any, Any]) -> hashing.U64:
    with np.errstate(all="ignore"):  # a signalling NaN becomes a quiet one
        doubles = numbers.astype(np.float64) + 0.0  # turns -0.0 into 0.0
    bits = doubles.view(np.uint64)
    missing = np.isnan(doubles)
    if missing.any():
        bits[missing] = np.uint64(_CANONICAL_NAN)
    return bits


def _is_single(value: float) -> bool:
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0] == value  # type: ignore[no-any-return]
    except OverflowError:
        return False


def _is_exact(value: int, bits: int) -> bool:
    try:
        return float(value) == value and (bits == 64 or _is_single(float(value)))
    except OverflowError:
        return False


class BoolType(StateType):
    """True or False; one byte, 01 or 00, as a value and as a key."""

    tag: ClassVar[str] = "bool"
    python_type = bool
    wire_type = bool
    arrow_type = pa.bool_()
    fixed_value_width = fixed_key_width = 1

    def check(self, value: Any) -> None:
        if type(value) is not bool:
            self.refuse(value)

    def encode(self, value: bool) -> bytes:
        return b"\x01" if value else b"\x00"

    def decode(self, data: bytes) -> bool:
        if data == b"\x01":
            return True
        if data != b"\x00":
            self.corrupt(data, "expected 00 or 01")
        return False

    encode_key = encode

    def decode_key_from(self, data: bytes, offset: int = 0) -> tuple[bool, int]:
        return self.decode(data[offset:offset + 1]), offset + 1

    def encode_array(self, array: Any) -> pa.BinaryArray:
        array = self.conform(array)
        return binary_rows(_bits(array).reshape(len(array), 1), array)

    def decode_array(self, array: pa.BinaryArray) -> pa.Array:
        rows = rows_of(array, 1, str(self)).reshape(-1)
        if rows.size and rows.max() > 1:
            self.corrupt(bytes([int(rows.max())]), "expected 00 or 01")
        mask = pc.is_null(array).to_numpy(zero_copy_only=False) if array.null_count else None
        return pa.array(rows.astype(bool), mask=mask)

    encode_key_array, decode_key_array = encode_array, decode_array

    def hash_unsigned(self, value: bool, seed: int) -> int:
        return hashing.hash_int(1 if value else 0, seed)

    def _hash_rows(self, array: pa.Array, seeds: Any) -> hashing.U64:
        return hashing.hash_ints(_bits(array).astype(np.uint64), seeds)

    def shape(self) -> dict[str, Any]:
        return {"type": "bool"}

    def arguments(self) -> tuple[Any, ...]:
        return ()

    def __str__(self) -> str:
        return "bool"


def _bits(array: pa.Array) -> np.ndarray[Any, np.dtype[np.uint8]]:
    filled = array.fill_null(False) if array.null_count else array
    return filled.to_numpy(zero_copy_only=False).astype(np.uint8)  # type: ignore[no-any-return]

"""Text and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pyarrow as pa

from statebackend.codecs import hashing
from statebackend.codecs.arrays import I64, ByteColumn, escape_text, from_numbers, rows_of, unescape_text
from statebackend.codecs.base import StateType


class EscapedType(StateType):
    """Types whose keys are bytes with 00 escaped as 00 FF and 00 00 at the end."""

    def encode_key_array(self, array: Any) -> pa.BinaryArray:
        return escape_text(self.conform(array))

    def decode_key_array(self, array: pa.BinaryArray) -> pa.Array:
        return self.decode_array(unescape_text(array, str(self)))

    def read_keys(self, column: ByteColumn, positions: I64, ends: I64) -> tuple[pa.Array, I64]:
        values, after = column.texts(positions, ends, str(self))
        return self.decode_array(values), after

    def _hash_rows(self, array: pa.Array, seeds: Any) -> hashing.U64:
        return hashing.hash_strings(array, seeds)


class StrType(EscapedType):
    """Text: UTF-8 as a value; as a key UTF-8 with 00 escaped as 00 FF and 00 00 at the end."""

    tag: ClassVar[str] = "str"
    python_type = str
    wire_type = str
    arrow_type = pa.string()

    def check(self, value: Any) -> None:
        if type(value) is not str:
            self.refuse(value)
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                self.refuse(value, f"text that is no Unicode can't be stored: {error.reason}")

    def encode(self, value: str) -> bytes:
        return value.encode()

    def decode(self, data: bytes) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            self.corrupt(data, str(error))

    def encode_key(self, value: str) -> bytes:
        if "\0" in value:
            return value.encode().replace(b"\x00", b"\x00\xff") + b"\x00\x00"
        return (value + "\0\0").encode()

    def decode_key(self, data: bytes) -> str:
        if data.find(0) == len(data) - 2 and data[-1] == 0:
            try:
                return data[:-2].decode()
            except UnicodeDecodeError as error:
                self.corrupt(data, str(error))
        return super().decode_key(data)  # type: ignore[no-any-return]

    def decode_key_from(self, data: bytes, offset: int = 0) -> tuple[str, int]:
        raw, end = read_escaped(self, data, offset)
        return self.decode(raw), end

    def encode_array(self, array: Any) -> pa.BinaryArray:
        return self.conform(array).cast(pa.binary())

    def decode_array(self, array: pa.BinaryArray) -> pa.Array:
        try:
            return array.cast(pa.string())
        except pa.ArrowInvalid as error:
            self.corrupt(b"", str(error))

    def hash_unsigned(self, value: str, seed: int) -> int:
        return hashing.hash_bytes(value.encode(), seed)

    def shape(self) -> dict[str, Any]:
        return {"type": "str"}

    def arguments(self) -> tuple[Any, ...]:
        return ()

    def __str__(self) -> str:
        return "str"


def read_escaped(kind: StateType, data: bytes, offset: int) -> tuple[bytes, int]:
    """The escaped bytes that start at `offset`, unescaped, and where they end."""
    end, last = data.find(0, offset), len(data) - 1
    escaped = False
    while 0 <= end < last and data[end + 1] == 0xFF:
        end, escaped = data.find(0, end + 2), True
    if not 0 <= end < last or data[end + 1] != 0:
        kind.corrupt(data[offset:], "the end mark is missing")
    raw = data[offset:end]
    return (raw.replace(b"\x00\xff", b"\x00") if escaped else raw), end + 2


class BytesType(EscapedType):
    """Bytes as they are, of any length or of one fixed length; keys are escaped like text."""

    tag: ClassVar[str] = "bytes"
    python_type = bytes
    wire_type = bytes

    def __init__(self, length: int | None = None) -> None:
        self.length = length
        self.arrow_type = pa.binary() if length is None else pa.binary(length)
        self.fixed_value_width = length

    def check(self, value: Any) -> None:
        if type(value) is not bytes:
            convertible = isinstance(value, (bytearray, memoryview))
            self.refuse(value, hint="convert it with bytes(...)" if convertible else None)
        if self.length is not None and len(value) != self.length:
            self.refuse(value, f"expected {self.length} bytes, found {len(value)}")

    def encode(self, value: bytes) -> bytes:
        return value

    def decode(self, data: bytes) -> bytes:
        if self.length is not None and len(data) != self.length:
            self.corrupt(data, f"expected {self.length} bytes")
        return data

    def encode_key(self, value: bytes) -> bytes:
        if 0 in value:
            value = value.replace(b"\x00", b"\x00\xff")
        return value + b"\x00\x00"

    def decode_key(self, data: bytes) -> bytes:
        if data.find(0) == len(data) - 2 and data[-1] == 0:
            return self.decode(data[:-2])
        return super().decode_key(data)  # type: ignore[no-any-return]

    def decode_key_from(self, data: bytes, offset: int = 0) -> tuple[bytes, int]:
        raw, end = read_escaped(self, data, offset)
        return self.decode(raw), end

    def encode_array(self, array: Any) -> pa.BinaryArray:
        return self.conform(array).cast(pa.binary())

    def decode_array(self, array: pa.BinaryArray) -> pa.Array:
        if self.length is None:
            return array
        rows = rows_of(array, self.length, str(self))
        return from_numbers(rows.reshape(-1).view(f"V{self.length}"), self.arrow_type, array)

    def hash_unsigned(self, value: bytes, seed: int) -> int:
        return hashing.hash_bytes(value, seed)

    def shape(self) -> dict[str, Any]:
        return {"type": "bytes"} if self.length is None else {"type": "bytes", "length": self.length}

    def arguments(self) -> tuple[Any, ...]:
        return (self.length,)

    def __str__(self) -> str:
        return "bytes" if self.length is None else f"bytes[{self.length}]"


def values_or_none(values: Sequence[Any], convert: Any) -> list[Any]:
    """Convert each value that is not None."""
    return [None if value is None else convert(value) for value in values]

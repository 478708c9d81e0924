"""The contract of a state type: one Python type, one Arrow type, one value codec, one ordered key codec.

Rules that hold for every type:

* Array calls map null to null. Only an Optional type has an encoding for None.
* `to_arrow` takes None as null, whatever the type; `check` is what refuses None.
* Two types are equal when their stored form is the same, whether they know a Python class or came from JSON.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from statebackend.codecs import hashing
from statebackend.codecs.arrays import I64, ByteColumn, binary_rows, conform
from statebackend.errors import CorruptData, InvalidRequest

CODEC_VERSION = 1
encode_wire = msgspec.msgpack.Encoder().encode
Conversion = Callable[[Any], Any]


class StateType(ABC):
    """How values of one type are checked, copied, stored, ordered, hashed and shown.

    `wire_type` is what msgpack holds of a value inside a list, map, tuple or record; `to_wire` and `from_wire`
    convert, None standing for "as it is".
    """

    tag: ClassVar[str]
    arrow_type: pa.DataType
    nullable: bool = False
    immutable: bool = True
    can_be_key: bool = True
    python_type: type | None = None
    fixed_key_width: int | None = None
    fixed_value_width: int | None = None
    wire_type: Any
    to_wire: Conversion | None = None
    from_wire: Conversion | None = None

    # -- values

    @abstractmethod
    def check(self, value: Any) -> None:
        """Refuse a value that is not of this type, naming what was expected and found."""

    def checker(self) -> Callable[[Any], None]:
        """`check` as a plain function, for hot loops."""
        return self.check

    def copy(self, value: Any) -> Any:
        """A copy that shares nothing changeable; the value itself where it can't be changed."""
        return value

    @abstractmethod
    def encode(self, value: Any) -> bytes:
        """The value codec. The value must have passed `check`."""

    @abstractmethod
    def decode(self, data: bytes) -> Any:
        """The value again; bytes that no value of this type encodes to are `CorruptData`."""

    # -- keys

    def require_key(self) -> None:
        """Refuse types that can't be keys; the others do nothing."""
        if not self.can_be_key:
            raise self._no_key()

    def encode_key(self, value: Any) -> bytes:
        """An encoding that sorts like the values and tells where it ends."""
        raise self._no_key()

    def decode_key_from(self, data: bytes, offset: int = 0) -> tuple[Any, int]:
        """The value whose key encoding starts at `offset`, and the offset after it."""
        raise self._no_key()

    def decode_key(self, data: bytes) -> Any:
        value, end = self.decode_key_from(data, 0)
        if end != len(data):
            self.corrupt(data, f"{len(data) - end} bytes too many")
        return value

    def hash_unsigned(self, value: Any, seed: int) -> int:
        """Spark's xxhash64 of the value as an unsigned number; a seed that is not 42 comes from an earlier field."""
        raise self._no_key()

    def hash_key(self, value: Any, seed: int = hashing.SEED) -> int:
        """Spark SQL's `xxhash64(value)`: signed, 64 bits."""
        return hashing.signed(self.hash_unsigned(value, seed & 0xFFFFFFFFFFFFFFFF))

    # -- arrays

    def conform(self, array: Any) -> pa.Array:
        """One array of `arrow_type` from any array that holds such values; others are refused, none is parsed."""
        return conform(array, self.arrow_type)

    def encode_array(self, array: Any) -> pa.BinaryArray:
        """The value codec over a column."""
        encode = self.encode
        return pa.array([None if v is None else encode(v) for v in self.from_arrow(array)], pa.binary())

    def decode_array(self, array: pa.BinaryArray) -> pa.Array:
        decode = self.decode
        return self.to_arrow([None if v is None else decode(v) for v in array.to_pylist()])

    def encode_key_array(self, array: Any) -> pa.BinaryArray:
        """The key codec over a column."""
        encode = self.encode_key
        return pa.array([None if v is None else encode(v) for v in self.from_arrow(array)], pa.binary())

    def decode_key_array(self, array: pa.BinaryArray) -> pa.Array:
        decode = self.decode_key
        return self.to_arrow([None if v is None else decode(v) for v in array.to_pylist()])

    def read_keys(self, column: ByteColumn, positions: I64, ends: I64) -> tuple[pa.Array, I64]:
        """The keys whose encodings start at the positions of a column's bytes, and the positions after them."""
        if self.fixed_key_width is not None:
            rows = column.rows(positions, self.fixed_key_width, ends, str(self))
            return self.decode_key_array(binary_rows(rows)), positions + self.fixed_key_width
        data, values, after = column.data.tobytes(), [], []
        for position, end in zip(positions.tolist(), ends.tolist()):
            value, position = self.decode_key_from(data[:end], position)
            values.append(value)
            after.append(position)
        return self.to_arrow(values), np.array(after, np.int64)

    def decode_keys_at(self, array: pa.BinaryArray, offsets: Any = 0) -> tuple[pa.Array, I64]:
        """The keys that start `offsets` bytes (a number, or one a row) into each value, and the offsets after them.

        With it the parts of entry keys become columns without a Python object per row.
        """
        column = ByteColumn(array)
        values, after = self.read_keys(column, column.begins + offsets, column.ends)
        return values, after - column.begins

    def hash_array(self, array: Any, seeds: Any = hashing.FIRST_SEED) -> hashing.U64:
        """`hash_unsigned` of each row; a null row keeps its seed."""
        array = self.conform(array)
        hashes = self._hash_rows(array, seeds)
        if array.null_count:
            missing = pc.is_null(array).to_numpy(zero_copy_only=False)
            hashes[missing] = seeds[missing] if isinstance(seeds, np.ndarray) else seeds
        return hashes

    def _hash_rows(self, array: pa.Array, seeds: Any) -> hashing.U64:
        raise self._no_key()

    def to_arrow(self, values: Sequence[Any]) -> pa.Array:
        """A column of Python values; None becomes null."""
        return pa.array(values, self.arrow_type)

    def wire_to_arrow(self, wires: Sequence[Any]) -> pa.Array:
        """A column of values as msgpack holds them; None becomes null."""
        convert = self.from_wire
        return self.to_arrow(wires if convert is None else [None if w is None else convert(w) for w in wires])

    def arrow_to_wire(self, array: Any) -> list[Any]:
        """The values of a column as msgpack holds them; null becomes None."""
        convert = self.to_wire
        values = self.from_arrow(array)
        return values if convert is None else [None if value is None else convert(value) for value in values]

    def from_arrow(self, array: Any) -> list[Any]:
        """Python values of the declared type from a column; null becomes None."""
        values: list[Any] = self.conform(array).to_pylist()
        return values

    # -- identity

    @abstractmethod
    def shape(self) -> dict[str, Any]:
        """The stored form as JSON values without a version: what equality compares."""

    def describe(self) -> dict[str, Any]:
        """The stored form, plus what is only information (class names, defaults)."""
        return self.shape()

    def to_json(self) -> dict[str, Any]:
        return {"codec_version": CODEC_VERSION, **self.describe()}

    @abstractmethod
    def arguments(self) -> tuple[Any, ...]:
        """What the constructor takes, so that types can be sent to other processes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.arguments()

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, StateType) and self.shape() == other.shape())

    def __hash__(self) -> int:
        return hash(str(self.shape()))

    @abstractmethod
    def __str__(self) -> str: ...

    def __repr__(self) -> str:
        return f"<state type {self}>"

    # -- refusals

    def refuse(self, value: Any, why: str | None = None, hint: str | None = None) -> NoReturn:
        found = f"{type(value).__name__} {shortened(value)}"
        why = why or "a value has another type than declared"
        raise InvalidRequest(why, hint=hint, expected=str(self), found=found)

    def corrupt(self, data: bytes, why: str) -> NoReturn:
        raise CorruptData(f"stored bytes are no {self}: {why}", found=bytes(data[:32]).hex())

    def _no_key(self) -> InvalidRequest:
        return InvalidRequest(f"a value of type {self} can't be a key", hint="use numbers, text, bytes, dates, UUIDs, "
                              "enums, or tuples and frozen dataclasses of them")


def shortened(value: Any) -> str:
    """A value for an error message: never long, never failing."""
    try:
        text = repr(value)
    except Exception:
        return "(no repr)"
    return text if len(text) <= 80 else text[:77] + "..."

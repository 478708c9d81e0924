"""Dates, moments, times of day and spans: numbers counted in a unit from an epoch."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from datetime import UTC, date, datetime, time, timedelta
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from statebackend.codecs import hashing
from statebackend.codecs.arrays import binary_rows, from_numbers, numbers_of, rows_of
from statebackend.codecs.base import StateType

_EPOCH_DAY = date(1970, 1, 1).toordinal()
_EPOCH = datetime(1970, 1, 1)
_EPOCH_UTC = datetime(1970, 1, 1, tzinfo=UTC)
_MICRO = timedelta(microseconds=1)
_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000}


class CountedType(StateType):
    """Stored as one signed number: little-endian as a value, big-endian with the sign flipped as a key."""

    wire_type = int
    width = 8

    def __init__(self) -> None:
        code = "q" if self.width == 8 else "i"
        self._value, self._key = struct.Struct("<" + code), struct.Struct(">" + code.upper())
        self._bias = 1 << (8 * self.width - 1)
        self.dtype = np.dtype(f"<i{self.width}")
        self.fixed_value_width = self.fixed_key_width = self.width
        self.to_wire, self.from_wire = self.to_number, self._from_wire

    def to_number(self, value: Any) -> int:
        raise NotImplementedError

    def from_number(self, number: int) -> Any:
        raise NotImplementedError

    def _from_wire(self, number: int) -> Any:
        try:
            return self.from_number(number)
        except (OverflowError, ValueError) as error:
            self.corrupt(b"", f"{number} is out of range: {error}")

    def encode(self, value: Any) -> bytes:
        return self._value.pack(self.to_number(value))

    def decode(self, data: bytes) -> Any:
        try:
            return self.from_number(self._value.unpack(data)[0])
        except (struct.error, OverflowError, ValueError) as error:
            self.corrupt(data, str(error))

    def encode_key(self, value: Any) -> bytes:
        return self._key.pack(self.to_number(value) + self._bias)

    def decode_key_from(self, data: bytes, offset: int = 0) -> tuple[Any, int]:
        try:
            return self.from_number(self._key.unpack_from(data, offset)[0] - self._bias), offset + self.width
        except (struct.error, OverflowError, ValueError) as error:
            self.corrupt(data, str(error))

    def encode_array(self, array: Any) -> pa.BinaryArray:
        array = self.conform(array)
        return binary_rows(numbers_of(array, self.dtype).view(np.uint8).reshape(len(array), self.width), array)

    def decode_array(self, array: pa.BinaryArray) -> pa.Array:
        rows = np.ascontiguousarray(rows_of(array, self.width, str(self)))
        return from_numbers(rows.reshape(-1).view(self.dtype), self.arrow_type, array)

    def encode_key_array(self, array: Any) -> pa.BinaryArray:
        array = self.conform(array)
        numbers = numbers_of(array, self._unsigned) ^ self._unsigned.type(self._bias)
        return binary_rows(numbers.byteswap().view(np.uint8).reshape(len(array), self.width), array)

    def decode_key_array(self, array: pa.BinaryArray) -> pa.Array:
        rows = np.ascontiguousarray(rows_of(array, self.width, str(self))).reshape(-1)
        numbers = rows.view(self._unsigned).byteswap() ^ self._unsigned.type(self._bias)
        return from_numbers(numbers.view(self.dtype), self.arrow_type, array)

    @property
    def _unsigned(self) -> np.dtype[Any]:
        return np.dtype(f"<u{self.width}")

    def from_arrow(self, array: Any) -> list[Any]:
        array = self.conform(array)
        if self.numpy_unit is not None and not array.null_count and len(array):
            numbers = numbers_of(array, self.dtype)
            if self.lowest <= numbers.min() and numbers.max() <= self.highest:
                return numbers.astype(np.int64).view(self.numpy_unit).tolist()  # type: ignore[no-any-return]
        convert = self._from_wire
        return [None if number is None else convert(number) for number in self.arrow_to_wire(array)]

    def to_arrow(self, values: Sequence[Any]) -> pa.Array:
        return pa.array(values, self.arrow_type)

    def arrow_to_wire(self, array: Any) -> list[Any]:
        array = self.conform(array)
        if array.null_count:
            return array.view(self._number_type).to_pylist()  # type: ignore[no-any-return]
        return numbers_of(array, self.dtype).tolist()  # type: ignore[no-any-return]

    def wire_to_arrow(self, wires: Sequence[Any]) -> pa.Array:
        try:
            return pa.array(wires, self._number_type).view(self.arrow_type)
        except (pa.ArrowInvalid, OverflowError) as error:
            self.corrupt(b"", str(error))

    @property
    def _number_type(self) -> pa.DataType:
        return pa.int64() if self.width == 8 else pa.int32()

    def hash_unsigned(self, value: Any, seed: int) -> int:
        number = self.to_number(value) * self.hash_factor
        return hashing.hash_long(number, seed) if self.width == 8 else hashing.hash_int(number, seed)

    def _hash_rows(self, array: pa.Array, seeds: Any) -> hashing.U64:
        numbers = numbers_of(array, self.dtype).astype(np.int64) * self.hash_factor
        hashes = hashing.hash_longs if self.width == 8 else hashing.hash_ints
        return hashes(numbers.view(np.uint64), seeds)

    numpy_unit: str | None = None
    """The numpy type whose `tolist` gives the Python values, for numbers from `lowest` to `highest`."""
    lowest: int = 0
    highest: int = 0
    hash_factor: int = 1
    """What turns the stored number into the one that Spark hashes."""


class DateType(CountedType):
    """A calendar day, counted from 1970-01-01."""

    tag: ClassVar[str] = "date"
    python_type = date
    arrow_type = pa.date32()
    width = 4
    numpy_unit, lowest, highest = "M8[D]", date.min.toordinal() - _EPOCH_DAY, date.max.toordinal() - _EPOCH_DAY

    def check(self, value: Any) -> None:
        if type(value) is not date:
            self.refuse(value, hint="use value.date()" if isinstance(value, datetime) else None)

    def to_number(self, value: date) -> int:
        return value.toordinal() - _EPOCH_DAY

    def from_number(self, number: int) -> date:
        return date.fromordinal(number + _EPOCH_DAY)

    def shape(self) -> dict[str, Any]:
        return {"type": "date"}

    def arguments(self) -> tuple[Any, ...]:
        return ()

    def __str__(self) -> str:
        return "date"


class DatetimeType(CountedType):
    """A moment: without a zone as shown on the wall, or with one as an instant that reads back in UTC."""

    tag: ClassVar[str] = "datetime"
    python_type = datetime

    def __init__(self, zoned: bool = False, unit: str = "us") -> None:
        self.zoned, self.unit = zoned, unit
        self.arrow_type = pa.timestamp(unit, "UTC" if zoned else None)
        self._epoch = _EPOCH_UTC if zoned else _EPOCH
        self._step = timedelta(seconds=1) // _PER_SECOND[unit]
        self.hash_factor = 1_000_000 // _PER_SECOND[unit]
        if not zoned:
            self.numpy_unit = f"M8[{unit}]"
            self.lowest, self.highest = self.to_number(datetime.min), self.to_number(datetime.max)
        super().__init__()

    def check(self, value: Any) -> None:
        if not isinstance(value, datetime) or bool(getattr(value, "nanosecond", False)):
            self.refuse(value)
        if self.zoned and value.tzinfo is None:
            self.refuse(value, "a datetime without a zone can't be stored as an instant",
                        "give it a tzinfo, or declare datetime instead of Zoned")
        if self.zoned and value.year in (1, 9999):
            self._require_utc(value)
        if not self.zoned and value.tzinfo is not None:
            self.refuse(value, "a datetime with a zone can't be stored in a type without one",
                        "declare the type as statebackend.Zoned")
        if self.unit != "us" and (value - self._epoch) % self._step:
            self.refuse(value, f"a datetime is finer than the declared unit {self.unit}")

    def _require_utc(self, value: datetime) -> None:
        try:
            value.astimezone(UTC)
        except OverflowError:
            self.refuse(value, "a datetime is out of the years 1 to 9999 in UTC")

    def to_number(self, value: datetime) -> int:
        return (value - self._epoch) // self._step

    def from_number(self, number: int) -> datetime:
        return self._epoch + number * self._step

    def shape(self) -> dict[str, Any]:
        return {"type": "datetime", "zoned": self.zoned, "unit": self.unit}

    def arguments(self) -> tuple[Any, ...]:
        return self.zoned, self.unit

    def __str__(self) -> str:
        name = "zoned datetime" if self.zoned else "datetime"
        return name if self.unit == "us" else f"{name}[{self.unit}]"


class TimeType(CountedType):
    """A time of day without a zone, in microseconds after midnight."""

    tag: ClassVar[str] = "time"
    python_type = time
    arrow_type = pa.time64("us")
    hash_factor = 1000  # Spark counts times of day in nanoseconds

    def check(self, value: Any) -> None:
        if type(value) is not time:
            self.refuse(value)
        if value.tzinfo is not None:
            self.refuse(value, "a time of day with a zone can't be stored")

    def to_number(self, value: time) -> int:
        return ((value.hour * 60 + value.minute) * 60 + value.second) * 1_000_000 + value.microsecond

    def from_number(self, number: int) -> time:
        seconds, micros = divmod(number, 1_000_000)
        return time(seconds // 3600, seconds // 60 % 60, seconds % 60, micros)

    def shape(self) -> dict[str, Any]:
        return {"type": "time"}

    def arguments(self) -> tuple[Any, ...]:
        return ()

    def __str__(self) -> str:
        return "time"


class TimedeltaType(CountedType):
    """A span of time."""

    tag: ClassVar[str] = "timedelta"
    python_type = timedelta

    def __init__(self, unit: str = "us") -> None:
        self.unit = unit
        self.arrow_type = pa.duration(unit)
        self._step = timedelta(seconds=1) // _PER_SECOND[unit]
        self.hash_factor = 1_000_000 // _PER_SECOND[unit]
        self.numpy_unit = f"m8[{unit}]"
        self.lowest, self.highest = self.to_number(timedelta.min), self.to_number(timedelta.max)
        super().__init__()

    def check(self, value: Any) -> None:
        if type(value) is not timedelta:
            self.refuse(value)
        if not -(1 << 63) <= value // _MICRO < 1 << 63:
            self.refuse(value, "a timedelta is out of the range of 64-bit microseconds")
        if self.unit != "us" and value % self._step:
            self.refuse(value, f"a timedelta is finer than the declared unit {self.unit}")

    def to_number(self, value: timedelta) -> int:
        return value // self._step

    def from_number(self, number: int) -> timedelta:
        return number * self._step

    def shape(self) -> dict[str, Any]:
        return {"type": "timedelta", "unit": self.unit}

    def arguments(self) -> tuple[Any, ...]:
        return (self.unit,)

    def __str__(self) -> str:
        return "timedelta" if self.unit == "us" else f"timedelta[{self.unit}]"

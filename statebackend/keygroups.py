"""Key -> key group -> subtask: pure arithmetic, one key at a time and over whole columns.

The key group is Spark SQL's `pmod(xxhash64(key), max_parallelism)`, so that Spark and Python route alike.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import struct
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from statebackend.codecs import hashing
from statebackend.codecs.annotations import state_type
from statebackend.codecs.base import StateType
from statebackend.codecs.containers import OptionalType
from statebackend.codecs.records import TupleType
from statebackend.codecs.scalars import IntType
from statebackend.codecs.temporal import DatetimeType, TimedeltaType
from statebackend.codecs.text import BytesType, StrType
from statebackend.errors import InvalidRequest

MAX_PARALLELISM = 32768
_HALF = 1 << 63


@dataclass(frozen=True, slots=True)
class KeyGroupRange:
    """A row of key groups, both ends included."""

    first: int
    last: int

    def __post_init__(self) -> None:
        if type(self.first) is not int or type(self.last) is not int or \
                not 0 <= self.first <= self.last < MAX_PARALLELISM:
            raise InvalidRequest("a key-group range goes from 0 or more up to its last group, which it includes",
                                 expected=f"0 <= first <= last < {MAX_PARALLELISM}",
                                 found=f"{self.first!r}..{self.last!r}")

    def __contains__(self, group: object) -> bool:
        return isinstance(group, (int, np.integer)) and self.first <= int(group) <= self.last

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.last + 1))

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"

    def intersect(self, other: KeyGroupRange) -> KeyGroupRange | None:
        first, last = max(self.first, other.first), min(self.last, other.last)
        return KeyGroupRange(first, last) if first <= last else None


def require_max_parallelism(max_parallelism: Any) -> int:
    """The number itself if it is a possible max parallelism."""
    if type(max_parallelism) is not int or not 1 <= max_parallelism <= MAX_PARALLELISM:
        raise InvalidRequest("max parallelism is out of range", expected=f"1..{MAX_PARALLELISM}", found=max_parallelism)
    return max_parallelism


def default_max_parallelism(parallelism: int) -> int:
    """The next power of two of one and a half times the parallelism, at least 128, at most 32768."""
    if type(parallelism) is not int or not 1 <= parallelism <= MAX_PARALLELISM:
        raise InvalidRequest("parallelism is out of range", expected=f"1..{MAX_PARALLELISM}", found=parallelism)
    wanted = parallelism + parallelism // 2
    return min(max(1 << (wanted - 1).bit_length(), 128), MAX_PARALLELISM)


def _require_parallelism(parallelism: int, max_parallelism: int) -> None:
    require_max_parallelism(max_parallelism)
    if type(parallelism) is not int or not 1 <= parallelism <= max_parallelism:
        raise InvalidRequest("parallelism must be between 1 and the max parallelism", expected=f"1..{max_parallelism}",
                             found=parallelism, hint="rescale a savepoint to change the max parallelism")


def key_group_range(index: int, parallelism: int, max_parallelism: int) -> KeyGroupRange:
    """The key groups that subtask `index` of `parallelism` owns."""
    _require_parallelism(parallelism, max_parallelism)
    if type(index) is not int or not 0 <= index < parallelism:
        raise InvalidRequest("there is no such subtask", expected=f"0..{parallelism - 1}", found=index)
    first = -(-index * max_parallelism // parallelism)
    return KeyGroupRange(first, -(-(index + 1) * max_parallelism // parallelism) - 1)


def subtask_of(key_group: int, parallelism: int, max_parallelism: int) -> int:
    """The subtask that owns a key group."""
    _require_parallelism(parallelism, max_parallelism)
    if not 0 <= key_group < max_parallelism:
        raise InvalidRequest("there is no such key group", expected=f"0..{max_parallelism - 1}", found=key_group)
    return key_group * parallelism // max_parallelism


def key_group_of(key: Any, max_parallelism: int, key_type: Any = None) -> int:
    """The key group of one key. Without a `key_type` it follows from the value: `key_grouper` is for hot loops."""
    require_max_parallelism(max_parallelism)
    kind = type_of_value(key) if key_type is None else state_type(key_type)
    kind.require_key()
    kind.check(key)
    return ((kind.hash_unsigned(key, hashing.SEED) ^ _HALF) - _HALF) % max_parallelism


def key_hasher(key_type: Any) -> Callable[[Any], int]:
    """`xxhash64` of keys of one type, signed; keys must have passed the type's `check`."""
    kind = state_type(key_type)
    kind.require_key()
    unsigned = _unsigned_hasher(kind)
    return lambda key: (unsigned(key) ^ _HALF) - _HALF  # the signed number with the same 64 bits


def _unsigned_hasher(kind: StateType) -> Callable[[Any], int]:
    """The quickest function there is for a type."""
    digest, seed = hashing.hash_bytes, hashing.SEED
    if type(kind) is IntType:
        pack = struct.Struct("<q" if kind.signed else "<Q").pack
        return lambda key: digest(pack(key), seed)
    if type(kind) is StrType:
        return lambda key: digest(key.encode(), seed)
    if type(kind) is BytesType:
        return lambda key: digest(key, seed)
    unsigned = kind.hash_unsigned
    return lambda key: unsigned(key, seed)


def key_grouper(key_type: Any, max_parallelism: int) -> Callable[[Any], int]:
    """The key group of keys of one type; keys must have passed the type's `check`."""
    require_max_parallelism(max_parallelism)
    kind = state_type(key_type)
    kind.require_key()
    if max_parallelism & (max_parallelism - 1):
        hash_key = key_hasher(kind)
        return lambda key: hash_key(key) % max_parallelism
    digest, seed, mask = hashing.hash_bytes, hashing.SEED, max_parallelism - 1
    if type(kind) is IntType:
        pack = struct.Struct("<q" if kind.signed else "<Q").pack
        return lambda key: digest(pack(key), seed) & mask
    if type(kind) is StrType:
        return lambda key: digest(key.encode(), seed) & mask
    unsigned = _unsigned_hasher(kind)
    return lambda key: unsigned(key) & mask


def key_groups_of(array: Any, max_parallelism: int, key_type: Any = None) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The key group of each key of an Arrow array, a chunked array or a numpy array."""
    require_max_parallelism(max_parallelism)
    if isinstance(array, pa.ChunkedArray):
        parts = [key_groups_of(chunk, max_parallelism, key_type) for chunk in array.chunks]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)
    if not isinstance(array, pa.Array):
        array = pa.array(array)
    if array.null_count:
        raise InvalidRequest("a key must not be null", row=int(np.flatnonzero(np.asarray(array.is_null()))[0]))
    kind = _column_type(array.type) if key_type is None else state_type(key_type)
    kind.require_key()
    hashes = kind.hash_array(array)
    if max_parallelism & (max_parallelism - 1) == 0:
        return (hashes & np.uint64(max_parallelism - 1)).astype(np.int32)
    return np.mod(hashes.view(np.int64), np.int64(max_parallelism)).astype(np.int32)


def _column_type(kind: pa.DataType) -> StateType:
    """The type of a key column that comes without one; nanoseconds count as what they are in microseconds."""
    if pa.types.is_timestamp(kind):
        return DatetimeType(kind.tz is not None, "us" if kind.unit == "ns" else kind.unit)
    return TimedeltaType() if kind == pa.duration("ns") else state_type(kind)


_SIGNED, _UNSIGNED = IntType(), IntType(64, signed=False)
_PLAIN_TYPES: dict[type, StateType] = {cls: state_type(cls) for cls in (
    float, bool, str, bytes, datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID)}


def type_of_value(key: Any) -> StateType:
    """The type of a key or namespace that comes without one."""
    cls = type(key)
    if cls is int:
        return _UNSIGNED if key >= _HALF else _SIGNED
    if cls in _PLAIN_TYPES:
        return _PLAIN_TYPES[cls]
    if cls is datetime.datetime:
        return DatetimeType(zoned=key.tzinfo is not None)
    if isinstance(key, enum.Enum) or hasattr(cls, "_fields") or hasattr(cls, "__dataclass_fields__"):
        return state_type(cls)
    if cls is tuple:
        return TupleType(tuple(OptionalType(IntType()) if field is None else type_of_value(field) for field in key))
    name = "None" if key is None else cls.__name__
    raise InvalidRequest(f"{name} can't be a key", found=repr(key)[:80],
                         hint="use numbers, text, bytes, dates, UUIDs, enums, or tuples and frozen dataclasses of them")

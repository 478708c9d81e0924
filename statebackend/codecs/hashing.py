"""XXH64 as Spark SQL's `xxhash64` computes it, one value at a time and over whole columns.

All functions here work on unsigned 64-bit numbers; seeds chain from field to field of a tuple.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

SEED = 42
FIRST_SEED = np.uint64(SEED)
hash_bytes = xxhash.xxh64_intdigest
_P1, _P2, _P3 = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0x165667B19E3779F9)
_P4, _P5 = np.uint64(0x85EBCA77C2B2AE63), np.uint64(0x27D4EB2F165667C5)
_TWO_64, _TWO_63 = 1 << 64, 1 << 63
_pack_long = struct.Struct("<q").pack
_pack_int = struct.Struct("<i").pack
U64 = np.ndarray[Any, np.dtype[np.uint64]]


def signed(unsigned: int) -> int:
    """The signed 64-bit number with the same bits, which is what Spark shows."""
    return unsigned - _TWO_64 if unsigned >= _TWO_63 else unsigned


def hash_long(value: int, seed: int) -> int:
    return hash_bytes(_pack_long(value), seed)


def hash_int(value: int, seed: int) -> int:
    return hash_bytes(_pack_int(value), seed)


def _rotate(value: U64, bits: int) -> U64:
    high = value << np.uint64(bits)
    np.right_shift(value, np.uint64(64 - bits), out=value)
    high |= value
    return high


def _avalanche(value: U64) -> U64:
    value ^= value >> np.uint64(33)
    value *= _P2
    value ^= value >> np.uint64(29)
    value *= _P3
    value ^= value >> np.uint64(32)
    return value


def hash_longs(values: U64, seeds: U64 | np.uint64) -> U64:
    """XXH64 of each number as 8 little-endian bytes."""
    mixed = _rotate(values * _P2, 31)
    mixed *= _P1
    mixed ^= seeds + (_P5 + np.uint64(8))
    mixed = _rotate(mixed, 27)
    mixed *= _P1
    mixed += _P4
    return _avalanche(mixed)


def hash_ints(values: U64, seeds: U64 | np.uint64) -> U64:
    """XXH64 of the low 32 bits of each number as 4 little-endian bytes."""
    mixed = values & np.uint64(0xFFFFFFFF)
    mixed *= _P1
    mixed ^= seeds + (_P5 + np.uint64(4))
    mixed = _rotate(mixed, 23)
    mixed *= _P2
    mixed += _P3
    return _avalanche(mixed)


def hash_strings(array: pa.Array, seeds: U64 | np.uint64) -> U64:
    """XXH64 of each value of a binary or string array; nulls hash as empty and are the caller's to mask."""
    if isinstance(seeds, np.ndarray):
        pairs = zip(_byte_values(array), seeds.tolist())
        return np.fromiter((hash_bytes(data, seed) for data, seed in pairs), np.uint64, len(array))
    seed = int(seeds)
    return np.fromiter((hash_bytes(data, seed) for data in _byte_values(array)), np.uint64, len(array))


def _byte_values(array: pa.Array) -> list[bytes]:
    return [data or b"" for data in array.cast(pa.binary()).to_pylist()]

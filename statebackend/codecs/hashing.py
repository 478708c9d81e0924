"""XXH64 as Spark SQL's `xxhash64` computes it, one value at a time and over whole columns.

All functions here work on unsigned 64-bit numbers; seeds chain from field to field of a tuple.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from statebackend.codecs.arrays import I64, byte_ranges

SEED = 42
FIRST_SEED = np.uint64(SEED)
hash_bytes = xxhash.xxh64_intdigest
_P1, _P2, _P3 = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0x165667B19E3779F9)
_P4, _P5 = np.uint64(0x85EBCA77C2B2AE63), np.uint64(0x27D4EB2F165667C5)
_TWO_64, _TWO_63 = 1 << 64, 1 << 63
_pack_long = struct.Struct("<q").pack
_pack_int = struct.Struct("<i").pack
U64 = np.ndarray[Any, np.dtype[np.uint64]]
_BLOCK = 32_768
"""Rows hashed at a time: what a block needs stays in the processor's cache."""
_LONG = 256
"""Longer values are hashed one by one, which is then as fast."""


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
    """XXH64 of each value of a string or binary array; null rows hash as anything and are the caller's to mask."""
    data, begins, lengths = byte_ranges(array)
    hashes = np.empty(len(lengths), np.uint64)
    for low in range(0, len(lengths), _BLOCK):
        block = slice(low, low + _BLOCK)
        block_seeds = seeds[block] if isinstance(seeds, np.ndarray) else seeds
        hashes[block] = _hash_block(data, begins[block], lengths[block], block_seeds)
    return hashes


def _hash_block(data: np.ndarray[Any, Any], begins: I64, lengths: I64, seeds: U64 | np.uint64) -> U64:
    words = np.ndarray((len(data) - 7,), "<u8", data, strides=(1,))
    seeds = np.broadcast_to(seeds, lengths.shape)
    hashes = seeds + _P5
    longest = int(lengths.max())
    if longest >= 32 and (rows := _rows_where((lengths >= 32) & (lengths <= _LONG))) is not None:
        hashes[rows] = _stripes(words, begins[rows], lengths[rows], seeds[rows])
    hashes += lengths.view(np.uint64)
    position, rest = begins + (lengths & ~31), lengths & 31
    for step in (8, 16, 24):
        if (rows := _rows_where(rest >= step)) is None:
            break
        hashes[rows] = _mix_word(hashes[rows], words[position[rows] + (step - 8)])
    position += rest & ~7
    if (rows := _rows_where((rest & 4) != 0)) is not None:
        hashes[rows] = _mix_half(hashes[rows], words[position[rows]] & np.uint64(0xFFFFFFFF))
        position[rows] += 4
    for step in (1, 2, 3):
        if (rows := _rows_where((rest & 3) >= step)) is None:
            break
        mixed = hashes[rows] ^ (data[position[rows] + (step - 1)].astype(np.uint64) * _P5)
        hashes[rows] = _rotate(mixed, 11) * _P1
    hashes = _avalanche(hashes)
    if longest > _LONG:
        for row in np.flatnonzero(lengths > _LONG).tolist():
            value = data[begins[row]:begins[row] + lengths[row]].tobytes()
            hashes[row] = hash_bytes(value, int(seeds[row]))
    return hashes


def _rows_where(mask: Any) -> Any:
    """The rows where a mask holds: a slice if all, None if none."""
    rows = np.flatnonzero(mask)
    return slice(None) if len(rows) == len(mask) else rows if len(rows) else None


def _mix_word(hashes: U64, word: U64) -> U64:
    mixed = _rotate(word * _P2, 31)
    mixed *= _P1
    mixed ^= hashes
    mixed = _rotate(mixed, 27)
    mixed *= _P1
    mixed += _P4
    return mixed


def _mix_half(hashes: U64, half: U64) -> U64:
    half *= _P1
    half ^= hashes
    mixed = _rotate(half, 23)
    mixed *= _P2
    mixed += _P3
    return mixed


def _stripes(words: Any, begins: I64, lengths: I64, seeds: U64) -> U64:
    """The part of XXH64 that works on stripes of 32 bytes, for values that have at least one."""
    count = len(lengths)
    lanes = [seeds + _P1 + _P2, seeds + _P2, seeds.copy(), seeds - _P1]
    for stripe in range(0, int(lengths.max()) - 31, 32):
        rows = _rows_where(lengths >= stripe + 32)
        for lane in range(4):
            mixed = lanes[lane][rows] + words[begins[rows] + (stripe + 8 * lane)] * _P2
            lanes[lane][rows] = _rotate(mixed, 31) * _P1
    hashes = np.zeros(count, np.uint64)
    for state, bits in zip(lanes, (1, 7, 12, 18)):
        hashes += _rotate(state.copy(), bits)
    for state in lanes:
        hashes ^= _rotate(state * _P2, 31) * _P1
        hashes = hashes * _P1 + _P4
    return hashes

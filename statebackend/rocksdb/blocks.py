"""Decodes the blocks of RocksDB's table files, hundreds at a time: rows come out as Arrow arrays, not as objects.

    block    = entry ... | restart position (u32) ... | number of restarts (u32)
    entry    = shared (varint) | unshared (varint) | value length (varint) | key[shared:] | value
    key      = user key | (sequence << 8 | kind) (u64), the integers little-endian

`shared` bytes are those of the key before; at a restart none are. So the intervals between restarts are independent, and
the n-th entries of all intervals of all blocks are decoded together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from statebackend.codecs.arrays import binary_rows, pieces
from statebackend.errors import CorruptData

DELETION, PUT = 0, 1
TRAILER = 8
WIDEST_KEY = 256
"""Blocks with a longer key are decoded entry by entry: side by side, one long key would make all rows as wide."""

Bytes = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
_PAD = bytes(WIDEST_KEY + 2 * TRAILER)
_KEPT = [np.array([(1 << 8 * min(max(shared - 8 * word, 0), 8)) - 1 for shared in range(WIDEST_KEY + 1)], np.uint64)
         for word in range(WIDEST_KEY // 8)]
"""For each eight bytes of a key and each number of shared bytes: the bits that stay as they were."""
_MARKS = np.uint64(0x808080)
_BYTE = np.uint64(0xFF)


class BlockRows(NamedTuple):
    """The rows of some blocks, in their order: user keys, values, and whether each is a put or a deletion."""

    keys: pa.BinaryArray
    values: pa.BinaryArray
    kinds: Bytes


def decode_blocks(contents: Sequence[Any]) -> BlockRows:
    """The rows of neighbouring data blocks, given uncompressed; `CorruptData` where they are no blocks."""
    lengths = np.fromiter(map(len, contents), np.int64, len(contents))
    if int(lengths.min()) < 8:
        raise CorruptData("a block of a table file is too short")
    raw = b"".join((_PAD, *contents, _PAD))
    ends = np.cumsum(lengths) + len(_PAD)
    data = _Data(raw)
    walk = _walk(data, *_intervals(data, ends - lengths, ends))
    if int(walk.key_lengths.max()) > WIDEST_KEY or int(walk.unshared.min()) < TRAILER:
        return _one_by_one(contents)
    begins = walk.in_order(walk.key_begins + walk.unshared)
    values = data.cut(begins, begins + walk.in_order(walk.value_lengths))
    return BlockRows(_user_keys(data, walk), values, data.bytes[begins - TRAILER])


def entries_of(block: Any) -> Iterator[tuple[bytes, bytes]]:
    """The (key, value) pairs of one block, keys as they are stored."""
    data = bytes(block)
    restarts = int.from_bytes(data[-4:], "little")
    end = len(data) - 4 - 4 * restarts
    if restarts >> 31 or end < 0:
        raise CorruptData("a block of a table file has no valid restarts")
    position, key = 0, b""
    while position < end:
        shared, position = varint(data, position)
        unshared, position = varint(data, position)
        length, position = varint(data, position)
        stop = position + unshared + length
        if shared > len(key) or stop > end:
            raise CorruptData("an entry of a table file is cut short")
        key = key[:shared] + data[position:position + unshared]
        yield key, data[position + unshared:stop]
        position = stop


def varint(data: bytes | memoryview, position: int) -> tuple[int, int]:
    """A number of seven bits a byte, lowest first, and where it ends."""
    number = shift = 0
    while True:
        if position >= len(data) or shift > 63:
            raise CorruptData("a number in a table file is cut short")
        byte = data[position]
        number |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return number, position


class _Data:
    """Blocks behind one another, with room on both sides, so that no read of a few bytes too many leaves it."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self.bytes = np.frombuffer(raw, np.uint8)
        self._words: U64 = np.ndarray((len(raw) - 7,), "<u8", raw, strides=(1,))

    def words(self, positions: I64) -> U64:
        """Eight bytes from each position on as a number."""
        return self._words[positions]

    def numbers(self, positions: I64) -> I64:
        """The four-byte numbers at the positions."""
        return (self._words[positions] & np.uint64(0xFFFFFFFF)).astype(np.int64)

    def varints(self, positions: I64) -> tuple[I64, I64]:
        """The numbers of up to five bytes at the positions, and where they end."""
        found = np.zeros(len(positions), np.int64)
        more = np.ones(len(positions), np.bool_)
        ends = positions.copy()
        for shift in range(0, 35, 7):
            byte = self.bytes[np.minimum(ends, len(self.bytes) - 1)].astype(np.int64)
            found[more] |= (byte[more] & 0x7F) << shift
            ends[more] += 1
            more &= byte >= 0x80
            if not more.any():
                return found, ends
        raise CorruptData("a number in a table file does not end")

    def cut(self, begins: I64, ends: I64) -> pa.BinaryArray:
        lengths = ends - begins
        if (lengths == TRAILER).all():
            return binary_rows(self.words(begins).view(np.uint8).reshape(-1, TRAILER))
        return pieces(pa.py_buffer(self._raw), begins, ends)


def _intervals(data: _Data, begins: I64, ends: I64) -> tuple[I64, I64]:
    """Where each interval between restarts begins and ends."""
    counts = data.numbers(ends - 4)
    arrays = ends - 4 - 4 * counts
    if int(counts.min()) < 1 or (arrays < begins).any():
        raise CorruptData("a block of a table file has no valid restarts")
    of_block = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    starts = begins[of_block] + data.numbers(arrays[of_block] + 4 * (np.arange(len(of_block)) - first[of_block]))
    stops = np.append(starts[1:], 0)
    stops[first + counts - 1] = arrays
    if (starts < begins[of_block]).any() or (starts > stops).any():
        raise CorruptData("a block of a table file has no valid restarts")
    held = starts < stops  # an empty block has a restart too
    return starts[held], stops[held]


class _Walk(NamedTuple):
    """What the entries' heads say: a row for the first entries of all intervals, one for the second, and so on."""

    order: I64
    """Where in these rows, flattened, the entries are, in the order in which they stand in the blocks."""
    shared: I64
    unshared: I64
    key_begins: I64
    value_lengths: I64
    key_lengths: I64

    def in_order(self, numbers: I64) -> I64:
        return numbers.reshape(-1)[self.order]


def _walk(data: _Data, positions: I64, ends: I64) -> _Walk:
    steps: list[tuple[Any, ...]] = []
    previous = np.zeros(len(positions), np.int64)
    valid = positions < ends
    if not valid.any():
        raise CorruptData("the blocks of a table file hold no entry")
    while valid.any():
        head = data.words(positions)
        if (head & _MARKS).any():
            shared, at = data.varints(positions)
            unshared, at = data.varints(at)
            length, at = data.varints(at)
        else:
            shared, at = (head & _BYTE).astype(np.int64), positions + 3
            unshared = (head >> np.uint64(8) & _BYTE).astype(np.int64)
            length = (head >> np.uint64(16) & _BYTE).astype(np.int64)
        if not valid.all():
            shared[~valid], unshared[~valid], length[~valid], at[~valid] = 0, TRAILER, 0, ends[~valid] - TRAILER
        positions = at + unshared + length
        if (positions > ends).any() or (shared > previous).any():
            raise CorruptData("an entry of a table file is cut short")
        previous = shared + unshared
        steps.append((valid, shared, unshared, at, length, previous))
        valid = positions < ends
    there, *numbers = map(np.stack, zip(*steps))
    order = np.arange(there.size).reshape(there.shape).T
    return _Walk(order.reshape(-1) if there.all() else order[there.T], *numbers)


def _user_keys(data: _Data, walk: _Walk) -> pa.BinaryArray:
    """All keys without their trailers: what is shared comes from the key before, eight bytes at a time."""
    lengths = walk.in_order(walk.key_lengths) - TRAILER
    words = max(1, -(-int(lengths.max()) // 8))
    matrix = np.empty((len(lengths), words), np.uint64)  # rows are as wide as the widest key; what follows a key is noise
    aligned = walk.key_begins - walk.shared
    for word in range(words):
        kept = _KEPT[word][walk.shared]
        found = data.words(aligned + 8 * word)
        for step in range(1, len(found)):
            found[step] ^= (found[step] ^ found[step - 1]) & kept[step]
        matrix[:, word] = found.reshape(-1)[walk.order]
    rows = matrix.view(np.uint8)
    if (lengths == lengths[0]).all():
        return binary_rows(rows[:, :int(lengths[0])])
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    used = rows[np.arange(8 * words) < lengths[:, None]]
    return pa.Array.from_buffers(pa.binary(), len(rows), [None, pa.py_buffer(offsets), pa.py_buffer(used)])


def _one_by_one(contents: Sequence[Any]) -> BlockRows:
    pairs = [pair for block in contents for pair in entries_of(block)]
    if min(len(key) for key, _ in pairs) < TRAILER:
        raise CorruptData("a key in a table file is too short")
    return BlockRows(pa.array([key[:-TRAILER] for key, _ in pairs], pa.binary()),
                     pa.array([value for _, value in pairs], pa.binary()),
                     np.frombuffer(bytes(key[-TRAILER] for key, _ in pairs), np.uint8))

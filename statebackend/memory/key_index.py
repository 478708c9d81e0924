"""From keys to slot numbers over whole columns: an open-addressing table in numpy, shared by the states of a backend.

A key is one 64-bit word where it can be told exactly by one: integers, and text of up to seven bytes with its length.
Longer text is found by a hash and compared word by word. Slots are numbered in the order of arrival and never move, so
a snapshot's writer may read keys below the count it was given while the owner adds more.
"""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
import pyarrow as pa

from statebackend.codecs.arrays import numbers_of
from statebackend.codecs.text import StrType
from statebackend.memory.forms import is_int64
from statebackend.types import StateType

I64 = np.ndarray[Any, np.dtype[np.int64]]
U64 = np.ndarray[Any, np.dtype[np.uint64]]
_FIBONACCI = 0x9E3779B97F4A7C15
_M64 = (1 << 64) - 1
_EMPTY = -(1 << 63)
_MAX_WORDS = 8
_MASKS = np.array([(1 << 8 * kept) - 1 for kept in range(9)], np.uint64)


class NotColumnar(Exception):
    """Keys that this index can't hold exactly: the caller goes on without it."""


def indexable(kind: StateType) -> bool:
    """Whether keys of a type can be indexed by columns."""
    return is_int64(kind) or type(kind) is StrType


class KeyIndex:
    """Slot numbers of int64 or text keys."""

    def __init__(self, kind: StateType) -> None:
        self._text = type(kind) is StrType
        self._kind = kind
        self.count = 0
        self.words: list[U64] = [np.empty(1024, np.uint64)]
        """The words of each slot's key; one column for integers and short text."""
        self._salt = [secrets.randbits(64) | 1 for _ in range(_MAX_WORDS)]
        self._chunks: list[pa.Array] = []
        self._last: tuple[Any, I64] | None = None
        self._resize(2048)

    # -- from columns

    def slots(self, keys: pa.Array) -> I64:
        """The slot of each key, -1 where unknown. `keys` has the index's type and no nulls."""
        if self._last is not None and self._last[0] is keys:
            return self._last[1]
        return self._search(self._words(keys))

    def slots_or_new(self, keys: pa.Array) -> tuple[I64, I64]:
        """The slot of each key; new keys get one. Also the rows at which new keys first stood."""
        none = np.zeros(0, np.int64)
        if self._last is not None and self._last[0] is keys:
            return self._last[1], none
        words = self._words(keys)
        found = self._search(words)
        new = np.flatnonzero(found < 0)
        first = none
        if len(new):
            fresh = [word[new] for word in words]
            slots, taken = self._enter(self._hashes(fresh), self.count)
            first = new[taken]
            self._remember(keys, fresh, taken, first)
            found[new] = slots
            if len(words) > 1:
                self._require_same(fresh, slots)
        self._last = (keys, found)
        return found, first

    def _remember(self, keys: pa.Array, words: list[U64], taken: I64, rows: I64) -> None:
        """Keep the keys that got new slots, in the order of the slots."""
        first, last = self.count, self.count + len(taken)
        if last > len(self.words[0]):
            self.words = [grown(column, first, last) for column in self.words]
        for column, word in zip(self.words, words):
            column[first:last] = word[taken]
        if self._text:
            self._chunks.append(keys.take(pa.array(rows)))
        self.count = last

    def _words(self, keys: pa.Array) -> list[U64]:
        if not self._text:
            return [numbers_of(keys, np.int64).view(np.uint64)]
        words = text_words(keys, len(self.words))
        if len(words) != len(self.words):
            self._widen(len(words))
        return words

    def _hashes(self, words: list[U64]) -> I64:
        """What the table compares: the key itself where one word tells it, else a hash of its words."""
        if len(words) == 1:
            return words[0].view(np.int64)
        mixed = words[0] * np.uint64(self._salt[0])
        for word, salt in zip(words[1:], self._salt[1:]):
            mixed ^= mixed >> np.uint64(29)
            mixed += word * np.uint64(salt)
            mixed *= np.uint64(_FIBONACCI)
        mixed ^= mixed >> np.uint64(32)
        return mixed.view(np.int64)

    def _positions(self, hashes: I64) -> I64:
        mixed = hashes.view(np.uint64) * np.uint64(_FIBONACCI)
        mixed >>= np.uint64(self._shift)
        return mixed.view(np.int64)

    def _search(self, words: list[U64]) -> I64:
        hashes = self._hashes(words)
        position = self._positions(hashes)
        there = self._hash.take(position)
        found = self._slot.take(position).astype(np.int64)
        same = there == hashes
        if not same.all():
            found[~same] = -1
            self._probe(hashes, position, np.flatnonzero(~same & (there != _EMPTY)), found)
        if _EMPTY in hashes:
            found[hashes == _EMPTY] = self._empty_slot
        if len(words) > 1:
            self._require_same(words, found)
        return found

    def _probe(self, hashes: I64, position: I64, open_rows: I64, found: I64) -> None:
        """Follow the rows whose first position holds another key."""
        position = position[open_rows]
        while len(open_rows):
            position = (position + 1) & self._mask
            there = self._hash.take(position)
            same = there == hashes[open_rows]
            found[open_rows[same]] = self._slot.take(position[same])
            going = ~same & (there != _EMPTY)
            open_rows, position = open_rows[going], position[going]

    def _require_same(self, words: list[U64], found: I64) -> None:
        """Two keys with one hash can't both be in the table: give up the index rather than mix them up."""
        known = found >= 0
        slots = found[known]
        for mine, theirs in zip(words, self.words):
            if not np.array_equal(mine[known], theirs.take(slots)):
                raise NotColumnar

    # -- the table

    def _resize(self, wanted: int) -> None:
        size = 1 << (wanted - 1).bit_length()
        self._mask = np.int64(size - 1)
        self._shift = 64 - (size.bit_length() - 1)
        self._hash = np.full(size, _EMPTY, np.int64)
        self._slot = np.full(size, -1, np.int32)
        self._empty_slot = -1
        if self.count:
            self._enter(self._hashes([word[:self.count] for word in self.words]), 0, again=True)

    def _enter(self, hashes: I64, first: int, *, again: bool = False) -> tuple[I64, I64]:
        """Give slots, from `first` on, to hashes that are not in the table; equal ones get the same.

        Gives the slot of each, and which of them got a new one, in the order of the slots. `again` enters the hashes
        of all slots, in order, and leaves each its number.
        """
        if 2 * (first + len(hashes)) > len(self._hash):
            self._resize(4 * (first + len(hashes)))
        slots = np.empty(len(hashes), np.int64)
        taken: list[I64] = []
        open_rows = np.arange(len(hashes))
        special = hashes == _EMPTY
        if special.any():
            open_rows = np.flatnonzero(~special)
            self._empty_slot = int(np.flatnonzero(special)[0]) if again else first
            slots[special] = first
            taken.append(np.flatnonzero(special)[:1])
            first += 1
        position = self._positions(hashes[open_rows])
        while len(open_rows):
            there = self._hash.take(position)
            free = np.flatnonzero(there == _EMPTY)
            trying, at = open_rows[free], position[free]
            self._slot[at] = trying  # of several rows at one position, one wins
            won = self._slot.take(at) == trying
            winners, places = trying[won], at[won]
            new = winners if again else np.arange(first, first + len(winners))
            first += len(winners)
            self._hash[places] = hashes[winners]
            self._slot[places] = new
            taken.append(winners)
            there = self._hash.take(position)
            same = there == hashes[open_rows]
            slots[open_rows[same]] = self._slot.take(position[same])
            open_rows, position = open_rows[~same], (position[~same] + 1) & self._mask
        return slots, np.concatenate(taken) if taken else np.zeros(0, np.int64)

    def _widen(self, words: int) -> None:
        """Tell text by more words than before."""
        keys = self.keys_between(0, self.count)
        self.words = [np.empty(max(1024, self.count), np.uint64) for _ in range(words)]
        for column, word in zip(self.words, text_words(keys, words)):
            column[:self.count] = word
        self._resize(max(2048, 4 * self.count))

    # -- one key, and back to keys

    def find(self, key: Any) -> int:
        """The slot of one key, or -1."""
        words = self._words_of(key)
        if words is None:
            return -1
        wanted = words[0] if len(words) == 1 else int(self._hashes([np.array([word], np.uint64) for word in words])[0])
        wanted = wanted - (1 << 64) if wanted >= 1 << 63 else wanted
        if wanted == _EMPTY:
            return self._empty_slot
        mask, position = int(self._mask), (wanted * _FIBONACCI & _M64) >> self._shift
        while True:
            there = int(self._hash[position])
            if there == wanted:
                slot = int(self._slot[position])
                same = all(int(column[slot]) == word for column, word in zip(self.words, words))
                return slot if same else -1
            if there == _EMPTY:
                return -1
            position = (position + 1) & mask

    def _words_of(self, key: Any) -> list[int] | None:
        if not self._text:
            return [key & _M64]
        data, words = key.encode(), len(self.words)
        if len(data) >= 8 * words:
            return None
        padded = data.ljust(8 * words - 1, b"\0") + bytes([len(data)])
        return [int.from_bytes(padded[begin:begin + 8], "little") for begin in range(0, 8 * words, 8)]

    def keys_between(self, begin: int, end: int) -> pa.Array:
        """The keys of a range of slots as an Arrow column."""
        if not self._text:
            return pa.array(self.words[0][begin:end].view(np.int64))
        if len(self._chunks) > 1:
            self._chunks = [pa.concat_arrays(self._chunks)]
        return self._chunks[0].slice(begin, end - begin) if self._chunks else pa.array([], pa.string())

    def keys_of(self, slots: I64) -> pa.Array:
        """The keys of slots as an Arrow column."""
        if not self._text:
            return pa.array(self.words[0][slots].view(np.int64))
        return self.keys_between(0, self.count).take(pa.array(slots))

    def keep(self, slots: I64) -> None:
        """Forget all keys but those of some slots, which are numbered anew in this order."""
        if self._text:
            self._chunks = [self.keys_between(0, self.count).take(pa.array(slots))]
        self.words = [column[slots] for column in self.words]
        self.count = len(slots)
        self._last = None
        self._resize(max(2048, 4 * self.count))


def grown(column: Any, used: int, wanted: int) -> Any:
    larger = np.zeros(max(wanted, 2 * len(column)), column.dtype)
    larger[:used] = column[:used]
    return larger


def text_words(keys: pa.Array, least: int) -> list[U64]:
    """Text as little-endian words with the length in the last byte, exactly; at least `least` of them."""
    count = len(keys)
    if count == 0:
        return [np.zeros(0, np.uint64) for _ in range(least)]
    offsets = np.frombuffer(keys.buffers()[1], np.int32, count + 1, keys.offset * 4)
    begins, lengths = offsets[:-1], np.diff(offsets)
    longest, words = int(lengths.max()), least
    while 8 * words <= longest:
        words *= 2
    if words > _MAX_WORDS:
        raise NotColumnar
    low, high = int(offsets[0]), int(offsets[-1])
    data = np.zeros(high - low + 8 * words, np.uint8)
    if high > low:
        data[:high - low] = np.frombuffer(keys.buffers()[2], np.uint8, high - low, low)
    windows = np.ndarray((len(data) - 7,), np.dtype("<u8"), data, 0, (1,))
    columns = []
    for index in range(words):
        column = windows[(begins - low) + 8 * index if index else begins - low]
        column &= _MASKS.take(np.clip(lengths - 8 * index, 0, 8))
        columns.append(column)
    columns[-1] |= lengths.astype(np.uint64) << np.uint64(56)
    return columns

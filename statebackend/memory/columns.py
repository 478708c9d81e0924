"""Numbers of one state as numpy columns by slot, changed by whole batches, snapshotted without stopping the owner.

A freeze costs nothing that grows with the state: from then on the owner saves the old value of a slot before it first
changes it, until the writer has copied the columns. The copy, with the saved values put back, is the state at the freeze.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from statebackend.entries import OP_DELETE, OP_PUT
from statebackend.keygroups import key_groups_of
from statebackend.memory.encode import EntryEncoder
from statebackend.memory.key_index import I64, KeyIndex, grown
from statebackend.memory.runs import Rows
from statebackend.types import StateType

COPY_ROWS = 65_536
SAFE = float(2**62)
_LOWEST, _HIGHEST = -(2**63), 2**63 - 1
Column = np.ndarray[Any, Any]


class ColumnTable:
    """The entries of one state whose values are numbers: one column, or two for an average (sum and count)."""

    def __init__(self, index: KeyIndex, dtypes: tuple[Any, ...], identity: Any = 0) -> None:
        self.index = index
        self.identity = identity
        self.values: list[Column] = [np.full(1024, identity, dtype) for dtype in dtypes]
        self.live = np.zeros(1024, bool)
        self.dirty = np.zeros(1024, bool)
        self.views: list[ColumnView] = []
        self.bound = 0.0
        """No value of an integer column is further from zero than this."""

    # -- one entry

    def get(self, key: Any, default: Any = None) -> Any:
        slot = self.index.find(key)
        if slot < 0 or slot >= len(self.live) or not self.live[slot]:
            return default
        if len(self.values) == 1:
            return self.values[0][slot].item()
        return tuple(column[slot].item() for column in self.values)

    def live_keys(self) -> list[Any]:
        """All keys that have an entry."""
        count = min(self.index.count, len(self.live))
        keys: list[Any] = self.index.keys_between(0, count).filter(pa.array(self.live[:count])).to_pylist()
        return keys

    # -- batches

    def reserve(self) -> None:
        """Make room for every slot of the index. Readers keep the columns they have."""
        wanted, used = self.index.count, len(self.live)
        if wanted > used:
            values = [grown(column, used, wanted) for column in self.values]
            if self.identity:
                for column in values:
                    column[used:] = self.identity
            self.values = values
            self.live = grown(self.live, used, wanted)
            self.dirty = grown(self.dirty, used, wanted)

    def before(self, slots: I64) -> None:
        """Call before changing slots: unfinished snapshots keep what they had."""
        for view in self.views:
            view.save(self, slots)

    def after(self, slots: I64) -> None:
        self.live[slots] = True
        self.dirty[slots] = True

    def put(self, slots: I64, columns: list[Column], *, dirty: bool = True) -> None:
        self.before(slots)
        for mine, new in zip(self.values, columns):
            mine[slots] = new
            if mine.dtype.kind == "i" and len(new):
                self.bound = max(self.bound, float(new.max()), -float(new.min()))
        self.live[slots] = True
        if dirty:
            self.dirty[slots] = True

    def remove(self, slots: I64) -> None:
        slots = slots[slots >= 0]
        slots = slots[slots < len(self.live)]
        slots = slots[self.live[slots]]
        self.before(slots)
        for column in self.values:
            column[slots] = self.identity
        self.live[slots] = False
        self.dirty[slots] = True

    def read(self, slots: I64) -> tuple[list[Column], Any]:
        """The values of slots, and whether each has one; -1 and slots beyond the columns have none."""
        inside = (slots >= 0) & (slots < len(self.live))
        if inside.all():
            return [column.take(slots) for column in self.values], self.live.take(slots)
        safe = np.where(inside, slots, 0)
        return [column.take(safe) for column in self.values], self.live.take(safe) & inside

    def sum_is_safe(self, column: int, added: Column) -> bool:
        """Whether adding numbers can't leave 64 bits; tightens the bound before it says no."""
        total = float(np.abs(added.astype(np.float64)).sum())
        if self.bound + total >= SAFE:
            used = self.values[column]
            self.bound = max(float(used.max()), -float(used.min()), 0.0)
        if self.bound + total >= SAFE:
            return False
        self.bound += total
        return True

    # -- snapshots

    def freeze(self) -> tuple[ColumnView, Any]:
        """The table as it is now, and the slots changed since the last freeze."""
        dirty = self.dirty
        self.dirty = np.zeros(len(self.live), bool)
        view = ColumnView(self)
        self.views.append(view)
        return view, dirty

    def keep(self, slots: I64) -> None:
        """Follow an index that has kept some slots only."""
        inside = slots < len(self.live)
        size = max(1024, len(slots))

        def kept(column: Column, filler: Any) -> Column:
            new = np.full(size, filler, column.dtype)
            new[:len(slots)][inside] = column[slots[inside]]
            return new

        self.values = [kept(column, self.identity) for column in self.values]
        self.live, self.dirty = kept(self.live, False), kept(self.dirty, False)


class ColumnView:
    """A column table as it was at a freeze. The owner saves, the writer takes; `take` ends the saving."""

    def __init__(self, table: ColumnTable) -> None:
        self._index = table.index
        self._count = min(table.index.count, len(table.live))
        self._values = list(table.values)
        self._live = table.live
        self._saved = np.zeros(self._count, bool)
        self._undo: list[tuple[I64, list[Column], Column]] = []
        self._table: ColumnTable | None = table

    def save(self, table: ColumnTable, slots: I64) -> None:
        slots = slots[slots < self._count]
        slots = slots[~self._saved[slots]]
        if len(slots):
            self._undo.append((slots, [column[slots] for column in table.values], table.live[slots]))
            self._saved[slots] = True

    def release(self) -> None:
        """Stop saving: the copy is made, or nobody wants it."""
        table, self._table = self._table, None
        if table is not None:
            table.views = [view for view in table.views if view is not self]

    def take(self) -> tuple[list[Column], Column]:
        """Values and liveness at the freeze."""
        values = [np.empty(self._count, column.dtype) for column in self._values]
        live = np.empty(self._count, bool)
        for begin in range(0, self._count, COPY_ROWS):
            end = min(begin + COPY_ROWS, self._count)
            for copy, column in zip(values, self._values):
                copy[begin:end] = column[begin:end]
            live[begin:end] = self._live[begin:end]
        self.release()
        for slots, old_values, old_live in self._undo:
            for copy, old in zip(values, old_values):
                copy[slots] = old
            live[slots] = old_live
        self._undo = []
        return values, live

    def full(self, encoder: EntryEncoder, hidden: set[Any], encode: ColumnEncode) -> Iterator[Rows]:
        """All entries but those of hidden keys."""
        values, live = self.take()
        live &= ~self._slots_of(hidden)
        yield from self._rows(np.flatnonzero(live), values, encoder, encode, OP_PUT)

    def delta(self, encoder: EntryEncoder, hidden: set[Any], encode: ColumnEncode,
              dirty: list[Column]) -> Iterator[Rows]:
        """Entries that changed in any of several epochs, but those of hidden keys."""
        values, live = self.take()
        changed = np.zeros(self._count, bool)
        for part in dirty:
            used = min(len(part), self._count)
            changed[:used] |= part[:used]
        changed &= ~self._slots_of(hidden)
        yield from self._rows(np.flatnonzero(changed & ~live), values, encoder, encode, OP_DELETE)
        yield from self._rows(np.flatnonzero(changed & live), values, encoder, encode, OP_PUT)

    def _slots_of(self, hidden: set[Any]) -> Column:
        mask = np.zeros(self._count, bool)
        for key in hidden:
            slot = self._index.find(key)
            if 0 <= slot < self._count:
                mask[slot] = True
        return mask

    def _rows(self, slots: I64, values: list[Column], encoder: EntryEncoder, encode: ColumnEncode,
              op: int) -> Iterator[Rows]:
        for begin in range(0, len(slots), COPY_ROWS):
            part = slots[begin:begin + COPY_ROWS]
            keys = self._index.keys_of(part)
            groups = key_groups_of(keys, encoder.max_parallelism, encoder.key_type).astype(np.uint16)
            entry_keys = encoder.with_prefix(groups, encoder.key_type.encode_key_array(keys))
            data = encode([column[part] for column in values]) if op == OP_PUT else pa.nulls(len(part), pa.binary())
            yield Rows(groups, entry_keys, data, np.full(len(part), op, np.uint8))


ColumnEncode = Callable[[list[Column]], pa.BinaryArray]


def column_encoder(kind: StateType) -> ColumnEncode:
    """The value codec over numpy columns."""
    def encode(columns: list[Column]) -> pa.BinaryArray:
        if len(columns) == 1:
            return kind.encode_array(pa.array(columns[0]))
        return pa.array([kind.encode(row) for row in zip(*(column.tolist() for column in columns))], pa.binary())
    return encode

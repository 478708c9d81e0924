"""Batches over numbers: which states can be held in columns, how they come into them, and the vectorised calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from statebackend.codecs.arrays import numbers_of
from statebackend.codecs.scalars import FloatType
from statebackend.errors import InvalidRequest
from statebackend.memory.columns import Column, ColumnTable
from statebackend.memory.forms import is_int64
from statebackend.memory.key_index import I64, NotColumnar, indexable
from statebackend.memory.layers import Layer
from statebackend.types import StateType

if TYPE_CHECKING:
    from statebackend.memory.table_state import TableState

MIN_ROWS = 64
"""Smaller batches are looped over: they do not repay turning a state into columns."""


def is_number(kind: StateType | None) -> bool:
    return kind is not None and (is_int64(kind) or (type(kind) is FloatType and kind.bits == 64))


def dtype_of(kind: StateType) -> Any:
    return np.dtype(np.int64 if is_int64(kind) else np.float64)


class Batches:
    """The columnar side of one state. Made when the state is registered; used from its first large batch on."""

    def __init__(self, state: TableState, dtypes: tuple[Any, ...], identity: Any = 0) -> None:
        self._state = state
        self._dtypes = dtypes
        self._identity = identity

    @staticmethod
    def possible(state: TableState) -> bool:
        return state.expiry is None and not state.named and indexable(state.keyed.key_type)

    def keys(self, keys: Any) -> pa.Array | None:
        """The keys of a batch, checked; None where the batch is to be looped over."""
        state = self._state
        if state.keyed.columnar is False or (state.columns is None and len(keys) < MIN_ROWS):
            return None
        try:
            column = state.keyed.key_type.conform(keys)
        except InvalidRequest as error:
            raise InvalidRequest(error.message, hint=error.hint, state=state.name, **error.context) from error
        if column.null_count:
            raise InvalidRequest("a key must not be null", state=state.name, row=column.is_null().index(True).as_py())
        return column

    def numbers(self, values: Any, kind: StateType, rows: int) -> Column:
        """The value column of a batch as numpy numbers, without nulls."""
        state = self._state
        try:
            column = kind.conform(values)
        except InvalidRequest as error:
            raise InvalidRequest(error.message, hint=error.hint, state=state.name, **error.context) from error
        if len(column) != rows:
            raise InvalidRequest("keys and values of a batch differ in length", state=state.name, keys=rows,
                                 values=len(column))
        if column.null_count:
            raise InvalidRequest("a value must not be null", state=state.name, expected=str(kind),
                                 row=column.is_null().index(True).as_py())
        return numbers_of(column, dtype_of(kind))

    def table(self) -> ColumnTable:
        """The columns, holding everything that this state holds."""
        state = self._state
        if state.columns is None:
            state.delta.get(None)  # a closed table refuses
            state.keyed.require_columns()
            columns = ColumnTable(state.keyed.index, self._dtypes, self._identity)
            self._flush(columns)
            state.columns = columns
        elif any(layer or layer.removed for layer in (state.delta, *state.frozen, state.base)):
            self._flush(state.columns)
        return state.columns  # type: ignore[no-any-return]

    def _flush(self, columns: ColumnTable) -> None:
        """Move what the dicts hold into the columns. What later deltas must cover is marked as changed."""
        state = self._state
        with state.keyed.quiet():
            state.prune()
            uncommitted = state.keyed.take_uncommitted(state.name)
            for layer in (state.base, *reversed(state.frozen), state.delta):
                self._enter(columns, layer, dirty=layer is state.delta)
            for layer in uncommitted:
                self._mark(columns, layer)
            state.base, state.frozen, state.delta = Layer(state), (), Layer(state)

    def _enter(self, columns: ColumnTable, layer: Layer, *, dirty: bool) -> None:
        if layer.removed:
            columns.remove(self._slots(list(layer.removed)))
        if layer:
            slots = self._slots(list(layer))
            columns.reserve()
            stored = list(layer.values())
            parts = [stored] if len(self._dtypes) == 1 else list(zip(*stored))
            columns.put(slots, [np.array(part, dtype) for part, dtype in zip(parts, self._dtypes)], dirty=dirty)

    def _mark(self, columns: ColumnTable, layer: Layer) -> None:
        changed = [*layer, *layer.removed]
        if changed:
            slots = self._slots(changed)
            columns.reserve()
            columns.dirty[slots] = True

    def _slots(self, keys: list[Any]) -> I64:
        keyed = self._state.keyed
        slots, _ = keyed.index.slots_or_new(keyed.key_type.to_arrow(keys))
        return slots

    # -- calls

    def read(self, keys: pa.Array) -> tuple[list[Column], Column] | None:
        """Values and presence of each key; None where it must be looped."""
        try:
            table = self.table()
            return table.read(self._state.keyed.index.slots(keys))
        except NotColumnar:
            self._state.keyed.leave_columns()
            return None

    def change(self, keys: pa.Array, apply: Callable[[ColumnTable, I64], bool]) -> bool:
        """Let `apply` change the slots of the keys; False, with nothing changed, where the batch must be looped."""
        keyed = self._state.keyed
        try:
            table = self.table()
            keyed.compact_index()
            slots, new = keyed.index.slots_or_new(keys)
        except NotColumnar:
            keyed.leave_columns()
            return False
        if len(new):
            self._require_held(keys, new)
        table.reserve()
        return apply(table, slots)

    def _require_held(self, keys: pa.Array, rows: I64) -> None:
        """Refuse a batch with a key of another subtask. Only new keys can be such; they are forgotten again."""
        keyed = self._state.keyed
        try:
            keyed.require_held_keys(keys.take(pa.array(rows)), self._state.name)
        except InvalidRequest:
            keyed.index.keep(np.arange(keyed.index.count - len(rows)))
            raise

    def remove(self, keys: pa.Array) -> bool:
        try:
            table = self.table()
            table.remove(self._state.keyed.index.slots(keys))
        except NotColumnar:
            self._state.keyed.leave_columns()
            return False
        return True


def fold_into(built_in: str) -> Callable[[ColumnTable, I64, Column | None], bool]:
    """The vectorised form of a built-in function: False, with nothing changed, where it can't be exact."""
    def fold(table: ColumnTable, slots: I64, numbers: Column | None) -> bool:
        if numbers is not None and numbers.dtype.kind == "f" and built_in in ("min", "max") and np.isnan(numbers).any():
            return False
        if built_in == "sum" and numbers is not None and numbers.dtype.kind == "i" and \
                not table.sum_is_safe(0, numbers):
            return False
        table.before(slots)
        _FOLDS[built_in](table.values, slots, numbers)
        table.after(slots)
        return True
    return fold


def _add_average(columns: list[Column], slots: I64, numbers: Any) -> None:
    np.add.at(columns[0], slots, numbers.astype(np.float64, copy=False))
    np.add.at(columns[1], slots, 1)


_FOLDS: dict[str, Callable[[list[Column], I64, Any], None]] = {
    "sum": lambda columns, slots, numbers: np.add.at(columns[0], slots, numbers),
    "count": lambda columns, slots, _numbers: np.add.at(columns[0], slots, 1),
    "min": lambda columns, slots, numbers: np.minimum.at(columns[0], slots, numbers),
    "max": lambda columns, slots, numbers: np.maximum.at(columns[0], slots, numbers),
    "avg": _add_average,
}


def identity_of(built_in: str, dtype: Any) -> Any:
    """What a slot holds before the first value is folded in."""
    if built_in not in ("min", "max"):
        return 0
    lowest: Any = np.iinfo(np.int64).min if dtype.kind == "i" else -np.inf
    highest: Any = np.iinfo(np.int64).max if dtype.kind == "i" else np.inf
    return highest if built_in == "min" else lowest


def leave_columns(state: TableState, dirty: list[Column]) -> None:
    """Turn a state back into dicts; all that later deltas must cover goes into the active layer."""
    columns: ColumnTable = state.columns
    count = min(state.keyed.index.count, len(columns.live))
    changed = np.zeros(count, bool)
    for part in (*dirty, columns.dirty):
        used = min(len(part), count)
        changed[:used] |= part[:used]
    keys = state.keyed.index.keys_between(0, count).to_pylist()
    stored: Any = columns.values[0][:count].tolist() if len(columns.values) == 1 else \
        list(zip(*(column[:count].tolist() for column in columns.values)))
    base, delta = Layer(state), Layer(state)
    layers = (state.base, *reversed(state.frozen), state.delta)
    for key, value, live, dirtied in zip(keys, stored, columns.live[:count].tolist(), changed.tolist()):
        if live:
            (delta if dirtied else base)[key] = value
        elif dirtied:
            delta.removed.add(key)
    state.base, state.frozen, state.delta, state.columns = base, (), delta, None
    for layer in layers:
        for key in layer.removed:
            state.remove(key)
            state.delta.removed.add(key)
        state.delta.update(layer)

"""Compares two savepoints: totals of added, removed and changed entries by state, then the entries themselves.

Records in flight are compared as if they were a state named `inflight` of the operator that keeps them.

Both are walked by key group, a few at a time, so memory stays bounded whatever their size. Where the max parallelism
differs, the left one is grouped anew first.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from savepoint.columns import StateLayout
from savepoint.convert import Meter, Progress
from savepoint.format import EXPIRES_AT, IN_FLIGHT, KEY_GROUP, MAP_KEY, MAP_VALUE, VALUE
from savepoint.inflight import kept_records
from savepoint.opened import Savepoint, open_savepoint
from savepoint.parts import concat
from savepoint.retype import retyped
from savepoint.rewrite import as_open
from savepoint.scan import scan_state
from savepoint.transform import Transform, column_kinds
from savepoint.values import plain_column, plain_rows
from statebackend.errors import IncompatibleState
from statebackend.keygroups import KeyGroupRange
from statebackend.schema import StateSchema

SPAN_ROWS = 262_144
_BEFORE, _AFTER = "before", "after"
_Records = list[tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass(frozen=True)
class StateDifference:
    """One state of one operator. `note` tells what else differs: it is only on one side, or its schema changed."""

    uid: str
    state: str
    added: int = 0
    removed: int = 0
    changed: int = 0
    unchanged: int = 0
    note: str | None = None

    @property
    def is_none(self) -> bool:
        return not (self.added or self.removed or self.changed or self.note)


@dataclass(frozen=True)
class Comparison:
    """What differs between two savepoints. Falsy where nothing does."""

    states: tuple[StateDifference, ...] = ()
    operators: tuple[str, ...] = ()
    """Sentences about operators: only on one side, other parallelism."""
    totals: dict[str, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.operators) or any(not state.is_none for state in self.states)


def compare(left: str | os.PathLike[str] | Savepoint, right: str | os.PathLike[str] | Savepoint, *,
            progress: Progress | None = None) -> Comparison:
    """The totals of every difference between two savepoints or checkpoints of any format."""
    with ExitStack() as stack:
        pair = _Pair(left, right, stack)
        meter = Meter(progress, pair.rows())
        states = [_state_difference(pair, uid, state, meter) for uid, state in pair.states()]
        states += _operator_state_differences(pair)
        states += [_in_flight_difference(pair, uid) for uid in pair.keepers()]
        totals = {name: sum(getattr(state, name) for state in states)
                  for name in ("added", "removed", "changed", "unchanged")}
        return Comparison(tuple(states), tuple(_operator_differences(pair)), totals)


def changes(left: str | os.PathLike[str] | Savepoint, right: str | os.PathLike[str] | Savepoint,
            only: set[tuple[str, str]] | None = None) -> Iterator[dict[str, Any]]:
    """Every entry that differs: operator, state, change, the entry's key columns, its value before and after, and under
    TTL when it now expires."""
    with ExitStack() as stack:
        pair = _Pair(left, right, stack)
        for uid, state in pair.states():
            if only is None or (uid, state) in only:
                for piece in _pieces(pair, uid, state, None):
                    yield from _rows(piece, uid, state)
        for uid, state in sorted(pair.operator_states()):
            if only is None or (uid, state) in only:
                yield from _operator_state_rows(pair, uid, state)
        for uid in pair.keepers():
            if only is None or (uid, IN_FLIGHT) in only:
                yield from _in_flight_rows(*pair.in_flight(uid), uid)


class _Pair:
    """Both sides, open and grouped alike."""

    def __init__(self, left: Any, right: Any, stack: ExitStack) -> None:
        self.stored = _opened(left, stack)
        self.right = stack.enter_context(as_open(_opened(right, stack)))
        self.left = self._regrouped(stack.enter_context(as_open(self.stored)), stack)

    def _regrouped(self, left: Savepoint, stack: ExitStack) -> Savepoint:
        wanted = {self.right.max_parallelism(entry.uid) for entry in self.right.metadata.operators
                  if self.right.handles(entry.uid)}
        found = {left.max_parallelism(entry.uid) for entry in left.metadata.operators if left.handles(entry.uid)}
        if not wanted or not found or wanted == found or len(wanted) > 1:
            return left
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-diff-"))) / "left"
        Transform(left.url).set_max_parallelism(wanted.pop()).write(folder)
        return stack.enter_context(open_savepoint(folder))

    def rows(self) -> int:
        return sum(info.rows or 0 for info in (*self.left.states(), *self.right.states()))

    def states(self) -> list[tuple[str, str]]:
        """Every keyed state that either side has."""
        names = [(entry.uid, schema.name) for side in (self.left, self.right) for entry in side.metadata.operators
                 for schema in side.schemas(entry.uid)]
        return list(dict.fromkeys(names))

    def operator_states(self) -> set[tuple[str, str]]:
        return {(entry.uid, part.name) for side in (self.left, self.right) for entry in side.metadata.operators
                for _, parts in side.operator_parts(entry.uid) for part in parts}

    def keepers(self) -> list[str]:
        """The operators that keep records in flight on either side."""
        return sorted({entry.uid for side in (self.left, self.right) for entry in side.metadata.operators
                       if any(subtask.in_flight is not None for subtask in entry.subtasks)})

    def in_flight(self, uid: str) -> tuple[_Records, _Records]:
        """What an operator keeps on either side."""
        before, after = ([(index, channel) for index, held in side.channels(uid) for channel in held]
                         if side.metadata.operator(uid) is not None else [] for side in (self.left, self.right))
        return list(kept_records(before)), list(kept_records(after))


@dataclass(frozen=True)
class _Piece:
    """Rows of one span of key groups that differ."""

    layout: StateLayout
    added: pa.RecordBatch | None
    removed: pa.RecordBatch | None
    before: pa.RecordBatch | None
    after: pa.RecordBatch | None
    unchanged: int


def _opened(side: Any, stack: ExitStack) -> Savepoint:
    return side if isinstance(side, Savepoint) else stack.enter_context(open_savepoint(side))


def _schema(side: Savepoint, uid: str, state: str) -> StateSchema | None:
    if side.metadata.operator(uid) is None:
        return None
    return next((schema for schema in side.schemas(uid) if schema.name == state), None)


def _state_difference(pair: _Pair, uid: str, state: str, meter: Meter) -> StateDifference:
    added = removed = changed = unchanged = 0
    for piece in _pieces(pair, uid, state, meter):
        added += piece.added.num_rows if piece.added is not None else 0
        removed += piece.removed.num_rows if piece.removed is not None else 0
        changed += piece.before.num_rows if piece.before is not None else 0
        unchanged += piece.unchanged
    return StateDifference(uid, state, added, removed, changed, unchanged, _note(pair, uid, state))


def _note(pair: _Pair, uid: str, state: str) -> str | None:
    old, new = _schema(pair.left, uid, state), _schema(pair.right, uid, state)
    if old is None or new is None:
        return f"only in the {'second' if old is None else 'first'}"
    if str(old) != str(new) or old.kind != new.kind:
        return f"schema changed from {old} to {new}"
    if pair.left.key_type(uid) != pair.right.key_type(uid):
        return f"key type changed from {pair.left.key_type(uid)} to {pair.right.key_type(uid)}"
    return None


def _pieces(pair: _Pair, uid: str, state: str, meter: Meter | None) -> Iterator[_Piece]:
    old, new = _schema(pair.left, uid, state), _schema(pair.right, uid, state)
    for span in _spans(pair, uid, old is not None, new is not None):
        before = _read(pair.left, uid, old, span)
        after = _read(pair.right, uid, new, span)
        if meter is not None:
            meter.advance(sum(batch.num_rows for batch in (before, after) if batch is not None))
        if before is None or after is None:
            layout = StateLayout(new or old, (pair.right if new else pair.left).key_type(uid))  # type: ignore[arg-type]
            yield _Piece(layout, after, before, None, None, 0)
        elif before.equals(after):
            yield _Piece(StateLayout(new, pair.right.key_type(uid)), None, None, None, None, after.num_rows)  # type: ignore[arg-type]
        else:
            assert old is not None
            assert new is not None
            yield _compared(before, after, StateLayout(old, pair.left.key_type(uid)),
                            StateLayout(new, pair.right.key_type(uid)))


def _spans(pair: _Pair, uid: str, on_left: bool, on_right: bool) -> Iterator[KeyGroupRange]:
    """Neighbouring key groups with about SPAN_ROWS rows together."""
    sides = [side for side, there in ((pair.left, on_left), (pair.right, on_right)) if there]
    counts = [np.asarray(side.key_groups(uid).column("rows").to_numpy(zero_copy_only=False), np.float64)
              for side in sides]
    total = np.zeros(max(len(count) for count in counts))
    for count in counts:
        total[:len(count)] += np.nan_to_num(count)
    first, rows = 0, 0.0
    for group in range(len(total)):
        if group > first and rows + total[group] > SPAN_ROWS:
            yield KeyGroupRange(first, group - 1)
            first, rows = group, 0.0
        rows += float(total[group])
    yield KeyGroupRange(first, len(total) - 1)


def _read(side: Savepoint, uid: str, schema: StateSchema | None, span: KeyGroupRange) -> pa.RecordBatch | None:
    if schema is None:
        return None
    batches = list(scan_state(side, uid, schema.name, [span]).batches)
    return concat(batches) if batches else None


def _compared(before: pa.RecordBatch, after: pa.RecordBatch, old: StateLayout, new: StateLayout) -> _Piece:
    old_rows, new_rows = _matched(before, after, old, new)
    gone, come = np.ones(before.num_rows, np.bool_), np.ones(after.num_rows, np.bool_)
    gone[old_rows], come[new_rows] = False, False
    left, right = _taken(before, old_rows), _taken(after, new_rows)
    differs = ~_same_values(left, right, old, new)
    rows = pa.array(np.flatnonzero(differs))
    return _Piece(new, _some(after, np.flatnonzero(come)), _some(before, np.flatnonzero(gone)),
                  left.take(rows) if len(rows) else None, right.take(rows) if len(rows) else None,
                  int(len(differs) - differs.sum()))


def _matched(before: pa.RecordBatch, after: pa.RecordBatch, old: StateLayout, new: StateLayout) -> tuple[Any, Any]:
    """The rows on either side that name the same entries. Key groups that hold the same keys need no join."""
    old_keys, new_keys = _keys(before, old), _keys(after, new)
    if old_keys.equals(new_keys):
        return np.arange(before.num_rows), np.arange(after.num_rows)
    old_groups, new_groups = before.column(KEY_GROUP).to_numpy(), after.column(KEY_GROUP).to_numpy()
    left, right = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for group in np.intersect1d(old_groups, new_groups).tolist():
        old_begin, old_end = np.searchsorted(old_groups, [group, group + 1]).tolist()
        new_begin, new_end = np.searchsorted(new_groups, [group, group + 1]).tolist()
        ours, theirs = old_keys.slice(old_begin, old_end - old_begin), new_keys.slice(new_begin, new_end - new_begin)
        if ours.equals(theirs):
            left.append(np.arange(old_begin, old_end))
            right.append(np.arange(new_begin, new_end))
            continue
        position = pc.index_in(theirs, ours)
        left.append(pc.drop_null(position).to_numpy().astype(np.int64) + old_begin)
        right.append(np.flatnonzero(position.is_valid().to_numpy(zero_copy_only=False)) + new_begin)
    return np.concatenate(left), np.concatenate(right)


def _taken(batch: pa.RecordBatch, rows: Any) -> pa.RecordBatch:
    return batch if len(rows) == batch.num_rows else batch.take(pa.array(rows))


def _keys(batch: pa.RecordBatch, layout: StateLayout) -> pa.BinaryArray:
    columns = {name: batch.column(name) for name in batch.schema.names}
    return layout.encode_keys(columns, batch.num_rows, batch.column(KEY_GROUP).to_numpy(), 0)


def _some(batch: pa.RecordBatch, rows: Any) -> pa.RecordBatch | None:
    return batch.take(pa.array(rows)) if len(rows) else None


def _same_values(left: pa.RecordBatch, right: pa.RecordBatch, old: StateLayout, new: StateLayout) -> Any:
    same = np.ones(left.num_rows, np.bool_)
    if set(old.value_columns) != set(new.value_columns):
        return ~same
    for name in new.value_columns:
        same &= _same_column(left.column(name), right.column(name), name, old, new)
    return same


def _same_column(left: pa.Array, right: pa.Array, name: str, old: StateLayout, new: StateLayout) -> Any:
    if name == EXPIRES_AT:
        return _equal(left.cast(pa.int64()), right.cast(pa.int64()))
    if old.schema.value_type != new.schema.value_type:
        try:
            left = retyped(left, old.schema.value_type, new.schema.value_type, new.schema.name)
        except IncompatibleState:
            return np.zeros(len(left), np.bool_)
    kind = new.schema.value_type  # stored bytes are compared: they are equal where the values are, NaN included
    return _equal(kind.encode_array(left), kind.encode_array(right))


def _equal(left: pa.Array, right: pa.Array) -> Any:
    equal = pc.fill_null(pc.equal(left, right), False).to_numpy(zero_copy_only=False)
    both_null = pc.and_(pc.is_null(left), pc.is_null(right)).to_numpy(zero_copy_only=False)
    return equal | both_null


def _rows(piece: _Piece, uid: str, state: str) -> Iterator[dict[str, Any]]:
    for change, before, after in (("removed", piece.removed, None), ("added", None, piece.added),
                                  ("changed", piece.before, piece.after)):
        batch = after if after is not None else before
        if batch is None:
            continue
        keys = _plain_columns(batch, piece.layout, piece.layout.key_columns)
        old = _values(before, piece.layout, batch.num_rows)
        new = _values(after, piece.layout, batch.num_rows)
        expiry = {} if after is None else _plain_columns(after, piece.layout, [EXPIRES_AT])
        for row in range(batch.num_rows):
            yield {"operator": uid, "state": state, "change": change,
                   **{name: column[row] for name, column in keys.items()}, _BEFORE: old[row], _AFTER: new[row],
                   **{name: column[row] for name, column in expiry.items()}}


def _plain_columns(batch: pa.RecordBatch, layout: StateLayout, names: list[str]) -> dict[str, list[Any]]:
    kinds = column_kinds(layout)
    return {name: plain_column(batch.column(name), kinds.get(name)) for name in names if name in batch.schema.names}


def _values(batch: pa.RecordBatch | None, layout: StateLayout, rows: int) -> list[Any]:
    if batch is None:
        return [None] * rows
    names = [name for name in ("value", "map_value") if name in batch.schema.names]
    return plain_column(batch.column(names[0]), layout.schema.value_type) if names else [True] * rows


def _operator_differences(pair: _Pair) -> Iterator[str]:
    old = {entry.uid: entry for entry in pair.stored.metadata.operators}
    new = {entry.uid: entry for entry in pair.right.metadata.operators}
    for uid in dict.fromkeys([*old, *new]):
        if uid not in new or uid not in old:
            yield f"operator {uid!r} is only in the {'first' if uid in old else 'second'}"
            continue
        for what in ("parallelism", "max_parallelism"):
            left, right = getattr(old[uid], what), getattr(new[uid], what)
            if left != right:
                yield f"operator {uid!r} has {what.replace('_', ' ')} {left} in the first and {right} in the second"


def _operator_state_differences(pair: _Pair) -> list[StateDifference]:
    found = []
    for uid, state in sorted(pair.operator_states()):
        kinds = [row["change"] for row in _operator_state_rows(pair, uid, state)]
        added, removed, changed = (kinds.count(change) for change in ("added", "removed", "changed"))
        rows = _operator_rows(pair.right, uid, state)
        there = len({json.dumps(row[MAP_KEY]) for row in rows}) if rows and MAP_KEY in rows[0] else len(rows)
        unchanged = there - added - changed
        found.append(StateDifference(uid, state, added, removed, changed, unchanged))
    return found


def _operator_state_rows(pair: _Pair, uid: str, state: str) -> Iterator[dict[str, Any]]:
    """Elements that only one side holds, whichever subtask holds them; entries of broadcast maps by their map key."""
    left, right = _operator_rows(pair.left, uid, state), _operator_rows(pair.right, uid, state)
    head = {"operator": uid, "state": state}
    if MAP_KEY in ({*left[0]} if left else {*right[0]} if right else set()):
        old, new = ({json.dumps(row[MAP_KEY]): row for row in rows} for rows in (left, right))
        for key in dict.fromkeys([*old, *new]):
            before, after = old.get(key), new.get(key)
            if before != after:
                yield {**head, "change": "added" if before is None else "removed" if after is None else "changed",
                       MAP_KEY: json.loads(key), _BEFORE: before and before[MAP_VALUE], _AFTER: after and after[MAP_VALUE]}
        return
    before_counts, after_counts = (Counter(json.dumps(row[VALUE]) for row in rows) for rows in (left, right))
    for element in (before_counts - after_counts).elements():
        yield {**head, "change": "removed", _BEFORE: json.loads(element), _AFTER: None}
    for element in (after_counts - before_counts).elements():
        yield {**head, "change": "added", _BEFORE: None, _AFTER: json.loads(element)}


def _in_flight_difference(pair: _Pair, uid: str) -> StateDifference:
    before, after = pair.in_flight(uid)
    kinds = [row["change"] for row in _in_flight_rows(before, after, uid)]
    removed = kinds.count("removed")
    return StateDifference(uid, IN_FLIGHT, kinds.count("added"), removed, 0, len(before) - removed)


def _in_flight_rows(before: _Records, after: _Records, uid: str) -> Iterator[dict[str, Any]]:
    """Records that only one side has, whichever subtask keeps them."""
    old, new = (Counter(identity for identity, _ in records) for records in (before, after))
    for change, records, left in (("removed", before, old - new), ("added", after, new - old)):
        for identity, shown in records:
            if left[identity] > 0:
                left[identity] -= 1
                value = shown.pop(VALUE)
                yield {"operator": uid, "state": IN_FLIGHT, "change": change, **shown,
                       _BEFORE: value if change == "removed" else None, _AFTER: value if change == "added" else None}


def _operator_rows(side: Savepoint, uid: str, state: str) -> list[dict[str, Any]]:
    if side.metadata.operator(uid) is None or not side.is_operator_state(uid, state):
        return []
    batches = side.read(uid, state).read_all().combine_chunks().to_batches()
    return [row for batch in batches for row in plain_rows(batch, side.column_types(uid, state))]

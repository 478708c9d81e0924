"""Builds a new savepoint from an old one: rename, drop, add, map, retype, regroup, strip; the old one is only read.

    Transform("sp").rename_operator("count", "counts").drop_state("counts", "old").write("sp2")
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.storage.metadata import CheckpointMetadata, OperatorEntry
from savepoint.columns import StateLayout
from savepoint.convert import Meter, Progress, savepoint_head
from savepoint.destination import Destination
from savepoint.format import EXPIRES_AT, KEY, KEY_GROUP, MAP_VALUE, OPEN_FORMAT, VALUE
from savepoint.inflight import Channel, ends_of, renamed_edge
from savepoint.opened import Savepoint, open_savepoint
from savepoint.retype import retyped
from savepoint.rewrite import OperatorRows, Rows, StateRows, as_open, deal_out, write_operator
from savepoint.scan import scan_state
from savepoint.sorting import SortedRows
from statebackend.clock import Clock, SystemClock
from statebackend.errors import InvalidRequest
from statebackend.keygroups import KeyGroupRange
from statebackend.schema import StateSchema, state_id_of
from statebackend.types import StateType, state_type

BatchFunction = Callable[[pa.RecordBatch], pa.RecordBatch]
EntryFunction = Callable[[dict[str, Any]], dict[str, Any] | None]


@dataclass
class _Change:
    """What happens to one keyed state."""

    new_name: str | None = None
    dropped: bool = False
    value_type: StateType | None = None
    function: BatchFunction | None = None
    keys_change: bool = False
    entry_function: EntryFunction | None = None


@dataclass
class _OperatorChange:
    new_uid: str | None = None
    dropped: bool = False
    key_type: StateType | None = None
    states: dict[str, _Change] = field(default_factory=dict)


class Transform:
    """Collects changes; `write` carries them out. Uids and state names are those of the source."""

    def __init__(self, source: str | os.PathLike[str]) -> None:
        self._source = source
        self._changes: dict[str, _OperatorChange] = {}
        self._parallelism: int | dict[str, int] | None = None
        self._max_parallelism: int | None = None
        self._strip: Clock | None = None
        self._added: list[Callable[[Destination, int], OperatorEntry]] = []
        self._job_name: str | None = None

    def rename_operator(self, uid: str, new_uid: str) -> Transform:
        self._operator(uid).new_uid = new_uid
        return self

    def drop_operator(self, uid: str) -> Transform:
        self._operator(uid).dropped = True
        return self

    def rename_state(self, uid: str, state: str, new_name: str) -> Transform:
        self._state(uid, state).new_name = new_name
        return self

    def drop_state(self, uid: str, state: str) -> Transform:
        self._state(uid, state).dropped = True
        return self

    def change_type(self, uid: str, state: str, value_type: Any) -> Transform:
        """Give a state another value type; values follow by migration, or by a cast that loses nothing."""
        self._state(uid, state).value_type = state_type(value_type)
        return self

    def map_batches(self, uid: str, state: str, function: BatchFunction, *, value_type: Any = None,
                    key_type: Any = None) -> Transform:
        """Replace a state's rows, a batch at a time: the function takes and returns batches of the state's columns.

        Rows may be dropped, added or get other keys, but no two may name the same entry; `key_group` is computed anew.
        `value_type` and `key_type` tell what the function returns where that differs.
        """
        change = self._state(uid, state)
        change.function, change.keys_change = function, True
        change.value_type = change.value_type if value_type is None else state_type(value_type)
        if key_type is not None:
            self._operator(uid).key_type = state_type(key_type)
        return self

    def map_entries(self, uid: str, state: str, function: EntryFunction, *, value_type: Any = None) -> Transform:
        """Replace a state's entries, one at a time: the function takes a dict of the columns and returns one, or None
        to drop the entry. Two entries that come out under one name are refused."""
        change = self._state(uid, state)
        change.entry_function, change.keys_change = function, True
        change.value_type = change.value_type if value_type is None else state_type(value_type)
        return self

    def set_parallelism(self, parallelism: int | dict[str, int]) -> Transform:
        """Cut the files for another parallelism: of all operators, or by uid."""
        self._parallelism = parallelism
        return self

    def set_max_parallelism(self, max_parallelism: int) -> Transform:
        """Group all keys anew for another number of key groups."""
        self._max_parallelism = max_parallelism
        return self

    def strip_expired(self, clock: Clock | None = None) -> Transform:
        """Leave out entries whose time to live had run out by the clock (processing-time TTL only)."""
        self._strip = clock or SystemClock()
        return self

    def write(self, destination: str | os.PathLike[str], *, progress: Progress | None = None) -> CheckpointMetadata:
        """Carry the changes out, into a folder that must not exist."""
        with ExitStack() as stack:
            stored = stack.enter_context(open_savepoint(self._source))
            self._require_known(stored)
            place = stack.enter_context(Destination(destination))
            opened = stack.enter_context(as_open(stored))
            meter = Meter(progress, sum(info.rows or 0 for info in opened.states()))
            entries = tuple(write_operator(place, self._plan(opened, entry, stack), meter)
                            for entry in opened.metadata.operators if not self._of(entry.uid).dropped)
            metadata = replace(savepoint_head(stored.metadata, OPEN_FORMAT), operators=entries,
                               unaligned=any(subtask.in_flight for entry in entries for subtask in entry.subtasks))
            place.publish(metadata)
            return metadata

    # -- inner workings

    def _operator(self, uid: str) -> _OperatorChange:
        return self._changes.setdefault(uid, _OperatorChange())

    def _state(self, uid: str, state: str) -> _Change:
        return self._operator(uid).states.setdefault(state, _Change())

    def _of(self, uid: str) -> _OperatorChange:
        return self._changes.get(uid, _OperatorChange())

    def _require_known(self, opened: Savepoint) -> None:
        """Names that are not there are refused before anything is written."""
        for uid, change in self._changes.items():
            opened.entry(uid)
            known = {info.name for info in opened.states(uid)}
            for state in change.states:
                if state not in known:
                    opened.schema(uid, state)
        kept = [self._of(entry.uid).new_uid or entry.uid for entry in opened.metadata.operators
                if not self._of(entry.uid).dropped]
        twice = next((uid for uid in kept if kept.count(uid) > 1), None)
        if twice is not None:
            raise InvalidRequest("two operators would have the same uid", operator=twice)

    def _plan(self, opened: Savepoint, entry: OperatorEntry, stack: ExitStack) -> OperatorRows:
        change = self._of(entry.uid)
        parallelism = self._new_parallelism(entry)
        max_parallelism = self._max_parallelism or entry.max_parallelism
        parts = [(index, tuple(self._operator_part(part, change) for part in held
                               if not change.states.get(part.name, _Change()).dropped))
                 for index, held in opened.operator_parts(entry.uid)]
        key_type = opened.key_type(entry.uid) if opened.handles(entry.uid) else None
        states = tuple(self._state_rows(opened, entry, schema, key_type, max_parallelism, stack)
                       for schema in self._kept_schemas(opened, entry.uid)) if key_type is not None else ()
        return OperatorRows(change.new_uid or entry.uid, entry.name, parallelism, max_parallelism,
                            change.key_type or key_type, states, deal_out(parts, entry.parallelism, parallelism),
                            tuple(self._channels(opened, entry.uid)))

    def _channels(self, opened: Savepoint, uid: str) -> Iterator[Channel]:
        """An operator's records in flight, without those to or from operators that go."""
        uids = {entry.uid for entry in opened.metadata.operators}
        renames = {old: change.new_uid for old, change in self._changes.items() if change.new_uid}
        for channel in (channel for _, held in opened.channels(uid) for channel in held):
            sender, receiver = ends_of(channel.edge, uids)
            if self._of(sender).dropped or self._of(receiver).dropped:
                continue
            if self._of(receiver).key_type is not None:
                raise InvalidRequest("records in flight have keys of the old type", operator=receiver, edge=channel.edge,
                                     hint="transform a savepoint that the job took itself, which has no records in flight")
            target = opened.metadata.operator(receiver)
            if target is not None and self._recuts(target):
                channel = channel.recut(target.parallelism, self._new_parallelism(target))
            yield replace(channel, edge=renamed_edge(channel.edge, uids, renames))

    def _recuts(self, entry: OperatorEntry) -> bool:
        return (self._new_parallelism(entry), self._max_parallelism or entry.max_parallelism) != \
            (entry.parallelism, entry.max_parallelism)

    def _new_parallelism(self, entry: OperatorEntry) -> int:
        if isinstance(self._parallelism, dict):
            return self._parallelism.get(entry.uid, entry.parallelism)
        return entry.parallelism if self._parallelism is None else self._parallelism

    def _operator_part(self, part: Any, change: _OperatorChange) -> Any:
        wanted = change.states.get(part.name, _Change())
        if wanted.value_type is not None or wanted.function is not None or wanted.entry_function is not None:
            raise InvalidRequest("only keyed state can be mapped or retyped", state=part.name)
        return replace(part, name=wanted.new_name or part.name)

    def _kept_schemas(self, opened: Savepoint, uid: str) -> list[StateSchema]:
        changes = self._of(uid).states
        kept = [schema for schema in opened.schemas(uid) if not changes.get(schema.name, _Change()).dropped]
        names = [changes.get(schema.name, _Change()).new_name or schema.name for schema in kept]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise InvalidRequest("two states would have the same name", operator=uid, state=twice)
        return kept

    def _state_rows(self, opened: Savepoint, entry: OperatorEntry, schema: StateSchema, key_type: StateType,
                    max_parallelism: int, stack: ExitStack) -> StateRows:
        uid, change = entry.uid, self._of(entry.uid).states.get(schema.name, _Change())
        new_schema = replace(schema, name=change.new_name or schema.name,
                             value_type=change.value_type or schema.value_type)
        new_layout = StateLayout(new_schema, self._of(uid).key_type or key_type)

        def rows(key_groups: KeyGroupRange | None) -> Iterator[pa.RecordBatch]:
            ranges = None if key_groups is None else [key_groups]
            for batch in scan_state(opened, uid, schema.name, ranges).batches:
                yield from self._changed(batch, schema, StateLayout(schema, key_type), new_layout, change)

        regroup = max_parallelism != opened.max_parallelism(uid) or change.keys_change or self._of(uid).key_type
        if not regroup:
            return StateRows(new_schema, rows, _counter(opened, uid, schema.name))
        return sorted_state(new_layout, rows(None), max_parallelism, stack)

    def _changed(self, batch: pa.RecordBatch, schema: StateSchema, layout: StateLayout, new_layout: StateLayout,
                 change: _Change) -> Iterator[pa.RecordBatch]:
        if self._strip is not None and EXPIRES_AT in batch.schema.names and _counts_wall_clock(schema):
            now = pa.scalar(self._strip.now_ms(), pa.int64()).cast(batch.column(EXPIRES_AT).type)
            alive = pc.fill_null(pc.greater(batch.column(EXPIRES_AT), now), True)
            batch = batch.filter(alive)
        if change.function is not None:
            batch = _returned(change.function(batch), new_layout)
        elif change.entry_function is not None:
            batch = _mapped(batch, change.entry_function, layout, new_layout)
        elif change.value_type is not None:
            name = MAP_VALUE if MAP_VALUE in batch.schema.names else VALUE
            position = batch.schema.get_field_index(name)
            column = retyped(batch.column(name), schema.value_type, change.value_type, schema.name)
            batch = batch.set_column(position, new_layout.arrow_schema.field(name), column)
        if batch.num_rows:
            yield batch


def _counts_wall_clock(schema: StateSchema) -> bool:
    return schema.ttl is not None and schema.ttl.time.value == "processing"


def sorted_state(layout: StateLayout, batches: Iterable[pa.RecordBatch], max_parallelism: int,
                 stack: ExitStack) -> StateRows:
    """A state whose rows are grouped and sorted anew; they are drawn when first asked for."""
    collected = stack.enter_context(SortedRows(layout, max_parallelism, unique=False))
    source: Iterator[pa.RecordBatch] = iter(batches)

    def fill() -> None:
        for batch in source:
            collected.add(batch)

    def rows(key_groups: KeyGroupRange) -> Iterator[pa.RecordBatch]:
        fill()
        yield from collected.read(key_groups)

    def expected(key_groups: KeyGroupRange) -> int:
        fill()
        return collected.count(key_groups)

    return StateRows(layout.schema, rows, expected)


def _counter(opened: Savepoint, uid: str, state: str) -> Callable[[KeyGroupRange], int]:
    counts = opened.key_groups(uid, state).column("rows").to_numpy(zero_copy_only=False)

    def count(key_groups: KeyGroupRange) -> int:
        return int(np.nan_to_num(counts[key_groups.first:key_groups.last + 1]).sum())

    return count


def _returned(batch: Any, layout: StateLayout) -> pa.RecordBatch:
    """What a user's batch function returned, in the layout's columns and types."""
    if isinstance(batch, pa.Table):
        batch = batch.combine_chunks()
        batch = batch.to_batches()[0] if batch.num_rows else pa.RecordBatch.from_pylist([], layout.arrow_schema)
    if not isinstance(batch, pa.RecordBatch):
        raise InvalidRequest("a batch function must return a pyarrow RecordBatch or Table",
                             state=layout.schema.name, found=type(batch).__name__)
    arrays = []
    for wanted in layout.arrow_schema:
        if wanted.name == KEY_GROUP:
            arrays.append(pa.array(np.zeros(batch.num_rows, np.int32)))
            continue
        if wanted.name not in batch.schema.names:
            raise InvalidRequest(f"a batch function returned no column {wanted.name!r}", state=layout.schema.name,
                                 hint=f"columns are {', '.join(layout.arrow_schema.names[1:])}")
        arrays.append(_typed(batch.column(wanted.name), wanted, layout))
    return pa.RecordBatch.from_arrays(arrays, schema=layout.arrow_schema)


def _typed(column: pa.Array, wanted: pa.Field, layout: StateLayout) -> pa.Array:
    if wanted.name == KEY:
        return layout.key_type.conform(column)
    return column if column.type == wanted.type else column.cast(wanted.type)


def _mapped(batch: pa.RecordBatch, function: EntryFunction, layout: StateLayout,
            new_layout: StateLayout) -> pa.RecordBatch:
    """Entries as dicts of Python values through a user's function, and back."""
    kinds, new_kinds = column_kinds(layout), column_kinds(new_layout)
    names = [name for name in batch.schema.names if name != KEY_GROUP]
    columns = [kinds[name].from_arrow(batch.column(name)) if name in kinds else batch.column(name).to_pylist()
               for name in names]
    results = [_called(function, dict(zip(names, values)), new_layout) for values in zip(*columns)]
    kept = [result for result in results if result is not None]
    arrays: list[pa.Array] = [pa.array(np.zeros(len(kept), np.int32))]
    for wanted in new_layout.arrow_schema:
        if wanted.name == KEY_GROUP:
            continue
        values = [entry.get(wanted.name) for entry in kept]
        if wanted.name in new_kinds:
            kind = new_kinds[wanted.name]
            for value, entry in zip(values, kept):
                if value is not None or wanted.name != "namespace":
                    _check(kind, value, wanted.name, entry, new_layout)
            arrays.append(kind.to_arrow(values))
        else:
            arrays.append(pa.array(values, wanted.type))
    return pa.RecordBatch.from_arrays(arrays, schema=new_layout.arrow_schema)


def _called(function: EntryFunction, entry: dict[str, Any], layout: StateLayout) -> dict[str, Any] | None:
    """What a user's function makes of an entry; where it fails, or returns something else, the entry is named."""
    key = entry[KEY]
    try:
        result = function(entry)
    except Exception as error:
        raise InvalidRequest(f"the function that maps entries raised {type(error).__name__}: {error}",
                             state=layout.schema.name, key=key) from error
    if result is not None and not isinstance(result, dict):
        raise InvalidRequest("the function that maps entries must return a dict, or None to drop the entry",
                             state=layout.schema.name, key=key, found=type(result).__name__)
    unknown = sorted(set(result or ()) - set(layout.arrow_schema.names))
    if unknown:
        raise InvalidRequest(f"the function that maps entries returned a column {unknown[0]!r}", state=layout.schema.name,
                             key=key, hint=f"columns are {', '.join(layout.arrow_schema.names[1:])}")
    return result


def _check(kind: StateType, value: Any, column: str, entry: dict[str, Any], layout: StateLayout) -> None:
    try:
        kind.check(value)
    except InvalidRequest as error:
        error.context.update(state=layout.schema.name, column=column, key=entry.get(KEY))
        raise


def column_kinds(layout: StateLayout) -> dict[str, StateType]:
    """The state type of each column that has one."""
    kinds = {KEY: layout.key_type, VALUE: layout.schema.value_type, MAP_VALUE: layout.schema.value_type}
    if layout.schema.namespace_type is not None:
        kinds["namespace"] = layout.schema.namespace_type
    if layout.schema.map_key_type is not None:
        kinds["map_key"] = layout.schema.map_key_type
    return kinds


def schema_of(descriptor: Any, taken: Iterable[int] = (), namespace_type: Any = None) -> StateSchema:
    """The schema under which a descriptor's state is stored."""
    return StateSchema.of(descriptor, state_id_of(descriptor.name, set(taken)), namespace_type)


__all__ = ["Rows", "Transform", "column_kinds", "schema_of", "sorted_state"]

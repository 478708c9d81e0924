"""`aggregate`: running count, sum, min, max, avg, last and collect per key, with no user code and no object per row.

The numeric accumulators of a key (counts, sums, extremes of numbers) are one record, so that a key costs one look-up
and one write a batch, however many aggregates there are. Other extremes, last values and collections are states of
their own. Rows may be combined before the shuffle: the accumulators of a batch then travel in place of its rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_integration.context import TaskContext
from spark_integration.keys import key_array
from spark_integration.operators import Columns, Operator
from spark_integration.rows import OutputBuilder
from statebackend.descriptors import ListStateDescriptor, ValueStateDescriptor
from statebackend.errors import InvalidRequest
from statebackend.ttl import TtlConfig
from statebackend.types import StateType

FUNCTIONS = ("count", "sum", "min", "max", "avg", "last", "collect")
RECORD_STATE = "aggregates"


@dataclass(frozen=True)
class Aggregate:
    """One aggregate: the column of the result, the function, and the input column (None for a count of rows)."""

    name: str
    function: str
    column: str | None
    input_type: pa.DataType | None

    @property
    def in_record(self) -> bool:
        """Whether its accumulator is one of the fixed-width numbers in the common record."""
        return self.function in ("count", "avg") or (
            self.function in ("sum", "min", "max") and self.input_type is not None and _is_number(self.input_type))

    @property
    def value_type(self) -> pa.DataType:
        """The type of the running value."""
        if self.function == "count":
            return pa.int64()
        if self.function == "avg":
            return pa.float64()
        assert self.input_type is not None
        if self.function == "sum":
            return _sum_type(self.input_type)
        if self.function in ("min", "max") and _is_number(self.input_type):
            return _widened(self.input_type)
        return self.input_type

    @property
    def rows_name(self) -> str:
        """The accumulator that counts the non-null inputs: what tells an empty sum from one of zero."""
        return f"{self.name}__rows"

    def record_fields(self) -> list[pa.Field]:
        fields = [pa.field(self.name, self.value_type, False)]
        return fields if self.function == "count" else [*fields, pa.field(self.rows_name, pa.int64(), False)]


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _widened(kind: pa.DataType) -> pa.DataType:
    return pa.int64() if pa.types.is_integer(kind) else pa.float64()


def _sum_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_decimal(kind):
        return pa.decimal128(38, kind.scale)
    return _widened(kind)


def parse_aggregates(aggs: Mapping[str, Any], types: Mapping[str, pa.DataType]) -> tuple[Aggregate, ...]:
    """`{"n": "count", "total": ("sum", "value")}` as aggregates; refused where a name or type can't be right."""
    if not aggs:
        raise InvalidRequest("aggregate needs at least one aggregate", hint='write {"n": "count"}')
    return tuple(_parse(name, spec, types) for name, spec in aggs.items())


def _parse(name: str, spec: Any, types: Mapping[str, pa.DataType]) -> Aggregate:
    function, column = (spec, None) if isinstance(spec, str) else tuple(spec)
    if function not in FUNCTIONS:
        raise InvalidRequest(f"there is no aggregate {function!r}", aggregate=name,
                             hint=f"use one of {', '.join(FUNCTIONS)}")
    if column is None and function != "count":
        raise InvalidRequest(f"{function} needs a column", aggregate=name, hint=f'write ("{function}", "column")')
    if column is not None and column not in types:
        raise InvalidRequest(f"there is no column {column!r} to aggregate", aggregate=name, found=list(types))
    kind = types[column] if column is not None else None
    if kind is not None and function in ("sum", "avg") and not (_is_number(kind) or pa.types.is_decimal(kind)):
        raise InvalidRequest(f"{function} needs numbers", aggregate=name, column=column, found=str(kind))
    return Aggregate(name, function, column, kind)


_GROUPED = {"sum": "sum", "avg": "sum", "min": "min", "max": "max", "last": "last"}


def partials(rows: pa.Table, keys: Sequence[str], aggregates: Sequence[Aggregate]) -> pa.Table:
    """One row per key: key columns, then each aggregate's value over these rows and the count of its inputs."""
    calls: list[Any] = []
    names: list[str] = []
    ordered = any(one.function in ("last", "collect") for one in aggregates)
    for one in aggregates:
        if one.function == "count":
            calls.append(([], "count_all") if one.column is None else (one.column, "count"))
            names.append(one.name)
            continue
        calls.append((one.column, "list" if one.function == "collect" else _GROUPED[one.function]))
        calls.append((one.column, "count"))
        names += [one.name, one.rows_name]
    wide = _widen_inputs(rows, aggregates)
    grouped = wide.group_by(list(keys), use_threads=not ordered).aggregate(calls)
    columns = grouped.columns
    at = grouped.column_names.index(keys[0])
    if at == 0:
        return pa.table(columns, names=[*keys, *names])
    return pa.table([*columns[-len(keys):], *columns[:-len(keys)]], names=[*keys, *names])


def _widen_inputs(rows: pa.Table, aggregates: Sequence[Aggregate]) -> pa.Table:
    """Inputs in the type of their sum, so that narrow integers can't overflow while a batch is added up."""
    for one in aggregates:
        if one.function in ("sum", "avg") and one.column is not None:
            index = rows.schema.get_field_index(one.column)
            kind = rows.schema.field(index).type
            wanted = _sum_type(kind)
            if kind != wanted:
                rows = rows.set_column(index, one.column, rows.column(index).cast(wanted))
    return rows


def merged_partials(rows: pa.Table, keys: Sequence[str], aggregates: Sequence[Aggregate]) -> pa.Table:
    """Partial rows of the same keys, made before the shuffle, as one row per key."""
    calls: list[Any] = []
    names: list[str] = []
    for one in aggregates:
        if one.function == "count":
            calls.append((one.name, "sum"))
            names.append(one.name)
        else:
            calls += [(one.name, _GROUPED[one.function]), (one.rows_name, "sum")]
            names += [one.name, one.rows_name]
    grouped = rows.group_by(list(keys), use_threads=True).aggregate(calls)
    columns = grouped.columns
    if grouped.column_names[0] == keys[0]:
        return pa.table(columns, names=[*keys, *names])
    return pa.table([*columns[-len(keys):], *columns[:-len(keys)]], names=[*keys, *names])


class AggregateOperator(Operator):
    """Folds batches into the state and emits the new values of the keys that changed."""

    def __init__(self, columns: Columns, aggregates: Sequence[Aggregate], key_type: StateType,
                 ttl: TtlConfig | None, combined: bool) -> None:
        self._columns, self._aggregates, self._key_type = columns, tuple(aggregates), key_type
        self._ttl, self._combined = ttl, combined
        self._record = [one for one in aggregates if one.in_record]
        self.uses_timers = False

    def open(self, context: TaskContext, output: OutputBuilder) -> None:
        self._output = output
        self._states: dict[str, Any] = {}
        fields = [field for one in self._record for field in one.record_fields()]
        if fields:
            self._record_state: Any = context.state(
                ValueStateDescriptor(RECORD_STATE, pa.struct(fields), ttl=self._ttl))
        for one in self._aggregates:
            if not one.in_record:
                descriptor = ListStateDescriptor if one.function == "collect" else ValueStateDescriptor
                self._states[one.name] = context.state(descriptor(one.name, one.value_type, ttl=self._ttl))

    def process(self, rows: pa.Table) -> list[pa.RecordBatch]:
        keys = self._columns.keys
        grouped = merged_partials(rows, keys, self._aggregates) if self._combined else \
            partials(rows, keys, self._aggregates)
        grouped = grouped.combine_chunks()
        key_values = key_array(grouped, keys, self._key_type)
        results = self._fold_record(key_values, grouped) if self._record else {}
        for one in self._aggregates:
            if not one.in_record:
                results[one.name] = self._fold_state(one, key_values, grouped)
        columns = {name: grouped.column(name) for name in keys}
        columns.update({one.name: results[one.name] for one in self._aggregates})
        return self._output.add_table(pa.table(columns))

    def _fold_record(self, keys: pa.Array, grouped: pa.Table) -> dict[str, pa.Array]:
        old = self._record_state.value_many(keys)
        stored = {field.name: column for field, column in zip(old.type, old.flatten())}
        new: dict[str, np.ndarray[Any, Any]] = {}
        for one in self._record:
            new.update(_folded(one, stored, grouped))
        kind = old.type
        arrays = [pa.array(new[field.name], field.type) for field in kind]
        self._record_state.update_many(keys, pa.StructArray.from_arrays(arrays, fields=list(kind)))
        return {one.name: _result(one, new) for one in self._record}

    def _fold_state(self, one: Aggregate, keys: pa.Array, grouped: pa.Table) -> pa.Array:
        state, column = self._states[one.name], _whole(grouped.column(one.name))
        if one.function == "collect":
            lists = column.filter(pc.is_valid(column))
            owners = keys.take(pc.list_parent_indices(column))
            values = lists.flatten()
            kept = pc.is_valid(values)
            state.add_many(owners.filter(kept), values.filter(kept))
            return state.get_many(keys)
        column = column.cast(one.value_type)
        old = state.value_many(keys)
        new = _combined(one.function, old, column)
        state.update_many(keys, new)
        return new


def _folded(one: Aggregate, stored: Mapping[str, pa.Array], grouped: pa.Table) -> dict[str, np.ndarray[Any, Any]]:
    """The new accumulators of one aggregate: what was stored (null where nothing was), and this batch's part."""
    old, fresh = _numbers(stored[one.name]), _numbers(grouped.column(one.name), one.value_type)
    if one.function == "count":
        return {one.name: old + fresh}
    old_rows, fresh_rows = _numbers(stored[one.rows_name]), _numbers(grouped.column(one.rows_name))
    if one.function in ("sum", "avg"):
        total = old + fresh
        if total.dtype.kind == "i":
            _require_no_overflow(one, old, fresh, total)
        return {one.name: total, one.rows_name: old_rows + fresh_rows}
    better = np.minimum(old, fresh) if one.function == "min" else np.maximum(old, fresh)
    value = np.where(old_rows == 0, fresh, np.where(fresh_rows == 0, old, better))
    return {one.name: value, one.rows_name: old_rows + fresh_rows}


def _require_no_overflow(one: Aggregate, old: Any, fresh: Any, total: Any) -> None:
    if bool((((old ^ total) & (fresh ^ total)) < 0).any()):
        raise InvalidRequest(f"the sum of {one.column!r} no longer fits 64 bits", aggregate=one.name,
                             hint="cast the column to double or decimal")


def _result(one: Aggregate, new: Mapping[str, np.ndarray[Any, Any]]) -> pa.Array:
    if one.function == "count":
        return pa.array(new[one.name])
    rows = new[one.rows_name]
    empty = rows == 0
    values = new[one.name]
    if one.function == "avg":
        values = values / np.where(empty, 1, rows)
    return pa.array(values, mask=empty) if empty.any() else pa.array(values)


def _combined(function: str, old: pa.Array, new: pa.Array) -> pa.Array:
    if function == "last":
        return pc.coalesce(new, old)
    if function == "sum":
        both = pc.add(old, new).cast(old.type)
        return pc.coalesce(both, new, old)
    merge = pc.min_element_wise if function == "min" else pc.max_element_wise
    if not pa.types.is_string(old.type) and not pa.types.is_binary(old.type):
        return merge(old, new, skip_nulls=True)
    smaller = pc.less(old, new) if function == "min" else pc.greater(old, new)
    return pc.if_else(pc.is_null(old), new, pc.if_else(pc.is_null(new), old, pc.if_else(smaller, old, new)))


def _numbers(column: Any, kind: pa.DataType | None = None) -> np.ndarray[Any, Any]:
    array = _whole(column)
    if kind is not None and array.type != kind:
        array = array.cast(kind)
    if array.null_count:
        array = array.fill_null(0)
    return array.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def _whole(column: Any) -> pa.Array:
    if isinstance(column, pa.ChunkedArray):
        return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return column


class CombineTask:
    """What runs before the shuffle: the rows of an input partition as one partial row per key."""

    def __init__(self, keys: Sequence[str], aggregates: Sequence[Aggregate], schema: pa.Schema, rows: int) -> None:
        self._keys, self._aggregates, self._schema, self._rows = tuple(keys), tuple(aggregates), schema, rows

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        held: list[pa.RecordBatch] = []
        for batch in batches:
            held.append(batch)
            if sum(one.num_rows for one in held) >= self._rows:
                yield from self._combined(held)
                held = []
        if held:
            yield from self._combined(held)

    def _combined(self, held: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        table = partials(pa.Table.from_batches(held), self._keys, self._aggregates)
        columns = [table.column(field.name).cast(field.type) for field in self._schema]
        yield from pa.table(columns, schema=self._schema).combine_chunks().to_batches()

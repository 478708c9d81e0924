"""Builds a savepoint from data: the state of a job that has not run yet, from Arrow, pandas, polars or Parquet.

    with SavepointWriter("sp", job_name="clicks", max_parallelism=128) as writer:
        writer.keyed("count", ValueStateDescriptor("total", int), table, key_type=str, key="user", value="clicks")
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa

from checkpoint.storage.layout import JobId
from checkpoint.storage.metadata import CheckpointMetadata
from savepoint.columns import StateLayout
from savepoint.convert import Meter, Progress
from savepoint.destination import Destination
from savepoint.format import (
    EXPIRES_AT,
    EXPIRES_TYPE,
    KEY,
    KEY_GROUP,
    LIST_INDEX,
    MAP_KEY,
    MAP_VALUE,
    NAMESPACE,
    TIMER_TYPE,
    TIMESTAMP,
    VALUE,
)
from savepoint.frames import batches_of
from savepoint.rewrite import OperatorRows, StateRows, write_operator
from savepoint.sorting import SortedRows
from savepoint.transform import schema_of
from statebackend.clock import Clock, SystemClock
from statebackend.descriptors import ListStateDescriptor, MapStateDescriptor, StateDescriptor, StateKind
from statebackend.errors import Closed, InvalidRequest
from statebackend.keygroups import default_max_parallelism, require_max_parallelism
from statebackend.operator_state import Distribution, OperatorStatePart
from statebackend.schema import StateSchema, state_id_of
from statebackend.timers import TIMER_STATES
from statebackend.ttl import TimeDomain, expires_at
from statebackend.types import StateType, state_type


@dataclass
class _Operator:
    key_type: StateType | None = None
    states: dict[str, tuple[StateSchema, SortedRows]] = field(default_factory=dict)
    parts: dict[int, list[OperatorStatePart]] = field(default_factory=dict)


class SavepointWriter:
    """Collects state and writes it all in `close`, or when its `with` block ends without an error.

    Rows may come in any order; keys are grouped here. Of rows with the same key the last one wins; list elements keep
    the order they come in. Memory is bounded: what does not fit is sorted on disk.
    """

    def __init__(self, destination: str | os.PathLike[str], *, job_name: str = "bootstrap", parallelism: int = 1,
                 max_parallelism: int | None = None, clock: Clock | None = None,
                 progress: Progress | None = None, properties: Mapping[str, Any] | None = None) -> None:
        self._parallelism = parallelism
        self._max_parallelism = require_max_parallelism(max_parallelism or default_max_parallelism(parallelism))
        self._job_name, self._clock, self._progress = job_name, clock or SystemClock(), progress
        self._properties = dict(properties or {})
        self._operators: dict[str, _Operator] = {}
        self._stack = ExitStack()
        self._place: Destination | None = self._stack.enter_context(Destination(destination))

    def keyed(self, uid: str, descriptor: StateDescriptor, data: Any, *, key_type: Any, key: str | Sequence[str] = KEY,
              value: str | Sequence[str] | None = None, map_key: str = MAP_KEY, namespace: str | None = None,
              namespace_type: Any = None) -> SavepointWriter:
        """Add rows of a keyed state.

        data   Arrow table, batch(es) or reader, pandas or polars frame, or the path of Parquet files
        key    the column of keys; several columns make a tuple key
        value  the column of values; several columns, or none where there are others, make a record
        """
        operator = self._operator(uid)
        kind = state_type(key_type)
        kind.require_key()
        if operator.key_type not in (None, kind):
            raise InvalidRequest("an operator has one key type", operator=uid, expected=str(operator.key_type),
                                 found=str(kind))
        operator.key_type = kind
        schema, rows = self._state(uid, operator, descriptor, kind, namespace_type)
        layout = StateLayout(schema, kind)
        for batch in batches_of(data):
            rows.add(self._conformed(batch, layout, key, value, map_key, namespace))
        return self

    def timers(self, uid: str, domain: TimeDomain, data: Any, *, key_type: Any, key: str | Sequence[str] = KEY,
               timestamp: str = TIMESTAMP) -> SavepointWriter:
        """Add timers of keys: `timestamp` is the column of milliseconds since the epoch."""
        operator, kind, name = self._operator(uid), state_type(key_type), TIMER_STATES[domain]
        if name not in operator.states:
            taken = {schema.state_id for schema, _ in operator.states.values()}
            schema = StateSchema(name, state_id_of(name, taken), StateKind.TIMER.value, state_type(bytes))
            rows = self._stack.enter_context(SortedRows(StateLayout(schema, kind), self._max_parallelism))
            operator.states[name] = (schema, rows)
        operator.key_type = operator.key_type or kind
        schema, rows = operator.states[name]
        layout = StateLayout(schema, kind)
        for batch in batches_of(data):
            rows.add(pa.RecordBatch.from_arrays(
                [pa.array(np.zeros(batch.num_rows, np.int32)), batch.column(timestamp).cast(TIMER_TYPE),
                 kind.conform(_picked(batch, key, kind))], schema=layout.arrow_schema))
        return self

    def operator_list(self, uid: str, descriptor: ListStateDescriptor, elements: Iterable[Any], *,
                      union: bool = False) -> SavepointWriter:
        """Add a list or union list state of an operator; elements are dealt out on restore."""
        kind = descriptor.value_type
        encoded = []
        for element in elements:
            kind.check(element)
            encoded.append(kind.encode(element))
        distribution = Distribution.UNION if union else Distribution.SPLIT
        part = OperatorStatePart(descriptor.name, distribution, kind.to_json(), None, elements=tuple(encoded))
        self._operator(uid).parts.setdefault(0, []).append(part)
        return self

    def broadcast(self, uid: str, descriptor: MapStateDescriptor, entries: Mapping[Any, Any]) -> SavepointWriter:
        """Add a broadcast state; every subtask gets all of it."""
        key_type, value_type = descriptor.map_key_type, descriptor.value_type
        for key, value in entries.items():
            key_type.check(key)
            value_type.check(value)
        pairs = sorted((key_type.encode_key(key), value_type.encode(value)) for key, value in entries.items())
        part = OperatorStatePart(descriptor.name, Distribution.BROADCAST, value_type.to_json(), key_type.to_json(),
                                 pairs=tuple(pairs))
        for index in range(self._parallelism):
            self._operator(uid).parts.setdefault(index, []).append(part)
        return self

    def close(self) -> CheckpointMetadata:
        """Write everything and publish."""
        place = self._open_place()
        try:
            meter = Meter(self._progress, sum(rows.rows for operator in self._operators.values()
                                              for _, rows in operator.states.values()))
            entries = tuple(write_operator(place, self._plan(uid, operator), meter)
                            for uid, operator in self._operators.items())
            now = time.time_ns() // 1_000_000
            metadata = CheckpointMetadata(JobId.random(), self._job_name, 1, 0, "savepoint", "open", now, now,
                                          operators=entries, properties=self._properties)
            place.publish(metadata)
            return metadata
        finally:
            self.abort()

    def abort(self) -> None:
        """Give it up; nothing is left. Idempotent, and harmless after `close`."""
        self._place = None
        self._stack.close()

    def __enter__(self) -> SavepointWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: BaseException | None,
                 _trace: TracebackType | None) -> None:
        if kind is None and self._place is not None:
            self.close()
        else:
            self.abort()

    def _open_place(self) -> Destination:
        if self._place is None:
            raise Closed("the savepoint has been written or given up")
        return self._place

    def _operator(self, uid: str) -> _Operator:
        self._open_place()
        if not uid:
            raise InvalidRequest("an operator needs a uid that is not empty")
        return self._operators.setdefault(uid, _Operator())

    def _state(self, uid: str, operator: _Operator, descriptor: StateDescriptor, key_type: StateType,
               namespace_type: Any) -> tuple[StateSchema, SortedRows]:
        if descriptor.name not in operator.states:
            taken = [schema.state_id for schema, _ in operator.states.values()]
            schema = schema_of(descriptor, taken, namespace_type)
            rows = self._stack.enter_context(SortedRows(StateLayout(schema, key_type), self._max_parallelism))
            operator.states[descriptor.name] = (schema, rows)
        schema, rows = operator.states[descriptor.name]
        if schema.value_type != descriptor.value_type or schema.kind != descriptor.kind.value:
            raise InvalidRequest("a state is added twice with different types", operator=uid, state=descriptor.name)
        return schema, rows

    def _plan(self, uid: str, operator: _Operator) -> OperatorRows:
        states = tuple(StateRows(schema, rows.read, rows.count) for schema, rows in operator.states.values())
        return OperatorRows(uid, uid, self._parallelism, self._max_parallelism, operator.key_type, states,
                            sorted((index, tuple(parts)) for index, parts in operator.parts.items()))

    def _conformed(self, batch: pa.RecordBatch, layout: StateLayout, key: str | Sequence[str],
                   value: str | Sequence[str] | None, map_key: str, namespace: str | None) -> pa.RecordBatch:
        rows, schema = batch.num_rows, layout.schema
        used = {*([key] if isinstance(key, str) else key), map_key, namespace}
        columns: dict[str, pa.Array] = {KEY_GROUP: pa.array(np.zeros(rows, np.int32)),
                                        KEY: layout.key_type.conform(_picked(batch, key, layout.key_type))}
        if schema.namespace_type is not None:
            columns[NAMESPACE] = schema.namespace_type.conform(_picked(batch, namespace or NAMESPACE, None)) \
                if namespace or NAMESPACE in batch.schema.names else pa.nulls(rows, schema.namespace_type.arrow_type)
        if schema.kind == StateKind.LIST:
            columns[LIST_INDEX] = pa.array(np.zeros(rows, np.int64))
        if schema.map_key_type is not None:
            columns[MAP_KEY] = schema.map_key_type.conform(_picked(batch, map_key, None))
        name = MAP_VALUE if schema.kind == StateKind.MAP else VALUE
        wanted = value if value is not None else _value_column(batch, name, used, schema.value_type)
        columns[name] = _required(schema.value_type.conform(_picked(batch, wanted, schema.value_type)), schema)
        if schema.ttl is not None:
            columns[EXPIRES_AT] = batch.column(EXPIRES_AT).cast(EXPIRES_TYPE) if EXPIRES_AT in batch.schema.names \
                else pa.array(np.full(rows, expires_at(self._clock.now_ms(), schema.ttl.ttl_ms))).cast(EXPIRES_TYPE)
        return pa.RecordBatch.from_arrays([columns[name] for name in layout.arrow_schema.names],
                                          schema=layout.arrow_schema)


def _value_column(batch: pa.RecordBatch, name: str, used: set[Any], kind: StateType) -> str | list[str]:
    """Which column holds the values when nobody said: the one of that name, the only one left, or a record of all."""
    if name in batch.schema.names:
        return name
    used = {*used, EXPIRES_AT, KEY_GROUP}
    left: list[str] = [column for column in batch.schema.names if column not in used]
    if len(left) == 1 and not pa.types.is_struct(kind.arrow_type):
        return left[0]
    return left


def _picked(batch: pa.RecordBatch, names: str | Sequence[str], kind: StateType | None) -> pa.Array:
    """A column, or several as one struct column."""
    wanted = [names] if isinstance(names, str) else list(names)
    for name in wanted:
        if name not in batch.schema.names:
            raise InvalidRequest(f"the data has no column {name!r}", hint=f"it has {', '.join(batch.schema.names)}")
    if isinstance(names, str):
        return batch.column(names)
    fields = list(kind.arrow_type) if kind is not None and pa.types.is_struct(kind.arrow_type) else []
    if {field.name for field in fields} == set(wanted):
        wanted = [field.name for field in fields]
    labels = [field.name for field in fields] if len(fields) == len(wanted) else wanted
    return pa.StructArray.from_arrays([batch.column(name) for name in wanted], names=labels)


def _required(column: pa.Array, schema: StateSchema) -> pa.Array:
    if column.null_count and not schema.value_type.nullable:
        raise InvalidRequest("the data has null values where the type takes none", state=schema.name,
                             expected=str(schema.value_type), hint="declare the type optional, or leave those rows out")
    return column

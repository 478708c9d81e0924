"""Import of Spark's own state: a stopped query's aggregations, deduplications, transformWithState variables and
applyInPandasWithState groups become a savepoint of ours, with the query's offsets, through `format("statestore")`.

    aggregation, dedup        one value state: `aggregates` (a record) or `seen` (true)
    session windows           a map state `sessions`: a record for each open session of the key, by its start
    transformWithState        a state of the same name and kind for each variable, TTL kept; timers as timers
    applyInPandasWithState    value states `state` (a record) and `timeout` (milliseconds)

Rows come to the driver as Arrow batches, one partition of Spark's state after another, and are sorted on disk: the
driver's JVM needs room for one partition, Python for some batches.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.storage.store import FileStore
from savepoint.bootstrap import SavepointWriter
from spark_integration.arrow_types import arrow_schema
from spark_integration.keys import key_type_of
from spark_integration.query_savepoints import PROPERTY
from spark_integration.spark_log import read_position
from statebackend.descriptors import ListStateDescriptor, MapStateDescriptor, StateDescriptor, ValueStateDescriptor
from statebackend.errors import InvalidRequest, NotFound
from statebackend.ttl import TimeDomain, TtlConfig

_AGGREGATIONS = ("stateStoreSave",)
_SESSIONS = ("sessionWindowStateStoreSaveExec",)
_SESSION_START = "sessionStartTime"
_DEDUPLICATIONS = ("dedupe", "dedupeWithinWatermark")
_TRANSFORMS = ("transformWithStateExec", "transformWithStateInPySparkExec", "transformWithStateInPandasExec")
_GROUPS = ("applyInPandasWithState", "flatMapGroupsWithState")
_TIMERS = {"ProcessingTime": TimeDomain.PROCESSING, "EventTime": TimeDomain.EVENT}
_EXPIRY_FIELDS = ("ttlExpirationMs", "expiration_timestamp_ms")


Columns = dict[str, pa.Array]


@dataclass(frozen=True)
class _Imported:
    """One state as Spark reads it, and how a piece of it becomes our columns `key`, `value`, ...

    What it becomes is told by what becomes of no rows: `describe` makes a descriptor from those columns. Timers have
    a domain instead.
    """

    name: str
    frame: Any
    columns: Callable[[pa.Table], Columns]
    describe: Callable[[Columns], StateDescriptor] | None = None
    domain: TimeDomain | None = None

    def write(self, writer: SavepointWriter, uid: str, counts: Counter[str]) -> None:
        key_type = key_type_of(self.frame.schema["key"].dataType.fields)
        if self.domain is not None:
            writer.timers(uid, self.domain, self._rows(counts), key_type=key_type)
            return
        assert self.describe is not None
        descriptor = self.describe(self.columns(arrow_schema(self.frame.schema).empty_table()))
        value = {"value": "map_value"} if isinstance(descriptor, MapStateDescriptor) else {}
        writer.keyed(uid, descriptor, self._rows(counts), key_type=key_type, **value)

    def _rows(self, counts: Counter[str]) -> Iterator[pa.RecordBatch]:
        counts[self.name] = 0
        for batch in _batches(self.frame):
            columns = self.columns(pa.Table.from_batches([batch]))
            rows = pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
            counts[self.name] += rows.num_rows
            yield rows


def _batches(frame: Any) -> Iterator[pa.RecordBatch]:
    """The Arrow batches of a frame, partition by partition; each travels as the bytes of one row."""
    def packed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        for batch in batches:
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, batch.schema) as stream:
                stream.write_batch(batch)
            yield pa.RecordBatch.from_pydict({"data": [sink.getvalue().to_pybytes()]})

    for row in frame.mapInArrow(packed, "data binary").toLocalIterator():
        yield from pa.ipc.open_stream(bytes(row.data))


def import_state(session: Any, checkpoint_location: str, destination: str, *, uid: str, operator_id: int = 0,
                 max_parallelism: int = 128, ttl: TtlConfig | None = None) -> dict[str, Any]:
    """Write the state of one stateful operator of a stopped query as a savepoint; what was written.

    `ttl` says how states that have a TTL in Spark are declared here (it does not store the duration); their expiry
    times are kept.
    """
    operator = _operator(session, checkpoint_location, operator_id)
    states = list(_states(session, checkpoint_location, operator, operator_id, ttl))
    if not states:
        raise InvalidRequest("this operator holds no state that can be imported", operator=operator["operatorName"])
    with FileStore.at(checkpoint_location) as store:
        position = read_position(store, without_state=True)
    properties = {PROPERTY: position.to_json(), "imported_from": {"operator": operator["operatorName"]}}
    counts: Counter[str] = Counter()
    with SavepointWriter(destination, job_name="imported from Spark", parallelism=1, max_parallelism=max_parallelism,
                         properties=properties) as writer:
        for state in states:
            state.write(writer, uid, counts)
    return {"savepoint": destination, "operator": uid, "states": [state.name for state in states],
            "rows": counts.total(), "batch": position.batch}


def _operator(session: Any, location: str, operator_id: int) -> dict[str, Any]:
    found: list[dict[str, Any]] = [row.asDict() for row in session.read.format("state-metadata").load(location).collect()]
    for row in found:
        if row["operatorId"] == operator_id:
            return row
    raise NotFound(f"the query has no stateful operator {operator_id}", path=location,
                   found=sorted({(row["operatorId"], row["operatorName"]) for row in found}))


def _states(session: Any, location: str, operator: dict[str, Any], operator_id: int,
            ttl: TtlConfig | None) -> Iterator[_Imported]:
    name = operator["operatorName"]

    def load(**options: str) -> Any:
        # A reader keeps its options, so each look needs one of its own.
        return session.read.format("statestore").option("operatorId", operator_id).options(**options).load(location)

    if name in _TRANSFORMS:
        yield from _variables(load, operator, ttl)
    elif name in _AGGREGATIONS:
        yield _value("aggregates", load(), lambda table: _whole(table, "value"))
    elif name in _SESSIONS:
        yield _sessions(load())
    elif name in _DEDUPLICATIONS:
        yield _value("seen", load(), lambda table: pa.array([True] * table.num_rows, pa.bool_()))
    elif name in _GROUPS:
        yield from _groups(load())
    else:
        raise InvalidRequest(f"state of Spark's {name} can't be imported",
                             hint="aggregations, session windows, dropDuplicates, transformWithState and "
                                  "applyInPandasWithState can")


def _sessions(frame: Any) -> _Imported:
    """Spark has a key for each session, made of the grouping columns and the start; here a key has a map of its sessions."""
    from pyspark.sql import functions as F

    keys = [name for name in frame.schema["key"].dataType.fieldNames() if name != _SESSION_START]
    kept = [name for name in frame.schema["value"].dataType.fieldNames() if name not in keys]
    shaped = frame.select(F.struct(*[F.col("key")[name].alias(name) for name in keys]).alias("key"),
                          F.col("key")[_SESSION_START].alias("start"),
                          F.struct(*[F.col("value")[name].alias(name) for name in kept]).alias("value"))
    return _Imported("sessions", shaped, lambda table: {
        "key": _flat_keys(table), "map_key": _whole(table, "start"), "map_value": _whole(table, "value")},
        lambda columns: MapStateDescriptor("sessions", columns["map_key"].type, columns["map_value"].type))


def _groups(frame: Any) -> Iterator[_Imported]:
    names = frame.schema["value"].dataType.fieldNames()

    def state(table: pa.Table) -> pa.Array:
        value = _whole(table, "value")
        return value.field("groupState") if "groupState" in names else value

    def timeout(table: pa.Table) -> Columns:
        at = _whole(table, "value").field("timeoutTimestamp").cast(pa.int64())
        kept = pc.greater(at, 0)
        return {"key": _flat_keys(table).filter(kept), "value": at.filter(kept)}

    yield _value("state", frame, state)
    if "timeoutTimestamp" in names:
        yield _Imported("timeout", frame, timeout, lambda columns: ValueStateDescriptor("timeout", pa.int64()))


def _variables(load: Callable[..., Any], operator: dict[str, Any], ttl: TtlConfig | None) -> Iterator[_Imported]:
    properties = json.loads(operator["operatorProperties"])
    for variable in properties.get("stateVariables", []):
        variable = json.loads(variable) if isinstance(variable, str) else variable
        name, kind = variable["stateName"], str(variable["stateVariableType"])
        if not name.startswith("$"):  # Spark's own indexes and timers
            yield _variable(name, kind, load(stateVarName=name), bool(variable.get("ttlEnabled")), ttl)
    domain = _TIMERS.get(str(properties.get("timeMode")))
    if domain is not None:
        yield _Imported("timers", load(readRegisteredTimers="true"), lambda table: {
            "key": _flat_keys(table), "timestamp": _whole(table, "expiration_timestamp_ms").cast(pa.int64())},
            domain=domain)


def _variable(name: str, kind: str, frame: Any, has_ttl: bool, ttl: TtlConfig | None) -> _Imported:
    column = {"ValueState": "value", "ListState": "list_element", "MapState": "user_map_value"}.get(kind)
    if column is None:
        raise InvalidRequest(f"a {kind} variable can't be imported", state=name)

    def columns(table: pa.Table) -> Columns:
        value, expiry = _split_expiry(_whole(table, column))
        made = {"key": _flat_keys(table)}
        if kind == "MapState":
            made |= {"map_key": _scalar(_whole(table, "user_map_key")), "map_value": _scalar(value)}
        else:
            made |= {"value": _scalar(value)}
        if has_ttl and expiry is not None:
            made["expires_at"] = expiry.cast(pa.int64()).cast(pa.timestamp("ms", "UTC"))
        return made

    def describe(columns: Columns) -> StateDescriptor:
        config = (ttl or TtlConfig("7d")) if "expires_at" in columns else None
        if kind == "MapState":
            return MapStateDescriptor(name, columns["map_key"].type, columns["map_value"].type, ttl=config)
        made = ListStateDescriptor if kind == "ListState" else ValueStateDescriptor
        return made(name, columns["value"].type, ttl=config)

    return _Imported(name, frame, columns, describe)


def _value(name: str, frame: Any, value: Callable[[pa.Table], pa.Array]) -> _Imported:
    return _Imported(name, frame, lambda table: {"key": _flat_keys(table), "value": _scalar(value(table))},
                     lambda columns: ValueStateDescriptor(name, columns["value"].type))


def _flat_keys(table: pa.Table) -> pa.Array:
    """The key struct as a scalar where it has one field, else with the field names of a tuple."""
    keys = _whole(table, "key")
    fields = keys.flatten()
    if len(fields) == 1:
        return fields[0]
    return pa.StructArray.from_arrays(fields, names=[f"f{index}" for index in range(len(fields))])


def _scalar(values: pa.Array) -> pa.Array:
    """A struct of a single field is that field: Spark wraps plain values so."""
    if pa.types.is_struct(values.type) and values.type.num_fields == 1:
        return values.flatten()[0]
    return values


def _split_expiry(values: pa.Array) -> tuple[pa.Array, pa.Array | None]:
    """Spark stores a value with TTL as struct<value, ttlExpirationMs>."""
    names = _names(values)
    expiry = next((name for name in _EXPIRY_FIELDS if name in names), None)
    if expiry is None or len(names) != 2:
        return values, None
    other = next(name for name in names if name != expiry)
    return values.field(other), values.field(expiry)


def _names(values: pa.Array) -> list[str]:
    return [field.name for field in values.type] if pa.types.is_struct(values.type) else []


def _whole(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name).combine_chunks()
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column

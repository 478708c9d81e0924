"""Import of Spark's own state: a stopped query's aggregations, deduplications, transformWithState variables and
applyInPandasWithState groups become a savepoint of ours, with the query's offsets, through `format("statestore")`.

    aggregation, dedup        one value state: `aggregates` (a record) or `seen` (true)
    transformWithState        a state of the same name and kind for each variable, TTL kept; timers as a list state
    applyInPandasWithState    value states `state` (a record) and `timeout` (milliseconds)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.storage.store import FileStore
from savepoint.bootstrap import SavepointWriter
from spark_integration.keys import key_type_of
from spark_integration.query_savepoints import PROPERTY
from spark_integration.spark_log import read_position
from statebackend.descriptors import ListStateDescriptor, MapStateDescriptor, StateDescriptor, ValueStateDescriptor
from statebackend.errors import InvalidRequest, NotFound
from statebackend.ttl import TtlConfig
from statebackend.types import StateType

_AGGREGATIONS = ("stateStoreSave", "sessionWindowStateStoreSaveExec")
_DEDUPLICATIONS = ("dedupe", "dedupeWithinWatermark")
_TRANSFORMS = ("transformWithStateExec", "transformWithStateInPySparkExec", "transformWithStateInPandasExec")
_GROUPS = ("applyInPandasWithState", "flatMapGroupsWithState")
_EXPIRY_FIELDS = ("ttlExpirationMs", "expiration_timestamp_ms")


@dataclass(frozen=True)
class _Imported:
    """One state as read from Spark: what it becomes, and its rows with the columns `key`, `value`, ..."""

    descriptor: StateDescriptor
    rows: pa.Table
    key_type: StateType


def import_state(session: Any, checkpoint_location: str, destination: str, *, uid: str, operator_id: int = 0,
                 max_parallelism: int = 128, ttl: TtlConfig | None = None) -> dict[str, Any]:
    """Write the state of one stateful operator of a stopped query as a savepoint; what was written.

    `ttl` says how states that have a TTL in Spark are declared here (it does not store the duration); their expiry
    times are kept. Rows pass through the driver.
    """
    operator = _operator(session, checkpoint_location, operator_id)
    states = list(_states(session, checkpoint_location, operator, operator_id, ttl))
    if not states:
        raise InvalidRequest("this operator holds no state that can be imported", operator=operator["operatorName"])
    with FileStore.at(checkpoint_location) as store:
        position = read_position(store, without_state=True)
    properties = {PROPERTY: position.to_json(), "imported_from": {"operator": operator["operatorName"]}}
    with SavepointWriter(destination, job_name="imported from Spark", parallelism=1, max_parallelism=max_parallelism,
                         properties=properties) as writer:
        for state in states:
            writer.keyed(uid, state.descriptor, state.rows, key_type=state.key_type,
                         **({"value": "map_value"} if isinstance(state.descriptor, MapStateDescriptor) else {}))
    return {"savepoint": destination, "operator": uid, "states": [state.descriptor.name for state in states],
            "rows": sum(state.rows.num_rows for state in states), "batch": position.batch}


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
        return
    frame = load()
    key_type, table = _key_type(frame), frame.toArrow()
    keys = _flat_keys(table)
    if name in _AGGREGATIONS:
        yield _value("aggregates", keys, _whole(table, "value"), key_type)
    elif name in _DEDUPLICATIONS:
        yield _value("seen", keys, pa.array([True] * len(keys)), key_type)
    elif name in _GROUPS:
        value = _whole(table, "value")
        yield _value("state", keys, value.field("groupState") if "groupState" in _names(value) else value, key_type)
        if "timeoutTimestamp" in _names(value):
            timeouts = value.field("timeoutTimestamp").cast(pa.int64())
            kept = pc.greater(timeouts, 0)
            yield _value("timeout", keys.filter(kept), timeouts.filter(kept), key_type)
    else:
        raise InvalidRequest(f"state of Spark's {name} can't be imported",
                             hint="aggregations, dropDuplicates, transformWithState and applyInPandasWithState can")


def _variables(load: Callable[..., Any], operator: dict[str, Any], ttl: TtlConfig | None) -> Iterator[_Imported]:
    properties = json.loads(operator["operatorProperties"])
    timers = str(properties.get("timeMode", "NoTime")) not in ("NoTime", "None")
    for variable in properties.get("stateVariables", []):
        variable = json.loads(variable) if isinstance(variable, str) else variable
        name, kind = variable["stateName"], str(variable["stateVariableType"])
        if name.startswith("$"):
            continue  # Spark's own indexes and timers
        frame = load(stateVarName=name)
        yield from _variable(name, kind, frame, bool(variable.get("ttlEnabled")), ttl)
    if timers:
        frame = load(readRegisteredTimers="true")
        table = frame.toArrow()
        if table.num_rows:
            yield _Imported(ListStateDescriptor("timers", pa.int64()), pa.table({
                "key": _flat_keys(table), "value": _whole(table, "expiration_timestamp_ms").cast(pa.int64())}),
                _key_type(frame))


def _variable(name: str, kind: str, frame: Any, has_ttl: bool, ttl: TtlConfig | None) -> Iterator[_Imported]:
    key_type, table = _key_type(frame), frame.toArrow()
    if table.num_rows == 0:
        return
    keys = _flat_keys(table)
    column = {"ValueState": "value", "ListState": "list_element", "MapState": "user_map_value"}.get(kind)
    if column is None:
        raise InvalidRequest(f"a {kind} variable can't be imported", state=name)
    value, expiry = _split_expiry(_whole(table, column))
    config = (ttl or TtlConfig("7d")) if has_ttl and expiry is not None else None
    columns = {"key": keys, "value": _scalar(value)}
    descriptor: StateDescriptor
    if kind == "MapState":
        columns = {"key": keys, "map_key": _scalar(_whole(table, "user_map_key")), "map_value": _scalar(value)}
        descriptor = MapStateDescriptor(name, columns["map_key"].type, columns["map_value"].type, ttl=config)
    elif kind == "ListState":
        descriptor = ListStateDescriptor(name, columns["value"].type, ttl=config)
    else:
        descriptor = ValueStateDescriptor(name, columns["value"].type, ttl=config)
    if config is not None and expiry is not None:
        columns["expires_at"] = expiry.cast(pa.int64()).cast(pa.timestamp("ms", "UTC"))
    yield _Imported(descriptor, pa.table(columns), key_type)


def _value(name: str, keys: pa.Array, values: pa.Array, key_type: StateType) -> _Imported:
    values = _scalar(values)
    return _Imported(ValueStateDescriptor(name, values.type), pa.table({"key": keys, "value": values}), key_type)


def _key_type(frame: Any) -> StateType:
    return key_type_of(frame.schema["key"].dataType.fields)


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
    return table.column(name).combine_chunks()

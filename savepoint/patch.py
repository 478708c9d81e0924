"""Patches: what an edit is to change, as JSON, checked against the savepoint's schemas before anything is written.

A patch is a JSON array, or JSON lines, of operations:

    {"op": "set", "operator": "count", "state": "total", "key": "alice", "value": 7}
    {"op": "delete", "operator": "count", "state": "total", "key": "bob"}

`namespace` names one (none: the default), `map_key` one entry of a map, `list_index` one element of a list; without
them the whole map or list is meant. A timer is named by `key` and `timestamp` and has no value; without a timestamp all
timers of the key are deleted. Rows that `diff` prints are operations too: `after` is set, what was removed goes.
Operations on operator state are in operator_edit.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from savepoint.format import IN_FLIGHT
from savepoint.opened import Savepoint
from savepoint.operator_edit import OperatorOperation, operator_operation
from savepoint.values import from_plain
from statebackend.descriptors import StateKind
from statebackend.errors import InvalidRequest
from statebackend.schema import StateSchema
from statebackend.ttl import NEVER

_FIELDS = {"op", "operator", "state", "key", "namespace", "map_key", "list_index", "timestamp", "value", "expires_at"}
_CHANGES = {"added": "set", "changed": "set", "removed": "delete"}


@dataclass(frozen=True)
class Operation:
    """One checked operation with values of the state's types."""

    op: str
    uid: str
    schema: StateSchema
    key: Any
    namespace: Any = None
    map_key: Any = None
    has_map_key: bool = False
    list_index: int | None = None
    timestamp: int | None = None
    value: Any = None
    expires_at: int | None = None

    @property
    def suffix(self) -> Any:
        """What names the entry within its key and namespace: a map key, a list index, a timer's timestamp, or nothing."""
        if self.schema.kind == StateKind.TIMER:
            return self.timestamp
        return self.map_key if self.has_map_key else self.list_index

    @property
    def whole(self) -> bool:
        """Whether it means everything that the key has in its namespace."""
        return self.suffix is None and not self.has_map_key


def read_patch(text: str, *, path: str = "patch") -> list[dict[str, Any]]:
    """The operations in a patch file, not yet checked."""
    stripped = text.strip()
    if not stripped:
        return []
    try:
        items = json.loads(stripped) if stripped[0] == "[" else list(_lines(stripped))
    except ValueError as error:
        raise InvalidRequest(f"the patch is no JSON: {error}", path=path) from error
    if not all(isinstance(item, dict) for item in items):
        raise InvalidRequest("a patch is a list of objects, one an operation", path=path)
    return items


def _lines(text: str) -> Iterator[Any]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error


def checked(savepoint: Savepoint, operations: Iterable[Mapping[str, Any]]) -> list[Operation | OperatorOperation]:
    """The operations with typed values; one that does not fit the schema is refused, naming it."""
    found: list[Operation | OperatorOperation] = []
    for number, raw in enumerate(operations, 1):
        try:
            on_operator = savepoint.metadata.operator(str(raw.get("operator"))) is not None and \
                savepoint.is_operator_state(str(raw.get("operator")), str(raw.get("state")))
            found.append(operator_operation(savepoint, raw) if on_operator else _operation(savepoint, _from_diff(raw)))
        except InvalidRequest as error:
            error.context.setdefault("operation", number)
            raise
    return found


def _from_diff(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    if "change" not in raw:
        return raw
    if raw["change"] not in _CHANGES:
        raise InvalidRequest(f"there is no change {raw['change']!r}", hint=f"use one of {', '.join(_CHANGES)}")
    if raw.get("state") == IN_FLIGHT and "edge" in raw:
        raise InvalidRequest("a patch can't change records in flight", operator=raw.get("operator"), edge=raw["edge"],
                             hint=f"leave the rows of {IN_FLIGHT!r} out")
    kept = {name: value for name, value in raw.items() if name not in ("change", "before", "after", "key_group")}
    op = _CHANGES[raw["change"]]
    return {**kept, "op": op, **({"value": raw.get("after")} if op == "set" else {})}


def _operation(savepoint: Savepoint, raw: Mapping[str, Any]) -> Operation:
    unknown = sorted(set(raw) - _FIELDS)
    if unknown:
        raise InvalidRequest(f"an operation has no field {unknown[0]!r}", hint=f"fields are {', '.join(sorted(_FIELDS))}")
    op = raw.get("op")
    if op not in ("set", "delete"):
        raise InvalidRequest(f"there is no operation {op!r}", hint="op is set or delete")
    for name in ("operator", "state", "key"):
        if name not in raw:
            raise InvalidRequest(f"an operation lacks {name!r}")
    uid, state = str(raw["operator"]), str(raw["state"])
    schema = savepoint.schema(uid, state)
    timer = schema.kind == StateKind.TIMER
    if op == "set" and not timer and "value" not in raw:
        raise InvalidRequest("an operation lacks 'value'")
    return Operation(
        op, uid, schema, from_plain(raw["key"], savepoint.key_type(uid)), _namespace(raw, schema),
        _map_key(raw, schema), "map_key" in raw, _list_index(raw, schema), _timestamp(raw, schema, op),
        True if timer else _value(raw, schema) if op == "set" else None, _expires_at(raw, schema))


def _timestamp(raw: Mapping[str, Any], schema: StateSchema, op: str) -> int | None:
    if schema.kind != StateKind.TIMER:
        if "timestamp" in raw:
            raise InvalidRequest("only a timer has a timestamp", state=schema.name, found=schema.kind)
        return None
    when = raw.get("timestamp", raw.get("value") if op == "set" else None)
    if when is None and op == "delete":
        return None
    if isinstance(when, bool) or not isinstance(when, int) or not -(2**63) <= when < 2**63:
        raise InvalidRequest("a timer needs a timestamp in milliseconds", state=schema.name, found=when)
    return when


def _expires_at(raw: Mapping[str, Any], schema: StateSchema) -> int | None:
    """When an entry is to expire, in milliseconds; null is never, and None here that the patch does not say."""
    if "expires_at" not in raw or (schema.ttl is None and raw["expires_at"] is None):
        return None
    if schema.ttl is None:
        raise InvalidRequest("only a state with TTL has entries that expire", state=schema.name)
    when = NEVER if raw["expires_at"] is None else raw["expires_at"]
    if isinstance(when, str):
        try:
            moment = datetime.fromisoformat(when)
            when = round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)
        except ValueError:
            pass  # refused below
    if isinstance(when, bool) or not isinstance(when, int) or not 0 <= when <= NEVER:
        raise InvalidRequest("expires_at is a time in ISO 8601, milliseconds since 1970, or null for never",
                             state=schema.name, found=raw["expires_at"])
    return when


def _namespace(raw: Mapping[str, Any], schema: StateSchema) -> Any:
    if raw.get("namespace") is None:
        return None
    if schema.namespace_type is None:
        raise InvalidRequest("the state has no namespaces", state=schema.name)
    return from_plain(raw["namespace"], schema.namespace_type)


def _map_key(raw: Mapping[str, Any], schema: StateSchema) -> Any:
    if "map_key" not in raw:
        return None
    if schema.map_key_type is None:
        raise InvalidRequest("only a map state has map keys", state=schema.name, found=schema.kind)
    return from_plain(raw["map_key"], schema.map_key_type)


def _list_index(raw: Mapping[str, Any], schema: StateSchema) -> int | None:
    index = raw.get("list_index")
    if index is None:
        return None
    if schema.kind != StateKind.LIST or isinstance(index, bool) or not isinstance(index, int) or index < 0:
        raise InvalidRequest("list_index is the place of an element of a list state, from 0", state=schema.name,
                             found=index)
    return index


def _value(raw: Mapping[str, Any], schema: StateSchema) -> Any:
    value = raw["value"]
    if schema.kind == StateKind.MAP and "map_key" not in raw:
        assert schema.map_key_type is not None
        pairs = value.items() if isinstance(value, dict) else value
        if not isinstance(value, (dict, list)):
            raise InvalidRequest("a map is set to an object, or to an array of [key, value]", state=schema.name)
        return {from_plain(key, schema.map_key_type): from_plain(item, schema.value_type) for key, item in pairs}
    if schema.kind == StateKind.LIST and raw.get("list_index") is None:
        if not isinstance(value, list):
            raise InvalidRequest("a list is set to an array", state=schema.name)
        return [from_plain(item, schema.value_type) for item in value]
    return from_plain(value, schema.value_type)

"""What a state holds for one key, as a Python value; a key that is not there is answered with near ones."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from savepoint.format import KEY, MAP_KEY, MAP_VALUE, NAMESPACE, TIMESTAMP, VALUE
from savepoint.values import plain_column, to_plain
from statebackend.descriptors import StateKind
from statebackend.errors import NotFound
from statebackend.schema import StateSchema

if TYPE_CHECKING:
    from savepoint.opened import Savepoint

_SAMPLED_KEYS = 20_000


def lookup(savepoint: Savepoint, uid: str, state: str, key: Any, namespace: Any = None) -> Any:
    """A value, a list, a dict, or for timers the timestamps.

    Where the state has namespaces, that of the given one (None is the default namespace).
    """
    schema = savepoint.schema(uid, state)
    table = savepoint.read(uid, state, keys=[key]).read_all()
    if schema.namespace_type is not None:
        spaces = schema.namespace_type.from_arrow(table.column(NAMESPACE))
        table = table.take(pa.array([row for row, space in enumerate(spaces) if space == namespace], pa.int64()))
    if table.num_rows == 0:
        raise NotFound(f"there is no key {to_plain(key)!r}", operator=uid, state=state, path=savepoint.url,
                       hint=near_keys(savepoint, uid, state, key))
    return _shaped(table, schema)


def _shaped(table: pa.Table, schema: StateSchema) -> Any:
    if schema.kind == StateKind.TIMER:
        return table.column(TIMESTAMP).to_pylist()
    if schema.kind == StateKind.MAP:
        assert schema.map_key_type is not None
        keys = schema.map_key_type.from_arrow(table.column(MAP_KEY))
        return dict(zip(keys, schema.value_type.from_arrow(table.column(MAP_VALUE))))
    values = schema.value_type.from_arrow(table.column(VALUE))
    return values if schema.kind == StateKind.LIST else values[0]


def near_keys(savepoint: Savepoint, uid: str, state: str, key: Any) -> str | None:
    """Keys that look like the wanted one, out of the first ones stored."""
    known: list[str] = []
    for batch in savepoint.read(uid, state, columns=[KEY]):
        sample = batch.column(0).slice(0, _SAMPLED_KEYS - len(known))
        known += [str(value) for value in plain_column(sample, savepoint.key_type(uid))]
        if len(known) >= _SAMPLED_KEYS:
            break
    near = get_close_matches(str(to_plain(key)), dict.fromkeys(known), n=3, cutoff=0.6)
    return f"near it are {', '.join(near)}" if near else None

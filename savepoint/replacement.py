"""The rows that patched keys will have, put in the place of those they had, in one sorted pass over a state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from savepoint.columns import StateLayout
from savepoint.format import EXPIRES_AT, KEY, LIST_INDEX, MAP_KEY, MAP_VALUE, NAMESPACE, TIMESTAMP, VALUE
from savepoint.opened import Savepoint
from savepoint.parts import concat
from savepoint.scan import rows_of_keys, scan_handle
from savepoint.sorting import sort_order
from statebackend.backend import KeyedHandle
from statebackend.descriptors import StateKind
from statebackend.keygroups import KeyGroupRange, key_groups_of
from statebackend.schema import StateSchema
from statebackend.ttl import NEVER

Place = tuple[bytes, bytes]
"""Encoded key and namespace: what one value, list or map belongs to."""
Entries = dict[Any, tuple[Any, int | None]]
"""Suffix (map key, list index, timestamp of a timer, or None) to value and expiry."""


@dataclass
class Touched:
    """What the patched keys of one state hold, before and after."""

    schema: StateSchema
    layout: StateLayout
    before: dict[Place, Entries]
    after: dict[Place, Entries]
    keys: dict[bytes, Any]
    namespaces: dict[bytes, Any]


@dataclass(frozen=True)
class Replacement:
    """All rows that the patched keys of a state will have, by key group, and the keys whose old rows go."""

    layout: StateLayout
    rows: pa.RecordBatch
    keys: frozenset[bytes]
    groups: tuple[int, ...]

    @classmethod
    def of(cls, touched: Touched, max_parallelism: int) -> Replacement:
        layout, schema = touched.layout, touched.schema
        keys = list(touched.keys)
        groups = key_groups_of(layout.key_type.to_arrow(list(touched.keys.values())), max_parallelism, layout.key_type)
        group_of = dict(zip(keys, groups.tolist()))
        flat = [(place, suffix, *entry) for place, entries in touched.after.items() for suffix, entry in entries.items()]
        columns: dict[str, pa.Array] = {
            "key_group": pa.array([group_of[place[0]] for place, *_ in flat], pa.int32()),
            KEY: layout.key_type.to_arrow([touched.keys[place[0]] for place, *_ in flat])}
        if schema.namespace_type is not None:
            columns[NAMESPACE] = schema.namespace_type.to_arrow([touched.namespaces[place[1]] for place, *_ in flat])
        if schema.map_key_type is not None:
            columns[MAP_KEY] = schema.map_key_type.to_arrow([suffix for _, suffix, _, _ in flat])
        if schema.kind == StateKind.LIST:
            columns[LIST_INDEX] = pa.array([suffix for _, suffix, _, _ in flat], pa.int64())
        if schema.kind == StateKind.TIMER:
            columns[TIMESTAMP] = pa.array([suffix for _, suffix, _, _ in flat], pa.int64())
        else:
            columns[MAP_VALUE if schema.kind == StateKind.MAP else VALUE] = \
                schema.value_type.to_arrow([value for _, _, value, _ in flat])
        if schema.ttl is not None:
            times = pa.array([None if expiry in (None, NEVER) else expiry for *_, expiry in flat], pa.int64())
            columns[EXPIRES_AT] = times.cast(layout.arrow_schema.field(EXPIRES_AT).type)
        rows = pa.RecordBatch.from_arrays([columns[name] for name in layout.arrow_schema.names],
                                          schema=layout.arrow_schema)
        return cls(layout, rows, frozenset(keys), tuple(sorted(set(group_of.values()))))

    def of_group(self, group: int) -> pa.RecordBatch:
        return self.rows.filter(pa.array(self.rows.column(0).to_numpy() == group))


def with_replacement(opened: Savepoint, handle: KeyedHandle, schema: StateSchema,
                      replacement: Replacement) -> Iterator[pa.RecordBatch]:
    """The rows of a state with those of the patched keys exchanged; key groups between pass as they are."""
    names, first = replacement.layout.arrow_schema.names, handle.key_groups.first
    for group in (group for group in replacement.groups if group in handle.key_groups):
        if group > first:
            yield from scan_handle(opened, handle, schema, KeyGroupRange(first, group - 1), names)
        yield from _exchanged(opened, handle, schema, replacement, group)
        first = group + 1
    if first <= handle.key_groups.last:
        yield from scan_handle(opened, handle, schema, KeyGroupRange(first, handle.key_groups.last), names)


def _exchanged(opened: Savepoint, handle: KeyedHandle, schema: StateSchema, replacement: Replacement,
               group: int) -> Iterator[pa.RecordBatch]:
    layout, kept = replacement.layout, [replacement.of_group(group)]
    for batch in scan_handle(opened, handle, schema, KeyGroupRange(group, group), layout.arrow_schema.names):
        stays = np.ones(batch.num_rows, np.bool_)
        stays[rows_of_keys(batch, layout.key_type, set(replacement.keys))] = False
        kept.append(batch.filter(pa.array(stays)))
    rows = concat(kept)
    if rows.num_rows:
        yield rows.take(pa.array(entry_order(rows, layout)))


def entry_order(batch: pa.RecordBatch, layout: StateLayout) -> Any:
    """The order of rows by entry; list elements go by their index."""
    if layout.schema.kind != StateKind.LIST:
        return sort_order(batch, layout)[0]
    by_index = np.argsort(batch.column(LIST_INDEX).to_numpy(), kind="stable")
    order, _ = sort_order(batch.take(pa.array(by_index)), layout)
    return by_index[order]

"""Rows of one keyed state of any snapshot, sorted by key group and key: open parts directly, others through entries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from savepoint.columns import StateLayout
from savepoint.format import KEY, KEY_GROUP, OPEN_FORMAT
from savepoint.reader import parts_of, read_parts
from savepoint.uniting import migration, same_layout
from savepoint.writer import state_ids
from statebackend.backend import KeyedHandle
from statebackend.errors import InvalidRequest
from statebackend.formats import merged_entries
from statebackend.keygroups import KeyGroupRange
from statebackend.schema import StateSchema
from statebackend.types import StateType, state_type_from_json

if TYPE_CHECKING:
    import pyarrow.dataset as ds

    from savepoint.opened import Savepoint


@dataclass(frozen=True)
class Scan:
    """Batches of a state and their schema; one pass."""

    arrow_schema: pa.Schema
    batches: Iterator[pa.RecordBatch]


def scan_state(savepoint: Savepoint, uid: str, state: str, ranges: Sequence[KeyGroupRange] | None = None,
               columns: Sequence[str] | None = None, where: ds.Expression | None = None,
               keys: Sequence[Any] | None = None) -> Scan:
    """The rows of a state in these ranges of key groups, in order; all of them if `ranges` is None.

    With `keys`, row groups that can't hold them are left out; `keep_keys` filters what remains.
    """
    schema = savepoint.schema(uid, state)
    layout = StateLayout(schema, savepoint.key_type(uid))
    names = layout.arrow_schema.names
    require_columns(columns, names, state)
    spans = ranges if ranges is not None else [KeyGroupRange(0, savepoint.max_parallelism(uid) - 1)]
    chosen = list(columns) if columns is not None else names
    arrow_schema = pa.schema([layout.arrow_schema.field(name) for name in chosen])
    wanted = None if keys is None else [layout.key_type.encode_key(key) for key in keys]
    return Scan(arrow_schema, _batches(savepoint, uid, schema, spans, chosen, where, wanted))


def require_columns(wanted: Sequence[str] | None, there: Sequence[str], state: str) -> None:
    """Refuse a column that a state does not have."""
    unknown = [name for name in wanted or () if name not in there]
    if unknown:
        raise InvalidRequest(f"the state has no column {unknown[0]!r}", state=state,
                             hint=f"its columns are {', '.join(there)}")


def _batches(savepoint: Savepoint, uid: str, schema: StateSchema, spans: Sequence[KeyGroupRange], columns: Sequence[str],
             where: ds.Expression | None, keys: Sequence[bytes] | None) -> Iterator[pa.RecordBatch]:
    for span in spans:
        for handle in savepoint.handles(uid):
            cut = handle.key_groups.intersect(span)
            if cut is not None and any(stored.name == schema.name for stored in handle.schemas):
                yield from scan_handle(savepoint, handle, schema, cut, columns, where, keys)


def scan_handle(savepoint: Savepoint, handle: KeyedHandle, schema: StateSchema, key_groups: KeyGroupRange,
                columns: Sequence[str], where: ds.Expression | None = None,
                keys: Sequence[bytes] | None = None) -> Iterator[pa.RecordBatch]:
    """The rows of one state of one handle, which may have it under another schema that can be migrated to this one."""
    layout = StateLayout(schema, state_type_from_json(handle.key_type))
    stored = next(stored for stored in handle.schemas if stored.name == schema.name)
    if handle.format == OPEN_FORMAT and same_layout(stored, schema):
        yield from read_parts(parts_of(handle, schema.name), layout, savepoint.open_file, key_groups, columns, where,
                              keys)
        return
    migrate = migration(stored, schema, savepoint.metadata.completed_timestamp)
    decoder = layout.decoder()
    for entries in merged_entries(handle, savepoint.source, key_groups):
        rows = np.flatnonzero(state_ids(entries.column(0)) == stored.state_id)
        if len(rows) == 0:
            continue
        entries = entries if len(rows) == len(entries) else entries.take(pa.array(rows))
        batch = decoder.decode(entries if migrate is None else migrate(entries))
        if where is not None:
            batch = pa.Table.from_batches([batch]).filter(where).combine_chunks()
            batch = batch.to_batches()[0] if batch.num_rows else layout.arrow_schema.empty_table().to_batches()[:1]
        if len(batch):
            yield batch.select(list(columns))


def keep_keys(batches: Iterator[pa.RecordBatch], key_type: StateType, keys: Sequence[Any],
              columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
    """The rows of these keys, out of rows of their key groups."""
    wanted = {key_type.encode_key(key) for key in keys}
    for batch in batches:
        rows = rows_of_keys(batch, key_type, wanted)
        if len(rows):
            kept = batch.take(pa.array(rows))
            yield kept.select(list(columns)) if columns is not None else kept


def rows_of_keys(batch: pa.RecordBatch, key_type: StateType, wanted: set[bytes]) -> np.ndarray[Any, Any]:
    """The rows that hold one of these encoded keys. Few keys are found by binary search, many by one pass."""
    if len(wanted) <= 16 and KEY_GROUP in batch.schema.names:
        groups = batch.column(KEY_GROUP).to_numpy()
        if groups[0] == groups[-1] and "timestamp" not in batch.schema.names:
            return _search(batch.column(KEY), key_type, wanted)
    import pyarrow.compute as pc

    encoded = key_type.encode_key_array(batch.column(KEY))
    hits = pc.is_in(encoded, pa.array(sorted(wanted), pa.binary()))
    return np.flatnonzero(hits.to_numpy(zero_copy_only=False))


def _search(keys: pa.Array, key_type: StateType, wanted: set[bytes]) -> np.ndarray[Any, Any]:
    found = []
    for key in sorted(wanted):
        begin = _bound(keys, key_type, key, 0, after=False)
        end = _bound(keys, key_type, key, begin, after=True)
        found.append(np.arange(begin, end))
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def _bound(keys: pa.Array, key_type: StateType, key: bytes, low: int, *, after: bool) -> int:
    high = len(keys)
    while low < high:
        middle = (low + high) // 2
        here = key_type.encode_key(key_type.from_arrow(keys.slice(middle, 1))[0])
        if here < key or (after and here == key):
            low = middle + 1
        else:
            high = middle
    return low

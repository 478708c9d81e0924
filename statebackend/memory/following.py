"""Bringing tables in memory forward along the chain of their own snapshots, by the files that others added.

Only states of one entry per key (value, reducing, aggregating) are brought forward; where lists, maps, timers or
states that nobody registered have changed, the caller restores anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from statebackend.backend import KeyedHandle
from statebackend.entries import OP_DELETE_PREFIX, OP_PUT, read_entries
from statebackend.files import SnapshotSource, StateFile
from statebackend.memory.restore import EntryDecoder, _by_state
from statebackend.memory.table_state import TableState

if TYPE_CHECKING:
    from statebackend.memory.keyed import MemoryKeyed

FLAT_KINDS = frozenset({"value", "reducing", "aggregating"})


def can_build_on(keyed: MemoryKeyed, handle: KeyedHandle, ids: dict[str, int]) -> bool:
    """Whether the files of a handle are entries of exactly this range, under this backend's state ids."""
    return handle.format == "entries" and handle.key_groups == keyed.key_groups and \
        all(ids.get(schema.name) == schema.state_id for schema in handle.schemas)


def missing_files(held: tuple[StateFile, ...], wanted: tuple[StateFile, ...]) -> tuple[StateFile, ...] | None:
    """The files that lead from one chain to the other; None where they do not.

    A file is one attempt's alone, and the state after it is the same on whatever base it lies: holding it, only those
    behind it are missing, also where the chain has been put on a new base meanwhile.
    """
    if not held:
        return wanted
    return wanted[wanted.index(held[-1]) + 1:] if held[-1] in wanted else None


def read_changes(keyed: MemoryKeyed, files: tuple[StateFile, ...], source: SnapshotSource,
                 tables: dict[int, TableState]) -> list[tuple[TableState, pa.RecordBatch]] | None:
    """The new entries by table, oldest first; None if some belong to a table that can't be brought forward."""
    changes: list[tuple[TableState, pa.RecordBatch]] = []
    for file in files:
        for batch in read_entries(source, file, keyed.key_groups):
            for state_id, part in _by_state(batch):
                table = tables.get(state_id)
                if table is None or bool((part.column(2).to_numpy() == OP_DELETE_PREFIX).any()):
                    return None
                changes.append((table, part))
    return changes


def apply_changes(keyed: MemoryKeyed, changes: list[tuple[TableState, pa.RecordBatch]]) -> None:
    """Write the entries as they are; what is then active is no change of this backend's own."""
    for table, batch in changes:
        decoder = EntryDecoder(table.schema, table.schema, keyed.form, table.namespace_form, 0)
        ops = batch.column(2).to_numpy()
        removed = batch.filter(pa.array(ops != OP_PUT))
        put = batch.filter(pa.array(ops == OP_PUT)) if removed.num_rows else batch
        for slot in _slots(decoder, removed):
            table.remove(slot)
        table.delta.update(zip(_slots(decoder, put), decoder.stored(put.column(1))))
        if table.expiry is not None:
            table.expiry.due = -(2**63)


def _slots(decoder: EntryDecoder, batch: pa.RecordBatch) -> Any:
    if batch.num_rows == 0:
        return ()
    keys, namespaces, _ = decoder.columns(batch)
    return decoder.slots(keys, namespaces)


def has_changes(tables: Any) -> bool:
    return any(bool(table.delta) or bool(table.delta.removed) or
               (table.columns is not None and bool(table.columns.dirty.any())) for table in tables)



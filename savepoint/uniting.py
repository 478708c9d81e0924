"""Parts of a snapshot that hold one state under different schemas, brought to the schema they are restored under.

Subtasks that register a state only when they need it leave such parts: some migrated, some as they were stored before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce

import numpy as np
import pyarrow as pa

from savepoint.writer import state_ids
from statebackend.backend import KeyedHandle
from statebackend.files import SnapshotSource
from statebackend.formats import merged_entries
from statebackend.schema import StateSchema, column_migrator_of, is_identity, united_schema
from statebackend.ttl import NO_TIME_YET, TimeDomain

Migration = Callable[[pa.RecordBatch], pa.RecordBatch]


def united(schemas: Iterable[StateSchema]) -> StateSchema:
    """The schema that all parts of a state can be migrated to, as a restore has it; `IncompatibleState` where none is."""
    return reduce(united_schema, schemas)


def same_layout(stored: StateSchema, wanted: StateSchema) -> bool:
    """Whether rows under one schema are rows under the other."""
    return stored == wanted or (is_identity(stored, wanted) and
                                (stored.namespace_type is None) == (wanted.namespace_type is None))


def migration(stored: StateSchema, wanted: StateSchema, taken_ms: int) -> Migration | None:
    """What turns entries of one schema into entries of the other; None where they are already.

    Where TTL was switched on, entries live on from when the snapshot was taken, so that every reading gives the same rows.
    """
    if is_identity(stored, wanted):
        return None
    event_time = wanted.ttl is not None and wanted.ttl.time is TimeDomain.EVENT
    convert = column_migrator_of(stored, wanted, NO_TIME_YET if event_time else taken_ms)

    def migrate(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays([batch.column(0), convert(batch.column(1)), batch.column(2)], schema=batch.schema)

    return migrate


def united_entries(handle: KeyedHandle, source: SnapshotSource, schemas: Sequence[StateSchema],
                   taken_ms: int) -> Iterator[pa.RecordBatch]:
    """The final entries of a handle, migrated to these schemas of its states; sorted by entry key within each state."""
    migrations = {stored.state_id: migration(stored, wanted, taken_ms) for stored, wanted in zip(handle.schemas, schemas)}
    entries = merged_entries(handle, source)
    return _migrated(entries, migrations) if any(migrations.values()) else entries


def _migrated(entries: Iterator[pa.RecordBatch], migrations: dict[int, Migration | None]) -> Iterator[pa.RecordBatch]:
    for batch in entries:
        ids = state_ids(batch.column(0))
        for state_id in np.unique(ids).tolist():
            part = batch.filter(pa.array(ids == state_id))
            migrate = migrations.get(state_id)
            yield part if migrate is None else migrate(part)

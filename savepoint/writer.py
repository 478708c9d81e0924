"""Writes the keyed state of one subtask in the open format: typed rows or entries in, a KeyedHandle out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from savepoint.columns import EntryDecoder, StateLayout
from savepoint.format import BATCH_ROWS, OPEN_FORMAT, OPEN_VERSION, part_path
from savepoint.parts import PartsWriter, StateStatistics, concat
from statebackend.backend import KeyedHandle
from statebackend.descriptors import StateKind
from statebackend.errors import CorruptData, NotFound
from statebackend.files import FileWriter, StateFile
from statebackend.keygroups import KeyGroupRange
from statebackend.schema import StateSchema
from statebackend.types import StateType, state_type_from_json


class OpenHandleWriter:
    """One handle being written: every state of one range of key groups, all parts open at the same time.

    Rows of each state come sorted by key group and key. After an error call `abort`. Not thread-safe.
    """

    def __init__(self, create: Callable[[str], FileWriter], uid: str, key_type: StateType | Mapping[str, Any],
                 max_parallelism: int, key_groups: KeyGroupRange, schemas: Sequence[StateSchema],
                 expected_rows: Mapping[str, int] | None = None) -> None:
        self._uid, self._range, self._max_parallelism = uid, key_groups, max_parallelism
        self._key_type = key_type if isinstance(key_type, StateType) else state_type_from_json(key_type)
        self._key_json = dict(key_type) if isinstance(key_type, Mapping) else key_type.to_json()
        self._schemas = tuple(schemas)
        self._writers: dict[str, PartsWriter] = {}
        self._layouts: dict[str, StateLayout] = {}
        self._decoders: dict[int, tuple[str, EntryDecoder]] = {}
        self._buffer: list[pa.RecordBatch] = []
        self._buffered = 0
        for schema in schemas:
            self._prepare(create, schema, (expected_rows or {}).get(schema.name, 0))

    def _prepare(self, create: Callable[[str], FileWriter], schema: StateSchema, expected_rows: int) -> None:
        layout = StateLayout(schema, self._key_type)
        kind, uid, name = StateKind(schema.kind), self._uid, schema.name

        def path_of(first: int, last: int) -> str:
            return part_path(uid, name, kind, first, last)

        described = {"holdfast.format": OPEN_FORMAT, "holdfast.version": str(OPEN_VERSION), "holdfast.operator": uid,
                     "holdfast.state": name, "holdfast.kind": schema.kind,
                     "holdfast.max_parallelism": str(self._max_parallelism)}
        self._writers[name] = PartsWriter(create, path_of, layout.arrow_schema.with_metadata(described), self._range,
                                          expected_rows, self._key_type)
        self._layouts[name] = layout
        self._decoders[schema.state_id] = (name, layout.decoder())

    def layout(self, state: str) -> StateLayout:
        return self._layouts[state]

    def write(self, state: str, batch: pa.RecordBatch) -> None:
        """Rows of one state, in its layout's columns."""
        if state not in self._writers:
            raise NotFound("rows for a state that has no schema", operator=self._uid, state=state)
        self._writers[state].write(batch)

    def write_entries(self, batches: Iterable[pa.RecordBatch], advance: Callable[[int], None] | None = None) -> None:
        """Final entries of all states, sorted by entry key; `advance` hears how many were taken."""
        for batch in batches:
            self._buffer.append(batch)
            self._buffered += batch.num_rows
            if self._buffered >= BATCH_ROWS:
                self._flush_entries()
            if advance is not None:
                advance(batch.num_rows)
        self._flush_entries()

    def _flush_entries(self) -> None:
        if not self._buffer:
            return
        batch = concat(self._buffer)
        self._buffer, self._buffered = [], 0
        ids = state_ids(batch.column(0))
        for state_id in [int(ids[0])] if (ids == ids[0]).all() else np.unique(ids).tolist():
            if state_id not in self._decoders:
                raise CorruptData("a snapshot holds entries of a state that it does not describe", operator=self._uid,
                                  state_id=state_id)
            name, decoder = self._decoders[state_id]
            rows = np.flatnonzero(ids == state_id)
            part = batch if len(rows) == batch.num_rows else batch.take(pa.array(rows))
            self._writers[name].write(decoder.decode(part))

    def finish(self) -> KeyedHandle:
        """Close all parts. The statistics in the handle's `meta` answer every question that needs no data."""
        files: list[StateFile] = []
        statistics: dict[str, StateStatistics] = {}
        for name, writer in self._writers.items():
            written, statistics[name] = writer.finish()
            files += written
        return open_handle(self._key_json, self._max_parallelism, self._range, self._schemas, files, statistics)

    def abort(self) -> None:
        for writer in self._writers.values():
            writer.abort()


def open_handle(key_type: Mapping[str, Any], max_parallelism: int, key_groups: KeyGroupRange,
                schemas: Sequence[StateSchema], files: Sequence[StateFile],
                statistics: Mapping[str, StateStatistics]) -> KeyedHandle:
    longest = max((item.longest_list for item in statistics.values()), default=0)
    meta = {"version": OPEN_VERSION, "next_sequence": longest,
            "states": {name: item.to_json() for name, item in statistics.items()}}
    return KeyedHandle(OPEN_FORMAT, key_groups, max_parallelism, key_type, tuple(schemas), tuple(files), meta,
                       sum(file.size for file in files))


def state_ids(keys: pa.BinaryArray) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """The state id of each entry key."""
    rows = len(keys)
    if rows == 0:
        return np.zeros(0, np.uint16)
    buffers = keys.buffers()
    begin = np.frombuffer(buffers[1], np.int32, rows, keys.offset * 4).astype(np.int64)
    data = np.frombuffer(buffers[2], np.uint8)
    return np.asarray((data[begin + 2].astype(np.uint16) << 8) | data[begin + 3], np.uint16)

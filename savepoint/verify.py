"""Checks a savepoint or checkpoint from end to end: every checksum, reference, schema, count, order and key group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from checkpoint.storage.metadata import OperatorEntry
from savepoint.columns import StateLayout
from savepoint.convert import Meter, Progress
from savepoint.format import KEY, KEY_GROUP, OPEN_FORMAT
from savepoint.inflight import channel_table
from savepoint.opened import Savepoint, open_savepoint
from savepoint.reader import Part, layout_of, parts_of, read_parts, state_meta
from savepoint.scan import scan_handle
from savepoint.values import plain_value
from statebackend.backend import KeyedHandle
from statebackend.errors import HoldfastError
from statebackend.keygroups import KeyGroupRange, key_groups_of
from statebackend.schema import StateSchema


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, and where."""

    kind: str
    message: str
    path: str | None = None
    operator: str | None = None
    state: str | None = None


@dataclass(frozen=True)
class Verification:
    """What was checked, and what is wrong. Truthy where nothing is."""

    url: str
    files: int
    size: int
    rows: int
    problems: tuple[Problem, ...] = ()

    def __bool__(self) -> bool:
        return not self.problems


def verify_savepoint(source: str | os.PathLike[str], *, progress: Progress | None = None,
                     limit: int = 100) -> Verification:
    """Read everything and report up to `limit` problems. What can't be opened at all is raised."""
    with open_savepoint(source) as savepoint:
        files = savepoint.metadata.stored_files()
        meter = Meter(progress, sum(file.size for file in files.values()))
        problems: list[Problem] = []
        damaged = set()
        for problem in _check_files(savepoint, meter):
            damaged.add(problem.path)
            problems.append(problem)
        rows = 0
        for entry in savepoint.metadata.operators:
            for found in _check_operator(savepoint, entry, damaged):
                if isinstance(found, int):
                    rows += found
                elif len(problems) < limit:
                    problems.append(found)
        return Verification(savepoint.url, len(files), sum(file.size for file in files.values()), rows, tuple(problems))


def _check_files(savepoint: Savepoint, meter: Meter) -> Iterator[Problem]:
    store = savepoint.source.store
    for path, file in savepoint.metadata.stored_files().items():
        try:
            store.verify(path, file)
        except HoldfastError as error:
            yield Problem(error.kind, error.message, path)
        meter.advance(file.size)
    for file in savepoint.metadata.files():
        if file.inline is not None:
            try:
                file.inline_verified()
            except HoldfastError as error:
                yield Problem(error.kind, error.message, file.path)


def _check_operator(savepoint: Savepoint, entry: OperatorEntry, damaged: set[str | None]) -> Iterator[Problem | int]:
    yield from _check_ranges(savepoint, entry)
    for handle in savepoint.handles(entry.uid):
        if any(file.path in damaged for file in handle.files):
            continue  # said already; reading it would only repeat it
        for schema in handle.schemas:
            try:
                yield from _check_state(savepoint, entry, handle, schema)
            except HoldfastError as error:
                yield Problem(error.kind, str(error), error.context.get("path"), entry.uid, schema.name)
    if any(file.path in damaged for subtask in entry.subtasks for file in subtask.unkeyed_files()):
        return
    for read in (savepoint.operator_parts, partial(_decode_channels, savepoint)):
        try:
            read(entry.uid)
        except HoldfastError as error:
            yield Problem(error.kind, str(error), error.context.get("path"), entry.uid)


def _decode_channels(savepoint: Savepoint, uid: str) -> None:
    channel_table([(uid, index, channel) for index, held in savepoint.channels(uid) for channel in held])


def _check_ranges(savepoint: Savepoint, entry: OperatorEntry) -> Iterator[Problem]:
    """The handles' key groups must not overlap, and must cover all there are."""
    handles = savepoint.handles(entry.uid)
    expected = 0
    for handle in handles:
        if handle.key_groups.first != expected:
            what = "overlap" if handle.key_groups.first < expected else "have a gap"
            yield Problem("corrupt_data", f"key groups {what} at {handle.key_groups.first}", None, entry.uid)
        if handle.max_parallelism != handles[0].max_parallelism:
            yield Problem("corrupt_data", "subtasks have different max parallelism", None, entry.uid)
        expected = handle.key_groups.last + 1
    if handles and expected != handles[0].max_parallelism:
        yield Problem("corrupt_data", f"key groups end at {expected - 1} of {handles[0].max_parallelism}", None, entry.uid)


def _check_state(savepoint: Savepoint, entry: OperatorEntry, handle: KeyedHandle,
                 schema: StateSchema) -> Iterator[Problem | int]:
    layout = layout_of(handle, schema)
    if handle.format == OPEN_FORMAT:
        for part in parts_of(handle, schema.name):
            yield from _check_part(savepoint, entry, schema, layout, part)
    counts = np.zeros(handle.max_parallelism, np.int64)
    last: bytes | None = None
    for batch in _batches(savepoint, handle, schema, layout):
        groups = batch.column(KEY_GROUP).to_numpy()
        counts += np.bincount(groups, minlength=handle.max_parallelism)[:handle.max_parallelism]
        yield from _check_groups(batch, groups, entry, schema, layout, handle)
        last, problem = _check_order(batch, layout, last)
        if problem is not None:
            yield Problem("corrupt_data", problem, None, entry.uid, schema.name)
    yield int(counts.sum())
    if handle.format == OPEN_FORMAT:
        span = slice(handle.key_groups.first, handle.key_groups.last + 1)
        told = np.asarray(state_meta(handle).get(schema.name, {}).get("counts", ()), np.int64)
        if not np.array_equal(counts[span], told):
            yield Problem("corrupt_data", "rows by key group are not what the metadata says", None, entry.uid,
                          schema.name)


def _batches(savepoint: Savepoint, handle: KeyedHandle, schema: StateSchema,
             layout: StateLayout) -> Iterator[pa.RecordBatch]:
    if handle.format != OPEN_FORMAT:
        return scan_handle(savepoint, handle, schema, handle.key_groups, layout.arrow_schema.names)
    everything = KeyGroupRange(0, handle.max_parallelism - 1)
    return read_parts(parts_of(handle, schema.name), layout, savepoint.open_file, everything)


def _check_part(savepoint: Savepoint, entry: OperatorEntry, schema: StateSchema, layout: StateLayout,
                part: Part) -> Iterator[Problem]:
    with savepoint.open_file(part.file) as stream:
        parquet = pq.ParquetFile(stream)
        found = parquet.schema_arrow
        rows = [parquet.metadata.row_group(index).num_rows for index in range(parquet.metadata.num_row_groups)]
    if found.names != layout.arrow_schema.names:
        yield Problem("corrupt_data", f"columns are {', '.join(found.names)} instead of "
                      f"{', '.join(layout.arrow_schema.names)}", part.file.path, entry.uid, schema.name)
    if rows != [group[2] for group in part.row_groups]:
        yield Problem("corrupt_data", "row groups are not what the metadata says", part.file.path, entry.uid, schema.name)


def _check_groups(batch: pa.RecordBatch, groups: Any, entry: OperatorEntry, schema: StateSchema, layout: StateLayout,
                  handle: KeyedHandle) -> Iterator[Problem]:
    """Every key lies in the key group that its hash gives, and that its subtask owns."""
    wrong = np.flatnonzero(key_groups_of(batch.column(KEY), handle.max_parallelism, layout.key_type) != groups)
    if len(wrong):
        key = plain_value(batch.column(KEY)[int(wrong[0])].as_py(), layout.key_type)
        yield Problem("corrupt_data", f"{len(wrong)} keys are in a wrong key group, such as {key!r} in {groups[wrong[0]]}",
                      None, entry.uid, schema.name)
    if groups.min() < handle.key_groups.first or groups.max() > handle.key_groups.last:
        yield Problem("corrupt_data", f"rows lie outside of key groups {handle.key_groups}", None, entry.uid, schema.name)


def _check_order(batch: pa.RecordBatch, layout: StateLayout, last: bytes | None) -> tuple[bytes, str | None]:
    columns = {name: batch.column(name) for name in batch.schema.names}
    keys = layout.encode_keys(columns, batch.num_rows, batch.column(KEY_GROUP).to_numpy(), 0)
    ascending = pc.all(pc.less(keys.slice(0, len(keys) - 1), keys.slice(1))).as_py() is not False
    first = keys[0].as_py()
    if not ascending or (last is not None and first <= last):
        return keys[len(keys) - 1].as_py(), "rows are not sorted, or an entry is there twice"
    return keys[len(keys) - 1].as_py(), None

"""Sorts rows of one state by key group and key, whatever their order: in memory while they fit, else by spilling.

Rows come in with any key groups; they are grouped for a max parallelism without a Python object per row. Runs that are
sorted by key group go to a temporary folder; reading gathers a span of key groups from all runs and sorts it by key.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from savepoint.columns import StateLayout, matrix_of
from savepoint.format import BATCH_ROWS, KEY, KEY_GROUP, LIST_INDEX, MAP_KEY
from savepoint.parts import concat, differs_from_previous, fixed_row_size, row_sizes
from statebackend.descriptors import StateKind
from statebackend.errors import InvalidRequest
from statebackend.keygroups import KeyGroupRange, key_groups_of

RUN_BYTES = 96 << 20
"""Rows are held in memory up to about so many bytes, then become a run on disk."""
SPAN_BYTES = 48 << 20
"""A span of key groups that is sorted at once has about so many bytes, and at least one key group."""


class SortedRows:
    """Collects rows, then gives them sorted. Close it to remove its temporary files.

    `unique`: of several rows that name the same entry the last one wins; False refuses them. List rows keep the order
    in which they came for one key and are numbered anew.
    """

    def __init__(self, layout: StateLayout, max_parallelism: int, *, unique: bool = True) -> None:
        self._layout, self._max_parallelism, self._unique = layout, max_parallelism, unique
        self._counts = np.zeros(max_parallelism, np.int64)
        self._sizes = np.zeros(max_parallelism, np.float64)
        self._held: list[pa.RecordBatch] = []
        self._held_bytes = 0
        self._runs: list[_Run] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def rows(self) -> int:
        """How many rows were added."""
        return int(self._counts.sum())

    def add(self, batch: pa.RecordBatch) -> None:
        """Add rows in the layout's columns; `key_group` is computed, whether it is there or not."""
        if batch.num_rows == 0:
            return
        groups = key_groups_of(batch.column(KEY), self._max_parallelism, self._layout.key_type)
        order = np.argsort(groups.astype(np.uint16), kind="stable")
        names = [name for name in self._layout.arrow_schema.names if name != KEY_GROUP]
        ordered = batch.select(names).take(pa.array(order))
        groups = groups[order]
        batch = pa.RecordBatch.from_arrays([pa.array(groups.astype(np.int32)), *ordered.columns],
                                           schema=self._layout.arrow_schema)
        counts = np.bincount(groups, minlength=self._max_parallelism)
        sizes = group_sizes(batch, groups, counts)
        self._counts += counts
        self._sizes += sizes
        self._held.append(batch)
        self._held_bytes += int(sizes.sum())
        if self._held_bytes >= RUN_BYTES:
            self._spill()

    def read(self, key_groups: KeyGroupRange) -> Iterator[pa.RecordBatch]:
        """The rows of a range of key groups, sorted; may be called again, and for ranges in any order."""
        for first, last in self._spans(key_groups):
            pieces = [piece for run in self._all_runs() for piece in run.rows(first, last)]
            if pieces:
                table = self._sorted(concat(pieces))
                for begin in range(0, table.num_rows, BATCH_ROWS):
                    yield table.slice(begin, BATCH_ROWS)

    def count(self, key_groups: KeyGroupRange) -> int:
        return int(self._counts[key_groups.first:key_groups.last + 1].sum())

    def close(self) -> None:
        self._held, self._runs = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> SortedRows:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _all_runs(self) -> list[_Run]:
        if not self._held:
            return self._runs
        if self._runs:
            self._spill()
            return self._runs
        return [_Run(self._held)]

    def _spill(self) -> None:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="holdfast-sort-")
        path = Path(self._folder.name) / f"run-{len(self._runs)}.arrow"
        run = concat(self._held)
        run = run.take(pa.array(np.argsort(run.column(0).to_numpy().astype(np.uint16), kind="stable")))
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, run.schema, options=options) as writer:
            for begin in range(0, run.num_rows, BATCH_ROWS):
                writer.write_batch(run.slice(begin, BATCH_ROWS))
        self._runs.append(_Run.stored(path, run.column(0).to_numpy()))
        self._held, self._held_bytes = [], 0

    def _spans(self, key_groups: KeyGroupRange) -> Iterator[tuple[int, int]]:
        first, size = key_groups.first, 0.0
        for group in key_groups:
            if group > first and size + self._sizes[group] > SPAN_BYTES:
                yield first, group - 1
                first, size = group, 0.0
            size += float(self._sizes[group])
        yield first, key_groups.last

    def _sorted(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        order, same = sort_order(batch, self._layout)
        batch = batch.take(pa.array(order))
        if self._layout.schema.kind == StateKind.LIST:
            return _numbered(batch, self._layout)
        if same.any():
            if not self._unique:
                row = int(np.flatnonzero(same)[0])
                raise InvalidRequest("two rows name the same entry", state=self._layout.schema.name,
                                     key=batch.column(KEY)[row].as_py())
            batch = batch.filter(pa.array(~same))  # `same` marks rows that equal the next one: the last wins
        return batch


class _Run:
    """Batches that are each sorted by key group, in memory or in one file."""

    def __init__(self, batches: list[pa.RecordBatch]) -> None:
        self._batches: list[pa.RecordBatch] | None = batches
        self._groups = [batch.column(0).to_numpy() for batch in batches]
        self._path: Path | None = None

    @classmethod
    def stored(cls, path: Path, groups: npt.NDArray[np.int32]) -> _Run:
        run = cls([])
        run._path, run._batches = path, None
        run._groups = [groups[begin:begin + BATCH_ROWS] for begin in range(0, len(groups), BATCH_ROWS)]
        return run

    def rows(self, first: int, last: int) -> Iterator[pa.RecordBatch]:
        wanted = [index for index, groups in enumerate(self._groups) if groups[0] <= last and groups[-1] >= first]
        if not wanted:
            return
        reader = None if self._path is None else pa.ipc.open_file(pa.memory_map(str(self._path)))
        for index in wanted:
            batch = reader.get_batch(index) if reader is not None else self._held(index)
            groups = self._groups[index]
            begin, end = np.searchsorted(groups, first, side="left"), np.searchsorted(groups, last, side="right")
            if end > begin:
                yield batch.slice(int(begin), int(end - begin))

    def _held(self, index: int) -> pa.RecordBatch:
        assert self._batches is not None
        return self._batches[index]


def group_sizes(batch: pa.RecordBatch, groups: npt.NDArray[np.int32],
                counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Bytes of the rows of each key group."""
    width = fixed_row_size(batch.schema)
    if width is not None:
        return np.asarray(counts * float(width), np.float64)
    sizes = sum((row_sizes(column) for column in batch.columns), np.zeros(len(groups), np.int64))
    return np.asarray(np.bincount(groups, weights=sizes, minlength=len(counts)), np.float64)


def sort_order(batch: pa.RecordBatch, layout: StateLayout) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """The stable order of rows by key group and entry, and which sorted rows name the same entry as the next one."""
    groups = batch.column(0).to_numpy()
    width = layout.key_type.fixed_key_width
    if layout.key_columns == [KEY] and layout.schema.namespace_type is None and width is not None and width <= 8:
        numbers = matrix_of(layout.key_type.encode_key_array(batch.column(KEY)))
        if numbers is not None:
            return _order_of_numbers(numbers, groups)
    columns = {name: batch.column(name) for name in batch.schema.names}
    if layout.schema.kind == StateKind.LIST:
        columns[LIST_INDEX] = pa.array(np.zeros(len(groups), np.int64))  # elements keep the order they came in
    keys = layout.encode_keys(columns, len(groups), groups, 0)
    if len(keys) > 1 and pc.all(pc.less(keys.slice(0, len(keys) - 1), keys.slice(1))).as_py() is True:
        return np.arange(len(keys)), np.zeros(len(keys), np.bool_)  # in order already, as after a map over values
    order = pc.sort_indices(keys).to_numpy()
    ordered = keys.take(pa.array(order))
    same = pc.equal(ordered.slice(0, len(ordered) - 1), ordered.slice(1)).to_numpy(zero_copy_only=False)
    return order, np.append(same, False)


def _order_of_numbers(tail: npt.NDArray[np.uint8], groups: npt.NDArray[np.int32],
                      ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """The same for keys of at most eight bytes, which are compared as numbers."""
    number = np.zeros((len(groups), 8), np.uint8)
    number[:, :tail.shape[1]] = tail
    values = number.reshape(-1).view(">u8").astype(np.uint64)
    order, same = _by_group(np.argsort(values), values, groups)
    if same.any():  # the quick sort above does not keep the order of equal keys; where there are any, it counts
        order, same = _by_group(np.argsort(values, kind="stable"), values, groups)
    return order, same


def _by_group(by_value: npt.NDArray[np.int64], values: npt.NDArray[np.uint64], groups: npt.NDArray[np.int32],
              ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    order = by_value[np.argsort(groups[by_value].astype(np.uint16), kind="stable")]
    values, groups = values[order], groups[order]
    return order, np.append((values[1:] == values[:-1]) & (groups[1:] == groups[:-1]), False)


def _numbered(batch: pa.RecordBatch, layout: StateLayout) -> pa.RecordBatch:
    """List rows with their indexes counted from 0 for each key and namespace."""
    heads = [batch.column(name) for name in layout.key_columns if name not in (LIST_INDEX, MAP_KEY)]
    starts = np.concatenate([[True], np.logical_or.reduce([differs_from_previous(head) for head in heads])])
    numbers = np.arange(batch.num_rows, dtype=np.int64)
    indexes = numbers - np.maximum.accumulate(np.where(starts, numbers, 0))
    return batch.set_column(batch.schema.get_field_index(LIST_INDEX), layout.arrow_schema.field(LIST_INDEX),
                            pa.array(indexes))


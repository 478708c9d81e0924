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

from savepoint.columns import StateLayout
from savepoint.format import BATCH_ROWS, KEY, KEY_GROUP, LIST_INDEX, MAP_KEY
from savepoint.parts import concat, differs_from_previous, fixed_row_size, row_sizes
from statebackend.codecs.arrays import rows_of_one_width
from statebackend.descriptors import StateKind
from statebackend.errors import InvalidRequest
from statebackend.keygroups import KeyGroupRange, key_groups_of
from statebackend.types import StateType

RUN_BYTES = 96 << 20
"""Rows are held in memory up to about so many bytes, then become a run on disk."""
CHUNK_ROWS = 16_384
"""Key groups are sorted by key together up to about so many rows, which stay in the processor's cache."""
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
        self._order: npt.NDArray[np.int64] | None = None
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
        groups = key_groups_of(batch.column(KEY), self._max_parallelism, self._layout.key_type).astype(np.int32)
        names = self._layout.arrow_schema.names
        batch = pa.RecordBatch.from_arrays(
            [pa.array(groups), *(batch.column(name) for name in names if name != KEY_GROUP)],
            schema=self._layout.arrow_schema)
        counts = np.bincount(groups, minlength=self._max_parallelism)
        sizes = group_sizes(batch, groups, counts)
        self._counts += counts
        self._sizes += sizes
        self._held.append(batch)
        self._order = None
        self._held_bytes += int(sizes.sum())
        if self._held_bytes >= RUN_BYTES:
            self._spill()

    def read(self, key_groups: KeyGroupRange) -> Iterator[pa.RecordBatch]:
        """The rows of a range of key groups, sorted; may be called again, and for ranges in any order."""
        for batch in self._grouped(key_groups):
            ordered = self._sorted(batch)
            for begin in range(0, ordered.num_rows, BATCH_ROWS):
                yield ordered.slice(begin, BATCH_ROWS)

    def count(self, key_groups: KeyGroupRange) -> int:
        return int(self._counts[key_groups.first:key_groups.last + 1].sum())

    def close(self) -> None:
        self._held, self._runs, self._order = [], [], None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> SortedRows:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _grouped(self, key_groups: KeyGroupRange) -> Iterator[pa.RecordBatch]:
        """The rows in order of key groups; a key group is never cut, so that what is left to sort stays in the cache."""
        if self._runs and self._held:
            self._spill()
        if not self._runs:
            if self._held:
                self._held = [concat(self._held)]
                self._order = by_group(self._held[0]) if self._order is None else self._order
                yield from self._cut(self._held[0], self._order, key_groups)
            return
        for first, last in self._spans(key_groups):
            pieces = [piece for run in self._runs for piece in run.rows(first, last)]
            if pieces:
                span = concat(pieces)
                yield from self._cut(span, by_group(span), KeyGroupRange(first, last), offset=first)

    def _cut(self, batch: pa.RecordBatch, order: npt.NDArray[np.int64], key_groups: KeyGroupRange,
             offset: int = 0) -> Iterator[pa.RecordBatch]:
        """The batch's rows of a range in order of key groups; it holds all rows of the groups from `offset` on."""
        ends = np.cumsum(self._counts[offset:key_groups.last + 1])
        begin = int(ends[key_groups.first - offset - 1]) if key_groups.first > offset else 0
        for end in ends[key_groups.first - offset:].tolist():
            if end - begin >= CHUNK_ROWS or (end == ends[-1] and end > begin):
                yield batch.take(pa.array(order[begin:end]))
                begin = end

    def _spill(self) -> None:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="holdfast-sort-")
        path = Path(self._folder.name) / f"run-{len(self._runs)}.arrow"
        run = concat(self._held)
        run = run.take(pa.array(by_group(run)))
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, run.schema, options=options) as writer:
            for begin in range(0, run.num_rows, BATCH_ROWS):
                writer.write_batch(run.slice(begin, BATCH_ROWS))
        self._runs.append(_Run(path, run.column(0).to_numpy()))
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
    """Rows in one file, in batches, sorted by key group."""

    def __init__(self, path: Path, groups: npt.NDArray[np.int32]) -> None:
        self._path = path
        self._groups = [groups[begin:begin + BATCH_ROWS] for begin in range(0, len(groups), BATCH_ROWS)]

    def rows(self, first: int, last: int) -> Iterator[pa.RecordBatch]:
        wanted = [index for index, groups in enumerate(self._groups) if groups[0] <= last and groups[-1] >= first]
        if not wanted:
            return
        reader = pa.ipc.open_file(pa.memory_map(str(self._path)))
        for index in wanted:
            groups = self._groups[index]
            begin, end = np.searchsorted(groups, first, side="left"), np.searchsorted(groups, last, side="right")
            if end > begin:
                yield reader.get_batch(index).slice(int(begin), int(end - begin))


def by_group(batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
    """The stable order of rows by key group (there are at most 32768, so this is a radix sort)."""
    return np.argsort(batch.column(0).to_numpy().astype(np.uint16), kind="stable")


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
    if layout.key_columns == [KEY] and layout.schema.namespace_type is None:
        numbers = _as_numbers(batch.column(KEY), layout.key_type)
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


def _as_numbers(keys: pa.Array, kind: StateType) -> npt.NDArray[np.uint64] | None:
    """Keys of at most eight bytes as numbers that sort as they do, from 0 on; None for others."""
    if kind.fixed_key_width is None or kind.fixed_key_width > 8 or len(keys) == 0:
        return None
    if pa.types.is_signed_integer(keys.type) and keys.null_count == 0:
        signed = keys.to_numpy().astype(np.int64, copy=False)
        return np.asarray(signed - signed.min()).view(np.uint64)  # what runs over comes out right as unsigned
    encoded = rows_of_one_width(kind.encode_key_array(keys))
    if encoded is None:
        return None
    padded = np.zeros((len(keys), 8), np.uint8)
    padded[:, 8 - encoded.shape[1]:] = encoded
    numbers = padded.reshape(-1).view(">u8").astype(np.uint64)
    return np.asarray(numbers - numbers.min(), np.uint64)


def _order_of_numbers(values: npt.NDArray[np.uint64], groups: npt.NDArray[np.int32],
                      ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Sorted sixteen bits at a time, from the lowest on: numpy does that by radix, much faster than by comparing."""
    digits = [(values >> np.uint64(shift)).astype(np.uint16) for shift in range(0, int(values.max()).bit_length(), 16)]
    several = bool((groups != groups[0]).any())
    if several or not digits:
        digits.append(groups.astype(np.uint16))
    order = np.argsort(digits[0], kind="stable")
    for digit in digits[1:]:
        order = order[np.argsort(digit[order], kind="stable")]
    values = values[order]
    same = values[1:] == values[:-1]
    if several:
        same &= np.diff(groups[order]) == 0
    return order, np.append(same, False)


def _numbered(batch: pa.RecordBatch, layout: StateLayout) -> pa.RecordBatch:
    """List rows with their indexes counted from 0 for each key and namespace."""
    heads = [batch.column(name) for name in layout.key_columns if name not in (LIST_INDEX, MAP_KEY)]
    starts = np.concatenate([[True], np.logical_or.reduce([differs_from_previous(head) for head in heads])])
    numbers = np.arange(batch.num_rows, dtype=np.int64)
    indexes = numbers - np.maximum.accumulate(np.where(starts, numbers, 0))
    return batch.set_column(batch.schema.get_field_index(LIST_INDEX), layout.arrow_schema.field(LIST_INDEX),
                            pa.array(indexes))


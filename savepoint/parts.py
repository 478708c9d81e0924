"""Writes one keyed state as Parquet parts: cuts parts and row groups at key-group borders, and keeps statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from savepoint.format import (
    COMPRESSION,
    COMPRESSION_LEVEL,
    KEY,
    KEY_GROUP,
    LARGEST_KEYS,
    LIST_INDEX,
    MAX_ROWS,
    MIN_ROWS,
    PART_ROWS,
    TIMESTAMP,
)
from savepoint.values import plain_value
from statebackend.errors import CorruptData
from statebackend.files import FileWriter, StateFile
from statebackend.keygroups import KeyGroupRange
from statebackend.types import StateType

Create = Callable[[str], FileWriter]
"""Starts a file at a path relative to the savepoint."""
Ints = npt.NDArray[np.int64]


@dataclass
class StateStatistics:
    """What a writer knows of a state when it is done: enough for inspection to read no data.

    counts, sizes   rows and uncompressed column bytes of each key group of the range, from its first on
    largest         the keys with the most bytes: {"key", "rows", "bytes"}, largest first
    parts           per file: {"path", "key_groups", "rows", "row_groups": [[first kg, last kg, rows], ...]}
    longest_list    one more than the largest list_index
    """

    counts: list[int]
    sizes: list[int]
    largest: list[dict[str, Any]] = field(default_factory=list)
    parts: list[dict[str, Any]] = field(default_factory=list)
    longest_list: int = 0

    @property
    def rows(self) -> int:
        return sum(self.counts)

    def to_json(self) -> dict[str, Any]:
        return {"rows": self.rows, "counts": self.counts, "sizes": self.sizes, "largest": self.largest,
                "parts": self.parts, "longest_list": self.longest_list}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], groups: int) -> StateStatistics:
        """Statistics as stored; those of a state without any rows may be missing."""
        return cls(list(data.get("counts", [0] * groups)), list(data.get("sizes", [0] * groups)),
                   list(data.get("largest", ())), list(data.get("parts", ())), int(data.get("longest_list", 0)))


def plan_parts(key_groups: KeyGroupRange, expected_rows: int) -> list[KeyGroupRange]:
    """Equal spans of key groups so that a part has about PART_ROWS rows: hashing makes equal spans equally full."""
    groups = key_groups.last - key_groups.first + 1
    wanted = max(1, min(groups, -(-expected_rows // PART_ROWS)))
    cuts = [key_groups.first + index * groups // wanted for index in range(wanted + 1)]
    return [KeyGroupRange(cuts[index], cuts[index + 1] - 1) for index in range(wanted)]


class PartsWriter:
    """Takes batches sorted by key group and key; `finish` gives the files and the statistics. Not thread-safe."""

    def __init__(self, create: Create, path_of: Callable[[int, int], str], schema: pa.Schema,
                 key_groups: KeyGroupRange, expected_rows: int = 0, key_type: StateType | None = None) -> None:
        self._create, self._path_of, self._schema, self._range = create, path_of, schema, key_groups
        self._plan = plan_parts(key_groups, expected_rows)
        self._part: _Part | None = None
        self._files: list[StateFile] = []
        groups = key_groups.last - key_groups.first + 1
        self._counts = np.zeros(groups, np.int64)
        self._sizes = np.zeros(groups, np.float64)
        self._largest = LargestKeys(self._one_row_per_key(), key_type)
        self._keys_together = TIMESTAMP not in schema.names  # timers are sorted by time: a key's rows are apart
        self._width = fixed_row_size(schema)
        self._parts: list[dict[str, Any]] = []
        self._longest = 0

    def write(self, batch: pa.RecordBatch) -> None:
        """Add rows. Empty batches are fine."""
        if batch.num_rows == 0:
            return
        groups = batch.column(0).to_numpy()
        self._require_order(groups)
        begin = 0
        while begin < len(groups):
            part = self._part_for(int(groups[begin]))
            end = int(np.searchsorted(groups, part.key_groups.last, side="right"))
            part.write(batch.slice(begin, end - begin), groups[begin:end])
            begin = end
        self._count(batch, groups)

    def finish(self) -> tuple[tuple[StateFile, ...], StateStatistics]:
        self._close_part()
        statistics = StateStatistics(self._counts.tolist(), self._sizes.astype(np.int64).tolist(),
                                     self._largest.result(), self._parts, self._longest)
        return tuple(self._files), statistics

    def abort(self) -> None:
        if self._part is not None:
            self._part.abort()
            self._part = None

    def _one_row_per_key(self) -> bool:
        return set(self._schema.names) <= {"key_group", "key", "value", "expires_at"}

    def _require_order(self, groups: npt.NDArray[np.int32]) -> None:
        first, last = int(groups[0]), int(groups[-1])
        before = self._part.last_group if self._part is not None else self._range.first
        if first < max(before, self._range.first) or last > self._range.last or (np.diff(groups) < 0).any():
            raise CorruptData("entries are not sorted by key group, or lie outside their range",
                              expected=f"{max(before, self._range.first)}..{self._range.last}", found=f"{first}..{last}")

    def _part_for(self, group: int) -> _Part:
        if self._part is not None and group <= self._part.key_groups.last:
            return self._part
        self._close_part()
        span = next(span for span in self._plan if span.first <= group <= span.last)
        path = self._path_of(span.first, span.last)
        self._part = _Part(self._create(path), self._schema, span)
        return self._part

    def _close_part(self) -> None:
        if self._part is not None:
            file, info = self._part.finish()
            self._files.append(file)
            self._parts.append(info)
            self._part = None

    def _count(self, batch: pa.RecordBatch, groups: npt.NDArray[np.int32]) -> None:
        local = groups - self._range.first
        low, high = int(local[0]), int(local[-1]) + 1
        counts = np.bincount(local - low, minlength=high - low)
        self._counts[low:high] += counts
        if self._width is not None:
            self._sizes[low:high] += counts * self._width
            if self._keys_together and self._largest.wants_more:
                self._largest.add(batch.column(KEY), np.full(len(groups), self._width, np.int64))
        else:
            sizes = sum((row_sizes(column) for column in batch.columns), np.zeros(len(groups), np.int64))
            self._sizes[low:high] += np.bincount(local - low, weights=sizes, minlength=high - low)
            if self._keys_together:
                self._largest.add(batch.column(KEY), sizes)
        if "list_index" in batch.schema.names:
            self._longest = max(self._longest, int(batch.column("list_index").to_numpy().max()) + 1)


class _Part:
    """One Parquet file being written."""

    def __init__(self, file: FileWriter, schema: pa.Schema, key_groups: KeyGroupRange) -> None:
        import pyarrow.parquet as pq  # inspection needs this module, and should not wait for Parquet

        self.key_groups, self.last_group = key_groups, key_groups.first
        self._file = file
        self._sink = WritableFile(file)
        self._writer = pq.ParquetWriter(
            pa.PythonFile(self._sink, mode="w"), schema, compression=COMPRESSION,
            compression_level=COMPRESSION_LEVEL, use_dictionary=False, write_statistics=True,
            write_page_checksum=True, column_encoding=delta_encoded(schema))
        self._buffer: list[pa.RecordBatch] = []
        self._buffered = 0
        self._first_buffered = 0
        self._row_groups: list[list[int]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-parquet")
        self._writing: Future[None] | None = None

    def write(self, batch: pa.RecordBatch, groups: npt.NDArray[np.int32]) -> None:
        if self._buffered >= MIN_ROWS and int(groups[0]) != self.last_group:
            self._flush()
        begin, rows = 0, len(groups)
        borders = np.flatnonzero(np.diff(groups)) + 1
        while begin < rows:
            end = self._end_of_row_group(borders, begin, rows)
            self._add(batch.slice(begin, end - begin), int(groups[begin]), int(groups[end - 1]))
            at_border = end < rows and groups[end] != groups[end - 1]
            if self._buffered >= MAX_ROWS or (self._buffered >= MIN_ROWS and at_border):
                self._flush()
            begin = end

    def _end_of_row_group(self, borders: npt.NDArray[np.int64], begin: int, rows: int) -> int:
        limit = min(rows, begin + MAX_ROWS - self._buffered)
        after = np.searchsorted(borders, max(begin + 1, begin + MIN_ROWS - self._buffered))
        return min(limit, int(borders[after])) if after < len(borders) else limit

    def _add(self, batch: pa.RecordBatch, first: int, last: int) -> None:
        if not self._buffer:
            self._first_buffered = first
        self._buffer.append(batch)
        self._buffered += batch.num_rows
        self.last_group = last

    def _flush(self) -> None:
        if self._buffer:
            table = pa.Table.from_batches(self._buffer)
            self._settle()
            self._writing = self._thread.submit(self._writer.write_table, table, row_group_size=self._buffered)
            self._row_groups.append([self._first_buffered, self.last_group, self._buffered])
            self._buffer, self._buffered = [], 0

    def finish(self) -> tuple[StateFile, dict[str, Any]]:
        try:
            self._flush()
            self._settle()
            self._writer.close()
            file = self._file.finish()
        except BaseException:
            self.abort()
            raise
        self._thread.shutdown()
        return file, {"path": file.path, "key_groups": [self.key_groups.first, self.key_groups.last],
                      "rows": sum(group[2] for group in self._row_groups), "row_groups": self._row_groups}

    def abort(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._sink.give_up()
        self._writer.close()
        self._file.abort()

    def _settle(self) -> None:
        """Encoding and compression run beside the caller, one row group at a time; their error comes out here."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None


def delta_encoded(schema: pa.Schema) -> dict[str, str]:
    """The sorted columns of whole numbers, which are smaller, and faster to write and to read, as differences."""
    names = [name for name in (KEY_GROUP, TIMESTAMP, KEY, LIST_INDEX) if name in schema.names
             and (pa.types.is_integer(schema.field(name).type) or pa.types.is_temporal(schema.field(name).type))]
    return dict.fromkeys(names, "DELTA_BINARY_PACKED")


class LargestKeys:
    """The keys with the most bytes in a sorted stream. A key's rows are neighbours, also across batches."""

    def __init__(self, one_row_per_key: bool, key_type: StateType | None = None, keep: int = LARGEST_KEYS) -> None:
        self._unique, self._key_type, self._keep = one_row_per_key, key_type, keep
        self._top: list[tuple[int, int, Any]] = []
        self._open: tuple[Any, int, int] | None = None

    @property
    def wants_more(self) -> bool:
        """Whether rows that are all of one size could still change the result."""
        return not self._unique or len(self._top) < self._keep

    def add(self, keys: pa.Array, sizes: Ints) -> None:
        if self._unique:
            self._offer(keys, sizes, np.ones(len(sizes), np.int64))
            return
        starts = np.concatenate([[0], np.flatnonzero(differs_from_previous(keys)) + 1])
        totals = np.add.reduceat(sizes, starts)
        rows = np.diff(np.concatenate([starts, [len(sizes)]]))
        if self._open is not None and keys[0].as_py() == self._open[0]:
            totals[0] += self._open[1]
            rows[0] += self._open[2]
        elif self._open is not None:
            self._put(*self._open)
        self._open = (keys[int(starts[-1])].as_py(), int(totals[-1]), int(rows[-1]))
        self._offer(keys.take(pa.array(starts[:-1])), totals[:-1], rows[:-1])

    def result(self) -> list[dict[str, Any]]:
        if self._open is not None:
            self._put(*self._open)
            self._open = None
        return [{"key": plain_value(key, self._key_type), "rows": rows, "bytes": size} for size, rows, key in self._top]

    def _offer(self, keys: pa.Array, totals: Ints, rows: Ints) -> None:
        if len(totals) == 0:
            return
        floor = self._top[-1][0] if len(self._top) == self._keep else -1
        if int(totals.max()) <= floor:
            return
        best = np.argsort(-totals, kind="stable")[:self._keep] if len(totals) <= self._keep else \
            np.argpartition(-totals, self._keep - 1)[:self._keep]
        for index in best.tolist():
            if totals[index] > floor:
                self._put(keys[index].as_py(), int(totals[index]), int(rows[index]))

    def _put(self, key: Any, size: int, rows: int) -> None:
        self._top.append((size, rows, key))
        self._top.sort(key=lambda item: -item[0])
        del self._top[self._keep:]


def differs_from_previous(array: pa.Array) -> npt.NDArray[np.bool_]:
    """For each row but the first, whether it differs from the one before; None equals None, NaN equals NaN."""
    import pyarrow.compute as pc

    rows = len(array)
    if rows < 2:
        return np.zeros(0, np.bool_)
    if pa.types.is_struct(array.type):
        fields = [differs_from_previous(column) for column in array.flatten()]
        different = np.logical_or.reduce(fields) if fields else np.zeros(rows - 1, np.bool_)
    elif pa.types.is_nested(array.type):
        values = array.to_pylist()
        different = np.fromiter((left != right for left, right in pairwise(values)), np.bool_, rows - 1)
    else:
        storage = array.storage if isinstance(array, pa.ExtensionArray) else array
        compared = pc.not_equal(storage.slice(0, rows - 1), storage.slice(1))
        different = np.asarray(pc.fill_null(compared, False).to_numpy(zero_copy_only=False), np.bool_)
        if pa.types.is_floating(storage.type):
            nan = pc.fill_null(pc.is_nan(storage), False).to_numpy(zero_copy_only=False)
            different &= ~(nan[:-1] & nan[1:])
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    return np.asarray(different | (valid[:-1] != valid[1:]), np.bool_)


def fixed_row_size(schema: pa.Schema) -> int | None:
    """The bytes of every row where all columns have a fixed width."""
    widths = [_width(field.type) for field in schema]
    return None if any(width is None for width in widths) else sum(width or 0 for width in widths)


def _width(kind: pa.DataType) -> int | None:
    if pa.types.is_nested(kind) or _is_variable(kind) or isinstance(kind, pa.BaseExtensionType):
        return None
    return 0 if pa.types.is_null(kind) else max(1, int(kind.bit_width) // 8)


def row_sizes(array: pa.Array) -> Ints:
    """Uncompressed bytes of each row: the width of fixed-width types, the length of others, children included."""
    if isinstance(array, pa.ExtensionArray):
        return row_sizes(array.storage)
    kind, rows = array.type, len(array)
    if pa.types.is_struct(kind):
        return sum((row_sizes(column) for column in array.flatten()), np.zeros(rows, np.int64))
    if pa.types.is_map(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _nested_sizes(array)
    if pa.types.is_fixed_size_list(kind):
        inner = row_sizes(array.flatten())
        width = kind.list_size
        return inner.reshape(-1, width).sum(axis=1) if len(inner) == rows * width and width else np.zeros(rows, np.int64)
    if _is_variable(kind):
        import pyarrow.compute as pc

        return np.asarray(pc.fill_null(pc.binary_length(array), 0).to_numpy(zero_copy_only=False), np.int64)
    width = 0 if pa.types.is_null(kind) else max(1, kind.bit_width // 8)
    return np.full(rows, width, np.int64)


def _nested_sizes(array: pa.Array) -> Ints:
    offsets = array.offsets.to_numpy().astype(np.int64)
    children = [array.keys, array.items] if pa.types.is_map(array.type) else [array.values]
    first, last = int(offsets[0]), int(offsets[-1])
    inner = sum((row_sizes(child.slice(first, last - first)) for child in children), np.zeros(last - first, np.int64))
    total = np.concatenate([[0], np.cumsum(inner)])
    return np.asarray(total[offsets[1:] - first] - total[offsets[:-1] - first], np.int64)


def _is_variable(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind) or pa.types.is_large_string(kind)
                or pa.types.is_large_binary(kind))


class WritableFile:
    """What Arrow needs of a Python file, over a FileWriter."""

    closed = False

    def __init__(self, file: FileWriter) -> None:
        self._file: FileWriter | None = file
        self._position = 0

    def give_up(self) -> None:
        """Swallow what is still to come: Parquet writes a footer when it is closed, also after a failure."""
        self._file = None

    def write(self, data: Any) -> int:
        view = memoryview(data)
        if self._file is not None:
            self._file.write(view)
        self._position += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        return self._position

    def flush(self) -> None:
        return None

    def close(self) -> None:
        return None


def rebatch(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of at most `rows`."""
    for batch in batches:
        for begin in range(0, batch.num_rows, rows):
            yield batch.slice(begin, rows)


def concat(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """One batch of several with the same schema."""
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)

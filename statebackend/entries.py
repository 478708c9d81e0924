"""The raw form that all backends share: state as sorted (key bytes, value bytes) entries, and files of them.

The grammar is in docs/formats/entries.md. In short:

    entry key   = key group (u16 BE) | state id (u16 BE) | key | namespace | suffix
    namespace   = 00                          the default namespace
                | 01 | ordered encoding       any other
    suffix      = nothing                     value, reducing, aggregating
                | sequence (u64 BE)           list element; sequences grow, gaps are allowed
                | ordered encoding            map key
    timer key   = key group (u16 BE) | state id (u16 BE) | timestamp (i64 BE, sign flipped) | key | namespace
    entry value = [expires_at (i64 BE, sign flipped), where the schema says ttl] | value codec

Key, namespace and map key are the order-preserving, self-delimiting encodings of `StateType.encode_key`. An entry
file is an Arrow IPC file with the columns key, value, op, sorted by key group; later rows win over earlier ones, and
later files over earlier files.
"""

from __future__ import annotations

import io
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from statebackend.codecs.arrays import Bytes, rows_of_one_width
from statebackend.errors import CorruptData, IncompatibleState
from statebackend.files import FileWriter, SnapshotSource, SnapshotTarget, StateFile
from statebackend.keygroups import KeyGroupRange

ENTRIES_VERSION = 1
OP_PUT, OP_DELETE, OP_DELETE_PREFIX = 0, 1, 2
ENTRY_SCHEMA = pa.schema(
    [pa.field("key", pa.binary(), False), pa.field("value", pa.binary()), pa.field("op", pa.uint8(), False)],
    metadata={"holdfast.format": "entries", "holdfast.version": str(ENTRIES_VERSION)})
DEFAULT_NAMESPACE = b"\x00"
NAMED_NAMESPACE = b"\x01"
BATCH_ROWS = 10_000
"""Rows a batch: small enough that building one never holds the interpreter for long."""

prefix_of = struct.Struct(">HH").pack
"""The first four bytes of every entry of a state in a key group: `prefix_of(key_group, state_id)`."""
pack_sequence = struct.Struct(">Q").pack
_SIGN = 1 << 63
_U64 = struct.Struct(">Q")


_RADIX_WIDTH = 24
"""Keys up to so many bytes are sorted by radix; beyond it comparing wins."""


def pack_time(milliseconds: int) -> bytes:
    """Eight bytes that sort like the signed number: used for `expires_at` and timer timestamps."""
    return _U64.pack(milliseconds + _SIGN)


def unpack_time(data: bytes, offset: int = 0) -> int:
    return cast(int, _U64.unpack_from(data, offset)[0]) - _SIGN


def entry_batch(keys: Any, values: Any = None, ops: Any = None) -> pa.RecordBatch:
    """A batch of entries from Arrow arrays or lists of bytes; puts unless `ops` says otherwise."""
    keys = keys if isinstance(keys, pa.Array) else pa.array(keys, pa.binary())
    if values is None:
        values = pa.nulls(len(keys), pa.binary())
    values = values if isinstance(values, pa.Array) else pa.array(values, pa.binary())
    if ops is None:
        ops = np.zeros(len(keys), np.uint8)
    ops = ops if isinstance(ops, pa.Array) else pa.array(ops, pa.uint8())
    return pa.RecordBatch.from_arrays([keys, values, ops], schema=ENTRY_SCHEMA)


class EntryFileWriter:
    """Writes one entry file. Batches must come sorted by key group; nothing is visible before `finish`."""

    def __init__(self, target: SnapshotTarget, hint: str, *, shared: bool, compression: str | None = "lz4") -> None:
        self._file = target.create(hint, shared=shared)
        self._sink = pa.PythonFile(_Counting(self._file), mode="w")
        options = pa.ipc.IpcWriteOptions(compression=compression)
        self._writer = pa.ipc.new_file(self._sink, ENTRY_SCHEMA, options=options)
        self.rows = 0

    def write(self, batch: pa.RecordBatch) -> None:
        self._writer.write_batch(batch)
        self.rows += batch.num_rows

    def finish(self) -> StateFile:
        self._writer.close()
        return self._file.finish()

    def abort(self) -> None:
        self._file.abort()


def write_entries(target: SnapshotTarget, hint: str, batches: Iterable[pa.RecordBatch], *, shared: bool,
                  compression: str | None = "lz4") -> StateFile:
    """Write all batches to one file; nothing is left behind if it fails."""
    writer = EntryFileWriter(target, hint, shared=shared, compression=compression)
    try:
        for batch in batches:
            writer.write(batch)
        return writer.finish()
    except BaseException:
        writer.abort()
        raise


def read_entries(source: SnapshotSource, file: StateFile, key_groups: KeyGroupRange | None = None,
                 ) -> Iterator[pa.RecordBatch]:
    """The batches of one entry file, cut to a range of key groups; damage is named with the file."""
    with source.open(file) as stream:
        reader = _open_file(stream, file.path)
        for index in range(reader.num_record_batches):
            try:
                batch = reader.get_batch(index)
                batch.validate(full=True)
            except (pa.ArrowException, OSError) as error:
                raise CorruptData(f"an entry file can't be read: {error}", path=file.path) from error
            if key_groups is not None:
                batch = cut_to_groups(batch, key_groups)
            if batch.num_rows:
                yield batch


def key_groups_of_entries(keys: pa.Array) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """The key group of each entry key, without a Python object per row."""
    rows = len(keys)
    if rows == 0:
        return np.zeros(0, np.uint16)
    buffers = keys.buffers()
    begin = np.frombuffer(buffers[1], np.int32, rows, keys.offset * 4)
    data = np.frombuffer(buffers[2], np.uint8)
    return np.asarray((data[begin].astype(np.uint16) << 8) | data[begin + 1], np.uint16)


def merge_entries(sources: Sequence[Iterable[pa.RecordBatch]], *,
                  keep_deletes: bool = False) -> Iterator[pa.RecordBatch]:
    """The final entries of several replayed files (oldest first): puts only, sorted by key, one key group at a time.

    Each source is sorted by key group. Memory is bounded by the largest key group. With `keep_deletes` the last
    operation of each key is given whatever it is: the result is again a layer to be replayed over older ones.
    """
    cursors = [_GroupCursor(source) for source in sources]
    while True:
        groups = [cursor.group for cursor in cursors if cursor.group is not None]
        if not groups:
            return
        group = min(groups)
        parts = [batch for cursor in cursors if cursor.group == group for batch in cursor.take_group()]
        merged = _resolve(pa.Table.from_batches(parts, ENTRY_SCHEMA).combine_chunks(), keep_deletes)
        yield from merged.to_batches(max_chunksize=65_536)


class _GroupCursor:
    """Walks sorted batches one key group at a time."""

    def __init__(self, batches: Iterable[pa.RecordBatch]) -> None:
        self._batches = iter(batches)
        self._batch: pa.RecordBatch | None = None
        self._groups: Sequence[int] = ()
        self._begin = 0
        self.group: int | None = None
        self._advance()

    def _advance(self) -> None:
        while self._batch is None or self._begin == self._batch.num_rows:
            self._batch = next(self._batches, None)
            if self._batch is None:
                self.group = None
                return
            self._groups = _SortedGroups(self._batch.column(0))
            self._begin = 0
        self.group = self._groups[self._begin]

    def take_group(self) -> list[pa.RecordBatch]:
        wanted, taken = self.group, list[pa.RecordBatch]()
        while wanted is not None and self.group == wanted and self._batch is not None:
            end = bisect_right(self._groups, wanted, self._begin)
            taken.append(self._batch.slice(self._begin, end - self._begin))
            self._begin = end
            self._advance()
        return taken


class _SortedGroups(Sequence[int]):
    """The key groups of sorted entry keys, each looked at only when asked for: where one ends is found by halving."""

    def __init__(self, keys: pa.BinaryArray) -> None:
        self._rows = len(keys)
        _, bounds, data = keys.buffers()
        self._begin = np.frombuffer(bounds, np.int32, self._rows, keys.offset * 4) if self._rows else np.zeros(0, np.int32)
        self._data = b"" if data is None else memoryview(data).cast("B")

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: Any) -> Any:
        begin = int(self._begin[row])
        return self._data[begin] << 8 | self._data[begin + 1]


def _resolve(table: pa.Table, keep_deletes: bool = False) -> pa.Table:
    """Apply the rows of one key group in order: the last row of a key wins, and prefix deletes kill what came before."""
    if _is_final(table):
        return table
    order = _stable_order(_one_chunk(table.column("key")))
    table = table.take(pa.array(order))
    ops = table.column("op").to_numpy()
    keys = _one_chunk(table.column("key"))
    last = np.ones(len(ops), bool)
    last[:-1] = ~pc.equal(keys.slice(0, len(keys) - 1), keys.slice(1)).to_numpy(zero_copy_only=False)
    is_prefix = ops == OP_DELETE_PREFIX
    alive = last & ~is_prefix
    if is_prefix.any():
        key_number = np.cumsum(last) - last
        prefixes = np.flatnonzero(is_prefix)
        latest = np.append(key_number[prefixes][1:] != key_number[prefixes][:-1], True)
        alive[prefixes[latest]] = True  # a put of the very same key may follow, so a key can keep two rows
        first_row = np.append(0, np.flatnonzero(last) + 1)
        for index in prefixes[latest].tolist():
            begin = int(first_row[key_number[index]])
            end = _first_not_below(keys, _successor(keys[index].as_py()), index)
            alive[begin:end] &= order[begin:end] >= order[index]
    if not keep_deletes:
        alive &= ops == OP_PUT
    if alive.all():
        return table
    return table.filter(pa.array(alive))


def _stable_order(keys: pa.Array) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The order of keys, equal ones as they came.

    Keys of one short length are sorted sixteen bits at a time from the last on, which numpy does by radix: several times
    faster than comparing, and bits that all keys share (key group, state, no namespace) cost nothing.
    """
    matrix = rows_of_one_width(keys)
    if matrix is None or not 0 < matrix.shape[1] <= _RADIX_WIDTH:
        table = pa.table({"key": keys, "row": np.arange(len(keys))})
        return np.asarray(pc.sort_indices(table, [("key", "ascending"), ("row", "ascending")]).to_numpy(), np.int64)
    order: np.ndarray[Any, np.dtype[np.int64]] | None = None
    for digit in _differing_digits(matrix):
        order = np.argsort(digit, kind="stable") if order is None else order[np.argsort(digit[order], kind="stable")]
    return np.arange(len(keys)) if order is None else order


def _differing_digits(matrix: Bytes) -> Iterator[np.ndarray[Any, np.dtype[np.uint16]]]:
    """Sixteen bits of each row at a time, the last ones first, without those in which no two rows differ."""
    rows, width = matrix.shape
    for end in range(width, 0, -8):
        if end >= 8:
            numbers = np.ndarray((rows,), ">u8", matrix, end - 8, (width,)).astype(np.uint64)
        else:
            padded = np.zeros((rows, 8), np.uint8)
            padded[:, 8 - end:] = matrix[:, :end]
            numbers = padded.view(">u8").reshape(rows).astype(np.uint64)
        differing = int(np.bitwise_or.reduce(numbers ^ numbers[0]))
        while differing:
            shift = (differing & -differing).bit_length() - 1
            yield (numbers >> np.uint64(shift)).astype(np.uint16)
            differing &= -1 << shift + 16


def _is_final(table: pa.Table) -> bool:
    """Whether the rows are puts in strictly ascending order already, as those of a full snapshot are."""
    if table.num_rows and pc.max(table.column("op")).as_py() != OP_PUT:
        return False
    keys = _one_chunk(table.column("key"))
    return all(len(part) < 2 or pc.all(pc.less(part.slice(0, len(part) - 1), part.slice(1))).as_py() is True
               for part in (keys.slice(0, 64), keys))  # a few rows tell of most that are not sorted


def _successor(prefix: bytes) -> bytes | None:
    """The smallest key that is above every key with this prefix; None where there is none."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else None


def _first_not_below(keys: pa.Array, bound: bytes | None, low: int) -> int:
    high = len(keys)
    if bound is None:
        return high
    while low < high:
        middle = (low + high) // 2
        if keys[middle].as_py() < bound:
            low = middle + 1
        else:
            high = middle
    return low


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks) if column.num_chunks else \
        pa.array([], column.type)


def cut_to_groups(batch: pa.RecordBatch, key_groups: KeyGroupRange) -> pa.RecordBatch:
    """The rows of a batch, sorted by key group, that are in a range of these."""
    groups = _SortedGroups(batch.column(0))
    if not groups or (groups[0] >= key_groups.first and groups[-1] <= key_groups.last):
        return batch
    begin = bisect_left(groups, key_groups.first)
    return batch.slice(begin, bisect_right(groups, key_groups.last, begin) - begin)


def _open_file(stream: BinaryIO, path: str) -> pa.ipc.RecordBatchFileReader:
    try:
        reader = pa.ipc.open_file(stream)
    except (pa.ArrowException, OSError) as error:
        raise CorruptData(f"this is no entry file, or it was cut short: {error}", path=path) from error
    metadata = reader.schema.metadata or {}
    version = metadata.get(b"holdfast.version", b"?").decode()
    if version != str(ENTRIES_VERSION):
        raise IncompatibleState("an entry file has a version that this release does not read", path=path,
                                expected=ENTRIES_VERSION, found=version, hint="use a newer release of holdfast")
    return reader


class _Counting(io.RawIOBase):
    """What Arrow needs of a Python file, over a FileWriter."""

    def __init__(self, file: FileWriter) -> None:
        self._file = file
        self._position = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self._file.write(view)
        self._position += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        return self._position

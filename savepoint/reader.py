"""Reads open handles: as entries for restoring into any backend, and as rows of chosen key groups, keys or columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from savepoint.columns import StateLayout
from savepoint.format import BATCH_ROWS, KEY_GROUP, OPEN_VERSION
from statebackend.backend import KeyedHandle
from statebackend.descriptors import StateKind
from statebackend.errors import CorruptData, HoldfastError, IncompatibleState, NotFound
from statebackend.files import SnapshotSource, StateFile
from statebackend.formats import ChannelPart
from statebackend.keygroups import KeyGroupRange
from statebackend.operator_state import OperatorStateSnapshot
from statebackend.schema import StateSchema
from statebackend.types import state_type_from_json

if TYPE_CHECKING:
    import pyarrow.dataset as ds
    import pyarrow.parquet as pq

READ_BYTES = 64 << 20
"""Row groups are read together up to about so many uncompressed bytes."""

OpenFile = Callable[[StateFile], AbstractContextManager[Any]]
"""Gives something that Parquet can be read from: a path, or a seekable stream."""


@dataclass(frozen=True)
class Part:
    """One Parquet file of a state, as the handle's statistics describe it."""

    file: StateFile
    key_groups: KeyGroupRange
    row_groups: tuple[tuple[int, int, int], ...]

    def wanted(self, key_groups: KeyGroupRange) -> list[int]:
        """The row groups that hold rows of these key groups."""
        return [index for index, (first, last, _) in enumerate(self.row_groups)
                if first <= key_groups.last and last >= key_groups.first]


def state_meta(handle: KeyedHandle) -> Mapping[str, Any]:
    """Statistics by state name; a handle of a newer version is refused."""
    version = handle.meta.get("version")
    if version != OPEN_VERSION:
        raise IncompatibleState("an open savepoint has a version that this release does not read",
                                expected=OPEN_VERSION, found=version, hint="use a newer release of holdfast")
    states = handle.meta.get("states")
    if not isinstance(states, Mapping):
        raise CorruptData("an open handle does not describe its states")
    return states


def parts_of(handle: KeyedHandle, state: str) -> list[Part]:
    """The files of one state, in order of key groups."""
    files = {file.path: file for file in handle.files}
    parts = []
    try:
        for item in state_meta(handle).get(state, {}).get("parts", ()):
            first, last = item["key_groups"]
            groups = tuple((int(begin), int(end), int(rows)) for begin, end, rows in item["row_groups"])
            parts.append(Part(files[item["path"]], KeyGroupRange(int(first), int(last)), groups))
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptData(f"an open handle describes its parts wrongly: {error!r}", state=state) from error
    return sorted(parts, key=lambda part: part.key_groups.first)


def layout_of(handle: KeyedHandle, schema: StateSchema) -> StateLayout:
    return StateLayout(schema, state_type_from_json(handle.key_type))


class OpenFormat:
    """The reader of format "open" for restore (a `SnapshotFormat`): one layer a state, in order of state ids."""

    def layers(self, handle: KeyedHandle, source: SnapshotSource,
               key_groups: KeyGroupRange) -> list[Iterable[pa.RecordBatch]]:
        state_meta(handle)
        schemas = sorted(handle.schemas, key=lambda schema: schema.state_id)
        return [self._entries(handle, schema, source, key_groups) for schema in schemas]

    def operator_state(self, note: Mapping[str, Any], source: SnapshotSource) -> OperatorStateSnapshot:
        from savepoint.operators import read_operator_note

        return read_operator_note(note, source)

    def channel_state(self, note: Mapping[str, Any], source: SnapshotSource) -> list[ChannelPart]:
        from savepoint.inflight import read_channels

        return read_channels(note, source)

    def _entries(self, handle: KeyedHandle, schema: StateSchema, source: SnapshotSource,
                 key_groups: KeyGroupRange) -> Iterator[pa.RecordBatch]:
        layout = layout_of(handle, schema)
        for batch in read_parts(parts_of(handle, schema.name), layout, source.open, key_groups):
            yield layout.encode(batch, schema.state_id)


def read_parts(parts: Sequence[Part], layout: StateLayout, open_file: OpenFile, key_groups: KeyGroupRange,
               columns: Sequence[str] | None = None, where: ds.Expression | None = None,
               keys: Sequence[bytes] | None = None) -> Iterator[pa.RecordBatch]:
    """Rows of a range of key groups, in order; row groups outside of it, or that `where` rules out, are not read.

    Where `keys` (encoded) are given, row groups that hold none of them may be left out; the caller filters the rest.
    """
    for part in parts:
        wanted = part.wanted(key_groups)
        if wanted:
            with open_file(part.file) as stream, reading(part.file):
                yield from _read_part(stream, part, wanted, layout, key_groups, columns, where, keys)


def _read_part(stream: Any, part: Part, wanted: list[int], layout: StateLayout, key_groups: KeyGroupRange,
               columns: Sequence[str] | None, where: ds.Expression | None,
               keys: Sequence[bytes] | None) -> Iterator[pa.RecordBatch]:
    parquet = open_parquet(stream)
    _require_columns(parquet, part, layout)
    if keys is not None and len(wanted) > 1:
        wanted = [index for index in wanted if may_hold(parquet, index, layout, part.row_groups[index], keys)]
    names = list(columns) if columns is not None else layout.arrow_schema.names
    cut = any(part.row_groups[index][0] < key_groups.first or part.row_groups[index][1] > key_groups.last
              for index in wanted)
    read = names if not cut or KEY_GROUP in names else [KEY_GROUP, *names]
    if where is not None:
        wanted = _ruled_in(stream, wanted, where)
        read = layout.arrow_schema.names
    for chunk in _chunks(parquet, wanted):
        table = parquet.read_row_groups(chunk, columns=read, use_threads=True)
        if where is not None:
            table = table.filter(where)
        for batch in table.to_batches(max_chunksize=BATCH_ROWS):
            if cut:
                batch = cut_rows(batch, key_groups)
            if batch.num_rows:
                yield conformed(batch.select(names), layout)


def may_hold(parquet: pq.ParquetFile, index: int, layout: StateLayout, row_group: tuple[int, int, int],
             keys: Sequence[bytes]) -> bool:
    """Whether a row group of a split key group may hold one of these encoded keys, by the bounds in the footer."""
    nested = pa.types.is_nested(layout.key_type.arrow_type)
    if row_group[0] != row_group[1] or layout.schema.kind == StateKind.TIMER or nested:
        return True  # several key groups share it, or it has no bounds that compare
    bounds = parquet.metadata.row_group(index).column(1).statistics
    if bounds is None or not bounds.has_min_max or layout.key_type.tag == "float":
        return True  # NaN is not counted in bounds
    try:
        typed = pa.array([bounds.min, bounds.max], layout.key_type.arrow_type)
        low, high = layout.key_type.encode_key_array(typed).to_pylist()
    except (pa.ArrowException, HoldfastError, TypeError, ValueError):
        return True
    return any(low <= key <= high for key in keys)


def _ruled_in(stream: Any, wanted: list[int], where: ds.Expression) -> list[int]:
    """The row groups that their statistics do not rule out."""
    import pyarrow.dataset as ds  # takes long to import, and brings pandas along; most look-ups need neither
    import pyarrow.fs as fs

    form = ds.ParquetFileFormat()
    fragment = form.make_fragment(stream, filesystem=fs.LocalFileSystem(), row_groups=wanted) \
        if isinstance(stream, str) else form.make_fragment(pa.PythonFile(stream, mode="r"), row_groups=wanted)
    return [group.id for piece in fragment.split_by_row_group(where) for group in piece.row_groups]


def _require_columns(parquet: pq.ParquetFile, part: Part, layout: StateLayout) -> None:
    """Refuse a file whose columns are not those of the state: its footer, which has no checksum, is damaged."""
    found = {field.name: field.type for field in parquet.schema_arrow}
    wanted = {field.name: field.type for field in layout.arrow_schema}
    rows = [parquet.metadata.row_group(index).num_rows for index in range(parquet.num_row_groups)]
    if found != wanted or rows != [row_group[2] for row_group in part.row_groups]:
        raise CorruptData("a file of the savepoint has other columns or row groups than recorded", path=part.file.path,
                          hint="run `holdfast savepoint verify` to see all damage")


def _chunks(parquet: pq.ParquetFile, wanted: Sequence[int]) -> Iterator[list[int]]:
    """Neighbouring row groups that are read at once: enough for all cores, within bounded memory."""
    chunk, size = list[int](), 0
    for index in wanted:
        weight = parquet.metadata.row_group(index).total_byte_size
        if chunk and size + weight > READ_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(index)
        size += weight
    if chunk:
        yield chunk


def open_parquet(stream: Any) -> pq.ParquetFile:
    """A Parquet file from a path (mapped) or a stream. Pages are held against their checksums as they are read."""
    import pyarrow.parquet as pq  # inspection reads no file, and should not wait for this

    return pq.ParquetFile(stream, memory_map=isinstance(stream, str), pre_buffer=not isinstance(stream, str),
                          page_checksum_verification=True)


def cut_rows(batch: pa.RecordBatch, key_groups: KeyGroupRange) -> pa.RecordBatch:
    """The rows of a sorted batch whose key group lies in the range."""
    groups = batch.column(KEY_GROUP).to_numpy()
    begin = int(np.searchsorted(groups, key_groups.first, side="left"))
    end = int(np.searchsorted(groups, key_groups.last, side="right"))
    return batch.slice(begin, end - begin)


def conformed(batch: pa.RecordBatch, layout: StateLayout) -> pa.RecordBatch:
    """The batch with exactly the layout's types: Parquet widens some units, and others may have rewritten a file."""
    wanted = pa.schema([layout.arrow_schema.field(name) for name in batch.schema.names])
    if batch.schema.equals(wanted):
        return batch
    arrays = [column if column.type == field.type else column.cast(field.type)
              for column, field in zip(batch.columns, wanted)]
    return pa.RecordBatch.from_arrays(arrays, schema=wanted)


@contextmanager
def reading(file: StateFile) -> Iterator[None]:
    """Arrow's errors while reading a file, as ours, with the file's name."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, FileNotFoundError):
            raise NotFound("a file of the savepoint is missing", path=file.path,
                           hint="the copy is not complete; copy the folder again") from error
        raise CorruptData(f"a file of the savepoint can't be read: {str(error).splitlines()[0]}", path=file.path,
                          hint="run `holdfast savepoint verify` to see all damage") from error

"""Records in flight in the open format: a Parquet file an edge, and in each subtask's place a note of which rows are its.

`record` and `key_record` are the exact bytes of the records codec (docs/formats/records.md), which a restore decodes with
the flow's record types; `value` and `key` show the same for people and other tools, as typed columns where Arrow has
one type for all of them, else as JSON text. Which subtask a record goes to is the restore's to decide: it knows how
the edge partitions. Re-cutting a savepoint therefore leaves the channels as they were and notes the new layout.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import msgspec
import pyarrow as pa
import xxhash

from checkpoint.dataflow.channel_state import CHANNEL_STATE_VERSION
from checkpoint.dataflow.records import RECORDS_VERSION, RecordCodec
from savepoint.format import OPEN_FORMAT, OPEN_VERSION, SUBTASK, escape_name, inflight_path
from savepoint.parquet_files import read_table, write_table
from savepoint.values import to_plain
from statebackend.errors import CorruptData, IncompatibleState
from statebackend.files import FileWriter, SnapshotSource, StateFile
from statebackend.formats import ChannelPart, noted_channel_state

Raws = list[msgspec.Raw]
_Batch = tuple[Raws, list[int | None] | None, Raws | None, Any]
_decode_batch = msgspec.msgpack.Decoder(_Batch).decode


@dataclass(frozen=True)
class Channel:
    """The records in flight on one channel, in batches of the records codec; see `InFlight` for the fields."""

    edge: str
    sender: int
    receiver: int
    output: bool
    batches: tuple[bytes, ...]
    receivers: tuple[int, ...] = ()

    def recut(self, old: int, new: int) -> Channel:
        """The same after the receiving operator's state was cut for `new` subtasks."""
        return replace(self, receivers=(*(self.receivers or (old,)), new))


def stored_channels(file: StateFile | None, source: SnapshotSource) -> list[Channel]:
    """The channels that a subtask's file holds, in whatever form."""
    if file is None:
        return []
    with source.open(file) as stream:
        data = stream.read()
    parts: Any = noted_channel_state(data, file, source)
    if parts is None:
        if not data or data[0] != CHANNEL_STATE_VERSION:
            raise IncompatibleState("records in flight have a version that this release does not read", path=file.path,
                                    expected=CHANNEL_STATE_VERSION, found=data[0] if data else None)
        try:
            parts = msgspec.msgpack.decode(memoryview(data)[1:], type=list[tuple[str, int, int, bool, list[bytes]]])
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise CorruptData(f"records in flight can't be decoded: {error}", path=file.path) from error
    return [Channel(edge, sender, receiver, output, tuple(batches), *rest)
            for edge, sender, receiver, output, batches, *rest in parts]


def write_channels(create: Callable[[str], FileWriter], uid: str, subtasks: Sequence[tuple[int, Sequence[Channel]]],
                   ) -> dict[int, tuple[StateFile, tuple[StateFile, ...]]]:
    """Write the channels of an operator's subtasks; for each subtask with any, the note and the files it points to."""
    notes: dict[int, list[dict[str, Any]]] = {}
    files: dict[int, list[StateFile]] = {}
    for edge in dict.fromkeys(channel.edge for _, held in subtasks for channel in held):
        mine = [(index, channel) for index, held in subtasks for channel in held if channel.edge == edge]
        described = {"holdfast.format": OPEN_FORMAT, "holdfast.version": str(OPEN_VERSION), "holdfast.operator": uid,
                     "holdfast.edge": edge}
        rows, types = zip(*[_rows(index, channel) for index, channel in mine])
        table = _table([row for part in rows for row in part])
        file = write_table(create(inflight_path(uid, edge)), table, described)
        begin = 0
        for (index, channel), part, record_type in zip(mine, rows, types):
            notes.setdefault(index, []).append({
                "edge": edge, "sender": channel.sender, "receiver": channel.receiver, "output": channel.output,
                "receivers": list(channel.receivers), "record_type": record_type, "file": file.to_json(),
                "rows": [begin, begin + len(part)]})
            files.setdefault(index, []).append(file)
            begin += len(part)
    return {index: (_note(uid, index, channels), tuple(dict.fromkeys(files[index])))
            for index, channels in notes.items()}


def read_channels(note: Mapping[str, Any], source: SnapshotSource) -> list[ChannelPart]:
    """What a note points to, in batches of the records codec."""
    if note.get("version") != OPEN_VERSION:
        raise IncompatibleState("an open savepoint has a version that this release does not read",
                                expected=OPEN_VERSION, found=note.get("version"), hint="use a newer release of holdfast")
    tables: dict[str, pa.Table] = {}
    try:
        return [_read_channel(item, source, tables) for item in note["channels"]]
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptData(f"a note of records in flight can't be read: {error!r}") from error


def noted_records(file: StateFile) -> list[tuple[str, int]] | None:
    """Edge and number of records of each channel, from a note alone; None where only reading would tell."""
    data = file.inline or b""
    if data[:1] != b"{":
        return None
    try:
        return [(str(item["edge"]), int(item["rows"][1]) - int(item["rows"][0]))
                for item in json.loads(data)["channels"]]
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptData(f"a note of records in flight can't be read: {error!r}", path=file.path) from error


def noted_files(file: StateFile | None) -> set[str]:
    """The paths of the files that a note points to; none where it is no note."""
    if file is None or (file.inline or b"")[:1] != b"{":
        return set()
    try:
        return {str(item["file"]["path"]) for item in json.loads(file.inline or b"")["channels"]}
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptData(f"a note of records in flight can't be read: {error!r}", path=file.path) from error


def channel_table(channels: Sequence[tuple[str, int, Channel]]) -> pa.Table:
    """The records of (operator, subtask, channel) as rows for people."""
    rows = [(uid, row) for uid, index, channel in channels for row in _rows(index, channel)[0]]
    table = _table([row for _, row in rows]).drop_columns(["record", "key_record"])
    return table.add_column(0, "operator", pa.array([uid for uid, _ in rows], pa.string()))


def kept_table(channels: Sequence[tuple[int, Channel]]) -> pa.Table:
    """The records that one operator's subtasks keep, on all edges, as rows for people."""
    rows = [(channel.edge, row) for index, channel in channels for row in _rows(index, channel)[0]]
    table = _table([row for _, row in rows]).drop_columns(["record", "key_record"])
    return table.add_column(0, pa.field("edge", pa.string(), False), pa.array([edge for edge, _ in rows], pa.string()))


def kept_records(channels: Sequence[tuple[int, Channel]]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """What makes each record the same as another, whichever subtask keeps it; and the record as JSON values."""
    for index, channel in channels:
        for *_, output, _batch, stamp, key, value, key_record, record in _rows(index, channel)[0]:
            yield (channel.edge, output, stamp, key_record, record), \
                {"edge": channel.edge, "timestamp": stamp, "key": to_plain(key), "value": to_plain(value)}


def ends_of(edge: str, uids: set[str]) -> tuple[str, str]:
    """Sender and receiver of an edge id; uids may hold the signs that separate them, so what there is decides."""
    for cut in (place for place in range(len(edge)) if edge.startswith("->", place)):
        source, target = edge[:cut], edge[cut + 2:].rpartition("#")[0]
        sender = next((uid for uid in uids if source == uid or source.startswith(f"{uid}:")), None)
        if sender is not None and target in uids:
            return sender, target
    source, _, target = edge.partition("->")
    return source.partition(":")[0], target.rpartition("#")[0]


def renamed_edge(edge: str, uids: set[str], renames: Mapping[str, str]) -> str:
    """The edge id under other uids."""
    sender, receiver = ends_of(edge, uids)
    tag = edge[len(sender):edge.index("->", len(sender))]
    number = edge.rpartition("#")[2]
    return f"{renames.get(sender, sender)}{tag}->{renames.get(receiver, receiver)}#{number}"


# -- rows

_FIXED = pa.schema([pa.field(SUBTASK, pa.int32(), False), pa.field("sender", pa.int32(), False),
                    pa.field("receiver", pa.int32(), False), pa.field("output", pa.bool_(), False),
                    pa.field("batch", pa.int64(), False), pa.field("timestamp", pa.int64())])
_Row = tuple[int, int, int, bool, int, int | None, Any, Any, bytes | None, bytes]


def _rows(subtask: int, channel: Channel) -> tuple[list[_Row], Any]:
    """A channel's records as rows, and its record type."""
    rows: list[_Row] = []
    record_type = None
    for number, batch in enumerate(channel.batches):
        if batch[:1] != bytes([RECORDS_VERSION]):
            raise IncompatibleState("stored records have a version that this release does not read", edge=channel.edge,
                                    expected=RECORDS_VERSION, found=batch[0] if batch else None)
        try:
            values, stamps, keys, typed = _decode_batch(memoryview(batch)[1:])
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise CorruptData(f"stored records can't be decoded: {error}", edge=channel.edge) from error
        record_type = typed or record_type
        shown = RecordCodec(_shape(typed)).decode(batch)
        for place, raw in enumerate(values):
            rows.append((subtask, channel.sender, channel.receiver, channel.output, number,
                         stamps[place] if stamps is not None else None,
                         shown.keys[place] if shown.keys is not None else None, shown.values[place],
                         bytes(keys[place]) if keys is not None else None, bytes(raw)))
    return rows, record_type


def _shape(record_type: Any) -> Any:
    """Something that takes a record's fields and is a dict of them, so that no class of the flow is needed."""
    if record_type is None:
        return None
    names = tuple(map(str, record_type[1]))

    class Shape:
        _fields = names

        def __new__(cls, *fields: Any) -> Any:
            return dict(zip(names, fields, strict=True))

    return Shape


def _table(rows: Sequence[_Row]) -> pa.Table:
    columns = list(zip(*rows)) if rows else [()] * 10
    arrays = [pa.array(column, field.type) for column, field in zip(columns, _FIXED)]
    fields = [*_FIXED, *(pa.field(name, array.type) for name, array in zip(("key", "value"), _shown(columns)))]
    return pa.Table.from_arrays([*arrays, *_shown(columns), pa.array(columns[8], pa.binary()),
                                 pa.array(columns[9], pa.binary())],
                                schema=pa.schema([*fields, pa.field("key_record", pa.binary()),
                                                  pa.field("record", pa.binary(), False)]))


def _shown(columns: Sequence[Sequence[Any]]) -> list[pa.Array]:
    return [_typed(columns[6]), _typed(columns[7])]


def _typed(values: Sequence[Any]) -> pa.Array:
    """A column of Arrow's type for these values, or of JSON text where it has none that Parquet holds."""
    try:
        array = pa.array(values)
        if _storable(array.type) and array.to_pylist() == list(values):
            return array
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        pass  # values of several types, which JSON text shows as well
    return pa.array([None if value is None else json.dumps(to_plain(value)) for value in values], pa.string())


def _storable(kind: pa.DataType) -> bool:
    """Parquet has no struct without fields, and a column of nulls has no type to show."""
    if pa.types.is_null(kind):
        return False
    children = [kind.field(index) for index in range(kind.num_fields)]
    return (not pa.types.is_struct(kind) or bool(children)) and \
        all(_storable(child.type) or pa.types.is_null(child.type) for child in children)


def _note(uid: str, subtask: int, channels: Sequence[Mapping[str, Any]]) -> StateFile:
    data = json.dumps({"format": OPEN_FORMAT, "version": OPEN_VERSION, "channels": list(channels)}).encode()
    name = f"{escape_name(uid)}/inflight/subtask-{subtask}.json"
    return StateFile(name, len(data), xxhash.xxh3_128_hexdigest(data), inline=data)


def _read_channel(item: Mapping[str, Any], source: SnapshotSource, tables: dict[str, pa.Table]) -> ChannelPart:
    file = StateFile.from_json(item["file"])
    if file.path not in tables:
        tables[file.path] = read_table(file, source, ["batch", "timestamp", "key_record", "record"])
    begin, end = item["rows"]
    rows = tables[file.path].slice(begin, end - begin)
    if rows.num_rows != end - begin:
        raise CorruptData("a file of records in flight has fewer rows than noted", path=file.path, expected=end,
                          found=tables[file.path].num_rows)
    batches = list(_batches(rows, item.get("record_type")))
    return (str(item["edge"]), int(item["sender"]), int(item["receiver"]), bool(item["output"]), batches,
            tuple(int(number) for number in item.get("receivers", ())))


def _batches(rows: pa.Table, record_type: Any) -> Iterator[bytes]:
    columns = zip(*(rows.column(name).to_pylist() for name in ("batch", "timestamp", "key_record", "record")))
    for _, group in groupby(columns, key=lambda row: row[0]):
        _, stamps, keys, records = zip(*group)
        body: list[Any] = [[msgspec.Raw(record) for record in records],
                           None if all(stamp is None for stamp in stamps) else list(stamps),
                           None if keys[0] is None else [msgspec.Raw(key) for key in keys], record_type]
        yield bytes([RECORDS_VERSION]) + msgspec.msgpack.encode(body)

"""An opened savepoint or checkpoint: what is in it, from metadata alone, and its rows, by key, key group or predicate."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from checkpoint.storage.files import CheckpointSource
from checkpoint.storage.metadata import CheckpointMetadata, OperatorEntry
from checkpoint.storage.opening import locate, open_checkpoint
from savepoint.columns import StateLayout
from savepoint.format import OPEN_FORMAT
from savepoint.operators import operator_table, operator_types
from savepoint.scan import keep_keys, require_columns, scan_state
from savepoint.uniting import same_layout, united
from statebackend.backend import KeyedHandle
from statebackend.errors import CorruptData, IncompatibleState, InvalidRequest, NotFound
from statebackend.files import StateFile
from statebackend.keygroups import KeyGroupRange, key_grouper
from statebackend.operator_state import OperatorStatePart
from statebackend.schema import StateSchema
from statebackend.types import StateType, state_type_from_json

if TYPE_CHECKING:
    import pyarrow.dataset as ds

    from savepoint.inflight import Channel


@dataclass(frozen=True)
class StateInfo:
    """One state of one operator. `rows` and `size` are None where only reading would tell (native formats).

    kind is value, list, map, reducing, aggregating, timer, or for operator state split, union, broadcast.
    """

    uid: str
    name: str
    kind: str
    key_type: str | None
    value_type: str
    map_key_type: str | None
    namespace_type: str | None
    ttl_ms: int | None
    rows: int | None
    size: int | None


@dataclass(frozen=True)
class OperatorInfo:
    """One operator. `stored` is the bytes of its files.

    in_flight: records in flight by edge; None where only reading would tell (native), and the edge is "" then.
    """

    uid: str
    name: str
    parallelism: int
    max_parallelism: int
    key_type: str | None
    stored: int
    states: tuple[StateInfo, ...]
    in_flight: dict[str, int | None]


class Savepoint:
    """Open it with `savepoint.open(path)` and close it. Read-only; usable from several threads."""

    def __init__(self, url: str, metadata: CheckpointMetadata, source: CheckpointSource) -> None:
        self.url, self.metadata, self.source = url, metadata, source
        self._handles: dict[str, list[KeyedHandle]] = {}
        self._schemas: dict[str, dict[str, list[StateSchema]]] = {}

    # -- what is in it

    @property
    def format(self) -> str:
        return self.metadata.format

    def operators(self) -> list[OperatorInfo]:
        """Every operator with its states; no data is read."""
        return [self._operator_info(entry) for entry in self.metadata.operators]

    def states(self, uid: str | None = None) -> list[StateInfo]:
        """Every state, of one operator or of all."""
        entries = self.metadata.operators if uid is None else (self.entry(uid),)
        return [state for entry in entries for state in self._operator_info(entry).states]

    def state_names(self) -> set[str]:
        """Every state as `operator.state`."""
        return {f"{state.uid}.{state.name}" for state in self.states()}

    def entry(self, uid: str) -> OperatorEntry:
        """The metadata of one operator; a wrong name is answered with the nearest ones."""
        found = self.metadata.operator(uid)
        if found is None:
            raise NotFound(f"the savepoint has no operator {uid!r}", path=self.url,
                           hint=_nearest(uid, [entry.uid for entry in self.metadata.operators]))
        return found

    def handles(self, uid: str) -> list[KeyedHandle]:
        """The keyed handles of an operator in order of key groups."""
        if uid not in self._handles:
            handles = [handle for subtask in self.entry(uid).subtasks for handle in subtask.keyed]
            self._handles[uid] = sorted(handles, key=lambda handle: handle.key_groups.first)
        return self._handles[uid]

    def schema(self, uid: str, state: str) -> StateSchema:
        """The schema of a keyed state or of timers, to which parts that have it under another are migrated as they are read.

        `IncompatibleState` where the parts have schemas of which none can become the other.
        """
        found = self._stored_schemas(uid).get(state)
        if found is None:
            raise NotFound(f"operator {uid!r} has no keyed state {state!r}", path=self.url,
                           hint=_nearest(state, [info.name for info in self.states(uid)]))
        return united(found)

    def schemas(self, uid: str) -> list[StateSchema]:
        """The schemas of all keyed states of an operator, by state id; one of several where its parts can't be united."""
        found = [_united_or_first(schemas) for schemas in self._stored_schemas(uid).values()]
        return sorted(found, key=lambda schema: schema.state_id)

    def schemas_of(self, uid: str, handle: KeyedHandle) -> tuple[StateSchema, ...]:
        """What the states of a handle have to be migrated to so that all parts are alike: its own schemas where they are,
        and where its parts can't be united."""
        return tuple(self._aim_of(uid, stored) for stored in handle.schemas)

    def key_type(self, uid: str) -> StateType:
        handles = self.handles(uid)
        if not handles:
            raise NotFound(f"operator {uid!r} has no keyed state", path=self.url)
        return state_type_from_json(handles[0].key_type)

    def max_parallelism(self, uid: str) -> int:
        """How many key groups the keyed state of an operator has."""
        handles = self.handles(uid)
        return handles[0].max_parallelism if handles else self.entry(uid).max_parallelism

    def key_groups(self, uid: str, state: str | None = None) -> pa.Table:
        """Rows and bytes of each key group, with the subtask that owns it: from metadata; null where it is not told."""
        from savepoint.statistics import key_group_table

        return key_group_table(self, uid, state)

    def largest_keys(self, uid: str, state: str) -> list[dict[str, Any]]:
        """The keys with the most bytes, as their writer recorded them: key, rows, bytes."""
        from savepoint.statistics import largest_keys

        return largest_keys(self, uid, state)

    # -- rows

    def read(self, uid: str, state: str, *, keys: Iterable[Any] | None = None,
             key_groups: int | KeyGroupRange | Iterable[int] | None = None, where: ds.Expression | str | None = None,
             columns: Sequence[str] | None = None) -> pa.RecordBatchReader:
        """The rows of a state as an Arrow stream, sorted by key group and key.

        keys        only these keys; one row group is read for each
        key_groups  a group, a range or several groups
        where       a pyarrow dataset expression, or SQL text such as "value > 10"
        columns     only these columns
        """
        if isinstance(where, str):
            from savepoint.query import filtered

            return filtered(self, uid, state, where, keys=keys, key_groups=key_groups, columns=columns)
        if self.is_operator_state(uid, state):
            return self._read_operator_state(uid, state, where, columns)
        wanted = None if keys is None else list(keys)
        ranges = self.ranges(uid, wanted, key_groups)
        scan = scan_state(self, uid, state, ranges, None if wanted is not None else columns, where, wanted)
        batches: Iterator[pa.RecordBatch] = scan.batches
        if wanted is not None:
            require_columns(columns, scan.arrow_schema.names, state)
            batches = keep_keys(batches, self.key_type(uid), wanted, columns)
        return pa.RecordBatchReader.from_batches(_chosen(scan.arrow_schema, columns), batches)

    def column_types(self, uid: str, state: str) -> dict[str, StateType]:
        """The state types of a state's columns, where they have one: what prints values needs them to print UUIDs."""
        if self.is_operator_state(uid, state):
            part = next(part for _, parts in self.operator_parts(uid) for part in parts if part.name == state)
            map_key_type, value_type = operator_types(part)
            return {"value": value_type, "map_value": value_type} | ({"map_key": map_key_type} if map_key_type else {})
        from savepoint.transform import column_kinds

        return column_kinds(StateLayout(self.schema(uid, state), self.key_type(uid)))

    def to_pandas(self, uid: str, state: str, **options: Any) -> Any:
        """The rows as a pandas frame; takes what `read` takes."""
        return self.read(uid, state, **options).read_pandas()

    def to_polars(self, uid: str, state: str, **options: Any) -> Any:
        """The rows as a polars frame; takes what `read` takes."""
        import polars

        return polars.from_arrow(self.read(uid, state, **options).read_all())

    def lookup(self, uid: str, state: str, key: Any, *, namespace: Any = None) -> Any:
        """What the state holds for a key: a value, a list or a dict; `NotFound` with near keys where it has none."""
        from savepoint.lookup import lookup

        return lookup(self, uid, state, key, namespace)

    def query(self, sql: str, *, seconds: float | None = None) -> pa.RecordBatchReader:
        """Run a SELECT over states as tables `operator.state` (DuckDB, read-only, confined to this savepoint)."""
        from savepoint.query import query

        return query(self, sql, seconds=seconds)

    # -- files

    def open_file(self, file: StateFile) -> AbstractContextManager[Any]:
        """A path or a seekable stream of a file, not verified: look-ups must not read all of it."""
        if file.inline is not None:
            return self.source.open(file)
        local = self.source.store.local_path(file.path)
        if local is not None:
            if not local.is_file():
                raise NotFound("a file of the savepoint is missing", path=str(local),
                               hint="the copy is not complete; copy the folder again")
            if local.stat().st_size != file.size:
                raise CorruptData("a file of the savepoint has another size than recorded", path=str(local),
                                  expected=file.size, found=local.stat().st_size,
                                  hint="the copy is not complete; copy the folder again")
            return nullcontext(str(local))
        return closing(self.source.store.open(file.path))

    def operator_parts(self, uid: str) -> list[tuple[int, tuple[OperatorStatePart, ...]]]:
        """The operator state of each subtask that has any."""
        from statebackend.formats import operator_state

        return [(subtask.index, operator_state(subtask.operator, self.source).parts)
                for subtask in self.entry(uid).subtasks if subtask.operator is not None]

    def is_operator_state(self, uid: str, state: str) -> bool:
        """Whether an operator has a state of this name that is not keyed."""
        if any(schema.name == state for handle in self.handles(uid) for schema in handle.schemas):
            return False
        return any(part.name == state for _, parts in self.operator_parts(uid) for part in parts)

    def channels(self, uid: str) -> list[tuple[int, list[Channel]]]:
        """The records in flight of each subtask that has any, by channel (snapshots of unaligned checkpoints)."""
        from savepoint.inflight import stored_channels

        return [(subtask.index, stored_channels(subtask.in_flight, self.source)) for subtask in self.entry(uid).subtasks
                if subtask.in_flight is not None]

    def edges(self) -> list[str]:
        """The edges with records in flight; reads them where they are not in the open format."""
        return sorted({channel.edge for entry in self.metadata.operators for _, held in self.channels(entry.uid)
                       for channel in held})

    def in_flight(self, edge: str) -> pa.Table:
        """The records in flight on an edge, `sender->receiver#0`: operator, subtask, sender, receiver, output, batch,
        timestamp, key, value. The operator and subtask are those that keep them."""
        from savepoint.inflight import channel_table

        found = [(entry.uid, index, channel) for entry in self.metadata.operators
                 for index, held in self.channels(entry.uid) for channel in held if channel.edge == edge]
        if not found:
            raise NotFound(f"there are no records in flight on an edge {edge!r}", path=self.url,
                           hint=_nearest(edge, self.edges()))
        return channel_table(found)

    def kept_in_flight(self, uid: str) -> pa.Table:
        """The records in flight that an operator keeps, on whatever edge: edge, subtask, sender, receiver, output, batch,
        timestamp, key, value. In SQL it is the table `uid.inflight`."""
        from savepoint.inflight import kept_table

        return kept_table([(index, channel) for index, held in self.channels(uid) for channel in held])

    def close(self) -> None:
        self.source.close()

    def __enter__(self) -> Savepoint:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    # -- inner workings

    def _stored_schemas(self, uid: str) -> dict[str, list[StateSchema]]:
        """By state, the schemas under which parts have it: one, as a rule."""
        if uid not in self._schemas:
            found: dict[str, list[StateSchema]] = {}
            for schema in (schema for handle in self.handles(uid) for schema in handle.schemas):
                if schema not in found.setdefault(schema.name, []):
                    found[schema.name].append(schema)
            self._schemas[uid] = found
        return self._schemas[uid]

    def _aim_of(self, uid: str, stored: StateSchema) -> StateSchema:
        try:
            aim = self.schema(uid, stored.name)
        except IncompatibleState:
            return stored
        return stored if same_layout(stored, aim) else replace(aim, state_id=stored.state_id)

    def _operator_info(self, entry: OperatorEntry) -> OperatorInfo:
        from savepoint.statistics import in_flight_counts, keyed_infos, operator_state_infos

        handles = self.handles(entry.uid)
        key_type = str(state_type_from_json(handles[0].key_type)) if handles else None
        states = (*keyed_infos(self, entry, key_type), *operator_state_infos(self, entry))
        stored = {file.path: file.size for file in entry.files()}
        return OperatorInfo(entry.uid, entry.name, entry.parallelism, entry.max_parallelism, key_type,
                            sum(stored.values()), states, in_flight_counts(entry))

    def _read_operator_state(self, uid: str, state: str, where: ds.Expression | None,
                             columns: Sequence[str] | None) -> pa.RecordBatchReader:
        found = [(index, part) for index, parts in self.operator_parts(uid) for part in parts if part.name == state]
        table = operator_table(found, *operator_types(found[0][1]))
        require_columns(columns, table.column_names, state)
        if where is not None:
            table = table.filter(where)
        return (table.select(list(columns)) if columns is not None else table).to_reader()

    def ranges(self, uid: str, keys: Iterable[Any] | None,
               key_groups: int | KeyGroupRange | Iterable[int] | None) -> list[KeyGroupRange]:
        """The key groups to read for these keys and groups, as ranges in order."""
        limit = self.max_parallelism(uid)
        wanted = _as_ranges(key_groups, limit)
        if keys is None:
            return wanted
        key_type = self.key_type(uid)
        group_of = key_grouper(key_type, limit)
        groups = set()
        for key in keys:
            key_type.check(key)
            groups.add(group_of(key))
        return [KeyGroupRange(group, group) for group in sorted(groups)
                if any(group in span for span in wanted)]


def open_savepoint(path: str | os.PathLike[str], **options: Any) -> Savepoint:
    """Open a savepoint or checkpoint: its folder or its `_metadata`, local or any fsspec URL. Nothing else is read."""
    url = os.fspath(path)
    metadata, source = open_checkpoint(url, **options)
    return Savepoint(locate(url, **options).url, metadata, source)


def is_open(metadata: CheckpointMetadata) -> bool:
    """Whether all keyed state is in the open format."""
    return metadata.format == OPEN_FORMAT


def _united_or_first(schemas: Sequence[StateSchema]) -> StateSchema:
    try:
        return united(schemas)
    except IncompatibleState:
        return schemas[0]


def _as_ranges(key_groups: int | KeyGroupRange | Iterable[int] | None, limit: int) -> list[KeyGroupRange]:
    if key_groups is None:
        return [KeyGroupRange(0, limit - 1)]
    if isinstance(key_groups, KeyGroupRange):
        groups: list[int] = [key_groups.first, key_groups.last]
        ranges = [key_groups]
    else:
        groups = sorted({key_groups} if isinstance(key_groups, int) else set(key_groups))
        ranges = [KeyGroupRange(group, group) for group in groups]
    if groups and (groups[0] < 0 or groups[-1] >= limit):
        raise InvalidRequest("there is no such key group", expected=f"0..{limit - 1}", found=groups[-1])
    return ranges


def _chosen(schema: pa.Schema, columns: Sequence[str] | None) -> pa.Schema:
    return schema if columns is None else pa.schema([schema.field(name) for name in columns])


def _nearest(wanted: str, known: Sequence[str]) -> str:
    near = get_close_matches(wanted, known, n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    shown = ", ".join(list(known)[:10])
    return f"it has {shown}" if shown else "it has none"


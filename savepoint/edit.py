"""Edits entries of a savepoint: plans the change as a diff, then writes a new savepoint; the old one stays as it is.

Files of states that a patch does not touch are copied, not rewritten.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pyarrow as pa

from checkpoint.storage.metadata import CheckpointMetadata, OperatorEntry
from savepoint.columns import StateLayout
from savepoint.convert import Meter, Progress, savepoint_head
from savepoint.copying import Copier
from savepoint.destination import Destination
from savepoint.format import EXPIRES_AT, KEY, LIST_INDEX, MAP_KEY, MAP_VALUE, NAMESPACE, OPEN_FORMAT, TIMESTAMP, VALUE
from savepoint.inflight import noted_files
from savepoint.opened import open_savepoint
from savepoint.operator_edit import OperatorOperation, edited_parts
from savepoint.operators import write_operator_states
from savepoint.parts import StateStatistics
from savepoint.patch import Operation, checked
from savepoint.reader import state_meta
from savepoint.replacement import Entries, Place, Replacement, Touched, with_replacement
from savepoint.rewrite import as_open
from savepoint.transform import column_kinds
from savepoint.values import plain_value, to_plain
from savepoint.writer import OpenHandleWriter, open_handle
from statebackend.backend import KeyedHandle
from statebackend.clock import Clock, SystemClock
from statebackend.descriptors import StateKind
from statebackend.errors import InvalidRequest
from statebackend.files import StateFile
from statebackend.schema import StateSchema
from statebackend.ttl import NEVER, expires_at

_SUFFIXES = {"map": MAP_KEY, "list": LIST_INDEX, "timer": TIMESTAMP}
"""The column that names an entry within its key and namespace, by kind of state."""


class Edit:
    """A planned edit. `plan` is what will change; `write` carries it out into a new folder. Close it when done."""

    def __init__(self, source: str | os.PathLike[str], operations: Iterable[Mapping[str, Any]], *,
                 clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._stack = ExitStack()
        try:
            stored = self._stack.enter_context(open_savepoint(source))
            patch = checked(stored, operations)
            if not patch:
                raise InvalidRequest("the patch is empty", hint="give operations in a file, or --set and --delete")
            self._stored = stored
            self._opened = self._stack.enter_context(as_open(stored))
            self._touched = self._apply([item for item in patch if isinstance(item, Operation)])
            self._operators = edited_parts(self._opened, [item for item in patch if isinstance(item, OperatorOperation)])
        except BaseException:
            self._stack.close()
            raise

    def plan(self) -> list[dict[str, Any]]:
        """Every entry that will differ, in the rows of a diff: operator, state, change, key columns, before, after."""
        keyed = [row for (uid, _), touched in self._touched.items() for row in _differences(uid, touched)]
        return keyed + [row for edited in self._operators.values() for row in edited.plan]

    def write(self, destination: str | os.PathLike[str], *, progress: Progress | None = None) -> CheckpointMetadata:
        """Write the edited savepoint into a folder that must not exist."""
        with Destination(destination) as place:
            meter = Meter(progress, self._opened.metadata.full_size)
            copier = Copier(self._opened.source, place, meter.advance)
            entries = tuple(self._operator(entry, place, copier) for entry in self._opened.metadata.operators)
            metadata = replace(savepoint_head(self._stored.metadata, OPEN_FORMAT), operators=entries)
            place.publish(metadata)
            return metadata

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Edit:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    # -- planning

    def _apply(self, patch: list[Operation]) -> dict[tuple[str, str], Touched]:
        found: dict[tuple[str, str], Touched] = {}
        for uid, state in dict.fromkeys((item.uid, item.schema.name) for item in patch):
            mine = [item for item in patch if (item.uid, item.schema.name) == (uid, state)]
            touched = self._load(uid, mine)
            for item in mine:
                _apply_one(item, touched, self._opened.key_type(uid), self._clock.now_ms())
            found[uid, state] = touched
        return found

    def _load(self, uid: str, operations: list[Operation]) -> Touched:
        schema, key_type = operations[0].schema, self._opened.key_type(uid)
        keys = {key_type.encode_key(item.key): item.key for item in operations}
        table = self._opened.read(uid, schema.name, keys=list(keys.values())).read_all()
        layout = StateLayout(schema, key_type)
        touched = Touched(schema, layout, {}, {}, keys, {b"": None})
        columns = _python_columns(table, layout)
        for row in range(table.num_rows):
            place = _place(touched, key_type.encode_key(columns[KEY][row]), columns.get(NAMESPACE, {}), row)
            suffix = next((columns[name][row] for name in _SUFFIXES.values() if name in columns), None)
            value = next((columns[name][row] for name in (VALUE, MAP_VALUE) if name in columns), True)
            expiry = columns[EXPIRES_AT][row] if EXPIRES_AT in columns else None
            touched.before.setdefault(place, {})[suffix] = (value, expiry)
        touched.after = {place: dict(entries) for place, entries in touched.before.items()}
        return touched

    # -- writing

    def _operator(self, entry: OperatorEntry, place: Destination, copier: Copier) -> OperatorEntry:
        edited = self._operators.get(entry.uid)
        written = {} if edited is None else write_operator_states(place.create, entry.uid, edited.parts)
        subtasks = []
        for subtask in entry.subtasks:
            keyed = tuple(self._handle(entry.uid, handle, place, copier) for handle in subtask.keyed)
            flying = noted_files(subtask.in_flight)
            kept = [file for file in subtask.operator_files if edited is None or file.path in flying]
            note, files = written.get(subtask.index, (subtask.operator, ()))
            subtasks.append(replace(
                subtask, keyed=keyed, operator=note,
                operator_files=(*files, *(copier.copy(file, file.path) for file in kept)),
                in_flight=subtask.in_flight and copier.copy(subtask.in_flight, subtask.in_flight.path),
                input_channels=copier.channels(subtask.input_channels, entry.uid),
                output_channels=copier.channels(subtask.output_channels, entry.uid)))
        return replace(entry, subtasks=tuple(subtasks))

    def _handle(self, uid: str, handle: KeyedHandle, place: Destination, copier: Copier) -> KeyedHandle:
        files: list[StateFile] = []
        statistics: dict[str, StateStatistics] = {}
        meta = state_meta(handle)
        for schema in handle.schemas:
            replaced = self._replacement(uid, schema, handle)
            if replaced is None:
                statistics[schema.name] = StateStatistics.from_json(meta.get(schema.name, {}), len(handle.key_groups))
                paths = {part["path"] for part in statistics[schema.name].parts}
                files += [copier.copy(file, file.path) for file in handle.files if file.path in paths]
                continue
            written = self._rewritten(uid, handle, schema, replaced, place)
            files += written.files
            statistics[schema.name] = StateStatistics.from_json(state_meta(written)[schema.name],
                                                                len(handle.key_groups))
        return open_handle(handle.key_type, handle.max_parallelism, handle.key_groups, handle.schemas, files, statistics)

    def _replacement(self, uid: str, schema: StateSchema, handle: KeyedHandle) -> Replacement | None:
        touched = self._touched.get((uid, schema.name))
        if touched is None:
            return None
        replacement = Replacement.of(touched, handle.max_parallelism)
        return replacement if any(group in handle.key_groups for group in replacement.groups) else None

    def _rewritten(self, uid: str, handle: KeyedHandle, schema: StateSchema, replacement: Replacement,
                   place: Destination) -> KeyedHandle:
        rows = int(state_meta(handle).get(schema.name, {}).get("rows", 0))
        writer = OpenHandleWriter(place.create, uid, handle.key_type, handle.max_parallelism, handle.key_groups,
                                  [schema], {schema.name: rows})
        try:
            for batch in with_replacement(self._opened, handle, schema, replacement):
                writer.write(schema.name, batch)
            return writer.finish()
        except BaseException:
            writer.abort()
            raise


def _python_columns(table: pa.Table, layout: StateLayout) -> dict[str, Any]:
    kinds = column_kinds(layout)
    columns: dict[str, Any] = {}
    for name in table.column_names:
        column = table.column(name).combine_chunks()
        if name == EXPIRES_AT:
            columns[name] = [NEVER if value is None else value for value in column.cast(pa.int64()).to_pylist()]
        else:
            columns[name] = kinds[name].from_arrow(column) if name in kinds else column.to_pylist()
    return columns


def _place(touched: Touched, key: bytes, namespaces: Any, row: int) -> Place:
    namespace = namespaces[row] if namespaces else None
    encoded = b"" if namespace is None else touched.schema.namespace_type.encode_key(namespace)  # type: ignore[union-attr]
    touched.namespaces[encoded] = namespace
    return key, encoded


def _apply_one(item: Operation, touched: Touched, key_type: Any, now_ms: int) -> None:
    schema = touched.schema
    place = _place(touched, key_type.encode_key(item.key), [item.namespace], 0)
    entries = touched.after.setdefault(place, {})
    ttl = schema.ttl
    fresh = None if ttl is None else expires_at(now_ms, ttl.ttl_ms)
    expiry = item.expires_at if item.expires_at is not None else fresh
    if item.op == "delete":
        _delete(item, entries, schema)
    elif schema.kind == StateKind.MAP and not item.has_map_key:
        touched.after[place] = {key: (value, expiry) for key, value in item.value.items()}
    elif schema.kind == StateKind.LIST and item.list_index is None:
        touched.after[place] = {index: (value, expiry) for index, value in enumerate(item.value)}
    else:
        suffix = item.suffix
        if item.list_index is not None and item.list_index > len(entries):
            raise InvalidRequest("a list can only grow at its end", state=schema.name, expected=f"0..{len(entries)}",
                                 found=item.list_index)
        kept = entries.get(suffix, (None, None))[1] if item.expires_at is None else None
        entries[suffix] = (item.value, kept if kept is not None else expiry)


def _delete(item: Operation, entries: Entries, schema: StateSchema) -> None:
    suffix = item.suffix
    if not entries or (not item.whole and suffix not in entries):
        raise InvalidRequest("the entry that is to be deleted is not there", state=schema.name, key=to_plain(item.key),
                             hint="look it up with savepoint read --key")
    if item.whole:
        entries.clear()
        return
    del entries[suffix]
    if schema.kind == StateKind.LIST:
        shifted = [entries[index] for index in sorted(entries)]
        entries.clear()
        entries.update(enumerate(shifted))


def _differences(uid: str, touched: Touched) -> Iterator[dict[str, Any]]:
    suffix_name, schema = _SUFFIXES.get(touched.schema.kind), touched.schema
    for place in sorted({*touched.before, *touched.after}):
        before, after = touched.before.get(place, {}), touched.after.get(place, {})
        for suffix in dict.fromkeys([*before, *after]):
            old, new = before.get(suffix), after.get(suffix)
            if old == new:
                continue
            change = "added" if old is None else "removed" if new is None else "changed"
            row: dict[str, Any] = {"operator": uid, "state": touched.schema.name, "change": change,
                                   KEY: plain_value(touched.keys[place[0]], touched.layout.key_type)}
            if touched.schema.namespace_type is not None:
                row[NAMESPACE] = plain_value(touched.namespaces[place[1]], schema.namespace_type)
            if suffix_name is not None:
                row[suffix_name] = plain_value(suffix, schema.map_key_type)
            kind = None if schema.kind == StateKind.TIMER else schema.value_type
            yield {**row, "before": None if old is None else plain_value(old[0], kind),
                   "after": None if new is None else plain_value(new[0], kind),
                   **({EXPIRES_AT: _moment(new[1])} if schema.ttl is not None and new is not None else {})}


def _moment(expiry: int | None) -> str | None:
    """A time of expiry as `read` prints it."""
    if expiry in (None, NEVER):
        return None
    return str(to_plain(pa.scalar(expiry, pa.int64()).cast(pa.timestamp("ms", "UTC")).as_py()))

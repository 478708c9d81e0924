"""Operator state in the open format: a Parquet file a state, and in each subtask's place a note of which rows are its.

Columns: `subtask, index, value` for lists, `subtask, map_key, map_value` for broadcast maps. Where all subtasks hold
the same broadcast map, as they should, it is stored once and has no `subtask` column.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import xxhash

from savepoint.format import (
    ELEMENT_INDEX,
    MAP_KEY,
    MAP_VALUE,
    OPEN_FORMAT,
    OPEN_VERSION,
    SUBTASK,
    VALUE,
    escape_name,
    operator_path,
)
from savepoint.parquet_files import read_table, write_table
from statebackend.errors import CorruptData, IncompatibleState
from statebackend.files import FileWriter, SnapshotSource, StateFile
from statebackend.operator_state import Distribution, OperatorStatePart, OperatorStateSnapshot
from statebackend.types import StateType, state_type_from_json

Held = Sequence[tuple[int, OperatorStatePart]]
"""One state of several subtasks: (subtask, part)."""


def operator_types(part: OperatorStatePart) -> tuple[StateType | None, StateType]:
    """Map key type (broadcast only) and value type of a stored part."""
    key = None if part.map_key_type is None else state_type_from_json(part.map_key_type)
    return key, state_type_from_json(part.value_type)


def operator_table(held: Held, map_key_type: StateType | None, value_type: StateType) -> pa.Table:
    """All rows of a state, subtask after subtask."""
    subtasks = [index for index, part in held for _ in range(len(part.elements) or len(part.pairs))]
    columns: dict[str, pa.Array] = {SUBTASK: pa.array(subtasks, pa.int32())}
    if map_key_type is None:
        elements = pa.array([element for _, part in held for element in part.elements], pa.binary())
        columns[ELEMENT_INDEX] = pa.array([n for _, part in held for n in range(len(part.elements))], pa.int64())
        columns[VALUE] = value_type.decode_array(elements)
    else:
        pairs = [pair for _, part in held for pair in part.pairs]
        columns[MAP_KEY] = map_key_type.decode_key_array(pa.array([key for key, _ in pairs], pa.binary()))
        columns[MAP_VALUE] = value_type.decode_array(pa.array([value for _, value in pairs], pa.binary()))
    return pa.table(columns)


def write_operator_states(create: Callable[[str], FileWriter], uid: str,
                          subtasks: Sequence[tuple[int, Sequence[OperatorStatePart]]],
                          ) -> dict[int, tuple[StateFile, tuple[StateFile, ...]]]:
    """Write every state of an operator; for each subtask the note and the files that it points to."""
    notes: dict[int, list[dict[str, Any]]] = {index: [] for index, _ in subtasks}
    files: dict[int, list[StateFile]] = {index: [] for index, _ in subtasks}
    names = dict.fromkeys(part.name for _, parts in subtasks for part in parts)
    for name in names:
        held = [(index, part) for index, parts in subtasks for part in parts if part.name == name]
        for index, file, begin, end in _write_state(create, uid, held):
            part = next(part for owner, part in held if owner == index)
            notes[index].append({
                "name": name, "distribution": part.distribution.value, "value_type": dict(part.value_type),
                "map_key_type": None if part.map_key_type is None else dict(part.map_key_type),
                "file": file.to_json(), "rows": [begin, end]})
            files[index].append(file)
    return {index: (_note(uid, index, states), tuple(files[index])) for index, states in notes.items()}


def _write_state(create: Callable[[str], FileWriter], uid: str, held: Held) -> list[tuple[int, StateFile, int, int]]:
    first = held[0][1]
    broadcast = first.distribution is Distribution.BROADCAST
    once = broadcast and all(part.pairs == first.pairs for _, part in held)
    table = operator_table(held[:1] if once else held, *operator_types(first))
    if once:
        table = table.drop_columns([SUBTASK])
    file = write_table(create(operator_path(uid, first.name, broadcast=broadcast)), table,
                       {"holdfast.format": OPEN_FORMAT, "holdfast.version": str(OPEN_VERSION)})
    if once:
        return [(index, file, 0, table.num_rows) for index, _ in held]
    placed, begin = [], 0
    for index, part in held:
        end = begin + (len(part.pairs) if broadcast else len(part.elements))
        placed.append((index, file, begin, end))
        begin = end
    return placed


def _note(uid: str, subtask: int, states: Sequence[Mapping[str, Any]]) -> StateFile:
    data = json.dumps({"format": OPEN_FORMAT, "version": OPEN_VERSION, "states": list(states)}).encode()
    name = f"{escape_name(uid)}/operator/subtask-{subtask}.json"
    return StateFile(name, len(data), xxhash.xxh3_128_hexdigest(data), inline=data)


def read_operator_note(note: Mapping[str, Any], source: SnapshotSource) -> OperatorStateSnapshot:
    """The operator state of the subtask in whose place `note` stands."""
    if note.get("version") != OPEN_VERSION:
        raise IncompatibleState("an open savepoint has a version that this release does not read",
                                expected=OPEN_VERSION, found=note.get("version"), hint="use a newer release of holdfast")
    try:
        return OperatorStateSnapshot(tuple(_read_part(state, source) for state in note["states"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptData(f"a note of operator state can't be read: {error!r}") from error


def _read_part(state: Mapping[str, Any], source: SnapshotSource) -> OperatorStatePart:
    file = StateFile.from_json(state["file"])
    begin, end = state["rows"]
    table = read_table(file, source).slice(begin, end - begin).combine_chunks()
    part = OperatorStatePart(str(state["name"]), Distribution(state["distribution"]), state["value_type"],
                             state["map_key_type"])
    map_key_type, value_type = operator_types(part)
    if map_key_type is None:
        elements = _encoded(value_type, table.column(VALUE))
        return OperatorStatePart(part.name, part.distribution, part.value_type, None, elements=tuple(elements))
    keys = map_key_type.encode_key_array(table.column(MAP_KEY)).to_pylist()
    pairs = tuple(zip(keys, _encoded(value_type, table.column(MAP_VALUE))))
    return OperatorStatePart(part.name, part.distribution, part.value_type, part.map_key_type, pairs=pairs)


def _encoded(kind: StateType, column: pa.ChunkedArray) -> list[bytes]:
    encoded = kind.encode_array(column)
    return encoded.fill_null(kind.encode(None)).to_pylist() if encoded.null_count else encoded.to_pylist()  # type: ignore[no-any-return]

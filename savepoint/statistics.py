"""What a savepoint's metadata tells without reading data: rows and bytes by state, key group and subtask; large keys."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from checkpoint.storage.metadata import OperatorEntry
from savepoint.format import LARGEST_KEYS, OPEN_FORMAT
from savepoint.operators import operator_types
from savepoint.reader import state_meta
from statebackend.backend import KeyedHandle
from statebackend.errors import CorruptData

if TYPE_CHECKING:
    from savepoint.opened import Savepoint, StateInfo


def keyed_infos(savepoint: Savepoint, entry: OperatorEntry, key_type: str | None) -> Iterator[StateInfo]:
    """One `StateInfo` a keyed state of an operator."""
    from savepoint.opened import StateInfo

    handles = savepoint.handles(entry.uid)
    told = all(handle.format == OPEN_FORMAT for handle in handles)
    for schema in savepoint.schemas(entry.uid):
        rows = sum(sum(_numbers(handle, schema.name, "counts")) for handle in handles) if told else None
        size = sum(sum(_numbers(handle, schema.name, "sizes")) for handle in handles) if told else None
        yield StateInfo(entry.uid, schema.name, schema.kind, key_type, str(schema.value_type),
                        None if schema.map_key_type is None else str(schema.map_key_type),
                        None if schema.namespace_type is None else str(schema.namespace_type),
                        None if schema.ttl is None else schema.ttl.ttl_ms, rows, size)


def operator_state_infos(savepoint: Savepoint, entry: OperatorEntry) -> Iterator[StateInfo]:
    """One `StateInfo` an operator (list, union, broadcast) state."""
    from savepoint.opened import StateInfo

    parts = [part for _, held in savepoint.operator_parts(entry.uid) for part in held]
    for name in dict.fromkeys(part.name for part in parts):
        of_state = [part for part in parts if part.name == name]
        map_key_type, value_type = operator_types(of_state[0])
        rows = sum(len(part.elements) + len(part.pairs) for part in of_state)
        size = sum(sum(map(len, part.elements)) + sum(len(key) + len(value) for key, value in part.pairs)
                   for part in of_state)
        yield StateInfo(entry.uid, name, of_state[0].distribution.value, None, str(value_type),
                        None if map_key_type is None else str(map_key_type), None, None, rows, size)


def in_flight_counts(entry: OperatorEntry) -> dict[str, int | None]:
    """Records in flight by edge; under "" and None where only reading would tell."""
    from savepoint.inflight import noted_records

    found: dict[str, int | None] = {}
    for file in (subtask.in_flight for subtask in entry.subtasks if subtask.in_flight is not None):
        noted = noted_records(file)
        if noted is None:
            found[""] = None
        for edge, records in noted or ():
            found[edge] = records + (found.get(edge) or 0)
    return found


def key_group_table(savepoint: Savepoint, uid: str, state: str | None) -> pa.Table:
    """key_group, subtask, rows, bytes of an operator, of one state or of all together."""
    entry, handles = savepoint.entry(uid), savepoint.handles(uid)
    limit = savepoint.max_parallelism(uid)
    names = [savepoint.schema(uid, state).name] if state is not None else [s.name for s in savepoint.schemas(uid)]
    groups = np.arange(limit, dtype=np.int64)
    rows, sizes, told = np.zeros(limit, np.int64), np.zeros(limit, np.int64), np.zeros(limit, np.bool_)
    for handle in handles:
        if handle.format == OPEN_FORMAT:
            told[handle.key_groups.first:handle.key_groups.last + 1] = True
    for name in names:
        for which, totals in (("counts", rows), ("sizes", sizes)):  # many short lists: joined first, added up at once
            numbers = [number for handle in handles if handle.format == OPEN_FORMAT
                       for number in _numbers(handle, name, which)]
            if len(numbers) != np.count_nonzero(told):
                raise CorruptData("the key groups of subtasks overlap", operator=uid, state=name)
            totals[told] += np.asarray(numbers, np.int64)
    subtasks = groups * min(entry.parallelism, limit) // limit
    return pa.table({"key_group": _array(groups.astype(np.int32)), "subtask": _array(subtasks.astype(np.int32)),
                     "rows": _array(rows, told), "bytes": _array(sizes, told)})


def _array(numbers: npt.NDArray[Any], valid: npt.NDArray[np.bool_] | None = None) -> pa.Array:
    """An Arrow array over the numbers. `pa.array` would do, but it imports pandas, which takes longer than all the rest."""
    bits = None if valid is None or valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.Array.from_buffers(pa.from_numpy_dtype(numbers.dtype), len(numbers), [bits, pa.py_buffer(numbers)])


def largest_keys(savepoint: Savepoint, uid: str, state: str) -> list[dict[str, Any]]:
    """The largest keys of a state over all subtasks; empty where the writer recorded none."""
    name = savepoint.schema(uid, state).name
    found = (item for handle in savepoint.handles(uid) if handle.format == OPEN_FORMAT
             for item in state_meta(handle).get(name, {}).get("largest", ()))
    return [dict(item) for item in heapq.nlargest(LARGEST_KEYS, found, key=itemgetter("bytes"))]


def total_rows(handle: KeyedHandle) -> dict[str, int]:
    """Rows by state, where the handle tells; estimates by file size elsewhere."""
    if handle.format == OPEN_FORMAT:
        return {name: int(meta.get("rows", 0)) for name, meta in state_meta(handle).items()}
    share = handle.size // 32 // max(1, len(handle.schemas))
    return {schema.name: share for schema in handle.schemas}


def _numbers(handle: KeyedHandle, state: str, which: str) -> list[int]:
    """Counts or sizes of a state by key group of the handle's range."""
    meta = state_meta(handle).get(state)
    groups = len(handle.key_groups)
    if meta is None:
        return [0] * groups
    numbers: list[int] = meta.get(which, [])
    if len(numbers) != groups:
        raise CorruptData("a handle's statistics do not fit its range of key groups", state=state, expected=groups,
                          found=len(numbers))
    return numbers

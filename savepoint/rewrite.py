"""Writes operators of a new savepoint from rows: cuts them for subtasks, and adopts files that stay as they are."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from checkpoint.storage.metadata import OperatorEntry, SubtaskEntry
from savepoint.convert import Meter, to_open
from savepoint.destination import Destination
from savepoint.format import OPEN_FORMAT
from savepoint.inflight import Channel, write_channels
from savepoint.opened import Savepoint, open_savepoint
from savepoint.operators import write_operator_states
from savepoint.writer import OpenHandleWriter
from statebackend.backend import KeyedHandle
from statebackend.errors import InvalidRequest
from statebackend.keygroups import KeyGroupRange, key_group_range
from statebackend.operator_state import Distribution, OperatorStatePart, OperatorStateSnapshot, redistribute
from statebackend.schema import StateSchema
from statebackend.types import StateType

Rows = Callable[[KeyGroupRange], Iterator[pa.RecordBatch]]
Parts = Sequence[tuple[int, Sequence[OperatorStatePart]]]
"""Operator state: (subtask, its parts)."""


@dataclass(frozen=True)
class StateRows:
    """A keyed state to be written: its schema, and its rows of any range of key groups, sorted, as often as asked."""

    schema: StateSchema
    rows: Rows
    expected: Callable[[KeyGroupRange], int] = lambda _range: 0


@dataclass(frozen=True)
class OperatorRows:
    """An operator to be written."""

    uid: str
    name: str
    parallelism: int
    max_parallelism: int
    key_type: StateType | None = None
    states: tuple[StateRows, ...] = ()
    operator_parts: Parts = ()
    channels: tuple[Channel, ...] = ()


def write_operator(place: Destination, plan: OperatorRows, meter: Meter) -> OperatorEntry:
    """Write every state of an operator, cut for its parallelism."""
    if plan.parallelism > plan.max_parallelism:
        raise InvalidRequest("parallelism is higher than the max parallelism", operator=plan.uid,
                             expected=f"1..{plan.max_parallelism}", found=plan.parallelism,
                             hint="give a higher --max-parallelism too")
    notes = write_operator_states(place.create, plan.uid, plan.operator_parts)
    # Which subtask keeps which channels is of no matter: a restore takes them all and deals them out.
    dealt = [(index, plan.channels[index::plan.parallelism]) for index in range(plan.parallelism)]
    flying = write_channels(place.create, plan.uid, dealt)
    subtasks = []
    for index in range(plan.parallelism):
        keyed: tuple[KeyedHandle, ...] = ()
        if plan.key_type is not None and plan.states:
            keyed = (_write_handle(place, plan, key_group_range(index, plan.parallelism, plan.max_parallelism), meter),)
        note, files = notes.get(index, (None, ()))
        in_flight, more = flying.get(index, (None, ()))
        if keyed or note is not None or in_flight is not None:
            subtasks.append(SubtaskEntry(index, keyed=keyed, operator=note, in_flight=in_flight,
                                         operator_files=(*files, *more)))
    return OperatorEntry(plan.uid, plan.name, plan.parallelism, plan.max_parallelism, tuple(subtasks))


def _write_handle(place: Destination, plan: OperatorRows, key_groups: KeyGroupRange, meter: Meter) -> KeyedHandle:
    assert plan.key_type is not None
    expected = {state.schema.name: state.expected(key_groups) for state in plan.states}
    writer = OpenHandleWriter(place.create, plan.uid, plan.key_type, plan.max_parallelism, key_groups,
                              [state.schema for state in plan.states], expected)
    try:
        for state in plan.states:
            for batch in state.rows(key_groups):
                writer.write(state.schema.name, batch)
                meter.advance(batch.num_rows)
        return writer.finish()
    except BaseException:
        writer.abort()
        raise


def deal_out(parts: Parts, old_parallelism: int, parallelism: int) -> Parts:
    """Operator state cut for another parallelism, so that a restore gives every element out exactly as before.

    A union list is dealt out like a split one here: the restore is what unites it.
    """
    if old_parallelism == parallelism:
        return parts
    by_index = dict(parts)
    old = [OperatorStateSnapshot(tuple(_as(part, Distribution.UNION, Distribution.SPLIT)
                                       for part in by_index.get(index, ()))) for index in range(old_parallelism)]
    unions = {part.name for _, held in parts for part in held if part.distribution is Distribution.UNION}
    new = redistribute(old, parallelism)
    return [(index, tuple(replace(part, distribution=Distribution.UNION) if part.name in unions else part
                          for part in snapshot.parts)) for index, snapshot in enumerate(new) if snapshot.parts]


def _as(part: OperatorStatePart, old: Distribution, new: Distribution) -> OperatorStatePart:
    return replace(part, distribution=new) if part.distribution is old else part


@contextmanager
def as_open(opened: Savepoint) -> Iterator[Savepoint]:
    """The savepoint itself if all its keyed state is open, with its parts alike, else such a copy in a temporary folder."""
    if all(handle.format == OPEN_FORMAT and handle.schemas == opened.schemas_of(entry.uid, handle)
           for entry in opened.metadata.operators for handle in opened.handles(entry.uid)):
        yield opened
        return
    with tempfile.TemporaryDirectory(prefix="holdfast-open-") as folder:
        with Destination(Path(folder) / "savepoint") as place:
            place.publish(to_open(opened, place))
        with open_savepoint(Path(folder) / "savepoint") as copy:
            yield copy

"""Converts any checkpoint or savepoint to an open or a native savepoint; both stand alone, wherever they are copied."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace

from checkpoint.storage.metadata import CheckpointMetadata, OperatorEntry, SubtaskEntry
from savepoint.ahead import ahead
from savepoint.copying import Copier
from savepoint.destination import Destination
from savepoint.format import OPEN_FORMAT
from savepoint.inflight import noted_files, write_channels
from savepoint.opened import Savepoint, open_savepoint
from savepoint.operators import write_operator_states
from savepoint.statistics import total_rows
from savepoint.uniting import united_entries
from savepoint.writer import OpenHandleWriter
from statebackend.backend import KeyedHandle
from statebackend.errors import InvalidRequest

Progress = Callable[[int, int], None]
"""Hears of rows or bytes done and their total (0: not known). What it raises ends the work, and nothing is left."""

FORMATS = ("open", "native")


def convert_savepoint(source: str | os.PathLike[str], destination: str | os.PathLike[str], *, format: str = OPEN_FORMAT,
                      progress: Progress | None = None) -> CheckpointMetadata:
    """Write a checkpoint or savepoint anew as a savepoint. The source is only read; the destination must not exist."""
    if format not in FORMATS:
        raise InvalidRequest(f"there is no savepoint format {format!r}", hint=f"use one of {', '.join(FORMATS)}")
    with open_savepoint(source) as opened, Destination(destination) as place:
        metadata = to_open(opened, place, progress) if format == OPEN_FORMAT else to_native(opened, place, progress)
        place.publish(metadata)
        return metadata


def savepoint_head(metadata: CheckpointMetadata, format: str) -> CheckpointMetadata:
    """The metadata of a savepoint made of another snapshot: whose state it is stays, who owns it changes."""
    return replace(metadata, kind="savepoint", format=format, parent=None, generation=0,
                   completed_timestamp=time.time_ns() // 1_000_000)


def to_open(opened: Savepoint, place: Destination, progress: Progress | None = None) -> CheckpointMetadata:
    """Write every operator in the open format below `place`; the caller publishes."""
    meter = Meter(progress, sum(sum(total_rows(handle).values()) for entry in opened.metadata.operators
                                for handle in opened.handles(entry.uid) if handle.format == OPEN_FORMAT))
    entries = tuple(_open_operator(opened, entry, place, meter) for entry in opened.metadata.operators)
    return replace(savepoint_head(opened.metadata, OPEN_FORMAT), operators=entries)


def _open_operator(opened: Savepoint, entry: OperatorEntry, place: Destination, meter: Meter) -> OperatorEntry:
    operator_states = write_operator_states(place.create, entry.uid, opened.operator_parts(entry.uid))
    channels = write_channels(place.create, entry.uid, opened.channels(entry.uid))
    copier = Copier(opened.source, place)
    subtasks = []
    for subtask in entry.subtasks:
        keyed = tuple(_open_handle(opened, entry.uid, handle, place, copier, meter) for handle in subtask.keyed)
        note, files = operator_states.get(subtask.index, (None, ()))
        in_flight, more = channels.get(subtask.index, (None, ()))
        subtasks.append(SubtaskEntry(
            subtask.index, subtask.finished, keyed, note, copier.channels(subtask.input_channels, entry.uid),
            copier.channels(subtask.output_channels, entry.uid), in_flight, (*files, *more)))
    return replace(entry, subtasks=tuple(subtasks))


def _open_handle(opened: Savepoint, uid: str, handle: KeyedHandle, place: Destination, copier: Copier,
                 meter: Meter) -> KeyedHandle:
    schemas = opened.schemas_of(uid, handle)
    if handle.format == OPEN_FORMAT and schemas == handle.schemas:
        files = tuple(copier.copy(file, file.path) for file in handle.files)
        meter.advance(sum(total_rows(handle).values()))
        return replace(handle, files=files)
    writer = OpenHandleWriter(place.create, uid, handle.key_type, handle.max_parallelism, handle.key_groups,
                              schemas, total_rows(handle))
    try:
        entries = united_entries(handle, opened.source, schemas, opened.metadata.completed_timestamp)
        writer.write_entries(ahead(entries), meter.advance)
        return writer.finish()
    except BaseException:
        writer.abort()
        raise


def to_native(opened: Savepoint, place: Destination, progress: Progress | None = None) -> CheckpointMetadata:
    """Copy the backend's files as they are, the shared ones too; the caller publishes.

    An open savepoint has no native files, so its rows become entry files, which every backend restores.
    """
    from savepoint.native import native_handle

    meter = Meter(progress, opened.metadata.full_size)
    copier = Copier(opened.source, place, meter.advance)
    operators = []
    for entry in opened.metadata.operators:
        subtasks = []
        for subtask in entry.subtasks:
            prefix = f"{entry.uid}-{subtask.index}"
            keyed = tuple(native_handle(handle, opened.source, copier, prefix) for handle in subtask.keyed)
            noted = noted_files(subtask.in_flight)  # records in flight that are open already stay so: it is their exact form
            subtasks.append(SubtaskEntry(
                subtask.index, subtask.finished, keyed, copier.operator_state(subtask.operator),
                copier.channels(subtask.input_channels, entry.uid), copier.channels(subtask.output_channels, entry.uid),
                subtask.in_flight and copier.copy_fresh(subtask.in_flight, prefix),
                tuple(copier.copy(file, file.path) for file in subtask.operator_files if file.path in noted)))
        operators.append(replace(entry, subtasks=tuple(subtasks)))
    return replace(savepoint_head(opened.metadata, "native"), operators=tuple(operators))


class Meter:
    """Adds up progress and passes it on, at most every few thousand rows."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def advance(self, amount: int) -> None:
        self._done += amount
        if self._progress is not None:
            self._progress(self._done, max(self._total, self._done) if self._total else 0)

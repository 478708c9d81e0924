"""From the acknowledgements of all subtasks to a published checkpoint or savepoint."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, Protocol

from checkpoint.dataflow.plan import Plan
from checkpoint.protocol.messages import Publish, SubtaskId
from checkpoint.runtime.contracts import CheckpointKind, SubtaskSnapshot
from checkpoint.storage.metadata import CheckpointMetadata, OperatorEntry, SubtaskEntry
from checkpoint.storage.storage import JobStorage
from statebackend.errors import InvalidRequest
from statebackend.files import SnapshotSource


class SavepointWriter(Protocol):
    """Writes a savepoint in another format than the backend's own; found by entry point `holdfast.savepoint_writers`."""

    def write(self, metadata: CheckpointMetadata, source: SnapshotSource, folder: str) -> str:
        """Write the snapshot that `metadata` describes, with files from `source`, as a savepoint in a new `folder`.

        Returns its URL. Nothing is visible before it is whole, and nothing is left behind if it fails.
        """


def savepoint_writer(name: str) -> SavepointWriter:
    for entry in entry_points(group="holdfast.savepoint_writers"):
        if entry.name == name:
            writer: SavepointWriter = entry.load()()
            return writer
    raise InvalidRequest("no writer of this savepoint format is installed", found=name,
                         hint="use format native, or install the package that writes it")


def metadata_of(plan: Plan, publish: Publish, *, job_id: str, now_ms: int, generation: int = 0,
                properties: Mapping[str, Any] | None = None) -> CheckpointMetadata:
    """The metadata of a checkpoint that every subtask has acknowledged."""
    savepoint = publish.options.kind is CheckpointKind.SAVEPOINT
    operators = tuple(
        OperatorEntry(uid, plan.flow.node(uid).name, vertex.parallelism, plan.flow.max_parallelism, tuple(
            _subtask_entry(publish.snapshots[SubtaskId(vertex.id, index)], uid, index, first=uid == vertex.uids[0])
            for index in range(vertex.parallelism)))
        for vertex in plan.vertices for uid in vertex.uids)
    unaligned = any(snapshot.in_flight is not None for snapshot in publish.snapshots.values())
    return CheckpointMetadata(
        job_id, plan.flow.name, publish.checkpoint_id, generation, "savepoint" if savepoint else "checkpoint", "native",
        publish.timestamp, now_ms, unaligned, operators=operators, properties=properties or {})


def _subtask_entry(snapshot: SubtaskSnapshot, uid: str, index: int, *, first: bool) -> SubtaskEntry:
    operator = next((operator for operator in snapshot.operators if operator.uid == uid), None)
    return SubtaskEntry(index, snapshot.ended, operator.keyed if operator is not None else (),
                        operator.operator if operator is not None else None,
                        in_flight=snapshot.in_flight if first else None)


class Publisher:
    """Publishes on any thread; one at a time."""

    def __init__(self, plan: Plan, storage: JobStorage, properties: Mapping[str, Any]) -> None:
        self._plan, self._storage, self._properties = plan, storage, properties

    def publish(self, publish: Publish, now_ms: int) -> str:
        """Make it exist and tell where. Savepoints that are not native are written over by their format's writer."""
        metadata = metadata_of(self._plan, publish, job_id=self._storage.job_id, now_ms=now_ms,
                               generation=self._storage.generation, properties=self._properties)
        options = publish.options
        if options.kind is CheckpointKind.CHECKPOINT:
            return self._storage.publish(metadata)
        if options.location is None:
            raise InvalidRequest("a savepoint needs a folder", checkpoint_id=publish.checkpoint_id)
        path = self._write_savepoint(publish, metadata, options.location)
        if options.stop:  # before sinks commit: from then on no older checkpoint may be gone back to
            self._storage.require_newest()  # what a newer run goes back to is not for this one to say
            self._storage.record_origin(path, stopped_with=publish.checkpoint_id)
            self._storage.require_newest()
        return path

    def _write_savepoint(self, publish: Publish, metadata: CheckpointMetadata, folder: str) -> str:
        if publish.options.native:
            return self._storage.publish(metadata, folder=folder)
        try:
            source = self._storage.source(publish.checkpoint_id)
            return savepoint_writer("open").write(metadata, source, folder)
        finally:
            self.discard(publish.checkpoint_id, publish.snapshots)

    def discard(self, checkpoint_id: int, snapshots: Mapping[SubtaskId, SubtaskSnapshot]) -> None:
        """Remove the files of a checkpoint that will not be published."""
        files = [file for snapshot in snapshots.values() for operator in snapshot.operators
                 for handle in operator.keyed for file in handle.files]
        self._storage.abort(checkpoint_id, files)

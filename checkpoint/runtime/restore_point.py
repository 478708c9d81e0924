"""What `--restore latest` and `--restore PATH` mean: which checkpoint, and whether the job goes on in its folder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from checkpoint.dataflow.graph import Dataflow
from checkpoint.storage import layout
from checkpoint.storage.generations import Origin
from checkpoint.storage.layout import JobId
from checkpoint.storage.metadata import CheckpointMetadata
from checkpoint.storage.opening import load_metadata, locate
from checkpoint.storage.storage import JobStorage, dispose, find_latest, find_origin
from checkpoint.storage.store import FileStore
from checkpoint.storage.urls import split_url
from statebackend.errors import InvalidRequest, NotFound


@dataclass(frozen=True)
class RestorePoint:
    """A checkpoint or savepoint to start from. `job_id` is set where the job goes on in the same job folder.

    `again`: the run before was restored from it as well, and completed no checkpoint. `stopped`: it ended with it.
    """

    url: str
    metadata: CheckpointMetadata
    job_id: JobId | None = None
    again: bool = False
    stopped: bool = False

    @property
    def foreign(self) -> bool:
        """Its files belong to another job or to the user: they are read and left alone."""
        return self.job_id is None

    @property
    def reference(self) -> str | int:
        return self.url if self.foreign else self.metadata.checkpoint_id

    def newest(self, storage: JobStorage) -> RestorePoint:
        """The same, looked up again after the job was taken over: the run before may have published one more."""
        if self.foreign:
            return self
        latest = storage.latest()
        if latest is None or latest.checkpoint_id == self.metadata.checkpoint_id:
            return self
        url = storage.store.url_of(layout.checkpoint_folder(latest.checkpoint_id))
        return replace(self, url=url, metadata=latest)


def resolve_restore(root: str | None, flow: Dataflow | str, restore: str, **options: Any) -> RestorePoint | None:
    """The point to start from; None where `latest` finds nothing and the job starts fresh.

    `latest` is the newest complete checkpoint of the flow of this name below `root`, or what a newer run was restored
    from that ended before it had completed one, or the savepoint that it stopped with: older checkpoints would write
    again what it has committed. Where it is damaged the error names the damage and the newest good one; there is no
    silent fallback.
    """
    if restore != "latest":
        return _at(restore, **options)
    if root is None:
        raise InvalidRequest("restoring the latest checkpoint needs the checkpoint folder", hint="give --checkpoint-dir")
    name = flow if isinstance(flow, str) else flow.name
    with FileStore.at(root, **options) as store:
        found = find_latest(store, name)
        origin = find_origin(store, name, found) if found is None or found.error is None else None
    if origin is not None:
        return _again(name, origin, **options)
    if found is None:
        return None
    job_id = JobId(split_url(split_url(found.path)[0])[1])
    storage = JobStorage(root, job_id, **options)
    try:
        metadata = storage.latest()
    finally:
        storage.close()
    if metadata is None:
        return None
    return RestorePoint(found.path, metadata, job_id)


def _at(path: str, **options: Any) -> RestorePoint:
    located = locate(path, **options)
    try:
        return RestorePoint(located.url, load_metadata(located))
    finally:
        located.store.close()


def _again(name: str, origin: Origin, **options: Any) -> RestorePoint:
    stopped = origin.stopped_with > 0
    try:
        return replace(_at(origin.url, **options), again=not stopped, stopped=stopped)
    except NotFound as error:
        if stopped:
            raise NotFound("the last run of this flow stopped with a savepoint that is gone; an older checkpoint would "
                           "write again what the stop has committed", flow=name, path=origin.url,
                           hint="say where the savepoint is now, or name another restore point, with --restore PATH"
                           ) from error
        raise NotFound("the last run of this flow was restored from a checkpoint that is gone, and completed none of its "
                       "own", flow=name, path=origin.url,
                       hint="name another one with --restore PATH, or start fresh without --restore") from error


def dispose_claimed(point: RestorePoint) -> None:
    """Delete a checkpoint or savepoint that the job has claimed, once its own first checkpoint stands alone."""
    dispose(point.url)

"""What `--restore latest` and `--restore PATH` mean: which checkpoint, and whether the job goes on in its folder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from checkpoint.dataflow.graph import Dataflow
from checkpoint.storage import layout
from checkpoint.storage.layout import JobId
from checkpoint.storage.metadata import CheckpointMetadata
from checkpoint.storage.opening import load_metadata, locate
from checkpoint.storage.storage import JobStorage, dispose, find_latest
from checkpoint.storage.urls import split_url
from statebackend.errors import InvalidRequest


@dataclass(frozen=True)
class RestorePoint:
    """A checkpoint or savepoint to start from. `job_id` is set where the job goes on in the same job folder."""

    url: str
    metadata: CheckpointMetadata
    job_id: JobId | None = None

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

    `latest` is the newest complete checkpoint of the flow of this name below `root`. Where it is damaged the error names
    the damage and the newest good one; there is no silent fallback.
    """
    if restore != "latest":
        located = locate(restore, **options)
        try:
            return RestorePoint(located.url, load_metadata(located))
        finally:
            located.store.close()
    if root is None:
        raise InvalidRequest("restoring the latest checkpoint needs the checkpoint folder", hint="give --checkpoint-dir")
    name = flow if isinstance(flow, str) else flow.name
    found = find_latest(root, name, **options)
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


def dispose_claimed(point: RestorePoint) -> None:
    """Delete a checkpoint or savepoint that the job has claimed, once its own first checkpoint stands alone."""
    dispose(point.url)

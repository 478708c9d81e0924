"""Opening a checkpoint or savepoint by any of its names: `chk-<n>` folder, savepoint folder, or its `_metadata`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from checkpoint.storage import layout
from checkpoint.storage.files import CheckpointSource
from checkpoint.storage.metadata import CheckpointMetadata
from checkpoint.storage.store import FileStore
from checkpoint.storage.urls import protocol_of, redacted, split_url
from statebackend.errors import CorruptData, InvalidRequest, NotFound
from statebackend.files import StateFile


@dataclass(frozen=True)
class Located:
    """A checkpoint's place: the store that its file paths are relative to, and its `_metadata` in it."""

    store: FileStore
    metadata_path: str

    @property
    def url(self) -> str:
        """The folder of the checkpoint or savepoint, fit to be shown."""
        return self.store.url_of(self.metadata_path).rpartition("/")[0]


def locate(url: str, *, unfenced: bool = False, **options: Any) -> Located:
    """Where the files of a checkpoint or savepoint lie; nothing is read."""
    text = str(url).rstrip("/")
    if protocol_of(text) == "file" and "://" not in text:
        text = text or "/"
    parent, name = split_url(text)
    if name == layout.METADATA:
        text = parent
        parent, name = split_url(text)
    if layout.checkpoint_of_folder(name) is not None:
        return Located(FileStore.at(parent or ".", unfenced=unfenced, **options), f"{name}/{layout.METADATA}")
    return Located(FileStore.at(text, unfenced=unfenced, **options), layout.METADATA)


def open_checkpoint(url: str, **options: Any) -> tuple[CheckpointMetadata, CheckpointSource]:
    """The metadata and the files of a checkpoint or savepoint. Close the source when done.

    `NotFound` where there is nothing, `InvalidRequest` where there is something else, `IncompatibleState` for a newer
    format, `CorruptData` for a damaged one.
    """
    located = locate(url, **options)
    try:
        metadata = load_metadata(located)
    except BaseException as error:
        located.store.close()
        other = _opened_by_others(url, options) if isinstance(error, NotFound) else None
        if other is None:
            raise
        return other
    return metadata, CheckpointSource(located.store, way_out=way_out_of(located), owns_store=True)


def _opened_by_others(url: str, options: dict[str, Any]) -> tuple[CheckpointMetadata, CheckpointSource] | None:
    """What higher layers keep in other layouts (entry points `holdfast.openers`): an opener gives None for no match."""
    for entry in entry_points(group="holdfast.openers"):
        opened: tuple[CheckpointMetadata, CheckpointSource] | None = entry.load()(url, **options)
        if opened is not None:
            return opened
    return None


def way_out_of(located: Located) -> Callable[[], str | None]:
    """Names the newest good checkpoint before a damaged one, where the job's folder is whole; else nothing."""
    def way_out() -> str | None:
        from checkpoint.storage.storage import JobStorage
        checkpoint = layout.checkpoint_of_folder(located.metadata_path.rpartition("/")[0])
        job = located.store.url.rstrip("/").rpartition("/")[2]
        if checkpoint is None or not layout.is_job_folder(job):
            return None
        return JobStorage.of_folder(located.store).way_out(checkpoint)
    return way_out


def load_metadata(located: Located) -> CheckpointMetadata:
    """Read and check `_metadata`."""
    shown = located.store.url_of(located.metadata_path)
    try:
        data = located.store.read(located.metadata_path)
    except NotFound:
        raise _nothing_there(located) from None
    metadata = CheckpointMetadata.from_bytes(data, path=shown)
    folder = located.metadata_path.rpartition("/")[0]
    if metadata.kind == "checkpoint" and layout.checkpoint_of_folder(folder) is None:
        raise InvalidRequest("a checkpoint's _metadata lies outside of a chk-<n> folder, so its files can't be found",
                             path=shown, hint=f"put it back into <job>/{layout.checkpoint_folder(metadata.checkpoint_id)}/")
    return metadata


def _nothing_there(located: Located) -> NotFound:
    folder = located.metadata_path.rpartition("/")[0]
    names = {info.path for info in located.store.list(folder)} if located.store.protocol == "file" else set()
    if folder:
        return NotFound("the checkpoint was never completed, or has been deleted: it has no _metadata",
                        path=located.url, hint="use a completed checkpoint of the same job")
    jobs = [name for name in located.store.folders() if layout.is_job_folder(name)]
    checkpoints = [name for name in located.store.folders() if layout.checkpoint_of_folder(name) is not None]
    if jobs:
        hint = "this is a checkpoint root: name a checkpoint in it, <job id>/chk-<n>"
    elif checkpoints:
        hint = f"this is the folder of a job: name a checkpoint in it, such as {checkpoints[-1]}"
    else:
        hint = "name a chk-<n> folder, a savepoint folder or its _metadata"
    what = "this is not the folder of a checkpoint or savepoint: it has no _metadata" if names or jobs or checkpoints \
        else "there is no checkpoint or savepoint"
    return NotFound(what, path=redacted(located.url), hint=hint)


def check_files(store: FileStore, metadata: CheckpointMetadata, *, checksums: bool = False) -> None:
    """Compare every stored file with its reference: presence and size from listings, checksums if asked for."""
    wanted = metadata.stored_files()
    present = {info.path: info.size for folder in {path.rpartition("/")[0] for path in wanted}
               for info in store.list(folder)}
    for path, file in wanted.items():
        if path not in present:
            raise NotFound("a state file is missing", path=store.url_of(path),
                           checkpoint_id=metadata.checkpoint_id)
        if present[path] != file.size:
            raise CorruptData("a state file has another size than recorded", path=store.url_of(path),
                              checkpoint_id=metadata.checkpoint_id, expected=file.size, found=present[path])
    for file in metadata.files():
        if file.inline is not None:
            file.inline_verified()
    if checksums:
        def verify(item: tuple[str, StateFile]) -> None:
            store.verify(*item)
        store.map(verify, wanted.items())

"""Savepoints as folders: find them below a URL, copy one, dispose of one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from checkpoint.storage import layout
from checkpoint.storage.metadata import CheckpointMetadata
from checkpoint.storage.store import FileStore
from checkpoint.storage.urls import split_url
from savepoint.convert import Meter, Progress, convert_savepoint
from savepoint.copying import Copier
from savepoint.destination import Destination
from savepoint.opened import open_savepoint
from statebackend.errors import HoldfastError, InvalidRequest, NotFound

_DEPTH = 3


@dataclass(frozen=True)
class Found:
    """A savepoint or checkpoint below a folder; `problem` tells why it can't be opened."""

    path: str
    kind: str
    format: str
    job_name: str
    checkpoint_id: int
    completed_timestamp: int
    problem: str | None = None


def list_savepoints(url: str | os.PathLike[str], *, checkpoints: bool = False, depth: int = _DEPTH,
                    missing_ok: bool = False) -> list[Found]:
    """Every savepoint below a folder (and checkpoint, if asked for), oldest first; damaged ones are named as such.

    A local folder that is not there is `NotFound` unless `missing_ok`; an object store has no folders to miss.
    """
    with FileStore.at(os.fspath(url)) as store:
        local = store.local_path("")
        if local is not None and not missing_ok and not local.is_dir():
            raise NotFound("there is no such folder", path=store.url)
        found = [item for path in _folders(store, "", depth) for item in _look(store, path)]
    wanted = [item for item in found if checkpoints or item.kind != "checkpoint"]
    return sorted(wanted, key=lambda item: (item.completed_timestamp, item.path))


def _folders(store: FileStore, folder: str, depth: int) -> Iterator[str]:
    yield folder
    if depth == 0 or (folder and store.exists(f"{folder}/{layout.METADATA}")):
        return
    for name in store.folders(folder):
        yield from _folders(store, f"{folder}/{name}" if folder else name, depth - 1)


def _look(store: FileStore, folder: str) -> Iterator[Found]:
    path = f"{folder}/{layout.METADATA}" if folder else layout.METADATA
    if not store.exists(path):
        return
    url = store.url_of(folder) if folder else store.url
    try:
        head = CheckpointMetadata.summary(store.read(path), path=path)
    except HoldfastError as error:
        yield Found(url, "unknown", "", "", 0, 0, str(error))
        return
    yield Found(url, head.kind, head.format, head.job_name, head.checkpoint_id, head.completed_timestamp)


def copy_savepoint(source: str | os.PathLike[str], destination: str | os.PathLike[str], *,
                   progress: Progress | None = None) -> CheckpointMetadata:
    """Copy a savepoint as it is, verified on the way; a checkpoint becomes a native savepoint that stands alone."""
    with open_savepoint(source) as opened:
        is_savepoint = opened.metadata.is_savepoint
    if not is_savepoint:
        return convert_savepoint(source, destination, format="native", progress=progress)
    with open_savepoint(source) as opened, Destination(destination) as place:
        meter = Meter(progress, opened.metadata.full_size)
        copier = Copier(opened.source, place, meter.advance)
        for file in opened.metadata.files():
            copier.copy(file, file.path)
        place.publish(opened.metadata)
        return replace(opened.metadata)


@dataclass(frozen=True)
class Disposal:
    """What disposing of a savepoint removes. `apply` does it."""

    url: str
    files: int
    size: int

    def apply(self) -> None:
        """Remove it: `_metadata` first, so that a half-removed savepoint does not look whole."""
        parent, name = split_url(self.url)
        with FileStore.at(parent) as store:
            store.delete([f"{name}/{layout.METADATA}"])
            store.delete_tree(name)


def plan_disposal(path: str | os.PathLike[str]) -> Disposal:
    """What disposing of a savepoint would remove. Only savepoints: checkpoints share files, and `gc` knows them."""
    with open_savepoint(path) as opened:
        if not opened.metadata.is_savepoint:
            raise InvalidRequest("this is a checkpoint, which belongs to its job and shares files with others",
                                 path=opened.url, hint="use holdfast checkpoint gc")
        known = {layout.METADATA, *opened.metadata.stored_files()}
        present = opened.source.store.list("", temporary=True)
        strange = [info.path for info in present if info.path not in known and not info.path.endswith(".tmp")]
        if strange:
            raise InvalidRequest("the folder holds files that are not the savepoint's", path=opened.url,
                                 found=strange[0], hint="move them away first")
        return Disposal(_absolute(path, opened.url), len(present), sum(info.size for info in present))


def _absolute(path: Any, shown: str) -> str:
    """The folder of a savepoint as it was named, which may carry what `shown` leaves out."""
    text = os.fspath(path).rstrip("/")
    text = text.removesuffix("/" + layout.METADATA)
    return text if "://" in text else os.path.abspath(os.path.expanduser(text or shown))

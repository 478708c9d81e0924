"""A new savepoint folder: refused where something is, invisible until `publish`, gone if anything fails."""

from __future__ import annotations

import os
from types import TracebackType

from checkpoint.storage.layout import METADATA
from checkpoint.storage.metadata import CheckpointMetadata
from checkpoint.storage.store import FileStore
from checkpoint.storage.urls import split_url
from statebackend.errors import Conflict, HoldfastError, InvalidRequest
from statebackend.files import FileWriter


class Destination:
    """Files below one URL, any fsspec one. As a context manager it removes everything unless published."""

    def __init__(self, url: str | os.PathLike[str]) -> None:
        text = os.path.abspath(os.path.expanduser(url)) if "://" not in os.fspath(url) else os.fspath(url)
        parent, name = split_url(text)
        if not name or parent.endswith((":", "/")):
            raise InvalidRequest("a savepoint needs a folder of its own, below a bucket or folder", path=text)
        self._parent = FileStore.at(parent)
        self._name = name
        self.store = self._parent.child(name)
        self.published = False
        try:
            self._refuse_existing()
        except BaseException:
            self._parent.close()
            raise

    @property
    def url(self) -> str:
        return self.store.url

    def create(self, path: str) -> FileWriter:
        """Start a file at a path relative to the savepoint."""
        return self.store.writer(path)

    def publish(self, metadata: CheckpointMetadata) -> None:
        """Write `_metadata`: from here on the savepoint exists. Once."""
        data = metadata.to_bytes()
        if self.store.fenced:
            self.store.create(METADATA, data)
        else:
            self.store.write(METADATA, data)
        self.published = True

    def discard(self) -> None:
        """Remove what was written. An error here must not hide the reason for giving up, so none is raised."""
        try:
            self._parent.delete_tree(self._name)
        except HoldfastError:
            return  # without `_metadata` what is left is no savepoint, and the next attempt names the folder

    def _refuse_existing(self) -> None:
        found = self.store.list("", temporary=True)
        if not found:
            return
        if any(info.path == METADATA for info in found):
            raise Conflict("there is a savepoint or checkpoint here already", path=self.store.url,
                           hint="choose another folder, or dispose of it first")
        raise Conflict("the folder is not empty", path=self.store.url,
                       hint="choose another one; what is in it may be the rest of an interrupted run, or is not ours")

    def __enter__(self) -> Destination:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: BaseException | None,
                 _trace: TracebackType | None) -> None:
        try:
            if not self.published:
                self.discard()
        finally:
            self._parent.close()

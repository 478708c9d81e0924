"""Native handles of a savepoint: a backend's own files copied as they are, or entry files where it has none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from checkpoint.storage.files import CheckpointSource
from checkpoint.storage.layout import private_file
from savepoint.copying import Copier
from savepoint.format import OPEN_FORMAT
from statebackend.backend import KeyedHandle
from statebackend.entries import write_entries
from statebackend.files import FileWriter, StateFile
from statebackend.formats import merged_entries


def native_handle(handle: KeyedHandle, source: CheckpointSource, copier: Copier, prefix: str) -> KeyedHandle:
    """The handle with its files in the copier's destination."""
    if handle.format != OPEN_FORMAT:
        files = tuple(copier.copy_fresh(file, prefix) for file in handle.files)
        return replace(handle, files=files, new_bytes=sum(file.size for file in files))
    file = write_entries(_Fresh(copier, prefix), "entries", merged_entries(handle, source), shared=False)
    meta = {"version": 1, "next_sequence": handle.meta.get("next_sequence", 0)}
    return replace(handle, format="entries", files=(file,), meta=meta, new_bytes=file.size)


class _Fresh:
    """A snapshot target over a copier's destination; every file gets a fresh name."""

    def __init__(self, copier: Copier, prefix: str) -> None:
        self._copier, self._prefix = copier, prefix

    def create(self, hint: str, *, shared: bool) -> FileWriter:
        return self._copier.place.create(private_file("", self._prefix, 0, hint))

    def upload(self, local: Path, hint: str, *, shared: bool) -> StateFile:
        return self._copier.place.store.upload(local, private_file("", self._prefix, 0, hint))

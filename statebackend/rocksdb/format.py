"""Reads RocksDB snapshot handles as entries, so that any backend and the savepoint tools can restore from them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa

from statebackend.backend import KeyedHandle
from statebackend.entries import read_entries
from statebackend.files import SnapshotSource
from statebackend.keygroups import KeyGroupRange
from statebackend.rocksdb.handles import StoredPart, chain_of
from statebackend.rocksdb.snapshot import part_batches

FETCHERS = 4


class RocksDBFormat:
    """Handles of format "rocksdb": databases, then a log."""

    def layers(self, handle: KeyedHandle, source: SnapshotSource,
               key_groups: KeyGroupRange) -> list[Iterable[pa.RecordBatch]]:
        chain = chain_of(handle)
        tables = _tables(sorted(chain.parts, key=lambda part: part.key_groups.first), source, key_groups)
        return [tables, *(read_entries(source, file, key_groups) for file in chain.log)]


def fetch_part(part: StoredPart, source: SnapshotSource, directory: Path) -> None:
    """Place the files of a stored database in a new folder."""
    directory.mkdir(parents=True)
    with ThreadPoolExecutor(FETCHERS) as pool:
        for done in [pool.submit(source.fetch, file, directory / name) for name, file in part.files.items()]:
            done.result()
    for name in part.files:
        if not name.endswith(".sst"):
            _make_private(directory / name)


def _make_private(path: Path) -> None:
    """Opening a database rewrites its small files in place, which must not reach a hard link in the store."""
    if path.stat().st_nlink > 1:
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(data)


def _tables(parts: list[StoredPart], source: SnapshotSource, key_groups: KeyGroupRange) -> Iterator[pa.RecordBatch]:
    for part in parts:
        wanted = part.key_groups.intersect(key_groups)
        if wanted is None:
            continue
        directory = Path(tempfile.mkdtemp(prefix="holdfast-rocksdb-"))
        try:
            fetch_part(part, source, directory / "db")
            yield from part_batches(directory / "db", wanted)
        finally:
            shutil.rmtree(directory, ignore_errors=True)

"""Reads RocksDB snapshot handles as entries, so that any backend and the savepoint tools can restore from them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from statebackend.backend import KeyedHandle
from statebackend.entries import merge_entries, read_entries
from statebackend.files import SnapshotSource
from statebackend.keygroups import KeyGroupRange
from statebackend.rocksdb.handles import Chain, StoredPart, chain_of
from statebackend.rocksdb.snapshot import part_batches
from statebackend.rocksdb.store import Store
from statebackend.rocksdb.tables import TableFile, Unreadable, open_tables

FETCHERS = 4


class RocksDBFormat:
    """Handles of format "rocksdb": databases, then a log."""

    def layers(self, handle: KeyedHandle, source: SnapshotSource,
               key_groups: KeyGroupRange) -> list[Iterable[pa.RecordBatch]]:
        return [_entries(chain_of(handle), source, key_groups)]


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


def _entries(chain: Chain, source: SnapshotSource, key_groups: KeyGroupRange) -> Iterator[pa.RecordBatch]:
    """The final entries of a chain; one database at a time is on disk."""
    for part, wanted in _tiles(chain, key_groups):
        directory = Path(tempfile.mkdtemp(prefix="holdfast-rocksdb-"))
        try:
            fetch_part(part, source, directory / "db")
            with stored_layers(directory / "db", part.key_groups.intersect(wanted) or wanted) as layers:
                yield from merge_entries([*layers, *(read_entries(source, file, wanted) for file in chain.log)])
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def _tiles(chain: Chain, key_groups: KeyGroupRange) -> Iterator[tuple[StoredPart, KeyGroupRange]]:
    """The databases with the key groups that each stands for: up to those of the next one, so that no change is lost."""
    parts = sorted(chain.parts, key=lambda part: part.key_groups.first)
    for index, part in enumerate(parts):
        first = part.key_groups.first if index else key_groups.first
        last = parts[index + 1].key_groups.first - 1 if index + 1 < len(parts) else key_groups.last
        wanted = KeyGroupRange(first, last).intersect(key_groups) if first <= last else None
        if wanted is not None:
            yield part, wanted


@contextmanager
def stored_layers(directory: Path, key_groups: KeyGroupRange) -> Iterator[list[Iterable[pa.RecordBatch]]]:
    """The entries of a stored database in a range of key groups, oldest layer first.

    RocksDB says which tables there are; they are read without it, several times faster, unless one holds what only it can
    read. A key's versions get newer from level to level towards 0, and there from table to table.
    """
    store = Store(directory, read_only=True, create=False)
    try:
        levels = store.tables()
    finally:
        store.close()
    try:
        tables = open_tables([path for _, path in levels])
    except Unreadable:
        yield [part_batches(directory, key_groups)]
        return
    try:
        deeper: dict[int, list[TableFile]] = {}
        for (level, _), table in zip(levels, tables):
            deeper.setdefault(level, []).append(table)
        newest = sorted(deeper.pop(0, []), key=lambda table: table.newest)
        yield [_one_behind_the_other(deeper[level], key_groups) for level in sorted(deeper, reverse=True)] + \
            [table.rows(key_groups) for table in newest]
    finally:
        for table in tables:
            table.close()


def _one_behind_the_other(tables: Iterable[TableFile], key_groups: KeyGroupRange) -> Iterator[pa.RecordBatch]:
    for table in tables:
        yield from table.rows(key_groups)

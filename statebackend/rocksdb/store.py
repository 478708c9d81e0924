"""One RocksDB database, wrapped so that the calls of rocksdict which lose data silently can't be made.

This is the one module that imports rocksdict (pinned; docs/formats/rocksdb.md lists what it must not be asked):
- an upper bound is a borrowed pointer, so every scan holds its ReadOptions and the bound's bytes while it lives;
- the lower bound sets the upper one, so scans start by `from_key`;
- an iteration ends silently at a damaged block, so every scan asks for the status at its end;
- iterating a Snapshot ignores the snapshot, so it is never done;
- a database stays open, and locked, while any iterator lives, so scans are tracked and closed with it;
- background threads do not survive a fork, so a forked child can't use the parent's databases at all;
- a write holds the interpreter lock for its whole length, so writes are cut into chunks.
The write-ahead log is off: a checkpoint is what makes state durable.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import rocksdict

from statebackend.errors import Closed, Conflict, CorruptData, HoldfastError, InvalidRequest, NotFound, Unavailable
from statebackend.rocksdb.options import DEFAULT_MEMORY_LIMIT

log = logging.getLogger(__name__)

WRITE_CHUNK = 1000
READ_CHUNK = 2000
"""Keys of one multi-get: what RocksDB sets up for each key of more would not stay in the processor's cache."""
SCAN_CHUNK = 1000
Row = tuple[bytes, bytes]
Operation = tuple[bytes, bytes | None]
"""A key and its new value, or None to delete it."""


class SharedMemory:
    """The block cache and the write-buffer budget of the process; write buffers are charged to the cache."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.cache = rocksdict.Cache(limit)
        self.write_buffers = rocksdict.WriteBufferManager.new_write_buffer_manager_with_cache(
            limit // 3, False, self.cache)

    def resize(self, limit: int) -> None:
        self.limit = limit
        self.cache.set_capacity(limit)
        self.write_buffers.set_buffer_size(limit // 3)

    @property
    def usage(self) -> int:
        """Bytes in use: cached blocks, indexes, filters and write buffers."""
        return int(self.cache.get_usage())


_memory: SharedMemory | None = None
_memory_lock = threading.Lock()


def shared_memory(limit: int | None = None) -> SharedMemory:
    """The memory that all databases of this process share; a limit given here holds for all from now on."""
    global _memory
    with _memory_lock:
        if _memory is None:
            _memory = SharedMemory(limit or DEFAULT_MEMORY_LIMIT)
        elif limit is not None and limit != _memory.limit:
            _memory.resize(limit)
        return _memory


class Scan:
    """Rows of a range in key order, as they were when the scan was made; iterate it once.

    It keeps what RocksDB only borrows (the read options and the bound) alive for as long as the iterator lives, and
    asks at the end whether it was one: rocksdict ends an iteration at a damaged block as if nothing followed.
    """

    __slots__ = ("__weakref__", "_bound", "_database", "_iterator", "_keys_only", "_last", "_options", "_path")

    def __init__(self, database: Any, path: Path, begin: bytes, end: bytes | None, *, keys_only: bool = False,
                 readahead: int = 0) -> None:
        self._path = path
        self._bound = end
        self._last = begin
        self._keys_only = keys_only
        self._options = rocksdict.ReadOptions()
        if end is not None:
            self._options.set_iterate_upper_bound(end)
        if readahead:
            self._options.set_readahead_size(readahead)
            self._options.fill_cache(False)
        self._database = database
        make = database.keys if keys_only else database.items
        self._iterator: Any = make(from_key=begin, read_opt=self._options)

    def take(self, count: int) -> list[Any]:
        """Up to `count` further rows (or keys); an empty list at the end."""
        if self._iterator is None:
            raise Closed("a scan was used after its database was closed", path=str(self._path))
        try:
            rows = list(islice(self._iterator, count))
            if rows:
                self._last = rows[-1] if self._keys_only else rows[-1][0]
            if len(rows) < count:
                self._require_end()
            return rows
        except HoldfastError:
            raise
        except Exception as error:
            raise translated(error, self._path) from error

    def _require_end(self) -> None:
        """Step over the last row with an iterator that tells its status."""
        probe = self._database.iter(self._options)
        probe.seek(self._last)
        if probe.valid() and probe.key() == self._last:
            probe.next()
        probe.status()

    def __iter__(self) -> Iterator[Any]:
        chunk = 16
        while rows := self.take(chunk):
            yield from rows
            if len(rows) < chunk:
                break
            chunk = SCAN_CHUNK
        self.close()

    def close(self) -> None:
        self._iterator = self._database = None


class Store:
    """A database in raw mode. Reads may run on any thread; writes come from one thread at a time."""

    def __init__(self, path: Path, *, l0_trigger: int = 8, read_only: bool = False, create: bool = True) -> None:
        self.path = path
        self.read_only = read_only
        if not create and not (path / "CURRENT").exists():
            raise NotFound("there is no RocksDB database in this folder", path=str(path))
        access = rocksdict.AccessType.read_only(False) if read_only else rocksdict.AccessType.read_write()
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._database: Any = rocksdict.Rdict(str(path), _options(l0_trigger), access_type=access)
        except Exception as error:
            raise translated(error, path) from error
        without_log = rocksdict.WriteOptions()
        without_log.disable_wal = True
        self._database.set_write_options(without_log)
        self._scans: weakref.WeakSet[Scan] = weakref.WeakSet()
        self._overlays: weakref.WeakSet[type[dict[bytes, Any]]] = weakref.WeakSet()
        self.get: Callable[[bytes], bytes | None] = self._database.get
        """One value, or None; holds the interpreter lock. Replaced by a refusal after close and after a fork."""
        _live.add(self)

    @property
    def closed(self) -> bool:
        return self._database is None

    def serve(self, overlay: type[dict[bytes, Any]]) -> None:
        """Let dicts of this class find what they lack here: the interpreter calls RocksDB with no Python in between."""
        overlay.__missing__ = self.get  # type: ignore[attr-defined]
        self._overlays.add(overlay)

    def _refuse(self, refusal: Callable[[bytes], bytes | None]) -> None:
        self.get = refusal
        for overlay in self._overlays:
            overlay.__missing__ = staticmethod(refusal)  # type: ignore[attr-defined]

    def _open(self) -> Any:
        if self._database is None:
            self.get(b"")
        return self._database

    def get_many(self, keys: list[bytes]) -> list[bytes | None]:
        """The values of many keys; fastest when the keys are sorted. The interpreter lock is released."""
        database = self._open()
        try:
            found: list[bytes | None] = []
            for begin in range(0, len(keys), READ_CHUNK):
                found += database.get(keys[begin:begin + READ_CHUNK])
        except Exception as error:
            raise translated(error, self.path) from error
        return found

    def write(self, operations: Sequence[Operation]) -> None:
        """Apply operations in order, in chunks that hold the interpreter lock for a millisecond at most."""
        database = self._open()
        try:
            for begin in range(0, len(operations), WRITE_CHUNK):
                batch = rocksdict.WriteBatch(raw_mode=True)
                for key, value in operations[begin:begin + WRITE_CHUNK]:
                    if value is None:
                        batch.delete(key)
                    else:
                        batch[key] = value
                database.write(batch)
        except Exception as error:
            raise translated(error, self.path) from error

    def scan(self, begin: bytes, end: bytes | None, *, keys_only: bool = False, readahead: int = 0) -> Scan:
        """The rows from `begin` up to, not including, `end`."""
        database = self._open()
        try:
            scan = Scan(database, self.path, begin, end, keys_only=keys_only, readahead=readahead)
        except Exception as error:
            raise translated(error, self.path) from error
        self._scans.add(scan)
        return scan

    def delete_range(self, begin: bytes, end: bytes) -> None:
        """Remove a range in one step, whatever its size; the bytes leave with the next compaction."""
        database = self._open()
        try:
            database.delete_range(begin, end)
        except Exception as error:
            raise translated(error, self.path) from error

    def flush(self) -> None:
        """Write the memtable to a table file. The interpreter lock is released."""
        database = self._open()
        try:
            database.flush()
        except Exception as error:
            raise translated(error, self.path) from error

    def checkpoint(self, directory: Path) -> None:
        """Hard-link the database as it is now into a new folder. Flushes first, without the interpreter lock."""
        self.flush()
        try:
            rocksdict.Checkpoint(self._open()).create_checkpoint(str(directory))
        except HoldfastError:
            raise
        except Exception as error:
            raise translated(error, directory) from error

    def compact(self, begin: bytes | None = None, end: bytes | None = None) -> None:
        """Rewrite a range (all unless told) without what is deleted. The interpreter lock is released."""
        database = self._open()
        try:
            database.compact_range(begin, end)
        except Exception as error:
            raise translated(error, self.path) from error

    def ingest(self, tables: Sequence[Path]) -> None:
        """Move finished table files of `write_table` into the database."""
        options = rocksdict.IngestExternalFileOptions()
        options.set_move_files(True)
        database = self._open()
        try:
            database.ingest_external_file([str(table) for table in tables], options)
        except Exception as error:
            raise translated(error, self.path) from error

    def tables(self) -> list[tuple[int, Path]]:
        """The level and the path of each table file that the database consists of, in each level in the order of keys."""
        found = sorted(self._open().live_files(), key=lambda table: (table["level"], table["start_key"]))
        return [(int(table["level"]), self.path / str(table["name"]).lstrip("/")) for table in found]

    def set_options(self, options: dict[str, str]) -> None:
        self._open().set_options(options)

    def estimated_keys(self) -> int:
        return int(self._open().property_int_value("rocksdb.estimate-num-keys") or 0)

    def live_bytes(self) -> int:
        """Bytes of live table files and of the memtable: an estimate of the stored size."""
        database = self._open()
        return int(database.property_int_value("rocksdb.estimate-live-data-size") or 0) + \
            int(database.property_int_value("rocksdb.cur-size-all-mem-tables") or 0)

    def table_bytes(self) -> int:
        """Bytes of all table files on disk."""
        return int(self._open().property_int_value("rocksdb.total-sst-files-size") or 0)

    def close(self) -> None:
        """Close for real: every scan is dropped first, so that the folder's lock is released. Idempotent."""
        database, self._database = self._database, None
        if database is None:
            return
        self._refuse(_refuse_closed(self.path))
        for scan in list(self._scans):
            scan.close()
        try:
            database.close()
        except Exception as error:  # a full disk, say: what is not in a snapshot by now is given up with the folder anyway
            log.warning("%s", translated(error, self.path))

    def _leave_to_parent(self) -> None:
        """In a forked child: never touch the parent's database, not even to destroy it (that would hang)."""
        if self._database is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._database))
            self._database = None
        for scan in list(self._scans):
            if scan._iterator is not None:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(scan._iterator))
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(scan._database))
                scan.close()
        self._refuse(_refuse_forked(self.path))


def write_table(path: Path, rows: Iterable[Row]) -> int:
    """Write rows, in strictly ascending key order, to a table file that `Store.ingest` takes; how many there were."""
    writer = rocksdict.SstFileWriter(_options(8))
    writer.open(str(path))
    count = 0
    for key, value in rows:
        writer[key] = value
        count += 1
    if count:
        writer.finish()
    return count


def translated(error: Exception, path: Path) -> HoldfastError:
    """What an error text of RocksDB means for the caller."""
    text = str(error)
    if "lock" in text.lower() and ("Resource temporarily unavailable" in text or "No locks available" in text
                                   or "lock hold by current process" in text):
        return Conflict("the RocksDB folder is in use by another backend or process", path=str(path),
                        hint="close the other one, or give this backend a folder of its own")
    if "Corruption" in text or "checksum mismatch" in text or "not an sstable" in text:
        return CorruptData(f"RocksDB found damaged data: {text}", path=str(path),
                           hint="restore from an older checkpoint")
    if isinstance(error, rocksdict.DbClosedError):
        return Closed("the RocksDB database is closed", path=str(path))
    if isinstance(error, OSError) or "IO error" in text:
        return Unavailable(f"RocksDB can't read or write its folder: {text}", path=str(path),
                           hint="check free space and permissions")
    if isinstance(error, TypeError) or "only support bytes" in text:
        return InvalidRequest(f"RocksDB takes bytes only: {text}", path=str(path))
    return Unavailable(f"RocksDB failed: {text}", path=str(path))


def _options(l0_trigger: int) -> Any:
    memory = shared_memory()
    table = rocksdict.BlockBasedOptions()
    table.set_block_cache(memory.cache)
    table.set_bloom_filter(10, False)
    table.set_cache_index_and_filter_blocks(True)
    table.set_pin_l0_filter_and_index_blocks_in_cache(True)
    table.set_format_version(5)
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_block_based_table_factory(table)
    options.set_write_buffer_manager(memory.write_buffers)
    options.set_write_buffer_size(min(16 << 20, max(1 << 20, memory.limit // 6)))
    options.set_memtable_prefix_bloom_ratio(0.1)
    options.set_memtable_whole_key_filtering(True)
    options.set_max_background_jobs(2)
    options.set_compression_type(rocksdict.DBCompressionType.lz4())
    options.set_level_zero_file_num_compaction_trigger(l0_trigger)
    options.set_level_zero_slowdown_writes_trigger(l0_trigger * 3 + 8)
    options.set_level_zero_stop_writes_trigger(l0_trigger * 4 + 16)
    options.set_keep_log_file_num(2)
    options.set_max_log_file_size(1 << 20)
    options.set_max_manifest_file_size(4 << 20)
    options.set_max_open_files(1000)
    return options


def _refuse_closed(path: Path) -> Callable[[bytes], bytes | None]:
    def refuse(_key: bytes) -> bytes | None:
        raise Closed("the RocksDB database was closed", path=str(path))
    return refuse


def _refuse_forked(path: Path) -> Callable[[bytes], bytes | None]:
    def refuse(_key: bytes) -> bytes | None:
        raise Conflict("a RocksDB database can't be used in a forked process", path=str(path),
                       hint="open the backend after the fork, or start processes by spawn")
    return refuse


_live: weakref.WeakSet[Store] = weakref.WeakSet()


def _forget_databases_of_parent() -> None:
    global _memory
    for store in list(_live):
        store._leave_to_parent()
    _live.clear()
    if _memory is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_memory))
        _memory = None


os.register_at_fork(after_in_child=_forget_databases_of_parent)

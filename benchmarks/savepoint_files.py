"""Open savepoints: writing, reading, one key group, one key, comparing, re-grouping, inspecting, restoring, memory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import savepoint
from benchmarks.measure import Asked, Benchmark, WrongAnswer, timed
from checkpoint.storage.files import CheckpointTarget
from checkpoint.storage.metadata import CheckpointMetadata, OperatorEntry, SubtaskEntry
from checkpoint.storage.store import FileStore
from savepoint.destination import Destination
from savepoint.format import part_path
from savepoint.parts import StateStatistics
from savepoint.transform import schema_of
from savepoint.writer import OpenHandleWriter, open_handle
from statebackend import KeyGroupRange, ValueStateDescriptor, create_backend, key_group_range, key_groups_of
from statebackend.backend import KeyedHandle
from statebackend.descriptors import StateKind
from statebackend.files import StateFile
from statebackend.types import state_type

BASE = 3_000_000
TOTAL = ValueStateDescriptor("total", int)


class _Written(Benchmark):
    """A savepoint of three million int entries, bootstrapped from Arrow, beside the same columns as plain Parquet."""

    entries = BASE
    disk_gib = 1.0
    memory_gib = 2.0

    def setup(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
        if self.quick:
            self.entries = 300_000
        random = np.random.default_rng(3)
        self.keys = random.permutation(self.entries * 2)[:self.entries].astype(np.int64)
        self.table = pa.table({"key": self.keys, "value": random.integers(0, 2**40, self.entries)})
        groups = key_groups_of(self.table.column("key"), 128)
        self.sorted = pa.table({"key_group": pa.array(groups, pa.int32()), "key": self.table.column("key"),
                                "value": self.table.column("value")}).sort_by([("key_group", "ascending"),
                                                                               ("key", "ascending")])
        self.number = 0
        self.path = self._bootstrap()

    def _bootstrap(self) -> str:
        self.number += 1
        path = str(self.folder / f"savepoint-{self.number}")
        with savepoint.SavepointWriter(path, max_parallelism=128) as writer:
            writer.keyed("count", TOTAL, self.table, key_type=int)
        return path

    def teardown(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class WriteSavepoint(_Written):
    """Three million int entries written as an open savepoint, files synced and checksummed, against pyarrow writing the
    same columns, already sorted, as one Parquet file with zstd. `sorted rows`: from Arrow in the order of the format;
    `bootstrap`: from Arrow in any order, so keys are hashed, grouped and sorted; `snapshot` and `RocksDB snapshot`:
    `savepoint convert` of the filesystem backend's files, and of RocksDB's tables with a log of the last thirtieth on
    top, read, verified, merged and decoded."""

    name = "savepoint-write"
    baseline = "pyarrow"
    asked = {"sorted rows": Asked(0.35), "bootstrap": Asked(0.35), "snapshot": Asked(0.35),
             "RocksDB snapshot": Asked(0.35)}
    guarded: tuple[str, ...] = ("bootstrap",)

    def setup(self) -> None:
        super().setup()
        self.native = {backend: _native_savepoint(self.folder / backend, backend, self.table)
                       for backend in ("filesystem", "rocksdb")}

    def contenders(self) -> dict[str, Callable[[int], float]]:
        return {"pyarrow": self._pyarrow, "sorted rows": lambda _seed: self._timed(self._sorted_rows),
                "bootstrap": lambda _seed: self._timed(self._bootstrap),
                "snapshot": lambda _seed: self._timed(partial(self._convert, "filesystem")),
                "RocksDB snapshot": lambda _seed: self._timed(partial(self._convert, "rocksdb"))}

    def _pyarrow(self, _seed: int) -> float:
        return self.entries / timed(lambda: pq.write_table(self.sorted, self.folder / "plain.parquet", compression="zstd",
                                                           use_dictionary=False))

    def _timed(self, write: Callable[[], str]) -> float:
        started = time.perf_counter()
        path = write()
        seconds = time.perf_counter() - started
        with savepoint.open(path) as opened:
            if opened.read("count", "total").read_all().num_rows != self.entries:
                raise WrongAnswer("entries are missing")
        shutil.rmtree(path)
        return self.entries / seconds

    def _sorted_rows(self) -> str:
        self.number += 1
        path = str(self.folder / f"savepoint-{self.number}")
        schema = schema_of(TOTAL)
        with Destination(path) as place:
            writer = OpenHandleWriter(place.create, "count", state_type(int), 128, KeyGroupRange(0, 127), [schema],
                                      {"total": self.entries})
            for batch in self.sorted.cast(writer.layout("total").arrow_schema).to_batches(max_chunksize=65_536):
                writer.write("total", batch)
            place.publish(_metadata(writer.finish(), "open"))
        return path

    def _convert(self, backend: str) -> str:
        self.number += 1
        path = str(self.folder / f"savepoint-{self.number}")
        savepoint.convert_savepoint(self.native[backend], path)
        return path


def _native_savepoint(folder: Path, name: str, table: pa.Table) -> Path:
    """The rows as a native savepoint of a backend: full, or RocksDB's tables and a log of the last rows."""
    store = FileStore.at(str(folder))
    target = CheckpointTarget(store, "", "count", 0, inline_threshold=64, self_contained=True)
    options = {"directory": str(folder.with_name("database"))} if name == "rocksdb" else {}
    with create_backend(name, **options) as backend:
        keyed = backend.keyed(uid="count", key_type=int, max_parallelism=128, key_groups=KeyGroupRange(0, 127))
        total: Any = keyed.state(TOTAL)
        *most, last = table.to_batches(max_chunksize=-(-len(table) // 30))
        for batch in most:
            total.update_many(batch.column("key"), batch.column("value"))
        if name == "rocksdb":
            keyed.snapshot(1, target).run()
            keyed.checkpoint_completed(1)
        total.update_many(last.column("key"), last.column("value"))
        handle = keyed.snapshot(2, target, full=name != "rocksdb").run()
    if name == "rocksdb" and (handle.format != "rocksdb" or handle.meta["log"] != 1):
        raise WrongAnswer("the snapshot is not tables and a log")
    store.write("_metadata", _metadata(handle, "native").to_bytes())
    return folder


def _metadata(handle: KeyedHandle, form: str) -> CheckpointMetadata:
    entry = OperatorEntry("count", "count", 1, 128, (SubtaskEntry(0, keyed=(handle,)),))
    return CheckpointMetadata("0" * 32, "bench", 1, 0, "savepoint", form, operators=(entry,))


class ReadSavepoint(_Written):
    """The whole state read back as Arrow, against pyarrow reading the same columns from one Parquet file."""

    name = "savepoint-read"
    baseline = "pyarrow"
    asked = {"holdfast": Asked(0.8)}
    guarded: tuple[str, ...] = ("holdfast",)

    def contenders(self) -> dict[str, Callable[[int], float]]:
        pq.write_table(self.sorted, self.folder / "plain.parquet", compression="zstd", use_dictionary=False)
        return {"pyarrow": self._pyarrow, "holdfast": self._ours}

    def _pyarrow(self, _seed: int) -> float:
        return self.entries / timed(lambda: pq.read_table(self.folder / "plain.parquet"))

    def _ours(self, _seed: int) -> float:
        with savepoint.open(self.path) as opened:
            started = time.perf_counter()
            table = opened.read("count", "total").read_all()
            seconds = time.perf_counter() - started
        if table.num_rows != self.entries:
            raise WrongAnswer("entries are missing")
        return self.entries / seconds


class OneKey(_Written):
    """Milliseconds to look up one key with the savepoint open, the median of fifty, against the limit of 20 ms."""

    name = "savepoint-lookup"
    unit = "ms"
    higher_is_better = False
    baseline = "limit of 20 ms"
    asked = {"one key": Asked(1.0), "one key group": Asked(4.0)}

    def contenders(self) -> dict[str, Callable[[int], float]]:
        return {"limit of 20 ms": lambda _seed: 20.0, "one key": self._key, "one key group": self._group}

    def _key(self, seed: int) -> float:
        expected = dict(zip(self.keys.tolist(), self.table.column("value").to_pylist()))
        chosen = np.random.default_rng(seed).choice(self.keys, 50).tolist()
        times = []
        with savepoint.open(self.path) as opened:
            for key in chosen:
                started = time.perf_counter()
                value = opened.lookup("count", "total", key)
                times.append((time.perf_counter() - started) * 1000)
                if value != expected[key]:
                    raise WrongAnswer(f"key {key} reads {value}")
        return float(np.median(times))

    def _group(self, seed: int) -> float:
        times = []
        with savepoint.open(self.path) as opened:
            for group in np.random.default_rng(seed).integers(0, 128, 20).tolist():
                started = time.perf_counter()
                table = opened.read("count", "total", key_groups=group).read_all()
                times.append((time.perf_counter() - started) * 1000)
                if set(table.column("key_group").to_pylist()) != {group}:
                    raise WrongAnswer("rows of another key group")
        return float(np.median(times))


class Regroup(_Written):
    """Changing the maximum parallelism from 128 to 256 (every key hashed and sorted again), and the diff of two
    savepoints that differ in nothing, against the million entries a second that were asked for."""

    name = "savepoint-regroup-diff"
    unit = "entries/s"
    baseline = "1M entries/s"
    asked = {"regroup": Asked(1.0), "diff": Asked(1.0)}
    rounds = (3, 5)

    def contenders(self) -> dict[str, Callable[[int], float]]:
        self.other = self._bootstrap()
        return {"1M entries/s": lambda _seed: 1e6, "regroup": self._regroup, "diff": self._diff}

    def _regroup(self, seed: int) -> float:
        path = str(self.folder / f"regrouped-{seed}-{time.monotonic_ns()}")
        seconds = timed(lambda: savepoint.rescale_savepoint(self.path, path, max_parallelism=256))
        with savepoint.open(path) as opened:
            if opened.max_parallelism("count") != 256 or opened.read("count", "total").read_all().num_rows != self.entries:
                raise WrongAnswer("entries are missing")
        shutil.rmtree(path)
        return self.entries / seconds

    def _diff(self, _seed: int) -> float:
        found: Any = None

        def compare() -> None:
            nonlocal found
            found = savepoint.compare(self.path, self.other)
        seconds = timed(compare)
        if found:
            raise WrongAnswer("a difference where there is none")
        return self.entries / seconds


class RestoreIntoRocksDB(_Written):
    """Three million int entries restored from an open savepoint into RocksDB, until the first key has been read, against
    the 500,000 entries a second that were asked for. Then every key and value is compared."""

    name = "savepoint-restore-rocksdb"
    unit = "entries/s"
    baseline = "500k entries/s"
    asked = {"restore": Asked(1.0)}
    rounds = (3, 5)

    def contenders(self) -> dict[str, Callable[[int], float]]:
        return {"500k entries/s": lambda _seed: 5e5, "restore": self._restore}

    def _restore(self, seed: int) -> float:
        place = self.folder / f"rocksdb-{seed}-{time.monotonic_ns()}"
        probe = int(self.keys[seed % self.entries])
        with savepoint.open(self.path) as opened, create_backend("rocksdb", directory=str(place)) as backend:
            started = time.perf_counter()
            keyed = backend.keyed(uid="count", key_type=int, max_parallelism=128, key_groups=KeyGroupRange(0, 127),
                                  restore=opened.handles("count"), source=opened.source)
            total: Any = keyed.state(TOTAL)
            keyed.set_current_key(probe)
            first = total.value()
            seconds = time.perf_counter() - started
            values = self.table.column("value")
            if first != values[seed % self.entries].as_py():
                raise WrongAnswer(f"key {probe} reads {first}")
            for batch in self.table.to_batches(max_chunksize=100_000):
                if not total.value_many(batch.column("key")).equals(batch.column("value")):
                    raise WrongAnswer("a value differs")
            if sum(1 for _ in total.stream_keys()) != self.entries:
                raise WrongAnswer("there are keys that were never written")
        shutil.rmtree(place, ignore_errors=True)
        return self.entries / seconds


class InspectLarge(Benchmark):
    """Milliseconds that `holdfast savepoint inspect -o json` takes, as a process from start to end, on the metadata of a
    savepoint with a hundred million entries in ten thousand files (four states, 2,500 subtasks, 16,384 key groups), against
    the limit of one second. No data is there to be read."""

    name = "savepoint-inspect"
    unit = "ms"
    higher_is_better = False
    baseline = "limit of 1 s"
    asked = {"inspect": Asked(1.0)}

    def setup(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
        large_metadata(self.folder)

    def contenders(self) -> dict[str, Callable[[int], float]]:
        return {"limit of 1 s": lambda _seed: 1000.0, "inspect": self._inspect}

    def _inspect(self, _seed: int) -> float:
        command = [str(Path(sys.executable).with_name("holdfast")), "savepoint", "inspect", str(self.folder), "-o", "json"]
        started = time.perf_counter()
        done = subprocess.run(command, capture_output=True, check=True)
        milliseconds = (time.perf_counter() - started) * 1000
        [operator] = json.loads(done.stdout)["operators"]
        if sum(state["rows"] for state in operator["states"]) < 100_000_000 or len(operator["subtasks"]) != 2_500:
            raise WrongAnswer("the description lacks entries or subtasks")
        return milliseconds

    def teardown(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def large_metadata(folder: Path, *, states: int = 4, parallelism: int = 2_500, max_parallelism: int = 16_384,
                   rows: int = 1_526) -> None:
    """`_metadata` of a savepoint with `rows` entries a state in each key group, whose files were never written."""
    schemas = [schema_of(ValueStateDescriptor(f"state-{index}", int), range(index)) for index in range(states)]
    subtasks = []
    for index in range(parallelism):
        span = key_group_range(index, parallelism, max_parallelism)
        groups, files, statistics = len(span), [], {}
        for schema in schemas:
            path = part_path("count", schema.name, StateKind.VALUE, span.first, span.last)
            files.append(StateFile(path, rows * groups * 8, f"{index:032x}"))
            part = {"path": path, "key_groups": [span.first, span.last], "rows": rows * groups,
                    "row_groups": [[span.first, span.last, rows * groups]]}
            largest = [{"key": index * 100 + number, "rows": 1, "bytes": 20} for number in range(10)]
            statistics[schema.name] = StateStatistics([rows] * groups, [rows * 20] * groups, largest, [part])
        handle = open_handle(state_type(int).to_json(), max_parallelism, span, schemas, files, statistics)
        subtasks.append(SubtaskEntry(index, keyed=(handle,)))
    entry = OperatorEntry("count", "count", parallelism, max_parallelism, tuple(subtasks))
    metadata = CheckpointMetadata("0" * 32, "large", 1, 0, "savepoint", "open", operators=(entry,))
    (folder / "_metadata").write_bytes(metadata.to_bytes())


_PEAK = """
import sys, savepoint
from savepoint.diff import compare
source, target, what = sys.argv[1:]
if what == "regroup":
    savepoint.rescale_savepoint(source, target, max_parallelism=256)
elif what == "re-cut":
    savepoint.rescale_savepoint(source, target, parallelism=5)
elif what == "map":
    savepoint.Transform(source).map_batches("count", "total", lambda batch: batch).write(target)
elif what == "retype":
    savepoint.Transform(source).change_type("count", "total", float).strip_expired().write(target)
elif what == "edit":
    with savepoint.Edit(source, [{"op": "set", "operator": "count", "state": "total", "key": 1, "value": 2}]) as edit:
        edit.write(target)
elif compare(source, source):
    sys.exit("a difference where there is none")
# VmHWM and not ru_maxrss, in which the memory of the process that started this one counts too
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""


OPERATIONS = ("regroup", "re-cut", "map", "retype", "edit", "diff")
SIZES = {"3M": 3_000_000, "30M": 30_000_000}


class TransformMemory(Benchmark):
    """Peak memory in MiB of a process that transforms or compares savepoints of 3 and of 30 million int entries (a tenth of
    each where the run is quick): every transform, an edit, a diff; against the limit of 1 GiB. Interpreter and libraries
    are about 110 MiB of each."""

    name = "savepoint-memory"
    unit = "MiB"
    higher_is_better = False
    baseline = "limit of 1 GiB"
    asked = {f"{what}, {size}": Asked(1.0) for size in SIZES for what in OPERATIONS}
    rounds = (1, 1)
    disk_gib = 3.0
    memory_gib = 2.0

    def setup(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
        self.rows = {size: rows // (10 if self.quick else 1) for size, rows in SIZES.items()}
        for size, rows in self.rows.items():
            with savepoint.SavepointWriter(self.folder / size, max_parallelism=128) as writer:
                writer.keyed("count", TOTAL, _numbers(rows), key_type=int)

    def contenders(self) -> dict[str, Callable[[int], float]]:
        return {"limit of 1 GiB": lambda _seed: 1024.0,
                **{f"{what}, {size}": partial(self._peak, what, size) for size in SIZES for what in OPERATIONS}}

    def _peak(self, what: str, size: str, _seed: int) -> float:
        target = self.folder / "target"
        command = [sys.executable, "-c", _PEAK, str(self.folder / size), str(target), what]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        if target.exists():
            with savepoint.open(target) as opened:
                if sum(state.rows or 0 for state in opened.states()) != self.rows[size]:
                    raise WrongAnswer("entries are missing")
            shutil.rmtree(target)
        return int(done.stdout) / 1024

    def teardown(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _numbers(rows: int) -> Iterator[pa.RecordBatch]:
    for begin in range(0, rows, 250_000):
        keys = np.arange(begin, min(rows, begin + 250_000), dtype=np.int64)
        yield pa.RecordBatch.from_arrays([pa.array(keys), pa.array(keys * 7)], ["key", "value"])

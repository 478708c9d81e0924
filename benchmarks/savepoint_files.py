"""Open savepoints: writing, reading, one key group, one key, comparing, re-grouping."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import savepoint
from benchmarks.measure import Asked, Benchmark, WrongAnswer, timed
from statebackend import ValueStateDescriptor, key_groups_of

BASE = 3_000_000


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
            writer.keyed("count", ValueStateDescriptor("total", int), self.table, key_type=int)
        return path

    def teardown(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class WriteSavepoint(_Written):
    """Three million int entries written as an open savepoint (sorted, cut by key group, checksums, statistics), against
    pyarrow writing the same, already sorted columns as one Parquet file with zstd."""

    name = "savepoint-write"
    baseline = "pyarrow"
    asked = {"holdfast": Asked(0.35)}
    guarded: tuple[str, ...] = ("holdfast",)

    def contenders(self) -> dict[str, Callable[[int], float]]:
        return {"pyarrow": self._pyarrow, "holdfast": self._ours}

    def _pyarrow(self, _seed: int) -> float:
        return self.entries / timed(lambda: pq.write_table(self.sorted, self.folder / "plain.parquet", compression="zstd",
                                                           use_dictionary=False))

    def _ours(self, _seed: int) -> float:
        started = time.perf_counter()
        path = self._bootstrap()
        seconds = time.perf_counter() - started
        with savepoint.open(path) as opened:
            if opened.read("count", "total").read_all().num_rows != self.entries:
                raise WrongAnswer("entries are missing")
        shutil.rmtree(path)
        return self.entries / seconds


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

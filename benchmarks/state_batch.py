"""Arrow batch calls: the fold of count and sum by key, against loops over the bare structures."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.measure import Asked, Benchmark, Growth, WrongAnswer, timed
from benchmarks.state_access import bare_rocksdict
from statebackend import AggregatingStateDescriptor, KeyGroupRange, create_backend

BATCH = 65_536


class _Fold(Benchmark):
    unit = "rows/s"
    keys = 1_000_000
    batches = 12
    strings = False
    backend = "memory"

    def setup(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
        if self.quick:
            self.batches = 5
        options: dict[str, Any] = {"directory": str(self.folder / "state")} if self.backend == "rocksdb" else {}
        self.opened = create_backend(self.backend, **options)
        self.keyed = self.opened.keyed(uid="bench", key_type=str if self.strings else int, max_parallelism=128,
                                       key_groups=KeyGroupRange(0, 127))
        self.count: Any = self.keyed.state(AggregatingStateDescriptor("count", int, "count"))
        self.sum: Any = self.keyed.state(AggregatingStateDescriptor("sum", int, "sum"))
        self.totals = (0, 0)

    def teardown(self) -> None:
        self.opened.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _data(self, seed: int) -> list[tuple[pa.Array, pa.Array]]:
        random = np.random.default_rng(seed)
        made = []
        for _ in range(self.batches):
            keys = pa.array(random.integers(0, self.keys, BATCH))
            made.append((keys.cast(pa.string()) if self.strings else keys, pa.array(random.integers(0, 100, BATCH))))
        return made

    def _ours(self, seed: int) -> float:
        data = self._data(seed)

        def fold() -> None:
            for keys, values in data:
                self.count.add_many(keys, values)
                self.sum.add_many(keys, values)
        seconds = timed(fold)
        self._check(data)
        return self.batches * BATCH / seconds

    def _check(self, data: list[tuple[pa.Array, pa.Array]]) -> None:
        rows = sum(len(keys) for keys, _ in data)
        amount = sum(int(np.asarray(values).sum()) for _, values in data)
        self.totals = (self.totals[0] + rows, self.totals[1] + amount)
        everything = pa.array(np.arange(self.keys))
        everything = everything.cast(pa.string()) if self.strings else everything
        counted = self.count.get_many(everything).to_numpy(zero_copy_only=False)
        summed = self.sum.get_many(everything).to_numpy(zero_copy_only=False)
        found = (int(np.nansum(counted.astype(float))), int(np.nansum(summed.astype(float))))
        if found != self.totals:
            raise WrongAnswer(f"{found} instead of {self.totals}")

    def _bare_dict(self) -> Callable[[int], float]:
        table: dict[Any, tuple[int, int]] = {}

        def run(seed: int) -> float:
            data = [(keys.to_pylist(), values.to_pylist()) for keys, values in self._data(seed)]

            def fold() -> None:
                for keys, values in data:
                    for key, value in zip(keys, values):
                        count, total = table.get(key, (0, 0))
                        table[key] = (count + 1, total + value)
            return self.batches * BATCH / timed(fold)
        return run


class MemoryFold(_Fold):
    """Count and sum by int64 key, in Arrow batches of 65,536 rows over one million uniform keys, on the memory backend,
    against a dict loop over Python ints that keeps both."""

    name = "memory-fold-int"
    baseline = "bare dict"
    asked = {"holdfast": Asked(8, 12)}
    guarded: tuple[str, ...] = ("holdfast",)
    growth: Growth | None = Growth("keys", (10_000, 100_000, 1_000_000))

    def contenders(self) -> dict[str, Callable[[int], float]]:
        return {"bare dict": self._bare_dict(), "holdfast": self._ours}


class MemoryFoldStrings(MemoryFold):
    """The same fold with string keys."""

    name = "memory-fold-str"
    strings = True
    growth = None
    asked = {"holdfast": Asked(2, 4)}


class RocksFold(_Fold):
    """Count and sum by int64 key in Arrow batches of 65,536 rows over one million uniform keys on the RocksDB backend,
    against one bare rocksdict get and put per row that keeps both in one value."""

    name = "rocksdb-fold-uniform"
    baseline = "bare rocksdict"
    backend = "rocksdb"
    asked = {"holdfast": Asked(1.3, 1.6)}
    guarded: tuple[str, ...] = ("holdfast",)
    growth: Growth | None = Growth("keys", (10_000, 100_000, 1_000_000))
    batches = 6

    def setup(self) -> None:
        super().setup()
        if self.quick:
            self.batches = 2
        self.raw = bare_rocksdict(self.folder / "raw")

    def teardown(self) -> None:
        self.raw.close()
        super().teardown()

    def contenders(self) -> dict[str, Callable[[int], float]]:
        return {"bare rocksdict": self._bare_rocksdict, "holdfast": self._ours}

    def _bare_rocksdict(self, seed: int) -> float:
        data = [(keys.to_pylist(), values.to_pylist()) for keys, values in self._data(seed)]

        def fold() -> None:
            get, put = self.raw.get, self.raw.put
            for keys, values in data:
                for key, value in zip(keys, values):
                    stored = key.to_bytes(8, "big")
                    old = get(stored) or bytes(16)
                    count, total = int.from_bytes(old[:8], "big") + 1, int.from_bytes(old[8:], "big") + value
                    put(stored, count.to_bytes(8, "big") + total.to_bytes(8, "big"))
        return self.batches * BATCH / timed(fold)


class RocksFoldHot(RocksFold):
    """The same fold on RocksDB over ten thousand hot keys."""

    name = "rocksdb-fold-hot"
    keys = 10_000
    growth = None
    asked = {"holdfast": Asked(8, 12)}

"""Restore and rescale: how soon a backend is usable, and how fast a full snapshot becomes memory."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.measure import Asked, Benchmark, Growth, WrongAnswer
from statebackend import KeyedHandle, LocalFiles, ValueStateDescriptor, create_backend, key_group_range

COUNT = ValueStateDescriptor("value", int)


class _Snapshotted(Benchmark):
    """Handles of some subtasks whose files are local."""

    entries = 3_000_000
    backend = "rocksdb"
    old = 2

    def setup(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
        if self.quick:
            self.entries = 300_000
        self.files = LocalFiles(self.folder / "files")
        self.handles = [self._write(index) for index in range(self.old)]
        self.number = 0

    def _write(self, index: int) -> KeyedHandle:
        groups = key_group_range(index, self.old, 128)
        with self._backend(f"old-{index}") as backend:
            keyed: Any = backend.keyed(uid="bench", key_type=int, max_parallelism=128, key_groups=groups)
            state: Any = keyed.state(COUNT)
            from statebackend import key_groups_of

            for start in range(0, self.entries, 250_000):
                keys = np.arange(start, min(start + 250_000, self.entries))
                own = key_groups_of(keys, 128)
                keys = keys[(own >= groups.first) & (own <= groups.last)]
                state.update_many(pa.array(keys), pa.array(keys * 2))
            handle: KeyedHandle = keyed.snapshot(1, self.files).run()
            return handle

    def _backend(self, name: str) -> Any:
        options: dict[str, Any] = {"directory": str(self.folder / name)} if self.backend == "rocksdb" else {}
        return create_backend(self.backend, **options)

    def teardown(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _restore(self, new: int, backend_name: str | None = None) -> float:
        """Seconds until every new subtask has answered a read; then all is counted."""
        self.number += 1
        opened, seconds, total = [], 0.0, 0
        for index in range(new):
            backend = self._backend(f"new-{self.number}-{index}")
            groups = key_group_range(index, new, 128)
            handles = [handle for handle in self.handles if handle.key_groups.intersect(groups)]
            started = time.perf_counter()
            keyed = backend.keyed(uid="bench", key_type=int, max_parallelism=128, key_groups=groups, restore=handles,
                                  source=self.files)
            state = keyed.state(COUNT)
            keyed.set_current_key(_key_in(groups))
            value = state.value()
            seconds = max(seconds, time.perf_counter() - started)
            opened.append(backend)
            if value != _key_in(groups) * 2:
                raise WrongAnswer(f"key {_key_in(groups)} reads {value}")
            total += sum(1 for _ in state.stream_keys())
        for index, backend in enumerate(opened):
            backend.close()
            shutil.rmtree(self.folder / f"new-{self.number}-{index}", ignore_errors=True)
        if total != self.entries:
            raise WrongAnswer(f"{total} entries instead of {self.entries}")
        return seconds


def _key_in(groups: Any) -> int:
    from statebackend import key_group_of

    return next(key for key in range(100_000) if key_group_of(key, 128) in groups)


class RescaleTwoToThree(_Snapshotted):
    """RocksDB, three million int entries in the snapshots of two subtasks, files local: milliseconds until the slowest of
    three new subtasks has answered its first read, against the limit of 150 ms that was set for it."""

    name = "rescale-rocksdb-2-3"
    unit = "ms"
    higher_is_better = False
    baseline = "limit of 150 ms"
    asked = {"holdfast": Asked(1.0, 3.0)}
    rounds = (3, 3)
    new = 3
    disk_gib = 2.0
    growth: Growth | None = Growth("entries", (30_000, 300_000, 3_000_000))

    def contenders(self) -> dict[str, Callable[[int], float]]:
        return {"limit of 150 ms": lambda _seed: 150.0, "holdfast": lambda _seed: self._restore(self.new) * 1000}


class RescaleFourToTwo(RescaleTwoToThree):
    """The same from four subtasks to two."""

    name = "rescale-rocksdb-4-2"
    growth = None
    old, new = 4, 2


class RescaleOneToFour(RescaleTwoToThree):
    """The same from one subtask to four."""

    name = "rescale-rocksdb-1-4"
    growth = None
    old, new = 1, 4


class RestoreMemory(_Snapshotted):
    """A full snapshot of a million int entries restored into the filesystem backend, until the state answers a read:
    entries per second, against the two million that were asked for."""

    name = "restore-filesystem"
    unit = "entries/s"
    baseline = "2M entries/s"
    backend = "filesystem"
    entries = 1_000_000
    old = 1
    asked = {"holdfast": Asked(1.0)}
    rounds = (3, 5)
    growth = Growth("entries", (30_000, 300_000, 3_000_000))

    def contenders(self) -> dict[str, Callable[[int], float]]:
        return {"2M entries/s": lambda _seed: 2e6, "holdfast": lambda _seed: self.entries / self._restore(1)}

"""Snapshots: how long the synchronous part holds the operator, what the asynchronous part costs it, how many bytes."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa

from benchmarks.measure import Asked, Benchmark, WrongAnswer
from statebackend import KeyGroupRange, LocalFiles, ValueState, ValueStateDescriptor, create_backend


class _Loaded(Benchmark):
    """A backend with a million entries to snapshot."""

    backend = "filesystem"
    entries = 1_000_000
    value_bytes = 8

    def setup(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
        if self.quick:
            self.entries = 200_000
        options: dict[str, Any] = {"directory": str(self.folder / "state")} if self.backend == "rocksdb" else {}
        self.opened = create_backend(self.backend, **options)
        self.keyed: Any = self.opened.keyed(uid="bench", key_type=int, max_parallelism=128, key_groups=KeyGroupRange(0, 127))
        kind: Any = int if self.value_bytes == 8 else bytes
        self.state = cast("ValueState[Any]", self.keyed.state(ValueStateDescriptor("value", kind)))
        self.files = LocalFiles(self.folder / "files")
        self.random = np.random.default_rng(7)
        for start in range(0, self.entries, 100_000):
            keys = np.arange(start, min(start + 100_000, self.entries))
            self.state.update_many(pa.array(keys), self._values(len(keys)))
        self.number = 0
        self._complete()

    def _values(self, count: int) -> pa.Array:
        if self.value_bytes == 8:
            return pa.array(self.random.integers(0, 2**40, count))
        data = self.random.bytes(count * self.value_bytes)
        return pa.array([data[at:at + self.value_bytes] for at in range(0, len(data), self.value_bytes)], pa.binary())

    def _complete(self) -> Any:
        self.number += 1
        handle = self.keyed.snapshot(self.number, self.files).run()
        self.keyed.checkpoint_completed(self.number)
        return handle

    def _change(self, share: float) -> None:
        keys = self.random.choice(self.entries, int(self.entries * share), replace=False)
        for key in keys.tolist():
            self.keyed.set_current_key(key)
            self.state.update(key if self.value_bytes == 8 else self.random.bytes(self.value_bytes))

    def teardown(self) -> None:
        self.opened.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class SyncPart(_Loaded):
    """The synchronous part of an incremental snapshot of a million int entries with one per cent changed before each:
    the 99th percentile of 40, in milliseconds, against the limit of 5 ms that was set for it."""

    name = "snapshot-sync-filesystem"
    unit = "ms"
    higher_is_better = False
    baseline = "limit of 5 ms"
    asked = {"holdfast": Asked(1.0, 5.0)}
    rounds = (3, 5)

    def contenders(self) -> dict[str, Callable[[int], float]]:
        return {"limit of 5 ms": lambda _seed: 5.0, "holdfast": self._ours}

    def _ours(self, seed: int) -> float:
        times = []
        for _ in range(20 if self.quick else 40):
            self._change(0.01)
            self.number += 1
            started = time.perf_counter()
            pending = self.keyed.snapshot(self.number, self.files)
            times.append((time.perf_counter() - started) * 1000)
            pending.run()
            self.keyed.checkpoint_completed(self.number)
        return float(np.percentile(times, 99))


class SyncPartRocks(SyncPart):
    """The same synchronous part on the RocksDB backend."""

    name = "snapshot-sync-rocksdb"
    backend = "rocksdb"


class AsyncPart(_Loaded):
    """Read-modify-write per record in the foreground while full snapshots of a million int entries are written in the
    background, against the same loop with no snapshot; a stall is the longest gap between two completions, and one
    above 20 ms is a wrong answer in the full run."""

    name = "snapshot-async-filesystem"
    unit = "events/s"
    baseline = "no snapshot"
    asked = {"holdfast": Asked(0.4)}
    rounds = (3, 5)

    def contenders(self) -> dict[str, Callable[[int], float]]:
        return {"no snapshot": lambda seed: self._loop(seed, None), "holdfast": self._with_snapshot}

    def _loop(self, seed: int, until: threading.Thread | None) -> float:
        keys = np.random.default_rng(seed).integers(0, self.entries, 400_000).tolist()
        done, last, self.stall, started = 0, time.perf_counter(), 0.0, time.perf_counter()
        for key in keys:
            self.keyed.set_current_key(key)
            self.state.update((self.state.value() or 0) + 1)
            now = time.perf_counter()
            if now - last > self.stall:
                self.stall = now - last
            last = now
            done += 1
            if until is not None and not done % 1000 and not until.is_alive():
                break
        return done / (time.perf_counter() - started)

    def _with_snapshot(self, seed: int) -> float:
        self.number += 1
        pending = self.keyed.snapshot(self.number, self.files, full=True)
        writer = threading.Thread(target=pending.run)
        writer.start()
        rate = self._loop(seed, writer)
        writer.join()
        self.keyed.checkpoint_completed(self.number)
        self.stalls = [*getattr(self, "stalls", []), self.stall]
        return rate


class AsyncPartRocks(AsyncPart):
    """The same foreground loop while a snapshot of the RocksDB backend is written."""

    name = "snapshot-async-rocksdb"
    backend = "rocksdb"


class IncrementalBytes(_Loaded):
    """Twenty-four incremental snapshots in a row of a million entries of 100 bytes with one per cent of uniform keys
    changed before each: bytes stored per snapshot on average against the changed bytes (keys and values)."""

    name = "incremental-bytes-rocksdb"
    unit = "bytes/snapshot"
    higher_is_better = False
    baseline = "changed bytes"
    backend = "rocksdb"
    value_bytes = 100
    asked = {"holdfast": Asked(1 / 1.5, 1 / 1.1)}
    rounds = (1, 1)

    def contenders(self) -> dict[str, Callable[[int], float]]:
        return {"changed bytes": lambda _seed: self.entries * 0.01 * (8 + self.value_bytes), "holdfast": self._ours}

    def _ours(self, seed: int) -> float:
        sizes = []
        for _ in range(24):
            self._change(0.01)
            sizes.append(self._complete().new_bytes)
        changed = self.entries * 0.01 * (8 + self.value_bytes)
        if max(sizes) > 5 * changed:
            raise WrongAnswer(f"one snapshot stored {max(sizes) / changed:.1f}x the changed bytes")
        return float(np.mean(sizes))


class IncrementalBytesFilesystem(IncrementalBytes):
    """The same twenty-four incremental snapshots on the filesystem backend."""

    name = "incremental-bytes-filesystem"
    backend = "filesystem"

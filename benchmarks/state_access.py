"""Per-record state access against the bare structures below it: dict for memory, rocksdict for RocksDB."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import rocksdict

from benchmarks.measure import Asked, Benchmark, Growth, WrongAnswer, timed
from statebackend import KeyGroupRange, TtlConfig, ValueStateDescriptor, create_backend


def key_sequence(seed: int, keys: int, events: int) -> list[int]:
    """A fresh sequence of fresh int objects; never the same twice."""
    return [int(key) for key in np.random.default_rng(seed).integers(0, keys, events)]


def bare_rocksdict(folder: Path) -> Any:
    """A database without our code around it: raw bytes, write-ahead log off as in the backend."""
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    database = rocksdict.Rdict(str(folder), options)
    writes = rocksdict.WriteOptions()
    writes.disable_wal = True
    database.set_write_options(writes)
    return database


def zipf_sequence(seed: int, keys: int, events: int) -> list[int]:
    """Keys by Zipf's law with exponent 1.1: a few are most of the events; which ones they are changes with the seed."""
    random = np.random.default_rng(seed)
    ranks = random.zipf(1.1, events) % keys
    return [int(key) for key in (ranks * 2_654_435_761 + seed) % keys]


class _ReadModifyWrite(Benchmark):
    sequence: Callable[[int, int, int], list[int]] = staticmethod(key_sequence)
    keys = 1_000_000
    events = 1_000_000
    unit = "events/s"
    backend: str
    options: dict[str, Any] = {}

    def setup(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
        if self.quick:
            self.events = 300_000
        self.open_backends: list[Any] = []
        self.states = {"holdfast": self._state(None), "holdfast ttl": self._state(TtlConfig("1d"))}

    def _state(self, ttl: TtlConfig | None) -> tuple[Any, Any]:
        options = dict(self.options)
        if self.backend == "rocksdb":
            options["directory"] = str(self.folder / ("ttl" if ttl else "plain"))
        backend = create_backend(self.backend, **options)
        self.open_backends.append(backend)
        keyed = backend.keyed(uid="bench", key_type=int, max_parallelism=128, key_groups=KeyGroupRange(0, 127))
        return keyed, keyed.state(ValueStateDescriptor("count", int, default=0, ttl=ttl))

    def teardown(self) -> None:
        for backend in self.open_backends:
            backend.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _ours(self, name: str) -> Callable[[int], float]:
        keyed, state = self.states[name]

        def run(seed: int) -> float:
            sequence = self.sequence(seed, self.keys, self.events)

            def loop() -> None:
                set_key, value, update = keyed.set_current_key, state.value, state.update
                for key in sequence:
                    set_key(key)
                    update(value() + 1)
            seconds = timed(loop)
            self._check(name, state, keyed, sequence)
            return len(sequence) / seconds
        return run

    def _check(self, name: str, state: Any, keyed: Any, sequence: list[int]) -> None:
        counted = self.probe.setdefault(name, {})
        for key in sequence:
            if key % 997 == 0:
                counted[key] = counted.get(key, 0) + 1
        for key, count in counted.items():
            keyed.set_current_key(key)
            if state.value() != count:
                raise WrongAnswer(f"key {key}: {state.value()} instead of {count}")

    @property
    def probe(self) -> dict[str, dict[int, int]]:
        found: dict[str, dict[int, int]] = self.__dict__.setdefault("_probe", {})
        return found


class MemoryUniform(_ReadModifyWrite):
    """value() and update() per record through the public API, types checked and changes tracked, on the memory backend,
    against a bare dict loop doing the same increments: one million int keys, uniform."""

    name = "memory-rmw-uniform"
    baseline = "bare dict"
    backend = "memory"
    asked = {"holdfast": Asked(0.55, 0.70)}
    guarded: tuple[str, ...] = ("holdfast", "holdfast ttl")
    growth: Growth | None = Growth("keys", (10_000, 100_000, 1_000_000))

    def contenders(self) -> dict[str, Callable[[int], float]]:
        table: dict[int, int] = {}

        def bare(seed: int) -> float:
            sequence = self.sequence(seed, self.keys, self.events)

            def loop() -> None:
                for key in sequence:
                    table[key] = table.get(key, 0) + 1
            return len(sequence) / timed(loop)
        return {"bare dict": bare, "holdfast": self._ours("holdfast"), "holdfast ttl": self._ours("holdfast ttl")}


class MemoryHot(MemoryUniform):
    """The same read-modify-write on the memory backend over ten thousand hot keys."""

    name = "memory-rmw-hot"
    keys = 10_000
    growth = None
    asked = {"holdfast": Asked(0.30, 0.45)}
    guarded: tuple[str, ...] = ("holdfast",)


class MemoryZipf(MemoryUniform):
    """The same read-modify-write on the memory backend over a million keys that follow Zipf's law (exponent 1.1)."""

    name = "memory-rmw-zipf"
    sequence = staticmethod(zipf_sequence)
    growth = None
    asked = {}
    guarded: tuple[str, ...] = ()


class MemoryTtl(MemoryUniform):
    """What TTL costs per record on the memory backend: the same read-modify-write over a million keys, with TTL against
    without."""

    name = "memory-ttl"
    baseline = "without TTL"
    growth = None
    asked = {"with TTL": Asked(0.55, 0.75)}
    guarded: tuple[str, ...] = ()

    def contenders(self) -> dict[str, Callable[[int], float]]:
        return {"without TTL": self._ours("holdfast"), "with TTL": self._ours("holdfast ttl")}


class RocksUniform(_ReadModifyWrite):
    """value() and update() per record on the RocksDB backend against bare rocksdict get and put with the key bytes built
    in the loop (write-ahead log off, same options): one million int keys, uniform; both databases aged alike."""

    name = "rocksdb-rmw-uniform"
    baseline = "bare rocksdict"
    backend = "rocksdb"
    asked = {"holdfast": Asked(0.85, 0.95)}
    guarded: tuple[str, ...] = ("holdfast", "holdfast ttl")
    growth: Growth | None = Growth("keys", (10_000, 100_000, 1_000_000))
    events = 500_000

    def setup(self) -> None:
        super().setup()
        if self.quick:
            self.events = 150_000
        self.raw = bare_rocksdict(self.folder / "raw")

    def teardown(self) -> None:
        self.raw.close()
        super().teardown()

    def contenders(self) -> dict[str, Callable[[int], float]]:
        raw = self.raw

        def bare(seed: int) -> float:
            sequence = self.sequence(seed, self.keys, self.events)

            def loop() -> None:
                get, put = raw.get, raw.put
                for key in sequence:
                    stored = key.to_bytes(8, "big")
                    old = get(stored)
                    put(stored, ((int.from_bytes(old, "big") if old else 0) + 1).to_bytes(8, "big"))
            return len(sequence) / timed(loop)
        return {"bare rocksdict": bare, "holdfast": self._ours("holdfast"), "holdfast ttl": self._ours("holdfast ttl")}


class RocksHot(RocksUniform):
    """The same read-modify-write on the RocksDB backend over ten thousand hot keys, where a write-back cache pays."""

    name = "rocksdb-rmw-hot"
    keys = 10_000
    growth = None
    asked = {"holdfast": Asked(2.5, 3.5)}
    guarded: tuple[str, ...] = ("holdfast",)


class RocksZipf(RocksUniform):
    """The same read-modify-write on the RocksDB backend over a million keys that follow Zipf's law (exponent 1.1)."""

    name = "rocksdb-rmw-zipf"
    sequence = staticmethod(zipf_sequence)
    growth = None
    asked = {}
    guarded: tuple[str, ...] = ()


class RocksTtl(RocksUniform):
    """What TTL costs per record on the RocksDB backend: the same read-modify-write over a million keys, with TTL against
    without."""

    name = "rocksdb-ttl"
    baseline = "without TTL"
    growth = None
    asked = {"with TTL": Asked(0.9)}
    guarded: tuple[str, ...] = ()

    def contenders(self) -> dict[str, Callable[[int], float]]:
        return {"without TTL": self._ours("holdfast"), "with TTL": self._ours("holdfast ttl")}

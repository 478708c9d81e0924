"""Per-record access to list, map, reducing and aggregating state, each against the same work on the bare structure."""

from __future__ import annotations

import shutil
import struct
import tempfile
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import Benchmark, WrongAnswer, timed
from benchmarks.state_access import bare_rocksdict
from statebackend import (
    AggregatingStateDescriptor,
    KeyGroupRange,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    StateDescriptor,
    create_backend,
)

FIELDS = 8
"""Map keys per key."""


class _Kind(Benchmark):
    """Records (key, value) over uniform keys; the bare loop does the same to a dict, or by get and put to rocksdict."""

    unit = "events/s"
    rounds = (3, 7)
    backend = "memory"
    baseline = "bare dict"
    keys = 100_000
    events = 400_000

    def setup(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
        if self.quick:
            self.events //= 8
        options = {"directory": str(self.folder / "state")} if self.backend == "rocksdb" else dict[str, Any]()
        self.opened = create_backend(self.backend, **options)
        self.keyed: Any = self.opened.keyed(uid="bench", key_type=int, max_parallelism=128, key_groups=KeyGroupRange(0, 127))
        self.state: Any = self.keyed.state(self.descriptor())
        self.table: dict[int, Any] = {}
        self.expected: dict[int, list[int]] = {}
        self.raw = bare_rocksdict(self.folder / "raw") if self.backend == "rocksdb" else None

    def teardown(self) -> None:
        self.opened.close()
        if self.raw is not None:
            self.raw.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def contenders(self) -> dict[str, Callable[[int], float]]:
        bare = self.bare_dict if self.raw is None else self.bare_rocksdict
        return {self.baseline: lambda seed: self._timed(seed, bare), "holdfast": self._ours}

    def _records(self, seed: int) -> list[tuple[int, int]]:
        random = np.random.default_rng(seed)
        return list(zip(random.integers(0, self.keys, self.events).tolist(), random.integers(0, 1000, self.events).tolist()))

    def _timed(self, seed: int, loop: Callable[[list[tuple[int, int]]], None]) -> float:
        records = self._records(seed)
        return len(records) / timed(lambda: loop(records))

    def _ours(self, seed: int) -> float:
        rate = self._timed(seed, self.holdfast)
        for key, value in self._records(seed):
            if key % 97 == 0:
                self.expected.setdefault(key, []).append(value)
        for key, values in self.expected.items():
            self.keyed.set_current_key(key)
            if (found := self.result()) != (wanted := self.wanted(values)):
                raise WrongAnswer(f"key {key}: {found} instead of {wanted}")
        return rate

    @abstractmethod
    def descriptor(self) -> StateDescriptor: ...

    def holdfast(self, records: list[tuple[int, int]]) -> None:
        """What a record does to our state; adding its value, unless the kind has no such call."""
        set_key, add = self.keyed.set_current_key, self.state.add
        for key, value in records:
            set_key(key)
            add(value)

    @abstractmethod
    def bare_dict(self, records: list[tuple[int, int]]) -> None: ...

    @abstractmethod
    def bare_rocksdict(self, records: list[tuple[int, int]]) -> None: ...

    @abstractmethod
    def result(self) -> Any: ...

    @abstractmethod
    def wanted(self, values: list[int]) -> Any: ...


class MemoryList(_Kind):
    """add() of one element per record to list state of 100,000 keys on the memory backend, against append to lists in a
    dict."""

    name = "memory-list"

    def descriptor(self) -> StateDescriptor:
        return ListStateDescriptor("list", int)

    def bare_dict(self, records: list[tuple[int, int]]) -> None:
        table = self.table
        for key, value in records:
            table.setdefault(key, []).append(value)

    def bare_rocksdict(self, records: list[tuple[int, int]]) -> None:
        assert self.raw is not None
        get, put = self.raw.get, self.raw.put
        for key, value in records:
            stored = key.to_bytes(8, "big")
            put(stored, (get(stored) or b"") + value.to_bytes(8, "big"))

    def result(self) -> Any:
        return list(self.state.get())

    def wanted(self, values: list[int]) -> Any:
        return values


class MemoryMap(_Kind):
    """get() and put() of one of eight map entries per record on the memory backend, against dicts in a dict."""

    name = "memory-map"

    def descriptor(self) -> StateDescriptor:
        return MapStateDescriptor("map", int, int)

    def holdfast(self, records: list[tuple[int, int]]) -> None:
        set_key, get, put = self.keyed.set_current_key, self.state.get, self.state.put
        for key, value in records:
            set_key(key)
            field = value % FIELDS
            put(field, (get(field) or 0) + value)

    def bare_dict(self, records: list[tuple[int, int]]) -> None:
        table = self.table
        for key, value in records:
            fields, field = table.setdefault(key, {}), value % FIELDS
            fields[field] = fields.get(field, 0) + value

    def bare_rocksdict(self, records: list[tuple[int, int]]) -> None:
        assert self.raw is not None
        get, put = self.raw.get, self.raw.put
        for key, value in records:
            stored = key.to_bytes(8, "big") + (value % FIELDS).to_bytes(8, "big")
            old = get(stored)
            put(stored, ((int.from_bytes(old, "big") if old else 0) + value).to_bytes(8, "big"))

    def result(self) -> Any:
        return dict(self.state.entries())

    def wanted(self, values: list[int]) -> Any:
        sums: dict[int, int] = {}
        for value in values:
            sums[value % FIELDS] = sums.get(value % FIELDS, 0) + value
        return sums


class MemoryReducing(_Kind):
    """add() to reducing state (sum) per record on the memory backend, against sums in a dict."""

    name = "memory-reducing"

    def descriptor(self) -> StateDescriptor:
        return ReducingStateDescriptor("sum", int, "sum")

    def bare_dict(self, records: list[tuple[int, int]]) -> None:
        table = self.table
        for key, value in records:
            table[key] = table.get(key, 0) + value

    def bare_rocksdict(self, records: list[tuple[int, int]]) -> None:
        assert self.raw is not None
        get, put = self.raw.get, self.raw.put
        for key, value in records:
            stored = key.to_bytes(8, "big")
            old = get(stored)
            put(stored, ((int.from_bytes(old, "big") if old else 0) + value).to_bytes(8, "big"))

    def result(self) -> Any:
        return self.state.get()

    def wanted(self, values: list[int]) -> Any:
        return sum(values)


class MemoryAggregating(MemoryReducing):
    """add() to aggregating state (average) per record on the memory backend, against (sum, count) tuples in a dict."""

    name = "memory-aggregating"

    def descriptor(self) -> StateDescriptor:
        return AggregatingStateDescriptor("average", int, "avg")

    def bare_dict(self, records: list[tuple[int, int]]) -> None:
        table = self.table
        for key, value in records:
            total, count = table.get(key, (0, 0))
            table[key] = (total + value, count + 1)

    def bare_rocksdict(self, records: list[tuple[int, int]]) -> None:
        assert self.raw is not None
        get, put, pack, unpack = self.raw.get, self.raw.put, struct.Struct(">qq").pack, struct.Struct(">qq").unpack
        for key, value in records:
            stored = key.to_bytes(8, "big")
            old = get(stored)
            total, count = unpack(old) if old else (0, 0)
            put(stored, pack(total + value, count + 1))

    def wanted(self, values: list[int]) -> Any:
        return sum(values) / len(values)


class RocksList(MemoryList):
    """The same add() to list state on the RocksDB backend, against bare rocksdict get and put of the longer list."""

    name, backend, baseline, events = "rocksdb-list", "rocksdb", "bare rocksdict", 200_000


class RocksMap(MemoryMap):
    """The same map entries on the RocksDB backend, against bare rocksdict get and put."""

    name, backend, baseline, events = "rocksdb-map", "rocksdb", "bare rocksdict", 200_000


class RocksReducing(MemoryReducing):
    """The same reducing state on the RocksDB backend, against bare rocksdict get and put."""

    name, backend, baseline, events = "rocksdb-reducing", "rocksdb", "bare rocksdict", 200_000


class RocksAggregating(MemoryAggregating):
    """The same aggregating state on the RocksDB backend, against bare rocksdict get and put."""

    name, backend, baseline, events = "rocksdb-aggregating", "rocksdb", "bare rocksdict", 200_000

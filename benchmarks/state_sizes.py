"""How state access depends on the size of a value, and what TTL adds to an entry on disk."""

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
from statebackend import KeyGroupRange, LocalFiles, TtlConfig, ValueStateDescriptor, create_backend


class ValueSizeMemory(Benchmark):
    """value() and update() of bytes per record on the memory backend over 20,000 uniform keys, against a bare dict: 100
    bytes a value, and by the size of the value from 8 bytes to 10 kB."""

    name = "memory-value-size"
    unit = "events/s"
    baseline = "bare dict"
    backend = "memory"
    rounds = (3, 7)
    keys, events, value_bytes = 20_000, 200_000, 100
    growth = Growth("value_bytes", (8, 100, 1_000, 10_000), quick_share=1.0)
    disk_gib = 3.0

    def setup(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
        if self.quick:
            self.events = 20_000
        if self.value_bytes >= 1_000:
            self.events //= 4
        options = {"directory": str(self.folder / "state")} if self.backend == "rocksdb" else dict[str, Any]()
        self.opened = create_backend(self.backend, **options)
        self.keyed: Any = self.opened.keyed(uid="bench", key_type=int, max_parallelism=128, key_groups=KeyGroupRange(0, 127))
        self.state: Any = self.keyed.state(ValueStateDescriptor("value", bytes))
        self.raw = bare_rocksdict(self.folder / "raw") if self.backend == "rocksdb" else None

    def teardown(self) -> None:
        self.opened.close()
        if self.raw is not None:
            self.raw.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def contenders(self) -> dict[str, Callable[[int], float]]:
        table: dict[int, bytes] = {}

        def bare(seed: int) -> float:
            keys, values = self._records(seed)

            def loop() -> None:
                for position, key in enumerate(keys):
                    table.get(key)
                    table[key] = values[position & 1023]
            return len(keys) / timed(loop)
        return {self.baseline: bare if self.raw is None else self._rocksdict, "holdfast": self._ours}

    def _records(self, seed: int) -> tuple[list[int], list[bytes]]:
        random = np.random.default_rng(seed)
        return random.integers(0, self.keys, self.events).tolist(), [random.bytes(self.value_bytes) for _ in range(1024)]

    def _rocksdict(self, seed: int) -> float:
        assert self.raw is not None
        (keys, values), get, put = self._records(seed), self.raw.get, self.raw.put

        def loop() -> None:
            for position, key in enumerate(keys):
                stored = key.to_bytes(8, "big")
                get(stored)
                put(stored, values[position & 1023])
        return len(keys) / timed(loop)

    def _ours(self, seed: int) -> float:
        keys, values = self._records(seed)
        set_key, value, update = self.keyed.set_current_key, self.state.value, self.state.update

        def loop() -> None:
            for position, key in enumerate(keys):
                set_key(key)
                value()
                update(values[position & 1023])
        seconds = timed(loop)
        last = {key: position for position, key in enumerate(keys) if key % 97 == 0}
        for key, position in last.items():
            set_key(key)
            if value() != values[position & 1023]:
                raise WrongAnswer(f"key {key} has not the bytes written last")
        return len(keys) / seconds


class ValueSizeRocks(ValueSizeMemory):
    """The same bytes on the RocksDB backend, against bare rocksdict get and put."""

    name = "rocksdb-value-size"
    baseline = "bare rocksdict"
    backend = "rocksdb"


class TtlBytes(Benchmark):
    """What TTL adds to an entry in a full snapshot of the RocksDB backend (200,000 int entries, files as stored): bytes an
    entry, against the limit of 12."""

    name = "rocksdb-ttl-bytes"
    unit = "bytes"
    higher_is_better = False
    baseline = "limit of 12 bytes"
    asked = {"holdfast": Asked(1.0)}
    rounds = (1, 1)
    entries = 200_000

    def setup(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))

    def teardown(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def contenders(self) -> dict[str, Callable[[int], float]]:
        return {"limit of 12 bytes": lambda _seed: 12.0, "holdfast": self._ours}

    def _ours(self, seed: int) -> float:
        plain, stamped = (self._size(seed, ttl) for ttl in (None, TtlConfig("1d")))
        return max(0.1, (stamped - plain) / self.entries)

    def _size(self, seed: int, ttl: TtlConfig | None) -> int:
        folder = self.folder / f"{seed}-{ttl is not None}"
        values = np.random.default_rng(seed).integers(0, 2**60, self.entries)
        with create_backend("rocksdb", directory=str(folder / "state")) as backend:
            keyed: Any = backend.keyed(uid="bench", key_type=int, max_parallelism=128, key_groups=KeyGroupRange(0, 127))
            state: Any = keyed.state(ValueStateDescriptor("value", int, ttl=ttl))
            state.update_many(pa.array(np.arange(self.entries)), pa.array(values))
            size: int = keyed.snapshot(1, LocalFiles(folder / "files"), full=True).run().size
        return size

"""Timers: set and fired in order on each backend, against a bare heap."""

from __future__ import annotations

import heapq
import shutil
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import Benchmark, Growth, WrongAnswer, timed
from statebackend import KeyGroupRange, TimeDomain, create_backend

BACKENDS = ("memory", "filesystem", "rocksdb")


class Timers(Benchmark):
    """100,000 event-time timers of as many keys at random moments: each is set by its key, then all fire in the order of
    time, a thousand at once, on each backend; against a bare heapq of (time, key) tuples, which neither removes duplicates
    nor can be snapshotted."""

    name = "timers"
    unit = "timers/s"
    baseline = "bare heapq"
    rounds = (3, 5)
    timers = 100_000
    growth = Growth("timers", (10_000, 100_000, 1_000_000), rounds=1, warm=False)
    memory_gib = 2.0

    def setup(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
        if self.quick:
            self.timers = min(self.timers, 20_000)

    def teardown(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def contenders(self) -> dict[str, Callable[[int], float]]:
        return {"bare heapq": self._heapq, **{name: self._ours(name) for name in BACKENDS}}

    def _moments(self, seed: int) -> list[tuple[int, int]]:
        moments = np.random.default_rng(seed).integers(0, 1_000_000_000, self.timers).tolist()
        return [(moment, key) for key, moment in enumerate(moments)]

    def _heapq(self, seed: int) -> float:
        moments, heap, fired = self._moments(seed), list[tuple[int, int]](), list[tuple[int, int]]()

        def work() -> None:
            for one in moments:
                heapq.heappush(heap, one)
            while heap:
                fired.append(heapq.heappop(heap))
        return self._rate(timed(work), moments, fired)

    def _rate(self, seconds: float, moments: list[tuple[int, int]], fired: list[tuple[int, int]]) -> float:
        if sorted(moments) != sorted(fired) or any(a[0] > b[0] for a, b in pairwise(fired)):
            raise WrongAnswer(f"{len(fired)} timers fired, in another order or number than {len(moments)} were set")
        return self.timers / seconds

    def _ours(self, name: str) -> Callable[[int], float]:
        def measured(seed: int) -> float:
            folder = self.folder / f"{name}-{seed}"
            options = {"directory": str(folder)} if name == "rocksdb" else dict[str, Any]()
            moments, fired = self._moments(seed), list[tuple[int, int]]()
            with create_backend(name, **options) as backend:
                keyed = backend.keyed(uid="bench", key_type=int, max_parallelism=128, key_groups=KeyGroupRange(0, 127))
                timers = keyed.timers

                def work() -> None:
                    for moment, key in moments:
                        keyed.set_current_key(key)
                        timers.register(TimeDomain.EVENT, moment)
                    while due := timers.pop_due(TimeDomain.EVENT, 1_000_000_000, 1000):
                        fired.extend((one.timestamp, one.key) for one in due)
                seconds = timed(work)
            shutil.rmtree(folder, ignore_errors=True)
            return self._rate(seconds, moments, fired)
        return measured

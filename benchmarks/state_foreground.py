"""What the foreground keeps while the asynchronous part of snapshots runs: its throughput, and its longest stall."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from benchmarks.measure import Asked, WrongAnswer
from benchmarks.state_snapshots import Loaded


class Foreground(NamedTuple):
    """Events a second, and the longest gap between two completions in milliseconds."""

    rate: float
    stall_ms: float


class _Foreground(Loaded):
    events = 400_000

    def work(self, seed: int, full: bool | None) -> Foreground:
        """Read-modify-write per record, with one snapshot after the other in the background (None: without).

        The synchronous part belongs to the throughput but not to a stall: it has benchmarks of its own.
        """
        keys = np.random.default_rng(seed).integers(0, self.entries, self.events // (4 if self.quick else 1)).tolist()
        set_key, value, update, clock = self.keyed.set_current_key, self.state.value, self.state.update, time.perf_counter
        stall, writer = 0.0, None
        started = last = clock()
        for position, key in enumerate(keys):
            if full is not None and not position % 500 and (writer is None or not writer.is_alive()):
                writer = self._next_snapshot(writer, full)
                last = clock()
            set_key(key)
            update((value() or 0) + 1)
            now = clock()
            if now - last > stall:
                stall = now - last
            last = now
        rate = len(keys) / (clock() - started)
        if writer is not None:
            self._finish(writer)
            if not self.written:
                raise WrongAnswer("no snapshot was written while the foreground worked")
        return Foreground(rate, stall * 1000)

    def _next_snapshot(self, before: threading.Thread | None, full: bool) -> threading.Thread:
        self._finish(before)
        self.number += 1
        pending = self.keyed.snapshot(self.number, self.files, full=full)

        def write() -> None:
            self.written.append(pending.run())
        self.written: list[object] = []
        writer = threading.Thread(target=write)
        writer.start()
        return writer

    def _finish(self, writer: threading.Thread | None) -> None:
        if writer is not None:
            writer.join()
            self.keyed.checkpoint_completed(self.number)


class AsyncPart(_Foreground):
    """Read-modify-write per record in the foreground over a million int entries of the filesystem backend while one
    snapshot after the other is written in the background, each with the changes made during the one before, against the
    same loop with no snapshot."""

    name = "snapshot-async-filesystem"
    unit = "events/s"
    baseline = "no snapshot"
    asked = {"full snapshots": Asked(0.4), "incremental snapshots": Asked(0.4)}
    rounds = (3, 5)

    def contenders(self) -> dict[str, Callable[[int], float]]:
        return {"no snapshot": lambda seed: self.work(seed, None).rate,
                "full snapshots": lambda seed: self.work(seed, True).rate,
                "incremental snapshots": lambda seed: self.work(seed, False).rate}


class AsyncPartRocks(AsyncPart):
    """The same foreground loop while snapshots of the RocksDB backend are written."""

    name = "snapshot-async-rocksdb"
    backend = "rocksdb"


class Stall(_Foreground):
    """The same foreground loop on the filesystem backend: the longest gap between two completions in milliseconds while
    snapshots are written, against the limit of 20 ms; the worst round counts, and the loop without a snapshot shows what
    the machine itself does."""

    name = "snapshot-stall-filesystem"
    unit = "ms"
    higher_is_better = False
    baseline = "limit of 20 ms"
    asked = {"full snapshots": Asked(1.0), "incremental snapshots": Asked(1.0)}
    rounds = (5, 5)
    worst_counts = True

    def contenders(self) -> dict[str, Callable[[int], float]]:
        return {"limit of 20 ms": lambda _seed: 20.0,
                "no snapshot": lambda seed: self.work(seed, None).stall_ms,
                "full snapshots": lambda seed: self.work(seed, True).stall_ms,
                "incremental snapshots": lambda seed: self.work(seed, False).stall_ms}


class StallRocks(Stall):
    """The same longest gap while snapshots of the RocksDB backend are written."""

    name = "snapshot-stall-rocksdb"
    backend = "rocksdb"


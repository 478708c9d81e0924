"""A keyed count through a whole dataflow, with and without checkpoints, against Python peers doing the same."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.measure import Asked, Benchmark, WrongAnswer
from checkpoint import CheckpointSettings, Dataflow, GeneratorSource, KeyedProcessFunction, Sink, SinkWriter, run
from statebackend import ValueStateDescriptor

KEYS = 100_000


class Count(KeyedProcessFunction):
    """The per-record function that every contender runs: read, add one, write, emit."""

    def open(self, ctx: Any) -> None:
        self.total = ctx.state(ValueStateDescriptor("total", int, default=0))

    def process(self, record: Any, ctx: Any) -> Any:
        total = self.total.value() + 1
        self.total.update(total)
        yield ctx.key, total


class _CountEvents(Benchmark):
    unit = "events/s"
    events = 1_000_000
    memory_gib = 2.0

    def setup(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
        if self.quick:
            self.events = 200_000

    def teardown(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _records(self, seed: int) -> list[str]:
        draw = random.Random(seed)
        names = [f"k{number:06d}" for number in range(KEYS)]
        return [names[draw.randrange(KEYS)] for _ in range(self.events)]

    def _ours(self, backend: str, interval: str | None) -> Callable[[int], float]:
        def measured(seed: int) -> float:
            records, final = self._records(seed), dict[str, int]()
            flow = Dataflow("count")
            source = flow.source(GeneratorSource(records.__getitem__, count=self.events), uid="numbers")
            counts = source.key_by(lambda record: record, key_type=str).process(Count(), uid="count")
            counts.sink(_Keep(final), uid="keep")
            folder = str(self.folder / f"{seed}-{time.monotonic_ns()}") if interval else None
            settings = CheckpointSettings(interval=interval) if interval else None
            started = time.perf_counter()
            run(flow, checkpoint_dir=folder, backend=backend, settings=settings)
            seconds = time.perf_counter() - started
            if sum(final.values()) != self.events:
                raise WrongAnswer(f"counted {sum(final.values())} instead of {self.events}")
            return self.events / seconds
        return measured


class _Keep(Sink, SinkWriter):
    """Keeps the last count of each key, as the peers' sinks do."""

    local_only = True

    def __init__(self, final: dict[str, int]) -> None:
        self._final = final

    def writer(self, ctx: Any) -> SinkWriter:
        return self

    def write(self, values: list[Any], timestamps: list[int | None] | None) -> None:
        self._final.update(values)


class DataflowCheckpoints(_CountEvents):
    """A million events over 100,000 string keys, one source and one keyed operator in the thread runtime, a per-record
    Python function: with a checkpoint every second against none."""

    name = "dataflow-checkpoints"
    baseline = "no checkpoints"
    asked = {"filesystem, every second": Asked(0.9)}

    def contenders(self) -> dict[str, Callable[[int], float]]:
        return {"no checkpoints": self._ours("filesystem", None),
                "filesystem, every second": self._ours("filesystem", "1s"),
                "rocksdb, no checkpoints": self._ours("rocksdb", None),
                "rocksdb, every second": self._ours("rocksdb", "1s")}


class DataflowPeers(_CountEvents):
    """The same count against bytewax without recovery, and PyFlink in thread mode (a number sequence made on the JVM)."""

    name = "dataflow-peers"
    baseline = "bytewax"
    asked = {"holdfast": Asked(1.0)}
    needs = ("peers",)

    def contenders(self) -> dict[str, Callable[[int], float]]:
        return {"bytewax": lambda seed: peers.ask("bytewax", seed, KEYS, self.events, 0, expected_sum=None),
                "holdfast": self._ours("filesystem", None),
                "pyflink thread": lambda _seed: peers.ask("pyflink", KEYS, min(self.events, 200_000), "thread", "hashmap"),
                "pyflink process": lambda _seed: peers.ask("pyflink", 10_000, 20_000, "process", "hashmap")}


class DataflowPeersSnapshots(_CountEvents):
    """The same count when both snapshot every second: bytewax into its recovery store, Holdfast by checkpoints."""

    name = "dataflow-peers-snapshots"
    baseline = "bytewax"
    asked = {"holdfast": Asked(2.0)}
    needs = ("peers",)

    def contenders(self) -> dict[str, Callable[[int], float]]:
        return {"bytewax": lambda seed: peers.ask("bytewax", seed, KEYS, self.events, 1),
                "holdfast": self._ours("filesystem", "1s")}

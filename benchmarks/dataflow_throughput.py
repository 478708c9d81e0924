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
from statebackend import KeyGroupRange, LocalFiles, TtlConfig, ValueStateDescriptor, create_backend

KEYS = 100_000
COMMIT_EVERY = 100_000


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


def _flink(events: int, mode: str, interval_s: float = 0) -> float:
    """Flink in Java, or PyFlink in thread or process mode; its own number sequence is the source."""
    if mode == "java":
        return peers.ask("flink", KEYS, events, "hashmap", int(interval_s * 1000), expected_sum=events)
    return peers.ask("pyflink", KEYS, events, mode, "hashmap", expected_sum=events)


class DataflowPeers(_CountEvents):
    """The same count, 100,000 keys, without snapshots: bytewax (one Python function a record), pathway (a CSV file folded
    in Rust, no Python a record), and Flink 2.3 with a number sequence made on the JVM (in Java, and PyFlink in thread mode
    with 200,000 and in process mode with 20,000 records, their start-up not counted)."""

    name = "dataflow-peers"
    baseline = "bytewax"
    asked = {"holdfast": Asked(1.0)}
    needs = ("peers",)
    rounds = (3, 3)

    def contenders(self) -> dict[str, Callable[[int], float]]:
        small = self.events // (10 if self.quick else 5)
        return {"bytewax": lambda seed: peers.ask("bytewax", seed, KEYS, self.events, 0, expected_sum=self.events),
                "holdfast": self._ours("filesystem", None),
                "pathway": lambda seed: peers.ask("pathway", seed, KEYS, self.events, 0, expected_sum=self.events),
                "flink java": lambda _seed: _flink(self.events, "java"),
                "pyflink thread": lambda _seed: _flink(small, "thread"),
                "pyflink process": lambda _seed: _flink(small // 10, "process")}


class DataflowFlink(_CountEvents):
    """The same count against PyFlink 2.3 in thread mode with 200,000 records, its start-up not counted."""

    name = "dataflow-pyflink"
    baseline = "pyflink thread"
    asked = {"holdfast": Asked(4.0)}
    needs = ("peers",)
    rounds = (3, 3)

    def contenders(self) -> dict[str, Callable[[int], float]]:
        return {"pyflink thread": lambda _seed: _flink(self.events // 5, "thread"),
                "holdfast": self._ours("filesystem", None)}


class DataflowPeersSnapshots(_CountEvents):
    """The same count when all snapshot every second: bytewax into its recovery store, pathway its input (operator state
    needs a licence), Flink in Java and Holdfast by checkpoints."""

    name = "dataflow-peers-snapshots"
    baseline = "bytewax"
    asked = {"holdfast": Asked(2.0)}
    needs = ("peers",)
    rounds = (3, 5)

    def contenders(self) -> dict[str, Callable[[int], float]]:
        return {"bytewax": lambda seed: peers.ask("bytewax", seed, KEYS, self.events, 1, expected_sum=self.events),
                "holdfast": self._ours("filesystem", "1s"),
                "pathway": lambda seed: peers.ask("pathway", seed, KEYS, self.events, 1, expected_sum=self.events),
                "flink java": lambda _seed: _flink(self.events, "java", 1.0)}


class StateQuixstreams(Benchmark):
    """quixstreams' RocksDB store on its own workload: a million read-modify-writes of counts over 100,000 string keys,
    committed every 100,000 (without the changelog topic it has in life), against the RocksDB backend with a snapshot
    at the same points; with a TTL of a day on both, too."""

    name = "rocksdb-quixstreams"
    unit = "events/s"
    baseline = "quixstreams"
    asked = {"holdfast": Asked(2.0, 3.0)}
    needs = ("peers",)
    rounds = (3, 5)
    events = 1_000_000

    def setup(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
        if self.quick:
            self.events = 100_000

    def teardown(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def contenders(self) -> dict[str, Callable[[int], float]]:
        return {"quixstreams": self._quixstreams, "quixstreams ttl": lambda seed: self._quixstreams(seed, "ttl"),
                "holdfast": lambda seed: self._ours(seed, None),
                "holdfast ttl": lambda seed: self._ours(seed, TtlConfig("1d"))}

    def _quixstreams(self, seed: int, *more: str) -> float:
        return peers.ask("quixstreams", seed, KEYS, self.events, COMMIT_EVERY, *more, expected_sum=self.events)

    def _ours(self, seed: int, ttl: TtlConfig | None) -> float:
        draw, folder = random.Random(seed), self.folder / f"{seed}-{ttl is not None}"
        sequence = [f"k{draw.randrange(KEYS):06d}" for _ in range(self.events)]
        with create_backend("rocksdb", directory=str(folder / "state")) as backend:
            keyed: Any = backend.keyed(uid="bench", key_type=str, max_parallelism=128, key_groups=KeyGroupRange(0, 127))
            state: Any = keyed.state(ValueStateDescriptor("count", int, default=0, ttl=ttl))
            files, set_key, value, update = LocalFiles(folder / "files"), keyed.set_current_key, state.value, state.update
            started = time.perf_counter()
            for start in range(0, self.events, COMMIT_EVERY):
                for key in sequence[start:start + COMMIT_EVERY]:
                    set_key(key)
                    update(value() + 1)
                keyed.snapshot(start + 1, files).run()
                keyed.checkpoint_completed(start + 1)
            seconds = time.perf_counter() - started
            total = 0
            for key in set(sequence):
                set_key(key)
                total += value()
        shutil.rmtree(folder, ignore_errors=True)
        if total != self.events:
            raise WrongAnswer(f"counted {total} instead of {self.events}")
        return self.events / seconds

"""Dataflows under checkpoints: latency from source to sink, the cost at a million keys, a slow channel, two processes."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.dataflow_throughput import Count
from benchmarks.measure import Asked, Benchmark, WrongAnswer
from checkpoint import CheckpointSettings, Dataflow, GeneratorSource, KeyedProcessFunction, Sink, SinkWriter, run, start
from checkpoint.runtime.loading import load_flow


class _InFolder(Benchmark):
    memory_gib = 2.0

    def setup(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
        self.number = 0

    def teardown(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def fresh(self) -> str:
        self.number += 1
        return str(self.folder / f"checkpoints-{self.number}")


class OneWriter(Sink, SinkWriter):
    """A sink of one subtask in this process that hands its batches to a function."""

    local_only = True

    def __init__(self, take: Callable[[list[Any]], None]) -> None:
        self._take = take

    def writer(self, ctx: Any) -> SinkWriter:
        return self

    def write(self, values: list[Any], timestamps: list[int | None] | None) -> None:
        self._take(values)


class PassOn(KeyedProcessFunction):
    """Counts in state and passes the record on."""

    def open(self, ctx: Any) -> None:
        from statebackend import ValueStateDescriptor

        self.total = ctx.state(ValueStateDescriptor("total", int, default=0))

    def process(self, record: Any, ctx: Any) -> Any:
        self.total.update(self.total.value() + 1)
        yield record


class LatencyMedian(_InFolder):
    """Milliseconds from the moment a record is made to the moment the sink takes it, at 20,000 records a second over
    10,000 keys: the median of a run, without checkpoints and with one every second."""

    name = "dataflow-latency-p50"
    unit = "ms"
    higher_is_better = False
    baseline = "no checkpoints"
    rounds = (3, 5)
    percentile, rate, keys, seconds = 50, 20_000, 10_000, 6

    def contenders(self) -> dict[str, Callable[[int], float]]:
        return {"no checkpoints": lambda seed: self._latency("filesystem", None),
                "filesystem, every second": lambda seed: self._latency("filesystem", "1s"),
                "rocksdb, every second": lambda seed: self._latency("rocksdb", "1s"),
                "rocksdb, unaligned": lambda seed: self._latency("rocksdb", "1s", unaligned=True)}

    def _latency(self, backend: str, interval: str | None, **settings: Any) -> float:
        count, taken, clock = self.rate * (2 if self.quick else self.seconds), list[float](), time.perf_counter

        def take(values: list[Any]) -> None:
            now = clock()
            taken.extend(now - made for _, made in values)
        flow = Dataflow("latency")
        flow.source(GeneratorSource(lambda number: (number % self.keys, clock()), count=count, rate=self.rate), uid="made") \
            .key_by(lambda record: record[0], key_type=int).process(PassOn(), uid="count").sink(OneWriter(take), uid="out")
        run(flow, backend=backend, checkpoint_dir=self.fresh() if interval else None,
            settings=CheckpointSettings(interval=interval, **settings) if interval else None)
        if len(taken) != count:
            raise WrongAnswer(f"{len(taken)} records instead of {count}")
        return float(np.percentile(taken, self.percentile) * 1000)


class LatencyTail(LatencyMedian):
    """The same latency, the 99th percentile."""

    name = "dataflow-latency-p99"
    percentile = 99


class Overhead(_InFolder):
    """What a checkpoint every second costs with a million keys of state on the filesystem backend: a keyed count whose
    first million records fill the state, and whose uniform records after that are timed to the last one (the checkpoint
    that ends a bounded job comes after it), against no checkpoints."""

    name = "dataflow-overhead-filesystem"
    unit = "events/s"
    backend = "filesystem"
    baseline = "no checkpoints"
    asked = {"every second": Asked(0.9)}
    rounds = (3, 4)
    keys, events = 1_000_000, 3_000_000
    memory_gib, disk_gib = 3.0, 3.0

    def setup(self) -> None:
        super().setup()
        if self.quick:
            self.keys, self.events = 50_000, 200_000

    def contenders(self) -> dict[str, Callable[[int], float]]:
        return {"no checkpoints": lambda seed: self._rate(seed, None), "every second": lambda seed: self._rate(seed, "1s")}

    def _rate(self, seed: int, interval: str | None) -> float:
        drawn = np.random.default_rng(seed).integers(0, self.keys, self.events).tolist()
        records, seen, began, ended = [*range(self.keys), *drawn], 0, 0.0, 0.0

        def take(values: list[Any]) -> None:
            nonlocal seen, began, ended
            if seen < self.keys <= seen + len(values):
                began = time.perf_counter()
            seen += len(values)
            if seen >= len(records):
                ended = time.perf_counter()
        flow = Dataflow("overhead")
        flow.source(GeneratorSource(records.__getitem__, count=len(records)), uid="numbers") \
            .key_by(lambda record: record, key_type=int).process(Count(), uid="count").sink(OneWriter(take), uid="out")
        run(flow, backend=self.backend, checkpoint_dir=(folder := self.fresh()) if interval else None,
            settings=CheckpointSettings(interval=interval) if interval else None)
        if interval:
            shutil.rmtree(folder, ignore_errors=True)
        if seen != len(records):
            raise WrongAnswer(f"{seen} records instead of {len(records)}")
        return self.events / (ended - began)


class OverheadRocks(Overhead):
    """The same cost of a checkpoint every second on the RocksDB backend."""

    name = "dataflow-overhead-rocksdb"
    backend = "rocksdb"
    asked = {"every second": Asked(0.75, 0.9)}
    events = 1_000_000
    rounds = (3, 3)


class Alignment(_InFolder):
    """One checkpoint of a running job whose sink takes half a millisecond for each record, with the queues before it full:
    milliseconds until it is complete, aligned against unaligned."""

    name = "barrier-alignment"
    unit = "ms"
    higher_is_better = False
    baseline = "aligned"
    asked = {"unaligned": Asked(10.0)}
    rounds = (3, 3)
    pause = 0.0005

    def contenders(self) -> dict[str, Callable[[int], float]]:
        return {"aligned": lambda seed: self._milliseconds(unaligned=False),
                "unaligned": lambda seed: self._milliseconds(unaligned=True),
                "aligned, timeout 100 ms": lambda seed: self._milliseconds(unaligned=True, aligned_timeout="100ms")}

    def _milliseconds(self, **settings: Any) -> float:
        hurry = threading.Event()

        def take(values: list[Any]) -> None:
            hurry.wait(self.pause * len(values))
        flow = Dataflow("slow", chaining=False)
        flow.source(GeneratorSource(lambda number: number % 1000), uid="numbers") \
            .key_by(lambda number: number, key_type=int).process(Count(), uid="count").sink(OneWriter(take), uid="out")
        handle = start(flow, checkpoint_dir=self.fresh(), settings=CheckpointSettings(**settings), channel_credit=8,
                       parallelism={"count": 2})
        try:
            deadline = time.monotonic() + 60
            while not _is_stuck(handle):
                if time.monotonic() > deadline:
                    raise WrongAnswer("no back pressure reached the source")
                time.sleep(0.02)
            began = time.perf_counter()
            handle.trigger_checkpoint(timeout=120)
            return (time.perf_counter() - began) * 1000
        finally:
            hurry.set()
            handle.cancel(timeout=60)


def _is_stuck(handle: Any) -> bool:
    return any(task["load"]["back_pressured"] > 0 for task in handle.statistics()["tasks"]
               if task["task"] == "numbers" and "load" in task)


class TwoProcesses(_InFolder):
    """A function that needs the CPU (a few hundred rounds of arithmetic a record) in one worker process and in two, from
    a generator to a file: records a second of the whole run, start of the workers included."""

    name = "dataflow-processes"
    unit = "events/s"
    baseline = "one process"
    asked = {"two processes": Asked(1.6)}
    rounds = (3, 5)
    events = 60_000

    def contenders(self) -> dict[str, Callable[[int], float]]:
        return {"one process": lambda seed: self._rate(1), "two processes": lambda seed: self._rate(2)}

    def _rate(self, workers: int) -> float:
        events, folder = self.events // (10 if self.quick else 1), Path(self.fresh())
        folder.mkdir()
        job = folder / "job.py"
        job.write_text(_JOB.format(events=events, output=str(folder / "out")))
        began = time.perf_counter()
        run(load_flow(f"{job}:flow"), runtime="processes", job=f"{job}:flow", workers=workers, parallelism=workers)
        seconds = time.perf_counter() - began
        written = sum(len(part.read_text().splitlines()) for part in (folder / "out").rglob("*.jsonl"))
        if written != events:
            raise WrongAnswer(f"{written} records were written instead of {events}")
        return events / seconds


_JOB = '''
from checkpoint import Dataflow, FileSink, GeneratorSource


def work(number):
    value = number
    for _ in range(3000):
        value = (value * 1103515245 + 12345) % 2147483648
    return {{"number": number, "value": value}}


flow = Dataflow("cpu")
flow.source(GeneratorSource(lambda number: number, count={events}), uid="numbers").map(work, uid="work") \\
    .sink(FileSink("{output}"), uid="out")
'''

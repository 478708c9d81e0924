"""A slow channel holds an aligned checkpoint up; an unaligned one passes it, and both restore exactly."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass

import pytest

from checkpoint import (
    CheckpointSettings,
    CollectSink,
    Dataflow,
    GeneratorSource,
    KeyedProcessFunction,
    Sink,
    SinkWriter,
    resolve_restore,
    run,
    start,
)
from checkpoint.runtime import channels, subtask
from statebackend import ValueStateDescriptor

RECORDS, KEYS = 60_000, 37
BATCH = 100
SECONDS_PER_BATCH = 0.05
CREDIT = 32


class CountPerKey(KeyedProcessFunction):
    def open(self, ctx):
        self.count = ctx.state(ValueStateDescriptor("count", int, default=0))

    def process(self, record, ctx):
        self.count.update(self.count.value() + 1)
        yield (ctx.key, self.count.value())


class SlowSink(Sink):
    """Takes a batch at a time and rests, until it is told to hurry."""

    def __init__(self) -> None:
        self.hurry = threading.Event()
        self.inner = CollectSink()

    def writer(self, ctx):
        outer, inner = self, self.inner.writer(ctx)

        class Slow(SinkWriter):
            def write(self, values, timestamps):
                if values:
                    outer.hurry.wait(SECONDS_PER_BATCH)
                inner.write(values, timestamps)

            snapshot, checkpoint_completed, close = inner.snapshot, inner.checkpoint_completed, inner.close

        return Slow()


def slow_flow(sink: Sink, *, chaining: bool = False) -> Dataflow:
    flow = Dataflow("slow", chaining=chaining)
    flow.source(GeneratorSource(lambda number: number % KEYS, count=RECORDS), uid="numbers") \
        .key_by(lambda number: number, key_type=int).process(CountPerKey(), uid="count").sink(sink, uid="out")
    return flow


def exact() -> Counter:
    return Counter((key, number) for key in range(KEYS) for number in range(1, len(range(key, RECORDS, KEYS)) + 1))


@dataclass
class Taken:
    """The last checkpoint of a slow run, what the quickest one took, and the sink that goes with it."""

    path: str
    seconds: float
    sink: SlowSink

    def goes_on_exactly(self, folder, parallelism: int) -> None:
        self.sink.hurry.set()
        run(slow_flow(self.sink, chaining=True), checkpoint_dir=str(folder), restore=self.path, parallelism=parallelism)
        assert Counter(self.sink.inner.results) == exact()


@pytest.fixture
def take(tmp_path, monkeypatch):
    """Let queues fill up in front of a slow sink, then take checkpoints."""
    monkeypatch.setattr(subtask, "POLL_LIMIT", BATCH)
    monkeypatch.setattr(channels, "JOIN_UP_TO", BATCH)

    def take(checkpoints: int, **settings) -> Taken:
        sink = SlowSink()
        handle = start(slow_flow(sink), checkpoint_dir=str(tmp_path / "slow"), channel_credit=CREDIT,
                       settings=CheckpointSettings(**settings), parallelism={"count": 2, "out": 2})
        deadline = time.monotonic() + 60
        while not _is_stuck(handle):
            assert time.monotonic() < deadline, "no back pressure reached the source"
            time.sleep(0.02)
        times = []
        for _ in range(checkpoints):
            began = time.monotonic()
            path = handle.trigger_checkpoint(timeout=120)
            times.append(time.monotonic() - began)
        handle.cancel(timeout=60)
        return Taken(path, min(times), sink)

    return take


def _is_stuck(handle) -> bool:
    return any(task["load"]["back_pressured"] > 0 for task in handle.statistics()["tasks"]
               if task["task"] == "numbers" and "load" in task)


def has_channel_state(path: str) -> bool:
    point = resolve_restore(None, "slow", path)
    assert point is not None
    return point.metadata.unaligned


def test_an_unaligned_checkpoint_passes_a_slow_channel_ten_times_faster_and_both_restore_exactly(take, tmp_path):
    aligned = take(1)
    unaligned = take(2, unaligned=True)
    assert unaligned.seconds * 10 <= aligned.seconds
    assert not has_channel_state(aligned.path)
    assert has_channel_state(unaligned.path)
    aligned.goes_on_exactly(tmp_path / "again", 1)
    unaligned.goes_on_exactly(tmp_path / "again", 3)


def test_an_alignment_that_runs_past_its_timeout_goes_unaligned_and_restores_exactly(take, tmp_path):
    taken = take(2, unaligned=True, aligned_timeout="100ms")
    assert has_channel_state(taken.path)
    taken.goes_on_exactly(tmp_path / "again", 3)


def test_an_alignment_within_its_timeout_stores_no_records(take, tmp_path):
    taken = take(1, unaligned=True, aligned_timeout="9m")
    assert not has_channel_state(taken.path)
    taken.goes_on_exactly(tmp_path / "again", 2)


def test_records_in_flight_find_their_way_into_a_chain(take, tmp_path):
    """Two exchanges of the first run lie inside one chain of the second."""
    take(1, unaligned=True).goes_on_exactly(tmp_path / "again", 1)

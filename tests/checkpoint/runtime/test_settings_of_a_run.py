"""What the settings and the ways to stop do to a real run."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest

from checkpoint import (
    CheckpointSettings,
    CollectSink,
    Dataflow,
    FixedDelay,
    GeneratorSource,
    KeyedProcessFunction,
    WatermarkStrategy,
    run,
    start,
)
from statebackend import ValueStateDescriptor

FAR = 10**9
KEYS = 7


class CountUntilFar(KeyedProcessFunction):
    """Tells the count of a key when event time is far ahead: at the end of all input, or when drained."""

    def open(self, ctx):
        self.count = ctx.state(ValueStateDescriptor("count", int, default=0))

    def process(self, record, ctx):
        self.count.update(self.count.value() + 1)
        ctx.timers.register_event_time_timer(FAR)

    def on_timer(self, timestamp, ctx):
        yield self.count.value()


def numbers(sink, count, rate, function):
    flow = Dataflow("numbers")
    flow.source(GeneratorSource(lambda number: number, count=count, rate=rate), uid="s", parallelism=2,
                watermarks=WatermarkStrategy.bounded_out_of_orderness(5, lambda number: number)) \
        .key_by(lambda number: number % KEYS, key_type=int).process(function, uid="p", parallelism=2).sink(sink, uid="o")
    return flow


def completed(handle, count=1):
    while handle.statistics()["checkpoints"]["counts"]["completed"] < count:
        time.sleep(0.01)


@pytest.mark.parametrize("backend", ["filesystem", "rocksdb"])
def test_a_drained_job_fires_its_timers_and_one_that_is_not_keeps_them(tmp_path, backend):
    for drain, told in ((True, KEYS), (False, 0)):
        sink, folder = CollectSink(), tmp_path / str(drain)
        handle = start(numbers(sink, None, 5_000, CountUntilFar()), checkpoint_dir=str(folder / "chk"), backend=backend,
                       settings=CheckpointSettings(interval="50ms", savepoint_dir=str(folder / "savepoints")))
        completed(handle, 3)
        savepoint = handle.stop_with_savepoint(drain=drain, timeout=30)
        assert str(folder / "savepoints") in savepoint
        assert len(sink.results) == told
    later = CollectSink()
    run(numbers(later, 200_000, None, CountUntilFar()), restore=savepoint, parallelism=3)
    assert len(later.results) == KEYS
    assert sum(later.results) == 200_000


def test_checkpoints_of_a_cancelled_job_go_where_the_settings_say_so(tmp_path):
    for retain in (True, False):
        folder = tmp_path / str(retain)
        handle = start(numbers(CollectSink(), None, 5_000, CountUntilFar()), checkpoint_dir=str(folder),
                       settings=CheckpointSettings(interval="50ms", retain_on_cancellation=retain))
        completed(handle)
        handle.cancel(timeout=30)
        assert bool(list(folder.rglob("_metadata"))) is retain


class FailOnce(KeyedProcessFunction):
    failed = threading.Event()

    def process(self, number, ctx):
        if number == 3_000 and not self.failed.is_set():
            self.failed.set()
            raise RuntimeError("once")
        yield number


def test_at_least_once_loses_nothing(tmp_path):
    FailOnce.failed.clear()
    sink = CollectSink()
    result = run(numbers(sink, 5_000, 20_000, FailOnce()), checkpoint_dir=str(tmp_path), restart=FixedDelay(1, "10ms"),
                 settings=CheckpointSettings(interval="20ms", exactly_once=False))
    assert result.restarts == 1
    assert set(Counter(sink.results)) == set(range(5_000))

"""Several incremental checkpoints in progress at a time: none loses a file that another one was built on."""

from __future__ import annotations

import random
import threading
from collections import Counter

import pytest

from checkpoint import (
    CheckpointSettings,
    CollectSink,
    Dataflow,
    FixedDelay,
    GeneratorSource,
    KeyedProcessFunction,
    run,
)
from checkpoint.storage.storage import JobStorage
from statebackend import ValueStateDescriptor

KEYS = 41


class Keep(KeyedProcessFunction):
    """A count, and enough bytes beside it that state is stored in files of its own."""

    def open(self, ctx):
        self.count = ctx.state(ValueStateDescriptor("count", int, default=0))
        self.padding = ctx.state(ValueStateDescriptor("padding", bytes))

    def process(self, number, ctx):
        if self.count.value() % 50 == 0:
            self.padding.update(random.Random(number).randbytes(2_000))
        self.count.update(self.count.value() + 1)
        yield (ctx.key, self.count.value())


class FailingAt:
    """Fails once at each of these calls, over all attempts."""

    def __init__(self, *calls: int) -> None:
        self._left, self._calls, self._lock = list(calls), 0, threading.Lock()

    def __call__(self, record):
        with self._lock:
            self._calls += 1
            if self._left and self._calls >= self._left[0]:
                raise RuntimeError(f"injected at call {self._left.pop(0)}")
        return record


def flow_of(sink, *, count, rate=None, failing=None) -> Dataflow:
    flow = Dataflow("concurrent", chaining=False)
    stream = flow.source(GeneratorSource(lambda number: number, count=count, rate=rate), uid="s")
    if failing is not None:
        stream = stream.map(failing, uid="failing")
    counted = stream.key_by(lambda number: number % KEYS, key_type=int).process(Keep(), uid="keep", parallelism=2)
    counted.sink(sink, uid="out")
    return flow


def exact(records: int) -> Counter:
    return Counter((key, number) for key in range(KEYS) for number in range(1, len(range(key, records, KEYS)) + 1))


@pytest.fixture(autouse=True)
def no_grace(monkeypatch):
    """A file that nobody seems to need goes at once, so that a mistake is seen."""
    monkeypatch.setitem(JobStorage.__init__.__kwdefaults__, "grace", 0)


@pytest.mark.parametrize("backend", ["filesystem", "rocksdb"])
def test_overlapping_checkpoints_restore_exactly_after_failures_and_in_another_run(backend, tmp_path):
    sink, total = CollectSink(), 24_000
    settings = CheckpointSettings(interval="10ms", max_concurrent=3)
    result = run(flow_of(sink, count=16_000, rate=16_000, failing=FailingAt(5_000, 11_000)), backend=backend,
                 checkpoint_dir=str(tmp_path), restart=FixedDelay(5, "1ms"), settings=settings)
    assert result.restarts == 2
    assert result.checkpoints["counts"]["completed"] >= 3
    run(flow_of(sink, count=total), checkpoint_dir=str(tmp_path), restore="latest", backend=backend,
        parallelism={"keep": 1}, settings=settings)
    assert Counter(sink.results) == exact(total)

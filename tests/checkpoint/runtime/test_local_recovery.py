"""Local recovery: a restart reads the subtask's own copies where they are there and right, and nothing piles up."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter

import pytest

from checkpoint import CheckpointSettings, CollectSink, Dataflow, FixedDelay, GeneratorSource, KeyedProcessFunction, start
from statebackend import ValueStateDescriptor

KEYS, RECORDS = 200, 6_000


class Keep(KeyedProcessFunction):
    def open(self, ctx):
        self.state = ctx.state(ValueStateDescriptor("state", bytes))
        self.count = ctx.state(ValueStateDescriptor("count", int, default=0))

    def process(self, number, ctx):
        self.state.update(random.Random(ctx.key).randbytes(400))
        self.count.update(self.count.value() + 1)
        yield (ctx.key, self.count.value())


class FailWhenTold:
    def __init__(self):
        self.now = threading.Event()

    def __call__(self, number):
        if self.now.is_set():
            self.now.clear()
            raise RuntimeError("as told")
        return number

    def __deepcopy__(self, memo):
        return self


def run_with_a_failure(tmp_path, backend: str, damage=None):
    fail, sink, flow = FailWhenTold(), CollectSink(), Dataflow("local")
    flow.source(GeneratorSource(lambda number: number % KEYS, count=RECORDS, rate=2_000), uid="s").map(fail, uid="fail") \
        .key_by(lambda number: number, key_type=int).process(Keep(), uid="keep", parallelism=2).sink(sink, uid="out")
    handle = start(flow, checkpoint_dir=str(tmp_path / "chk"), backend=backend, work_dir=str(tmp_path / "work"),
                   settings=CheckpointSettings(local_recovery=True), restart=FixedDelay(3, "10ms"))
    while handle.records().get("keep", {}).get("records_in", 0) < KEYS:
        time.sleep(0.01)
    for _ in range(4):
        handle.trigger_checkpoint(timeout=30)
    if damage is not None:
        damage()
    fail.now.set()
    result = handle.wait(60)
    expected = Counter((key, number) for key in range(KEYS) for number in range(1, RECORDS // KEYS + 1))
    assert Counter(sink.results) == expected
    assert result.restarts == 1
    return handle._supervisor.builder


@pytest.mark.parametrize("backend", ["filesystem", "rocksdb"])
def test_a_restart_reads_the_copies_and_the_end_removes_them(tmp_path, backend):
    builder = run_with_a_failure(tmp_path, backend)
    assert builder.local_copy_hits() > 0
    assert not list((tmp_path / "work").iterdir())


def test_copies_that_are_damaged_are_passed_over(tmp_path):
    def damage():
        for copy in (tmp_path / "work").rglob("*"):
            if copy.is_file() and "copies" in str(copy):
                copy.write_bytes(b"damaged")

    run_with_a_failure(tmp_path, "filesystem", damage)


def test_copies_of_old_checkpoints_do_not_pile_up(tmp_path):
    seen = []

    def look():
        seen.append(sum(1 for copy in (tmp_path / "work").rglob("*") if copy.is_file()))

    run_with_a_failure(tmp_path, "filesystem", look)
    assert seen[0] < 60

"""What goes wrong around a job: storage that errors, damage, clocks that jump; the last good checkpoint stays usable."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest

from checkpoint import (
    CheckpointSettings,
    CollectSink,
    Dataflow,
    ExponentialDelay,
    FixedDelay,
    GeneratorSource,
    KeyedProcessFunction,
    resolve_restore,
    run,
    start,
)
from checkpoint.storage.storage import JobStorage
from statebackend import CorruptData, HoldfastError, NotFound, Unavailable, ValueStateDescriptor
from statebackend.clock import SystemClock

KEYS, RECORDS = 41, 8_000


class Keep(KeyedProcessFunction):
    def open(self, ctx):
        self.count = ctx.state(ValueStateDescriptor("count", int, default=0))
        self.padding = ctx.state(ValueStateDescriptor("padding", bytes))

    def process(self, number, ctx):
        import random

        if self.count.value() == 0:
            self.padding.update(random.Random(ctx.key).randbytes(2_000))
        self.count.update(self.count.value() + 1)
        yield (ctx.key, self.count.value())


def flow_of(sink, *, rate=None, count=RECORDS) -> Dataflow:
    flow = Dataflow("faults")
    flow.source(GeneratorSource(lambda number: number % KEYS, count=count, rate=rate), uid="s") \
        .key_by(lambda number: number, key_type=int).process(Keep(), uid="keep").sink(sink, uid="out")
    return flow


def exact() -> Counter:
    return Counter((key, number) for key in range(KEYS) for number in range(1, len(range(key, RECORDS, KEYS)) + 1))


def failing_publish(monkeypatch, times: int) -> list[int]:
    real, failures = JobStorage.publish, list[int]()

    def publish(self, metadata, **options):
        if len(failures) < times:
            failures.append(metadata.checkpoint_id)
            raise Unavailable("no space left on device")
        return real(self, metadata, **options)

    monkeypatch.setattr(JobStorage, "publish", publish)
    return failures


def test_checkpoints_that_can_not_be_stored_are_tolerated_as_often_as_told(tmp_path, monkeypatch):
    failures = failing_publish(monkeypatch, 3)
    sink = CollectSink()
    result = run(flow_of(sink, rate=16_000), checkpoint_dir=str(tmp_path),
                 settings=CheckpointSettings(interval="40ms", tolerable_failures=3))
    assert result.restarts == 0
    assert len(failures) == 3
    assert Counter(sink.results) == exact()


def test_one_failure_too_many_restarts_the_job_and_nothing_is_lost(tmp_path, monkeypatch):
    failing_publish(monkeypatch, 2)
    sink = CollectSink()
    result = run(flow_of(sink, rate=16_000), checkpoint_dir=str(tmp_path), restart=FixedDelay(5, 1),
                 settings=CheckpointSettings(interval="40ms"))
    assert result.restarts == 2
    assert Counter(sink.results) == exact()


def test_storage_that_never_works_ends_the_job_with_the_reason(tmp_path, monkeypatch):
    failing_publish(monkeypatch, 10**9)
    with pytest.raises(HoldfastError, match="no space left"):
        run(flow_of(CollectSink(), rate=16_000), checkpoint_dir=str(tmp_path), restart=FixedDelay(2, 1),
            settings=CheckpointSettings(interval="20ms"))


@pytest.mark.parametrize("message", ["no space left on device", "chk-{}: no answer within {} ms, request 9f86d081884c{:04}"])
def test_a_storage_that_fails_in_one_way_for_ever_is_given_up_by_default(message, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("checkpoint.runtime.supervisor.default_strategy", lambda _: ExponentialDelay(1, maximum=10))

    def publish(self, metadata, **options):
        number = metadata.checkpoint_id
        raise Unavailable(message.format(number, number * 7, number))

    monkeypatch.setattr(JobStorage, "publish", publish)
    handle = start(flow_of(CollectSink(), rate=4_000, count=None), checkpoint_dir=str(tmp_path),
                   settings=CheckpointSettings(interval="20ms"))
    with pytest.raises(HoldfastError, match="no "):
        handle.wait(60)
    assert handle.result().restarts == 3
    assert "the same failure came 4 times" in caplog.text


def test_a_damaged_latest_checkpoint_stops_the_restore_and_names_the_good_one(tmp_path):
    handle = start(flow_of(CollectSink(), count=None, rate=4_000), checkpoint_dir=str(tmp_path),
                   settings=CheckpointSettings(retained=3))
    while handle.records().get("keep", {}).get("records_in", 0) < 2 * KEYS:
        time.sleep(0.01)
    good, bad = handle.trigger_checkpoint(full=True), handle.trigger_checkpoint(full=True)
    handle.cancel(timeout=10)
    files = {path for path in Path(good).parent.rglob("*") if path.is_file() and path.name != "_metadata"}
    metadata = (Path(bad) / "_metadata").read_text()
    (victim,) = [path for path in files if path.name in metadata and path.name not in (Path(good) / "_metadata").read_text()
                 and path.stat().st_size > 20_000]
    victim.write_bytes(victim.read_bytes()[:-10])
    with pytest.raises(CorruptData) as caught:
        resolve_restore(str(tmp_path), "faults", "latest")
    assert victim.name in str(caught.value)
    assert good in str(caught.value)
    victim.unlink()
    with pytest.raises(NotFound, match="missing"):
        run(flow_of(CollectSink()), checkpoint_dir=str(tmp_path), restore="latest")
    assert run(flow_of(CollectSink()), checkpoint_dir=str(tmp_path), restore=good).state == "FINISHED"


class JumpingClock(SystemClock):
    """Goes back an hour after a while."""

    def __init__(self):
        self._began = time.monotonic()

    def now_ms(self) -> int:
        back = 3_600_000 if time.monotonic() - self._began > 0.25 else 0
        return super().now_ms() - back


def test_a_clock_that_jumps_back_disturbs_nothing(tmp_path):
    sink = CollectSink()
    result = run(flow_of(sink, rate=12_000), checkpoint_dir=str(tmp_path), clock=JumpingClock(),
                 settings=CheckpointSettings(interval="50ms"))
    assert result.state == "FINISHED"
    assert Counter(sink.results) == exact()

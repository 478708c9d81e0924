"""Flows on threads: exact results through failures, rescalings, backends and barrier modes."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest

from checkpoint import (
    CheckpointSettings,
    CollectionSource,
    CollectSink,
    Dataflow,
    FixedDelay,
    GeneratorSource,
    KeyedProcessFunction,
    NoRestart,
    Sink,
    run,
    start,
)
from checkpoint.protocol.messages import CancelJob
from statebackend import Conflict, HoldfastError, IncompatibleState, InvalidRequest, ValueStateDescriptor

BACKENDS = ["memory", "filesystem", "rocksdb"]
RECORDS, KEYS = 20_000, 37


class CountPerKey(KeyedProcessFunction):
    def open(self, ctx):
        self.count = ctx.state(ValueStateDescriptor("count", int, default=0))

    def process(self, record, ctx):
        count = self.count.value() + 1
        self.count.update(count)
        yield (ctx.key, count)


class FailingMap:
    """Fails once at each of the given calls, counted over all subtasks and attempts."""

    def __init__(self, *failures: int) -> None:
        self._left = sorted(failures)
        self._calls = 0
        self._lock = threading.Lock()

    def __call__(self, record):
        with self._lock:
            self._calls += 1
            if self._left and self._calls >= self._left[0]:
                del self._left[0]
                raise RuntimeError(f"injected at call {self._calls}")
        return record


def counting_flow(sink: Sink, *, count: int | None = RECORDS, rate: float | None = None, failing=None, **flow_options):
    flow = Dataflow("counting", **flow_options)
    stream = flow.source(GeneratorSource(lambda number: number % KEYS, count=count, rate=rate), uid="numbers")
    if failing is not None:
        stream = stream.map(failing, uid="failing")
    stream.key_by(lambda number: number, key_type=int).process(CountPerKey(), uid="count").sink(sink, uid="out")
    return flow


def exact(records: int = RECORDS) -> Counter:
    return Counter((key, number) for key in range(KEYS) for number in range(1, len(range(key, records, KEYS)) + 1))


@pytest.mark.parametrize("parallelism", [1, 2, {"numbers": 2, "count": 3, "out": 1}])
def test_every_record_is_counted_once_at_any_parallelism(parallelism):
    sink = CollectSink()
    result = run(counting_flow(sink), parallelism=parallelism)
    assert result.state == "FINISHED"
    assert Counter(sink.results) == exact()
    assert result.records["count"]["records_in"] == RECORDS


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("unaligned", [False, True])
def test_failures_neither_lose_nor_double_records(backend, unaligned, tmp_path):
    sink = CollectSink()
    failing = FailingMap(3_000, 9_000, 16_000)
    result = run(counting_flow(sink, failing=failing, chaining=False, rate=60_000), checkpoint_dir=str(tmp_path),
                 backend=backend, parallelism={"failing": 2, "count": 2}, restart=FixedDelay(5, "1ms"),
                 settings=CheckpointSettings(interval="20ms", unaligned=unaligned))
    assert result.restarts == 3
    assert result.checkpoints["counts"]["completed"] >= 2
    assert Counter(sink.results) == exact()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_finished_job_goes_on_from_its_last_checkpoint_at_another_parallelism(backend, tmp_path):
    sink = CollectSink()
    first = run(counting_flow(sink, count=5_000), checkpoint_dir=str(tmp_path), backend=backend, parallelism=2)
    second = run(counting_flow(sink, count=9_000), checkpoint_dir=str(tmp_path), backend="filesystem",
                 restore="latest", parallelism={"numbers": 1, "count": 3})
    third = run(counting_flow(sink), checkpoint_dir=str(tmp_path / "new"), backend=backend,
                restore=second.checkpoint, parallelism=1)
    assert first.job_id == second.job_id != third.job_id
    assert Counter(sink.results) == exact()


def test_restoring_the_latest_where_there_is_none_starts_fresh(tmp_path):
    sink = CollectSink()
    handle = start(counting_flow(sink, count=100), checkpoint_dir=str(tmp_path), restore="latest")
    handle.wait(30)
    assert handle.restore_point is None
    assert len(sink.results) == 100


def test_a_job_can_be_stopped_with_a_checkpoint_and_goes_on(tmp_path):
    sink = CollectSink()
    handle = start(counting_flow(sink, rate=20_000), checkpoint_dir=str(tmp_path),
                   settings=CheckpointSettings(interval="30ms"), parallelism=2)
    while len(sink.results) < 500:
        time.sleep(0.01)
    path = handle.stop_with_checkpoint(timeout=30)
    assert handle.wait(10).state == "CANCELED"
    assert path is not None
    assert 0 < len(sink.results) < RECORDS
    run(counting_flow(sink), checkpoint_dir=str(tmp_path), restore="latest", parallelism=3)
    assert Counter(sink.results) == exact()


@pytest.mark.parametrize("form", ["native", "open"])
def test_a_job_stopped_with_a_savepoint_goes_on_from_it(form, tmp_path):
    sink = CollectSink()
    handle = start(counting_flow(sink, rate=20_000), checkpoint_dir=str(tmp_path / "chk"), backend="rocksdb",
                   settings=CheckpointSettings(interval="50ms"), parallelism=2)
    time.sleep(0.3)
    between = handle.trigger_savepoint(str(tmp_path / "sp"), format=form, timeout=30)
    path = handle.stop_with_savepoint(str(tmp_path / "sp"), format=form, timeout=30)
    result = handle.wait(10)
    assert result.state == "FINISHED"
    assert result.checkpoint == path != between
    run(counting_flow(sink), checkpoint_dir=str(tmp_path / "chk2"), restore=path, parallelism=3, backend="filesystem")
    assert Counter(sink.results) == exact()


def test_a_cancelled_job_answers_further_requests_with_an_error(tmp_path):
    handle = start(counting_flow(CollectSink(), count=None, rate=1000), checkpoint_dir=str(tmp_path))
    handle.cancel(timeout=10)
    assert handle.state == "CANCELED"
    with pytest.raises(HoldfastError):
        handle.trigger_checkpoint(timeout=5)


def test_a_function_that_always_fails_ends_the_job_with_its_error_and_record(tmp_path):
    def broken(number):
        raise ValueError(f"no {number}")

    with pytest.raises(HoldfastError, match=r"ValueError: no 0.*'failing'.*record 0"):
        run(counting_flow(CollectSink(), failing=broken), restart=NoRestart())
    with pytest.raises(HoldfastError, match="ValueError"):
        run(counting_flow(CollectSink(), failing=broken), checkpoint_dir=str(tmp_path), restart=FixedDelay(2, "1ms"))


def test_only_the_failed_region_restarts(tmp_path):
    opened: Counter[str] = Counter()

    class Opening(CountPerKey):
        def __init__(self, name):
            self.name = name

        def open(self, ctx):
            super().open(ctx)
            opened[self.name] += 1

    flow, sinks = Dataflow("regions"), {name: CollectSink() for name in ("good", "bad")}
    for name, sink in sinks.items():
        stream = flow.source(GeneratorSource(lambda number: number % KEYS, count=4_000, rate=20_000), uid=f"{name}-source")
        if name == "bad":
            stream = stream.map(FailingMap(2_000), uid="failing")
        stream.key_by(lambda number: number, key_type=int).process(Opening(name), uid=f"{name}-count") \
            .sink(sink, uid=f"{name}-out")
    result = run(flow, checkpoint_dir=str(tmp_path), settings=CheckpointSettings(interval="20ms"),
                 restart=FixedDelay(3, "1ms"))
    assert result.restarts == 1
    assert opened == {"good": 1, "bad": 2}
    assert all(Counter(sink.results) == exact(4_000) for sink in sinks.values())


def test_a_newer_run_of_the_same_job_fences_off_the_older(tmp_path):
    sink = CollectSink()
    first = run(counting_flow(sink, count=100), checkpoint_dir=str(tmp_path))
    older = start(counting_flow(sink, count=None, rate=5_000), checkpoint_dir=str(tmp_path), restore="latest",
                  settings=CheckpointSettings(interval="50ms"))
    time.sleep(0.3)
    newer = start(counting_flow(CollectSink(), count=None, rate=5_000), checkpoint_dir=str(tmp_path), restore="latest",
                  settings=CheckpointSettings(interval="50ms"))
    assert newer.job_id == first.job_id
    with pytest.raises(Conflict):
        older.wait(20)
    newer.cancel(timeout=10)


def test_state_of_a_removed_operator_is_dropped_only_when_that_is_allowed(tmp_path):
    sink = CollectSink()
    path = run(counting_flow(sink, count=1000), checkpoint_dir=str(tmp_path)).checkpoint
    flow = Dataflow("counting")
    flow.source(GeneratorSource(lambda number: number, count=1500), uid="numbers").sink(sink, uid="out")
    with pytest.raises(IncompatibleState, match="'count'"):
        run(flow, checkpoint_dir=str(tmp_path / "b"), restore=path)
    sink.clear()
    run(flow, checkpoint_dir=str(tmp_path / "b"), restore=path, allow_non_restored_state=True)
    assert sorted(sink.results) == list(range(1000, 1500))


def test_an_operator_keeps_its_state_under_a_new_uid_by_mapping(tmp_path):
    sink = CollectSink()
    path = run(counting_flow(sink, count=5_000), checkpoint_dir=str(tmp_path)).checkpoint
    flow = Dataflow("counting")
    flow.source(GeneratorSource(lambda number: number % KEYS, count=RECORDS), uid="numbers") \
        .key_by(lambda number: number, key_type=int).process(CountPerKey(), uid="per-key").sink(sink, uid="out")
    run(flow, checkpoint_dir=str(tmp_path / "b"), restore=path, uid_mapping={"count": "per-key"})
    assert Counter(sink.results) == exact()


def test_another_max_parallelism_is_refused_with_the_way_out(tmp_path):
    path = run(counting_flow(CollectSink(), count=100), checkpoint_dir=str(tmp_path)).checkpoint
    with pytest.raises(IncompatibleState, match="rescale"):
        run(counting_flow(CollectSink(), max_parallelism=64), checkpoint_dir=str(tmp_path), restore=path)


def test_a_claimed_checkpoint_is_deleted_once_it_is_not_needed(tmp_path):
    sink = CollectSink()
    path = run(counting_flow(sink, count=5_000), checkpoint_dir=str(tmp_path / "a")).checkpoint
    run(counting_flow(sink), checkpoint_dir=str(tmp_path / "b"), restore=path, claim=True)
    assert Counter(sink.results) == exact()
    assert not list((tmp_path / "a").rglob("_metadata"))


def test_what_can_not_be_copied_for_subtasks_is_refused_with_advice():
    class Locked(CountPerKey):
        def __init__(self):
            self.lock = threading.Lock()

    flow = Dataflow("locked")
    flow.source(CollectionSource([1]), uid="s").key_by(lambda n: n, key_type=int).process(Locked(), uid="p") \
        .sink(CollectSink(), uid="o")
    with pytest.raises(InvalidRequest, match=r"open\(\)"):
        run(flow)


def test_a_runtime_that_is_not_there_is_refused():
    with pytest.raises(InvalidRequest, match="threads or processes"):
        run(counting_flow(CollectSink()), runtime="mainframe")


def test_a_request_that_comes_while_the_job_ends_is_answered():
    handle, late = start(counting_flow(CollectSink(), count=100, rate=200)), []
    supervisor = handle._supervisor
    closing = supervisor._closing

    def ask_too_late():
        late.append(supervisor.request(CancelJob("late")))
        closing()

    supervisor._closing = ask_too_late
    handle.wait(30)
    with pytest.raises(Conflict, match="has ended"):
        late[0].result(10)
    handle.cancel(timeout=10)

"""A dataflow on Spark's barrier tasks: the results of the other runtimes, through kills, rescaling and moves."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoint import (
    CheckpointSettings,
    CollectionSource,
    Dataflow,
    FileSink,
    FixedDelay,
    GeneratorSource,
    KeyedProcessFunction,
    resolve_restore,
    run,
    start,
)
from checkpoint.runtime.network import TcpNetwork
from spark_integration import SparkRuntime
from spark_integration.runtime.executor import brief
from spark_integration.runtime.slots import slots_of
from statebackend import HoldfastError, InvalidRequest, Unavailable, ValueStateDescriptor

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

OFTEN = CheckpointSettings(interval="100ms")


def wait_until(condition: Callable[[], Any], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.05)


@pytest.fixture
def start_on(spark):
    """Starts flows on Spark; what a failing test leaves running is cancelled, so that the slots are free again."""
    started = []

    def begin(flow: Dataflow, *, workers: int | None = None, **options: Any) -> Any:
        started.append(SparkRuntime(spark, workers=workers).start(flow, **options))
        return started[-1]

    yield begin
    for handle in started:
        if handle.is_running:
            handle.cancel(timeout=60)


def alive(handle: Any) -> bool:
    """True; a job that has failed meanwhile raises its error here."""
    if not handle.is_running:
        handle.wait()
        raise AssertionError("the job has ended")
    return True


def completed(handle: Any) -> int:
    return handle.statistics()["checkpoints"]["counts"]["completed"]


def running_tasks(spark: Any) -> int:
    return slots_of(spark.sparkContext).busy


def test_a_flow_runs_on_spark_exactly_once(spark, job):
    job.add(4)
    result = SparkRuntime(spark).run(job.flow(), checkpoint_dir=job.checkpoints, settings=OFTEN)
    assert result.state == "FINISHED"
    assert job.output() == job.expected()
    assert result.records["count"]["records_in"] == sum(job.expected().values())
    assert (result.checkpoint is not None, result.restarts) == (True, 0)
    wait_until(lambda: running_tasks(spark) == 0)


@pytest.mark.crash
def test_a_killed_task_restarts_the_job_from_its_last_checkpoint(start_on, job):
    job.add(2)
    before = sum(job.expected().values())
    handle = start_on(job.flow(watch=True), checkpoint_dir=job.checkpoints, settings=OFTEN, backend="rocksdb",
                      restart=FixedDelay(5, "1ms"))
    wait_until(lambda: alive(handle) and job.output() == job.expected())
    first = handle._executor._submission
    job.add()
    os.kill(handle._executor._workers[1].pid, signal.SIGKILL)
    wait_until(lambda: alive(handle) and handle._executor._submission is not first)
    with pytest.raises(Unavailable, match="no connection"):  # the token of the old run opens nothing any more
        TcpNetwork(first._token).connect(handle._executor._submission._address)
    job.add()
    wait_until(lambda: alive(handle) and job.output() == job.expected())
    handle.cancel(timeout=300)
    result = handle.wait(300)
    assert result.restarts >= 1
    assert result.records["files"]["records_out"] <= sum(job.expected().values()) - before  # not from scratch
    assert job.output() == job.expected()


class Dawdling(KeyedProcessFunction):
    """Counts per key, and rests at each record until it is told to hurry."""

    def __init__(self, hurry: Path) -> None:
        self.hurry = str(hurry)

    def open(self, ctx: Any) -> None:
        self.count = ctx.state(ValueStateDescriptor("count", int, default=0))

    def process(self, record: int, ctx: Any) -> Any:
        if not os.path.exists(self.hurry):
            time.sleep(0.001)
        self.count.update(self.count.value() + 1)
        yield [ctx.key, self.count.value()]


def test_records_that_a_barrier_overtook_between_tasks_are_restored_exactly(spark, start_on, tmp_path):
    """Both tasks send to both: half of what is in flight has come over TCP."""
    hurry, records, keys = tmp_path / "hurry", 100_000, 37

    def dawdling() -> Dataflow:
        flow = Dataflow("dawdling", chaining=False)
        flow.source(GeneratorSource(lambda number: number % keys, count=records), uid="numbers", parallelism=2) \
            .key_by(lambda number: number, key_type=int).process(Dawdling(hurry), uid="count", parallelism=2) \
            .sink(FileSink(tmp_path / "out"), uid="out")
        return flow

    handle = start_on(dawdling(), checkpoint_dir=str(tmp_path / "chk"), channel_credit=2,
                      settings=CheckpointSettings(unaligned=True))
    wait_until(lambda: alive(handle) and any(task["load"]["back_pressured"] > 0 for task in handle.statistics()["tasks"]
                                             if task["task"] == "numbers" and "load" in task))
    taken = handle.trigger_checkpoint(timeout=120)
    handle.cancel(timeout=120)
    point = resolve_restore(None, "dawdling", taken)
    assert point is not None
    counting = next(one for one in point.metadata.operators if one.uid == "count")
    assert [subtask.in_flight is not None for subtask in counting.subtasks] == [True, True]

    hurry.touch()
    result = SparkRuntime(spark).run(dawdling(), checkpoint_dir=str(tmp_path / "again"), restore=taken,
                                     parallelism={"count": 1})
    assert result.state == "FINISHED"
    rows = [tuple(json.loads(line)) for path in (tmp_path / "out").glob("[!.]*.jsonl")
            for line in path.read_text().splitlines()]
    assert Counter(rows) == Counter((key, n) for key in range(keys) for n in range(1, len(range(key, records, keys)) + 1))


def test_savepoints_move_between_spark_and_threads_and_between_parallelisms(start_on, job, tmp_path):
    folder = str(tmp_path / "savepoints")
    job.add()
    handle = start(job.flow(watch=True), settings=OFTEN, checkpoint_dir=job.checkpoints)
    wait_until(lambda: alive(handle) and job.output() == job.expected())
    local = handle.stop_with_savepoint(folder, timeout=300)

    job.add(2)
    handle = start_on(
        job.flow(watch=True), workers=2, checkpoint_dir=str(tmp_path / "chk-spark"), settings=OFTEN, restore=local,
        parallelism={"count": 3, "out": 3})
    wait_until(lambda: alive(handle) and job.output() == job.expected())
    assert len(handle._executor._workers) == 2
    on_spark = handle.stop_with_savepoint(folder, format="native", timeout=300)
    assert handle.wait(300).state == "FINISHED"

    job.add()
    result = run(job.flow(), settings=OFTEN, checkpoint_dir=str(tmp_path / "chk-threads"), restore=on_spark, parallelism=1)
    assert result.state == "FINISHED"
    assert job.output() == job.expected()


def test_cancel_leaves_no_task_and_a_wrong_token_gets_nowhere_while_it_runs(spark, start_on, job, caplog):
    job.add()
    handle = start_on(job.flow(watch=True), checkpoint_dir=job.checkpoints, settings=OFTEN)
    wait_until(lambda: alive(handle) and completed(handle) >= 1)
    assert running_tasks(spark) == 2
    submission = handle._executor._submission
    for address in [submission._address, *(link.data_address for link in handle._executor._workers.values())]:
        with pytest.raises(Unavailable):
            TcpNetwork(b"x" * 32).connect(address)
    reached = completed(handle)
    wait_until(lambda: alive(handle) and completed(handle) > reached)  # nothing of that disturbed the job
    handle.cancel(timeout=300)
    result = handle.wait(300)
    assert (result.state, result.restarts) == ("CANCELED", 0)
    wait_until(lambda: running_tasks(spark) == 0)
    assert not spark.sparkContext.statusTracker().getActiveJobsIds()
    assert not [shown for shown in (submission._token.hex(), repr(submission._token)) if shown in caplog.text]
    assert spark.range(3).count() == 3


def test_too_few_slots_are_an_error_and_nothing_is_written(spark, job):
    with pytest.raises(Unavailable, match="too few free slots") as caught:
        SparkRuntime(spark).start(job.flow(), checkpoint_dir=job.checkpoints, parallelism=3)
    assert (caught.value.context["needed"], caught.value.context["slots"]) == (3, 2)
    assert not Path(job.checkpoints).exists()


def test_a_function_that_raises_ends_the_job_with_its_error_and_record(spark, tmp_path):
    flow = Dataflow("bad")
    flow.source(CollectionSource([4, 0]), uid="s").map(lambda n: 1 / n, uid="divide") \
        .sink(FileSink(tmp_path / "out"), uid="o")
    with pytest.raises(HoldfastError, match="ZeroDivisionError: division by zero"):
        SparkRuntime(spark).run(flow, restart="none")
    wait_until(lambda: running_tasks(spark) == 0)


def test_a_function_that_raises_once_is_restarted_in_the_same_tasks(start_on, tmp_path):
    mark = tmp_path / "raised"

    def once(n: int) -> int:
        if n == 150 and not mark.exists():
            mark.touch()
            raise RuntimeError("once")
        return n

    flow = Dataflow("once")
    flow.source(CollectionSource(list(range(200))), uid="s", parallelism=2).map(once, uid="once") \
        .sink(FileSink(tmp_path / "out"), uid="o")
    handle = start_on(flow, checkpoint_dir=str(tmp_path / "chk"), settings=OFTEN,
                      restart=FixedDelay(3, "1ms"))
    result = handle.wait(300)
    assert (result.restarts, next(handle._executor._numbers)) == (1, 2)
    rows = [int(line) for path in (tmp_path / "out").glob("[!.]*.jsonl") for line in path.read_text().split()]
    assert sorted(rows) == list(range(200))


def test_a_flow_that_can_not_be_sent_is_refused_with_the_way_out(spark, tmp_path):
    stream = open(tmp_path / "file", "w")  # noqa: SIM115
    flow = Dataflow("unsendable")
    flow.source(CollectionSource([1]), uid="s").map(lambda n: stream.write(str(n)), uid="m") \
        .sink(FileSink(tmp_path / "out"), uid="o")
    with pytest.raises(InvalidRequest, match="can't be sent"):
        SparkRuntime(spark).start(flow, checkpoint_dir=str(tmp_path / "chk"))
    stream.close()


def test_spark_connect_and_memory_are_refused(spark, job):
    with pytest.raises(InvalidRequest, match="Spark Connect"):
        SparkRuntime(object()).start(job.flow(), checkpoint_dir=job.checkpoints)
    with pytest.raises(InvalidRequest, match="memory is not shared"):
        SparkRuntime(spark).start(job.flow(), checkpoint_dir="memory://chk")
    with pytest.raises(InvalidRequest, match="another master"):
        SparkRuntime(master="local[7]").start(job.flow(), checkpoint_dir=job.checkpoints)


def test_what_spark_tells_is_cut_to_its_first_line_and_the_python_error():
    error = RuntimeError("Job aborted: barrier task ResultTask(0, 0) finished unsuccessfully.\n"
                         "org.apache.spark.api.python.PythonException: Traceback (most recent call last):\n"
                         '  File "worker.py", line 7, in main\nModuleNotFoundError: No module named \'checkpoint\'\n\n'
                         "\tat org.apache.spark.api.python.BasePythonRunner.read(PythonRunner.scala:599)\n")
    assert brief(error) == ("RuntimeError: Job aborted: barrier task ResultTask(0, 0) finished unsuccessfully.; "
                            "ModuleNotFoundError: No module named 'checkpoint'")

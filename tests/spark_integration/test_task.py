"""Tasks driven directly, without a JVM: what an attempt stores, what the next one starts from, and what goes wrong."""

from __future__ import annotations

import random
import shutil
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from checkpoint.dataflow.functions import KeyedProcessFunction
from checkpoint.storage.faults import FaultyDriver
from checkpoint.storage.retry import RetryPolicy
from checkpoint.storage.store import FileStore
from spark_integration import task as tasks
from spark_integration.cache import WorkerCache
from spark_integration.epoch_store import EpochStore
from spark_integration.epochs import EpochId, TaskRun
from spark_integration.operators import Columns, FunctionOperator, OutputSchema
from spark_integration.rows import OutputBuilder
from spark_integration.taskinfo import TaskInfo
from statebackend import ListStateDescriptor, ValueStateDescriptor
from statebackend.errors import Conflict, CorruptData, HoldfastError, IncompatibleState, InvalidRequest, Unavailable
from statebackend.keygroups import key_groups_of
from statebackend.types import state_type

OUT = OutputSchema(pa.schema([("user", pa.string()), ("n", pa.int64())]))


class Count(KeyedProcessFunction):
    def open(self, ctx: Any) -> None:
        self.count = ctx.state(ValueStateDescriptor("count", int, default=0))
        self.seen = ctx.list_state(ListStateDescriptor("seen", int))

    def process(self, record: Any, ctx: Any) -> Any:
        if record["v"] == 666:
            raise ValueError("a bad day")
        self.count.update(self.count.value() + 1)
        self.seen.add(record["v"])
        yield {"user": ctx.key, "n": self.count.value() if record["v"] != 13 else "thirteen"}


class Cluster:
    """Python workers, each with a cache of its own, and Spark's part: batches, runs, attempts."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, backend: str = "rocksdb",
                 workers: int = 2) -> None:
        monkeypatch.setenv("SPARK_LOCAL_DIRS", str(folder / "local"))
        monkeypatch.setattr(tasks, "_stores", {})
        monkeypatch.setattr("spark_integration.cache._folder", None)
        self._monkeypatch, self.checkpoint, self.backend = monkeypatch, str(folder / "state"), backend
        self.caches = [WorkerCache() for _ in range(workers)]
        self.run_id = uuid.uuid4().hex
        self.function: Any = Count()
        self.key_type: Any = str

    def restart(self) -> None:
        self.run_id = uuid.uuid4().hex
        tasks._stores.clear()

    def plan(self, parallelism: int) -> tasks.TaskPlan:
        columns = Columns(("user",), ("user", "v"))
        return tasks.TaskPlan(
            uid="count", checkpoint=self.checkpoint, storage_options={}, unfenced=False, parallelism=parallelism,
            max_parallelism=128, key_type=state_type(self.key_type), columns=columns, output=OUT,
            operator=FunctionOperator(self.function, columns), function_name="Count", backend=self.backend,
            backend_options={}, delay_ms=0, retain=3)

    def attempt(self, batch: int, index: int, parallelism: int, rows: list[tuple[Any, int]], worker: int = 0,
                query: str = "query") -> list[dict[str, Any]]:
        """One attempt of one task."""
        keys = pa.array([row[0] for row in rows], pa.string())
        groups = key_groups_of(keys.fill_null(""), 128).astype(np.int64)
        mine = (groups * parallelism // 128) == index
        table = pa.table({"user": keys, "v": pa.array([row[1] for row in rows], pa.int64()),
                          tasks.ROUTE: groups,
                          tasks.BATCH_TIME: [str(1_000_000 + batch)] * len(groups)}).filter(pa.array(mine))
        run = TaskRun(query, self.run_id, batch)
        info = TaskInfo(run, index, 0, uuid.uuid4().hex)
        self._monkeypatch.setattr(tasks, "task_info", lambda _run: info)
        self._monkeypatch.setattr(tasks, "_cache", self.caches[worker])
        stream = tasks.StatefulTask(self.plan(parallelism))(iter(table.to_batches()))
        return [row for output in stream for row in output.to_pylist()]

    def batch(self, batch: int, parallelism: int, rows: list[tuple[Any, int]],
              dice: random.Random | None = None) -> list[dict[str, Any]]:
        out = []
        for index in range(parallelism):
            if dice is not None and dice.random() < 0.3:
                self.attempt(batch, index, parallelism, rows, dice.randrange(len(self.caches)))  # its output is lost
            worker = dice.randrange(len(self.caches)) if dice is not None else index % len(self.caches)
            out += self.attempt(batch, index, parallelism, rows, worker)
        return out

    @property
    def epochs(self) -> EpochStore:
        return EpochStore(FileStore.at(self.checkpoint), "count")

    def close(self) -> None:
        for cache in self.caches:
            cache.close()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Cluster(tmp_path, monkeypatch)
    yield made
    made.close()


ROWS = [(f"user-{n % 9}", n) for n in range(12)]


def test_a_worker_goes_on_from_its_cache_and_others_catch_up(cluster: Cluster) -> None:
    cluster.batch(0, 1, ROWS)
    cluster.attempt(1, 0, 1, ROWS, worker=0)
    cluster.attempt(2, 0, 1, ROWS, worker=1)
    cluster.attempt(3, 0, 1, ROWS, worker=0)
    how = [cluster.epochs.manifest(EpochId(batch, 1)).parts[0].statistics.restored for batch in range(4)]
    assert how == ["empty", "cached", "restored", "caught up"]
    assert max(row["n"] for row in cluster.batch(4, 1, ROWS)) == 10


def test_a_worker_takes_nothing_from_before_the_folder_was_removed(cluster: Cluster) -> None:
    cluster.attempt(0, 0, 1, ROWS * 5, worker=0)
    known = dict(tasks._stores)
    shutil.rmtree(cluster.checkpoint)
    cluster.restart()
    cluster.attempt(0, 0, 1, ROWS, worker=1)
    tasks._stores.clear()
    tasks._stores.update(known)  # the first worker's: it lives on, and knows an epoch of the same number
    assert max(row["n"] for row in cluster.attempt(1, 0, 1, ROWS, worker=0)) == 4


def test_a_retried_attempt_starts_from_the_epoch_before(cluster: Cluster) -> None:
    cluster.batch(0, 2, ROWS)
    first = cluster.attempt(1, 0, 2, ROWS)
    assert cluster.attempt(1, 0, 2, ROWS) == first
    rest = cluster.attempt(1, 1, 2, ROWS)
    assert cluster.attempt(1, 1, 2, ROWS) == rest, "also when the epoch has been published meanwhile"
    assert [tuple(epoch) for epoch in cluster.epochs.chain()] == [(1, 1), (0, 1)]


@pytest.mark.parametrize("backend", ["rocksdb", "filesystem"])
@pytest.mark.parametrize("seed", range(3))
def test_random_retries_restarts_and_rescalings_equal_a_recount(
        backend: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(seed)
    cluster = Cluster(tmp_path, monkeypatch, backend=backend, workers=3)
    parallelism, inputs, outputs, batch = 2, [], {}, 0
    while batch < 14:
        if dice.random() < 0.35:
            cluster.restart()
            parallelism = dice.choice([1, 2, 3, 5])
            if batch and dice.random() < 0.5:
                batch -= 1  # Spark had not committed it: it is replayed, with the same rows
        if batch == len(inputs):
            inputs.append([(f"user-{dice.randrange(12)}", dice.randrange(10)) for _ in range(dice.randrange(0, 25))])
        if dice.random() < 0.15:  # a run that dies in the middle of the batch
            cluster.attempt(batch, 0, parallelism, inputs[batch], dice.randrange(3))
            cluster.restart()
        outputs[batch] = cluster.batch(batch, parallelism, inputs[batch], dice)
        batch += 1
    expected = Counter(user for rows in inputs for user, _ in rows)
    rows = [row for number in sorted(outputs) for row in outputs[number]]
    assert Counter((row["user"], row["n"]) for row in rows) == Counter(
        (user, n) for user, count in expected.items() for n in range(1, count + 1))
    cluster.close()


def test_operator_state_survives_and_is_dealt_out_again(cluster: Cluster) -> None:
    from statebackend.operator_state import OperatorStateSnapshot

    cluster.batch(0, 2, ROWS)
    cluster.restart()
    cluster.batch(1, 3, [])
    parts = [OperatorStateSnapshot.from_bytes(part.operator).parts[0] for part in cluster.epochs.latest().parts]
    assert sum(len(part.elements) for part in parts) == len(ROWS)
    assert {len(part.elements) for part in parts} == {4}


def test_an_older_run_is_fenced_off(cluster: Cluster) -> None:
    cluster.batch(0, 1, ROWS)
    old = cluster.run_id
    cluster.restart()
    cluster.batch(1, 1, ROWS)
    cluster.run_id = old
    with pytest.raises(Conflict, match="newer run"):
        cluster.batch(1, 1, ROWS)


def test_a_null_key_is_named_with_its_row(cluster: Cluster) -> None:
    with pytest.raises(InvalidRequest, match="key column 'user' is null") as caught:
        cluster.batch(0, 1, [("a", 1), (None, 5)])
    assert "'v': 5" in str(caught.value)


def test_a_function_that_raises_is_named_with_key_and_record(cluster: Cluster) -> None:
    with pytest.raises(HoldfastError, match=r"Count\.process raised ValueError: a bad day") as caught:
        cluster.batch(0, 1, [("a", 1), ("b", 666)])
    assert caught.value.context["key"] == "'b'"
    assert isinstance(caught.value.__cause__, ValueError)


def test_an_output_that_does_not_fit_is_named(cluster: Cluster) -> None:
    with pytest.raises(InvalidRequest, match="column 'n'") as caught:
        cluster.batch(0, 1, [("a", 1), ("b", 13)])
    assert (caught.value.context["row"], caught.value.context["function"]) == (1, "Count")


def test_another_key_type_than_stored_is_refused(cluster: Cluster) -> None:
    cluster.batch(0, 1, ROWS)
    cluster.key_type = int
    with pytest.raises(IncompatibleState, match="another type"):
        cluster.batch(1, 1, ROWS)


def test_a_missing_or_damaged_file_is_named(cluster: Cluster, tmp_path: Path) -> None:
    cluster.batch(0, 1, ROWS)
    cluster.restart()
    for path in (tmp_path / "state" / "count" / "state").iterdir():
        data = bytearray(path.read_bytes())
        data[-20] ^= 0xFF
        path.unlink()
        path.write_bytes(bytes(data))
    with pytest.raises(CorruptData, match="damaged"):
        cluster.attempt(1, 0, 1, ROWS, worker=1)


def failing_store(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> FaultyDriver:
    """From now on the tasks' storage does what the driver returned is told."""
    faults = FaultyDriver(FileStore.at(cluster.checkpoint).driver)
    store = FileStore(faults, cluster.checkpoint, retry=RetryPolicy(attempts=4, first_pause=0.001, timeout=0.5))
    monkeypatch.setattr(tasks, "epoch_store", lambda plan: EpochStore(store, plan.uid))
    return faults


@pytest.mark.parametrize("operation", ["read", "create", "put", "files", "info", "part", "complete"])
@pytest.mark.parametrize("fault", ["fails twice", "loses replies", "hangs"])
def test_storage_that_stumbles_is_tried_again(operation: str, fault: str, cluster: Cluster,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.batch(0, 2, ROWS)
    faults = failing_store(cluster, monkeypatch)
    if fault == "hangs":
        faults.hang(operation, times=1, seconds=30)
    else:
        faults.fail(operation, times=2, after=fault == "loses replies")
    cluster.batch(1, 2, ROWS)
    faults.heal()
    assert {row["user"]: row["n"] for row in cluster.batch(2, 2, ROWS)} == Counter(3 * [user for user, _ in ROWS])


def test_storage_that_is_down_fails_the_batch_and_leaves_the_epoch_before(
        cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever call of a batch is the first that gets no answer: running the batch again gives what it should."""
    cluster.batch(0, 2, ROWS)
    faults = failing_store(cluster, monkeypatch)
    began = faults.calls["*"]
    cluster.batch(1, 2, ROWS)
    calls, failures = faults.calls["*"] - began, []
    for batch, at in enumerate(range(1, calls + 1, 3), start=2):
        faults.fail("*", at=at, times=10**6, error=ConnectionError("down"))
        try:
            cluster.batch(batch, 2, ROWS)
        except Unavailable as error:
            failures.append(str(error))
        faults.heal()
        out = cluster.batch(batch, 2, ROWS)
        assert {row["user"]: row["n"] for row in out} == {
            user: count * (batch + 1) for user, count in Counter(user for user, _ in ROWS).items()}
    assert len(failures) >= 3
    assert all("in 4 attempts: ConnectionError: down" in failure for failure in failures)


def test_old_epochs_are_forgotten_and_the_rest_still_restores(cluster: Cluster) -> None:
    for batch in range(9):
        cluster.batch(batch, 2, ROWS)
    removed = cluster.epochs.forget(cluster.epochs.latest(), 3, grace_ms=0)
    assert removed > 0
    assert [epoch.epoch for epoch in cluster.epochs.chain()] == [8, 7, 6, 5]
    cluster.restart()
    assert max(row["n"] for row in cluster.attempt(6, 0, 2, ROWS, worker=1)) == 14


def test_rows_in_a_foreign_partition_are_refused(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.table({"user": ["a"], "v": pa.array([1], pa.int64()), tasks.ROUTE: pa.array([127], pa.int64()),
                      tasks.BATCH_TIME: ["0"]})
    info = TaskInfo(TaskRun("query", "run", 0), 0, 0, "x")
    monkeypatch.setattr(tasks, "task_info", lambda _run: info)
    with pytest.raises(InvalidRequest, match="not theirs"):
        list(tasks.StatefulTask(cluster.plan(2))(iter(table.to_batches())))


def test_large_output_is_spooled_to_a_file() -> None:
    batch = pa.RecordBatch.from_pydict({"n": list(range(1000))})
    spool = tasks.Spool(limit=4000)
    spool.add([batch, batch])
    assert [part.num_rows for part in spool] == [1000, 1000]
    spool.close()


def test_side_outputs_are_structs_and_undeclared_ones_are_refused() -> None:
    output = OutputBuilder(OUT.main, {"late": pa.struct([("at", pa.int64())])}, "f")
    output.records.append({"user": "a", "n": 1})
    output.add_side("late", {"at": 5})
    rows = [row for batch in output.flush(everything=True) for row in batch.to_pylist()]
    assert rows == [{"user": "a", "n": 1, "late": None}, {"user": None, "n": None, "late": {"at": 5}}]
    with pytest.raises(InvalidRequest, match="not declared"):
        output.add_side("lost", {})


def test_the_newest_epoch_opens_like_a_checkpoint(cluster: Cluster, tmp_path: Path) -> None:
    from spark_integration.query_savepoints import list_epochs, open_as_checkpoint

    cluster.batch(0, 2, ROWS)
    cluster.batch(1, 2, ROWS)
    for url in (cluster.checkpoint, f"{cluster.checkpoint}/count"):
        opened = open_as_checkpoint(url)
        assert opened is not None
        metadata, source = opened
        assert [entry.uid for entry in metadata.operators] == ["count"]
        assert metadata.checkpoint_id == 2
        source.close()
    assert open_as_checkpoint(str(tmp_path / "nothing")) is None
    assert [(row["epoch"], row["rows_in"]) for row in list_epochs(cluster.checkpoint)] == [(1, 12), (0, 12)]

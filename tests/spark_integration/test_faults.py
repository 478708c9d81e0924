"""Faults made to happen: whatever goes wrong, state and output come out as in an undisturbed run."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoint.dataflow.functions import KeyedProcessFunction
from checkpoint.storage.store import FileStore
from spark_integration import stateful
from spark_integration.epoch_store import EpochStore
from statebackend import ValueStateDescriptor

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]


class Faulty(KeyedProcessFunction):
    """Counts per user. At one record it fails once: by an exception, or by ending the worker process."""

    def __init__(self, marker: str, kind: str) -> None:
        self.marker, self.kind = marker, kind

    def open(self, ctx: Any) -> None:
        self.count = ctx.state(ValueStateDescriptor("count", int, default=0))

    def process(self, record: Any, ctx: Any) -> Any:
        self.count.update(self.count.value() + 1)
        if record["amount"] == 77 and not os.path.exists(self.marker):
            Path(self.marker).touch()
            if self.kind == "exit":
                os._exit(9)
            raise RuntimeError("made to fail")
        yield {"user": ctx.key, "n": self.count.value()}


def counts_of(rows: list[dict[str, Any]]) -> dict[str, int]:
    latest: dict[str, int] = {}
    for row in rows:
        latest[row["user"]] = max(row["n"], latest.get(row["user"], 0))
    return latest


@pytest.fixture
def three_batches(feed: Callable[..., Any]) -> tuple[Any, Counter[str]]:
    source = feed("user string, amount bigint")
    expected: Counter[str] = Counter()
    for batch in range(3):
        users = [f"user-{(n * 7 + batch) % 11}" for n in range(30)]
        source.add(user=users, amount=[77 if batch == 1 and n == 20 else n for n in range(30)])
        expected.update(users)
    return source, expected


def counting(source: Any, tmp_path: Path, function: Any, parallelism: int = 2, **options: Any) -> Any:
    return stateful(source.stream(), key="user", function=function, output="user string, n bigint", uid="count",
                    checkpoint=str(tmp_path / "state"), parallelism=parallelism, **options)


@pytest.mark.parametrize(("kind", "backend"), [("raise", "rocksdb"), ("exit", "rocksdb"), ("raise", "filesystem")])
def test_a_failed_task_is_run_again_from_the_epoch_before(
        kind: str, backend: str, three_batches: Any, run_query: Callable[..., Any], tmp_path: Path) -> None:
    source, expected = three_batches
    out = run_query(counting(source, tmp_path, Faulty(str(tmp_path / "failed"), kind), backend=backend))
    assert (tmp_path / "failed").exists()
    assert counts_of(out.rows) == expected
    assert len(out.rows) == sum(expected.values())


def test_two_actions_on_one_batch_count_once(three_batches: Any, run_query: Callable[..., Any],
                                             tmp_path: Path) -> None:
    source, expected = three_batches
    rows: dict[int, Any] = {}

    def twice(df: Any, batch: int) -> None:
        first = df.count()
        rows[batch] = [row.asDict() for row in df.collect()]
        assert first == len(rows[batch])

    run_query(counting(source, tmp_path, Faulty(str(tmp_path / "no"), "none")), sink=twice)
    assert counts_of([row for batch in rows.values() for row in batch]) == expected


def test_a_look_at_some_rows_before_the_real_action_does_no_harm(
        three_batches: Any, run_query: Callable[..., Any], tmp_path: Path) -> None:
    source, expected = three_batches
    rows: dict[int, Any] = {}

    def peek(df: Any, batch: int) -> None:
        df.limit(1).collect()
        rows[batch] = [row.asDict() for row in df.collect()]

    run_query(counting(source, tmp_path, Faulty(str(tmp_path / "no"), "none")), sink=peek)
    assert counts_of([row for batch in rows.values() for row in batch]) == expected


def test_a_batch_that_is_read_only_in_part_is_named_by_the_next(
        three_batches: Any, run_query: Callable[..., Any], tmp_path: Path) -> None:
    source, _ = three_batches

    def partly(df: Any, batch: int) -> None:
        df.limit(1).collect()

    with pytest.raises(Exception, match="batch 0 was computed only in part"):
        run_query(counting(source, tmp_path, Faulty(str(tmp_path / "no"), "none")), sink=partly)


def test_a_failed_sink_replays_the_batch_on_restart(three_batches: Any, run_query: Callable[..., Any],
                                                    tmp_path: Path) -> None:
    """Our epoch is published, Spark's commit is not: the batch runs again, with the same id, from the epoch before."""
    source, expected = three_batches
    rows: dict[int, Any] = {}
    failed: list[int] = []

    def sink(df: Any, batch: int) -> None:
        rows[batch] = [row.asDict() for row in df.collect()]
        if batch == 1 and not failed:
            failed.append(batch)
            raise RuntimeError("the sink failed after writing")

    def query(parallelism: int) -> Any:
        return counting(source, tmp_path, Faulty(str(tmp_path / "no"), "none"), parallelism)

    with pytest.raises(Exception, match="the sink failed"):
        run_query(query(2), sink=sink)
    run_query(query(3), sink=sink)
    assert counts_of([row for batch in rows.values() for row in batch]) == expected
    assert sum(map(len, rows.values())) == sum(expected.values())
    epochs = EpochStore(FileStore.at(str(tmp_path / "state")), "count")
    assert [tuple(epoch) for epoch in epochs.chain()] == [(2, 2), (1, 2), (0, 1)]
    assert (1, 1) in epochs.published(), "the epoch that lost is still there, off the chain"


def test_a_query_restarted_from_an_older_spark_checkpoint_goes_back_with_it(
        three_batches: Any, run_query: Callable[..., Any], tmp_path: Path) -> None:
    source, expected = three_batches

    def query() -> Any:
        return counting(source, tmp_path, Faulty(str(tmp_path / "no"), "none"))

    out = run_query(query())
    for name in ("1", "2"):
        (tmp_path / "spark-checkpoint" / "commits" / name).unlink()
        (tmp_path / "spark-checkpoint" / "commits" / f".{name}.crc").unlink(missing_ok=True)
    (tmp_path / "spark-checkpoint" / "offsets" / "2").unlink()
    (tmp_path / "spark-checkpoint" / "offsets" / ".2.crc").unlink(missing_ok=True)
    again = run_query(query())
    assert sorted(again.batches) == [1, 2]
    out.batches.update(again.batches)
    assert counts_of(out.rows) == expected


def test_the_state_of_another_query_is_refused(three_batches: Any, run_query: Callable[..., Any],
                                               tmp_path: Path) -> None:
    source, _ = three_batches
    run_query(counting(source, tmp_path, Faulty(str(tmp_path / "no"), "none")))
    with pytest.raises(Exception, match="belongs to another query"):
        run_query(counting(source, tmp_path, Faulty(str(tmp_path / "no"), "none")), checkpoint="another")


def test_a_missing_state_folder_is_named(three_batches: Any, run_query: Callable[..., Any], tmp_path: Path) -> None:
    source, _ = three_batches
    run_query(counting(source, tmp_path, Faulty(str(tmp_path / "no"), "none")))
    (tmp_path / "state").rename(tmp_path / "moved")
    source.add(user=["a"], amount=[1])
    with pytest.raises(Exception, match="there is no state for it"):
        run_query(counting(source, tmp_path, Faulty(str(tmp_path / "no"), "none")))


def test_a_damaged_state_file_is_named(three_batches: Any, run_query: Callable[..., Any], tmp_path: Path) -> None:
    source, _ = three_batches
    run_query(counting(source, tmp_path, Faulty(str(tmp_path / "no"), "none")))
    for path in (tmp_path / "state" / "count" / "state").iterdir():
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0xFF
        os.unlink(path)  # the worker's own copy may be a hard link
        path.write_bytes(bytes(data))
    source.add(user=["a"], amount=[1])
    with pytest.raises(Exception, match=r"damaged|can't be read"):
        run_query(counting(source, tmp_path, Faulty(str(tmp_path / "no"), "none"), parallelism=3))

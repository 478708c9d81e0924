"""What a query must not do, made to happen on a real session: it fails with the reason, and nothing is half done."""

from __future__ import annotations

import shutil
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


class Count(KeyedProcessFunction):
    def open(self, ctx: Any) -> None:
        self.count = ctx.state(ValueStateDescriptor("count", int, default=0))

    def process(self, record: Any, ctx: Any) -> Any:
        self.count.update(self.count.value() + (1 << 70 if record["amount"] == 15 else 1))
        if record["amount"] == 13:
            raise ValueError("thirteen")
        yield {"user": str(ctx.key), "n": self.count.value() if record["amount"] != 14 else "fourteen"}


@pytest.fixture
def counting(feed: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    source = feed("user string, amount bigint")

    def make(rows: dict[str, Any] | None = None, key: str = "user", parallelism: int = 2) -> Any:
        if rows is not None:
            source.add(**rows)
        return stateful(source.stream(), key=key, function=Count(), output="user string, n bigint", uid="count",
                        checkpoint=str(tmp_path / "state"), parallelism=parallelism)

    return make


GOOD = {"user": ["a", "b", "a"], "amount": [1, 2, 3]}


def epochs(tmp_path: Path) -> list[int]:
    return [epoch.epoch for epoch in EpochStore(FileStore.at(str(tmp_path / "state")), "count").chain()]


def test_asynchronous_progress_tracking_is_refused(counting: Callable[..., Any], tmp_path: Path) -> None:
    query = counting(GOOD).writeStream.format("noop").option("asyncProgressTrackingEnabled", "true").option(
        "checkpointLocation", str(tmp_path / "ck")).start()
    try:
        with pytest.raises(Exception, match="asynchronous progress tracking skips commits"):
            query.awaitTermination(120)
    finally:
        query.stop()
    assert not (tmp_path / "state" / "count").exists()


def test_a_continuous_trigger_is_refused(spark: Any, tmp_path: Path) -> None:
    rate = spark.readStream.format("rate").load().selectExpr("cast(value % 3 as string) as user", "value as amount")
    out = stateful(rate, key="user", function=Count(), output="user string, n bigint", uid="count",
                   checkpoint=str(tmp_path / "state"))
    with pytest.raises(Exception, match="Continuous processing does not support"):
        out.writeStream.format("noop").trigger(continuous="1 second").option(
            "checkpointLocation", str(tmp_path / "ck")).start()


@pytest.mark.parametrize(("rows", "message"), [
    ({"user": ["a", None], "amount": [1, 2]}, r"key column 'user' is null in a row.*amount.*2"),
    ({"user": ["a", "u"], "amount": [1, 13]}, r"Count.process raised ValueError: thirteen.*key=.*u.*amount.*13"),
    ({"user": ["a", "u"], "amount": [1, 14]}, r"column.*'?n'?.*Count"),
    ({"user": ["a", "u", "v"] * 50, "amount": [*range(100, 249), 15]}, r"Count.process.*key='v'.*amount.*\b15\b"),
], ids=["null key", "raising function", "unfit output", "overflow among many rows"])
def test_bad_rows_fail_their_batch_and_leave_the_epoch_before(
        rows: dict[str, Any], message: str, counting: Callable[..., Any], run_query: Callable[..., Any],
        tmp_path: Path) -> None:
    run_query(counting(GOOD))
    with pytest.raises(Exception, match=f"(?s){message}"):
        run_query(counting(rows))
    assert epochs(tmp_path) == [0]


def test_a_key_of_another_type_is_refused(counting: Callable[..., Any], run_query: Callable[..., Any],
                                          tmp_path: Path) -> None:
    run_query(counting(GOOD))
    with pytest.raises(Exception, match="the key has another type than the stored state's"):
        run_query(counting(GOOD, key="amount"))
    assert epochs(tmp_path) == [0]


def test_a_missing_spark_checkpoint_is_named_with_the_way_out(
        counting: Callable[..., Any], run_query: Callable[..., Any], tmp_path: Path) -> None:
    """Spark starts a new query in an empty location; counting everything again on top of the old state is wrong."""
    run_query(counting(GOOD))
    shutil.rmtree(tmp_path / "spark-checkpoint")
    with pytest.raises(Exception, match=r"(?s)belongs to another query.*checkpointLocation.*holdfast spark restore"):
        run_query(counting())
    assert epochs(tmp_path) == [0]


def test_a_missing_epoch_file_is_named(counting: Callable[..., Any], run_query: Callable[..., Any],
                                       tmp_path: Path) -> None:
    run_query(counting(GOOD))
    for path in (tmp_path / "state" / "count" / "state").iterdir():
        path.unlink()
    with pytest.raises(Exception, match=r"(?s)(no such file|missing).*state/0000000000-0000000001"):
        run_query(counting(GOOD, parallelism=3))
    assert epochs(tmp_path) == [0]

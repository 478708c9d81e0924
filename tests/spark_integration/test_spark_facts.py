"""What we rely on in Spark, pinned: property names, the batch clock, the feature check, broadcast, the plan's privacy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoint.dataflow.functions import KeyedBroadcastProcessFunction
from checkpoint.storage.store import FileStore
from spark_integration import require_spark, stateful
from spark_integration.epoch_store import EpochStore
from spark_integration.session import storage_options
from spark_integration.taskinfo import BATCH_ID, CONTINUOUS, QUERY_ID, RUN_ID
from statebackend import MapStateDescriptor
from statebackend.errors import IncompatibleState, InvalidRequest

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]
RULES = MapStateDescriptor("rules", str, int)


class Rules(KeyedBroadcastProcessFunction):
    def process(self, record: Any, ctx: Any) -> Any:
        yield {"user": ctx.key, "n": ctx.broadcast_state(RULES).get(record["user"])}

    def process_broadcast(self, record: Any, ctx: Any) -> Any:
        ctx.broadcast_state(RULES).put(record["user"], record["limit"])


def test_the_property_names_that_tasks_see(feed: Callable[..., Any], tmp_path: Path) -> None:
    source = feed("user string, amount bigint")
    source.add(user=["a"], amount=[1])

    def look(batches: Any) -> Any:
        import pyarrow as pa
        from pyspark import TaskContext

        context = TaskContext.get()
        for _ in batches:
            pass
        names = (BATCH_ID, QUERY_ID, RUN_ID, CONTINUOUS)
        yield pa.RecordBatch.from_pydict({"value": [context.getLocalProperty(name) for name in names]})

    seen: list[list[str]] = []
    query = source.stream().mapInArrow(look, "value string").writeStream.foreachBatch(
        lambda df, batch: seen.append([row.value for row in df.collect()])).option(
        "checkpointLocation", str(tmp_path / "ck")).trigger(availableNow=True).start()
    query.awaitTermination()
    assert seen == [["0", str(query.id), str(query.runId), "false"]]


def test_broadcast_rows_reach_every_range_before_the_others(feed: Callable[..., Any], run_query: Callable[..., Any],
                                                            tmp_path: Path) -> None:
    source, rules = feed("user string, amount bigint"), feed("user string, limit bigint", "rules")
    users = [f"u{n}" for n in range(8)]
    source.add(user=users, amount=[1] * 8)
    rules.add(user=users, limit=list(range(8)))
    out = run_query(stateful(source.stream(), key="user", function=Rules(), output="user string, n bigint", uid="r",
                             checkpoint=str(tmp_path / "state"), parallelism=3, broadcast=rules.stream()))
    assert {row["user"]: row["n"] for row in out.rows} == {user: n for n, user in enumerate(users)}


def test_an_operator_runs_in_a_batch_that_brings_it_no_row_and_the_session_stays_as_it_is(
        spark: Any, feed: Callable[..., Any], run_query: Callable[..., Any], tmp_path: Path) -> None:
    """Adaptive execution knows by then that the shuffle is empty."""
    source, before = feed("user string, amount bigint"), spark.conf.getAll
    for amount in (1, 0, 0, 1):
        source.add(user=["a"], amount=[amount])
    out = run_query(stateful(source.stream().where("amount > 0").selectExpr("user", "amount as limit"), key="user",
                             function=Rules(), output="user string, n bigint", uid="r",
                             checkpoint=str(tmp_path / "state"), parallelism=2))
    assert [len(out.batches[batch]) for batch in range(4)] == [1, 0, 0, 1]
    assert [epoch.epoch for epoch in EpochStore(FileStore.at(str(tmp_path / "state")), "r").chain()] == [3, 2, 1, 0]
    assert spark.conf.get("spark.sql.adaptive.enabled") == "true"
    assert spark.conf.getAll == before


def test_wrong_arguments_are_refused_before_anything_runs(spark: Any, tmp_path: Path) -> None:
    df = spark.createDataFrame([("a", 1)], "user string, amount bigint")
    good: dict[str, Any] = {"key": "user", "function": Rules(), "output": "user string, n bigint", "uid": "x",
                            "checkpoint": str(tmp_path / "s"), "epoch": 0}
    for change, message in [({"key": "nobody"}, "no column 'nobody'"), ({"output": "n wrongtype"}, "can't be read"),
                            ({"epoch": None}, "needs epoch="), ({"parallelism": 500}, "parallelism"),
                            ({"backend": "tape"}, "no state backend"), ({"function": Rules}, "KeyedProcessFunction"),
                            ({"watermark": ("ts", "1s")}, "no column 'ts'"), ({"retain": 1}, "two epochs"),
                            ({"order_by": "zz"}, "order by"), ({"uid": ""}, "uid")]:
        with pytest.raises(InvalidRequest, match=message):
            stateful(df, **{**good, **change})


def test_secrets_are_in_no_plan(spark: Any, tmp_path: Path) -> None:
    spark.conf.set("spark.hadoop.fs.s3a.access.key", "AKIA-TEST")
    spark.conf.set("spark.hadoop.fs.s3a.secret.key", "very-secret")
    try:
        assert storage_options(spark, "s3a://bucket/x") == {"key": "AKIA-TEST", "secret": "very-secret"}
        df = spark.createDataFrame([("a", 1)], "user string, amount bigint")
        out = stateful(df, key="user", function=Rules(), output="user string, n bigint", uid="x", epoch=0,
                       checkpoint=str(tmp_path / "s"), storage={}, parallelism=1)
        assert "very-secret" not in out._jdf.queryExecution().toString()
    finally:
        spark.conf.unset("spark.hadoop.fs.s3a.access.key")
        spark.conf.unset("spark.hadoop.fs.s3a.secret.key")


def test_an_old_spark_is_refused_with_the_reason() -> None:
    class Old:
        version = "3.5.1"

    with pytest.raises(IncompatibleState, match="repartitionById"):
        require_spark(Old())

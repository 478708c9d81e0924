"""State that a query keeps in Spark today becomes a savepoint of ours, and a query of ours continues from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import savepoint as toolkit
from checkpoint.dataflow.functions import KeyedProcessFunction
from spark_integration import import_state, restore_query, stateful
from statebackend import MapStateDescriptor, ValueStateDescriptor

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


def run_to_noop(df: Any, location: Path, mode: str = "update") -> None:
    df.writeStream.outputMode(mode).format("noop").option("checkpointLocation", str(location)).trigger(
        availableNow=True).start().awaitTermination()


class Totals(KeyedProcessFunction):
    """Goes on counting in the record that Spark's aggregation kept: count and sum."""

    def open(self, ctx: Any) -> None:
        kind = pa.struct([pa.field("count", pa.int64()), pa.field("sum", pa.int64())])
        self.state = ctx.state(ValueStateDescriptor("aggregates", kind))

    def process(self, record: Any, ctx: Any) -> Any:
        old = self.state.value() or {"count": 0, "sum": 0}
        new = {"count": old["count"] + 1, "sum": old["sum"] + record["amount"]}
        self.state.update(new)
        yield {"user": ctx.key, "n": new["count"]}


def test_an_aggregation_is_imported_with_its_offsets(spark: Any, feed: Callable[..., Any],
                                                     run_query: Callable[..., Any], tmp_path: Path) -> None:
    from pyspark.sql import functions as F

    source = feed("user string, amount bigint")
    users = [f"u{n % 5}" for n in range(30)]
    source.add(user=users, amount=list(range(30)))
    counted = source.stream().groupBy("user").agg(F.count("*").alias("count"), F.sum("amount").alias("sum"))
    run_to_noop(counted, tmp_path / "old")
    result = import_state(spark, str(tmp_path / "old"), str(tmp_path / "sp"), uid="totals")
    assert result["states"] == ["aggregates"]
    assert result["rows"] == 5
    with toolkit.open(tmp_path / "sp") as opened:
        frame = opened.to_pandas("totals", "aggregates")
        assert {key: value["count"] for key, value in zip(frame["key"], frame["value"])} == Counter(users)
    restore_query(tmp_path / "sp", checkpoint_location=str(tmp_path / "new"), checkpoint=str(tmp_path / "state"))
    source.add(user=["u1", "new"], amount=[1, 2])
    out = run_query(stateful(source.stream(), key="user", function=Totals(), output="user string, n bigint",
                             uid="totals", checkpoint=str(tmp_path / "state"), parallelism=2), checkpoint="new")
    assert sorted(out.batches) == [1], "only what Spark had not read yet is read"
    assert {row["user"]: row["n"] for row in out.rows} == {"u1": 7, "new": 1}


class Sessions(KeyedProcessFunction):
    """Counts on in the session that a record falls into, as Spark's session window kept it."""

    def open(self, ctx: Any) -> None:
        time = pa.timestamp("us", "UTC")
        window = pa.struct([pa.field("start", time), pa.field("end", time)])
        kind = pa.struct([pa.field("session_window", window), pa.field("count", pa.int64())])
        self.sessions = ctx.state(MapStateDescriptor("sessions", time, kind))

    def process(self, record: Any, ctx: Any) -> Any:
        at = record["ts"]
        for start, session in self.sessions.entries():
            if start <= at < session["session_window"]["end"]:
                self.sessions.put(start, {**session, "count": session["count"] + 1})
                yield {"user": ctx.key, "n": session["count"] + 1}
                return
        yield {"user": ctx.key, "n": 1}


def test_session_windows_are_imported_as_the_sessions_of_each_key(
        spark: Any, feed: Callable[..., Any], run_query: Callable[..., Any], tmp_path: Path) -> None:
    from pyspark.sql import functions as F

    def add(*rows: tuple[str, int]) -> None:
        times = [datetime.fromtimestamp(second, UTC) for _, second in rows]
        source.add(user=[user for user, _ in rows], ts=pa.array(times, pa.timestamp("us", "UTC")))

    source = feed("user string, ts timestamp")
    add(("a", 0), ("a", 5), ("a", 100), ("b", 50))
    sessions = source.stream().withWatermark("ts", "1 hour").groupBy("user", F.session_window("ts", "10 seconds"))
    run_to_noop(sessions.agg(F.count("*").alias("n")), tmp_path / "old", "append")
    result = import_state(spark, str(tmp_path / "old"), str(tmp_path / "sp"), uid="s")
    assert (result["states"], result["rows"]) == (["sessions"], 3)
    with toolkit.open(tmp_path / "sp") as opened:
        found = {(start.timestamp(), record["session_window"]["end"].timestamp(), record["count"])
                 for start, record in opened.lookup("s", "sessions", "a").items()}
        assert found == {(0, 15, 2), (100, 110, 1)}
    restore_query(tmp_path / "sp", checkpoint_location=str(tmp_path / "new"), checkpoint=str(tmp_path / "state"))
    add(("a", 14), ("a", 20), ("b", 55))
    out = run_query(stateful(source.stream(), key="user", function=Sessions(), output="user string, n bigint", uid="s",
                             checkpoint=str(tmp_path / "state"), parallelism=2), checkpoint="new")
    assert sorted((row["user"], row["n"]) for row in out.rows) == [("a", 1), ("a", 3), ("b", 2)]


def test_variables_of_transform_with_state_are_imported(spark: Any, feed: Callable[..., Any], tmp_path: Path) -> None:
    from pyspark.sql import Row
    from pyspark.sql.streaming import StatefulProcessor

    class Processor(StatefulProcessor):  # type: ignore[misc]
        def init(self, handle: Any) -> None:
            self.total = handle.getValueState("total", "n long")
            self.amounts = handle.getListState("amounts", "amount long")
            self.pages = handle.getMapState("pages", "page string", "n long", ttlDurationMs=3_600_000)

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
            amounts = [row.amount for row in rows]
            old = self.total.get()
            self.total.update(((old[0] if old else 0) + sum(amounts),))
            self.amounts.appendList([(amount,) for amount in amounts])
            self.pages.updateValue(("home",), (len(amounts),))
            yield Row(user=key[0])

        def close(self) -> None:
            pass

    source = feed("user string, amount bigint")
    source.add(user=["a", "b", "a"], amount=[1, 2, 3])
    provider = spark.conf.get("spark.sql.streaming.stateStore.providerClass")
    spark.conf.set("spark.sql.streaming.stateStore.providerClass", ROCKSDB)
    # With processing time Spark would run batches without data for ever, availableNow or not.
    spark.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", "false")
    try:
        run_to_noop(source.stream().groupBy("user").transformWithState(
            Processor(), "user string", "Update", "ProcessingTime"), tmp_path / "old")
        import_state(spark, str(tmp_path / "old"), str(tmp_path / "sp"), uid="tws")
    finally:
        spark.conf.set("spark.sql.streaming.stateStore.providerClass", provider)
        spark.conf.unset("spark.sql.streaming.noDataMicroBatches.enabled")
    with toolkit.open(tmp_path / "sp") as opened:
        assert opened.lookup("tws", "total", "a") == 4
        assert sorted(opened.lookup("tws", "amounts", "a")) == [1, 3]
        assert opened.lookup("tws", "pages", "b") == {"home": 1}
        assert "expires_at" in opened.read("tws", "pages").schema.names


def test_deduplication_is_imported(spark: Any, feed: Callable[..., Any], tmp_path: Path) -> None:
    source = feed("user string, amount bigint")
    source.add(user=["a", "b", "a"], amount=[1, 2, 1])
    run_to_noop(source.stream().dropDuplicates(["user", "amount"]), tmp_path / "old", "append")
    import_state(spark, str(tmp_path / "old"), str(tmp_path / "sp"), uid="dedup")
    with toolkit.open(tmp_path / "sp") as opened:
        assert opened.lookup("dedup", "seen", ("a", 1)) is True
        assert opened.read("dedup", "seen").read_all().num_rows == 2


class Alarms(KeyedProcessFunction):
    """Takes over Spark's timers: they fire here."""

    def process(self, record: Any, ctx: Any) -> Any:
        yield {"user": ctx.key, "at": None}

    def on_timer(self, timestamp: int, ctx: Any) -> Any:
        yield {"user": ctx.key, "at": timestamp}


def test_timers_of_transform_with_state_fire_here(spark: Any, feed: Callable[..., Any], run_query: Callable[..., Any],
                                                  tmp_path: Path) -> None:
    from pyspark.sql import Row
    from pyspark.sql.streaming import StatefulProcessor

    class Processor(StatefulProcessor):  # type: ignore[misc]
        def init(self, handle: Any) -> None:
            self.handle = handle

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
            for _ in rows:
                pass
            self.handle.registerTimer(10_000)
            yield Row(user=key[0], at=None)

        def close(self) -> None:
            pass

    def add(*rows: tuple[str, int]) -> None:
        times = [datetime.fromtimestamp(second, UTC) for _, second in rows]
        source.add(user=[user for user, _ in rows], ts=pa.array(times, pa.timestamp("us", "UTC")))

    source = feed("user string, ts timestamp")
    add(("a", 1), ("b", 2))
    provider = spark.conf.get("spark.sql.streaming.stateStore.providerClass")
    spark.conf.set("spark.sql.streaming.stateStore.providerClass", ROCKSDB)
    try:
        run_to_noop(source.stream().withWatermark("ts", "0 seconds").groupBy("user").transformWithState(
            Processor(), "user string, at timestamp", "Append", "EventTime"), tmp_path / "old", "append")
        imported = import_state(spark, str(tmp_path / "old"), str(tmp_path / "sp"), uid="alarms")
    finally:
        spark.conf.set("spark.sql.streaming.stateStore.providerClass", provider)
    assert imported["states"] == ["timers"]
    assert imported["rows"] == 2
    restore_query(tmp_path / "sp", checkpoint_location=str(tmp_path / "new"), checkpoint=str(tmp_path / "state"))
    add(("c", 20))
    add(("c", 21))
    out = run_query(stateful(source.stream(), key="user", function=Alarms(), output="user string, at bigint", uid="alarms",
                             checkpoint=str(tmp_path / "state"), watermark=("ts", "0s"), parallelism=2), checkpoint="new")
    fired = [(row["user"], row["at"]) for row in out.rows if row["at"] is not None]
    assert sorted(fired) == [("a", 10_000), ("b", 10_000)]


def test_groups_of_apply_in_pandas_with_state_are_imported(spark: Any, feed: Callable[..., Any], tmp_path: Path) -> None:
    from pyspark.sql.streaming.state import GroupStateTimeout

    def count(key: Any, frames: Any, state: Any) -> Any:
        import pandas as pd

        rows = sum(len(frame) for frame in frames)
        state.update(((state.get[0] if state.exists else 0) + rows,))
        state.setTimeoutDuration(3_600_000)
        yield pd.DataFrame({"user": [key[0]], "n": [rows]})

    source = feed("user string, amount bigint")
    source.add(user=["a", "b", "a"], amount=[1, 2, 1])
    spark.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", "false")
    try:
        run_to_noop(source.stream().groupBy("user").applyInPandasWithState(
            count, "user string, n bigint", "n bigint", "update", GroupStateTimeout.ProcessingTimeTimeout),
            tmp_path / "old")
        imported = import_state(spark, str(tmp_path / "old"), str(tmp_path / "sp"), uid="groups")
    finally:
        spark.conf.unset("spark.sql.streaming.noDataMicroBatches.enabled")
    assert imported["states"] == ["state", "timeout"]
    with toolkit.open(tmp_path / "sp") as opened:
        assert opened.lookup("groups", "state", "a") == 2
        assert opened.lookup("groups", "timeout", "b") > 3_600_000

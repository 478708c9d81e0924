"""Time is the batch's: watermarks come from the epoch before, clocks from the batch, ticks keep both going."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from checkpoint.dataflow.functions import KeyedProcessFunction, OutputTag
from spark_integration import stateful
from statebackend import TtlConfig, ValueStateDescriptor

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]
LATE = OutputTag("late")
OUT = "user string, kind string, at bigint"


def stamps(*seconds: int) -> pa.Array:
    return pa.array([second * 1_000_000 for second in seconds], pa.timestamp("us", "UTC"))


class Window(KeyedProcessFunction):
    """Sets an event-time timer five seconds after each record; late records go to a side output."""

    def process(self, record: Any, ctx: Any) -> Any:
        if ctx.timestamp <= ctx.watermark:
            ctx.output(LATE, {"user": ctx.key, "at": ctx.timestamp})
            return
        ctx.timers.register_event_time_timer(ctx.timestamp + 5000)
        yield {"user": ctx.key, "kind": "row", "at": ctx.timestamp}

    def on_timer(self, timestamp: int, ctx: Any) -> Any:
        yield {"user": ctx.key, "kind": "timer", "at": timestamp}


@pytest.mark.parametrize("how", ["argument", "withWatermark"])
def test_event_time_timers_fire_by_the_watermark_of_the_epoch_before(
        how: str, feed: Callable[..., Any], run_query: Callable[..., Any], tmp_path: Path) -> None:
    source = feed("user string, ts timestamp")
    source.add(user=["a", "b"], ts=stamps(10, 11))
    source.add(user=["c"], ts=stamps(40))
    source.add(user=["a"], ts=stamps(12))
    stream = source.stream()
    if how == "withWatermark":
        stream = stream.withWatermark("ts", "2 seconds")
    sides = {"late": "user string, at bigint"}
    out = run_query(stateful(stream, key="user", function=Window(), output=OUT, side_outputs=sides,
                             uid="w", parallelism=2, checkpoint=str(tmp_path / "state"),
                             watermark=("ts", "2s") if how == "argument" else None))
    assert {row["kind"] for row in out.batches[0]} == {"row"}
    assert [row["kind"] for row in out.batches[1]] == ["row"], "the watermark of batch 1 is that of epoch 0: 9 s"
    fired = sorted((row["user"], row["at"]) for row in out.batches[2] if row["kind"] == "timer")
    assert fired == [("a", 15000), ("b", 16000)]
    assert [row["late"] for row in out.batches[2] if row["late"] is not None] == [{"user": "a", "at": 12000}]


class Silence(KeyedProcessFunction):
    """Tells when a user has been silent for half a second of processing time."""

    def process(self, record: Any, ctx: Any) -> Any:
        ctx.timers.register_processing_time_timer(ctx.timers.current_processing_time() + 500)

    def on_timer(self, timestamp: int, ctx: Any) -> Any:
        yield {"user": ctx.key, "kind": "silent", "at": timestamp}


def test_ticks_fire_timers_on_silent_input(feed: Callable[..., Any], tmp_path: Path) -> None:
    source = feed("user string, ts timestamp")
    source.add(user=["a", "b", "c", "d"], ts=stamps(1, 2, 3, 4))
    rows: list[Any] = []
    query = stateful(source.stream(), key="user", function=Silence(), output=OUT, uid="s", parallelism=2,
                     checkpoint=str(tmp_path / "state"), idle_tick="300ms").writeStream.foreachBatch(
        lambda df, batch: rows.extend(df.collect())).option("checkpointLocation", str(tmp_path / "ck")).start()
    deadline = time.monotonic() + 60
    while len(rows) < 4 and time.monotonic() < deadline and query.isActive:
        time.sleep(0.1)
    query.stop()
    assert sorted(row.user for row in rows) == ["a", "b", "c", "d"]


class Expiring(KeyedProcessFunction):
    def open(self, ctx: Any) -> None:
        self.seen = ctx.state(ValueStateDescriptor("seen", int, default=0, ttl=TtlConfig("1h")))

    def process(self, record: Any, ctx: Any) -> Any:
        self.seen.update(self.seen.value() + 1)
        yield {"user": ctx.key, "kind": "seen", "at": self.seen.value()}


def test_a_batch_frame_takes_its_epoch_from_the_caller(spark: Any, tmp_path: Path) -> None:
    df = spark.createDataFrame([("a",), ("a",), ("b",)], "user string")

    def step(epoch: int) -> dict[str, int]:
        rows = stateful(df, key="user", function=Expiring(), output=OUT, uid="e", parallelism=2, epoch=epoch,
                        checkpoint=str(tmp_path / "state")).collect()
        counts: dict[str, int] = {}
        for row in rows:
            counts[row.user] = max(row.at, counts.get(row.user, 0))
        return counts

    assert step(0) == {"a": 2, "b": 1}
    assert step(1) == {"a": 4, "b": 2}
    assert step(1) == {"a": 4, "b": 2}, "the same step again starts from the epoch before it"
    assert step(2) == {"a": 6, "b": 3}


def test_the_batch_clock_is_sparks(feed: Callable[..., Any], run_query: Callable[..., Any], tmp_path: Path) -> None:
    class Clock(KeyedProcessFunction):
        def process(self, record: Any, ctx: Any) -> Any:
            yield {"user": ctx.key, "kind": "now", "at": ctx.timers.current_processing_time()}

    source = feed("user string, ts timestamp")
    source.add(user=["a", "b", "c"], ts=stamps(1, 1, 1))
    out = run_query(stateful(source.stream(), key="user", function=Clock(), output=OUT, uid="clock", parallelism=2,
                             checkpoint=str(tmp_path / "state")))
    times = {row["at"] for row in out.rows}
    log = (tmp_path / "spark-checkpoint" / "offsets" / "0").read_text()
    assert len(times) == 1
    assert f'"batchTimestampMs":{times.pop()}' in log
    assert datetime.datetime.now().year >= 2024

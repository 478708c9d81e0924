"""What an operator can be besides a function per record: vectorised, isolated, several in one query, with side outputs,
broadcast state from a table or a stream, and state per partition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from checkpoint.dataflow.functions import (
    CheckpointedFunction,
    KeyedBroadcastProcessFunction,
    KeyedProcessFunction,
    OutputTag,
)
from spark_integration import open_epoch, stateful
from statebackend import ListStateDescriptor, MapStateDescriptor, ValueStateDescriptor

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]
LIMITS = MapStateDescriptor("limits", str, int)
LARGE = OutputTag("large")


class CountBatches(KeyedProcessFunction):
    """Vectorised: one read and one write of state for all keys of a piece of input."""

    def open(self, ctx: Any) -> None:
        self.count = ctx.state(ValueStateDescriptor("count", int, default=0))

    def process(self, record: Any, ctx: Any) -> Any:
        raise AssertionError("process_batch takes the rows")

    def process_batch(self, rows: pa.Table, ctx: Any) -> pa.Table:
        groups = rows.group_by("user", use_threads=False).aggregate([([], "count_all")])
        keys = groups["user"].combine_chunks()
        old = self.count.value_many(keys)
        new = pa.compute.add(pa.array(old, pa.int64()), groups["count_all"].combine_chunks())
        self.count.update_many(keys, new)
        return pa.table({"user": keys, "n": new})


class Count(KeyedProcessFunction):
    def open(self, ctx: Any) -> None:
        self.count = ctx.state(ValueStateDescriptor("count", int, default=0))

    def process(self, record: Any, ctx: Any) -> Any:
        self.count.update(self.count.value() + 1)
        if record.get("amount", 0) >= 10:
            ctx.output(LARGE, {"who": ctx.key, "amount": record["amount"]})
        yield {"user": ctx.key, "n": self.count.value()}


class PerParity(KeyedProcessFunction):
    """The second operator of a query: how many counts of the first were odd, how many even."""

    def open(self, ctx: Any) -> None:
        self.seen = ctx.state(ValueStateDescriptor("seen", int, default=0))

    def process(self, record: Any, ctx: Any) -> Any:
        self.seen.update(self.seen.value() + 1)
        yield {"odd": ctx.key, "seen": self.seen.value()}


class Limited(KeyedBroadcastProcessFunction):
    def process(self, record: Any, ctx: Any) -> Any:
        yield {"user": ctx.key, "n": ctx.broadcast_state(LIMITS).get(ctx.key)}

    def process_broadcast(self, record: Any, ctx: Any) -> Any:
        ctx.broadcast_state(LIMITS).put(record["user"], record["limit"])


class CountPerPartition(KeyedProcessFunction, CheckpointedFunction):
    """Operator state: how many rows this partition has seen; parts are added up when ranges are cut anew."""

    def initialize_state(self, ctx: Any) -> None:
        self.stored = ctx.operator_state.list_state(ListStateDescriptor("rows", int))
        self.rows = sum(self.stored.get())

    def snapshot_state(self, ctx: Any) -> None:
        self.stored.update([self.rows])

    def process(self, record: Any, ctx: Any) -> Any:
        self.rows += 1
        yield {"user": ctx.key, "n": self.rows}


@pytest.fixture
def batches(feed: Callable[..., Any]) -> tuple[Any, Callable[[], None], list[str]]:
    """A feed, a call that adds a batch to it, and all users so far."""
    source, seen = feed("user string, amount bigint"), []

    def add() -> None:
        users = [f"user-{(n * 7 + len(seen)) % 9}" for n in range(20)]
        source.add(user=users, amount=list(range(20)))
        seen.extend(users)

    add()
    add()
    return source, add, seen


def latest(rows: list[dict[str, Any]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in rows:
        found[row["user"]] = max(row["n"], found.get(row["user"], 0))
    return found


def test_vectorised_code_counts_as_any_other_and_may_be_isolated(
        batches: Any, run_query: Callable[..., Any], tmp_path: Path) -> None:
    source, add, seen = batches

    def query(parallelism: int) -> Any:
        out = stateful(source.stream(), key="user", function=CountBatches(), output="user string, n bigint", uid="count",
                       checkpoint=str(tmp_path / "state"), parallelism=parallelism, isolate=True)
        return out.coalesce(1)  # would renumber the operator's own partitions

    out = run_query(query(3))
    assert latest(out.rows) == Counter(seen)
    add()
    run_query(query(2), into=out)
    assert latest(out.rows) == Counter(seen)


def test_two_stateful_operators_of_one_query_and_a_side_output(
        batches: Any, run_query: Callable[..., Any], tmp_path: Path) -> None:
    source, add, seen = batches

    def counted() -> Any:
        return stateful(source.stream(), key="user", function=Count(), output="user string, n bigint", uid="count",
                        checkpoint=str(tmp_path / "state"), parallelism=2,
                        side_outputs={"large": "who string, amount bigint"})

    def parity() -> Any:
        odd = counted().where("large is null").selectExpr("n % 2 = 1 as odd")
        return stateful(odd, key="odd", function=PerParity(), output="odd boolean, seen bigint", uid="parity",
                        checkpoint=str(tmp_path / "state"), parallelism=2)

    out = run_query(parity())
    add()
    run_query(parity(), into=out)
    counts = [n for count in Counter(seen).values() for n in range(1, count + 1)]
    expected = Counter(n % 2 == 1 for n in counts)
    with open_epoch(tmp_path / "state") as live:
        assert live.to_pandas("parity", "seen").set_index("key")["value"].to_dict() == expected
        assert live.to_pandas("count", "count").set_index("key")["value"].to_dict() == Counter(seen)
    assert sorted(out.batches) == [0, 1, 2]


def test_side_outputs_are_nullable_struct_columns(batches: Any, run_query: Callable[..., Any], tmp_path: Path) -> None:
    source, _, seen = batches
    out = stateful(source.stream(), key="user", function=Count(), output="user string, n bigint", uid="count",
                   checkpoint=str(tmp_path / "state"), parallelism=2, side_outputs={"large": "who string, amount bigint"})
    rows = run_query(out).rows
    assert latest([row for row in rows if row["large"] is None]) == Counter(seen)
    aside = [row["large"] for row in rows if row["large"] is not None]
    assert sorted(row["amount"] for row in aside) == sorted(2 * list(range(10, 20)))
    assert all(row["user"] is None for row in rows if row["large"] is not None)


def test_a_table_is_broadcast_at_the_start_of_every_run(spark: Any, batches: Any, run_query: Callable[..., Any],
                                                        tmp_path: Path) -> None:
    source, add, seen = batches

    def run(limits: dict[str, int], parallelism: int) -> dict[str, int]:
        table = spark.createDataFrame(list(limits.items()), "user string, limit bigint")
        out = stateful(source.stream(), key="user", function=Limited(), output="user string, n bigint", uid="limited",
                       checkpoint=str(tmp_path / "state"), parallelism=parallelism, broadcast=table)
        return {row["user"]: row["n"] for row in run_query(out).rows}

    first = {user: number for number, user in enumerate(sorted(set(seen)))}
    assert run(first, 2) == first
    add()
    changed = {"user-3": 300, "user-4": 400}
    assert run(changed, 3).items() >= changed.items()
    add()
    assert run({}, 1) == {**first, **changed}, "what was broadcast before is in the state"


def test_broadcast_state_of_a_stream_is_kept_through_restarts(
        feed: Callable[..., Any], batches: Any, run_query: Callable[..., Any], tmp_path: Path) -> None:
    source, add, seen = batches
    limits = feed("user string, limit bigint", "limits")
    users = sorted(set(seen))
    limits.add(user=users, limit=list(range(len(users))))

    def run(parallelism: int) -> dict[str, int]:
        out = stateful(source.stream(), key="user", function=Limited(), output="user string, n bigint", uid="limited",
                       checkpoint=str(tmp_path / "state"), parallelism=parallelism, broadcast=limits.stream())
        return {row["user"]: row["n"] for row in run_query(out).rows}

    expected = {user: number for number, user in enumerate(users)}
    assert run(2) == expected
    add()
    assert run(3) == expected
    limits.add(user=["user-5"], limit=[55])
    assert run(3) == {}, "a batch with broadcast rows only gives no rows"
    add()
    assert run(1)["user-5"] == 55


def test_state_per_partition_survives_and_is_dealt_out_anew(batches: Any, run_query: Callable[..., Any],
                                                            tmp_path: Path) -> None:
    source, add, seen = batches

    def run(parallelism: int) -> list[dict[str, Any]]:
        return run_query(stateful(source.stream(), key="user", function=CountPerPartition(),  # type: ignore[no-any-return]
                                  output="user string, n bigint", uid="rows", checkpoint=str(tmp_path / "state"),
                                  parallelism=parallelism)).rows

    run(2)
    add()
    rows = run(1)
    assert max(row["n"] for row in rows) == len(seen)

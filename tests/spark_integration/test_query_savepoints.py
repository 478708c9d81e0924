"""A query's savepoint holds state and offsets of one batch; a new query continues exactly there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import savepoint as toolkit
from checkpoint.dataflow.functions import KeyedProcessFunction
from spark_integration import open_epoch, restore_query, rewind, savepoint, stateful
from statebackend import ListStateDescriptor, ValueStateDescriptor
from statebackend.errors import Conflict, InvalidRequest, NotFound

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]


class Count(KeyedProcessFunction):
    def open(self, ctx: Any) -> None:
        self.count = ctx.state(ValueStateDescriptor("count", int, default=0))
        self.amounts = ctx.state(ListStateDescriptor("amounts", int))

    def process(self, record: Any, ctx: Any) -> Any:
        self.count.update(self.count.value() + 1)
        self.amounts.add(record["amount"])
        yield {"user": ctx.key, "n": self.count.value()}


def counts_of(rows: list[dict[str, Any]]) -> dict[str, int]:
    latest: dict[str, int] = {}
    for row in rows:
        latest[row["user"]] = max(row["n"], latest.get(row["user"], 0))
    return latest


def test_a_new_query_continues_where_the_savepoint_was_taken(
        feed: Callable[..., Any], run_query: Callable[..., Any], tmp_path: Path) -> None:
    source = feed("user string, amount bigint")
    batches = [[f"u{(n * 3 + batch) % 8}" for n in range(20)] for batch in range(4)]
    place = tmp_path / "sp"
    state, location = str(tmp_path / "state"), str(tmp_path / "spark-checkpoint")

    def query(checkpoint: str, parallelism: int | None = None) -> Any:
        return stateful(source.stream(), key="user", function=Count(), output="user string, n bigint", uid="count",
                        checkpoint=checkpoint, parallelism=parallelism)

    for batch in batches[:2]:
        source.add(user=batch, amount=list(range(20)))
    out = run_query(query(state, 2))
    savepoint(state, place, checkpoint_location=location)
    source.add(user=batches[2], amount=list(range(20)))
    run_query(query(state, 2), into=out)

    with toolkit.open(place) as opened:
        stored = opened.to_pandas("count", "count")
        assert dict(zip(stored["key"], stored["value"])) == Counter(batches[0] + batches[1])
        assert opened.metadata.properties["spark"]["batch"] == 1
    with open_epoch(state) as live:
        assert sum(live.read("count", "count").read_all()["value"].to_pylist()) == 60

    restore_query(place, checkpoint_location=str(tmp_path / "ck2"), checkpoint=str(tmp_path / "state2"), parallelism=3)
    again = run_query(query(str(tmp_path / "state2")), checkpoint="ck2")
    assert sorted(again.batches) == [2], "only what came after the savepoint is read again"
    assert sorted(map(str, again.batches[2])) == sorted(map(str, out.batches[2]))

    rewind(state, location, 0, to_checkpoint=str(tmp_path / "state3"), to_checkpoint_location=str(tmp_path / "ck3"))
    back = run_query(query(str(tmp_path / "state3"), 1), checkpoint="ck3")
    assert sorted(back.batches) == [1, 2]
    assert counts_of(back.rows) | counts_of(out.batches[0]) | counts_of(back.rows) == Counter(
        batches[0] + batches[1] + batches[2])

    with pytest.raises(Conflict, match="not empty"):
        restore_query(place, checkpoint_location=location, checkpoint=str(tmp_path / "x"))
    with pytest.raises(NotFound, match="no committed batch 77"):
        savepoint(state, tmp_path / "sp77", checkpoint_location=location, epoch=77)
    with open_epoch(state) as live, pytest.raises(InvalidRequest, match="no Spark offsets"):
        restore_query(live, checkpoint_location=str(tmp_path / "y"), checkpoint=str(tmp_path / "z"))

"""`holdfast spark` as people use it: a real process beside a query, from savepoint over edit to restore."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoint.dataflow.functions import KeyedProcessFunction
from spark_integration import stateful
from statebackend import ValueStateDescriptor

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]
HOLDFAST = Path(sys.executable).with_name("holdfast")


class Count(KeyedProcessFunction):
    def open(self, ctx: Any) -> None:
        self.count = ctx.state(ValueStateDescriptor("count", int, default=0))

    def process(self, record: Any, ctx: Any) -> Any:
        self.count.update(self.count.value() + 1)
        yield {"user": ctx.key, "n": self.count.value(), "ranges": ctx.parallelism}


def holdfast(*arguments: object, code: int = 0) -> Any:
    done = subprocess.run([str(HOLDFAST), *map(str, arguments), "-o", "json"], capture_output=True, text=True, check=False,
                          timeout=240)
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout) if code == 0 else done.stderr


def latest(rows: list[dict[str, Any]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in rows:
        found[row["user"]] = max(row["n"], found.get(row["user"], 0))
    return found


def test_a_query_is_saved_edited_restored_and_rewound_from_the_command_line(
        spark: Any, feed: Callable[..., Any], run_query: Callable[..., Any], tmp_path: Path) -> None:
    source = feed("user string, amount bigint")
    state, location, seen = tmp_path / "state", tmp_path / "spark-checkpoint", []

    def add(batch: int) -> None:
        users = [f"u{(n * 3 + batch) % 7}" for n in range(20)]
        source.add(user=users, amount=list(range(20)))
        seen.append(Counter(users))

    def query(checkpoint: Path, parallelism: int | None = None) -> Any:
        return stateful(source.stream(), key="user", function=Count(), output="user string, n bigint, ranges int",
                        uid="count", checkpoint=str(checkpoint), parallelism=parallelism)

    add(0)
    add(1)
    run_query(query(state, 2))

    # the newest epoch, where a checkpoint or savepoint is expected
    rows = holdfast("savepoint", "read", state, "count.count")
    assert {row["key"]: row["value"] for row in rows} == seen[0] + seen[1]
    assert holdfast("savepoint", "verify", state / "count")
    assert [row["epoch"] for row in holdfast("spark", "epochs", state)] == [1, 0]

    # a savepoint, one key of it put right, and a new query that goes on from there at another parallelism
    assert holdfast("spark", "savepoint", state, tmp_path / "sp", "--checkpoint-location", location)
    holdfast("savepoint", "edit", tmp_path / "sp", tmp_path / "edited", "--set", "count.count:u1=1000", "--apply")
    restored = holdfast("spark", "restore", tmp_path / "edited", "--checkpoint-location", tmp_path / "ck2",
                        "--checkpoint", tmp_path / "state2", "--parallelism", 3)
    assert restored["checkpoint"] == str(tmp_path / "state2")
    add(2)
    again = run_query(query(tmp_path / "state2"), checkpoint="ck2")
    assert sorted(again.batches) == [2]
    assert {row["ranges"] for row in again.rows} == {3}
    expected = {user: n + (1000 - (seen[0] + seen[1])["u1"] if user == "u1" else 0)
                for user, n in (seen[0] + seen[1] + seen[2]).items()}
    assert latest(again.rows) == {user: expected[user] for user in latest(again.rows)}

    # back to a retained epoch, both folders together; Spark's configuration has the last word on parallelism
    holdfast("spark", "restore", state, "--epoch", 0, "--from-location", location, "--checkpoint-location",
             tmp_path / "ck3")
    spark.conf.set("spark.holdfast.count.parallelism", "4")
    try:
        back = run_query(query(tmp_path / "ck3-state", 2), checkpoint="ck3")
    finally:
        spark.conf.unset("spark.holdfast.count.parallelism")
    assert sorted(back.batches) == [1, 2]
    assert {row["ranges"] for row in back.rows} == {4}
    assert {**seen[0], **latest(back.rows)} == seen[0] + seen[1] + seen[2]

    assert "not empty" in holdfast("spark", "restore", tmp_path / "sp", "--checkpoint-location", location, code=6)
    assert "no epochs" in holdfast("spark", "savepoint", tmp_path / "in", tmp_path / "no", "--checkpoint-location",
                                   location, code=4)

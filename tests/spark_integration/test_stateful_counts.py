"""State per key inside a streaming query: counted across batches, restarts, backends and parallelism."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoint.dataflow.functions import KeyedProcessFunction
from spark_integration import stateful
from statebackend import ValueStateDescriptor

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]


class CountPerUser(KeyedProcessFunction):
    def open(self, ctx: Any) -> None:
        self.count = ctx.state(ValueStateDescriptor("count", int, default=0))

    def process(self, record: Any, ctx: Any) -> Any:
        self.count.update(self.count.value() + 1)
        yield {"user": ctx.key, "n": self.count.value()}


def counted(rows: list[dict[str, Any]]) -> dict[str, int]:
    latest: dict[str, int] = {}
    for row in rows:
        latest[row["user"]] = max(row["n"], latest.get(row["user"], 0))
    return latest


@pytest.mark.parametrize("backend", ["rocksdb", "filesystem"])
def test_counts_go_on_through_restarts_at_another_parallelism(
        backend: str, feed: Callable[..., Any], run_query: Callable[..., Any], tmp_path: Path) -> None:
    source = feed("user string, amount bigint")
    users = [f"user-{n % 7}" for n in range(40)]

    def query(parallelism: int) -> Any:
        return stateful(source.stream(), key="user", function=CountPerUser(), output="user string, n bigint",
                        uid="count", checkpoint=str(tmp_path / "state"), parallelism=parallelism, backend=backend)

    source.add(user=users, amount=list(range(40)))
    source.add(user=users[:10], amount=list(range(10)))
    out = run_query(query(2))
    assert counted(out.rows) == Counter(users + users[:10])
    source.add(user=["user-3", "new"], amount=[1, 2])
    run_query(query(3), into=out)
    source.add(user=["user-3", "new", "user-6"], amount=[1, 2, 3])
    run_query(query(5), into=out)
    expected = Counter([*users, *users[:10], "user-3", "new", "user-3", "new", "user-6"])
    assert counted(out.rows) == expected
    assert len(out.rows) == sum(expected.values())

"""Declarative aggregates equal what SQL gives over all rows so far."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from spark_integration import aggregate
from spark_integration.aggregates import parse_aggregates, partials
from statebackend.errors import InvalidRequest

AGGS = {"n": "count", "values": ("count", "v"), "total": ("sum", "v"), "low": ("min", "v"), "high": ("max", "w"),
        "mean": ("avg", "w"), "first_name": ("min", "name"), "latest": ("last", "name")}


def test_partials_hold_one_row_per_key() -> None:
    rows = pa.table({"k": [1, 2, 1], "v": pa.array([10, None, 30], pa.int32())})
    parsed = parse_aggregates({"n": "count", "total": ("sum", "v")}, {"k": pa.int64(), "v": pa.int32()})
    table = partials(rows, ["k"], parsed).sort_by("k")
    assert table.to_pydict() == {"k": [1, 2], "n": [2, 1], "total": [40, None], "total__rows": [2, 0]}


@pytest.mark.parametrize("spec", ["median", ("sum", "name"), ("sum", "nothing"), "sum"])
def test_what_can_not_be_aggregated_is_refused(spec: Any) -> None:
    with pytest.raises(InvalidRequest):
        parse_aggregates({"x": spec}, {"v": pa.int64(), "name": pa.string()})


@pytest.mark.spark
@pytest.mark.xdist_group("spark")
@pytest.mark.parametrize(("backend", "combine"), [("rocksdb", False), ("filesystem", False), ("rocksdb", True)])
def test_running_aggregates_equal_sql(backend: str, combine: bool, spark: Any, feed: Callable[..., Any],
                                      run_query: Callable[..., Any], tmp_path: Path) -> None:
    source = feed("region string, k int, v int, w double, name string, at bigint")
    dice, at = random.Random(5), 0
    aggs = {name: spec for name, spec in AGGS.items() if not combine or name != "latest"}
    for _ in range(3):
        rows = []
        for _ in range(120):
            at += 1
            rows.append({"region": dice.choice(["eu", "us"]), "k": dice.randrange(9),
                         "v": dice.choice([None, dice.randrange(-50, 50)]), "w": dice.random(),
                         "name": dice.choice(["a", "bb", "ccc", None]), "at": at})
        table = pa.Table.from_pylist(rows, pa.schema([("region", pa.string()), ("k", pa.int32()), ("v", pa.int32()),
                                                      ("w", pa.float64()), ("name", pa.string()), ("at", pa.int64())]))
        source.add(**{name: table.column(name).combine_chunks() for name in table.column_names})
    out = run_query(aggregate(source.stream(), key=["region", "k"], aggs=aggs, uid="agg", parallelism=2,
                              checkpoint=str(tmp_path / "state"), backend=backend, combine=combine,
                              order_by=() if combine else "at"))
    latest = {(row["region"], row["k"]): row for row in out.rows}
    expected = spark.read.schema(source.stream().schema).parquet(str(tmp_path / "in")).createOrReplaceTempView("t")
    expected = spark.sql("""select region, k, count(*) n, count(v) `values`, sum(v) total, min(v) low, max(w) high,
        avg(w) mean, min(name) first_name, max_by(name, at) filter (where name is not null) latest
        from t group by region, k""").collect()
    assert len(expected) == len(latest)
    for row in expected:
        got = latest[row["region"], row["k"]]
        for name in aggs:
            assert got[name] == pytest.approx(row[name]) if name == "mean" else got[name] == row[name], name


@pytest.mark.spark
@pytest.mark.xdist_group("spark")
def test_collect_gathers_values_in_order(feed: Callable[..., Any], run_query: Callable[..., Any],
                                         tmp_path: Path) -> None:
    source = feed("k bigint, v string, at bigint")
    source.add(k=[1, 2, 1], v=["a", "b", "c"], at=[3, 2, 1])
    source.add(k=[1], v=["d"], at=[4])
    out = run_query(aggregate(source.stream(), key="k", aggs={"all": ("collect", "v")}, uid="c", parallelism=1,
                              checkpoint=str(tmp_path / "state"), order_by="at"))
    assert out.batches[1] == [{"k": 1, "all": ["c", "a", "d"]}]

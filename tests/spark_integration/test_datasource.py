"""Savepoints as Spark data: read, narrowed by key and key group, repaired and written again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import savepoint as toolkit
from spark_integration import by_key_group, register
from spark_integration.datasource import FilteredStateReader, StateReader
from statebackend import MapStateDescriptor, ValueStateDescriptor, key_group_of
from statebackend.errors import InvalidRequest

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]
USERS = [f"user-{n}" for n in range(500)]


@pytest.fixture
def stored(tmp_path: Path) -> str:
    path = str(tmp_path / "sp")
    with toolkit.SavepointWriter(path, job_name="clicks", parallelism=3) as writer:
        writer.keyed("count", ValueStateDescriptor("total", int),
                     pa.table({"key": USERS, "value": list(range(500))}), key_type=str)
        writer.keyed("count", MapStateDescriptor("pages", str, float),
                     pa.table({"key": USERS[:9], "map_key": ["home"] * 9, "map_value": [0.5] * 9}), key_type=str)
    return path


def test_a_state_is_a_table(spark: Any, stored: str, tmp_path: Path) -> None:
    register(spark)
    frame = spark.read.format("holdfast").option("operator", "count").option("state", "total").load(stored)
    assert frame.columns == ["key_group", "key", "value"]
    rows = {row["key"]: (row["key_group"], row["value"]) for row in frame.collect()}
    assert rows == {user: (key_group_of(user, 128), n) for n, user in enumerate(USERS)}
    assert [row["value"] for row in frame.where("key = 'user-77'").collect()] == [77]
    narrow = spark.read.format("holdfast").option("operator", "count").option("state", "total").option(
        "pushdown", "true").load(stored)
    assert [row["value"] for row in narrow.where("key = 'user-77'").collect()] == [77]
    assert frame.where("key_group = 5").count() == sum(key_group_of(user, 128) == 5 for user in USERS)
    pages = spark.read.format("holdfast").option("operator", "count").option("state", "pages").load(stored)
    assert {(row["map_key"], row["map_value"]) for row in pages.collect()} == {("home", 0.5)}
    states = spark.read.format("holdfast").option("table", "states").load(stored)
    assert sorted((row["state"], row["rows"]) for row in states.collect()) == [("pages", 9), ("total", 500)]

    repaired = frame.selectExpr("key", "case when key = 'user-3' then 1000 else value end as value")
    target = str(tmp_path / "repaired")
    by_key_group(repaired, "key", parallelism=2).write.format("holdfast").option("operator", "count").option(
        "state", "total").option("like", stored).mode("append").save(target)
    with toolkit.open(target) as opened:
        assert opened.lookup("count", "total", "user-3") == 1000
        assert opened.lookup("count", "total", "user-4") == 4
        assert len(opened.handles("count")) == 2

    with pytest.raises(Exception, match="two tasks wrote the same key group"):
        repaired.repartition(3).write.format("holdfast").option("operator", "count").option(
            "state", "total").mode("append").save(str(tmp_path / "torn"))
    assert not (tmp_path / "torn" / "_metadata").exists()


def test_a_savepoint_of_few_keys_owns_every_key_group(spark: Any, tmp_path: Path) -> None:
    register(spark)
    few, target = spark.createDataFrame([("a", 1), ("b", 2)], "key string, value bigint"), str(tmp_path / "few")
    by_key_group(few, "key", parallelism=2).write.format("holdfast").option("operator", "count").option(
        "state", "count").mode("append").save(target)
    assert not toolkit.verify_savepoint(target).problems
    with toolkit.open(target) as opened:
        groups = opened.key_groups("count").to_pylist()
        assert {row["key_group"]: row["rows"] for row in groups if row["rows"]} == {
            key_group_of(key, 128): 1 for key in ("a", "b")}
        assert (len(groups), opened.lookup("count", "count", "b")) == (128, 2)


def test_small_ranges_share_a_task(stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from spark_integration import datasource

    def spans() -> list[tuple[int, int]]:
        reader = datasource.StateReader({"path": stored, "operator": "count", "state": "total"})
        return [(part.first, part.last) for part in reader.partitions()]  # type: ignore[attr-defined]

    with toolkit.open(stored) as opened:
        handles = opened.handles("count")
    assert spans() == [(0, 127)]
    monkeypatch.setattr(datasource, "TASK_BYTES", handles[0].size + handles[1].size)
    assert spans() == [(0, handles[1].key_groups.last), (handles[2].key_groups.first, 127)]
    monkeypatch.setattr(datasource, "TASK_BYTES", 1)
    assert spans() == [(handle.key_groups.first, handle.key_groups.last) for handle in handles]


def test_filters_narrow_the_partitions(stored: str) -> None:
    from pyspark.sql.datasource import EqualTo, GreaterThanOrEqual, LessThan

    options = {"path": stored, "operator": "count", "state": "total", "partitions": "8", "pushdown": "true"}
    reader = FilteredStateReader(options)
    assert len(reader.partitions()) == 8
    reader.pushFilters([GreaterThanOrEqual(("key_group",), 16), LessThan(("key_group",), 20)])
    assert [(part.first, part.last) for part in reader.partitions()] == [(16, 19)]
    reader = FilteredStateReader(options)
    reader.pushFilters([EqualTo(("key",), "user-1")])
    group = key_group_of("user-1", 128)
    assert [(part.first, part.last, part.keys) for part in reader.partitions()] == [(group, group, ("user-1",))]


def test_what_is_missing_is_named(stored: str) -> None:
    with pytest.raises(InvalidRequest, match="operator"):
        StateReader({"path": stored})
    with pytest.raises(InvalidRequest, match="no table"):
        StateReader({"path": stored, "table": "everything"})

"""The open format: written from any backend, restored into any, read by any Parquet reader, refused when not whole."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

import savepoint
from savepoint.format import MAX_ROWS, MIN_ROWS, escape_name
from statebackend import (
    CorruptData,
    HoldfastError,
    IncompatibleState,
    KeyGroupRange,
    ListStateDescriptor,
    MapStateDescriptor,
    NotFound,
    TimeDomain,
    TtlConfig,
    ValueStateDescriptor,
    create_backend,
    key_groups_of,
)

BACKENDS = ["memory", "filesystem", "rocksdb"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_snapshot_of_any_backend_becomes_an_open_savepoint_with_the_same_rows(small_job, tmp_path, backend) -> None:
    job = small_job(backend=backend)
    native = job.native()
    savepoint.convert_savepoint(native, tmp_path / "sp")
    with savepoint.open(native) as before, savepoint.open(tmp_path / "sp") as after:
        assert {info.name for info in before.states()} == {
            "_timers_event", "total", "events", "seen", "session", "offsets", "all", "rules"}
        for info in before.states():
            if info.name != "rules":
                assert after.read("count", info.name).read_all() == before.read("count", info.name).read_all()
        totals = after.to_pandas("count", "total")
        assert dict(zip(totals["key"], totals["value"])) == job.totals


@pytest.mark.parametrize("target", BACKENDS)
def test_an_open_savepoint_restores_into_any_backend_at_another_parallelism(open_savepoint_path, tmp_path, target) -> None:
    found: dict[str, Any] = {}
    timers = 0
    with savepoint.open(open_savepoint_path) as opened:
        for index, span in enumerate([KeyGroupRange(0, 40), KeyGroupRange(41, 99), KeyGroupRange(100, 127)]):
            options = {"directory": tmp_path / f"db-{index}"} if target == "rocksdb" else {}
            with create_backend(target, **options) as backend:
                keyed = backend.keyed(uid="count", key_type=str, key_groups=span, source=opened.source,
                                      restore=[h for h in opened.handles("count") if h.key_groups.intersect(span)])
                total = keyed.state(ValueStateDescriptor("total", int))
                events = keyed.state(ListStateDescriptor("events", str))
                seen = keyed.state(MapStateDescriptor("seen", str, float))
                session = keyed.state(ValueStateDescriptor("session", str, ttl=TtlConfig("7d")), namespace_type=int)
                for number in range(200):
                    user = f"user-{number}"
                    if int(key_groups_of(pa.array([user]), 128)[0]) not in span:
                        continue
                    keyed.set_current_key(user)
                    session.set_current_namespace(number % 5)
                    found[user] = (total.value(), events.get(), dict(seen.entries()), session.value())
                    events.add("later")
                    assert events.get()[-1] == "later"
                timers += keyed.timers.count(TimeDomain.EVENT)
    assert found == {f"user-{n}": (n, [f"e{i}" for i in range(n % 4)], {f"page-{i}": i / 2 for i in range(n % 3)}, f"s{n}")
                     for n in range(200)}
    assert timers == 200


@pytest.mark.parametrize("backend", ["filesystem", "rocksdb"])
def test_an_incremental_checkpoint_converts_to_its_final_state(small_job, tmp_path, backend) -> None:
    job = small_job("root/" + "a" * 32, backend=backend)
    savepoint.convert_savepoint(job.native(rounds=3, checkpoint=True), tmp_path / "sp")
    with savepoint.open(tmp_path / "sp") as opened:
        totals = opened.to_pandas("count", "total")
        assert dict(zip(totals["key"], totals["value"])) == job.totals
        assert opened.lookup("count", "events", "user-7") == ["e0", "e1", "e2"]


def test_duckdb_pandas_and_polars_read_it_without_our_code(open_savepoint_path) -> None:
    import duckdb
    import pandas
    import polars

    folder = open_savepoint_path / "count/keyed/total"
    with duckdb.connect() as connection:
        result = connection.sql(f"select sum(value), count(*) from read_parquet('{folder}/*.parquet')").fetchall()
    assert result == [(sum(range(200)), 200)]
    assert pandas.read_parquet(folder)["value"].sum() == sum(range(200))
    frame = polars.read_parquet(f"{folder}/*.parquet")
    assert frame.filter(polars.col("key") == "user-42")["value"].to_list() == [42]
    seen = polars.read_parquet(f"{open_savepoint_path}/count/keyed/seen/*.parquet")
    assert seen.columns == ["key_group", "key", "map_key", "map_value"]


@pytest.mark.spark
@pytest.mark.xdist_group("spark")
def test_spark_reads_it_without_our_code(open_savepoint_path) -> None:
    from pyspark.sql import SparkSession

    session = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
    try:
        frame = session.read.parquet(str(open_savepoint_path / "count/keyed/total"))
        assert frame.selectExpr("sum(value)").collect()[0][0] == sum(range(200))
        wrong = frame.where("pmod(xxhash64(key), 128) <> key_group").count()
        assert wrong == 0
    finally:
        session.stop()


def test_rows_are_sorted_and_row_groups_end_at_key_group_borders(tmp_path) -> None:
    keys = pa.array([f"k{number}" for number in range(300_000)])
    with savepoint.SavepointWriter(tmp_path / "sp", max_parallelism=16) as writer:
        writer.keyed("big", ValueStateDescriptor("v", int), pa.table({"key": keys, "value": range(300_000)}), key_type=str)
    parquet = pq.ParquetFile(tmp_path / "sp/big/keyed/v/part-0-15.parquet")
    sizes, last = [], -1
    for index in range(parquet.metadata.num_row_groups):
        groups = parquet.read_row_group(index, ["key_group"]).column(0).to_numpy()
        assert groups[0] > last
        last = groups[-1]
        sizes.append(len(groups))
    assert all(MIN_ROWS <= size <= MAX_ROWS for size in sizes[:-1])
    table = parquet.read()
    assert table.equals(table.sort_by([("key_group", "ascending"), ("key", "ascending")]))
    assert parquet.metadata.row_group(0).column(1).compression == "ZSTD"


def test_a_large_key_group_is_split_and_small_ones_share(tmp_path) -> None:
    with savepoint.SavepointWriter(tmp_path / "one", max_parallelism=1) as writer:
        table = pa.table({"key": range(200_000), "value": range(200_000)})
        writer.keyed("u", ValueStateDescriptor("v", int), table, key_type=int)
    parquet = pq.ParquetFile(tmp_path / "one/u/keyed/v/part-0-0.parquet")
    assert [parquet.metadata.row_group(i).num_rows for i in range(parquet.metadata.num_row_groups)] == [131_072, 68_928]
    with savepoint.open(tmp_path / "one") as opened:
        assert opened.lookup("u", "v", 199_999) == 199_999
    with savepoint.SavepointWriter(tmp_path / "many", max_parallelism=4096) as writer:
        writer.keyed("u", ValueStateDescriptor("v", int), table.slice(0, 5_000), key_type=int)
    assert pq.ParquetFile(tmp_path / "many/u/keyed/v/part-0-4095.parquet").metadata.num_row_groups == 1


def test_a_copied_and_moved_folder_still_restores(open_savepoint_path, tmp_path) -> None:
    shutil.copytree(open_savepoint_path, tmp_path / "elsewhere/sp")
    shutil.rmtree(open_savepoint_path)
    with savepoint.open(tmp_path / "elsewhere/sp") as opened:
        assert opened.lookup("count", "total", "user-5") == 5
    assert savepoint.verify_savepoint(tmp_path / "elsewhere/sp")


def test_names_that_are_no_file_names_are_escaped_and_different_names_stay_different(tmp_path) -> None:
    names = ["a/b", "a%2Fb", "..", ".hidden", "_under", "", "ünï", "x" * 400, "x" * 401, "a=b", "plain-1.2", "a b", "A", "~"]
    escaped = [escape_name(name) for name in names]
    assert len(set(escaped)) == len(names)
    assert all("/" not in name and name[0] not in "._" and len(name) <= 150 and "=" not in name for name in escaped)
    assert escape_name("plain-1.2") == "plain-1.2"
    with savepoint.SavepointWriter(tmp_path / "sp") as writer:
        writer.keyed("../up", ValueStateDescriptor("s/t", int), pa.table({"key": ["a"], "value": [1]}), key_type=str)
    with savepoint.open(tmp_path / "sp") as opened:
        assert [(info.uid, info.name) for info in opened.states()] == [("../up", "s/t")]
        assert opened.lookup("../up", "s/t", "a") == 1
    assert not (tmp_path / "up").exists()


def rewrite_metadata(path: Path, change: Any) -> None:
    """Change `_metadata` the way a forger would: with a right checksum."""
    data = json.loads((path / "_metadata").read_bytes())
    data.pop("checksum")
    change(data)
    body = json.dumps(data, separators=(",", ":")).encode()[:-1]
    digest = xxhash.xxh3_128_hexdigest(body)
    (path / "_metadata").write_bytes(body + b',"checksum":"' + digest.encode() + b'"}')


@pytest.mark.parametrize("outside", ["../../etc/passwd", "/etc/passwd", "s3://other/file", "a/../../b"])
def test_paths_in_metadata_that_point_outside_are_refused(open_savepoint_path, outside) -> None:
    def change(data: Any) -> None:
        data["operators"][0]["subtasks"][0]["keyed"][0]["files"][0]["path"] = outside

    rewrite_metadata(open_savepoint_path, change)
    with pytest.raises(CorruptData, match="points outside"):
        savepoint.open(open_savepoint_path)


def test_a_savepoint_of_a_newer_version_is_refused_with_a_hint(open_savepoint_path) -> None:
    rewrite_metadata(open_savepoint_path, lambda data: data.update(version=99))
    with pytest.raises(IncompatibleState, match="newer release"):
        savepoint.open(open_savepoint_path)


def test_handles_of_a_newer_version_are_refused(open_savepoint_path) -> None:
    rewrite_metadata(open_savepoint_path,
                     lambda data: data["operators"][0]["subtasks"][0]["keyed"][0]["meta"].update(version=2))
    with savepoint.open(open_savepoint_path) as opened, pytest.raises(IncompatibleState, match="version"):
        opened.read("count", "total").read_all()


@pytest.mark.parametrize("damage", ["missing", "short", "no metadata", "cut metadata"])
def test_a_half_copied_savepoint_is_named_as_such(open_savepoint_path, damage) -> None:
    part = next((open_savepoint_path / "count/keyed/total").glob("*.parquet"))
    if damage == "missing":
        part.unlink()
    elif damage == "short":
        part.write_bytes(part.read_bytes()[:-100])
    elif damage == "no metadata":
        (open_savepoint_path / "_metadata").unlink()
    else:
        (open_savepoint_path / "_metadata").write_bytes((open_savepoint_path / "_metadata").read_bytes()[:-50])
    with pytest.raises((NotFound, CorruptData)) as caught, savepoint.open(open_savepoint_path) as opened:
        opened.read("count", "total").read_all()
    assert caught.value.hint


def test_a_path_that_is_no_savepoint_is_told_so(tmp_path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(HoldfastError, match="savepoint"):
        savepoint.open(tmp_path)
    with pytest.raises(NotFound, match="there is no checkpoint or savepoint"):
        savepoint.open(tmp_path / "nothing")


def test_native_savepoints_stand_alone_and_restore(small_job, tmp_path) -> None:
    job = small_job("root/" + "b" * 32, backend="rocksdb")
    savepoint.convert_savepoint(job.native(rounds=2, checkpoint=True), tmp_path / "native", format="native")
    shutil.rmtree(job.folder)
    with savepoint.open(tmp_path / "native") as opened:
        assert opened.metadata.format == "native"
        assert opened.lookup("count", "total", "user-9") == 9
        assert opened.read("count", "offsets").read_all().column("value").to_pylist() == [0, 1, 10, 11]
    savepoint.convert_savepoint(tmp_path / "native", tmp_path / "open")
    savepoint.convert_savepoint(tmp_path / "open", tmp_path / "again", format="native")
    assert not savepoint.compare(tmp_path / "native", tmp_path / "again")
    assert savepoint.verify_savepoint(tmp_path / "again")

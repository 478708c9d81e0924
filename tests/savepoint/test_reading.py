"""Reading: what metadata tells, rows by key, key group, predicate and column, look-up, SQL, names that are wrong."""

from __future__ import annotations

from dataclasses import replace

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import savepoint
from savepoint.reader import layout_of, open_parquet, parts_of, read_parts
from statebackend import CorruptData, HoldfastError, InvalidRequest, KeyGroupRange, NotFound, key_group_of


@pytest.fixture(params=["open", "native"])
def opened(request, small_job, open_savepoint_path, tmp_path):
    path = open_savepoint_path if request.param == "open" else tmp_path / "native"
    with savepoint.open(path) as found:
        yield found


def test_operators_states_types_and_sizes_come_from_metadata(open_savepoint_path, monkeypatch) -> None:
    monkeypatch.setattr(pq, "ParquetFile", None)
    with savepoint.open(open_savepoint_path) as found:
        [operator] = found.operators()
        assert (operator.uid, operator.parallelism, operator.max_parallelism, operator.key_type) == ("count", 2, 128, "str")
        states = {info.name: info for info in operator.states}
        assert (states["total"].kind, states["total"].value_type, states["total"].rows) == ("value", "int", 200)
        assert (states["seen"].map_key_type, states["session"].namespace_type) == ("str", "int")
        assert states["session"].ttl_ms == 7 * 86_400_000
        groups = found.key_groups("count", "total")
        assert sum(groups.column("rows").to_pylist()) == 200
        assert set(groups.column("subtask").to_pylist()) == {0, 1}


def test_native_snapshots_tell_no_counts(tmp_path, small_job) -> None:
    with savepoint.open(small_job("n2").native()) as found:
        assert {info.rows for info in found.states() if info.key_type} == {None}
        assert found.key_groups("count").column("rows").null_count == 128


def test_the_largest_keys_are_recorded(open_savepoint_path) -> None:
    with savepoint.open(open_savepoint_path) as found:
        largest = found.largest_keys("count", "events")
    assert all(item["rows"] == 3 for item in largest)
    assert len(largest) == 10


def test_rows_of_keys_and_key_groups(opened) -> None:
    rows = opened.read("count", "total", keys=["user-7", "user-8", "nobody"]).read_all().to_pylist()
    assert {row["key"]: row["value"] for row in rows} == {"user-7": 7, "user-8": 8}
    group = key_group_of("user-7", 128)
    part = opened.read("count", "total", key_groups=group).read_all()
    assert set(part.column("key_group").to_pylist()) == {group}
    spans = opened.read("count", "total", key_groups=KeyGroupRange(10, 20)).read_all()
    every = opened.read("count", "total").read_all()
    assert spans == every.filter((pc.field("key_group") >= 10) & (pc.field("key_group") <= 20))
    assert opened.read("count", "total", key_groups=[3, 5], columns=["value"]).read_all().column_names == ["value"]


def test_predicates_as_expression_and_as_sql(opened) -> None:
    by_expression = opened.read("count", "total", where=pc.field("value") > 190).read_all()
    by_sql = opened.read("count", "total", where="value > 190", columns=["key", "value"]).read_all()
    assert sorted(by_expression.column("value").to_pylist()) == list(range(191, 200))
    assert sorted(by_sql.column("value").to_pylist()) == list(range(191, 200))
    assert opened.read("count", "total", where="value > 190", keys=["user-195"]).read_all().num_rows == 1


def test_a_point_look_up_reads_one_row_group(tmp_path, monkeypatch) -> None:
    import pyarrow as pa

    from statebackend import ValueStateDescriptor

    with savepoint.SavepointWriter(tmp_path / "sp", max_parallelism=8) as writer:
        table = pa.table({"key": [f"k{n}" for n in range(200_000)], "value": range(200_000)})
        writer.keyed("u", ValueStateDescriptor("v", int), table, key_type=str)
    read: list[list[int]] = []

    class Counting:
        def __init__(self, stream: object) -> None:
            self._file = open_parquet(stream)
            self.metadata, self.schema_arrow = self._file.metadata, self._file.schema_arrow
            self.num_row_groups = self._file.num_row_groups

        def read_row_groups(self, groups, **options):
            read.append(groups)
            return self._file.read_row_groups(groups, **options)

    monkeypatch.setattr("savepoint.reader.open_parquet", Counting)
    with savepoint.open(tmp_path / "sp") as found:
        assert found.lookup("u", "v", "k77") == 77
    assert [len(groups) for groups in read] == [1]


@pytest.mark.parametrize("key_type", ["int", "str"])
def test_a_split_key_group_is_searched_by_the_bounds_of_its_row_groups(tmp_path, monkeypatch, key_type) -> None:
    import pyarrow as pa

    from savepoint import reader
    from statebackend import ValueStateDescriptor

    monkeypatch.setattr("savepoint.parts.MAX_ROWS", 20_000)
    keys = range(-50_000, 50_000) if key_type == "int" else [f"k{n:06d}" for n in range(100_000)]
    with savepoint.SavepointWriter(tmp_path / "sp", max_parallelism=1) as writer:
        writer.keyed("u", ValueStateDescriptor("v", int), pa.table({"key": keys, "value": range(100_000)}),
                     key_type={"int": int, "str": str}[key_type])
    chosen: list[bool] = []
    original = reader.may_hold
    monkeypatch.setattr("savepoint.reader.may_hold", lambda *a: chosen.append(original(*a)) or chosen[-1])
    with savepoint.open(tmp_path / "sp") as found:
        for place in (0, 19_999, 20_000, 99_999):
            assert found.lookup("u", "v", keys[place]) == place
    assert len(chosen) == 20
    assert sum(chosen) == 4


def test_look_up_gives_values_lists_maps_and_namespaces(opened) -> None:
    assert opened.lookup("count", "total", "user-11") == 11
    assert opened.lookup("count", "events", "user-11") == ["e0", "e1", "e2"]
    assert opened.lookup("count", "seen", "user-11") == {"page-0": 0.0, "page-1": 0.5}
    assert opened.lookup("count", "session", "user-11", namespace=1) == "s11"
    assert opened.lookup("count", "_timers_event", "user-11") == [1011]


def test_operator_state_is_read_by_subtask(opened) -> None:
    offsets = opened.read("count", "offsets").read_all()
    assert offsets.to_pylist() == [{"subtask": s, "index": i, "value": s * 10 + i} for s in (0, 1) for i in (0, 1)]
    rules = opened.to_pandas("count", "rules")
    assert dict(zip(rules["map_key"], rules["map_value"])) == {"a": 1, "b": 2}


def test_wrong_names_are_answered_with_the_nearest(opened) -> None:
    with pytest.raises(NotFound, match="did you mean 'count'"):
        opened.read("cuont", "total")
    with pytest.raises(NotFound, match="did you mean 'total'"):
        opened.read("count", "totl")
    with pytest.raises(NotFound, match=r"near it are .*user-1"):
        opened.lookup("count", "total", "usr-1")
    with pytest.raises(InvalidRequest, match="no column 'valu'"):
        opened.read("count", "total", columns=["valu"])
    with pytest.raises(InvalidRequest, match="no such key group"):
        opened.read("count", "total", key_groups=128)
    with pytest.raises(InvalidRequest, match="another type"):
        opened.lookup("count", "total", 7)


def test_sql_over_states_as_tables(opened) -> None:
    result = opened.query("select sum(value) s, count(*) n from count.total where value < 10").read_all().to_pylist()
    assert result == [{"s": 45, "n": 10}]
    joined = opened.query('select t.key, s.value from count.total t join "count".session s using (key) where t.value = 3')
    assert joined.read_all().to_pylist() == [{"key": "user-3", "value": "s3"}]
    assert opened.query("with x as (select 1 a) select a from x").read_all().to_pylist() == [{"a": 1}]
    assert opened.query("select count(*) n from count.offsets").read_all().to_pylist() == [{"n": 4}]


@pytest.mark.parametrize("sql", [
    "select * from read_parquet('/etc/hostname')", "select * from '/etc/hostname'", "copy (select 1) to 'out.csv'",
    "create table x (a int)", "attach 'x.db'", "set threads = 1", "select * from opened", "install httpfs",
    "select 1; drop table x", "select read_text('/etc/hostname')", "pragma database_list"])
def test_a_query_reaches_nothing_but_the_savepoint(open_savepoint_path, sql) -> None:
    with savepoint.open(open_savepoint_path) as opened, pytest.raises((InvalidRequest, NotFound)):
        opened.query(sql).read_all()


def test_a_query_with_an_error_says_which(open_savepoint_path) -> None:
    with savepoint.open(open_savepoint_path) as opened:
        with pytest.raises(InvalidRequest, match="nope"):
            opened.query("select nope from count.total")
        with pytest.raises(InvalidRequest, match="selec"):
            opened.query("selec 1")
        with pytest.raises(NotFound, match=r"did you mean count\.total"):
            opened.query("select * from count.totals")


def test_a_bit_that_flips_is_never_read_as_a_value(open_savepoint_path) -> None:
    [path, *_] = sorted((open_savepoint_path / "count/keyed/total").iterdir())
    intact = path.read_bytes()
    with savepoint.open(open_savepoint_path) as opened:
        wanted = opened.read("count", "total").read_all()
    found = 0
    for place in range(4, len(intact), 7):
        path.write_bytes(intact[:place] + bytes([intact[place] ^ (1 << place % 8)]) + intact[place + 1:])
        try:
            with savepoint.open(open_savepoint_path) as opened:
                assert opened.read("count", "total").read_all().equals(wanted)
        except CorruptData:
            found += 1
    assert found > len(intact) // 7 // 2


def test_a_damaged_page_stops_a_query_a_comparison_and_a_transform(open_savepoint_path, tmp_path) -> None:
    [path, *_] = sorted((open_savepoint_path / "count/keyed/total").iterdir())
    damaged = bytearray(path.read_bytes())
    column = pq.ParquetFile(path).metadata.row_group(0).column(2)
    damaged[column.data_page_offset + column.total_compressed_size - 9] ^= 1
    path.write_bytes(damaged)
    with savepoint.open(open_savepoint_path) as opened, pytest.raises(HoldfastError, match=r"CRC|checksum"):
        opened.query("select sum(value) from count.total").read_all()
    with pytest.raises(CorruptData):
        savepoint.compare(open_savepoint_path, open_savepoint_path)
    with pytest.raises(CorruptData):
        savepoint.Transform(open_savepoint_path).rename_operator("count", "new").write(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_look_up_too_refuses_a_file_of_other_row_groups_than_recorded(open_savepoint_path) -> None:
    with savepoint.open(open_savepoint_path) as opened:
        [handle, *_] = opened.handles("count")
        [part, *_] = parts_of(handle, "total")
        group = part.key_groups.first
        more = replace(part, row_groups=((group, group, 1),) * (len(part.row_groups) + 2))
        rows = read_parts([more], layout_of(handle, opened.schema("count", "total")), opened.open_file,
                          KeyGroupRange(group, group), keys=[b"user"])
        with pytest.raises(CorruptData, match="row groups than recorded"):
            list(rows)


def test_largest_keys_of_timers_are_not_told(open_savepoint_path) -> None:
    with savepoint.open(open_savepoint_path) as opened:
        assert opened.largest_keys("count", "_timers_event") == []
        assert opened.largest_keys("count", "events")


@pytest.mark.parametrize("options", [{}, {"keys": ["user-1"]}])
def test_a_column_that_is_not_there_is_refused(open_savepoint_path, options) -> None:
    with savepoint.open(open_savepoint_path) as opened, pytest.raises(InvalidRequest, match=r"no column .nope.*key, value"):
        opened.read("count", "total", columns=["key", "nope"], **options)

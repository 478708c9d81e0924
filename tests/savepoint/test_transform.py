"""Transforms: rename, drop, map, retype, strip, regroup, bootstrap; always into a new savepoint, the old one untouched."""

from __future__ import annotations

import pandas
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import savepoint
from savepoint import SavepointWriter, Transform
from savepoint.tables import bootstrap_table
from statebackend import (
    Conflict,
    HoldfastError,
    IncompatibleState,
    InvalidRequest,
    ListStateDescriptor,
    ManualClock,
    MapStateDescriptor,
    NotFound,
    ValueStateDescriptor,
    key_group_of,
    redistribute,
)
from statebackend.operator_state import OperatorStateSnapshot

STATES = ["total", "events", "seen", "session", "_timers_event"]


def fingerprint(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("parallelism", [None, 1, 5])
@pytest.mark.parametrize("max_parallelism", [None, 1, 100, 1024])
def test_rescaling_keeps_every_entry_and_groups_keys_rightly(
        open_savepoint_path, tmp_path, rows_of, parallelism, max_parallelism) -> None:
    if (parallelism is None and max_parallelism is None) or (parallelism or 2) > (max_parallelism or 128):
        pytest.skip("nothing to rescale")
    before = fingerprint(open_savepoint_path)
    savepoint.rescale_savepoint(open_savepoint_path, tmp_path / "new", parallelism=parallelism,
                                max_parallelism=max_parallelism)
    assert fingerprint(open_savepoint_path) == before
    for state in STATES:
        assert rows_of(tmp_path / "new", "count", state) == rows_of(open_savepoint_path, "count", state)
    with savepoint.open(tmp_path / "new") as opened:
        assert opened.max_parallelism("count") == (max_parallelism or 128)
        assert len(opened.handles("count")) == (parallelism or 2)
        for row in opened.read("count", "total").read_all().to_pylist():
            assert row["key_group"] == key_group_of(row["key"], max_parallelism or 128)
    assert savepoint.verify_savepoint(tmp_path / "new")


@pytest.mark.parametrize("parallelism", [1, 3, 7])
def test_operator_state_survives_a_rescale_unchanged(open_savepoint_path, tmp_path, parallelism) -> None:
    """A restore at any parallelism deals out the same elements before and after."""
    savepoint.rescale_savepoint(open_savepoint_path, tmp_path / "new", parallelism=parallelism)
    dealt = []
    for path in (open_savepoint_path, tmp_path / "new"):
        with savepoint.open(path) as opened:
            held = dict(opened.operator_parts("count"))
            width = opened.entry("count").parallelism
            old = [OperatorStateSnapshot(tuple(held.get(index, ()))) for index in range(width)]
        dealt.append([{part.name: (part.elements, part.pairs) for part in snapshot.parts}
                      for snapshot in redistribute(old, 4)])
    assert dealt[0] == dealt[1]


def test_operators_and_states_are_renamed_and_dropped(open_savepoint_path, tmp_path, rows_of) -> None:
    Transform(open_savepoint_path).rename_operator("count", "counts").rename_state("count", "total", "sum") \
        .drop_state("count", "seen").drop_state("count", "rules").rename_state("count", "offsets", "places") \
        .write(tmp_path / "new")
    with savepoint.open(tmp_path / "new") as opened:
        assert {info.name for info in opened.states("counts")} == {
            "sum", "events", "session", "_timers_event", "places", "all"}
    assert rows_of(tmp_path / "new", "counts", "sum") == rows_of(open_savepoint_path, "count", "total")
    Transform(open_savepoint_path).drop_operator("count").write(tmp_path / "empty")
    with savepoint.open(tmp_path / "empty") as opened:
        assert opened.operators() == []


def test_a_function_maps_over_entries_and_may_drop_them(open_savepoint_path, tmp_path, rows_of) -> None:
    def halve(entry):
        return None if entry["value"] % 2 else {**entry, "key": entry["key"].upper(), "value": entry["value"] / 2}

    Transform(open_savepoint_path).map_entries("count", "total", halve, value_type=float).write(tmp_path / "new")
    assert rows_of(tmp_path / "new", "count", "total") == sorted(
        ({"key": f"USER-{n}", "value": n / 2} for n in range(0, 200, 2)), key=repr)
    assert savepoint.verify_savepoint(tmp_path / "new")


def test_a_function_maps_over_batches(open_savepoint_path, tmp_path, rows_of) -> None:
    import pyarrow.compute as pc

    def plus_one(batch: pa.RecordBatch) -> pa.Table:
        return pa.table({"key": batch.column("key"), "value": pc.add(batch.column("value"), 1)})

    Transform(open_savepoint_path).map_batches("count", "total", plus_one).write(tmp_path / "new")
    assert sum(row["value"] for row in rows_of(tmp_path / "new", "count", "total")) == sum(range(200)) + 200


def test_a_schema_changes_where_nothing_is_lost(open_savepoint_path, tmp_path, rows_of) -> None:
    Transform(open_savepoint_path).change_type("count", "total", float).change_type("count", "events", bytes) \
        .write(tmp_path / "new")
    with savepoint.open(tmp_path / "new") as opened:
        assert opened.schema("count", "total").value_type.arrow_type == pa.float64()
        assert opened.lookup("count", "total", "user-3") == 3.0
        assert opened.lookup("count", "events", "user-1") == [b"e0"]
    with pytest.raises(IncompatibleState, match="can't change"):
        Transform(open_savepoint_path).change_type("count", "events", int).write(tmp_path / "bad")
    assert not (tmp_path / "bad").exists()


def test_expired_entries_are_stripped_by_the_clock(open_savepoint_path, tmp_path, rows_of) -> None:
    Transform(open_savepoint_path).strip_expired(ManualClock(0)).write(tmp_path / "young")
    assert len(rows_of(tmp_path / "young", "count", "session")) == 200
    Transform(open_savepoint_path).strip_expired(ManualClock(2**50)).write(tmp_path / "old")
    assert rows_of(tmp_path / "old", "count", "session") == []
    assert len(rows_of(tmp_path / "old", "count", "total")) == 200


@pytest.mark.parametrize("change", [
    lambda t: t.rename_operator("cuont", "x"), lambda t: t.drop_state("count", "totl"),
    lambda t: t.rename_state("count", "total", "events")])
def test_names_that_do_not_fit_are_refused_before_anything_is_written(open_savepoint_path, tmp_path, change) -> None:
    with pytest.raises((NotFound, InvalidRequest)):
        change(Transform(open_savepoint_path)).write(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_failing_function_leaves_nothing_behind(open_savepoint_path, tmp_path) -> None:
    def boom(entry):
        raise ZeroDivisionError

    with pytest.raises(InvalidRequest, match="ZeroDivisionError") as raised:
        Transform(open_savepoint_path).map_entries("count", "total", boom).write(tmp_path / "new")
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert not (tmp_path / "new").exists()


def test_progress_may_end_the_work_and_nothing_is_left(open_savepoint_path, tmp_path) -> None:
    class Enough(Exception):
        pass

    def stop(done: int, total: int) -> None:
        raise Enough

    with pytest.raises(Enough):
        savepoint.rescale_savepoint(open_savepoint_path, tmp_path / "new", parallelism=3, progress=stop)
    assert not (tmp_path / "new").exists()


def test_an_existing_destination_is_refused_and_left_alone(open_savepoint_path, tmp_path) -> None:
    (tmp_path / "busy").mkdir()
    (tmp_path / "busy/mine.txt").write_text("x")
    for destination in (tmp_path / "busy", open_savepoint_path):
        before = fingerprint(destination)
        with pytest.raises(Conflict):
            savepoint.convert_savepoint(open_savepoint_path, destination)
        assert fingerprint(destination) == before


@pytest.mark.parametrize("kind", ["arrow", "pandas", "polars", "parquet", "csv", "reader"])
def test_state_is_bootstrapped_from_any_kind_of_table(tmp_path, kind) -> None:
    table = pa.table({"user": [f"u{n}" for n in range(1000)], "clicks": range(1000)})
    pq.write_table(table, tmp_path / "t.parquet")
    table.to_pandas().to_csv(tmp_path / "t.csv", index=False)
    data = {"arrow": table, "pandas": table.to_pandas(), "polars": polars.from_arrow(table),
            "parquet": tmp_path / "t.parquet", "csv": tmp_path / "t.csv", "reader": table.to_reader()}[kind]
    with SavepointWriter(tmp_path / "sp", job_name="clicks", parallelism=3) as writer:
        writer.keyed("count", ValueStateDescriptor("total", int), data, key_type=str, key="user", value="clicks")
    with savepoint.open(tmp_path / "sp") as opened:
        assert opened.metadata.job_name == "clicks"
        assert opened.lookup("count", "total", "u77") == 77
        frame = opened.to_pandas("count", "total")
        assert isinstance(frame, pandas.DataFrame)
        assert frame["value"].sum() == sum(range(1000))
    assert savepoint.verify_savepoint(tmp_path / "sp")


def test_lists_maps_operator_and_broadcast_state_are_bootstrapped(tmp_path) -> None:
    rows = pa.table({"key": [1, 2, 1, 1], "value": ["a", "b", "c", "a"]})
    pairs = pa.table({"key": [1, 1, 1], "map_key": ["x", "y", "x"], "map_value": [1.0, 2.0, 3.0]})
    with SavepointWriter(tmp_path / "sp") as writer:
        writer.keyed("op", ListStateDescriptor("l", str), rows, key_type=int)
        writer.keyed("op", MapStateDescriptor("m", str, float), pairs, key_type=int)
        writer.operator_list("op", ListStateDescriptor("offsets", int), [1, 2, 3])
        writer.broadcast("op", MapStateDescriptor("rules", str, int), {"r": 1})
    with savepoint.open(tmp_path / "sp") as opened:
        assert opened.lookup("op", "l", 1) == ["a", "c", "a"]
        assert opened.lookup("op", "m", 1) == {"x": 3.0, "y": 2.0}
        assert opened.read("op", "offsets").read_all().column("value").to_pylist() == [1, 2, 3]


def test_a_table_tells_the_types_of_its_state(tmp_path) -> None:
    table = pa.table({"user": ["a", "b"], "day": [1, 2], "n": [1.5, 2.5], "s": ["x", "y"]})
    bootstrap_table(tmp_path / "sp", table, "op.stats", key=["user", "day"])
    with savepoint.open(tmp_path / "sp") as opened:
        assert opened.lookup("op", "stats", ("a", 1)) == {"n": 1.5, "s": "x"}
    with pytest.raises(InvalidRequest, match="no column 'usr'"):
        bootstrap_table(tmp_path / "bad", table, "op.stats", key="usr")
    assert not (tmp_path / "bad").exists()


def test_rows_that_do_not_fit_in_memory_are_sorted_on_disk(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("savepoint.sorting.RUN_BYTES", 100_000)
    monkeypatch.setattr("savepoint.sorting.SPAN_BYTES", 50_000)
    table = pa.table({"key": [f"k{n * 7919 % 30_000}" for n in range(60_000)], "value": range(60_000)})
    with SavepointWriter(tmp_path / "sp", max_parallelism=64) as writer:
        writer.keyed("u", ValueStateDescriptor("v", int), table.to_batches(max_chunksize=1_000), key_type=str)
    assert savepoint.verify_savepoint(tmp_path / "sp")
    with savepoint.open(tmp_path / "sp") as opened:
        found = opened.to_pandas("u", "v")
    last = {f"k{n * 7919 % 30_000}": n for n in range(60_000)}
    assert dict(zip(found["key"], found["value"])) == last


def test_a_null_value_or_key_is_refused(tmp_path) -> None:
    for table in (pa.table({"key": ["a"], "value": pa.array([None], pa.int64())}),
                  pa.table({"key": pa.array([None], pa.string()), "value": [1]})):
        with pytest.raises(HoldfastError, match="null"), SavepointWriter(tmp_path / "sp") as writer:
            writer.keyed("u", ValueStateDescriptor("v", int), table, key_type=str)
        assert not (tmp_path / "sp").exists()


def test_entries_that_a_map_brings_together_are_refused(open_savepoint_path, tmp_path) -> None:
    change = Transform(open_savepoint_path).map_entries("count", "total", lambda entry: {**entry, "key": "same"})
    with pytest.raises(InvalidRequest, match=r"two rows name the same entry.*key='same'"):
        change.write(tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("function", "message"), [
    (lambda entry: 1 / 0, "raised ZeroDivisionError.*state='total', key='user-"),
    (lambda entry: 7, "must return a dict.*found='int'"),
    (lambda entry: {**entry, "extra": 1}, "a column 'extra'.*columns are key, value"),
    (lambda entry: {**entry, "value": "x"}, "another type.*state='total', column='value', key='user-")])
def test_a_function_that_fails_is_named_with_the_entry(open_savepoint_path, tmp_path, function, message) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Transform(open_savepoint_path).map_entries("count", "total", function).write(tmp_path / "new")
    assert not (tmp_path / "new").exists()

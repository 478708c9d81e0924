"""Comparing and editing: totals, entries, schemas; a patch is checked, planned, and written to a new savepoint."""

from __future__ import annotations

import json

import pytest

import savepoint
from savepoint import Edit, Transform, compare
from savepoint.diff import changes
from savepoint.patch import read_patch
from statebackend import InvalidRequest, NotFound


def patch_of(*operations: tuple) -> list[dict]:
    return [{"operator": "count", "state": state, "op": op, "key": key, **rest} for op, state, key, rest in operations]


def test_a_savepoint_is_the_same_as_itself_in_any_format(open_savepoint_path, small_job, tmp_path) -> None:
    found = compare(open_savepoint_path, tmp_path / "native")
    assert not found
    assert found.totals["unchanged"] > 900


def test_totals_and_entries_of_a_difference(open_savepoint_path, tmp_path) -> None:
    edits = patch_of(("set", "total", "user-1", {"value": 100}), ("set", "total", "new", {"value": 7}),
                     ("delete", "total", "user-2", {}))
    with Edit(open_savepoint_path, edits) as edit:
        edit.write(tmp_path / "new")
    found = compare(open_savepoint_path, tmp_path / "new")
    [total] = [state for state in found.states if state.state == "total"]
    assert (total.added, total.removed, total.changed, total.unchanged) == (1, 1, 1, 198)
    assert {state.state for state in found.states if not state.is_none} == {"total"}
    rows = {row["key"]: (row["change"], row["before"], row["after"])
            for row in changes(open_savepoint_path, tmp_path / "new")}
    assert rows == {"user-1": ("changed", 1, 100), "user-2": ("removed", 2, None), "new": ("added", None, 7)}


def test_schemas_operators_and_parallelism_that_differ_are_told(open_savepoint_path, tmp_path) -> None:
    Transform(open_savepoint_path).change_type("count", "total", float).drop_state("count", "seen") \
        .set_parallelism(3).set_max_parallelism(64).write(tmp_path / "new")
    found = compare(open_savepoint_path, tmp_path / "new")
    notes = {state.state: state.note for state in found.states if state.note}
    assert "int" in notes["total"]
    assert "float" in notes["total"]
    assert notes["seen"] == "only in the first"
    assert len(found.operators) == 2
    [total] = [state for state in found.states if state.state == "total"]
    assert (total.unchanged, total.changed) == (200, 0)


def test_an_operator_on_one_side_only_counts_as_added(open_savepoint_path, tmp_path) -> None:
    Transform(open_savepoint_path).drop_operator("count").write(tmp_path / "empty")
    found = compare(tmp_path / "empty", open_savepoint_path)
    assert found.totals["removed"] == 0
    assert next(state.added for state in found.states if state.state == "total") == 200


@pytest.mark.parametrize(("operations", "expected"), [
    (patch_of(("set", "events", "user-3", {"value": ["x", "y"]})), ["x", "y"]),
    (patch_of(("set", "events", "user-3", {"list_index": 1, "value": "mid"})), ["e0", "mid", "e2"]),
    (patch_of(("set", "events", "user-3", {"list_index": 3, "value": "end"})), ["e0", "e1", "e2", "end"]),
    (patch_of(("delete", "events", "user-3", {"list_index": 0})), ["e1", "e2"])])
def test_lists_are_edited_whole_or_by_element(open_savepoint_path, tmp_path, operations, expected) -> None:
    with Edit(open_savepoint_path, operations) as edit:
        assert edit.plan()
        edit.write(tmp_path / "new")
    with savepoint.open(tmp_path / "new") as opened:
        assert opened.lookup("count", "events", "user-3") == expected
    assert savepoint.verify_savepoint(tmp_path / "new")


def test_maps_and_namespaces_are_edited(open_savepoint_path, tmp_path) -> None:
    operations = patch_of(("set", "seen", "user-2", {"map_key": "page-9", "value": 9}),
                          ("delete", "seen", "user-2", {"map_key": "page-0"}),
                          ("set", "seen", "user-5", {"value": {"only": 1.5}}),
                          ("set", "session", "user-2", {"namespace": 2, "value": "changed"}))
    with Edit(open_savepoint_path, operations) as edit:
        edit.write(tmp_path / "new")
    with savepoint.open(tmp_path / "new") as opened, savepoint.open(open_savepoint_path) as old:
        assert opened.lookup("count", "seen", "user-2") == {"page-1": 0.5, "page-9": 9.0}
        assert opened.lookup("count", "seen", "user-5") == {"only": 1.5}
        assert opened.lookup("count", "session", "user-2", namespace=2) == "changed"
        expiry = [side.read("count", "session", keys=["user-2"]).read_all().column("expires_at") for side in (old, opened)]
        assert expiry[0] == expiry[1]
    assert savepoint.verify_savepoint(tmp_path / "new")


def test_the_plan_is_the_diff(open_savepoint_path, tmp_path) -> None:
    operations = patch_of(("set", "total", "user-1", {"value": 100}), ("delete", "total", "user-2", {}),
                          ("set", "seen", "user-2", {"map_key": "page-9", "value": 9}))
    with Edit(open_savepoint_path, operations) as edit:
        plan = edit.plan()
        edit.write(tmp_path / "new")
    key = json.dumps
    assert sorted(plan, key=key) == sorted(changes(open_savepoint_path, tmp_path / "new"), key=key)
    with Edit(open_savepoint_path, plan) as again:
        assert again.plan() == plan


def test_an_edit_copies_the_files_of_states_that_it_leaves_alone(open_savepoint_path, tmp_path) -> None:
    with Edit(open_savepoint_path, patch_of(("set", "total", "user-1", {"value": 100}))) as edit:
        edit.write(tmp_path / "new")
    for part in (open_savepoint_path / "count/keyed/seen").iterdir():
        assert (tmp_path / "new/count/keyed/seen" / part.name).read_bytes() == part.read_bytes()


@pytest.mark.parametrize(("operation", "message"), [
    ({"op": "set", "operator": "count", "state": "total", "key": "a", "value": "text"}, "another type"),
    ({"op": "set", "operator": "count", "state": "total", "key": 7, "value": 1}, "another type"),
    ({"op": "set", "operator": "count", "state": "total", "key": "a"}, "lacks 'value'"),
    ({"op": "put", "operator": "count", "state": "total", "key": "a", "value": 1}, "no operation"),
    ({"op": "set", "operator": "count", "state": "total", "key": "a", "value": 1, "valeu": 2}, "no field"),
    ({"op": "set", "operator": "count", "state": "total", "key": "a", "map_key": "x", "value": 1}, "only a map"),
    ({"op": "delete", "operator": "count", "state": "total", "key": "nobody"}, "not there"),
    ({"op": "set", "operator": "count", "state": "events", "key": "user-1", "value": "x"}, "set to an array")])
def test_an_edit_that_breaks_the_schema_is_refused(open_savepoint_path, operation, message) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Edit(open_savepoint_path, [operation])


def test_an_edit_of_a_state_that_is_not_there_names_the_nearest(open_savepoint_path) -> None:
    with pytest.raises(NotFound, match="'total'"):
        Edit(open_savepoint_path, [{"op": "set", "operator": "count", "state": "totals", "key": "a", "value": 1}])


def test_patches_are_json_or_json_lines() -> None:
    assert read_patch('[{"op": "set"}]') == read_patch('\n{"op": "set"}\n') == [{"op": "set"}]
    assert read_patch("") == []
    with pytest.raises(InvalidRequest, match="line 2"):
        read_patch('{"op": 1}\n{oops}')
    with pytest.raises(InvalidRequest, match="list of objects"):
        read_patch("[1]")


def test_a_diff_under_ttl_is_a_patch_that_keeps_the_times_of_expiry(open_savepoint_path, tmp_path) -> None:
    operations = patch_of(
        ("set", "session", "user-2", {"namespace": 2, "value": "s2", "expires_at": "2030-01-01T00:00:00Z"}),
        ("set", "session", "user-3", {"namespace": 3, "value": "never", "expires_at": None}),
        ("set", "session", "new", {"value": "x", "expires_at": 1_900_000_000_000}))
    with Edit(open_savepoint_path, operations) as edit:
        plan = edit.plan()
        edit.write(tmp_path / "new")
    rows = list(changes(open_savepoint_path, tmp_path / "new"))
    assert {row["key"]: row["expires_at"] for row in rows} == {
        "user-2": "2030-01-01T00:00:00+00:00", "user-3": None, "new": "2030-03-17T17:46:40+00:00"}
    assert sorted(plan, key=json.dumps) == sorted(rows, key=json.dumps)
    with Edit(open_savepoint_path, rows) as again:
        again.write(tmp_path / "again")
    assert not compare(tmp_path / "new", tmp_path / "again")


@pytest.mark.parametrize("expires_at", ["soon", -1, True, 1.5, 2**63])
def test_a_time_of_expiry_that_is_none_is_refused(open_savepoint_path, expires_at) -> None:
    with pytest.raises(InvalidRequest, match="expires_at is a time"):
        Edit(open_savepoint_path, patch_of(("set", "session", "user-2", {"value": "x", "expires_at": expires_at})))


def test_only_a_state_with_ttl_takes_a_time_of_expiry(open_savepoint_path) -> None:
    with pytest.raises(InvalidRequest, match="only a state with TTL"):
        Edit(open_savepoint_path, patch_of(("set", "total", "user-2", {"value": 1, "expires_at": 1})))


def test_operator_state_that_is_the_same_is_counted(open_savepoint_path, tmp_path) -> None:
    found = {state.state: state for state in compare(open_savepoint_path, open_savepoint_path).states}
    with savepoint.open(open_savepoint_path) as opened:
        rows = {state.name: state.rows for state in opened.states() if state.kind in ("split", "union")}
    assert rows
    assert {name: found[name].unchanged for name in rows} == rows
    [broadcast] = [state.name for state in savepoint.open(open_savepoint_path).states() if state.kind == "broadcast"]
    assert found[broadcast].unchanged > 0

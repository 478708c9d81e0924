"""Edits of timers and of operator state, from patches and from what `diff` prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import savepoint
from savepoint.diff import changes
from savepoint.naming import parse_assignment, parse_target
from savepoint.patch import read_patch
from statebackend import InvalidRequest

TIMERS = {"operator": "count", "state": "_timers_event"}


def edited(source: Path, destination: Path, *operations: dict[str, Any]) -> list[dict[str, Any]]:
    with savepoint.Edit(source, operations) as edit:
        plan = edit.plan()
        edit.write(destination)
    assert savepoint.verify_savepoint(destination)
    return plan


def elements(path: Path, state: str) -> list[list[Any]]:
    with savepoint.open(path) as opened:
        rows = opened.read("count", state).read_all().to_pylist()
    return [[row["value"] for row in rows if row["subtask"] == subtask] for subtask in (0, 1)]


def test_timers_are_set_moved_and_deleted(open_savepoint_path, tmp_path) -> None:
    plan = edited(open_savepoint_path, tmp_path / "new",
                  {**TIMERS, "op": "set", "key": "user-1", "timestamp": 5},
                  {**TIMERS, "op": "delete", "key": "user-1", "timestamp": 1_001},
                  {**TIMERS, "op": "delete", "key": "user-2"}, {**TIMERS, "op": "set", "key": "new", "value": 7})
    assert {(row["key"], row["timestamp"], row["change"]) for row in plan} == {
        ("user-1", 5, "added"), ("user-1", 1_001, "removed"), ("user-2", 1_002, "removed"), ("new", 7, "added")}
    with savepoint.open(tmp_path / "new") as opened:
        assert opened.lookup("count", "_timers_event", "user-1") == [5]
        assert opened.lookup("count", "_timers_event", "new") == [7]
        assert opened.read("count", "_timers_event", keys=["user-2"]).read_all().num_rows == 0
        assert opened.read("count", "_timers_event").read_all().num_rows == 200


def test_what_diff_prints_of_timers_and_operator_state_is_a_patch(open_savepoint_path, tmp_path) -> None:
    edited(open_savepoint_path, tmp_path / "b", {**TIMERS, "op": "set", "key": "user-3", "timestamp": 9},
           {**TIMERS, "op": "delete", "key": "user-4"},
           {"op": "set", "operator": "count", "state": "rules", "map_key": "a", "value": 8},
           {"op": "set", "operator": "count", "state": "rules", "map_key": "c", "value": 9},
           {"op": "delete", "operator": "count", "state": "rules", "map_key": "b"},
           {"op": "set", "operator": "count", "state": "offsets", "subtask": 1, "index": 0, "value": 77})
    printed = "\n".join(json.dumps(row) for row in changes(open_savepoint_path, tmp_path / "b"))
    edited(open_savepoint_path, tmp_path / "c", *read_patch(printed))
    assert not savepoint.compare(tmp_path / "b", tmp_path / "c")
    assert len(printed.splitlines()) == 7


def test_elements_of_operator_lists_are_set_added_removed_and_deleted(open_savepoint_path, tmp_path) -> None:
    offsets = {"operator": "count", "state": "offsets"}
    plan = edited(open_savepoint_path, tmp_path / "new", {**offsets, "op": "set", "subtask": 0, "index": 1, "value": 5},
                  {**offsets, "op": "add", "value": 6}, {**offsets, "op": "remove", "value": 11},
                  {**offsets, "op": "delete", "subtask": 0, "index": 0})
    assert elements(tmp_path / "new", "offsets") == [[5, 6], [10]]
    assert [(row["change"], row["before"], row["after"]) for row in plan] == [
        ("changed", 1, 5), ("added", None, 6), ("removed", 11, None), ("removed", 0, None)]
    assert elements(tmp_path / "new", "all") == [["from-0"], ["from-1"]]
    edited(open_savepoint_path, tmp_path / "whole", {**offsets, "op": "set", "subtask": 1, "value": [1, 2, 3]})
    assert elements(tmp_path / "whole", "offsets") == [[0, 1], [1, 2, 3]]


def test_a_broadcast_map_is_changed_in_every_subtask(open_savepoint_path, tmp_path) -> None:
    rules = {"operator": "count", "state": "rules"}
    edited(open_savepoint_path, tmp_path / "new", {**rules, "op": "set", "map_key": "z", "value": 26},
           {**rules, "op": "delete", "map_key": "a"})
    with savepoint.open(tmp_path / "new") as opened:
        maps = [dict(part.pairs) for _, parts in opened.operator_parts("count") for part in parts if part.name == "rules"]
        rows = opened.read("count", "rules").read_all().to_pylist()
    assert len(maps) == 2
    assert maps[0] == maps[1]
    assert {(row["map_key"], row["map_value"]) for row in rows} == {("b", 2), ("z", 26)}
    edited(open_savepoint_path, tmp_path / "whole", {**rules, "op": "set", "value": {"only": 1}})
    with savepoint.open(tmp_path / "whole") as opened:
        assert {row["map_key"] for row in opened.read("count", "rules").read_all().to_pylist()} == {"only"}


@pytest.mark.parametrize(("operation", "message"), [
    ({**TIMERS, "op": "set", "key": "user-1"}, "timestamp in milliseconds"),
    ({**TIMERS, "op": "delete", "key": "user-1", "timestamp": 4}, "not there"),
    ({"op": "set", "operator": "count", "state": "total", "key": "user-1", "value": 1, "timestamp": 4}, "only a timer"),
    ({"op": "set", "operator": "count", "state": "offsets", "value": 1}, "array"),
    ({"op": "set", "operator": "count", "state": "offsets", "value": [1]}, "several subtasks"),
    ({"op": "set", "operator": "count", "state": "offsets", "subtask": 9, "index": 0, "value": 1}, "does not hold"),
    ({"op": "set", "operator": "count", "state": "offsets", "subtask": 0, "index": 9, "value": 1}, "no such element"),
    ({"op": "set", "operator": "count", "state": "offsets", "subtask": 0, "index": 0, "value": "x"}, "int"),
    ({"op": "remove", "operator": "count", "state": "offsets", "value": 99}, "not there"),
    ({"op": "add", "operator": "count", "state": "rules", "value": 1}, "no operation 'add'"),
    ({"op": "delete", "operator": "count", "state": "rules", "map_key": "none"}, "not there"),
    ({"op": "set", "operator": "count", "state": "rules", "key": "a", "value": 1}, "no field 'key'"),
])
def test_edits_that_do_not_fit_are_refused(open_savepoint_path, operation, message) -> None:
    with pytest.raises(InvalidRequest, match=message):
        savepoint.Edit(open_savepoint_path, [operation])


def test_timers_and_operator_state_are_named_on_the_command_line(open_savepoint_path, tmp_path) -> None:
    with savepoint.open(open_savepoint_path) as opened:
        operations = [parse_assignment(opened, "count._timers_event:user-5=4"),
                      parse_assignment(opened, "count.offsets:1/0=12"), parse_assignment(opened, "count.rules:a=3"),
                      parse_assignment(opened, "count.total:user-7=70"), parse_target(opened, "count.rules:b"),
                      parse_target(opened, "count.offsets:0/1")]
        with pytest.raises(InvalidRequest, match="SUBTASK/INDEX"):
            parse_target(opened, "count.offsets:x")
    edited(open_savepoint_path, tmp_path / "new", *operations)
    assert elements(tmp_path / "new", "offsets") == [[0], [12, 11]]
    with savepoint.open(tmp_path / "new") as opened:
        assert opened.lookup("count", "_timers_event", "user-5") == [4, 1_005]
        assert opened.lookup("count", "total", "user-7") == 70

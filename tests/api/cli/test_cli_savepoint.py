"""`holdfast savepoint` through its real process: output formats, exit codes, plans, errors on one line."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import savepoint

HOLDFAST = str(Path(sys.executable).with_name("holdfast"))


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}


def lines(done) -> list[dict]:
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_read_writes_json_lines_in_a_pipe(holdfast, sp) -> None:
    done = holdfast("savepoint", "read", sp, "count.total")
    assert done.returncode == 0
    assert {row["key"]: row["value"] for row in lines(done)} == {f"user-{n}": n for n in range(100)}


def test_every_format_holds_the_same_rows(holdfast, sp) -> None:
    read = ["savepoint", "read", sp, "count.total", "-o"]
    expected = sorted(f"user-{n}" for n in range(100))
    assert sorted(row["key"] for row in json.loads(holdfast(*read, "json").stdout)) == expected
    assert sorted(row["key"] for row in csv.DictReader(io.StringIO(holdfast(*read, "csv").stdout))) == expected
    assert sorted(holdfast(*read, "name").stdout.split()) == expected
    assert sorted(pq.read_table(io.BytesIO(holdfast(*read, "parquet", binary=True).stdout))["key"].to_pylist()) == expected
    assert sorted(pa.ipc.open_stream(holdfast(*read, "arrow", binary=True).stdout).read_all()["key"].to_pylist()) == expected
    assert "user-42" in holdfast(*read, "table").stdout


def test_rows_are_chosen_by_key_key_group_predicate_column_and_limit(holdfast, sp) -> None:
    assert lines(holdfast("savepoint", "read", sp, "count.total", "-k", "user-7", "--columns", "value")) == [{"value": 7}]
    assert len(lines(holdfast("savepoint", "read", sp, "count.total", "--where", "value >= 90"))) == 10
    assert len(lines(holdfast("savepoint", "read", sp, "count.total", "-n", "3"))) == 3
    assert len(lines(holdfast("savepoint", "read", sp, "count.total", "--key-group", "0-127"))) == 100


def test_a_reader_that_goes_away_is_no_error(sp) -> None:
    process = subprocess.Popen(f"{HOLDFAST} savepoint read {sp} count.total | head -n 1", shell=True,
                               env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    shown, errors = process.communicate(timeout=60)
    assert len(shown.splitlines()) == 1
    assert errors == ""


def test_query_runs_sql(holdfast, sp) -> None:
    done = holdfast("savepoint", "query", sp, "select max(value) m from count.total")
    assert lines(done) == [{"m": 99}]


def test_inspect_tells_everything_as_json(holdfast, sp) -> None:
    [document] = lines(holdfast("savepoint", "inspect", sp))
    [operator] = document["operators"]
    assert operator["states"][0]["rows"] == 100
    assert sum(operator["rows_by_key_group"]) == 100
    assert [item["subtask"] for item in operator["subtasks"]] == [0, 1]
    assert len(lines(holdfast("savepoint", "inspect", sp, "--key-groups"))) == 128


@pytest.mark.parametrize(("arguments", "code", "words"), [
    (["savepoint", "read", "nothing", "count.total"], 4, "no checkpoint or savepoint"),
    (["savepoint", "read", "SP", "cuont.total"], 4, "did you mean 'count'"),
    (["savepoint", "read", "SP", "count.totl"], 4, "did you mean 'total'"),
    (["savepoint", "read", "SP", "count.total", "--key", "usr-1"], 4, "near it are"),
    (["savepoint", "read", "SP", "total"], 2, "OPERATOR.STATE"),
    (["savepoint", "query", "SP", "select nope from count.total"], 2, "nope"),
    (["savepoint", "convert", "SP", "SP"], 6, "already"),
    (["savepoint", "convert", "SP", "new", "--format", "zip"], 2, "open, native"),
    (["savepoint", "rescale", "SP", "new", "--parallelism", "999"], 2, "max parallelism"),
    (["savepoint", "rescale", "SP", "new"], 2, "--max-parallelism"),
    (["savepoint", "edit", "SP", "--set", "count.total:user-1=text"], 2, "another type"),
    (["savepoint", "edit", "SP"], 2, "empty"),
    (["savepoint", "check", "SP", "nojob.py:flow"], 4, "job file"),
    (["savepoint", "bootstrap", "new", "--from", "no.parquet", "--state", "a.b"], 4, "no such file"),
    (["savepoint", "transform", "SP", "new", "--drop-state", "count.nope"], 4, "did you mean|it has"),
    (["savepoint", "frobnicate"], 2, "No such command"),
    (["checkpoint", "list", "SP"], 4, "no jobs")])
def test_an_error_is_one_line_with_the_way_out_and_its_kind_is_the_exit_code(
        holdfast, sp, tmp_path, arguments, code, words) -> None:
    import re

    done = holdfast(*[sp if argument == "SP" else argument for argument in arguments])
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert re.search(words, done.stderr)
    assert "Traceback" not in done.stderr
    if arguments[1] != "frobnicate":
        assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "new").exists()


def test_diff_exits_with_0_1_or_more(holdfast, sp, tmp_path) -> None:
    assert holdfast("savepoint", "diff", sp, sp).returncode == 0
    done = holdfast("savepoint", "edit", sp, tmp_path / "new", "--set", "count.total:user-1=500", "--delete",
                    "count.total:user-2", "--apply")
    assert done.returncode == 0, done.stderr
    assert {row["key"]: row["change"] for row in lines(done)} == {"user-1": "changed", "user-2": "removed"}
    differs = holdfast("savepoint", "diff", sp, tmp_path / "new")
    assert differs.returncode == 1
    assert sorted(lines(differs), key=str) == sorted(lines(done), key=str)
    assert "1 removed, 1 changed, 98 unchanged" in differs.stderr
    [totals, rules] = lines(holdfast("savepoint", "diff", sp, tmp_path / "new", "--totals"))
    assert (totals["removed"], totals["changed"], rules["state"]) == (1, 1, "rules")
    assert holdfast("savepoint", "diff", sp, tmp_path / "none").returncode == 2


def test_edit_writes_nothing_without_apply_and_takes_a_diff_as_patch(holdfast, sp, tmp_path) -> None:
    planned = holdfast("savepoint", "edit", sp, tmp_path / "new", "--set", 'count.total:"user-1"=500')
    assert not (tmp_path / "new").exists()
    assert "--apply" in planned.stderr
    done = holdfast("savepoint", "edit", sp, tmp_path / "new", "--patch", "-", "--apply", stdin=planned.stdout)
    assert done.returncode == 0, done.stderr
    with savepoint.open(tmp_path / "new") as opened:
        assert opened.lookup("count", "total", "user-1") == 500


def test_rescale_convert_copy_and_transform_write_new_savepoints_that_verify(holdfast, sp, tmp_path) -> None:
    (tmp_path / "fix.py").write_text("def halve(entry):\n    return {**entry, 'value': entry['value'] // 2}\n")
    runs = [["rescale", sp, "a", "--max-parallelism", "64", "--parallelism", "4"],
            ["convert", "a", "b", "--format", "native"], ["copy", "b", "c"],
            ["transform", "c", "d", "--rename-operator", "count=counts", "--map", "count.total=fix.py:halve"],
            ["transform", "d", "e", "--change-type", "counts.total=float", "--strip-expired"]]
    for arguments in runs:
        done = holdfast("savepoint", *arguments)
        assert done.returncode == 0, done.stderr
        assert done.stdout == ""
        assert lines(holdfast("savepoint", "verify", arguments[2]))[0]["ok"]
    assert lines(holdfast("savepoint", "read", "e", "counts.total", "-k", "user-9"))[0]["value"] == 4.0
    assert [row["path"].rpartition("/")[2] for row in lines(holdfast("savepoint", "list", "."))] == \
        ["sp", "a", "b", "c", "d", "e"]


def test_verify_names_damage_and_exits_with_8(holdfast, sp) -> None:
    part = next((sp / "count/keyed/total").iterdir())
    data = bytearray(part.read_bytes())
    data[40] ^= 1
    part.write_bytes(data)
    done = holdfast("savepoint", "verify", sp)
    assert done.returncode == 8
    [document] = lines(done)
    assert not document["ok"]
    assert part.name in document["problems"][0]["path"]
    assert part.name in done.stderr


def test_dispose_removes_only_with_apply_and_only_its_own_files(holdfast, sp, tmp_path) -> None:
    assert holdfast("savepoint", "dispose", sp).returncode == 0
    assert sp.exists()
    (sp / "mine.txt").write_text("x")
    assert holdfast("savepoint", "dispose", sp, "--apply").returncode == 2
    (sp / "mine.txt").unlink()
    assert holdfast("savepoint", "dispose", sp, "--apply").returncode == 0
    assert not sp.exists()


def test_bootstrap_builds_a_savepoint_from_a_file(holdfast, tmp_path) -> None:
    (tmp_path / "users.csv").write_text("user,clicks\nann,3\nbob,4\n")
    done = holdfast("savepoint", "bootstrap", "sp", "--from", "users.csv", "--state", "count.total", "--key", "user",
                    "--value", "clicks", "--parallelism", "4")
    assert done.returncode == 0, done.stderr
    rows = lines(holdfast("savepoint", "read", "sp", "count.total"))
    assert {row["key"]: row["value"] for row in rows} == {"ann": 3, "bob": 4}


def _wait_for_the_command(process: subprocess.Popen[str]) -> None:
    """Until the interpreter has started and loads what the command needs; before that Ctrl-C is the interpreter's own."""
    maps = Path(f"/proc/{process.pid}/maps")
    deadline = time.monotonic() + 60
    while process.poll() is None and "libarrow" not in maps.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.crash
def test_ctrl_c_leaves_no_partial_result(tmp_path) -> None:
    from statebackend import ValueStateDescriptor

    table = pa.table({"key": range(400_000), "value": range(400_000)})
    with savepoint.SavepointWriter(tmp_path / "big") as writer:
        writer.keyed("u", ValueStateDescriptor("v", int), table, key_type=int)
    before = sorted(path.name for path in tmp_path.iterdir())
    for wait in (0.0, 0.2, 0.5):
        process = subprocess.Popen([HOLDFAST, "savepoint", "rescale", "big", "new", "--max-parallelism", "4096"],
                                   cwd=tmp_path, env=clean_environment(), stderr=subprocess.PIPE, text=True)
        _wait_for_the_command(process)
        time.sleep(wait)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert "Traceback" not in errors
        if process.returncode == 0:
            shutil.rmtree(tmp_path / "new")
        else:
            assert process.returncode in (130, -signal.SIGINT)
        assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_line_and_leaves_nothing(sp, tmp_path) -> None:
    """A limit on the size of files stands in for a full disk: the write fails half way."""
    script = f"ulimit -f 1; trap '' XFSZ; exec {HOLDFAST} savepoint rescale {sp} {tmp_path}/new --max-parallelism 64"
    done = subprocess.run(["bash", "-c", script], env=clean_environment(), capture_output=True, text=True, timeout=60,
                          check=False)
    assert done.returncode == 7, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "new").exists()


def test_uuids_and_tuples_read_and_edit_as_they_are_written(holdfast, tmp_path) -> None:
    from uuid import UUID

    from statebackend import ValueStateDescriptor

    device, owner = UUID(int=7), UUID(int=9)
    table = pa.table({"device": pa.array([device.bytes], pa.binary(16)), "slot": [3],
                      "owner": pa.array([owner.bytes], pa.binary(16))})
    with savepoint.SavepointWriter(tmp_path / "ids") as writer:
        writer.keyed("op", ValueStateDescriptor("owner", UUID), table, key_type=tuple[UUID, int], key=["device", "slot"],
                     value="owner")
    typed = json.dumps([str(device), 3])
    read = ["savepoint", "read", tmp_path / "ids", "op.owner", "--key", typed, "--columns", "key,value", "-o"]
    assert json.loads(holdfast(*read, "jsonl").stdout) == {"key": [str(device), 3], "value": str(owner)}
    [row] = csv.DictReader(io.StringIO(holdfast(*read, "csv").stdout))
    assert (json.loads(row["key"]), row["value"]) == ([str(device), 3], str(owner))
    assert str(owner) in holdfast(*read, "table").stdout
    plan = holdfast("savepoint", "edit", tmp_path / "ids", "--set", f"op.owner:{typed}={device}", "-o", "jsonl")
    [row] = lines(plan)
    assert (row["key"], row["before"], row["after"]) == ([str(device), 3], str(owner), str(device))
    done = holdfast("savepoint", "query", tmp_path / "ids", f"select count(*) n from op.owner where value = '{owner}'")
    assert lines(done) == [{"n": 1}]


def test_operator_state_is_edited(holdfast, sp, tmp_path) -> None:
    done = holdfast("savepoint", "edit", sp, tmp_path / "new", "--set", "count.rules:b=2", "--delete", "count.rules:a",
                    "--apply", "-o", "jsonl")
    assert done.returncode == 0
    assert [(row["change"], row["map_key"]) for row in lines(done)] == [("added", "b"), ("removed", "a")]
    again = holdfast("savepoint", "read", tmp_path / "new", "count.rules")
    assert {(row["map_key"], row["map_value"]) for row in lines(again)} == {("b", 2)}


def test_a_difference_of_many_entries_is_whole_in_a_pipe(holdfast, sp, tmp_path) -> None:
    table = pa.table({"key": [f"new-{n}" for n in range(1500)], "value": range(1500)})
    pq.write_table(table, tmp_path / "new.parquet")
    assert holdfast("savepoint", "bootstrap", "new", "--from", "new.parquet", "--state", "count.total").returncode == 0
    done = holdfast("savepoint", "diff", sp, "new")
    assert done.returncode == 1
    assert sum(row["change"] == "added" for row in lines(done)) == 1500
    assert len(lines(holdfast("savepoint", "diff", sp, "new", "-n", "3"))) == 3
    assert "first 1000 entries" in holdfast("savepoint", "diff", sp, "new", "-o", "table").stderr


def test_a_folder_that_is_not_there_has_no_list(holdfast) -> None:
    done = holdfast("savepoint", "list", "nowhere")
    assert (done.returncode, done.stdout) == (4, "")
    assert "no such folder" in done.stderr


@pytest.mark.parametrize("name", ["total", "totl", "count"])
def test_a_name_without_an_operator_is_answered_with_the_whole_name(holdfast, sp, name) -> None:
    done = holdfast("savepoint", "read", sp, name)
    assert done.returncode == 2
    assert "'count." in done.stderr


def test_a_statement_that_is_no_select_is_refused_as_such(holdfast, sp) -> None:
    done = holdfast("savepoint", "query", sp, "drop table count.total")
    assert (done.returncode, done.stderr) == (2, "error: a query is a SELECT: it changes nothing; "
                                                 "edit and transform write a changed savepoint\n")

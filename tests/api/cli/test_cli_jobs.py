"""The way of an operator, through the real command: run, list, convert, check, restore wider, clean up."""

from __future__ import annotations

import json

import pytest

JOB = '''
from checkpoint import Dataflow, FileSink, GeneratorSource, KeyedProcessFunction
from statebackend import ValueStateDescriptor


class Count(KeyedProcessFunction):
    def open(self, ctx):
        self.total = ctx.state(ValueStateDescriptor("total", TYPE))

    def process(self, number, ctx):
        self.total.update((self.total.value() or 0) + 1)
        yield {"key": ctx.key, "n": self.total.value()}


flow = Dataflow("numbers", max_parallelism=64)
numbers = flow.source(GeneratorSource(lambda n: n, count=COUNT), uid="numbers", parallelism=1)
counts = numbers.key_by(lambda n: f"k{n % 10}", key_type=str).process(Count(), uid="UID", parallelism=2)
counts.sink(FileSink("out/"), uid="out")
'''


def write_job(folder, name: str, *, count: int, uid: str = "count", type: str = "int") -> str:
    (folder / name).write_text(JOB.replace("COUNT", str(count)).replace("UID", uid).replace("TYPE", type))
    return f"{name}:flow"


def lines(done) -> list[dict]:
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def checkpoint(holdfast, tmp_path) -> str:
    done = holdfast("run", write_job(tmp_path, "job.py", count=200), "--checkpoint-dir", "chk", "--backend", "rocksdb")
    assert done.returncode == 0, done.stderr
    return lines(done)[0]["checkpoint"]


def test_from_a_run_to_a_wider_restore(holdfast, tmp_path, checkpoint) -> None:
    [row] = lines(holdfast("checkpoint", "list", "chk"))
    assert (row["path"], row["job"], row["status"]) == (checkpoint, "numbers", "completed")
    assert lines(holdfast("checkpoint", "show", checkpoint))[0]["operators"]
    assert lines(holdfast("checkpoint", "verify", checkpoint))[0]["ok"]
    assert lines(holdfast("checkpoint", "gc", "chk")) == []
    assert all(check["ok"] for check in lines(holdfast("checkpoint", "probe", "chk")))
    assert holdfast("savepoint", "convert", checkpoint, "sp").returncode == 0
    wider = write_job(tmp_path, "wider.py", count=300)
    plan = lines(holdfast("restore", "sp", wider, "--parallelism", "count=4", "--dry-run"))
    assert [move["from_subtasks"] for move in plan] == [[0], [0], [1], [1]]
    done = holdfast("restore", "sp", wider, "--parallelism", "count=4", "--checkpoint-dir", "chk2")
    assert done.returncode == 0, done.stderr
    assert "key groups 48-63 from old subtasks 1" in done.stderr
    rows = lines(holdfast("savepoint", "read", lines(done)[0]["checkpoint"], "count.total"))
    assert {row["key"]: row["value"] for row in rows} == {f"k{n}": 30 for n in range(10)}


def test_check_tells_what_would_be_restored_mapped_or_refused(holdfast, tmp_path, checkpoint) -> None:
    same = holdfast("savepoint", "check", checkpoint, "job.py:flow")
    assert same.returncode == 0, same.stderr
    fates = {(state["operator"], state["state"]): state["fate"] for state in lines(same)[0]["states"]}
    assert fates["count", "total"] == "restored"
    optional = holdfast("savepoint", "check", checkpoint, write_job(tmp_path, "maybe.py", count=1, type="int | None"))
    assert [state["fate"] for state in lines(optional)[0]["states"] if state["state"] == "total"] == ["migrated"]
    assert holdfast("savepoint", "check", checkpoint, write_job(tmp_path, "text.py", count=1, type="str")).returncode == 5
    renamed = write_job(tmp_path, "renamed.py", count=1, uid="counts")
    refused = holdfast("savepoint", "check", checkpoint, renamed)
    assert refused.returncode == 5
    assert not lines(refused)[0]["ok"]
    assert holdfast("savepoint", "check", checkpoint, renamed, "--map-uid", "count=counts").returncode == 0
    assert holdfast("savepoint", "check", checkpoint, renamed, "--allow-non-restored-state").returncode == 0
    stopped = holdfast("restore", checkpoint, renamed, "--checkpoint-dir", "chk3")
    assert stopped.returncode == 5
    assert not (tmp_path / "chk3").exists()


def test_a_function_that_fails_is_one_line_and_leaves_nothing(holdfast, sp, tmp_path) -> None:
    (tmp_path / "fix.py").write_text("def boom(entry):\n    return 1 / 0\n")
    done = holdfast("savepoint", "transform", sp, "new", "--map", "count.total=fix.py:boom")
    assert done.returncode == 2
    assert "ZeroDivisionError" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "new").exists()

"""`holdfast run` as a process: a first run, going on, Ctrl-C, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from api.cli.main import app

JOB = '''
from checkpoint import Dataflow, FileSink, FileSource, GeneratorSource, KeyedProcessFunction
from statebackend import ValueStateDescriptor

class CountPerUser(KeyedProcessFunction):
    def open(self, ctx):
        self.count = ctx.state(ValueStateDescriptor("count", int, default=0))

    def process(self, click, ctx):
        self.count.update(self.count.value() + 1)
        yield {"user": ctx.key, "n": self.count.value()}

flow = Dataflow("clicks", max_parallelism=128)
clicks = flow.source(FileSource("clicks/*.jsonl"), uid="clicks", parallelism=2)
counts = clicks.key_by(lambda c: c["user"], key_type=str).process(CountPerUser(), uid="count", parallelism=4)
counts.sink(FileSink("out/"), uid="out")
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "clicks").mkdir()
    put(tmp_path, "a", 300)
    (tmp_path / "job.py").write_text(JOB)
    return tmp_path


def put(folder: Path, name: str, count: int) -> None:
    (folder / f"clicks/{name}.jsonl").write_text("".join(json.dumps({"user": f"u{n % 5}"}) + "\n" for n in range(count)))


def holdfast(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "api.cli.main", "run", *arguments], cwd=folder, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"NO_COLOR": "1"})


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def counts(folder: Path) -> list[tuple[str, int]]:
    files = [path for path in (folder / "out").glob("*.jsonl") if not path.name.startswith(".")]
    rows = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    return sorted((row["user"], row["n"]) for row in rows)


def expected(count: int) -> list[tuple[str, int]]:
    return sorted((f"u{user}", n) for user in range(5) for n in range(1, count // 5 + 1))


def test_a_job_runs_and_goes_on_with_new_files_at_another_parallelism(folder):
    code, out, err = finish(holdfast(folder, "job.py:flow", "--checkpoint-dir", "chk", "--restore", "latest", "-o", "json"))
    assert code == 0, err
    assert "starting fresh" in err
    first = json.loads(out)
    assert first["state"] == "FINISHED"
    assert Path(first["checkpoint"]).is_dir()
    assert counts(folder) == expected(300)
    put(folder, "b", 200)
    code, out, err = finish(holdfast(folder, "job.py:flow", "--checkpoint-dir", "chk", "--restore", "latest",
                                     "--parallelism", "2", "--parallelism", "count=3", "--backend", "rocksdb", "-o", "json"))
    assert code == 0, err
    assert json.loads(out)["job_id"] == first["job_id"]
    assert counts(folder) == expected(500)


def test_ctrl_c_takes_a_last_checkpoint_and_the_next_run_goes_on(folder):
    generated = JOB.replace('FileSource("clicks/*.jsonl")',
                            'GeneratorSource(lambda n: {"user": f"u{n % 5}"}, count=2000, rate=RATE)')
    (folder / "job.py").write_text(generated.replace("RATE", "200"))
    process = holdfast(folder, "job.py:flow", "--checkpoint-dir", "chk", "--checkpoint-interval", "200ms", "-o", "json")
    deadline = time.monotonic() + 30
    while not counts(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert code == 0, err
    assert json.loads(out)["state"] == "CANCELED"
    assert "last checkpoint" in err
    (folder / "job.py").write_text(generated.replace("RATE", "None"))
    code, _, err = finish(holdfast(folder, "job.py:flow", "--checkpoint-dir", "chk", "--restore", "latest"))
    assert code == 0, err
    assert "restored from" in err
    assert counts(folder) == expected(2000)


def test_ctrl_c_without_a_checkpoint_folder_promises_nothing(folder):
    (folder / "job.py").write_text(JOB.replace('FileSource("clicks/*.jsonl")',
                                               'GeneratorSource(lambda n: {"user": f"u{n % 5}"}, rate=200)'))
    process = holdfast(folder, "job.py:flow", "--checkpoint-interval", "200ms", "-o", "json")
    deadline = time.monotonic() + 30
    while not counts(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert code == 0, err
    assert json.loads(out)["checkpoint"] is None
    assert "--restore latest" not in err
    assert "without --checkpoint-dir nothing of this run's state is kept" in err


def test_an_error_of_ours_in_a_function_tells_the_operator_and_the_record(folder):
    (folder / "job.py").write_text(JOB.replace("self.count.value() + 1", 'click["user"]'))
    code, _, err = finish(holdfast(folder, "job.py:flow", "--checkpoint-dir", "chk"))
    assert code == 2
    assert "in operator 'count', subtask" in err
    assert "at the record" in err


@pytest.mark.parametrize(("arguments", "code", "words"), [
    (["nowhere.py:flow"], 4, "nowhere.py"),
    (["job.py:other"], 4, "it has the flows: flow"),
    (["job.py:flow", "--parallelism", "zero"], 2, "parallelism"),
    (["job.py:flow", "--parallelism", "nobody=2"], 2, "clicks, count, out"),
    (["job.py:flow", "--parallelism", "500"], 2, "max parallelism"),
    (["job.py:flow", "--backend", "paper"], 2, "paper"),
    (["job.py:flow", "--runtime", "mainframe"], 2, "mainframe"),
    (["job.py:flow", "--restore", "nowhere/chk-1"], 4, "nowhere"),
    (["job.py:flow", "--restore", "latest"], 2, "--checkpoint-dir"),
    (["job.py:flow", "--checkpoint-dir", "chk", "--checkpoint-interval", "soon"], 2, "soon"),
])
def test_what_can_not_be_right_is_one_line_and_an_exit_code(folder, arguments, code, words, monkeypatch):
    monkeypatch.chdir(folder)
    found = CliRunner().invoke(app, ["run", *arguments])
    assert found.exit_code == code, found.stderr
    assert words in found.stderr
    assert found.stdout == ""
    assert "Traceback" not in found.stderr


def test_a_job_folder_with_modules_named_like_ours_does_not_break_us(folder):
    (folder / "checkpoint.py").write_text("raise RuntimeError('the wrong one')\n")
    (folder / "api").mkdir()
    (folder / "api/__init__.py").write_text("raise RuntimeError('the wrong one')\n")
    script = Path(sys.executable).with_name("holdfast")
    done = subprocess.run([str(script), "run", "job.py:flow"], cwd=folder, text=True, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "'checkpoint'" in done.stderr
    assert "'api'" in done.stderr
    assert counts(folder) == expected(300)


def test_a_restore_that_is_refused_does_not_say_that_it_restored(folder):
    code, out, err = finish(holdfast(folder, "job.py:flow", "--checkpoint-dir", "chk", "-o", "json"))
    assert code == 0, err
    path = json.loads(out)["checkpoint"]
    (folder / "job.py").write_text(JOB.replace('"count", int, default=0', '"count", bytes, default=b""'))
    code, _, err = finish(holdfast(folder, "job.py:flow", "--checkpoint-dir", "new", "--restore", path))
    assert code == 5, err
    assert "restored from" not in err
    assert "'count'" in err
    (folder / "job.py").write_text(JOB)
    code, _, err = finish(holdfast(folder, "job.py:flow", "--checkpoint-dir", "new", "--restore", "latest"))
    assert code == 0, err
    assert "completed no checkpoint" in err
    assert f"restored from {path}" in err

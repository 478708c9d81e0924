"""The demo tells the truth: it ends well, twice in one folder, stops cleanly, and leaves other folders alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.demo.children import environment

ROOT = Path(__file__).resolve().parents[2]


def demo(out: Path, *more: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "benchmarks.demo", "--out", str(out), "--clicks", "200000", *more],
                            cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            env={**os.environ, **environment})


def told(out: Path, *more: str, **environment: str) -> str:
    process = demo(out, *more, **environment)
    words, _ = process.communicate(timeout=240)
    assert process.returncode == 0, words
    return words


@pytest.mark.crash
def test_the_demo_kills_restores_and_counts_the_same_and_can_be_run_again(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    first = told(out, "--no-spark")
    assert "none lost, none twice" in first
    assert "users agree" in first
    second = told(out, PATH="/nowhere", JAVA_HOME="/nowhere")
    assert "none lost, none twice" in second
    assert "There is no Java here" in second
    assert (out / "savepoint" / "_metadata").exists()


@pytest.mark.spark
@pytest.mark.xdist_group("spark")
@pytest.mark.timeout(280)
def test_the_function_of_the_demo_counts_the_same_on_spark_and_goes_on_at_another_parallelism(tmp_path: Path) -> None:
    for name in ("clicks.py", "spark_clicks.py"):
        (tmp_path / name).write_text((ROOT / "examples" / name).read_text())
    clicks = tmp_path / "clicks"
    clicks.mkdir()
    for number, parallelism in enumerate(("2", "3")):
        rows = [json.dumps({"user": f"user-{n % 10}", "page": "/"}) for n in range(100)]
        (clicks / f"part-{number}.jsonl").write_text("\n".join(rows) + "\n")
        done = subprocess.run([sys.executable, "spark_clicks.py", parallelism], cwd=tmp_path, text=True,
                              capture_output=True, timeout=200, env=environment())
        assert done.returncode == 0, done.stderr[-3000:]
        assert "100 rows in" in done.stdout
    written = [json.loads(line) for path in (tmp_path / "spark-counts").glob("part-*.json")
               for line in path.read_text().splitlines()]
    assert sorted(row["n"] for row in written if row["user"] == "user-3") == list(range(1, 21))


@pytest.mark.crash
def test_ctrl_c_ends_the_demo_and_everything_that_it_started(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    process = demo(out, "--no-spark")
    while not (out / "undisturbed" / "checkpoints").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    words, _ = process.communicate(timeout=60)
    assert process.returncode == 130, words
    assert "Nothing is left running" in words
    assert "Traceback" not in words
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if readable(path)]
    folders = [os.readlink(path) for path in Path("/proc").glob("[0-9]*/cwd") if readable(path)]
    assert not [folder for folder in folders if folder.startswith(str(out))]
    assert not [command for command in commands if str(out).encode() in command]


def readable(path: Path) -> bool:
    try:
        os.readlink(path) if path.name == "cwd" else path.read_bytes()
    except OSError:
        return False
    return True


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    process = demo(tmp_path)
    words, _ = process.communicate(timeout=60)
    assert process.returncode == 6, words
    assert "has not made" in words
    assert (tmp_path / "precious").read_text() == "mine"

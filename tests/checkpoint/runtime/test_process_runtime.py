"""The process runtime: the same results, through kills of workers and of the whole job."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from checkpoint import CheckpointSettings, CollectionSource, CollectSink, Dataflow, FixedDelay, run, start
from checkpoint.runtime.loading import load_flow, reference_of
from statebackend import HoldfastError, InvalidRequest, NotFound

JOB = '''
import time
from checkpoint import Dataflow, FileSink, FileSource, KeyedProcessFunction
from statebackend import ValueStateDescriptor

class Count(KeyedProcessFunction):
    def open(self, ctx):
        self.count = ctx.state(ValueStateDescriptor("count", int, default=0))

    def process(self, record, ctx):
        self.count.update(self.count.value() + 1)
        yield {"user": ctx.key, "n": self.count.value()}

def slowly(record):
    if record["n"] % 200 == 0:
        time.sleep(PAUSE)
    return record

flow = Dataflow("kill-me")
flow.source(FileSource("INPUT/*.jsonl"), uid="files", parallelism=2).map(slowly, uid="slowly") \\
    .key_by("user", key_type=str).process(Count(), uid="count", parallelism=2).sink(FileSink("OUTPUT"), uid="out")
'''
USERS, FILES, LINES = 23, 4, 3_000


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    for number in range(FILES):
        rows = ({"user": f"u{(number + index) % USERS}", "n": index} for index in range(LINES))
        (tmp_path / f"in/{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return write_job(tmp_path, pause=0.004)


def write_job(folder: Path, *, pause: float, output: str | None = None) -> Path:
    text = JOB.replace("INPUT", str(folder / "in")).replace("OUTPUT", output or str(folder / "out"))
    (folder / "job.py").write_text(text.replace("PAUSE", str(pause)))
    return folder / "job.py"


def output(folder: Path) -> Counter:
    visible = [path for path in (folder / "out").glob("*.jsonl") if not path.name.startswith(".")]
    rows = [json.loads(line) for path in visible for line in path.read_text().splitlines()]
    return Counter((row["user"], row["n"]) for row in rows)


def expected() -> Counter:
    per_user = Counter(f"u{(number + index) % USERS}" for number in range(FILES) for index in range(LINES))
    return Counter((user, n) for user, total in per_user.items() for n in range(1, total + 1))


def test_workers_give_the_same_result(job, tmp_path):
    write_job(tmp_path, pause=0)
    result = run(load_flow(f"{job}:flow"), runtime="processes", job=f"{job}:flow",
                 checkpoint_dir=str(tmp_path / "chk"), settings=CheckpointSettings(interval="50ms"))
    assert result.state == "FINISHED"
    assert output(tmp_path) == expected()
    assert result.records["count"]["records_in"] == FILES * LINES


@pytest.mark.crash
def test_a_killed_worker_is_replaced_and_nothing_is_lost_or_doubled(job, tmp_path):
    handle = start(load_flow(f"{job}:flow"), runtime="processes", job=f"{job}:flow",
                   checkpoint_dir=str(tmp_path / "chk"), settings=CheckpointSettings(interval="50ms"),
                   restart=FixedDelay(5, "1ms"))
    deadline = time.monotonic() + 40
    while handle.statistics()["checkpoints"]["counts"]["completed"] < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    victim = handle._executor._workers[1]._process.pid
    os.kill(victim, signal.SIGKILL)
    result = handle.wait(60)
    assert result.restarts >= 1
    assert "signal 9" in handle.statistics()["exceptions"][0]["message"]
    assert output(tmp_path) == expected()


def run_and_kill(job: Path, checkpoints: str, after: float, environment: dict[str, str] | None = None) -> int | None:
    """One life of the job as a process of its own; None if it was killed before it ended."""
    command = [sys.executable, "-m", "api.cli.main", "--quiet", "run", f"{job}:flow", "--checkpoint-dir", checkpoints,
               "--checkpoint-interval", "60ms", "--runtime", "processes", "--restore", "latest"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
                               env=os.environ | (environment or {}), cwd=job.parent)
    try:
        _, errors = process.communicate(timeout=after)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return None
    assert process.returncode == 0, errors.decode()
    return process.returncode


def kill_again_and_again(job: Path, checkpoints: str, kills: int) -> None:
    """Random lives from a fixed seed, then one that is left in peace."""
    moments = random.Random(kills)
    for _ in range(kills):
        if run_and_kill(job, checkpoints, moments.uniform(1.5, 4.0)) is not None:
            return
    assert run_and_kill(write_job(job.parent, pause=0), checkpoints, 100) == 0


@pytest.mark.crash
def test_a_job_killed_at_random_moments_ends_with_the_output_of_an_undisturbed_run(job, tmp_path):
    kill_again_and_again(job, str(tmp_path / "chk"), 3)
    assert output(tmp_path) == expected()


@pytest.mark.crash
def test_a_job_with_its_checkpoints_in_s3_survives_kills_too(job, tmp_path, s3_root):
    kill_again_and_again(job, f"{s3_root}/chk", 2)
    assert output(tmp_path) == expected()


@pytest.mark.crash
@pytest.mark.soak
@pytest.mark.parametrize("store", ["file", "s3"])
def test_twenty_kills(job, tmp_path, store, request):
    write_job(tmp_path, pause=0.05)
    checkpoints = str(tmp_path / "chk") if store == "file" else f"{request.getfixturevalue('s3_root')}/chk"
    kill_again_and_again(job, checkpoints, 20)
    assert output(tmp_path) == expected()


def test_a_function_that_raises_in_a_worker_ends_the_job_with_its_error(tmp_path):
    path = tmp_path / "bad.py"
    path.write_text("from checkpoint import CollectionSource, Dataflow, FileSink\n"
                    "flow = Dataflow('bad')\n"
                    "flow.source(CollectionSource([1, 0]), uid='s').map(lambda n: 1 / n, uid='divide')"
                    f".sink(FileSink({str(tmp_path / 'out')!r}), uid='o')\n")
    with pytest.raises(HoldfastError, match="ZeroDivisionError"):
        run(load_flow(f"{path}:flow"), runtime="processes", job=f"{path}:flow", restart="none")


def test_a_flow_that_workers_can_not_load_is_refused_with_the_way_out(tmp_path):
    flow = Dataflow("local")
    flow.source(CollectionSource([1]), uid="s").sink(CollectSink(), uid="o")
    with pytest.raises(InvalidRequest, match=r"file\.py:name"):
        run(flow, runtime="processes")


def test_a_sink_that_lives_in_one_process_is_refused(tmp_path):
    path = tmp_path / "collect.py"
    path.write_text("from checkpoint import CollectionSource, CollectSink, Dataflow\n"
                    "flow = Dataflow('c')\nflow.source(CollectionSource([1]), uid='s').sink(CollectSink(), uid='o')\n")
    flow = load_flow(f"{path}:flow")
    assert reference_of(flow) == f"{path}:flow"
    with pytest.raises(InvalidRequest, match="CollectSink"):
        run(flow, runtime="processes")


def test_a_job_file_that_is_not_there_or_has_no_flow_is_named(tmp_path):
    with pytest.raises(NotFound, match=r"nowhere\.py"):
        load_flow(str(tmp_path / "nowhere.py:flow"))
    (tmp_path / "empty.py").write_text("other = 1\n")
    with pytest.raises(NotFound, match="'flow'"):
        load_flow(str(tmp_path / "empty.py:flow"))
    (tmp_path / "broken.py").write_text("import nothing_like_this\n")
    with pytest.raises(InvalidRequest, match="nothing_like_this"):
        load_flow(str(tmp_path / "broken.py:flow"))


def test_a_function_that_builds_the_flow_will_do(tmp_path):
    (tmp_path / "made.py").write_text("from checkpoint import CollectionSource, CollectSink, Dataflow\n"
                                      "def make():\n    flow = Dataflow('made')\n"
                                      "    flow.source(CollectionSource([1]), uid='s').sink(CollectSink(), uid='o')\n"
                                      "    return flow\n")
    assert load_flow(str(tmp_path / "made.py:make")).name == "made"

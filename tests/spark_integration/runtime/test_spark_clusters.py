"""`holdfast run --runtime spark` as a process: Ctrl-C, a killed driver, a local cluster that loses an executor, a standalone
one; `holdfast restore --runtime spark`."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

ENVIRONMENT = {"JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC", "PYSPARK_PYTHON": sys.executable}


class Run:
    """One life of the command. `pids` finds processes of its session, which Spark's JVMs and workers belong to."""

    def __init__(self, job: Any, *arguments: str, checkpoints: str = "chk", restore: str | None = None) -> None:
        verb = ["run"] if restore is None else ["restore", restore]
        command = [sys.executable, "-m", "api.cli.main", "--quiet", *verb, f"{job.folder / 'job.py'}:flow",
                   "--checkpoint-dir", checkpoints, "--checkpoint-interval", "100ms", "-o", "json", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                        start_new_session=True, cwd=job.folder, env=os.environ | ENVIRONMENT)

    def pids(self, words: str) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and os.getsid(int(entry.name)) == self.process.pid and \
                        words.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def is_gone(self, seconds: float = 120) -> bool:
        """Whether nothing of it is left, or soon will be."""
        deadline = time.monotonic() + seconds
        while self.pids("") and time.monotonic() < deadline:
            time.sleep(0.1)
        return not self.pids("")

    def wait_until(self, condition: Callable[[], Any], seconds: float = 400) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, "the condition did not come true"
            time.sleep(0.1)

    def end(self, seconds: float = 400) -> str:
        out, errors = self.process.communicate(timeout=seconds)
        assert self.process.returncode == 0, errors
        return out


@pytest.fixture
def begin(job: Any) -> Iterator[Callable[..., Run]]:
    """Runs of the job's command; none is left behind, nor the folders that Spark's local cluster makes in its own home."""
    runs: list[Run] = []
    folders: set[Path] = set()

    def make(*arguments: str, **where: str) -> Run:
        runs.append(Run(job, *arguments, **where))
        return runs[-1]

    yield make
    for run in runs:
        for pid in run.pids("CoarseGrainedExecutorBackend"):
            folders.add(Path(f"/proc/{pid}/cwd").resolve().parent)
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGTERM)
            try:
                run.process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                os.killpg(run.process.pid, signal.SIGKILL)
                run.process.communicate()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def test_ctrl_c_takes_a_last_checkpoint_and_leaves_nothing_running(job, begin):
    job.add(2)
    job.write(watch=True)
    run = begin("--runtime", "spark", "--master", "local[2]")
    run.wait_until(lambda: job.output() == job.expected())
    assert run.pids("pyspark.daemon")
    run.process.send_signal(signal.SIGINT)
    assert '"CANCELED"' in run.end()
    assert run.is_gone()

    job.add()
    job.write()
    assert '"FINISHED"' in begin("--restore", "latest", "--parallelism", "1").end()
    assert job.output() == job.expected()


@pytest.mark.crash
def test_a_killed_driver_takes_its_tasks_along_and_goes_on_from_s3(job, begin, s3_root):
    job.add(2)
    job.write(watch=True)
    spark = ("--runtime", "spark", "--master", "local[2]", "--backend", "rocksdb")
    run = begin(*spark, checkpoints=f"{s3_root}/chk")
    run.wait_until(lambda: job.output() == job.expected())
    job.add()
    run.process.send_signal(signal.SIGKILL)
    run.process.communicate(timeout=120)
    assert run.is_gone(), "a JVM or a task has outlived its driver"

    job.add()
    job.write()
    assert '"FINISHED"' in begin(*spark, "--restore", "latest", checkpoints=f"{s3_root}/chk").end()
    assert job.output() == job.expected(), "from scratch, there would be more"


def test_the_command_restores_on_spark_what_threads_have_left(job, begin):
    job.add(2)
    job.write()
    left = json.loads(begin().end())
    job.add()
    went_on = begin("--runtime", "spark", "--master", "local[2]", "--parallelism", "count=1", restore=left["checkpoint"],
                    checkpoints="another").end()
    assert '"FINISHED"' in went_on
    assert job.output() == job.expected()


@pytest.mark.crash
def test_a_local_cluster_that_loses_an_executor_goes_on_from_the_last_checkpoint(job, begin):
    job.add(2)
    job.write(watch=True)
    run = begin("--runtime", "spark", "--master", "local-cluster[2,1,1024]")
    run.wait_until(lambda: job.output() == job.expected())
    executors = run.pids("CoarseGrainedExecutorBackend")
    assert len(executors) == 2
    folder = Path(f"/proc/{executors[0]}/cwd").resolve().parent
    job.add()
    os.kill(executors[0], signal.SIGKILL)
    job.add()
    run.wait_until(lambda: job.output() == job.expected())
    run.process.send_signal(signal.SIGINT)
    out = run.end()
    assert re.search(r'"restarts": [1-9]', out)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def standalone(tmp_path: Path) -> Iterator[str]:
    """The URL of a standalone cluster: a master and one worker with two cores, on loopback."""
    import pyspark

    home = Path(pyspark.__path__[0])
    started: list[subprocess.Popen[str]] = []

    def daemon(name: str, *arguments: str) -> Path:
        log = tmp_path / f"{name.rpartition('.')[2]}.log"
        with log.open("w") as stream:
            started.append(subprocess.Popen(
                [str(home / "bin/spark-class"), f"org.apache.spark.deploy.{name}", "--host", "127.0.0.1",
                 "--webui-port", "0", *arguments], stdout=stream, stderr=stream, text=True,
                env=os.environ | ENVIRONMENT | {"SPARK_HOME": str(home), "SPARK_LOCAL_IP": "127.0.0.1"}))
        return log

    def told(log: Path, pattern: str) -> str:
        deadline = time.monotonic() + 120
        while not (found := re.search(pattern, log.read_text())):
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        return found[1]

    try:
        url = told(daemon("master.Master", "--port", "0"), r"Starting Spark master at (spark://\S+)")
        worker = daemon("worker.Worker", "--cores", "2", "--memory", "1g", "--work-dir", str(tmp_path / "work"), url)
        told(worker, r"(Successfully registered)")
        yield url
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait(60)


@pytest.mark.crash
@pytest.mark.soak
def test_a_standalone_cluster_runs_the_flow_through_the_death_of_an_executor(job, begin, standalone):
    job.add(2)
    job.write(watch=True)
    run = begin("--runtime", "spark", "--master", standalone, "--conf", "spark.driver.host=127.0.0.1",
                "--conf", "spark.executor.memory=512m")
    run.wait_until(lambda: job.output() == job.expected())
    mine = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if is_executor_of(pid, standalone)]
    assert mine
    job.add()
    os.kill(mine[0], signal.SIGKILL)
    job.add()
    run.wait_until(lambda: job.output() == job.expected())
    run.process.send_signal(signal.SIGINT)
    assert re.search(r'"restarts": [1-9]', run.end())


def is_executor_of(pid: int, master: str) -> bool:
    """Executors of a standalone cluster are children of its worker, which names its master."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        return b"CoarseGrainedExecutorBackend" in command and \
            master.encode() in Path(f"/proc/{parent}/cmdline").read_bytes()
    except OSError:
        return False

"""Jobs in processes of their own, far from the driver's folder and Python: local-cluster, standalone workers on two
addresses, Spark Connect, state on S3."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_integration import open_epoch
from spark_integration.packing import pack

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark"), pytest.mark.timeout(600)]
JOB = Path(__file__).parent / "cluster_job.py"
ROOT = JOB.parents[2]
SECRET = "test-very-secret-key"
# JVMs that live for seconds would spend most of them compiling.
JAVA = {"JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}


@pytest.fixture
def users(tmp_path: Path) -> list[str]:
    """Five files of input, to be moved in by the job; the fault is in the second one. All users in them."""
    (tmp_path / "in").mkdir()
    (tmp_path / "later").mkdir()
    seen: list[str] = []
    for batch in range(5):
        users = [f"user-{(n * 5 + batch) % 13}" for n in range(40)]
        path = tmp_path / "later" / f"{batch}.parquet"
        pq.write_table(pa.table({"user": users, "amount": [77 if (batch, n) == (1, 20) else n for n in range(40)]}), path)
        os.utime(path, (1_600_000_000 + batch, 1_600_000_000 + batch))
        seen += users
    return seen


def without_path() -> dict[str, str]:
    """This environment, without what would show our packages to any Python."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def run_job(spec: dict[str, Any], *, python: str = sys.executable, path: str = str(ROOT)) -> None:
    folder = Path(spec["folder"])
    environment = {**without_path(), **JAVA, "PYSPARK_PYTHON": python, "SPARK_LOCAL_DIRS": str(folder / "local")}
    # The driver finds us by its script's own path setting, which executors do not inherit.
    start = f"import sys, runpy; sys.path.insert(0, {path!r}); sys.argv = sys.argv[1:]; " \
            "runpy.run_path(sys.argv[0], run_name='__main__')"
    with open(folder / "log", "w+") as log:
        ended = subprocess.run([sys.executable, "-c", start, str(JOB), json.dumps(spec)], env=environment, stdout=log,
                               stderr=log, timeout=400, check=False, cwd=folder).returncode
        log.seek(0)
        assert ended == 0, log.read()[-6000:]


def every_count(users: list[str]) -> Counter[tuple[str, int]]:
    return Counter((user, n) for user, count in Counter(users).items() for n in range(1, count + 1))


def sunk(folder: Path) -> Counter[tuple[str, int]]:
    """What Spark's file sink holds by its own log: files that it did not commit do not count."""
    rows: Counter[tuple[str, int]] = Counter()
    for entry in (folder / "out" / "_spark_metadata").iterdir():
        if not entry.name.startswith("."):
            for line in entry.read_text().splitlines()[1:]:
                table = pq.read_table(json.loads(line)["path"].removeprefix("file://"))
                rows.update(zip(table["user"].to_pylist(), table["n"].to_pylist()))
    return rows


@pytest.mark.crash
def test_executors_that_lack_us_get_the_archive_lose_one_of_them_and_are_rescaled(
        users: list[str], tmp_path: Path) -> None:
    bare = os.path.realpath(sys.executable)  # the interpreter below the virtual environment
    assert subprocess.run([bare, "-c", "import statebackend"], capture_output=True, cwd=tmp_path,
                          env=without_path(), check=False).returncode != 0, "this Python has us: nothing would be shown"
    archive = pack(tmp_path / "holdfast.tar.gz")["archive"]
    run_job({"master": "local-cluster[2,1,1024]", "folder": str(tmp_path), "fault": "lose_executor",
             "runs": [[3, 2], [2, 3]],
             "conf": {"spark.archives": f"{archive}#holdfast", "spark.executorEnv.PYTHONPATH": "holdfast"}}, python=bare)
    assert (tmp_path / "executor-killed").exists()
    assert sunk(tmp_path) == every_count(users)


def test_spark_connect_runs_a_stateful_query_and_reads_its_savepoint(users: list[str], tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    run_job({"master": "connect", "folder": str(tmp_path), "fault": "nothing", "runs": [[3, 2], [2, None]]})
    assert sunk(tmp_path) == every_count(users)
    assert json.loads((tmp_path / "stored.json").read_text()) == Counter(users)
    assert "asynchronous progress tracking skips commits" in (tmp_path / "refused.txt").read_text()
    assert not (tmp_path / "ck-asynchronous").exists()


def test_a_query_keeps_its_state_on_s3_and_its_secrets_to_itself(
        users: list[str], tmp_path: Path, s3_root: str, s3_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the environment tells the endpoint or the credentials: only `fs.s3a.*` does."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    (tmp_path / "events").mkdir()
    url = f"{s3_root.replace('s3://', 's3a://')}/jobs/clicks"
    run_job({"master": "local[2]", "folder": str(tmp_path), "fault": "nothing", "runs": [[3, 2], [2, 3]],
             "checkpoint": url, "conf": {
                 "spark.hadoop.fs.s3a.endpoint": s3_server, "spark.hadoop.fs.s3a.access.key": "test-key-id",
                 "spark.hadoop.fs.s3a.secret.key": SECRET, "spark.eventLog.enabled": "true",
                 "spark.eventLog.dir": str(tmp_path / "events"), "spark.eventLog.compress": "false"}})
    assert sunk(tmp_path) == every_count(users)
    storage = {"endpoint_url": s3_server, "key": "test-key-id", "secret": SECRET}
    with open_epoch(url, storage=storage) as live:
        assert sum(live.read("count", "count").read_all()["value"].to_pylist()) == len(users)

    told = [tmp_path / "told.txt", tmp_path / "log", *(path for path in (tmp_path / "events").rglob("*") if path.is_file())]
    assert any("MapInArrow" in path.read_text(errors="replace") for path in told[2:]), "the event log holds the plan"
    for path in told:
        assert SECRET not in path.read_text(errors="replace"), path


@contextmanager
def standalone(folder: Path) -> Iterator[str]:
    """A master and two workers of one core, on 127.0.0.1 and 127.0.0.2; the master's URL."""
    import pyspark

    spark_class = str(Path(pyspark.__file__).parent / "bin" / "spark-class")
    environment = {**os.environ, **JAVA, "SPARK_LOCAL_DIRS": str(folder / "local"), "PYTHONPATH": str(ROOT),
                   "SPARK_DAEMON_MEMORY": "256m"}
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, *arguments: str) -> Path:
        log = folder / f"{name}.log"
        with open(log, "wb") as out:
            started.append(subprocess.Popen([spark_class, *arguments], stdout=out, stderr=out, env=environment))
        return log

    def wait_for(log: Path, pattern: str) -> str:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if found := re.search(pattern, log.read_text()):
                return found[0]
            time.sleep(0.1)
        raise AssertionError(f"{log.name} never said {pattern}: {log.read_text()[-2000:]}")

    try:
        master = start("master", "org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", "--port", "0",
                       "--webui-port", "0")
        url = wait_for(master, r"spark://127\.0\.0\.1:[1-9]\d*")
        for host in ("127.0.0.1", "127.0.0.2"):
            log = start(host, "org.apache.spark.deploy.worker.Worker", "--host", host, "--webui-port", "0", "-c", "1",
                        "-m", "1g", "-d", str(folder / f"work-{host}"), url)
            wait_for(log, "Successfully registered with master")
        yield url
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait(60)


@pytest.mark.soak
def test_a_speculative_copy_on_another_host_changes_nothing(users: list[str], tmp_path: Path) -> None:
    with standalone(tmp_path) as url:
        run_job({"master": url, "folder": str(tmp_path), "fault": "be_slow", "runs": [[3, 2], [2, 3]], "conf": {
            "spark.speculation": "true", "spark.speculation.interval": "100ms", "spark.speculation.quantile": "0.1",
            "spark.speculation.multiplier": "1.1", "spark.speculation.minTaskRuntime": "500ms",
            "spark.executor.memory": "768m", "spark.executorEnv.PYTHONPATH": str(ROOT)}})
    assert (tmp_path / "attempt-1").exists(), "no speculative copy was started"
    assert sunk(tmp_path) == every_count(users)

"""Jobs for the Spark runtime: files in, counts per user out, so that a lost or doubled record shows."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from checkpoint import Dataflow
from checkpoint.runtime.loading import load_flow

JOB = '''
import time
from checkpoint import Dataflow, FileSink, FileSource, KeyedProcessFunction
from statebackend import ValueStateDescriptor
from beside import count_field

class Count(KeyedProcessFunction):
    def open(self, ctx):
        self.count = ctx.state(ValueStateDescriptor("count", int, default=0))

    def process(self, record, ctx):
        self.count.update(self.count.value() + 1)
        yield {"user": ctx.key, count_field(): self.count.value()}

def slowly(record):
    if record["n"] % 100 == 0:
        time.sleep(PAUSE)
    return record

flow = Dataflow("count-users")
flow.source(FileSource("INPUT/*.jsonl"), uid="files", parallelism=2).map(slowly, uid="slowly") \\
    .key_by(lambda record: record["user"], key_type=str).process(Count(), uid="count", parallelism=2) \\
    .sink(FileSink("OUTPUT"), uid="out")
'''
USERS, FILES, LINES = 17, 4, 2_000


class Job:
    """One job folder: input, output, checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.checkpoints = folder, str(folder / "chk")
        (folder / "in").mkdir(parents=True)
        for number in range(FILES):
            rows = ({"user": f"u{(number + index) % USERS}", "n": index} for index in range(LINES))
            (folder / f"in/{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def flow(self, pause: float = 0.0) -> Dataflow:
        """Built from a file that executors do not import: the flow is all that they get."""
        text = JOB.replace("INPUT", str(self.folder / "in")).replace("OUTPUT", str(self.folder / "out"))
        place = self.folder / f"code-{len(list(self.folder.glob('code-*')))}"
        place.mkdir()
        (place / "job.py").write_text(text.replace("PAUSE", str(pause)))
        (place / "beside.py").write_text("def count_field():\n    return 'n'\n")
        for name in ("job", "beside"):
            sys.modules.pop(name, None)
        try:
            return load_flow(f"{place / 'job.py'}:flow")
        finally:
            sys.path.remove(str(place))

    def output(self) -> Counter:
        visible = [path for path in (self.folder / "out").glob("*.jsonl") if not path.name.startswith(".")]
        rows = [json.loads(line) for path in visible for line in path.read_text().splitlines()]
        return Counter((row["user"], row["n"]) for row in rows)

    @staticmethod
    def expected() -> Counter:
        per_user = Counter(f"u{(number + index) % USERS}" for number in range(FILES) for index in range(LINES))
        return Counter((user, n) for user, total in per_user.items() for n in range(1, total + 1))


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "job")


@contextmanager
def session_on(master: str, folder: Path, **config: Any) -> Iterator[Any]:
    """A session of its own, in place of whatever session this process has."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    from spark_integration import spark_session

    assert SparkContext._active_spark_context is None, "one SparkContext at a time"
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        patch.setenv("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        session = spark_session(master, spark__local__dir=folder / "local", spark__driver__memory="512m",
                                spark__ui__showConsoleProgress=False, **config)
    session.sparkContext.setLogLevel("OFF")
    work = Path(os.environ.get("SPARK_HOME") or sys.modules["pyspark"].__path__[0]) / "work"
    application = session.sparkContext.applicationId
    try:
        yield session
    finally:
        session.stop()
        SparkSession._instantiatedSession = None
        shutil.rmtree(work / application, ignore_errors=True)


def wait_until(condition: Callable[[], Any], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.05)


def running_tasks(session: Any) -> int:
    infos = session.sparkContext._jsc.sc().statusTracker().getExecutorInfos()
    return sum(info.numRunningTasks() for info in infos)

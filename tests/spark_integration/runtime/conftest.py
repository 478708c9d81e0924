"""Jobs for the Spark runtime: files in, counts per user out, so that a lost or doubled record shows."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from checkpoint import Dataflow
from checkpoint.runtime.loading import load_flow

JOB = '''
from checkpoint import Dataflow, FileSink, FileSource, KeyedProcessFunction
from statebackend import ValueStateDescriptor
from beside import count_field

class Count(KeyedProcessFunction):
    def open(self, ctx):
        self.count = ctx.state(ValueStateDescriptor("count", int, default=0))

    def process(self, record, ctx):
        self.count.update(self.count.value() + 1)
        yield {"user": ctx.key, count_field(): self.count.value()}

flow = Dataflow("count-users")
flow.source(FileSource("INPUT/*.jsonl", watch=WATCH), uid="files", parallelism=2) \\
    .key_by(lambda record: record["user"], key_type=str).process(Count(), uid="count", parallelism=2) \\
    .sink(FileSink("OUTPUT"), uid="out")
'''
USERS, LINES = 17, 2_000


class Job:
    """One job folder: input, output, checkpoints. Its flow reads what is there, or waits for more files without end."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.checkpoints = folder, str(folder / "chk")
        self._files = 0
        (folder / "in").mkdir(parents=True)

    def add(self, files: int = 1) -> None:
        for number in range(self._files, self._files + files):
            rows = ({"user": f"u{(number + index) % USERS}"} for index in range(LINES))
            hidden = self.folder / f"in/.{number}"
            hidden.write_text("".join(json.dumps(row) + "\n" for row in rows))
            hidden.rename(self.folder / f"in/{number}.jsonl")
        self._files += files

    def write(self, *, watch: bool = False) -> Path:
        text = JOB.replace("INPUT", str(self.folder / "in")).replace("OUTPUT", str(self.folder / "out"))
        (self.folder / "job.py").write_text(text.replace("WATCH", "'50ms'" if watch else "None"))
        (self.folder / "beside.py").write_text("def count_field():\n    return 'n'\n")
        return self.folder / "job.py"

    def flow(self, *, watch: bool = False) -> Dataflow:
        for name in ("job", "beside"):
            sys.modules.pop(name, None)
        try:
            return load_flow(f"{self.write(watch=watch)}:flow")
        finally:
            sys.path.remove(str(self.folder))

    def output(self) -> Counter:
        visible = [path for path in (self.folder / "out").glob("*.jsonl") if not path.name.startswith(".")]
        rows = [json.loads(line) for path in visible for line in path.read_text().splitlines()]
        return Counter((row["user"], row["n"]) for row in rows)

    def expected(self) -> Counter:
        """The output for the files there are."""
        per_user = Counter(f"u{(number + index) % USERS}" for number in range(self._files) for index in range(LINES))
        return Counter((user, n) for user, total in per_user.items() for n in range(1, total + 1))


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "job")

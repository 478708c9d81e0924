"""The steps of the demo: each does one thing with real processes and real files, and says what came out."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.demo import counts
from benchmarks.demo.children import Child, StepFailed, finish, holdfast, started
from benchmarks.demo.clicks_data import write_clicks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SHARE_BEFORE_THE_KILL = 0.3
WAIT_SECONDS = 120


@dataclass
class Figure:
    """One way of counting: what it gave, and how long it took where that is worth telling."""

    name: str
    counts: counts.Counts
    seconds: float | None = None


@dataclass
class Story:
    """Where the demo lives, and what its steps have found so far."""

    out: Path
    clicks: int
    figures: list[Figure] = field(default_factory=list)
    checkpoint: str = ""

    @property
    def log(self) -> Path:
        return self.out / "demo.log"

    def make_clicks(self) -> str:
        for name in ("clicks.py", "spark_clicks.py"):
            shutil.copy(EXAMPLES / name, self.out / name)
        write_clicks(self.out / "clicks", self.clicks)
        truth = counts.counted_by_duckdb(self.out / "clicks")
        self.figures.append(Figure("counted by DuckDB, from the input", truth))
        return f"{self.clicks:,} clicks of {len(truth):,} users in {self.out}/clicks"

    def run_undisturbed(self) -> str:
        folder = self.out / "undisturbed"
        folder.mkdir()
        (folder / "clicks").symlink_to("../clicks")
        ended = json.loads(finish(job("../clicks.py:flow"), folder, self.log))
        self._keep("undisturbed run", folder / "counts", ended["seconds"])
        return f"{self.clicks / ended['seconds']:,.0f} clicks/s, one process, state on the default backend"

    def run_and_kill(self) -> str:
        with started(job("clicks.py:flow"), self.out, self.log) as child:
            self._wait_for_the_middle(child)
            child.send_signal(signal.SIGKILL)
            child.wait()
        done = counts.rows(self.out / "counts")
        if done >= self.clicks:
            raise StepFailed("the job had finished before it could be killed", hint="try more --clicks")
        return f"killed with SIGKILL; {done:,} rows were committed, the rest was on its way"

    def restore_at_another_parallelism(self) -> str:
        ended = json.loads(finish(job("clicks.py:flow", "--restore", "latest", "--parallelism", "4"), self.out, self.log))
        self.checkpoint = ended["checkpoint"]
        wrong = counts.rows_that_differ(self.out / "undisturbed" / "counts", self.out / "counts")
        total = counts.rows(self.out / "counts")
        if wrong or total != self.clicks:
            raise StepFailed(f"{wrong} rows differ from the undisturbed run, {total} rows in all", expected=self.clicks)
        self._keep("killed at 2, restored at 4 subtasks", self.out / "counts")
        return f"all {total:,} rows are those of the undisturbed run: none lost, none twice"

    def open_savepoint(self) -> str:
        finish(holdfast("savepoint", "convert", self.checkpoint, "savepoint"), self.out, self.log)
        found = counts.in_savepoint(self.out / "savepoint" / "count" / "keyed" / "count")
        self.figures.append(Figure("savepoint, read by DuckDB", found))
        user, most = max(found.items(), key=lambda pair: pair[1])
        return f"{len(found):,} keys; the busiest is {user} with {most:,} clicks"

    def run_on_spark(self) -> str:
        said = finish([sys.executable, "spark_clicks.py"], self.out, self.log)
        told = re.search(r"([\d,]+) rows in ([\d.]+) s", said)
        if told is None:
            raise StepFailed("the Spark job said nothing of what it did", path=str(self.log))
        seconds = float(told[2])
        self._keep("the same function on Spark", self.out / "spark-counts", seconds, "part-*.json")
        return f"{self.clicks / seconds:,.0f} clicks/s in the first batch of a cold JVM, its start not counted"

    def _keep(self, name: str, folder: Path, seconds: float | None = None, pattern: str = "part-*.jsonl") -> None:
        self.figures.append(Figure(name, counts.last_counts(folder, pattern), seconds))

    def _wait_for_the_middle(self, child: Child) -> None:
        """Return as soon as checkpoints have committed a good part of the output: as much by size as will do."""
        give_up = time.monotonic() + WAIT_SECONDS
        whole = sum(path.stat().st_size for path in committed(self.out / "undisturbed" / "counts"))
        while time.monotonic() < give_up:
            if sum(path.stat().st_size for path in committed(self.out / "counts")) >= whole * SHARE_BEFORE_THE_KILL:
                return
            if child.poll() is not None:
                raise StepFailed("the job ended before it could be killed", path=str(self.log), hint="try more --clicks")
            time.sleep(0.01)
        raise StepFailed(f"the job has not come far enough within {WAIT_SECONDS} s", path=str(self.log))


def committed(folder: Path) -> list[Path]:
    """Output files that count: those not yet committed have a dot first."""
    return list(folder.glob("part-*.jsonl"))


def job(flow: str, *more: str) -> list[str]:
    return holdfast("run", flow, "--checkpoint-dir", "checkpoints", "--checkpoint-interval", "250ms", *more, "-o", "json")


RUN = "holdfast run clicks.py:flow --checkpoint-dir checkpoints"
COMMANDS = {
    "run_undisturbed": RUN,
    "run_and_kill": f"{RUN}    (and kill -9 when a third is done)",
    "restore_at_another_parallelism": f"{RUN} --restore latest --parallelism 4",
    "open_savepoint": "holdfast savepoint convert checkpoints/.../chk-N savepoint, then SQL over its Parquet files",
    "run_on_spark": "python spark_clicks.py",
}
"""What each step does, in words that a reader can type."""

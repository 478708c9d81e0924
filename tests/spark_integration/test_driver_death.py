"""The driver is killed before, between and after the two commits, and restarted at another parallelism each time."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.xdist_group("spark"), pytest.mark.timeout(900)]
JOB = Path(__file__).parent / "driver_job.py"


def run(folder: Path, parallelism: int, when: str, at: int, expected: int) -> None:
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(JOB.parents[2])}
    with open(folder / "log", "w+") as log:
        ended = subprocess.run([sys.executable, str(JOB), str(folder), str(parallelism), when, str(at)],
                               env=environment, stdout=log, stderr=log, timeout=250, check=False).returncode
        log.seek(0)
        assert ended == expected, log.read()[-4000:]


def feed(folder: Path) -> Counter[str]:
    """Six batches of input; how often each user is in them."""
    (folder / "in").mkdir()
    expected: Counter[str] = Counter()
    for batch in range(6):
        users = [f"user-{(n * 5 + batch) % 13}" for n in range(40)]
        path = folder / "in" / f"{batch}.parquet"
        pq.write_table(pa.table({"user": users, "amount": list(range(40))}), path)
        os.utime(path, (1_600_000_000 + batch, 1_600_000_000 + batch))
        expected.update(users)
    return expected


def require_every_count_once(folder: Path, expected: Counter[str]) -> None:
    """Whatever the batches: a driver that dies while it looks for files lets Spark take two of them in one batch."""
    rows: list[dict[str, Any]] = []
    for path in (folder / "out").glob("*.json"):
        rows += json.loads(path.read_text())
    assert Counter((row["user"], row["n"]) for row in rows) == Counter(
        (user, n) for user, count in expected.items() for n in range(1, count + 1))


def test_a_killed_driver_changes_nothing(tmp_path: Path) -> None:
    expected = feed(tmp_path)
    run(tmp_path, 2, "before", 1, -signal.SIGKILL)
    run(tmp_path, 3, "between", 2, -signal.SIGKILL)
    run(tmp_path, 2, "after", 3, -signal.SIGKILL)
    run(tmp_path, 5, "never", -1, 0)
    require_every_count_once(tmp_path, expected)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5))
def test_drivers_killed_at_random_change_nothing(seed: int, tmp_path: Path) -> None:
    dice, expected, done = random.Random(seed), feed(tmp_path), 0
    while done < 6:
        when, at = dice.choice(["before", "between", "after"]), dice.randrange(done, 6)
        run(tmp_path, dice.randrange(1, 6), when, at, -signal.SIGKILL)
        done = max((int(path.name) + 1 for path in (tmp_path / "ck" / "commits").glob("[0-9]*")), default=0)
        if dice.random() < 0.4:
            break
    run(tmp_path, dice.randrange(1, 6), "never", -1, 0)
    require_every_count_once(tmp_path, expected)

"""In Spark: a range that moves to another worker process starts from the copies of this host, with the right state."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoint.dataflow.functions import KeyedProcessFunction
from checkpoint.storage.store import FileStore
from spark_integration import stateful
from spark_integration.epoch_store import EpochStore
from spark_integration.host_files import linkable
from statebackend import ValueStateDescriptor

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]
BATCHES, ROWS = 14, 600


class EndsItsWorker(KeyedProcessFunction):
    """Counts per user. In some batches the worker process ends at a record, once for each of the two ranges."""

    def __init__(self, markers: str) -> None:
        self.markers = markers

    def open(self, ctx: Any) -> None:
        self.count = ctx.state(ValueStateDescriptor("count", int, default=0))
        self.range = ctx.subtask_index

    def process(self, record: Any, ctx: Any) -> Any:
        self.count.update(self.count.value() + 1)
        marker = Path(self.markers, f"{record['batch']}-{self.range}")
        if record["batch"] in (5, 11) and not marker.exists():
            marker.touch()
            os._exit(9)
        yield {"user": ctx.key, "n": self.count.value()}


@pytest.fixture
def elsewhere(spark: Any, tmp_path: Path) -> Iterator[Path]:
    """A folder for copies from which there are no hard links to the state: its storage counts as remote."""
    if not os.access("/dev/shm", os.W_OK) or linkable(Path("/dev/shm"), tmp_path):
        pytest.skip("there is no second filesystem here")
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="holdfast-test-"))
    spark.conf.set("spark.holdfast.hostCopiesDir", str(folder))
    yield folder
    spark.conf.unset("spark.holdfast.hostCopiesDir")
    shutil.rmtree(folder)


@pytest.mark.parametrize("backend", ["rocksdb", "filesystem"])
def test_workers_that_replace_dead_ones_start_from_copies_on_the_host(
        backend: str, elsewhere: Path, feed: Callable[..., Any], run_query: Callable[..., Any], tmp_path: Path) -> None:
    source = feed("user string, batch bigint")
    expected: Counter[str] = Counter()
    for batch in range(BATCHES):
        users = [f"user-{(n * 7 + batch * 31) % 1000}" for n in range(ROWS)]
        source.add(user=users, batch=[batch] * ROWS)
        expected.update(users)
    (tmp_path / "markers").mkdir()
    out = run_query(stateful(source.stream(), key="user", function=EndsItsWorker(str(tmp_path / "markers")), uid="count",
                             output="user string, n bigint", checkpoint=str(tmp_path / "state"), parallelism=2,
                             backend=backend, backend_options={"log_floor_bytes": 0} if backend == "rocksdb" else {}))
    assert Counter((row["user"], row["n"]) for row in out.rows) == Counter(
        (user, n) for user, count in expected.items() for n in range(1, count + 1))
    epochs = EpochStore(FileStore.at(str(tmp_path / "state")), "count")
    parts = [part for epoch in epochs.chain() for part in epochs.manifest(epoch).parts]
    how = Counter(part.statistics.restored for part in parts)
    assert len(parts) == 2 * BATCHES
    assert len(list((tmp_path / "markers").iterdir())) == 4, "four workers ended"
    assert how["warmed"] >= 2
    assert how["restored"] == 0, "nothing that was stored on this host was read from storage"
    assert any("-base-" in file.path or ".sst-" in file.path for part in epochs.latest().parts
               for file in part.handle.files), "there is more than a log of changes"
    (folder,) = elsewhere.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700

"""New bases beside the batches: when an epoch may name one, and what is left of one whose worker died."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoint.storage.store import FileStore
from spark_integration.bases import ADOPT_AFTER, ADOPT_WITHIN, BaseTarget, Making, begin
from spark_integration.epoch_store import EpochFiles, EpochStore
from spark_integration.epochs import Manifest
from statebackend.backend import PendingBase
from statebackend.errors import Conflict, Unavailable

WORKER = Path(__file__).with_name("warm_worker.py")


class Pending(PendingBase):
    """A base of one file; `go` lets it be made."""

    def __init__(self, files: EpochFiles, error: Exception | None = None, useful: bool = True) -> None:
        self.files, self.error, self.useful = files, error, useful
        self.go, self.cancelled, self.adopted = threading.Event(), False, 0

    def run(self) -> None:
        writer = self.files.create("base", shared=True)
        writer.write(b"state")
        writer.finish()
        assert self.go.wait(30)
        if self.error is not None or self.cancelled:
            raise self.error or Conflict("the snapshot was cancelled")

    def cancel(self) -> None:
        self.cancelled = True

    def adopt(self) -> bool:
        self.adopted += self.useful
        return self.useful


class Keyed:
    """As much of a backend as makes bases."""

    def __init__(self, pending: Pending | None) -> None:
        self.pending = pending

    def new_base(self, _target: Any) -> Pending | None:
        return self.pending


@pytest.fixture
def files(tmp_path: Path) -> EpochFiles:
    return EpochFiles(FileStore.at(str(tmp_path / "state")), "state/x")


def started(pending: Pending, epoch: int = 10) -> Making:
    making = begin(Keyed(pending), BaseTarget(pending.files, pending.files), epoch)  # type: ignore[arg-type]
    assert making is not None
    return making


def names(files: EpochFiles) -> list[str]:
    return [info.path for info in files._store.list("state")]


def test_a_base_is_named_some_epochs_after_it_was_begun(files: EpochFiles) -> None:
    pending = Pending(files)
    making = started(pending)
    assert not making.is_over(10 + ADOPT_AFTER), "it is not made yet"
    pending.go.set()
    making.wait(30)
    assert [making.is_over(10 + after) for after in range(ADOPT_AFTER + 1)] == [False] * ADOPT_AFTER + [True]
    assert (pending.adopted, len(names(files))) == (1, 1)


@pytest.mark.parametrize("why", ["late", "of no use", "failed", "given up while made", "given up when made"])
def test_of_a_base_that_nobody_will_name_no_file_is_left(why: str, files: EpochFiles, capfd: Any) -> None:
    pending = Pending(files, Unavailable("storage is down") if why == "failed" else None, useful=why != "of no use")
    making = started(pending)
    if why == "given up while made":
        making.give_up()
    pending.go.set()
    making.wait(30)
    if why == "given up when made":
        making.give_up()
    elif not why.startswith("given up"):
        assert making.is_over(11 + ADOPT_WITHIN if why == "late" else 10 + ADOPT_WITHIN)
    assert (names(files), pending.adopted) == ([], 0)
    assert ("storage is down" in capfd.readouterr().err) == (why == "failed")


def test_a_worker_makes_one_base_at_a_time(files: EpochFiles) -> None:
    first, second = Pending(files), Pending(files)
    making = started(first)
    target = BaseTarget(files, files)
    assert begin(Keyed(second), target, 1) is None  # type: ignore[arg-type]
    first.go.set()
    making.wait(30)
    assert begin(Keyed(None), target, 1) is None  # type: ignore[arg-type]
    second.go.set()
    again = started(second)
    again.wait(30)
    assert again.is_over(99)


def test_a_worker_that_could_not_begin_a_base_begins_the_next(files: EpochFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    pending = Pending(files)
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="no more threads"):
        patched.setattr(threading.Thread, "start", refuse_to_start)
        started(pending)
    assert pending.cancelled
    following = Pending(files)
    following.go.set()
    started(following).wait(30)


def refuse_to_start(_thread: threading.Thread) -> None:
    raise RuntimeError("no more threads")


class Worker:
    """A worker process on this host, which can be killed."""

    def __init__(self, folder: Path, backend: str, slow: float, stall: int) -> None:
        command = [sys.executable, str(WORKER), str(folder / "state"), backend, str(slow), str(stall)]
        self.process = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        env={**os.environ, "SPARK_LOCAL_DIRS": str(folder / "local")})
        self.stalled = False
        self.bases: list[int] = []

    def tell(self, **what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def answer(self) -> list[list[Any]]:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            answer = json.loads(line)
            if "rows" in answer:
                return list(answer["rows"])
            if "stalled" in answer:
                self.stalled = True
                return []
            self.bases.append(answer["base"])
        raise AssertionError(f"the worker ended with {self.process.wait()}")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


class Host:
    """Worker processes that share a host, and Spark's part: batches and attempts."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run, self.workers = folder, uuid.uuid4().hex, list[Worker]()
        self.backend, self.slow = "rocksdb", 0.0

    def worker(self, stall: int = 0) -> Worker:
        self.workers.append(Worker(self.folder, self.backend, self.slow, stall))
        return self.workers[-1]

    def start(self, worker: Worker, batch: int, rows: list[str], index: int = 0, parallelism: int = 1) -> None:
        worker.tell(batch=batch, rows=rows, index=index, parallelism=parallelism, run=self.run)

    def batch(self, worker: Worker, batch: int, rows: list[str]) -> Manifest:
        self.start(worker, batch, rows)
        assert dict(worker.answer()).keys() == set(rows)
        return self.epochs.latest()

    @property
    def epochs(self) -> EpochStore:
        return EpochStore(FileStore.at(str(self.folder / "state")), "count")

    def age(self) -> None:
        """Let all files be older than the grace period."""
        for path in (self.folder / "state").rglob("*"):
            os.utime(path, (time.time() - 3600,) * 2)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    for worker in made.workers:
        if worker.process.poll() is None:
            worker.kill()


USERS = [f"user-{n}" for n in range(2000)]


def log_of(manifest: Manifest) -> list[str]:
    return [file.path for file in manifest.parts[0].handle.files if "delta" in file.path]


@pytest.mark.parametrize("backend", ["rocksdb", "filesystem"])
def test_epochs_name_a_base_that_was_made_beside_them(backend: str, host: Host) -> None:
    host.backend = backend
    worker = host.worker()
    manifests = [host.batch(worker, batch, USERS[batch % 9::9]) for batch in range(40)]  # every key by batch 9
    logs = [log_of(manifest) for manifest in manifests]
    rebased = [batch for batch in range(10, 40) if logs[batch][:1] != logs[batch - 1][:1] and logs[batch - 1]]
    assert len(rebased) >= 2
    assert all(logs[batch][-1] not in logs[batch - 1] and logs[batch][-2] == logs[batch - 1][-1] for batch in rebased), \
        "each is a delta of its own on those of the epochs before"
    assert all(max(begun for begun in worker.bases if begun < batch) <= batch - ADOPT_AFTER for batch in rebased)
    cold = host.worker()
    assert host.batch(cold, 40, USERS).parts[0].statistics.restored == "warmed"


def test_a_base_whose_worker_was_killed_is_made_again_and_its_files_go(host: Host) -> None:
    """SIGKILL after the files of a base are stored, and before an epoch names them."""
    host.slow = 600
    worker = host.worker()
    batch = 0
    while not worker.bases:
        host.batch(worker, batch, USERS)
        batch += 1
    begun, stored = worker.bases[0], host.folder / "state" / "count" / "state"
    wanted = f"{begun + ADOPT_WITHIN:010d}-"
    deadline = time.monotonic() + 60
    while not any(path.name.startswith(wanted) and "CURRENT" in path.name for path in stored.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    worker.kill()
    orphans = {path.name for path in stored.iterdir() if path.name.startswith(wanted)}
    assert orphans
    host.slow = 0
    other = host.worker()
    latest = host.batch(other, batch, USERS)
    assert latest.parts[0].statistics.restored == "warmed"
    for later in range(batch + 1, batch + 12):
        latest = host.batch(other, later, USERS)
    assert other.bases, "the next worker makes one"
    assert not {Path(path).name for path in latest.files()} & orphans
    host.age()
    host.epochs.forget(latest, 3)
    assert orphans <= {path.name for path in stored.iterdir()}, "they might still be named"
    far = begun + ADOPT_WITHIN + 10
    latest = host.batch(other, far, USERS)
    for later in range(far + 1, far + 4):
        latest = host.batch(other, later, USERS)
    host.age()
    host.epochs.forget(latest, 3)
    assert not orphans & {path.name for path in stored.iterdir()}


def test_files_of_a_base_stay_until_an_epoch_can_name_them(host: Host) -> None:
    """Cleaning up behind every epoch, with nothing too young, takes nothing from a base that is named later."""
    worker = host.worker()
    for batch in range(25):
        latest = host.batch(worker, batch, USERS)
        host.age()
        host.epochs.forget(latest, 2)
        store = host.epochs.store
        assert all(store.exists(path) for path in latest.files())
    assert len(worker.bases) >= 2


@pytest.mark.parametrize("backend", ["rocksdb", "filesystem"])
def test_a_worker_killed_while_it_starts_from_copies_leaves_them_to_the_next(backend: str, host: Host) -> None:
    host.backend = backend
    first = host.worker()
    for batch in range(4):
        host.batch(first, batch, USERS)
    copies, = (host.folder / "local").glob("holdfast-files-*")
    for stall in (1, 3):
        second = host.worker(stall)
        host.start(second, 4, USERS)
        assert second.answer() == []
        assert second.stalled
        second.kill()
    before = {path.name for path in copies.iterdir()}
    third = host.worker()
    latest = host.batch(third, 4, USERS)
    assert latest.parts[0].statistics.restored == "warmed"
    assert before <= {path.name for path in copies.iterdir()}
    assert [folder.name for folder in (host.folder / "local").glob("holdfast-*-*") if "files" not in folder.name and
            str(third.process.pid) not in folder.name and str(first.process.pid) not in folder.name] == [], \
        "folders of dead workers are swept"
    host.start(third, 5, ["user-7"])
    assert third.answer() == [["user-7", 6]]


@pytest.mark.parametrize("backend", ["rocksdb", "filesystem"])
@pytest.mark.parametrize("seed", range(2))
def test_workers_killed_at_any_moment_leave_the_right_counts(seed: int, backend: str, host: Host) -> None:
    """Two workers of a host share a range's batches at random and are killed in the middle of attempts: while they
    start from copies of the other's files, store, make a base or take one into use."""
    dice, host.backend = random.Random(seed), backend
    workers = [host.worker(), host.worker()]
    expected: Counter[str] = Counter()
    kills = 0
    for batch in range(40):
        rows = dice.sample(USERS, 300)
        expected.update(rows)
        while True:
            place = dice.randrange(2)
            host.start(workers[place], batch, rows)
            if dice.random() < 0.25:
                time.sleep(dice.random() * 0.08)
                workers[place].kill()
                workers[place] = host.worker()
                kills += 1
                continue  # Spark runs the attempt again, on whatever worker
            counted = dict(workers[place].answer())
            assert counted == {user: expected[user] for user in rows}
            break
    assert kills > 3
    how = Counter(host.epochs.manifest(epoch).parts[0].statistics.restored for epoch in host.epochs.chain())
    assert how["warmed"] > 0
    assert how["restored"] == 0, "all that was stored on this host is found on this host"


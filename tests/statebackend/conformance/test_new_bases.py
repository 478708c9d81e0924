"""New bases made beside later snapshots: what they hold, what builds on them, and what becomes of those that fail."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from statebackend import Conflict, LocalFiles, Unavailable, ValueStateDescriptor
from statebackend.files import FileWriter, StateFile

pytestmark = pytest.mark.parametrize("stage", ["filesystem", "rocksdb"], indirect=True)
KEYS = 3_000
SOME = 300


class Counting:
    """A backend that counts in incremental checkpoints, what every key should hold, and bases made for it."""

    def __init__(self, stage: Any) -> None:
        self.stage, self.number, self.expected = stage, 0, [0] * KEYS
        self.keyed = stage.keyed(int, **({"log_floor_bytes": 0} if stage.name == "rocksdb" else {}))
        self.keyed.log_patience = 2
        self.count = self.keyed.state(ValueStateDescriptor("count", int, default=0))
        self.handle = self.change(range(KEYS))

    def change(self, keys: range | None = None) -> Any:
        """Count some keys (always others) and complete a checkpoint."""
        self.number += 1
        keys = keys or range(self.number % 9 * SOME, (self.number % 9 + 1) * SOME)
        for key in keys:
            self.expected[key] += self.number
        self.count.update_many(pa.array(keys), pa.array([self.expected[key] for key in keys], pa.int64()))
        self.handle = self.stage.checkpoint(self.keyed)
        return self.handle

    def outgrown(self, files: Any) -> Any:
        """Change on, until there is a base to be made."""
        for _ in range(60):
            pending = self.keyed.new_base(files)
            if pending is not None:
                return pending
            self.change()
        raise AssertionError("no new base was ever wanted")

    def restored(self) -> list[int]:
        keyed = self.stage.keyed(int, restore=[self.handle])
        return list(keyed.state(ValueStateDescriptor("count", int, default=0)).value_many(
            pa.array(range(KEYS))).to_pylist())


@pytest.fixture
def counting(stage: Any) -> Counting:
    return Counting(stage)


def test_snapshots_go_on_as_deltas_while_a_base_is_made_and_build_on_it_then(counting: Counting, tmp_path: Path) -> None:
    bases = LocalFiles(tmp_path / "snapshots")
    pending = counting.outgrown(bases)
    held = list(counting.expected)
    before = counting.handle
    worker = threading.Thread(target=pending.run)
    counting.change()
    worker.start()
    counting.change()
    worker.join()
    during = counting.change()
    assert during.files[:len(before.files)] == before.files, "until it is adopted, snapshots build on the old base"
    assert pending.adopt()
    after = counting.change()
    logged = [file for file in during.files if file not in before.files]
    assert len(logged) == 3
    assert [file for file in after.files if file in during.files][-3:] == logged, "the changes since lie on the new base"
    assert not {file.path for file in before.files if "delta" in file.path} & {file.path for file in after.files}
    assert after.new_bytes < 0.7 * sum(file.size for file in after.files)
    assert counting.restored() == counting.expected != held


def test_a_base_that_fails_leaves_everything_on_the_old_one(counting: Counting, tmp_path: Path) -> None:
    pending = counting.outgrown(_Broken())
    with pytest.raises(Unavailable, match="no room"):
        pending.run()
    assert not pending.adopt()
    counting.change()
    assert counting.restored() == counting.expected
    again = counting.keyed.new_base(LocalFiles(tmp_path / "snapshots"))
    assert again is not None
    again.run()
    assert again.adopt()
    counting.change()
    assert counting.restored() == counting.expected


def test_a_cancelled_base_is_not_run_and_not_adopted(counting: Counting, tmp_path: Path) -> None:
    pending = counting.outgrown(LocalFiles(tmp_path / "snapshots"))
    pending.cancel()
    with pytest.raises(Conflict):
        pending.run()
    assert not pending.adopt()
    counting.change()
    assert counting.restored() == counting.expected


def test_a_base_of_a_chain_that_was_left_is_not_adopted(counting: Counting, tmp_path: Path) -> None:
    files = LocalFiles(tmp_path / "snapshots")
    late = counting.outgrown(files)
    late.run()
    counting.change()
    sooner = counting.keyed.new_base(files)
    assert sooner is not None
    sooner.run()
    assert sooner.adopt()
    assert not late.adopt()
    counting.change()
    assert counting.restored() == counting.expected


def test_without_bases_the_log_stays_below_its_bound(counting: Counting) -> None:
    """Nobody makes the base that is wanted: a snapshot stores all anew before the log is more than twice the base."""
    anew, longest = 0, 0.0
    for _ in range(80):
        before = counting.handle
        handle = counting.change()
        anew += len(handle.files) < len(before.files)
        log = sum(file.size for file in handle.files if "delta" in file.path)
        longest = max(longest, (log - handle.new_bytes) / (handle.size - log))
    assert anew >= 1
    assert 1 < longest <= 2


class _Broken:
    """A target with no room."""

    def create(self, hint: str, *, shared: bool) -> FileWriter:
        raise OSError("no room")

    def upload(self, local: Path, hint: str, *, shared: bool) -> StateFile:
        raise OSError("no room")

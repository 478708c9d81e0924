"""A backend that stayed open while another process worked on its key groups catches up by the new files alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from statebackend import (
    KeyGroupRange,
    ListStateDescriptor,
    LocalFiles,
    ManualClock,
    TimeDomain,
    ValueStateDescriptor,
    create_backend,
)

BACKENDS = ["rocksdb", "filesystem"]
KEYS = 3000


class Worker:
    """One process' open backend of the same key groups. Unless told otherwise, batches change lists and timers too."""

    everything = True

    def __init__(self, name: str, folder: Path, files: LocalFiles, restore: Any = None) -> None:
        options = {"directory": str(folder)} if name == "rocksdb" else {}
        self.backend, self.files = create_backend(name, **options), files
        self.keyed = self.backend.keyed(uid="op", key_type=int, key_groups=KeyGroupRange(0, 127), clock=ManualClock(0),
                                        restore=[restore] if restore else [], source=files)
        if restore is not None:
            assert self.keyed.build_on(restore)
        self.open()

    def open(self) -> None:
        self.count: Any = self.keyed.state(ValueStateDescriptor("count", int, default=0))
        self.seen: Any = self.keyed.state(ListStateDescriptor("seen", int))

    def batch(self, number: int, keys: list[int]) -> Any:
        counts = self.count.value_many(pa.array(keys))
        self.count.update_many(pa.array(keys), pa.array([value.as_py() + number for value in counts]))
        if self.everything:
            self.keyed.set_current_key(keys[0])
            self.seen.add(number)
            self.keyed.timers.register(TimeDomain.EVENT, number * 10)
        return self.keyed.snapshot(number, self.files).run()

    def contents(self) -> tuple[list[int], list[int], list[int]]:
        self.keyed.set_current_key(0)
        timers = sorted(timer.timestamp for timer in self.keyed.timers.timers(TimeDomain.EVENT)) if self.everything else []
        return self.count.value_many(pa.array(range(KEYS))).to_pylist(), self.seen.get(), timers


@pytest.mark.parametrize("name", BACKENDS)
def test_two_workers_take_turns_on_one_chain(name: str, tmp_path: Path) -> None:
    files = LocalFiles(tmp_path / "files")
    first = Worker(name, tmp_path / "a", files)
    handle = first.batch(1, list(range(KEYS)))
    second = Worker(name, tmp_path / "b", files, handle)
    small = []
    for number in range(2, 14):
        worker, other = (second, first) if number % 3 else (first, second)
        if worker.keyed.catch_up(handle, files) is False:
            worker.backend.close()
            worker = Worker(name, tmp_path / f"w{number}", files, handle)
            if number % 3:
                second = worker
            else:
                first = worker
        del other
        handle = worker.batch(number, [0, number, number + 100])
        small.append(handle.new_bytes)
    assert second.keyed.catch_up(handle, files)
    fresh = Worker(name, tmp_path / "fresh", files, handle)
    assert second.contents() == fresh.contents()
    assert fresh.contents()[1] == list(range(1, 14))
    assert fresh.keyed.timers.next_timestamp(TimeDomain.EVENT) == second.keyed.timers.next_timestamp(TimeDomain.EVENT)
    assert sorted(small)[len(small) // 2] < 4000, "a small change makes a small snapshot, whoever held the state before"
    for worker in (first, second, fresh):
        worker.backend.close()


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_that_was_changed_does_not_catch_up(name: str, tmp_path: Path) -> None:
    files = LocalFiles(tmp_path / "files")
    first = Worker(name, tmp_path / "a", files)
    handle = first.batch(1, [0, 1, 2])
    second = Worker(name, tmp_path / "b", files, handle)
    newer = second.batch(2, [0])
    first.keyed.set_current_key(1)
    first.count.update(99)
    assert not first.keyed.catch_up(newer, files)
    first.backend.close()
    second.backend.close()


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_catches_up_across_a_new_base(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other worker put the chain on a new base: who has the state of one of the epochs since lacks only those after."""
    monkeypatch.setattr(Worker, "everything", name == "rocksdb")  # in memory, other kinds than values are restored anew
    files = LocalFiles(tmp_path / "files")
    first = Worker(name, tmp_path / "a", files)
    first.keyed.log_patience = 3
    handle = first.batch(1, list(range(KEYS)))
    first.keyed.checkpoint_completed(1)
    number, pending = 1, None
    while pending is None:
        number += 1
        handle = first.batch(number, list(range(number % 5, KEYS, 5)))
        first.keyed.checkpoint_completed(number)
        pending = first.keyed.new_base(files)
    pending.run()
    handle = first.batch(number + 1, [0, 1])
    first.keyed.checkpoint_completed(number + 1)
    second = Worker(name, tmp_path / "b", files, handle)
    before = first.batch(number + 2, [0, 2])
    first.keyed.checkpoint_completed(number + 2)
    assert pending.adopt()
    rebased = first.batch(number + 3, [0, 3])
    first.keyed.checkpoint_completed(number + 3)
    assert before.files[0] not in rebased.files or name == "rocksdb"
    assert second.keyed.catch_up(rebased, files)
    assert second.contents() == first.contents()
    again = second.batch(number + 4, [0, 4])
    assert again.files[:len(rebased.files)] == rebased.files
    third = Worker(name, tmp_path / "c", files, again)
    assert third.contents() == second.contents()
    late = Worker(name, tmp_path / "d", files, handle)
    assert late.keyed.catch_up(again, files), "it holds an epoch that lies on the new base"
    assert late.contents() == third.contents()
    for worker in (first, second, third, late):
        worker.backend.close()

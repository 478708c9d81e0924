"""Garbage collection: every orphan is named with its reason, nothing needed ever goes, nothing stays for ever."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from checkpoint.storage import (
    CheckpointMetadata,
    FileStore,
    JobId,
    JobStorage,
    OperatorEntry,
    SubtaskEntry,
    apply_gc,
    check_files,
    gc,
    plan_gc,
)
from statebackend.clock import ManualClock, SystemClock
from statebackend.errors import Conflict
from statebackend.files import StateFile


def publish(storage: JobStorage, checkpoint_id: int, files: list[StateFile]) -> None:
    entry = OperatorEntry("op", "op", max(1, len(files)), 128,
                          tuple(SubtaskEntry(index, operator=file) for index, file in enumerate(files)))
    storage.publish(CheckpointMetadata(storage.job_id, "flow", checkpoint_id, operators=(entry,)))


def stored(storage: JobStorage, checkpoint_id: int, *, shared: bool) -> StateFile:
    writer = storage.target(checkpoint_id, "op", 0).create("state", shared=shared)
    writer.write(os.urandom(64))
    return writer.finish()


@pytest.fixture
def storage(tmp_path: Path) -> JobStorage:
    opened = JobStorage(str(tmp_path), JobId.random(), inline_threshold=0, grace=0)
    opened.claim_generation()
    return opened


def test_orphans_are_named_with_their_reasons(storage: JobStorage) -> None:
    kept = stored(storage, 1, shared=True)
    publish(storage, 1, [kept, stored(storage, 1, shared=False)])
    lost, unfinished = stored(storage, 2, shared=True), stored(storage, 2, shared=False)
    leftover = stored(storage, 1, shared=False)
    temporary = storage.store.local_path("shared/.x.1234.tmp")
    assert temporary is not None
    temporary.write_bytes(b"half")
    (temporary.parent.parent / "taskowned").mkdir()
    (temporary.parent.parent / "taskowned" / "mine").write_bytes(b"x")
    (temporary.parent.parent / "README").write_bytes(b"not ours")
    plan = plan_gc(storage.store, grace=0)
    assert {orphan.path: orphan.reason for orphan in plan.orphans} == {
        lost.path: gc.UNREFERENCED, unfinished.path: gc.UNFINISHED, leftover.path: gc.UNREFERENCED,
        "shared/.x.1234.tmp": gc.INTERRUPTED}
    assert plan.bytes == 64 * 3 + 4
    assert storage.store.exists(lost.path)
    assert {orphan.path for orphan in apply_gc(storage.store, plan)} == {orphan.path for orphan in plan.orphans}
    assert plan_gc(storage.store, grace=0).orphans == ()
    assert storage.latest() is not None
    assert storage.store.exists("taskowned/mine")
    assert storage.store.exists("README")
    assert "chk-2" not in storage.store.folders()


def test_young_files_are_spared_and_said_to_be(storage: JobStorage) -> None:
    lost = stored(storage, 1, shared=True)
    plan = plan_gc(storage.store)
    assert plan.orphans == ()
    assert [(orphan.path, why) for orphan, why in plan.spared] == [(lost.path, "younger than the grace period")]


def test_an_unreadable_checkpoint_stops_the_deletion_of_shared_files(storage: JobStorage) -> None:
    publish(storage, 1, [stored(storage, 1, shared=True)])
    storage.store.delete(["chk-1/_metadata"])
    storage.store.write("chk-1/_metadata", b'{"version":99}')
    plan = plan_gc(storage.store, grace=0)
    assert plan.orphans == ()
    assert "checkpoint 1" in plan.notes[0]


def test_a_pinned_checkpoint_that_was_dropped_keeps_its_files(storage: JobStorage) -> None:
    publish(storage, 1, [stored(storage, 1, shared=True), stored(storage, 1, shared=False)])
    with storage.pin(1):
        storage.store.delete(["chk-1/_metadata"])
        plan = plan_gc(storage.store, grace=0)
        assert plan.orphans == ()
        assert {why for _, why in plan.spared} == {"a running restore may need it"}
    assert len(plan_gc(storage.store, grace=0).orphans) == 2


def test_an_expired_pin_is_an_orphan(storage: JobStorage) -> None:
    clock = ManualClock(SystemClock().now_ms() - 10 * 3_600_000)
    pin = JobStorage(storage._root, storage.job_id, clock=clock).pin(1)
    path = pin.__enter__()
    assert [(orphan.path, orphan.reason) for orphan in plan_gc(storage.store, grace=0).orphans] == \
        [(path, gc.PIN_EXPIRED)]
    pin.__exit__(None, None, None)


def test_a_plan_is_void_when_a_newer_run_has_started(storage: JobStorage) -> None:
    stored(storage, 1, shared=True)
    plan = plan_gc(storage.store, grace=0)
    storage.claim_generation()
    with pytest.raises(Conflict, match="new plan"):
        apply_gc(storage.store, plan)


def test_what_became_needed_since_the_plan_stays(storage: JobStorage) -> None:
    file = stored(storage, 1, shared=True)
    plan = plan_gc(storage.store, grace=0)
    publish(storage, 1, [file])
    assert apply_gc(storage.store, plan) == ()
    assert storage.latest() is not None


def test_an_upload_that_was_never_ended_is_found_and_ended(s3_root: str) -> None:
    with FileStore.at(s3_root) as root:
        storage = JobStorage(root, JobId.random())
        storage.claim_generation()
        writer = storage.store.writer("shared/big")
        writer.write(bytes(17 << 20))
        clock = ManualClock(SystemClock().now_ms() + 2 * 3_600_000)
        plan = plan_gc(storage.store, clock=clock)
        assert [(orphan.path, orphan.reason) for orphan in plan.orphans] == [("shared/big", gc.UPLOAD_ABANDONED)]
        assert len(apply_gc(storage.store, plan, clock=clock)) == 1
        assert plan_gc(storage.store, clock=clock).orphans == ()


class Collection(RuleBasedStateMachine):
    """Random checkpoints that share files, aborted, dropped, crashed and collected in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.root = FileStore.at(f"memory://{uuid.uuid4().hex}")
        self.job = JobId.random()
        self.next_id = 0
        self.completed: dict[int, list[StateFile]] = {}
        self.in_progress: dict[int, tuple[int | None, list[StateFile]]] = {}
        self.take_over()

    @rule()
    def take_over(self) -> None:
        """The process dies and another takes over; what was in progress is lost."""
        self.in_progress.clear()
        self.storage = JobStorage(self.root, self.job, inline_threshold=0, grace=0)
        self.storage.claim_generation()

    @rule(data=st.data(), shared=st.integers(0, 3), private=st.integers(0, 2))
    def begin(self, data: st.DataObject, shared: int, private: int) -> None:
        """A checkpoint that builds on the newest completed one: some of its shared files, and new ones."""
        self.next_id += 1
        base = max(self.completed, default=None)
        old = [file for file in self.completed[base] if file.shared] if base is not None else []
        reused = [file for file in old if data.draw(st.booleans())]
        new = [stored(self.storage, self.next_id, shared=True) for _ in range(shared)]
        own = [stored(self.storage, self.next_id, shared=False) for _ in range(private)]
        self.in_progress[self.next_id] = (base, [*reused, *new, *own])

    @precondition(lambda self: self.in_progress)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        checkpoint = data.draw(st.sampled_from(sorted(self.in_progress)))
        if any(done > checkpoint for done in self.completed):
            return
        _, files = self.in_progress.pop(checkpoint)
        publish(self.storage, checkpoint, files)
        self.completed[checkpoint] = files

    @precondition(lambda self: self.in_progress)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        checkpoint = data.draw(st.sampled_from(sorted(self.in_progress)))
        _, files = self.in_progress.pop(checkpoint)
        self.storage.abort(checkpoint, files)

    @rule(count=st.integers(1, 3))
    def retain(self, count: int) -> None:
        bases = {base for base, _ in self.in_progress.values() if base is not None}
        for checkpoint in self.storage.retain(count, in_use=bases):
            del self.completed[checkpoint]

    @rule()
    def collect_with_grace(self) -> None:
        apply_gc(self.storage.store, plan_gc(self.storage.store))

    @precondition(lambda self: not self.in_progress)
    @rule()
    def collect_everything(self) -> None:
        apply_gc(self.storage.store, plan_gc(self.storage.store, grace=0))
        self.check_nothing_is_left_behind()

    @invariant()
    def every_checkpoint_is_whole(self) -> None:
        found = self.storage.list_checkpoints()
        assert {info.checkpoint_id for info in found} == set(self.completed)
        for checkpoint in self.completed:
            check_files(self.storage.store, self.storage.load(checkpoint), checksums=True)

    @invariant()
    def what_is_in_progress_keeps_its_files(self) -> None:
        present = {info.path for info in self.storage.store.list()}
        for _, files in self.in_progress.values():
            assert {file.path for file in files} <= present

    def check_nothing_is_left_behind(self) -> None:
        needed = {file.path for files in self.completed.values() for file in files}
        needed |= {f"chk-{checkpoint}/_metadata" for checkpoint in self.completed}
        present = {info.path for info in self.storage.store.list(temporary=True)}
        assert {path for path in present if not path.startswith("generations/")} == needed

    def teardown(self) -> None:
        self.in_progress.clear()
        if self.completed:
            self.retain(1)
        self.collect_everything()
        self.root.close()


Collection.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestCollection = Collection.TestCase

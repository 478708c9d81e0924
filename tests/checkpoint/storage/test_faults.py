"""Stores that fail, hang, fill up or lose replies: what is retried, what is settled, what it ends in."""

from __future__ import annotations

import errno
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoint.storage import FaultyDriver, FileStore, JobId, JobStorage, RetryPolicy, disk_full
from checkpoint.storage.metadata import CheckpointMetadata
from checkpoint.storage.retry import AttemptTimedOut, is_transient
from statebackend.errors import Conflict, NotFound, Unavailable

QUICK = RetryPolicy(attempts=4, first_pause=0.001, longest_pause=0.002, timeout=5)


@pytest.fixture
def faulty() -> Iterator[tuple[FileStore, FaultyDriver]]:
    url = f"memory://{uuid.uuid4().hex}"
    faults = FaultyDriver(FileStore.at(url).driver)
    with FileStore(faults, url, retry=QUICK) as store:
        yield store, faults


Faulty = tuple[FileStore, FaultyDriver]


def test_transient_errors_are_retried(faulty: Faulty) -> None:
    store, faults = faulty
    faults.fail("put", times=3)
    store.write("a", b"x")
    assert faults.calls["put"] == 4
    faults.fail("read", times=2, error=OSError(errno.EIO, "flaky"))
    assert store.read("a") == b"x"


def test_a_store_that_stays_down_is_unavailable_after_the_last_attempt(faulty: Faulty) -> None:
    store, faults = faulty
    faults.fail("read", times=100, error=TimeoutError("slow"))
    with pytest.raises(Unavailable, match=r"4 attempts.*slow"):
        store.read("a")
    assert faults.calls["read"] == 4


def test_pauses_grow_and_are_bounded() -> None:
    pauses: list[float] = []
    policy = RetryPolicy(attempts=6, first_pause=1, longest_pause=4, sleep=pauses.append)
    faults = FaultyDriver(FileStore.at(f"memory://{uuid.uuid4().hex}").driver)
    faults.fail("read", times=100)
    with pytest.raises(Unavailable):
        FileStore(faults, "memory://x", retry=policy).read("a")
    assert len(pauses) == 5
    assert all(full / 2 <= pause <= full for pause, full in zip(pauses, [1, 2, 4, 4, 4], strict=True))


def test_what_can_not_succeed_later_is_not_retried(faulty: Faulty) -> None:
    store, faults = faulty
    with pytest.raises(NotFound):
        store.read("absent")
    assert faults.calls["read"] == 1
    faults.fail("put", error=PermissionError("no"))
    with pytest.raises(Unavailable, match="access"):
        store.write("a", b"")
    assert faults.calls["put"] == 1


def test_a_full_disk_is_named_and_leaves_what_was_there(faulty: Faulty) -> None:
    store, faults = faulty
    store.write("old", b"1")
    faults.fail("put", error=disk_full(), times=100)
    faults.fail("part", error=disk_full(), times=100)
    with pytest.raises(Unavailable, match="full"):
        store.write("new", b"2")
    with pytest.raises(Unavailable, match="full"), store.writer("stream") as writer:
        writer.write(bytes(17 << 20))
    faults.heal()
    assert [info.path for info in store.list(temporary=True)] == ["old"]


def test_a_full_disk_in_the_middle_of_a_local_write_leaves_no_file(tmp_path: Path) -> None:
    faults = FaultyDriver(FileStore.at(tmp_path).driver)
    store = FileStore(faults, str(tmp_path), retry=QUICK)
    faults.fail("part", at=2, times=9, error=disk_full())
    with pytest.raises(Unavailable, match="full"), store.writer("chk-1/big") as writer:
        for _ in range(20):
            writer.write(bytes(1 << 20))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_create_whose_reply_was_lost_counts_as_ours(faulty: Faulty) -> None:
    store, faults = faulty
    faults.fail("create", after=True)
    store.create("claim", b"mine")
    assert faults.calls["create"] == 2
    assert store.read("claim") == b"mine"


def test_a_create_that_somebody_else_won_while_our_reply_was_lost_is_a_conflict(faulty: Faulty) -> None:
    store, faults = faulty
    store.create("claim", b"theirs")
    faults.fail("create")
    with pytest.raises(Conflict):
        store.create("claim", b"mine")
    assert store.read("claim") == b"theirs"


def test_the_last_lost_reply_is_settled_too(faulty: Faulty) -> None:
    store, faults = faulty
    faults.fail("create", times=3)
    faults.fail("create", at=4, after=True)
    store.create("claim", b"mine")
    assert faults.calls["create"] == 4


def test_an_upload_whose_completion_reply_was_lost_is_whole(faulty: Faulty) -> None:
    store, faults = faulty
    faults.fail("complete", after=True, error=ConnectionError("lost"))
    faults.fail("complete", at=2, times=9, error=FileNotFoundError("no such upload"))
    with store.writer("big") as writer:
        writer.write(bytes(20 << 20))
    assert store.size("big") == 20 << 20


def test_parts_are_retried_one_by_one(faulty: Faulty) -> None:
    store, faults = faulty
    faults.fail("part", at=2, times=2)
    with store.writer("big") as writer:
        writer.write(bytes(20 << 20))
    assert store.read("big") == bytes(20 << 20)


def test_a_call_that_hangs_is_given_up_and_tried_again() -> None:
    url = f"memory://{uuid.uuid4().hex}"
    faults = FaultyDriver(FileStore.at(url).driver)
    with FileStore(faults, url, retry=RetryPolicy(attempts=3, first_pause=0.001, timeout=0.2)) as store:
        faults.hang("put", times=1)
        store.write("a", b"x")
        assert faults.calls["put"] == 2
        faults.hang("read", times=100)
        with pytest.raises(Unavailable, match=r"no answer within 0\.2 s"):
            store.read("a")


def test_a_late_create_of_our_own_is_ours() -> None:
    url = f"memory://{uuid.uuid4().hex}"
    faults = FaultyDriver(FileStore.at(url).driver)
    with FileStore(faults, url, retry=RetryPolicy(attempts=2, first_pause=0.3, timeout=0.2)) as store:
        faults.hang("create", seconds=0.25)
        store.create("claim", b"mine")
        assert store.read("claim") == b"mine"


def test_a_lost_reply_at_publication_publishes_once(faulty: Faulty) -> None:
    store, faults = faulty
    storage = JobStorage(store, JobId.random())
    storage.claim_generation()
    faults.fail("create", after=True)
    storage.publish(CheckpointMetadata(storage.job_id, "job", 1))
    assert [info.checkpoint_id for info in storage.list_checkpoints()] == [1]


def test_a_lost_reply_at_a_claim_claims_once(faulty: Faulty) -> None:
    store, faults = faulty
    storage = JobStorage(store, JobId.random())
    faults.fail("create", after=True)
    assert storage.claim_generation() == 1
    assert storage.claim_generation() == 2


def test_a_checkpoint_that_could_not_be_published_does_not_exist(faulty: Faulty) -> None:
    store, faults = faulty
    storage = JobStorage(store, JobId.random())
    storage.claim_generation()
    storage.publish(CheckpointMetadata(storage.job_id, "job", 1))
    faults.fail("create", times=100, error=disk_full())
    with pytest.raises(Unavailable, match="full"):
        storage.publish(CheckpointMetadata(storage.job_id, "job", 2))
    faults.heal()
    latest = storage.latest()
    assert latest is not None
    assert latest.checkpoint_id == 1
    storage.publish(CheckpointMetadata(storage.job_id, "job", 2))


@pytest.mark.parametrize(("error", "transient"), [
    (ConnectionResetError("x"), True), (AttemptTimedOut("x"), True), (OSError(errno.EBUSY, "x"), True),
    (OSError("unknown"), True), (disk_full(), False), (FileNotFoundError("x"), False), (ValueError("x"), False),
    (type("NoCredentialsError", (Exception,), {})(), False), (type("EndpointConnectionError", (Exception,), {})(), True),
])
def test_errors_are_told_apart(error: Exception, transient: bool) -> None:
    assert is_transient(error) is transient

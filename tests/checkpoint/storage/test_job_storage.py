"""The checkpoints of a job: fenced by generation, published last, listed, restored, retained and dropped."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from checkpoint.storage import (
    CheckpointMetadata,
    FileStore,
    JobId,
    JobStorage,
    OperatorEntry,
    SubtaskEntry,
    dispose,
    find_jobs,
    find_latest,
    open_checkpoint,
    plan_gc,
)
from checkpoint.storage.generations import PIN_TTL_MS
from statebackend.clock import ManualClock, SystemClock
from statebackend.errors import Conflict, CorruptData, HoldfastError, InvalidRequest, NotFound
from statebackend.files import StateFile


@pytest.fixture
def storage(store_url: str) -> Iterator[JobStorage]:
    with JobStorage(store_url, JobId.random(), grace=0, job_name="flow") as opened:
        opened.claim_generation()
        yield opened


@pytest.fixture
def local(tmp_path: Path) -> Iterator[JobStorage]:
    with JobStorage(str(tmp_path / "root"), JobId.random(), grace=0, job_name="flow") as opened:
        opened.claim_generation()
        yield opened


def metadata_of(storage: JobStorage, checkpoint_id: int, *files: StateFile, **changes: object) -> CheckpointMetadata:
    entry = OperatorEntry("count", "Count", max(1, len(files)), 128, tuple(
        SubtaskEntry(index, operator=file) for index, file in enumerate(files)))
    metadata = CheckpointMetadata(storage.job_id, "flow", checkpoint_id, operators=(entry,),
                                  completed_timestamp=checkpoint_id * 1000)
    return dataclasses.replace(metadata, **changes)  # type: ignore[arg-type]


def stored(storage: JobStorage, checkpoint_id: int, *, shared: bool, size: int = 50_000) -> StateFile:
    writer = storage.target(checkpoint_id, "count", 0).create("state", shared=shared)
    writer.write(os.urandom(size))
    return writer.finish()


def publish(storage: JobStorage, checkpoint_id: int, *files: StateFile) -> str:
    return storage.publish(metadata_of(storage, checkpoint_id, *files))


def test_a_published_checkpoint_is_found_and_read(storage: JobStorage) -> None:
    shared, private = stored(storage, 1, shared=True), stored(storage, 1, shared=False)
    small = storage.target(1, "count", 0).put("small", b"tiny")
    url = publish(storage, 1, shared, private, small)
    assert shared.path.startswith("shared/")
    assert shared.shared
    assert private.path.startswith("chk-1/")
    assert small.inline == b"tiny"
    for name in (url, f"{url}/", f"{url}/_metadata"):
        metadata, source = open_checkpoint(name)
        with source:
            assert metadata.generation == 1
            assert metadata.operators == metadata_of(storage, 1, shared, private, small).operators
            assert [len(source.read(file)) for file in metadata.files()] == [50_000, 50_000, 4]
    assert storage.latest() == storage.load(1) == storage.load(url) == metadata


def test_what_is_not_published_does_not_exist(storage: JobStorage) -> None:
    stored(storage, 1, shared=False)
    assert storage.list_checkpoints() == []
    assert storage.latest() is None
    with pytest.raises(NotFound, match="never completed"):
        storage.load(1)


def test_a_checkpoint_is_published_once(storage: JobStorage) -> None:
    publish(storage, 1)
    with pytest.raises(Conflict):
        publish(storage, 1)


def test_a_newer_run_fences_the_older_one_off(storage: JobStorage, store_url: str) -> None:
    publish(storage, 1)
    with JobStorage(store_url, storage.job_id) as newer:
        assert newer.claim_generation() == 2
        with pytest.raises(Conflict, match="newer run"):
            publish(storage, 2)
        with pytest.raises(Conflict, match="newer run"):
            storage.retain(1)
        with pytest.raises(Conflict, match="newer run"):
            storage.discard(1)
        publish(newer, 2)
        assert [info.checkpoint_id for info in newer.list_checkpoints()] == [1, 2]


def test_what_a_fenced_run_manages_to_publish_is_void(local: JobStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The older run had passed its check when the newer one took over: its reply comes, but counts for nothing."""
    publish(local, 1)
    newer = JobStorage(local._root, local.job_id)
    checks = []

    def passes_once() -> None:
        checks.append(1)
        if len(checks) == 1:
            newer.claim_generation()
            return
        type(local).require_newest(local)

    monkeypatch.setattr(local, "require_newest", passes_once)
    with pytest.raises(Conflict, match="newer run"):
        publish(local, 2)
    assert local.store.exists("chk-2/_metadata")
    assert [info.checkpoint_id for info in newer.list_checkpoints()] == [1]
    assert [orphan.path for orphan in plan_gc(newer.store, grace=0).orphans] == ["chk-2/_metadata"]
    publish(newer, 2)
    assert [(info.checkpoint_id, info.generation) for info in newer.list_checkpoints()] == [(1, 1), (2, 2)]


def test_a_checkpoint_published_before_the_claim_is_the_newer_runs_start(local: JobStorage) -> None:
    publish(local, 1)
    publish(local, 2)
    newer = JobStorage(local._root, local.job_id)
    newer.claim_generation()
    latest = newer.latest()
    assert latest is not None
    assert latest.checkpoint_id == 2


def test_of_many_runs_that_claim_at_once_each_gets_its_own_generation(store_url: str) -> None:
    job = JobId.random()
    with FileStore.at(store_url) as store:
        def claim(_: int) -> int | None:
            try:
                return JobStorage(store, job).claim_generation()
            except Conflict:
                return None

        with ThreadPoolExecutor(6) as pool:
            won = [number for number in pool.map(claim, range(6)) if number is not None]
    assert won
    assert len(set(won)) == len(won)
    assert max(won) <= 6


RACE = """
import sys
from checkpoint.storage import CheckpointMetadata, JobStorage
from statebackend.errors import Conflict
storage = JobStorage(sys.argv[1], sys.argv[2])
published = []
try:
    storage.claim_generation()
    for number in range(1, 30):
        storage.publish(CheckpointMetadata(storage.job_id, "flow", 100 * storage.generation + number))
        published.append(100 * storage.generation + number)
except Conflict:
    pass
print(storage.generation, *published)
storage.close()
"""


def test_processes_that_fight_for_a_job_never_both_publish(tmp_path: Path) -> None:
    job = JobId.random()
    runs = [subprocess.Popen([sys.executable, "-c", RACE, str(tmp_path), job], stdout=subprocess.PIPE, text=True)
            for _ in range(3)]
    published: set[int] = set()
    for run in runs:
        out, _ = run.communicate(timeout=60)
        assert run.returncode == 0
        published.update(int(word) for word in out.split()[1:])
    with JobStorage(str(tmp_path), job) as storage:
        listed = [info.checkpoint_id for info in storage.list_checkpoints()]
    # What a run was told it had published is there for every later run, and an older run never follows a newer one.
    assert published <= set(listed)
    by_generation = [number // 100 for number in listed]
    assert by_generation == sorted(by_generation)


def test_abort_removes_what_was_stored(storage: JobStorage) -> None:
    stored(storage, 1, shared=True)
    stored(storage, 1, shared=False)
    storage.abort(1)
    assert [info.path for info in storage.store.list() if not info.path.startswith("generations/")] == []
    publish(storage, 2)
    with pytest.raises(Conflict, match="complete"):
        storage.abort(2)


def test_a_fenced_run_gives_up_only_its_own_files(local: JobStorage) -> None:
    stored(local, 5, shared=False)
    newer = JobStorage(local._root, local.job_id)
    newer.claim_generation()
    file = stored(newer, 5, shared=False)
    local.abort(5)
    publish(newer, 5, file)
    assert newer.latest() is not None


def test_the_newest_are_retained_with_their_shared_files(storage: JobStorage) -> None:
    first, second, third = (stored(storage, number, shared=True) for number in (1, 2, 3))
    private = stored(storage, 1, shared=False)
    publish(storage, 1, first, private)
    assert storage.retain(2) == ()
    publish(storage, 2, first, second)
    publish(storage, 3, second, third)
    assert storage.retain(2) == (1,)
    paths = {info.path for info in storage.store.list()}
    assert {first.path, second.path, third.path} <= paths
    assert private.path not in paths
    assert "chk-1" not in storage.store.folders()
    assert storage.retain(1) == (2,)
    assert first.path not in {info.path for info in storage.store.list()}
    assert plan_gc(storage.store, grace=0).orphans == ()


def test_references_are_rebuilt_after_a_restart(storage: JobStorage, store_url: str) -> None:
    first, second = stored(storage, 1, shared=True), stored(storage, 2, shared=True)
    publish(storage, 1, first)
    publish(storage, 2, first, second)
    with JobStorage(store_url, storage.job_id, grace=0) as newer:
        newer.claim_generation()
        publish(newer, 3, second)
        assert newer.retain(1) == (1, 2)
        assert {info.path for info in newer.store.list("shared")} == {second.path}


def test_a_checkpoint_that_one_in_progress_builds_upon_stays(storage: JobStorage) -> None:
    first = stored(storage, 1, shared=True)
    publish(storage, 1, first)
    publish(storage, 2)
    assert storage.retain(1, in_use={1}) == ()
    publish(storage, 3, first)
    assert storage.retain(1) == (1, 2)
    assert storage.latest() is not None


def test_a_pinned_checkpoint_stays_until_the_restore_is_done(storage: JobStorage) -> None:
    publish(storage, 1, stored(storage, 1, shared=True))
    publish(storage, 2)
    with storage.pin(1):
        assert storage.retain(1) == ()
        with pytest.raises(Conflict, match="restore"):
            storage.discard(1)
        assert storage.load(1).checkpoint_id == 1
    assert storage.retain(1) == (1,)


def test_a_source_of_another_job_pins_what_it_reads(storage: JobStorage, store_url: str) -> None:
    url = publish(storage, 1, stored(storage, 1, shared=True))
    publish(storage, 2)
    with JobStorage(store_url, JobId.random()) as other:
        with other.source(url) as source:
            assert storage.retain(1) == ()
            assert all(source.read(file) for file in other.load(url).files())
        assert storage.retain(1) == (1,)
    assert storage.store.list("pins") == []


def test_a_pin_that_nobody_released_expires(store_url: str) -> None:
    clock = ManualClock(SystemClock().now_ms())
    with JobStorage(store_url, JobId.random(), grace=0, clock=clock) as storage:
        storage.claim_generation()
        publish(storage, 1)
        publish(storage, 2)
        pin = storage.pin(1)
        pin.__enter__()
        assert storage.retain(1) == ()
        clock.advance(PIN_TTL_MS + 1)
        assert storage.retain(1) == (1,)
        pin.__exit__(None, None, None)


def test_dropped_files_stay_for_the_grace_period(store_url: str) -> None:
    clock = ManualClock(SystemClock().now_ms())
    with JobStorage(store_url, JobId.random(), grace="10s", clock=clock) as storage:
        storage.claim_generation()
        file = stored(storage, 1, shared=True)
        publish(storage, 1, file)
        publish(storage, 2)
        assert storage.retain(1) == (1,)
        assert storage.store.exists(file.path)
        clock.advance(10_000)
        storage.retain(1)
        assert not storage.store.exists(file.path)


def test_closing_leaves_no_dropped_file(tmp_path: Path) -> None:
    with JobStorage(str(tmp_path), JobId.random(), grace="1h") as storage:
        storage.claim_generation()
        publish(storage, 1, stored(storage, 1, shared=True), stored(storage, 1, shared=False))
        publish(storage, 2)
        storage.retain(1)
    assert [path.name for path in (tmp_path / storage.job_id).iterdir() if path.name.startswith("chk-")] == ["chk-2"]
    assert list((tmp_path / storage.job_id / "shared").iterdir()) == []


def test_discard_drops_any_checkpoint(storage: JobStorage) -> None:
    publish(storage, 1)
    publish(storage, 2)
    storage.discard(2)
    assert [info.checkpoint_id for info in storage.list_checkpoints()] == [1]


@pytest.mark.parametrize("damage", ["cut", "flipped", "missing file", "short file", "inline"])
def test_a_damaged_newest_checkpoint_is_named_with_the_previous_good_one(local: JobStorage, damage: str) -> None:
    good = publish(local, 1, stored(local, 1, shared=False))
    broken = stored(local, 2, shared=False)
    publish(local, 2, broken)
    newest = stored(local, 3, shared=False)
    publish(local, 3, newest, local.target(3, "count", 0).put("small", b"tiny"))
    damage_file(local, "chk-2/_metadata", lambda data: data[:-20])
    if damage == "cut":
        damage_file(local, "chk-3/_metadata", lambda data: data[:len(data) // 2])
    elif damage == "flipped":
        damage_file(local, "chk-3/_metadata", lambda data: data.replace(b'"Count"', b'"count"'))
    elif damage == "inline":
        damage_file(local, "chk-3/_metadata", lambda data: data.replace(b"dGlueQ", b"dGlueR"))
    elif damage == "missing file":
        local.store.delete([newest.path])
    else:
        damage_file(local, newest.path, lambda data: data[:-1])
    with pytest.raises((CorruptData, NotFound), match="chk-3") as caught:
        local.latest()
    assert good in str(caught.value)
    assert "--restore" in str(caught.value)


def test_a_damaged_byte_is_found_while_reading_and_the_way_out_is_named(local: JobStorage) -> None:
    good = publish(local, 1, stored(local, 1, shared=False))
    file = stored(local, 2, shared=False)
    url = publish(local, 2, file)
    damage_file(local, file.path, lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    for source in (local.source(2), local.source(url), open_checkpoint(url)[1]):
        with source, pytest.raises(CorruptData, match="checksum") as caught:
            source.open(file)
        assert file.path in str(caught.value)
        assert good in str(caught.value)


def test_a_linked_file_is_checked_in_the_background(local: JobStorage, tmp_path: Path) -> None:
    good, bad = stored(local, 1, shared=True), stored(local, 1, shared=True)
    publish(local, 1, good, bad)
    damage_file(local, bad.path, lambda data: b"\0" + data[1:])
    told: list[CorruptData] = []
    with local.source(1, on_damage=told.append) as source:
        source.fetch(good, tmp_path / "good")
        source.fetch(bad, tmp_path / "bad")
        source.wait()
    assert [bad.path in str(error) for error in told] == [True]
    with local.source(1) as source:
        source.fetch(bad, tmp_path / "again")
        with pytest.raises(CorruptData, match="checksum"):
            source.wait()
    damage_file(local, bad.path, lambda data: data[1:])
    with local.source(1) as source, pytest.raises(CorruptData, match="size"):
        source.fetch(bad, tmp_path / "third")


def test_files_are_fetched_from_every_store(storage: JobStorage, tmp_path: Path) -> None:
    files = [stored(storage, 1, shared=True, size=size) for size in (0, 10, 30_000, 9 << 20)]
    publish(storage, 1, *files)
    with storage.source(1) as source:
        source.fetch_all([(file, tmp_path / str(number)) for number, file in enumerate(files)])
        source.wait()
        with source.open(files[3]) as stream:
            stream.seek(-4, os.SEEK_END)
            assert stream.read() == (tmp_path / "3").read_bytes()[-4:]
        copy = pickle.loads(pickle.dumps(source))
        assert copy.read(files[2]) == (tmp_path / "2").read_bytes()
        copy.store.close()
    assert [(tmp_path / str(number)).stat().st_size for number in range(4)] == [0, 10, 30_000, 9 << 20]


def test_a_copied_job_folder_restores(local: JobStorage, tmp_path: Path) -> None:
    publish(local, 1, stored(local, 1, shared=True))
    os.rename(tmp_path / "root", tmp_path / "moved")
    metadata, source = open_checkpoint(str(tmp_path / "moved" / local.job_id / "chk-1"))
    with source:
        assert all(source.read(file) for file in metadata.files())


def test_the_inline_threshold_decides_what_is_stored_inside(store_url: str) -> None:
    for threshold, inline in (("20KiB", True), (5, False), (0, False)):
        with JobStorage(store_url, JobId.random(), inline_threshold=threshold) as storage:
            target = storage.target(1, "count", 0)
            assert (target.put("x", b"12345").inline is not None) is inline
            assert (target.put("x", b"").inline is not None) is (threshold != 0)


def test_uploads_become_files_or_inline(storage: JobStorage, tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"x" * 10)
    (tmp_path / "large").write_bytes(b"y" * 40_000)
    target = storage.target(1, "count", 0)
    small, large = (target.upload(tmp_path / name, name, shared=True) for name in ("small", "large"))
    assert small.inline == b"x" * 10
    assert large.inline is None
    publish(storage, 1, small, large)
    with storage.source(1) as source:
        assert source.read(large) == b"y" * 40_000


def test_a_target_works_in_another_process(storage: JobStorage) -> None:
    target = pickle.loads(pickle.dumps(storage.target(1, "count", 3)))
    file = target.put("x", os.urandom(30_000))
    target._store.close()
    publish(storage, 1, file)
    assert storage.latest() is not None
    copy = pickle.loads(pickle.dumps(storage))
    assert copy.generation == storage.generation
    assert [info.checkpoint_id for info in copy.list_checkpoints()] == [1]
    copy.close()


def test_a_savepoint_holds_all_its_files_and_moves(storage: JobStorage, store_url: str, tmp_path: Path) -> None:
    folder = storage.new_savepoint_folder(f"{store_url}/savepoints")
    target = storage.savepoint_target(folder, "count", 0)
    writer = target.create("state", shared=True)
    writer.write(bytes(50_000))
    file = writer.finish()
    assert not file.shared
    url = storage.publish(metadata_of(storage, 7, file, kind="savepoint"), folder=folder)
    assert url.rpartition("/")[2].startswith(f"savepoint-{storage.job_id[:6]}-")
    for name in (url, f"{url}/_metadata"):
        metadata, source = open_checkpoint(name)
        with source:
            assert metadata.is_savepoint
            assert source.read(file) == bytes(50_000)
    with pytest.raises(InvalidRequest, match="itself"):
        storage.publish(metadata_of(storage, 7, stored(storage, 7, shared=True), kind="savepoint"), folder=folder)
    dispose(url)
    with pytest.raises(NotFound):
        open_checkpoint(url)
    with FileStore.at(store_url) as store:
        assert store.list("savepoints") == []


def test_a_disposed_checkpoint_leaves_what_others_share(local: JobStorage) -> None:
    shared, own = stored(local, 1, shared=True), stored(local, 1, shared=True)
    first = publish(local, 1, shared, own)
    publish(local, 2, shared)
    dispose(first)
    with JobStorage(local._root, local.job_id) as again:
        assert [info.checkpoint_id for info in again.list_checkpoints()] == [2]
        assert {info.path for info in again.store.list("shared")} == {shared.path}


def test_folders_that_are_no_checkpoints_are_told_what_they_are(local: JobStorage, tmp_path: Path) -> None:
    publish(local, 1)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("x")
    (tmp_path / "foreign" / "chk-1").mkdir(parents=True)
    (tmp_path / "foreign" / "chk-1" / "_metadata").write_bytes(b"\x49\x60\x67\x2dflink")
    for path, message in (("nothing", "no checkpoint or savepoint"), ("other", "not the folder of a checkpoint"),
                          ("root", "checkpoint root"), (f"root/{local.job_id}", "folder of a job"),
                          (f"root/{local.job_id}/chk-9", "never completed")):
        with pytest.raises(NotFound, match=message):
            open_checkpoint(str(tmp_path / path))
    with pytest.raises(InvalidRequest, match="not the metadata"):
        open_checkpoint(str(tmp_path / "foreign" / "chk-1"))


def test_the_latest_checkpoint_of_a_flow_is_found_by_name(store_url: str) -> None:
    assert find_jobs(store_url) == []
    assert find_latest(store_url, "flow") is None
    jobs = {}
    for name, checkpoint in (("flow", 5), ("flow", 9), ("other", 20)):
        with JobStorage(store_url, JobId.random(), job_name=name) as storage:
            storage.claim_generation()
            storage.publish(metadata_of(storage, checkpoint, job_name=name))
            jobs[storage.job_id] = checkpoint
    assert set(find_jobs(store_url)) == set(jobs)
    found = find_latest(store_url, "flow")
    assert found is not None
    assert found.checkpoint_id == jobs[found.job_id] == 9
    assert find_latest(store_url, "nobody") is None


def test_a_flow_whose_only_checkpoint_is_damaged_is_still_found(local: JobStorage, tmp_path: Path) -> None:
    publish(local, 1)
    damage_file(local, "chk-1/_metadata", lambda data: data[:30])
    found = find_latest(str(tmp_path / "root"), "flow")
    assert found is not None
    assert isinstance(found.error, CorruptData)
    assert find_latest(str(tmp_path / "root"), "other") is None


def test_orphans_of_an_earlier_run_go_after_the_first_publication(tmp_path: Path) -> None:
    clock = ManualClock(SystemClock().now_ms())
    job = JobId.random()
    with JobStorage(str(tmp_path), job, clock=clock) as dead:
        dead.claim_generation()
        stored(dead, 1, shared=True)
        stored(dead, 1, shared=False)
    clock.advance(2 * 3_600_000)
    with JobStorage(str(tmp_path), job, clock=clock) as storage:
        storage.claim_generation()
        publish(storage, 2)
        storage.retain(1)
        assert [info.path for info in storage.store.list() if not info.path.startswith("generations/")] == \
            ["chk-2/_metadata"]


def test_a_store_that_fails_its_probe_is_refused(tmp_path: Path) -> None:
    with JobStorage(f"dir::file://{tmp_path}", JobId.random()) as storage, \
            pytest.raises(InvalidRequest, match="unfenced"):
        storage.probe()
    with JobStorage(f"dir::file://{tmp_path}", JobId.random(), unfenced=True) as storage:
        storage.probe()
        storage.claim_generation()
        publish(storage, 1)
        assert storage.latest() is not None


def test_ids_are_checked() -> None:
    with pytest.raises(InvalidRequest, match="32 hex"):
        JobStorage(f"memory://{uuid.uuid4().hex}", "../../etc")
    storage = JobStorage(f"memory://{uuid.uuid4().hex}", JobId.random())
    for bad in (0, -1, True):
        with pytest.raises(InvalidRequest, match="checkpoint id"):
            storage.target(bad, "count", 0)


def test_hints_and_uids_of_any_kind_become_safe_names(storage: JobStorage) -> None:
    for uid in ("../../x", "a/b", "ä ö", ".", "", "x" * 500):
        file = storage.target(1, uid, 0).put("../" + uid, os.urandom(30_000))
        assert file.path.startswith("chk-1/")
        assert storage.store.exists(file.path)


def damage_file(storage: JobStorage, path: str, change: object) -> None:
    """Replace a file by a changed copy (other links to the old one keep their bytes)."""
    assert callable(change)
    local = storage.store.local_path(path)
    assert local is not None
    data = change(local.read_bytes())
    with contextlib.suppress(HoldfastError):
        local.unlink()
    local.write_bytes(data)

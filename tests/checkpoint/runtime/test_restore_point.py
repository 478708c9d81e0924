"""What `latest` leads to: a checkpoint of the flow's own, or what a run was restored from that completed none."""

from __future__ import annotations

import shutil
import time
from collections import Counter

import pytest

from checkpoint import (
    CheckpointSettings,
    CollectSink,
    Dataflow,
    GeneratorSource,
    KeyedProcessFunction,
    resolve_restore,
    run,
    start,
)
from checkpoint.storage.generations import read_origin
from checkpoint.storage.layout import JobId
from checkpoint.storage.storage import JobStorage, find_latest, find_origin
from checkpoint.storage.store import FileStore
from statebackend import Conflict, CorruptData, HoldfastError, NotFound, ValueStateDescriptor

KEYS = 7


class CountPerKey(KeyedProcessFunction):
    def open(self, ctx):
        self.count = ctx.state(ValueStateDescriptor("count", int, default=0))

    def process(self, record, ctx):
        self.count.update(self.count.value() + 1)
        yield (ctx.key, self.count.value())


def flow_of(sink, *, count, rate=None) -> Dataflow:
    flow = Dataflow("again")
    flow.source(GeneratorSource(lambda number: number % KEYS, count=count, rate=rate), uid="numbers") \
        .key_by(lambda number: number, key_type=int).process(CountPerKey(), uid="count").sink(sink, uid="out")
    return flow


def exact(records: int) -> Counter:
    return Counter((key, number) for key in range(KEYS) for number in range(1, len(range(key, records, KEYS)) + 1))


def end_before_the_first_checkpoint(path: str, folder: str) -> None:
    """A run that is restored, works, and ends with no checkpoint of its own, as after a crash."""
    handle = start(flow_of(CollectSink(), count=None, rate=10_000), checkpoint_dir=folder, restore=path,
                   settings=CheckpointSettings(interval="1h"))
    deadline = time.monotonic() + 60
    while not handle.has_started or not handle.records().get("count", {}).get("records_in", 0):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    handle.cancel(timeout=60)


@pytest.mark.parametrize("same_folder", [True, False])
def test_latest_is_what_a_run_was_restored_from_that_completed_no_checkpoint(same_folder, tmp_path):
    sink, before = CollectSink(), str(tmp_path / "before")
    folder = before if same_folder else str(tmp_path / "after")
    path = run(flow_of(sink, count=1_000), checkpoint_dir=before).checkpoint
    if same_folder:  # a newer checkpoint of the first job is not what the second was restored from
        run(flow_of(CollectSink(), count=1_500), checkpoint_dir=before, restore="latest",
            settings=CheckpointSettings(interval="1h", retained=5))
    end_before_the_first_checkpoint(path, folder)
    point = resolve_restore(folder, "again", "latest")
    assert point.url == path
    assert point.again
    result = run(flow_of(sink, count=2_000), checkpoint_dir=folder, restore="latest")
    assert Counter(sink.results) == exact(2_000)
    point = resolve_restore(folder, "again", "latest")
    assert point.url == result.checkpoint
    assert not point.again


def stop_with_savepoint(sink, checkpoints: str, savepoints: str, **how) -> str:
    """A run with checkpoints that stops with a savepoint a while after the last of them."""
    handle = start(flow_of(sink, count=20_000, rate=2_000), checkpoint_dir=checkpoints)
    deadline = time.monotonic() + 60
    while handle.records().get("count", {}).get("records_in", 0) < 200:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    handle.trigger_checkpoint(timeout=60)
    before = handle.records()["count"]["records_in"]
    while handle.records()["count"]["records_in"] < before + 200:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    path = handle.stop_with_savepoint(savepoints, timeout=60, **how)
    assert handle.wait(60).state == "FINISHED"
    return path


@pytest.mark.parametrize("how", [{"format": "native"}, {"drain": True, "format": "native"}, {"format": "open"}])
def test_latest_is_the_savepoint_that_a_run_stopped_with_so_nothing_is_written_twice(how, tmp_path):
    sink, folder = CollectSink(), str(tmp_path / "checkpoints")
    savepoint = stop_with_savepoint(sink, folder, str(tmp_path / "savepoints"), **how)
    committed = len(sink.results)
    point = resolve_restore(folder, "again", "latest")
    assert point.url == savepoint
    assert point.stopped
    assert not point.again
    result = run(flow_of(sink, count=3_000), checkpoint_dir=folder, restore="latest")
    assert committed >= 400
    assert Counter(sink.results) == exact(3_000)
    assert resolve_restore(folder, "again", "latest").url == result.checkpoint


@pytest.mark.parametrize("form", ["native", "open"])
def test_a_run_that_was_taken_over_does_not_say_where_latest_leads(form, tmp_path):
    folder = str(tmp_path / "checkpoints")
    older = start(flow_of(CollectSink(), count=None, rate=1_000), checkpoint_dir=folder,
                  settings=CheckpointSettings(interval="1h"))
    older.trigger_checkpoint(timeout=60)
    with JobStorage(folder, JobId(older.job_id)) as newer:
        newer.claim_generation()
        with pytest.raises(HoldfastError):
            older.stop_with_savepoint(str(tmp_path / "savepoints"), format=form, timeout=60)
        with pytest.raises(Conflict):
            older.wait(60)
        assert read_origin(newer.store) is None


def test_what_a_run_wrote_just_before_it_was_taken_over_does_not_say_where_latest_leads(tmp_path):
    folder, sink = str(tmp_path / "checkpoints"), CollectSink()
    first = start(flow_of(sink, count=None, rate=1_000), checkpoint_dir=folder, settings=CheckpointSettings(interval="1h"))
    path = first.trigger_checkpoint(timeout=60)
    first.cancel(timeout=60)
    with JobStorage(folder, JobId(first.job_id), job_name="again") as older, \
            JobStorage(folder, JobId(first.job_id), job_name="again") as newer:
        older.claim_generation()
        older.record_origin(str(tmp_path / "savepoint"), stopped_with=2)
        assert resolve_origin(folder, path) is not None
        newer.claim_generation()
        assert resolve_origin(folder, path) is None
        assert resolve_restore(folder, "again", "latest").url == path


def resolve_origin(folder, path):
    with FileStore.at(folder) as root:
        latest = find_latest(root, "again")
        assert latest.path == path
        return find_origin(root, "again", latest)


def test_a_savepoint_that_a_run_stopped_with_and_that_is_gone_is_named(tmp_path):
    savepoint = stop_with_savepoint(CollectSink(), str(tmp_path / "checkpoints"), str(tmp_path / "savepoints"))
    shutil.rmtree(savepoint)
    with pytest.raises(NotFound, match=r"stopped with a savepoint that is gone.*savepoints.*--restore PATH"):
        run(flow_of(CollectSink(), count=1_000), checkpoint_dir=str(tmp_path / "checkpoints"), restore="latest")


def test_a_checkpoint_that_is_gone_is_named_and_nothing_starts_fresh(tmp_path):
    path = run(flow_of(CollectSink(), count=1_000), checkpoint_dir=str(tmp_path / "before")).checkpoint
    end_before_the_first_checkpoint(path, str(tmp_path / "after"))
    shutil.rmtree(tmp_path / "before")
    with pytest.raises(NotFound, match=r"restored from.*before.*--restore PATH"):
        run(flow_of(CollectSink(), count=1_000), checkpoint_dir=str(tmp_path / "after"), restore="latest")
    assert resolve_restore(str(tmp_path / "after"), "another", "latest") is None


@pytest.mark.parametrize("damaged", ["generations/*.base", "origin"])
def test_a_damaged_record_of_the_job_is_named_with_the_way_out_which_works(damaged, tmp_path):
    sink, folder = CollectSink(), tmp_path / "checkpoints"
    first = run(flow_of(sink, count=500), checkpoint_dir=str(tmp_path / "before")).checkpoint
    path = run(flow_of(sink, count=1_000), checkpoint_dir=str(folder), restore=first).checkpoint
    (record,) = folder.glob(f"*/{damaged}")
    record.write_bytes(b"{")
    with pytest.raises(CorruptData, match=r"--restore PATH.*put back.*moved away") as caught:
        run(flow_of(sink, count=1_500), checkpoint_dir=str(folder), restore="latest")
    assert caught.value.context["path"] == str(record)
    run(flow_of(sink, count=1_500), checkpoint_dir=str(folder), restore=path)
    record.parents[len(damaged.split("/")) - 1].rename(tmp_path / "moved")
    run(flow_of(sink, count=2_000), checkpoint_dir=str(folder), restore="latest")
    assert Counter(sink.results) == exact(2_000)


def test_a_run_without_a_checkpoint_folder_leaves_nothing_to_restore_from(tmp_path):
    assert run(flow_of(CollectSink(), count=10), settings=CheckpointSettings(interval="10ms")).checkpoint is None
    handle = start(flow_of(CollectSink(), count=None, rate=1_000))
    savepoint = handle.stop_with_savepoint(str(tmp_path), timeout=60)
    assert handle.wait(60).checkpoint == savepoint


def test_a_job_that_has_run_had_started():
    handle = start(flow_of(CollectSink(), count=10))
    handle.wait(60)
    assert handle.has_started

"""Windows made of namespaces and timers: open ones outlive a restore at another parallelism, on every backend."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from checkpoint import (
    CollectSink,
    Dataflow,
    FileSource,
    KeyedProcessFunction,
    WatermarkStrategy,
    check_restore,
    resolve_restore,
    run,
    start,
)
from statebackend import ListStateDescriptor, MapStateDescriptor

GAP, USERS = 10, 5


class Sessions(KeyedProcessFunction):
    """The numbers of each session of a key; a late one may join two sessions."""

    def open(self, ctx):
        self.ends = ctx.state(MapStateDescriptor("ends", int, int))
        self.numbers = ctx.state(ListStateDescriptor("numbers", int), namespace_type=int)

    def process(self, event, ctx):
        start, end = ctx.timestamp, ctx.timestamp + GAP
        self.numbers.set_current_namespace(start)
        self.numbers.add(event["at"])
        joined = [(other, until) for other, until in self.ends.entries() if other <= end and start <= until]
        for other, until in joined:
            self.ends.remove(other)
            ctx.timers.delete_event_time_timer(until)
        first, last = min([start, *(other for other, _ in joined)]), max([end, *(until for _, until in joined)])
        self.numbers.merge_namespaces(first, {start, *(other for other, _ in joined)} - {first})
        self.ends.put(first, last)
        ctx.timers.register_event_time_timer(last)

    def on_timer(self, timestamp, ctx):
        for began, end in list(self.ends.entries()):
            if end == timestamp:
                self.numbers.set_current_namespace(began)
                yield (ctx.key, sorted(self.numbers.get()))
                self.numbers.clear()
                self.ends.remove(began)


def sessions_of(folder: Path, sink: CollectSink, watch: str | None = None) -> Dataflow:
    flow = Dataflow("sessions")
    flow.source(FileSource(f"{folder}/*.jsonl", watch=watch), uid="events",
                watermarks=WatermarkStrategy.bounded_out_of_orderness(1_000, "at")) \
        .key_by("user", key_type=int).process(Sessions(), uid="sessions").sink(sink, uid="out")
    return flow


def write(path: Path, *times: int) -> None:
    path.write_text("".join(json.dumps({"user": user, "at": at}) + "\n" for at in times for user in range(USERS)))


@pytest.mark.parametrize("backend", ["memory", "filesystem", "rocksdb"])
def test_sessions_that_are_open_in_a_savepoint_are_joined_and_end_after_the_restore(backend, tmp_path):
    (tmp_path / "in").mkdir()
    write(tmp_path / "in/a.jsonl", 0, 16)
    sink = CollectSink()
    handle = start(sessions_of(tmp_path / "in", sink, watch="20ms"), backend=backend, parallelism={"sessions": 2})
    deadline = time.monotonic() + 60
    while handle.records().get("sessions", {}).get("records_in", 0) < 2 * USERS:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    path = handle.stop_with_savepoint(str(tmp_path / "savepoints"), timeout=60)
    assert sink.results == []
    write(tmp_path / "in/b.jsonl", 8, 100)
    flow = sessions_of(tmp_path / "in", sink)
    assert check_restore(flow, resolve_restore(None, flow, path).metadata)
    run(flow, backend=backend, restore=path, parallelism={"sessions": 3})
    assert sorted(sink.results) == sorted((user, times) for user in range(USERS) for times in ([0, 8, 16], [100]))


def test_a_restore_into_state_without_its_namespaces_is_refused_beforehand(tmp_path):
    class Plain(Sessions):
        def open(self, ctx):
            ctx.state(ListStateDescriptor("numbers", int))

    (tmp_path / "in").mkdir()
    write(tmp_path / "in/a.jsonl", 0)
    path = run(sessions_of(tmp_path / "in", CollectSink()), checkpoint_dir=str(tmp_path / "chk")).checkpoint
    flow = Dataflow("sessions")
    flow.source(FileSource(f"{tmp_path}/in/*.jsonl"), uid="events").key_by("user", key_type=int) \
        .process(Plain(), uid="sessions").sink(CollectSink(), uid="out")
    report = check_restore(flow, resolve_restore(None, flow, path).metadata)
    assert not report

"""Records in flight: savepoints of a real unaligned checkpoint are read, re-cut, renamed and restored exactly."""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

import savepoint
from checkpoint import (
    CheckpointSettings,
    CollectSink,
    Dataflow,
    GeneratorSource,
    KeyedProcessFunction,
    Sink,
    SinkWriter,
    run,
    start,
)
from checkpoint.dataflow.keys import BroadcastPartitioner
from checkpoint.runtime.contracts import InFlight, Records
from checkpoint.runtime.in_flight import EdgeShape, redistribute_in_flight
from savepoint.diff import changes
from savepoint.inflight import Channel, ends_of, renamed_edge
from savepoint.patch import checked
from statebackend import InvalidRequest, NotFound, ValueStateDescriptor

RECORDS, KEYS = 60_000, 37


@dataclass
class Click:
    user: int
    number: int


class CountPerUser(KeyedProcessFunction):
    def open(self, ctx: Any) -> None:
        self.count = ctx.state(ValueStateDescriptor("count", int, default=0))

    def process(self, click: Click, ctx: Any) -> Any:
        self.count.update(self.count.value() + 1)
        yield (ctx.key, self.count.value())


class SlowSink(Sink):
    """Rests at each batch until it is told to hurry, so that queues fill up in front of it."""

    def __init__(self) -> None:
        self.hurry = threading.Event()
        self.inner = CollectSink()

    def writer(self, ctx: Any) -> SinkWriter:
        outer, inner = self, self.inner.writer(ctx)

        class Slow(SinkWriter):
            def write(self, values: Any, timestamps: Any) -> None:
                if values:
                    outer.hurry.wait(0.1)
                inner.write(values, timestamps)

            snapshot, checkpoint_completed, close = inner.snapshot, inner.checkpoint_completed, inner.close

        return Slow()


def counting(sink: Sink, *, max_parallelism: int = 128, uid: str = "count", chaining: bool = True) -> Dataflow:
    flow = Dataflow("counting", max_parallelism=max_parallelism, chaining=chaining)
    clicks = flow.source(GeneratorSource(lambda number: number, count=RECORDS), uid="numbers") \
        .map(lambda number: Click(number % KEYS, number), uid="clicks", record_type=Click)
    clicks.key_by("user", key_type=int).process(CountPerUser(), uid=uid).sink(sink, uid="out")
    return flow


def exact() -> Counter[tuple[int, int]]:
    return Counter((key, number) for key in range(KEYS) for number in range(1, len(range(key, RECORDS, KEYS)) + 1))


def restored(path: Any, folder: Path, *, parallelism: int, **options: Any) -> Counter[tuple[int, int]]:
    sink = CollectSink()
    run(counting(sink, **options), checkpoint_dir=str(folder), restore=str(path), parallelism=parallelism)
    return Counter(sink.results)


@pytest.fixture(scope="module")
def unaligned(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An unaligned checkpoint of a running flow with full queues."""
    sink = SlowSink()
    handle = start(counting(sink, chaining=False), checkpoint_dir=str(tmp_path_factory.mktemp("job")),
                   settings=CheckpointSettings(unaligned=True), channel_credit=8,
                   parallelism={"numbers": 1, "clicks": 2, "count": 2, "out": 2})
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not any(
            task["load"]["back_pressured"] > 0 for task in handle.statistics()["tasks"]
            if task["task"] == "numbers" and "load" in task):
        time.sleep(0.02)
    path = handle.trigger_checkpoint(timeout=120)
    sink.hurry.set()
    handle.cancel(timeout=60)
    return path


@pytest.fixture(scope="module")
def opened_path(unaligned: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("open") / "sp"
    savepoint.convert_savepoint(unaligned, path)
    return path


def in_flight(path: Any) -> dict[str, int]:
    with savepoint.open(path) as opened:
        found: Counter[str] = Counter()
        for info in opened.operators():
            found.update({edge: number or 0 for edge, number in info.in_flight.items()})
        return dict(found)


def test_records_in_flight_are_parquet_that_anybody_reads(unaligned: str, opened_path: Path) -> None:
    import duckdb

    told = in_flight(opened_path)
    assert told["clicks->count#0"] > 0
    with savepoint.open(opened_path) as opened, savepoint.open(unaligned) as native:
        assert opened.metadata.unaligned
        for edge, number in told.items():
            assert opened.in_flight(edge) == native.in_flight(edge)
            assert opened.in_flight(edge).num_rows == number
        clicks = opened.in_flight("clicks->count#0").to_pylist()
        assert all(row["value"]["user"] == row["value"]["number"] % KEYS for row in clicks)
        with pytest.raises(NotFound, match="clicks->count#0"):
            opened.in_flight("click->count#0")
    [[count, users]] = duckdb.sql(f"select count(*), max(value.user) from read_parquet('{opened_path}/*/inflight/"
                                  "clicks-%3Ecount%230.parquet', union_by_name = true)").fetchall()
    assert (count, users) == (told["clicks->count#0"], max(row["value"]["user"] for row in clicks))
    assert savepoint.verify_savepoint(opened_path)


def test_records_in_flight_are_a_table_in_sql(unaligned: str, opened_path: Path) -> None:
    for path in (unaligned, opened_path):
        with savepoint.open(path) as opened:
            kept = opened.in_flight("clicks->count#0")
            mine = sum(operator == "count" for operator in kept.column("operator").to_pylist())
            [row] = opened.query("select count(*) n, max(receiver) r from COUNT.InFlight where edge = 'clicks->count#0'") \
                .read_all().to_pylist()
            assert mine > 0
            assert row == {"n": mine, "r": 1}
            assert opened.query("select * from count.inflight").read_all().to_pylist() == \
                opened.kept_in_flight("count").to_pylist()
            assert set(opened.kept_in_flight("count").column("edge").to_pylist()) >= {"clicks->count#0"}
            with pytest.raises(NotFound, match=r"cuont\.inflight"):
                opened.query("select * from cuont.inflight")


def test_a_diff_tells_of_records_in_flight(unaligned: str, opened_path: Path, tmp_path: Path) -> None:
    assert not savepoint.compare(unaligned, opened_path)
    with savepoint.open(opened_path) as opened:
        kept = {entry.uid: opened.kept_in_flight(entry.uid).num_rows for entry in opened.metadata.operators}
        metadata = opened.metadata
    same = {item.uid: item.unchanged for item in savepoint.compare(unaligned, opened_path).states
            if item.state == "inflight"}
    assert same == {uid: number for uid, number in kept.items() if number}
    other = tmp_path / "less"
    shutil.copytree(opened_path, other)
    subtasks = [replace(subtask, in_flight=None) for subtask in metadata.operator("count").subtasks]
    operators = tuple(replace(entry, subtasks=tuple(subtasks)) if entry.uid == "count" else entry
                      for entry in metadata.operators)
    (other / "_metadata").write_bytes(replace(metadata, operators=operators).to_bytes())
    [found] = [item for item in savepoint.compare(opened_path, other).states if not item.is_none]
    assert (found.uid, found.state) == ("count", "inflight")
    assert (found.added, found.removed, found.unchanged) == (0, kept["count"], 0)
    rows = list(changes(other, opened_path))
    assert {row["change"] for row in rows} == {"added"}
    assert len(rows) == kept["count"]
    assert all(row["after"]["user"] == row["after"]["number"] % KEYS for row in rows if row["edge"] == "clicks->count#0")
    with savepoint.open(other) as opened, pytest.raises(InvalidRequest, match="can't change records in flight"):
        checked(opened, rows)


@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_an_open_savepoint_of_an_unaligned_checkpoint_restores_exactly(opened_path, tmp_path, parallelism) -> None:
    assert restored(opened_path, tmp_path / "chk", parallelism=parallelism) == exact()


@pytest.mark.parametrize("parallelism", [1, 3])
def test_a_savepoint_with_records_in_flight_is_re_cut_for_another_layout(opened_path, tmp_path, parallelism) -> None:
    savepoint.rescale_savepoint(opened_path, tmp_path / "sp", parallelism=3)
    assert savepoint.verify_savepoint(tmp_path / "sp")
    assert in_flight(tmp_path / "sp") == in_flight(opened_path)
    assert restored(tmp_path / "sp", tmp_path / "chk", parallelism=parallelism) == exact()


def test_a_checkpoint_with_records_in_flight_gets_another_max_parallelism_and_uid(unaligned, tmp_path) -> None:
    savepoint.rescale_savepoint(unaligned, tmp_path / "wide", max_parallelism=300)
    savepoint.Transform(tmp_path / "wide").rename_operator("count", "counts").set_parallelism(4).write(tmp_path / "new")
    savepoint.convert_savepoint(tmp_path / "new", tmp_path / "native", format="native")
    assert set(in_flight(tmp_path / "new")) == {edge.replace("count#", "counts#").replace("count-", "counts-")
                                                for edge in in_flight(tmp_path / "wide")}
    for path in ("new", "native"):
        assert savepoint.verify_savepoint(tmp_path / path)
        assert restored(tmp_path / path, tmp_path / f"chk-{path}", parallelism=2, max_parallelism=300,
                        uid="counts") == exact()
    assert restored(tmp_path / "wide", tmp_path / "chk", parallelism=2, max_parallelism=300) == exact()


def test_an_edit_keeps_records_in_flight(opened_path, tmp_path) -> None:
    with savepoint.open(opened_path) as opened:
        user = opened.in_flight("clicks->count#0").column("value")[0].as_py()["user"]
    patch = [{"op": "set", "operator": "count", "state": "count", "key": user, "value": 10**6}]
    with savepoint.Edit(opened_path, patch) as edit:
        edit.write(tmp_path / "sp")
    result = restored(tmp_path / "sp", tmp_path / "chk", parallelism=2)
    assert sum(result.values()) == RECORDS
    assert max(number for key, number in result if key == user) > 10**6


def test_records_to_and_from_a_dropped_operator_go_with_it(opened_path, tmp_path) -> None:
    savepoint.Transform(opened_path).drop_operator("count").write(tmp_path / "sp")
    assert not any("count" in edge for edge in in_flight(tmp_path / "sp"))
    assert savepoint.verify_savepoint(tmp_path / "sp")


def test_damaged_records_in_flight_are_found(opened_path, tmp_path) -> None:
    savepoint.copy_savepoint(opened_path, tmp_path / "sp")
    file = next((tmp_path / "sp").glob("*/inflight/*.parquet"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    [problem] = savepoint.verify_savepoint(tmp_path / "sp").problems
    assert problem.path is not None
    assert problem.path.endswith(file.name)


def test_records_that_arrow_has_no_type_for_are_shown_as_json_and_kept_exactly(tmp_path) -> None:
    from checkpoint.dataflow.records import RecordCodec
    from checkpoint.storage.files import CheckpointSource
    from checkpoint.storage.store import FileStore
    from savepoint.inflight import channel_table, stored_channels, write_channels

    mixed = Records([1, "two", (3, {4}), {"five": None}, UUID(int=6), 2**70], [1, None, 3, 4, 5, 6], [("a", 1)] * 6)
    store = FileStore.at(str(tmp_path))
    channel = Channel("a->b#0", 0, 1, True, (RecordCodec().encode(mixed), RecordCodec().encode(Records([{}]))), (2, 3))
    notes = write_channels(store.writer, "b", [(1, [channel])])
    [again] = stored_channels(notes[1][0], CheckpointSource(store))
    assert again == channel
    values = channel_table([("b", 1, again)]).column("value").to_pylist()
    assert values == ["1", '"two"', "[3, [4]]", '{"five": null}', f'"{UUID(int=6)}"', str(2**70), "{}"]


@pytest.mark.parametrize("edge", ["a->b#0", "a:late->b#1", "x->y:z->b:c#0"])
def test_edges_are_renamed_by_the_uids_there_are(edge) -> None:
    uids = {"a", "b", "x->y:z", "b:c"}
    sender, receiver = ends_of(edge, uids)
    assert {sender, receiver} <= uids
    assert renamed_edge(edge, uids, {}) == edge
    assert renamed_edge(edge, uids, {sender: "S", receiver: "R"}) == \
        edge.replace(f"->{receiver}#", "->R#").replace(sender, "S", 1)


def test_broadcast_records_follow_the_state_of_their_receiver_through_re_cuts() -> None:
    """Of two receivers, cut for three, restored as four: subtasks 0..3 have the state of 0, 1, 0 and then 0 again."""
    parts = [InFlight("a->b#0", 0, receiver, (Records([receiver]),), False, (2, 3)) for receiver in (0, 1)]
    dealt = redistribute_in_flight(parts, {"a->b#0": EdgeShape("b", BroadcastPartitioner(), 4, 3)})
    assert {subtask: [part.batches[0].values for part in held] for (_, subtask), held in dealt.items()} == \
        {0: [[0]], 1: [[1]], 2: [[0]], 3: [[0]]}

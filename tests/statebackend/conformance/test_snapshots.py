"""Snapshots: what is in them, incremental ones, failures and aborts, rescaling, changes of backend and of schema."""

from __future__ import annotations

import threading
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from statebackend import (
    AggregatingStateDescriptor,
    Conflict,
    CorruptData,
    IncompatibleState,
    KeyGroupRange,
    ListStateDescriptor,
    LocalFiles,
    MapStateDescriptor,
    NotFound,
    ReducingStateDescriptor,
    StateFile,
    TimeDomain,
    TtlConfig,
    Unavailable,
    ValueStateDescriptor,
    key_group_of,
    key_group_range,
)

BACKENDS = ["memory", "filesystem", "rocksdb"]


class States:
    """One state of each kind."""

    def __init__(self, keyed: Any) -> None:
        self.keyed = keyed
        self.value = keyed.state(ValueStateDescriptor("value", str))
        self.events = keyed.state(ListStateDescriptor("events", int))
        self.seen = keyed.state(MapStateDescriptor("seen", str, float))
        self.total = keyed.state(ReducingStateDescriptor("total", int, "sum"), namespace_type=int)
        self.mean = keyed.state(AggregatingStateDescriptor("mean", float, "avg"))

    def fill(self, keys: Any) -> None:
        for key in keys:
            self.keyed.set_current_key(key)
            self.value.update(f"v{key}")
            self.events.add_all([key, key + 1])
            self.seen.put_all({"a": 1.0, "b": float(key)})
            for namespace in (None, key % 3):
                self.total.set_current_namespace(namespace)
                self.total.add(key)
            self.mean.add(float(key))
            self.keyed.timers.register(TimeDomain.EVENT, key)

    def content(self) -> dict[Any, Any]:
        found = {}
        for key in sorted({*self.value.stream_keys(), *self.events.stream_keys(), *self.seen.stream_keys()}):
            self.keyed.set_current_key(key)
            totals = {}
            for namespace in self.total.namespaces():
                self.total.set_current_namespace(namespace)
                totals[namespace] = self.total.get()
            found[key] = (self.value.value(), self.events.get(), list(self.seen.entries()), totals, self.mean.get())
        found["timers"] = sorted(timer.timestamp for timer in self.keyed.timers.timers(TimeDomain.EVENT))
        return found


def _united(subtasks: list[Any]) -> dict[Any, Any]:
    found: dict[Any, Any] = {"timers": []}
    for subtask in subtasks:
        part = States(subtask).content()
        found["timers"] = sorted(found["timers"] + part.pop("timers"))
        assert not set(part) & set(found)
        found.update(part)
    return found


def test_later_writes_are_not_in_a_snapshot(stage: Any) -> None:
    keyed = stage.keyed(int)
    states = States(keyed)
    states.fill(range(20))
    before = states.content()
    pending = keyed.snapshot(1, stage.files)
    states.fill(range(10, 30))
    keyed.set_current_key(3)
    for state in (states.value, states.events, states.seen, states.mean):
        state.clear()
    keyed.set_current_key(4)
    states.seen.remove("a")
    states.events.add(99)
    keyed.timers.delete(TimeDomain.EVENT, 4)
    after = states.content()
    handle = pending.run()
    assert _united(stage.restored([handle], int)) == before
    assert states.content() == after
    assert _united(stage.restored([stage.checkpoint(keyed)], int)) == after


def test_a_snapshot_is_written_on_another_thread_while_the_owner_goes_on(stage: Any) -> None:
    keyed = stage.keyed(int)
    states = States(keyed)
    states.fill(range(300))
    before = states.content()
    pending, handles = keyed.snapshot(1, stage.files), []
    writer = threading.Thread(target=lambda: handles.append(pending.run()))
    writer.start()
    states.fill(range(200, 500))
    states.total.set_current_namespace(None)
    keys = pa.array(range(200, 500))
    states.total.add_many(keys, keys)
    writer.join()
    keyed.checkpoint_completed(1)
    assert _united(stage.restored(handles, int)) == before
    assert _united(stage.restored([stage.checkpoint(keyed)], int)) == states.content()


def test_incremental_snapshots_follow_every_change(stage: Any) -> None:
    keyed = stage.keyed(int)
    states = States(keyed)
    states.fill(range(40))
    for round_ in range(6):
        stage.checkpoint(keyed)
        keyed.set_current_key(round_)
        states.value.clear()
        states.seen.remove("a")
        states.seen.put(f"new{round_}", 1.0)
        keyed.set_current_key(round_ + 10)
        states.seen.clear()
        states.events.clear()
        states.events.add(round_)
        keyed.set_current_key(round_ + 20)
        states.events.add(round_)
        states.seen.clear()
        states.seen.put("only", 2.0)
        states.total.set_current_namespace(None)
        states.total.clear()
        keyed.timers.delete(TimeDomain.EVENT, round_ + 20)
        states.fill([100 + round_])
    handle = stage.checkpoint(keyed)
    assert _united(stage.restored([handle], int, parallelism=2)) == states.content()


def test_changes_of_failed_aborted_and_unfinished_snapshots_are_in_the_next(stage: Any) -> None:
    keyed = stage.keyed(int)
    states = States(keyed)
    states.fill(range(10))
    stage.checkpoint(keyed)
    states.fill([20])
    aborted = keyed.snapshot(101, stage.files).run()
    states.fill([21])
    failing = keyed.snapshot(102, FullDisk(stage.folder / "full"))
    states.fill([22])
    with pytest.raises(Unavailable):
        failing.run()
    cancelled = keyed.snapshot(103, stage.files)
    states.fill([23])
    cancelled.cancel()
    cancelled.cancel()
    with pytest.raises(Conflict):
        cancelled.run()
    unfinished = keyed.snapshot(104, stage.files)
    states.fill([24])
    keyed.checkpoint_aborted(101)
    keyed.set_current_key(1)
    states.value.clear()
    handle = stage.checkpoint(keyed)
    for file in {file.path for file in aborted.files} - {file.path for file in handle.files}:
        (stage.files.directory / file).unlink()
    assert _united(stage.restored([handle], int)) == states.content()
    unfinished.cancel()
    states.fill([25])
    assert _united(stage.restored([stage.checkpoint(keyed)], int)) == states.content()


def test_snapshots_may_overlap_and_end_in_any_order(stage: Any) -> None:
    keyed = stage.keyed(int)
    states = States(keyed)
    contents, pending = [], []
    for number in range(3):
        states.fill(range(number * 5, number * 5 + 10))
        contents.append(states.content())
        pending.append(keyed.snapshot(number, stage.files))
    handles = [None, None, None]
    for number in (1, 0, 2):
        handles[number] = pending[number].run()
    keyed.checkpoint_completed(1)
    keyed.checkpoint_completed(0)
    states.fill([77])
    contents.append(states.content())
    handles.append(keyed.snapshot(3, stage.files).run())
    for handle, content in zip(handles, contents):
        assert _united(stage.restored([handle], int)) == content


def test_a_completed_checkpoint_may_lose_its_predecessors_files(stage: Any) -> None:
    keyed = stage.keyed(int)
    states = States(keyed)
    states.fill(range(10))
    for round_ in range(5):
        states.fill([round_ + 50])
        handle = stage.checkpoint(keyed, full=round_ == 3)
        kept = {file.path for file in handle.files}
        for path in stage.files.directory.iterdir():
            if path.name not in kept:
                path.unlink()
    assert _united(stage.restored([handle], int)) == states.content()


def test_a_snapshot_with_nothing_changed_stores_nothing_new_or_little(stage: Any) -> None:
    keyed = stage.keyed(int)
    States(keyed).fill(range(50))
    first = stage.checkpoint(keyed)
    second = stage.checkpoint(keyed)
    assert _united(stage.restored([second], int)) == _united(stage.restored([first], int))
    if stage.name != "memory":
        assert second.new_bytes < first.new_bytes / 4


@pytest.mark.parametrize("other", BACKENDS)
@pytest.mark.parametrize(("old", "new"), [(1, 3), (2, 3), (4, 1)])
def test_state_moves_to_any_parallelism_and_any_backend(stage: Any, other: str, old: int, new: int) -> None:
    subtasks = stage.restored([], int, parallelism=old)
    groups = [subtask.key_groups for subtask in subtasks]
    all_states = [States(subtask) for subtask in subtasks]
    for first in (range(40), range(20, 60)):
        for range_, states in zip(groups, all_states):
            states.fill([key for key in first if key_group_of(key, 128) in range_])
        handles = [stage.checkpoint(subtask) for subtask in subtasks]
    expected = _united(subtasks)
    assert len(expected) == 61
    moved = stage.restored(handles, int, parallelism=new, name=other)
    assert _united(moved) == expected
    again = [stage.checkpoint(subtask) for subtask in moved]
    assert _united(stage.restored(again, int, parallelism=2)) == expected


def test_state_that_nobody_registers_stays_in_later_snapshots(stage: Any) -> None:
    keyed = stage.keyed(int)
    states = States(keyed)
    states.fill(range(10))
    first = stage.checkpoint(keyed)
    states.fill([3])
    expected = states.content()
    handle = stage.checkpoint(keyed)
    later = stage.restored([handle], int)[0]
    assert {schema.name for schema in later.schemas()} >= {"value", "events", "seen", "total", "mean"}
    value = later.state(ValueStateDescriptor("value", str))
    later.set_current_key(3)
    value.update("changed")
    one = stage.checkpoint(later)
    value.update("again")
    two = stage.checkpoint(later)
    for snapshot, wanted in ((one, "changed"), (two, "again")):
        found = _united(stage.restored([snapshot], int, parallelism=2))
        assert found[3][0] == wanted
        assert {**found, 3: None} == {**expected, 3: None}
        assert found[3][1:] == expected[3][1:]
    late = later.state(ListStateDescriptor("events", int))
    late.add(5)
    assert late.get() == [*expected[3][1], 5]
    assert _united(stage.restored([stage.checkpoint(later)], int))[3][1] == [*expected[3][1], 5]
    assert first.files


@dataclass
class Point:
    x: int


def test_schema_changes_are_migrated_or_refused_when_registered(stage: Any) -> None:
    keyed = stage.keyed()
    keyed.set_current_key("a")
    keyed.state(ValueStateDescriptor("point", Point)).update(Point(3))
    keyed.state(ListStateDescriptor("small", pa.int16())).add_all([1, 2])
    keyed.state(MapStateDescriptor("m", str, pa.int32())).put("k", 5)
    handle = stage.checkpoint(keyed)
    wider = make_dataclass("Point", [("x", int), ("y", int, 7)])
    later = stage.restored([handle])[0]
    later.set_current_key("a")
    with pytest.raises(IncompatibleState, match="point"):
        later.state(ValueStateDescriptor("point", str))
    with pytest.raises(IncompatibleState, match="small"):
        later.state(ValueStateDescriptor("small", int))
    with pytest.raises(IncompatibleState):
        later.state(MapStateDescriptor("m", int, int))
    point = later.state(ValueStateDescriptor("point", wider))
    assert point.value() == wider(3, 7)
    assert later.state(ListStateDescriptor("small", int)).get() == [1, 2]
    assert later.state(MapStateDescriptor("m", str, int)).get("k") == 5
    point.update(wider(1, 2))
    again = stage.restored([stage.checkpoint(later)])[0]
    again.set_current_key("a")
    assert again.state(ValueStateDescriptor("point", wider)).value() == wider(1, 2)
    assert again.state(ListStateDescriptor("small", int)).get() == [1, 2]


WIDER = make_dataclass("Point", [("x", int), ("y", int, 7)])
BARE = make_dataclass("Pair", [("left", int)])
PAIR = make_dataclass("Pair", [("left", int), ("right", int)])


class Evolving:
    """States that an upgrade of the job migrates: a field more, a field less, wider numbers, TTL."""

    def __init__(self, keyed: Any, *, upgraded: bool) -> None:
        self.keyed = keyed
        self.upgraded = upgraded
        self.point = keyed.state(ValueStateDescriptor("point", WIDER if upgraded else Point))
        self.pair = keyed.state(ValueStateDescriptor("pair", BARE if upgraded else PAIR))
        self.small = keyed.state(ListStateDescriptor("small", pa.int32() if upgraded else pa.int16()))
        self.scores = keyed.state(MapStateDescriptor("scores", str, pa.int64() if upgraded else pa.int32()))
        self.aged = keyed.state(ValueStateDescriptor("aged", str, ttl=TtlConfig("1h") if upgraded else None))

    def fill(self, keys: Any) -> None:
        for key in keys:
            self.keyed.set_current_key(key)
            self.point.update(WIDER(key, 2 * key) if self.upgraded else Point(key))
            self.pair.update(BARE(key) if self.upgraded else PAIR(key, key))
            self.small.add(key)
            self.scores.put("a", key)
            self.aged.update(str(key))

    def content(self) -> dict[int, Any]:
        found = {}
        for key in list(self.point.stream_keys()):
            self.keyed.set_current_key(key)
            found[key] = (self.point.value(), self.pair.value(), self.small.get(), dict(self.scores.entries()),
                          self.aged.value())
        return found


@pytest.mark.parametrize("upgraded", [0, 1])
@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_subtasks_of_which_one_has_not_registered_a_migrated_state_yet_are_restored_together(
        stage: Any, upgraded: int, parallelism: int) -> None:
    old = [stage.keyed(int, key_groups=key_group_range(index, 2, 128)) for index in range(2)]
    mine = [[key for key in range(60) if key_group_of(key, 128) in subtask.key_groups] for subtask in old]
    for subtask, keys in zip(old, mine):
        Evolving(subtask, upgraded=False).fill(keys)
    mixed = stage.restored([stage.checkpoint(subtask) for subtask in old], int, parallelism=2)
    Evolving(mixed[upgraded], upgraded=True).fill(mine[upgraded][:10])
    handles = [stage.checkpoint(subtask) for subtask in mixed]
    expected = {key: (WIDER(key, 7), BARE(key), [key], {"a": key}, str(key)) for key in range(60)} | {
        key: (WIDER(key, 2 * key), BARE(key), [key, key], {"a": key}, str(key)) for key in mine[upgraded][:10]}
    for name in BACKENDS:
        found: dict[int, Any] = {}
        later = stage.restored(handles, int, parallelism=parallelism, name=name)
        unregistered = [stage.checkpoint(subtask) for subtask in later]
        for subtask in later:
            found |= Evolving(subtask, upgraded=True).content()
        assert found == expected
        (again,) = stage.restored(unregistered, int, name=stage.name)
        states = Evolving(again, upgraded=True)
        assert states.content() == expected
    stage.clock.advance(3_600_000)
    assert {values[4] for values in states.content().values()} == {None}


def test_another_key_type_or_max_parallelism_is_refused(stage: Any) -> None:
    keyed = stage.keyed(int)
    States(keyed).fill(range(3))
    handle = stage.checkpoint(keyed)
    with pytest.raises(IncompatibleState, match="key type"):
        stage.keyed(str, restore=[handle])
    with pytest.raises(IncompatibleState, match="max parallelism"):
        stage.keyed(int, restore=[handle], max_parallelism=64, key_groups=KeyGroupRange(0, 63))


class FullDisk:
    """A target that takes some bytes and then has no room."""

    def __init__(self, folder: Path) -> None:
        self.folder = LocalFiles(folder)

    def create(self, hint: str, *, shared: bool) -> Any:
        return _FullWriter(self.folder.create(hint, shared=shared))

    def upload(self, local: Path, hint: str, *, shared: bool) -> StateFile:
        raise Unavailable("no space left on device")


class _FullWriter:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def write(self, data: Any) -> int:
        raise OSError(28, "No space left on device")

    def finish(self) -> StateFile:
        raise OSError(28, "No space left on device")

    def abort(self) -> None:
        self._inner.abort()


def test_a_full_disk_fails_the_snapshot_and_leaves_nothing_behind(stage: Any) -> None:
    keyed = stage.keyed(int)
    states = States(keyed)
    states.fill(range(10))
    expected = states.content()
    target = FullDisk(stage.folder / "full")
    with pytest.raises(Unavailable, match=r"(?i)no space"):
        keyed.snapshot(1, target).run()
    assert list((stage.folder / "full").iterdir()) == []
    assert states.content() == expected
    assert _united(stage.restored([stage.checkpoint(keyed)], int)) == expected


@pytest.mark.parametrize("damage", ["cut", "flip", "gone"])
def test_a_damaged_file_is_named_and_nothing_is_restored(stage: Any, damage: str) -> None:
    keyed = stage.keyed(int)
    States(keyed).fill(range(100))
    handle = stage.checkpoint(keyed)
    largest = max(handle.files, key=lambda file: file.size)
    path = stage.files.directory / largest.path
    data = bytearray(path.read_bytes())
    path.unlink()
    if damage == "cut":
        path.write_bytes(data[:len(data) // 2])
    elif damage == "flip":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    with pytest.raises(NotFound if damage == "gone" else CorruptData, match=path.name):
        States(stage.restored([handle], int)[0]).content()


def test_a_snapshot_runs_once_and_never_after_cancel(stage: Any) -> None:
    keyed = stage.keyed()
    pending = keyed.snapshot(1, stage.files)
    pending.run()
    with pytest.raises(Conflict):
        pending.run()

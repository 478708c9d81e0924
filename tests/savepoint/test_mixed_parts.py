"""Checkpoints of which only some parts were migrated: they are read, queried, converted, compared and restored as one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

import savepoint
from checkpoint.storage.files import CheckpointTarget
from checkpoint.storage.metadata import CheckpointMetadata, OperatorEntry, SubtaskEntry
from checkpoint.storage.opening import open_checkpoint
from checkpoint.storage.store import FileStore
from statebackend import (
    IncompatibleState,
    ListStateDescriptor,
    ManualClock,
    MapStateDescriptor,
    TimeDomain,
    TtlConfig,
    ValueStateDescriptor,
    create_backend,
    key_group_of,
    key_group_range,
)

BACKENDS = ["filesystem", "rocksdb"]
POINT, WIDER = make_dataclass("Point", [("x", int)]), make_dataclass("Point", [("x", int), ("y", int, 7)])
TAKEN = 5_000_000
HOUR = 3_600_000


class States:
    """States that an upgrade migrates, one that only one subtask has, and one with a namespace that only one has seen."""

    def __init__(self, keyed: Any, *, upgraded: bool) -> None:
        self.keyed, self.upgraded = keyed, upgraded
        self.point = keyed.state(ValueStateDescriptor("point", WIDER if upgraded else POINT))
        self.small = keyed.state(ListStateDescriptor("small", pa.int32() if upgraded else pa.int16()))
        self.scores = keyed.state(MapStateDescriptor("scores", str, pa.int64() if upgraded else pa.int32()))
        self.aged = keyed.state(ValueStateDescriptor("aged", str, ttl=TtlConfig("1h") if upgraded else None))
        self.late = keyed.state(ValueStateDescriptor(
            "late", str, ttl=TtlConfig("1h", time=TimeDomain.EVENT) if upgraded else None))
        self.total = keyed.state(ValueStateDescriptor("total", int), namespace_type=int if upgraded else None)

    def fill(self, keys: list[int]) -> None:
        for key in keys:
            self.keyed.set_current_key(key)
            self.point.update(WIDER(key, 2 * key) if self.upgraded else POINT(key))
            self.small.update([key, key + 1])
            self.scores.put("a", key)
            self.aged.update(str(key))
            self.late.update(str(key))
            self.total.update(key)

    def content(self) -> dict[int, Any]:
        found = {}
        for key in list(self.point.stream_keys()):
            self.keyed.set_current_key(key)
            found[key] = (self.point.value(), self.small.get(), dict(self.scores.entries()), self.aged.value(),
                          self.late.value(), self.total.value())
        return found


def keys_of(index: int) -> list[int]:
    return [key for key in range(60) if key_group_of(key, 128) in key_group_range(index, 2, 128)]


def written(store: FileStore, place: str, subtasks: list[Any]) -> None:
    entry = OperatorEntry("count", "count", 2, 128, tuple(
        SubtaskEntry(index, keyed=(handle,)) for index, handle in enumerate(subtasks)))
    metadata = CheckpointMetadata("0123456789abcdef0123456789abcdef", "mixed", 9, 1, "checkpoint",
                                  trigger_timestamp=TAKEN, completed_timestamp=TAKEN, operators=(entry,))
    store.write(f"{place}/_metadata", metadata.to_bytes())


def keyed(backend: Any, index: int, parallelism: int = 2, **options: Any) -> Any:
    return backend.keyed(uid="count", key_type=int, max_parallelism=128, clock=ManualClock(TAKEN),
                         key_groups=key_group_range(index, parallelism, 128), **options)


@pytest.fixture(params=[0, 1])
def upgraded(request: pytest.FixtureRequest) -> int:
    """The subtask that has migrated."""
    return int(request.param)


@pytest.fixture
def mixed(tmp_path: Path, upgraded: int) -> Callable[[str], Path]:
    """A checkpoint of two subtasks of which one has migrated its states, and the other has not registered them."""
    def make(name: str) -> Path:
        store = FileStore.at(str(tmp_path / "mixed"))
        for place in ("chk-1", "chk-2"):
            handles = []
            for index in range(2):
                target = CheckpointTarget(store, place, "count", index, inline_threshold=0)
                options = {"directory": tmp_path / f"{place}-{index}"} if name == "rocksdb" else {}
                with create_backend(name, **options) as backend:
                    if place == "chk-1":
                        subtask = keyed(backend, index)
                        States(subtask, upgraded=False).fill(keys_of(index))
                    else:
                        metadata, source = open_checkpoint(str(tmp_path / "mixed" / "chk-1"))
                        subtask = keyed(backend, index, restore=metadata.operators[0].subtasks[index].keyed, source=source)
                        if index == upgraded:
                            States(subtask, upgraded=True).fill(keys_of(index)[:5])
                    handles.append(subtask.snapshot(1, target, full=True).run())
            written(store, place, handles)
        return tmp_path / "mixed" / "chk-2"

    return make


def expected(upgraded: int) -> dict[int, Any]:
    newer = keys_of(upgraded)[:5]
    return {key: (WIDER(key, 2 * key if key in newer else 7), [key, key + 1], {"a": key}, str(key), str(key), key)
            for key in range(60)}


def restored(path: Path, parallelism: int) -> dict[int, Any]:
    metadata, source = open_checkpoint(str(path))
    handles = [handle for subtask in metadata.operators[0].subtasks for handle in subtask.keyed]
    found: dict[int, Any] = {}
    for index in range(parallelism):
        with create_backend("filesystem") as backend:
            found |= States(keyed(backend, index, parallelism, restore=handles, source=source), upgraded=True).content()
    return found


def rows(opened: Any, state: str) -> dict[int, list[dict[str, Any]]]:
    table = opened.read("count", state).read_all()
    assert table.column("key_group").to_pylist() == sorted(table.column("key_group").to_pylist())
    found: dict[int, list[dict[str, Any]]] = {}
    for row in table.drop_columns(["key_group"]).to_pylist():
        found.setdefault(row.pop("key"), []).append(row)
    return found


def require_united(path: Path, upgraded: int) -> None:
    newer = keys_of(upgraded)[:5]
    with savepoint.open(path) as opened:
        assert rows(opened, "point") == {
            key: [{"value": {"x": key, "y": 2 * key if key in newer else 7}}] for key in range(60)}
        assert rows(opened, "small") == {key: [{"list_index": 0, "value": key}, {"list_index": 1, "value": key + 1}]
                                         for key in range(60)}
        assert rows(opened, "scores") == {key: [{"map_key": "a", "map_value": key}] for key in range(60)}
        aged = {key: one["expires_at"].timestamp() * 1000 for key, (one,) in rows(opened, "aged").items()}
        assert aged == dict.fromkeys(range(60), TAKEN + HOUR)
        assert {one["expires_at"] for (one,) in rows(opened, "late").values()} == {None}
        assert rows(opened, "total") == {key: [{"namespace": None, "value": key}] for key in range(60)}
        assert opened.lookup("count", "scores", 31) == {"a": 31}
        assert opened.read("count", "point", where="value.y <> 7").read_all().num_rows == len(newer)
        assert opened.read("count", "small", keys=[3, 4], columns=["value"]).read_all().num_rows == 4
        (found,) = opened.query("select count(*), sum(value.x), sum(value.y) from count.point").read_all().to_pylist()
        assert list(found.values()) == [60, sum(range(60)), 7 * 55 + 2 * sum(newer)]


@pytest.mark.parametrize("name", BACKENDS)
def test_parts_of_which_only_some_were_migrated_are_read_and_queried_as_one(
        mixed: Callable[[str], Path], upgraded: int, name: str) -> None:
    require_united(mixed(name), upgraded)


@pytest.mark.parametrize("name", BACKENDS)
def test_they_are_converted_to_parts_of_one_schema_that_hold_the_same(
        mixed: Callable[[str], Path], upgraded: int, name: str, tmp_path: Path) -> None:
    path = mixed(name)
    savepoint.convert_savepoint(path, tmp_path / "open")
    with savepoint.open(tmp_path / "open") as opened:
        first, second = (handle.schemas for handle in opened.handles("count"))
        assert {schema.name: str(schema) for schema in first} == {schema.name: str(schema) for schema in second}
    require_united(tmp_path / "open", upgraded)
    assert savepoint.verify_savepoint(tmp_path / "open")
    for parallelism in (1, 2, 3):
        assert restored(path, parallelism) == restored(tmp_path / "open", parallelism) == expected(upgraded)


def test_an_open_savepoint_with_such_parts_is_read_queried_and_converted_too(
        mixed: Callable[[str], Path], upgraded: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = mixed("filesystem")
    with monkeypatch.context() as patch:
        patch.setattr(savepoint.Savepoint, "schemas_of", lambda self, uid, handle: handle.schemas)
        patch.setattr("savepoint.convert.time", SimpleNamespace(time_ns=lambda: TAKEN * 1_000_000))
        savepoint.convert_savepoint(path, tmp_path / "mixed-open")
    assert savepoint.verify_savepoint(tmp_path / "mixed-open")
    require_united(tmp_path / "mixed-open", upgraded)
    savepoint.convert_savepoint(tmp_path / "mixed-open", tmp_path / "open")
    require_united(tmp_path / "open", upgraded)
    assert restored(tmp_path / "open", 1) == expected(upgraded)


def test_such_a_checkpoint_equals_what_it_was_converted_to(mixed: Callable[[str], Path], tmp_path: Path) -> None:
    path = mixed("filesystem")
    savepoint.convert_savepoint(path, tmp_path / "open")
    assert not savepoint.compare(path, tmp_path / "open")


def test_parts_that_can_not_be_united_are_listed_refused_by_name_when_read_and_can_be_dropped(tmp_path: Path) -> None:
    store, handles = FileStore.at(str(tmp_path / "apart")), []
    for index, field in enumerate(["y", "z"]):
        kind = make_dataclass("Point", [("x", int), (field, int, 7)])
        with create_backend("filesystem") as backend:
            subtask = keyed(backend, index)
            subtask.set_current_key(keys_of(index)[0])
            subtask.state(ValueStateDescriptor("point", kind)).update(kind(1))
            subtask.state(ValueStateDescriptor("other", int)).update(1)
            target = CheckpointTarget(store, "chk-1", "count", index, inline_threshold=0)
            handles.append(subtask.snapshot(1, target, full=True).run())
    written(store, "chk-1", handles)
    path = tmp_path / "apart" / "chk-1"
    savepoint.convert_savepoint(path, tmp_path / "open")
    for place in (path, tmp_path / "open"):
        with savepoint.open(place) as opened:
            assert opened.state_names() == {"count.point", "count.other"}
            with pytest.raises(IncompatibleState, match="disagree about a state"):
                opened.read("count", "point")
            with pytest.raises(IncompatibleState, match="disagree about a state"):
                opened.query("select * from count.point")
            assert opened.query("select * from count.other").read_all().num_rows == 2
    savepoint.Transform(path).drop_state("count", "point").write(tmp_path / "dropped")
    with savepoint.open(tmp_path / "dropped") as opened:
        assert opened.state_names() == {"count.other"}

"""Snapshots of the RocksDB backend: log, materialisation, full; what survives failure, overlap and rescaling."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from statebackend import (
    Closed,
    Conflict,
    CorruptData,
    IncompatibleState,
    KeyedHandle,
    KeyGroupRange,
    ListStateDescriptor,
    LocalFiles,
    ManualClock,
    NotFound,
    TimeDomain,
    TtlConfig,
    Unavailable,
    ValueStateDescriptor,
    create_backend,
    key_group_range,
)
from statebackend.files import FileWriter, StateFile
from statebackend.formats import merged_entries
from statebackend.rocksdb.changelog import Changelog
from statebackend.rocksdb.handles import chain_of

NUMBER = ValueStateDescriptor("number", int)
BLOB = ValueStateDescriptor("blob", bytes)
MATERIALISE = {"log_floor_bytes": 0}


@pytest.fixture
def files(tmp_path: Path) -> LocalFiles:
    return LocalFiles(tmp_path / "files")


class Rocks:
    """A keyed backend of ints with one value state, easy to fill, snapshot and read."""

    def __init__(self, files: LocalFiles, handles: Any = (), groups: KeyGroupRange | None = None, name: str = "rocksdb",
                 **options: Any) -> None:
        self.files = files
        self.backend = create_backend(name, **options)
        self.keyed = self.backend.keyed(uid="op", key_type=int, key_groups=groups, restore=handles, source=files)
        self.state: Any = self.keyed.state(NUMBER)
        self.checkpoint = 0

    def put(self, first: int, last: int, value: int) -> None:
        keys = np.arange(first, last)
        self.state.update_many(pa.array(keys), pa.array(np.full(len(keys), value)))

    def pending(self, **options: Any) -> Any:
        self.checkpoint += 1
        return self.keyed.snapshot(self.checkpoint, self.files, **options)

    def snapshot(self, complete: bool = True, **options: Any) -> KeyedHandle:
        handle: KeyedHandle = self.pending(**options).run()
        if complete:
            self.keyed.checkpoint_completed(self.checkpoint)
        return handle

    def content(self) -> dict[int, int]:
        keys = sorted(self.state.stream_keys())
        return dict(zip(keys, self.state.value_many(pa.array(keys, pa.int64())).to_pylist()))

    def close(self) -> None:
        self.backend.close()


def restored(files: LocalFiles, handles: list[KeyedHandle], groups: KeyGroupRange | None = None,
             name: str = "rocksdb") -> dict[int, int]:
    rocks = Rocks(files, handles, groups, name)
    content = rocks.content()
    rocks.close()
    return content


def span(first: int, last: int, value: int) -> dict[int, int]:
    return dict.fromkeys(range(first, last), value)


# -- the three ways


def test_small_state_is_a_log_of_entry_files(files: LocalFiles) -> None:
    rocks = Rocks(files)
    rocks.put(0, 100, 1)
    first = rocks.snapshot()
    rocks.put(50, 60, 2)
    second = rocks.snapshot()
    assert (first.format, len(first.files)) == ("entries", 1)
    assert (second.format, second.files[:1], len(second.files)) == ("entries", first.files, 2)
    assert second.new_bytes == second.files[1].size
    assert restored(files, [first]) == span(0, 100, 1)
    assert restored(files, [second]) == span(0, 100, 1) | span(50, 60, 2)
    rocks.close()


def test_large_state_is_materialised_then_logged_and_tables_are_not_stored_twice(files: LocalFiles) -> None:
    rocks = Rocks(files, write_back_entries=1000)
    rocks.put(0, 100_000, 1)
    base = rocks.snapshot()
    assert base.format == "rocksdb"
    rocks.put(0, 500, 2)
    delta = rocks.snapshot()
    assert delta.new_bytes < base.new_bytes / 20
    assert set(base.files) < set(delta.files)
    rocks.put(300, 900, 3)
    third = rocks.snapshot()
    assert len(chain_of(third).log) == 2
    handle = KeyedHandle.from_json(third.to_json())
    assert restored(files, [handle]) == span(0, 100_000, 1) | span(0, 300, 2) | span(300, 900, 3)
    assert restored(files, [base], name="memory") == span(0, 100_000, 1)
    rocks.close()


def test_the_log_never_outgrows_the_state(files: LocalFiles) -> None:
    rocks = Rocks(files, log_floor_bytes=1000)
    rocks.put(0, 20_000, 0)
    base = rocks.snapshot()
    assert base.format == "rocksdb"
    materialised = 0
    for round in range(1, 12):
        rocks.put(0, 6_000, round)
        handle = rocks.snapshot()
        chain = chain_of(handle)
        materialised += not chain.log
        assert chain.log_bytes <= max(sum(part.size for part in chain.parts), 1000)
    assert 1 <= materialised <= 6
    assert restored(files, [handle]) == span(0, 20_000, 0) | span(0, 6_000, 11)
    rocks.close()


def test_unchanged_tables_are_reused_by_the_next_materialisation(files: LocalFiles) -> None:
    rocks = Rocks(files, log_max_files=1, **MATERIALISE)
    rocks.put(0, 50_000, 1)
    first = rocks.snapshot()
    rocks.put(0, 10, 2)
    rocks.snapshot()
    rocks.put(0, 10, 3)
    third = rocks.snapshot()
    assert third.format == "rocksdb"
    assert not chain_of(third).log
    assert third.new_bytes < first.new_bytes / 5
    assert restored(files, [third]) == span(0, 50_000, 1) | span(0, 10, 3)
    rocks.close()


def test_tables_of_a_checkpoint_that_completed_meanwhile_are_not_reused_after_it_is_gone(files: LocalFiles) -> None:
    """A delta that was begun before a materialisation completed is what counts in the end: it has none of its tables."""
    backend = create_backend("rocksdb", log_floor_bytes=0)
    keyed = backend.keyed(uid="u", key_type=int)
    value = keyed.state(ValueStateDescriptor("v", bytes))

    def put(count: int, size: int) -> None:
        for key in range(count):
            keyed.set_current_key(key)
            value.update(os.urandom(size))

    put(1000, 1000)
    keyed.snapshot(1, files).run()
    keyed.checkpoint_completed(1)
    put(960, 4)
    materialised = keyed.snapshot(2, files).run()
    put(100, 4)
    delta = keyed.snapshot(3, files)
    keyed.checkpoint_completed(2)
    handle = delta.run()
    keyed.checkpoint_completed(3)
    assert not chain_of(materialised).log
    assert chain_of(handle).log
    only_materialised = {file.path for file in materialised.files} - {file.path for file in handle.files}
    assert only_materialised
    for number in range(4, 9):
        put(number * 100, 900)
        handle = keyed.snapshot(number, files).run()
        keyed.checkpoint_completed(number)
        assert not only_materialised & {file.path for file in handle.files}
        if not chain_of(handle).log:
            break
    else:
        pytest.fail("no snapshot was materialised")
    backend.close()


def test_a_full_snapshot_needs_nothing_else(files: LocalFiles) -> None:
    rocks = Rocks(files, write_back_entries=100)
    rocks.put(0, 5000, 1)
    rocks.snapshot()
    rocks.put(0, 10, 2)
    full = rocks.snapshot(full=True)
    assert (full.format, len(full.files), full.files[0].shared) == ("entries", 1, False)
    assert restored(files, [full]) == span(0, 5000, 1) | span(0, 10, 2)
    later = rocks.snapshot()
    assert not set(later.files) & set(full.files)
    assert restored(files, [later]) == span(0, 5000, 1) | span(0, 10, 2)
    rocks.close()


def test_a_full_snapshot_leaves_out_what_has_expired_unless_that_is_switched_off(files: LocalFiles) -> None:
    from statebackend import Cleanup

    for cleanup, expected in ((Cleanup(), 1), (Cleanup.none(), 2)):
        clock = ManualClock(0)
        backend = create_backend("rocksdb")
        keyed = backend.keyed(uid="op", key_type=str, clock=clock)
        state: Any = keyed.state(ValueStateDescriptor("v", int, ttl=TtlConfig(10, cleanup=cleanup)))
        keyed.set_current_key("old")
        state.update(1)
        clock.advance(9)
        keyed.set_current_key("young")
        state.update(2)
        clock.advance(2)
        handle = keyed.snapshot(1, files, full=True).run()
        assert sum(batch.num_rows for batch in merged_entries(handle, files)) == expected
        backend.close()


# -- the barrier


@pytest.mark.parametrize("options", [{}, MATERIALISE, {"write_back_entries": 50}], ids=["log", "tables", "small-cache"])
@pytest.mark.parametrize("full", [False, True])
def test_later_writes_are_never_in_a_snapshot(files: LocalFiles, options: dict[str, Any], full: bool) -> None:
    rocks = Rocks(files, **options)
    rocks.put(0, 1000, 1)
    pending = rocks.pending(full=full)
    rocks.put(500, 1500, 2)
    rocks.state.clear_many(pa.array(range(10)))
    handle = pending.run()
    assert restored(files, [handle]) == span(0, 1000, 1)
    assert rocks.content() == span(10, 500, 1) | span(500, 1500, 2)
    rocks.close()


def test_writers_go_on_while_a_snapshot_is_written(files: LocalFiles) -> None:
    rocks = Rocks(files, write_back_entries=500, **MATERIALISE)
    rocks.put(0, 20_000, 0)
    for round in range(1, 6):
        pending, done = rocks.pending(), []
        thread = threading.Thread(target=lambda pending=pending, done=done: done.append(pending.run()))
        thread.start()
        rocks.put(0, 3000, round)
        rocks.state.value_many(pa.array(range(0, 20_000, 7)))
        thread.join()
        rocks.keyed.checkpoint_completed(rocks.checkpoint)
        assert restored(files, done) == span(0, 20_000, 0) | span(0, 3000, round - 1)
    rocks.close()


def test_overlapping_snapshots_run_in_any_order(files: LocalFiles) -> None:
    rocks = Rocks(files, **MATERIALISE)
    expected, pendings = [], []
    for round in range(3):
        rocks.put(0, 2000, round)
        pendings.append(rocks.pending())
        expected.append(span(0, 2000, round))
    handles = [pending.run() for pending in reversed(pendings)][::-1]
    assert [restored(files, [handle]) for handle in handles] == expected
    rocks.keyed.checkpoint_completed(2)
    rocks.put(5, 6, 9)
    assert restored(files, [rocks.snapshot()]) == span(0, 2000, 2) | {5: 9}
    rocks.close()


# -- failures


class FullDisk(LocalFiles):
    """A target that has no space left."""

    def create(self, hint: str, *, shared: bool) -> FileWriter:
        raise OSError(28, "No space left on device")

    def upload(self, local: Path, hint: str, *, shared: bool) -> StateFile:
        raise Unavailable("no space left", path=hint)


@pytest.mark.parametrize("options", [{}, MATERIALISE], ids=["log", "tables"])
@pytest.mark.parametrize("full", [False, True])
def test_a_full_disk_fails_the_snapshot_and_the_next_one_is_right(tmp_path: Path, files: LocalFiles,
                                                                  options: dict[str, Any], full: bool) -> None:
    rocks = Rocks(files, **options)
    rocks.put(0, 3000, 1)
    rocks.snapshot()
    rocks.put(0, 100, 2)
    with pytest.raises(Unavailable) as failure:
        rocks.keyed.snapshot(77, FullDisk(tmp_path / "full"), full=full).run()
    assert failure.value.context["checkpoint_id"] == 77
    assert not list((tmp_path / "full").iterdir())
    rocks.keyed.checkpoint_aborted(77)
    rocks.put(50, 150, 3)
    assert restored(files, [rocks.snapshot()]) == span(0, 3000, 1) | span(0, 50, 2) | span(50, 150, 3)
    rocks.close()


def test_an_aborted_snapshot_leaves_its_changes_to_the_next(files: LocalFiles) -> None:
    rocks = Rocks(files)
    rocks.put(0, 1000, 1)
    first = rocks.snapshot()
    rocks.put(0, 10, 2)
    aborted = rocks.snapshot(complete=False)
    rocks.keyed.checkpoint_aborted(rocks.checkpoint)
    rocks.put(10, 20, 3)
    pending = rocks.pending()
    pending.cancel()
    pending.cancel()
    with pytest.raises(Conflict, match="cancelled"):
        pending.run()
    third = rocks.snapshot()
    assert set(first.files) < set(third.files)
    assert not set(aborted.files) - set(first.files) & set(third.files)
    assert restored(files, [third]) == span(0, 1000, 1) | span(0, 10, 2) | span(10, 20, 3)
    rocks.close()


def test_a_snapshot_runs_once_and_not_after_close(files: LocalFiles) -> None:
    rocks = Rocks(files)
    rocks.put(0, 10, 1)
    pending = rocks.pending()
    pending.run()
    with pytest.raises(Conflict):
        pending.run()
    late = rocks.pending()
    rocks.close()
    with pytest.raises(Closed):
        late.run()
    for use in (lambda: rocks.keyed.snapshot(9, files), lambda: rocks.state.value(), lambda: rocks.state.update(1),
                lambda: rocks.keyed.set_current_key(1), lambda: rocks.keyed.sweep(), lambda: rocks.keyed.state(NUMBER),
                lambda: rocks.keyed.timers.register(TimeDomain.EVENT, 1), lambda: rocks.state.value_many(pa.array([1])),
                lambda: rocks.backend.keyed(uid="x", key_type=int), lambda: rocks.keyed.entry_counts()):
        with pytest.raises(Closed):
            use()


@pytest.mark.parametrize("options", [{}, MATERIALISE], ids=["log", "tables"])
@pytest.mark.parametrize("damage", ["cut", "flip", "gone"])
def test_a_damaged_file_is_named_and_nothing_is_restored(tmp_path: Path, files: LocalFiles, options: dict[str, Any],
                                                         damage: str) -> None:
    rocks = Rocks(files, **options)
    rocks.put(0, 5000, 1)
    handle = rocks.snapshot()
    rocks.close()
    victim = max(handle.files, key=lambda file: file.size)
    path = files.directory / victim.path
    data = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(data[:-10])
    elif damage == "flip":
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    else:
        path.unlink()
    home = tmp_path / "home"
    backend = create_backend("rocksdb", directory=home)
    with pytest.raises(NotFound if damage == "gone" else CorruptData) as failure:
        backend.keyed(uid="op", key_type=int, restore=[handle], source=files)
    assert victim.path in str(failure.value)
    assert [entry.name for entry in home.iterdir()] == ["HOLDFAST-LOCK"]
    keyed = backend.keyed(uid="op", key_type=int)
    keyed.close()
    backend.close()


def test_handles_that_do_not_fit_are_refused(files: LocalFiles) -> None:
    rocks = Rocks(files, **MATERIALISE)
    rocks.put(0, 100, 1)
    handle = rocks.snapshot()
    rocks.close()
    backend = create_backend("rocksdb")
    with pytest.raises(IncompatibleState, match="max parallelism"):
        backend.keyed(uid="op", key_type=int, max_parallelism=256, restore=[handle], source=files)
    with pytest.raises(IncompatibleState, match="key type"):
        backend.keyed(uid="op", key_type=str, restore=[handle], source=files)
    newer = KeyedHandle.from_json({**handle.to_json(), "meta": {**handle.meta, "version": 99}})
    with pytest.raises(IncompatibleState, match="version"):
        backend.keyed(uid="op", key_type=int, restore=[newer], source=files)
    climbing = {**handle.meta, "parts": [{**handle.meta["parts"][0], "names": ["../x"] * len(handle.files)}]}
    with pytest.raises(CorruptData, match="file name"):
        backend.keyed(uid="op", key_type=int, restore=[KeyedHandle.from_json({**handle.to_json(), "meta": climbing})],
                      source=files)
    backend.close()


# -- rescaling


@pytest.mark.parametrize("options", [{}, MATERIALISE], ids=["log", "tables"])
@pytest.mark.parametrize(("old", "new"), [(2, 3), (4, 2), (1, 4), (3, 1)])
def test_rescaling_keeps_every_entry_once(files: LocalFiles, old: int, new: int, options: dict[str, Any]) -> None:
    from statebackend import key_groups_of

    keys = np.arange(4000)
    groups = key_groups_of(keys, 128)
    handles = []
    for index in range(old):
        held = key_group_range(index, old, 128)
        rocks = Rocks(files, groups=held, **options)
        mine = keys[(groups >= held.first) & (groups <= held.last)]
        rocks.state.update_many(pa.array(mine), pa.array(mine))
        rocks.snapshot()
        rocks.state.update_many(pa.array(mine[:50]), pa.array(mine[:50] + 1_000_000))
        handles.append(rocks.snapshot())
        expected_part = rocks.content()
        assert len(expected_part) == len(mine)
        rocks.close()
    found: dict[int, int] = {}
    second = []
    for index in range(new):
        held = key_group_range(index, new, 128)
        rocks = Rocks(files, handles, held)
        content = rocks.content()
        assert not set(content) & set(found)
        found |= content
        rocks.put(min(content), min(content) + 1, -5)
        second.append(rocks.snapshot())
        rocks.close()
    assert len(found) == 4000
    assert all(value in (key, key + 1_000_000) for key, value in found.items())
    again = restored(files, second)
    assert len(again) == 4000
    assert list(again.values()).count(-5) == new


def test_clipped_key_groups_leave_the_disk_in_the_background(files: LocalFiles) -> None:
    rocks = Rocks(files, **MATERIALISE)
    keys = np.arange(20_000)
    blob: Any = rocks.keyed.state(BLOB)
    blob.update_many(pa.array(keys), pa.array([os.urandom(100) for _ in keys]))
    handle = rocks.snapshot()
    rocks.close()
    part = Rocks(files, [handle], KeyGroupRange(0, 12))
    assert part.keyed.wait_for_maintenance(60)
    assert part.keyed._engine.parts.parts[0].store.table_bytes() < handle.size / 4
    assert part.keyed._engine.parts.estimated_keys() < 5000
    part.close()


def test_state_that_is_not_registered_stays_in_later_snapshots(files: LocalFiles) -> None:
    for options in ({}, MATERIALISE):
        rocks = Rocks(files, **options)
        rocks.put(0, 100, 1)
        other: Any = rocks.keyed.state(ListStateDescriptor("other", str))
        rocks.keyed.set_current_key(1)
        other.add_all(["a", "b"])
        handle = rocks.snapshot()
        rocks.close()
        middle = Rocks(files, [handle])
        middle.put(0, 1, 2)
        assert {schema.name for schema in middle.keyed.schemas()} == {"number", "other"}
        for full in (False, True):
            handle = middle.snapshot(full=full)
            last = Rocks(files, [handle])
            again: Any = last.keyed.state(ListStateDescriptor("other", str))
            last.keyed.set_current_key(1)
            assert again.get() == ["a", "b"]
            again.add("c")
            assert again.get() == ["a", "b", "c"]
            last.close()
        middle.close()


def test_state_ids_that_collide_are_renumbered(files: LocalFiles) -> None:
    from dataclasses import replace

    handles = []
    for index, name in enumerate(("number", "blob")):
        rocks = Rocks(files, groups=key_group_range(index, 2, 128), **MATERIALISE)
        state: Any = rocks.state if name == "number" else rocks.keyed.state(BLOB)
        keys = [key for key in range(200) if rocks.keyed._context._grouper(key) in rocks.keyed.key_groups]
        state.update_many(pa.array(keys), pa.array(keys if name == "number" else [b"x"] * len(keys)))
        handle = rocks.snapshot()
        rocks.close()
        handles.append(handle)
    number, blob = handles
    taken = number.schemas[0].state_id
    renamed = tuple(replace(schema, name="blob" if schema.state_id == taken else "rest")
                    for schema in blob.schemas if schema.name == "number")
    clash = KeyedHandle(blob.format, blob.key_groups, blob.max_parallelism, blob.key_type, renamed, blob.files, blob.meta)
    backend = create_backend("rocksdb")
    keyed = backend.keyed(uid="op", key_type=int, restore=[number, clash], source=files)
    assert len({schema.state_id for schema in keyed.schemas()}) == 2
    backend.close()


def test_lists_grow_in_order_across_restores_from_any_backend(files: LocalFiles) -> None:
    handle: KeyedHandle | None = None
    for round, name in enumerate(["memory", "rocksdb", "filesystem", "rocksdb", "memory", "rocksdb"]):
        backend = create_backend(name)
        keyed = backend.keyed(uid="op", key_type=int, restore=[] if handle is None else [handle], source=files)
        state: Any = keyed.state(ListStateDescriptor("list", int))
        keyed.set_current_key(1)
        state.add(round)
        assert state.get() == list(range(round + 1))
        handle = keyed.snapshot(1, files, full=round % 2 == 0).run()
        backend.close()


def test_the_size_of_a_log_may_be_asked_while_another_thread_seals_it(tmp_path: Path) -> None:
    log = Changelog(tmp_path / "log", enabled=True)
    log.start_run()
    log.append([(b"\0\1key", b"value")])
    sink = log._sink

    class Sealing:
        """The file as the owner sees it: sealed by the snapshot's thread between the look at it and the question."""

        def tell(self) -> int:
            log._sink = sink
            log.seal()
            return int(sink.tell())

    log._sink = Sealing()
    assert log.bytes == (tmp_path / "log").stat().st_size > 0

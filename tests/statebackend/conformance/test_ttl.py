"""Time to live: per value, list element and map entry; what is hidden, what is removed, and what switches it off."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from statebackend import (
    AggregatingStateDescriptor,
    Cleanup,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    TimeDomain,
    TtlConfig,
    UpdateType,
    ValueStateDescriptor,
    Visibility,
)

KINDS = ["value", "list", "map", "reducing", "aggregating"]


def _state(keyed: Any, kind: str, ttl: TtlConfig, name: str = "s") -> Any:
    return keyed.state({
        "value": lambda: ValueStateDescriptor(name, int, default=-1, ttl=ttl),
        "list": lambda: ListStateDescriptor(name, int, ttl=ttl),
        "map": lambda: MapStateDescriptor(name, str, int, ttl=ttl),
        "reducing": lambda: ReducingStateDescriptor(name, int, "sum", ttl=ttl),
        "aggregating": lambda: AggregatingStateDescriptor(name, int, "sum", ttl=ttl),
    }[kind]())


def _write(state: Any, kind: str, value: int) -> None:
    if kind == "value":
        state.update(value)
    elif kind == "map":
        state.put("k", value)
    else:
        state.add(value)


def _read(state: Any, kind: str) -> Any:
    if kind == "value":
        return state.value()
    if kind == "map":
        return state.get("k")
    return state.get()


EMPTY = {"value": -1, "list": [], "map": None, "reducing": None, "aggregating": None}
HELD = {"value": 5, "list": [5], "map": 5, "reducing": 5, "aggregating": 5}


@pytest.mark.parametrize("kind", KINDS)
def test_an_entry_expires_at_its_time_and_not_before(stage: Any, kind: str) -> None:
    keyed = stage.keyed()
    state = _state(keyed, kind, TtlConfig(100))
    keyed.set_current_key("a")
    _write(state, kind, 5)
    stage.clock.advance(99)
    assert _read(state, kind) == HELD[kind]
    assert list(state.stream_keys()) == ["a"]
    stage.clock.advance(1)
    assert list(state.stream_keys()) == []
    assert list(state.namespaces()) == []
    assert _read(state, kind) == EMPTY[kind]
    _write(state, kind, 7)
    assert _read(state, kind) == ([7] if kind == "list" else 7)


@pytest.mark.parametrize("kind", KINDS)
def test_a_write_restarts_the_time_and_a_read_does_so_only_if_told(stage: Any, kind: str) -> None:
    keyed = stage.keyed()
    written = _state(keyed, kind, TtlConfig(100), "written")
    read = _state(keyed, kind, TtlConfig(100, UpdateType.ON_READ_AND_WRITE), "read")
    keyed.set_current_key("a")
    for state in (written, read):
        _write(state, kind, 5)
    for _ in range(3):
        stage.clock.advance(60)
        assert _read(read, kind) == HELD[kind]
    assert _read(written, kind) == EMPTY[kind]


def test_list_elements_and_map_entries_expire_on_their_own(stage: Any) -> None:
    keyed = stage.keyed()
    events, seen = _state(keyed, "list", TtlConfig(100), "l"), _state(keyed, "map", TtlConfig(100), "m")
    keyed.set_current_key("a")
    events.add_all([1, 2])
    seen.put_all({"x": 1, "y": 1})
    stage.clock.advance(60)
    events.add(3)
    seen.put("y", 2)
    stage.clock.advance(60)
    assert events.get() == [3]
    assert list(seen.entries()) == [("y", 2)]
    assert not seen.contains("x")
    assert not seen.is_empty()
    stage.clock.advance(60)
    assert seen.is_empty()
    assert events.get() == []


@pytest.mark.parametrize("kind", KINDS)
def test_expired_entries_are_returned_while_stored_if_told(stage: Any, kind: str) -> None:
    keyed = stage.keyed()
    state = _state(keyed, kind, TtlConfig(100, visibility=Visibility.RETURN_EXPIRED_IF_NOT_CLEANED_UP,
                                          cleanup=Cleanup.none()))
    keyed.set_current_key("a")
    _write(state, kind, 5)
    stage.clock.advance(500)
    assert _read(state, kind) == HELD[kind]
    assert _read(state, kind) == HELD[kind]
    assert list(state.stream_keys()) == []


@pytest.mark.parametrize("kind", KINDS)
def test_event_time_counts_the_watermark(stage: Any, kind: str) -> None:
    keyed = stage.keyed()
    state = _state(keyed, kind, TtlConfig(100, time=TimeDomain.EVENT))
    keyed.advance_watermark(1000)
    keyed.set_current_key("a")
    _write(state, kind, 5)
    stage.clock.advance(10**9)
    keyed.advance_watermark(1099)
    assert _read(state, kind) == HELD[kind]
    keyed.advance_watermark(1)
    assert keyed.watermark == 1099
    keyed.advance_watermark(1100)
    assert _read(state, kind) == EMPTY[kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("update", UpdateType)
def test_an_event_time_entry_written_before_any_watermark_stays_until_it_is_written_again(
        stage: Any, kind: str, update: UpdateType) -> None:
    keyed = stage.keyed()
    state = _state(keyed, kind, TtlConfig(100, update, time=TimeDomain.EVENT))
    keyed.set_current_key("a")
    _write(state, kind, 5)
    assert _read(state, kind) == HELD[kind]
    later = stage.restored([stage.checkpoint(keyed)])[0]
    state = _state(later, kind, TtlConfig(100, time=TimeDomain.EVENT))
    later.set_current_key("a")
    for watermark in (0, 10**15):
        later.advance_watermark(watermark)
        later.sweep()
        assert _read(state, kind) == HELD[kind]
    state.clear()
    _write(state, kind, 5)
    later.advance_watermark(10**15 + 100)
    assert _read(state, kind) == EMPTY[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_clean_up_on_read_removes_what_it_finds_expired(stage: Any, kind: str) -> None:
    keyed = stage.keyed()
    on = _state(keyed, kind, TtlConfig(100, cleanup=Cleanup(on_read=True, full_snapshot=False, incremental=0,
                                                            background=False)), "on")
    off = _state(keyed, kind, TtlConfig(100, cleanup=Cleanup.none()), "off")
    keyed.set_current_key("a")
    for state in (on, off):
        _write(state, kind, 5)
    stage.clock.advance(100)
    for state in (on, off):
        assert _read(state, kind) == EMPTY[kind]
    counts = keyed.entry_counts()
    assert (counts["on"], counts["off"]) == (0, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_full_snapshots_leave_expired_entries_out(stage: Any, kind: str) -> None:
    keyed = stage.keyed()
    on = _state(keyed, kind, TtlConfig(100, cleanup=Cleanup(on_read=False, incremental=0, background=False)), "on")
    off = _state(keyed, kind, TtlConfig(100, cleanup=Cleanup.none()), "off")
    for state in (on, off):
        keyed.set_current_key("old")
        _write(state, kind, 5)
    stage.clock.advance(60)
    for state in (on, off):
        keyed.set_current_key("young")
        _write(state, kind, 5)
    stage.clock.advance(60)
    handle = stage.checkpoint(keyed, full=True)
    assert (keyed.entry_counts()["on"], keyed.entry_counts()["off"]) == (2, 2)
    later = stage.restored([handle])[0]
    counts = later.entry_counts()
    assert (counts["on"], counts["off"]) == (1, 2)
    restored = _state(later, kind, TtlConfig(100), "on")
    later.set_current_key("young")
    assert _read(restored, kind) == HELD[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_a_sweep_removes_expired_entries_and_does_nothing_when_off(stage: Any, kind: str) -> None:
    keyed = stage.keyed(int)
    on = _state(keyed, kind, TtlConfig(100, cleanup=Cleanup(on_read=False, full_snapshot=False, incremental=0)), "on")
    off = _state(keyed, kind, TtlConfig(100, cleanup=Cleanup.none()), "off")
    for key in range(30):
        keyed.set_current_key(key)
        for state in (on, off):
            _write(state, kind, 5)
    stage.checkpoint(keyed)
    assert keyed.sweep() == 0
    stage.clock.advance(100)
    keyed.set_current_key(99)
    for state in (on, off):
        _write(state, kind, 5)
    removed = sum(keyed.sweep(8) for _ in range(20))
    assert removed == 30
    counts = keyed.entry_counts()
    assert (counts["on"], counts["off"]) == (1, 31)
    assert keyed.sweep() == 0


def test_each_entry_keeps_its_expiry_over_snapshots_and_restores(stage: Any) -> None:
    keyed = stage.keyed()
    ttl = TtlConfig(100, cleanup=Cleanup.none())
    events, seen, value = (_state(keyed, kind, ttl, kind) for kind in ("list", "map", "value"))
    keyed.set_current_key("a")
    events.add(1)
    seen.put("x", 1)
    value.update(1)
    stage.checkpoint(keyed)
    stage.clock.advance(60)
    events.add(2)
    seen.put("y", 2)
    handle = stage.checkpoint(keyed)
    later = stage.restored([handle])[0]
    events, seen, value = (_state(later, kind, ttl, kind) for kind in ("list", "map", "value"))
    later.set_current_key("a")
    assert (events.get(), dict(seen.entries()), value.value()) == ([1, 2], {"x": 1, "y": 2}, 1)
    stage.clock.advance(40)
    assert (events.get(), dict(seen.entries()), value.value()) == ([2], {"y": 2}, -1)


def test_ttl_can_be_switched_on_and_off_at_a_restore(stage: Any) -> None:
    keyed = stage.keyed()
    plain, timed = keyed.state(ValueStateDescriptor("plain", int)), _state(keyed, "value", TtlConfig(100), "timed")
    keyed.set_current_key("a")
    plain.update(1)
    timed.update(2)
    handle = stage.checkpoint(keyed)
    later = stage.restored([handle])[0]
    plain, timed = _state(later, "value", TtlConfig(50), "plain"), later.state(ValueStateDescriptor("timed", int))
    later.set_current_key("a")
    assert (plain.value(), timed.value()) == (1, 2)
    stage.clock.advance(50)
    assert (plain.value(), timed.value()) == (-1, 2)
    stage.clock.advance(500)
    assert timed.value() == 2
    again = stage.restored([stage.checkpoint(later)])[0]
    again.set_current_key("a")
    assert again.state(ValueStateDescriptor("timed", int)).value() == 2


@pytest.mark.parametrize("rows", [3, 300])
def test_batch_calls_obey_the_ttl(stage: Any, rows: int) -> None:
    keyed = stage.keyed(int)
    value, total = _state(keyed, "value", TtlConfig(100), "v"), _state(keyed, "reducing", TtlConfig(100), "r")
    keys = pa.array(range(rows))
    value.update_many(keys, keys)
    total.add_many(keys, keys)
    stage.clock.advance(60)
    value.update_many(pa.array([1]), pa.array([10]))
    total.add_many(pa.array([1]), pa.array([10]))
    stage.clock.advance(60)
    assert value.value_many(pa.array([0, 1, 2])).to_pylist() == [-1, 10, -1]
    assert total.get_many(pa.array([0, 1, 2])).to_pylist() == [None, 11, None]
    total.add_many(pa.array([0]), pa.array([4]))
    assert total.get_many(pa.array([0])).to_pylist() == [4]


def test_merged_lists_and_maps_keep_the_expiry_of_each_entry(stage: Any) -> None:
    keyed = stage.keyed()
    events = keyed.state(ListStateDescriptor("l", int, ttl=TtlConfig(100)), namespace_type=int)
    keyed.set_current_key("a")
    events.set_current_namespace(1)
    events.add(1)
    stage.clock.advance(60)
    events.set_current_namespace(2)
    events.add(2)
    events.merge_namespaces(2, [1])
    assert events.get() == [2, 1]
    stage.clock.advance(40)
    assert events.get() == [2]

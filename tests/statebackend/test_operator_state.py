"""Operator state: what is dealt out on restore is what was held, for any old and new parallelism."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statebackend import (
    CorruptData,
    IncompatibleState,
    InvalidRequest,
    ListStateDescriptor,
    MapStateDescriptor,
    OperatorStateStore,
    redistribute,
)
from statebackend.operator_state import OperatorStateSnapshot

OFFSETS = ListStateDescriptor("offsets", int)
SEEN = ListStateDescriptor("seen", str)
RULES = MapStateDescriptor("rules", str, int)


def store_of(index: int, offsets: list[int], seen: list[str], rules: dict[str, int]) -> OperatorStateStore:
    store = OperatorStateStore(f"op-{index}")
    store.list_state(OFFSETS).add_all(offsets)
    store.union_list_state(SEEN).add_all(seen)
    store.broadcast_state(RULES).put_all(rules)
    return store


def restored(snapshot: OperatorStateSnapshot) -> OperatorStateStore:
    return OperatorStateStore("op", OperatorStateSnapshot.from_bytes(snapshot.to_bytes()).parts)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), max_size=5), min_size=1, max_size=6), st.integers(1, 9),
       st.dictionaries(st.text(max_size=3), st.integers(0, 9), max_size=3))
def test_nothing_is_lost_or_doubled_for_any_parallelism(held: list[list[int]], parallelism: int,
                                                        rules: dict[str, int]) -> None:
    old = [store_of(index, items, [str(item) for item in items], rules).snapshot() for index, items in enumerate(held)]
    new = [restored(snapshot) for snapshot in redistribute(old, parallelism)]
    assert len(new) == parallelism
    shares = [store.list_state(OFFSETS).get() for store in new]
    everything = [item for items in held for item in items]
    assert Counter(item for share in shares for item in share) == Counter(everything)
    if parallelism == len(held):
        assert shares == held
    else:
        assert [item for share in shares for item in share] == everything
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    for store in new:
        assert store.union_list_state(SEEN).get() == [str(item) for item in everything]
        assert dict(store.broadcast_state(RULES).entries()) == rules


def test_state_that_is_not_registered_stays_in_later_snapshots() -> None:
    first = redistribute([store_of(0, [1, 2, 3], ["a"], {"r": 1}).snapshot()], 2)
    second = [restored(snapshot) for snapshot in first]
    for store in second:
        store.list_state(OFFSETS)
    third = redistribute([store.snapshot() for store in second], 1)
    store = restored(third[0])
    assert store.list_state(OFFSETS).get() == [1, 2, 3]
    assert dict(store.broadcast_state(RULES).entries()) == {"r": 1}
    assert set(store.union_list_state(SEEN).get()) == {"a"}


def test_a_state_that_only_some_subtasks_hold_reaches_the_others_where_it_is_broadcast() -> None:
    empty = OperatorStateStore("op").snapshot()
    new = redistribute([empty, store_of(1, [7], ["a"], {"r": 1}).snapshot()], 3)
    assert [dict(restored(snapshot).broadcast_state(RULES).entries()) for snapshot in new] == [{"r": 1}] * 3
    assert [item for snapshot in new for item in restored(snapshot).list_state(OFFSETS).get()] == [7]


def test_subtasks_that_stored_other_types_under_one_name_are_refused() -> None:
    one, other = OperatorStateStore("op"), OperatorStateStore("op")
    one.list_state(ListStateDescriptor("x", int)).add(1)
    other.list_state(ListStateDescriptor("x", str)).add("a")
    with pytest.raises(IncompatibleState, match="x"):
        redistribute([one.snapshot(), other.snapshot()], 3)


@dataclass
class Cursor:
    path: str
    position: int


@dataclass
class NewCursor:
    position: int
    path: str = "?"
    tags: list[str] = field(default_factory=list)


def test_dataclasses_come_back_and_follow_their_class() -> None:
    store = OperatorStateStore("op")
    store.list_state(ListStateDescriptor("cursors", Cursor)).add(Cursor("a", 5))
    store.broadcast_state(MapStateDescriptor("by", str, Cursor)).put("k", Cursor("b", 6))
    parts = store.snapshot()
    again = restored(parts)
    assert again.list_state(ListStateDescriptor("cursors", Cursor)).get() == [Cursor("a", 5)]
    assert again.broadcast_state(MapStateDescriptor("by", str, Cursor)).get("k") == Cursor("b", 6)
    migrated = restored(parts)
    assert migrated.list_state(ListStateDescriptor("cursors", NewCursor)).get() == [NewCursor(5, "a", [])]
    assert migrated.broadcast_state(MapStateDescriptor("by", str, NewCursor)).get("k") == NewCursor(6, "b", [])
    narrower = restored(parts)
    with pytest.raises(IncompatibleState, match="cursors"):
        narrower.list_state(ListStateDescriptor("cursors", int))
    assert narrower.snapshot() == restored(parts).snapshot()


def test_a_numeric_type_may_be_widened_and_not_narrowed() -> None:
    store = OperatorStateStore("op")
    store.list_state(ListStateDescriptor("n", pa.int32())).add(5)
    assert restored(store.snapshot()).list_state(ListStateDescriptor("n", int)).get() == [5]
    wide = OperatorStateStore("op")
    wide.list_state(ListStateDescriptor("n", int)).add(5)
    with pytest.raises(IncompatibleState):
        restored(wide.snapshot()).list_state(ListStateDescriptor("n", pa.int32()))


def test_values_are_the_callers_own() -> None:
    store = OperatorStateStore("op")
    state = store.list_state(ListStateDescriptor("lists", list[int]))
    value = [1]
    state.add(value)
    value.append(2)
    state.get()[0].append(3)
    assert state.get() == [[1]]


def test_a_wrong_value_changes_nothing() -> None:
    store = OperatorStateStore("op")
    state = store.list_state(OFFSETS)
    rules = store.broadcast_state(RULES)
    for call in (lambda: state.add("a"), lambda: state.add_all([1, None]), lambda: state.update([1, "a"]),
                 lambda: rules.put("a", "b"), lambda: rules.put(1, 1), lambda: rules.put_all({"a": 1, "b": None})):
        with pytest.raises(InvalidRequest):
            call()
    assert state.get() == []
    assert rules.is_empty()


def test_the_keyed_side_can_read_and_not_write() -> None:
    rules = OperatorStateStore("op").broadcast_state(RULES)
    rules.put_all([("b", 2), ("a", 1)])
    view: Any = rules.read_only()
    assert list(view.entries()) == [("a", 1), ("b", 2)]
    assert view.get("a") == 1
    assert view.contains("b")
    for call in (lambda: view.put("a", 2), lambda: view.remove("a"), view.clear, lambda: view.put_all({})):
        with pytest.raises(InvalidRequest, match="read-only"):
            call()


def test_registering_twice_with_another_type_or_kind_is_refused() -> None:
    store = OperatorStateStore("op")
    assert store.list_state(OFFSETS) is store.list_state(ListStateDescriptor("offsets", int))
    store.broadcast_state(RULES)
    for call in (lambda: store.list_state(ListStateDescriptor("offsets", str)), lambda: store.union_list_state(OFFSETS),
                 lambda: store.list_state(ListStateDescriptor("rules", str)),
                 lambda: store.broadcast_state(MapStateDescriptor("offsets", str, int)),
                 lambda: store.broadcast_state(MapStateDescriptor("rules", str, datetime)),
                 lambda: store.broadcast_state(MapStateDescriptor("rules", int, int))):
        with pytest.raises(InvalidRequest, match="registered twice"):
            call()


def test_another_distribution_than_stored_is_refused_and_the_state_stays() -> None:
    store = restored(store_of(0, [1], [], {}).snapshot())
    with pytest.raises(IncompatibleState, match="distribution"):
        store.union_list_state(OFFSETS)
    assert store.list_state(OFFSETS).get() == [1]


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", b"\x93\x01\x02\x03", b"\x82\xa7version\x01\xa5parts\x91\x01"])
def test_damaged_bytes_are_named(data: bytes) -> None:
    with pytest.raises(CorruptData):
        OperatorStateSnapshot.from_bytes(data)


def test_every_cut_of_a_snapshot_is_damage() -> None:
    data = store_of(0, [1], ["a"], {"r": 1}).snapshot().to_bytes()
    for end in range(len(data)):
        with pytest.raises(CorruptData):
            OperatorStateSnapshot.from_bytes(data[:end])


def test_a_parallelism_below_one_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        redistribute([], 0)

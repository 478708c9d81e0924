"""The five kinds of keyed state: what each call does, alike in every backend."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest

from statebackend import (
    AggregateFunction,
    AggregatingStateDescriptor,
    InvalidRequest,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    ValueStateDescriptor,
)


@dataclass
class Basket:
    owner: str
    items: list[str] = field(default_factory=list)


class Longest(AggregateFunction[str, list[str], str]):
    """Keeps all inputs in a list that it changes in place; gives the longest."""

    def create_accumulator(self) -> list[str]:
        return []

    def add(self, accumulator: list[str], value: str) -> list[str]:
        accumulator.append(value)
        return accumulator

    def get_result(self, accumulator: list[str]) -> str:
        return max(accumulator, key=len)

    def merge(self, left: list[str], right: list[str]) -> list[str]:
        return left + right


def test_a_value_is_what_was_last_updated_and_the_default_before(stage: Any) -> None:
    keyed = stage.keyed()
    count = keyed.state(ValueStateDescriptor("count", int, default=7))
    plain = keyed.state(ValueStateDescriptor("plain", str))
    keyed.set_current_key("a")
    assert (count.value(), plain.value()) == (7, None)
    count.update(8)
    plain.update("x")
    keyed.set_current_key("b")
    assert (count.value(), plain.value()) == (7, None)
    keyed.set_current_key("a")
    assert (count.value(), plain.value()) == (8, "x")
    assert keyed.current_key == "a"
    count.clear()
    assert count.value() == 7
    count.clear()
    assert count.value() == 7


def test_none_clears_a_value_unless_the_type_is_optional(stage: Any) -> None:
    keyed = stage.keyed()
    number, maybe = keyed.state(ValueStateDescriptor("number", int, default=1)), \
        keyed.state(ValueStateDescriptor("maybe", int | None, default=5))
    keyed.set_current_key("a")
    number.update(3)
    number.update(None)
    maybe.update(None)
    assert number.value() == 1
    assert maybe.value() is None
    assert list(number.stream_keys()) == []
    assert list(maybe.stream_keys()) == ["a"]


def test_mutable_values_are_isolated_from_the_caller(stage: Any) -> None:
    keyed = stage.keyed()
    value = keyed.state(ValueStateDescriptor("basket", Basket, default=Basket("nobody")))
    elements = keyed.state(ListStateDescriptor("baskets", Basket))
    entries = keyed.state(MapStateDescriptor("by_name", str, list[int]))
    keyed.set_current_key("a")
    value.value().items.append("default must not change")
    assert value.value() == Basket("nobody")
    mine = Basket("me", ["pear"])
    value.update(mine)
    elements.add(mine)
    mine.items.append("late")
    value.value().items.append("read")
    elements.get()[0].items.append("read")
    numbers = [1]
    entries.put("n", numbers)
    numbers.append(2)
    entries.get("n").append(3)
    next(entries.entries())[1].append(4)
    assert value.value() == Basket("me", ["pear"])
    assert elements.get() == [Basket("me", ["pear"])]
    assert entries.get("n") == [1]


def test_integers_given_for_floats_come_back_as_floats(stage: Any) -> None:
    keyed = stage.keyed()
    value = keyed.state(ValueStateDescriptor("f", float))
    pairs = keyed.state(ListStateDescriptor("pairs", tuple[float, int]))
    keyed.set_current_key("a")
    value.update(3)
    pairs.add((1, 2))
    assert type(value.value()) is float
    assert repr(pairs.get()) == "[(1.0, 2)]"


def test_a_list_keeps_order_and_an_empty_update_clears(stage: Any) -> None:
    keyed = stage.keyed()
    events = keyed.state(ListStateDescriptor("events", int))
    keyed.set_current_key("a")
    assert events.get() == []
    events.add(3)
    events.add_all([1, 2])
    events.add_all([])
    assert events.get() == [3, 1, 2]
    events.update([9])
    events.add(8)
    assert events.get() == [9, 8]
    events.update([])
    assert events.get() == []
    assert list(events.stream_keys()) == []
    events.add(1)
    events.clear()
    assert events.get() == []


def test_a_map_is_ordered_by_the_key_codec(stage: Any) -> None:
    keyed = stage.keyed()
    numbers = keyed.state(MapStateDescriptor("numbers", float, str))
    words = keyed.state(MapStateDescriptor("words", str, int))
    keyed.set_current_key("a")
    numbers.put_all({2.5: "b", -1.0: "a", float("nan"): "last", 0.0: "zero"})
    numbers.put(-0.0, "the same zero")
    words.put_all([("é", 3), ("z", 2), ("", 0), ("a", 1)])
    assert [value for _, value in numbers.entries()] == ["a", "the same zero", "b", "last"]
    assert numbers.get(float("nan")) == "last"
    assert list(words.keys()) == ["", "a", "z", "é"]
    assert list(words.values()) == [0, 1, 2, 3]


def test_a_map_puts_gets_removes_and_clears(stage: Any) -> None:
    keyed = stage.keyed()
    seen = keyed.state(MapStateDescriptor("seen", str, int))
    keyed.set_current_key("a")
    assert seen.is_empty()
    assert seen.get("x") is None
    seen.put("x", 1)
    seen.put("y", 2)
    seen.put("x", 3)
    keyed.set_current_key("b")
    assert seen.is_empty()
    keyed.set_current_key("a")
    assert (seen.get("x"), seen.contains("y"), seen.contains("z")) == (3, True, False)
    seen.remove("x")
    seen.remove("never there")
    assert list(seen.entries()) == [("y", 2)]
    seen.remove("y")
    assert seen.is_empty()
    assert list(seen.stream_keys()) == []
    seen.put("x", 1)
    seen.clear()
    assert seen.is_empty()
    seen.put("w", 5)
    assert list(seen.entries()) == [("w", 5)]


@pytest.mark.parametrize(("function", "result"), [("sum", 6), ("min", 1), ("max", 3), ("count", 3),
                                                  (lambda old, new: old * 10 + new, 312)])
def test_reducing_folds_what_is_added(stage: Any, function: Any, result: int) -> None:
    keyed = stage.keyed()
    folded = keyed.state(ReducingStateDescriptor("folded", int, function))
    keyed.set_current_key("a")
    assert folded.get() is None
    for value in (3, 1, 2):
        folded.add(value)
    assert folded.get() == result
    folded.clear()
    assert folded.get() is None


@pytest.mark.parametrize(("function", "result"), [("sum", 6), ("min", 1), ("max", 3), ("count", 3), ("avg", 2.0)])
def test_aggregating_gives_the_result_of_what_was_added(stage: Any, function: str, result: Any) -> None:
    keyed = stage.keyed()
    folded = keyed.state(AggregatingStateDescriptor("folded", int, function))
    keyed.set_current_key("a")
    assert folded.get() is None
    for value in (3, 1, 2):
        folded.add(value)
    assert folded.get() == result


def test_an_aggregate_function_may_change_its_accumulator(stage: Any) -> None:
    keyed = stage.keyed()
    longest = keyed.state(AggregatingStateDescriptor("longest", list[str], Longest()))
    keyed.set_current_key("a")
    longest.add("pear")
    handle = stage.checkpoint(keyed)
    longest.add("apple")
    assert longest.get() == "apple"
    later = stage.restored([handle])[0]
    restored = later.state(AggregatingStateDescriptor("longest", list[str], Longest()))
    later.set_current_key("a")
    assert restored.get() == "pear"


def test_namespaces_are_separate_and_listed(stage: Any) -> None:
    keyed = stage.keyed()
    total = keyed.state(ReducingStateDescriptor("total", int, "sum"), namespace_type=tuple[int, int])
    keyed.set_current_key("a")
    total.add(1)
    total.set_current_namespace((0, 10))
    assert total.get() is None
    total.add(2)
    total.set_current_namespace((10, 20))
    total.add(3)
    keyed.set_current_key("b")
    total.add(9)
    keyed.set_current_key("a")
    assert sorted(total.namespaces(), key=str) == [(0, 10), (10, 20), None]
    assert list(total.stream_keys()) == ["a"]
    assert sorted(total.stream_keys((10, 20))) == ["a", "b"]
    total.clear()
    assert sorted(total.namespaces(), key=str) == [(0, 10), None]
    total.set_current_namespace(None)
    assert total.get() == 1


def test_namespaces_merge(stage: Any) -> None:
    keyed = stage.keyed()
    total = keyed.state(ReducingStateDescriptor("total", int, "sum"), namespace_type=int)
    mean = keyed.state(AggregatingStateDescriptor("mean", float, "avg"), namespace_type=int)
    events = keyed.state(ListStateDescriptor("events", str), namespace_type=int)
    last = keyed.state(MapStateDescriptor("last", str, int), namespace_type=int)
    value = keyed.state(ValueStateDescriptor("value", int), namespace_type=int)
    keyed.set_current_key("a")
    for namespace in (1, 2, 3):
        for state in (total, mean, events, last):
            state.set_current_namespace(namespace)
        total.add(namespace)
        mean.add(float(namespace))
        events.add(f"e{namespace}")
        last.put_all({"same": namespace, f"only{namespace}": namespace})
    for state in (total, mean, events, last):
        state.merge_namespaces(2, [1, 3])
        state.set_current_namespace(2)
    assert total.get() == 6
    assert mean.get() == 2.0
    assert events.get() == ["e2", "e1", "e3"]
    assert dict(last.entries()) == {"same": 3, "only1": 1, "only2": 2, "only3": 3}
    assert list(events.namespaces()) == [2]
    total.merge_namespaces(7, [2])
    total.set_current_namespace(7)
    assert total.get() == 6
    total.merge_namespaces(7, [7, 8])
    assert total.get() == 6
    with pytest.raises(InvalidRequest, match="value"):
        value.merge_namespaces(1, [2])


def test_all_keys_of_a_state_are_streamed_while_it_changes(stage: Any) -> None:
    keyed = stage.keyed(int)
    value = keyed.state(ValueStateDescriptor("v", int))
    for key in range(50):
        keyed.set_current_key(key)
        value.update(key)
    stage.checkpoint(keyed)
    seen = []
    for key in value.stream_keys():
        seen.append(key)
        keyed.set_current_key(key)
        value.clear()
    assert sorted(seen) == list(range(50))
    assert list(value.stream_keys()) == []


def test_states_of_a_key_do_not_see_each_other(stage: Any) -> None:
    keyed = stage.keyed()
    first, second = keyed.state(ValueStateDescriptor("one", int)), keyed.state(ValueStateDescriptor("two", int))
    keyed.set_current_key("a")
    first.update(1)
    assert second.value() is None
    assert keyed.state(ValueStateDescriptor("one", int)) is first


def test_entry_counts_count_stored_entries(stage: Any) -> None:
    keyed = stage.keyed()
    value, events = keyed.state(ValueStateDescriptor("v", int)), keyed.state(ListStateDescriptor("l", int))
    entries = keyed.state(MapStateDescriptor("m", str, int))
    for key in "abc":
        keyed.set_current_key(key)
        value.update(1)
        events.add_all([1, 2])
        entries.put_all({"x": 1, "y": 2, "z": 3})
    counts = keyed.entry_counts()
    assert (counts["v"], counts["l"], counts["m"]) == (3, 6, 9)


KEYS = [(int, [-(2**63), -1, 0, 2**63 - 1]), (str, ["", "a", "a\0", "é", "x" * 300]), (bytes, [b"", b"\0", b"\xff" * 9]),
        (float, [0.0, -1.5, float("inf")]), (bool, [False, True]), (tuple[str, int], [("", 0), ("a", -1), ("a", 1)])]


@pytest.mark.parametrize(("key_type", "keys"), KEYS, ids=[str(kind) for kind, _ in KEYS])
def test_every_key_type_holds_state_over_a_restore(stage: Any, key_type: Any, keys: list[Any]) -> None:
    keyed = stage.keyed(key_type)
    value = keyed.state(ValueStateDescriptor("v", int))
    entries = keyed.state(MapStateDescriptor("m", key_type, int), namespace_type=key_type)
    for number, key in enumerate(keys):
        keyed.set_current_key(key)
        value.update(number)
        entries.set_current_namespace(key)
        entries.put(key, number)
    handle = stage.checkpoint(keyed)
    later = stage.restored([handle], key_type)[0]
    value = later.state(ValueStateDescriptor("v", int))
    entries = later.state(MapStateDescriptor("m", key_type, int), namespace_type=key_type)
    for number, key in enumerate(keys):
        later.set_current_key(key)
        assert value.value() == number
        entries.set_current_namespace(key)
        assert list(entries.entries()) == [(key, number)]
        assert list(entries.namespaces()) == [key]
    assert sorted(value.stream_keys()) == sorted(keys)


def test_nan_keys_are_one_key(stage: Any) -> None:
    keyed = stage.keyed(float)
    value = keyed.state(ValueStateDescriptor("v", int))
    keyed.set_current_key(float("nan"))
    value.update(1)
    keyed.set_current_key(float("inf") - float("inf"))
    assert value.value() == 1
    keyed.set_current_key(-0.0)
    value.update(2)
    keyed.set_current_key(0.0)
    assert value.value() == 2
    assert len(list(value.stream_keys())) == 2
    assert value.value_many(pa.array([float("nan"), -0.0])).to_pylist() == [1, 2]

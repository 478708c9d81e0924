"""Bad input: each gives a specific error that names state, key and cause, and leaves the state as it was."""

from __future__ import annotations

import math
import operator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from statebackend import (
    AggregatingStateDescriptor,
    Closed,
    Conflict,
    IncompatibleState,
    InvalidRequest,
    KeyGroupRange,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    TimeDomain,
    TtlConfig,
    ValueStateDescriptor,
    create_backend,
    key_group_range,
)


def test_calls_without_a_current_key_are_refused(stage: Any) -> None:
    keyed = stage.keyed(int)
    states = [keyed.state(ValueStateDescriptor("v", int)), keyed.state(ListStateDescriptor("l", int)),
              keyed.state(MapStateDescriptor("m", int, int)), keyed.state(ReducingStateDescriptor("r", int, "sum")),
              keyed.state(ValueStateDescriptor("t", int, ttl=TtlConfig(5)))]
    value, events, entries, total, timed = states
    for call in (value.value, lambda: value.update(1), value.clear, events.get, lambda: events.add(1),
                 lambda: entries.get(1), lambda: entries.put(1, 1), lambda: total.add(1), total.get,
                 timed.value, lambda: timed.update(1), lambda: list(value.namespaces())):
        with pytest.raises(InvalidRequest, match="current key"):
            call()
    assert keyed.current_key is None
    assert sum(keyed.entry_counts().values()) == 0


@pytest.mark.parametrize(("key_type", "keys"), [
    (int, pa.array([1, 2])), (str, pa.array(["a", "b"])), (tuple[int, str], pa.array([{"f0": 1, "f1": "a"}]))])
@pytest.mark.parametrize("batched", [False, True])
def test_there_is_no_current_key_after_it_was_unset(stage: Any, key_type: Any, keys: pa.Array, batched: bool) -> None:
    keyed = stage.keyed(key_type)
    value, total = keyed.state(ValueStateDescriptor("v", int)), keyed.state(ReducingStateDescriptor("r", int, "sum"))
    first = keyed.key_type.from_arrow(keys)[0]
    if batched:
        value.update_many(keys, pa.array([7] * len(keys)))
        total.add_many(keys, pa.array([7] * len(keys)))
    keyed.set_current_key(first)
    value.update(7)
    keyed.unset_current_key()
    assert keyed.current_key is None
    for call in (value.value, lambda: value.update(1), value.clear, lambda: total.add(1), total.get,
                 lambda: keyed.timers.register(TimeDomain.EVENT, 5)):
        with pytest.raises(InvalidRequest, match="current key"):
            call()
    assert value.value_many(keys[:1]).to_pylist() == [7]
    keyed.set_current_key(first)
    assert value.value() == 7
    keyed.close()
    keyed.unset_current_key()
    for call in (value.value, lambda: keyed.set_current_key(first)):
        with pytest.raises(Closed):
            call()


def test_the_function_of_a_fold_may_come_before_its_type(stage: Any) -> None:
    keyed = stage.keyed(int)
    keyed.set_current_key(1)
    for name, function in (("named", "sum"), ("operator", operator.add), ("lambda", lambda a, b: a + b)):
        total = keyed.state(ReducingStateDescriptor(name, function, int))
        total.add(1)
        total.add(2)
        assert total.get() == 3
    mean = keyed.state(AggregatingStateDescriptor("mean", "avg", float))
    mean.add_many(pa.array([1, 1]), pa.array([1.0, 2.0]))
    assert mean.get() == 1.5


@pytest.mark.parametrize("make", [
    lambda: AggregatingStateDescriptor("a", str, "avg"), lambda: AggregatingStateDescriptor("a", Decimal, "avg"),
    lambda: ReducingStateDescriptor("a", str, "count")])
def test_a_fold_of_numbers_over_something_else_is_refused_when_it_is_declared(make: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"of numbers.*state='a'"):
        make()


@pytest.mark.parametrize(("key_type", "wrong"), [
    (int, [None, "1", 1.0, True, 2**63, -(2**63) - 1]), (str, [None, 1, b"a", "\ud800"]),
    (bytes, [None, "a", bytearray(b"a")]),
    (float, [None, "1", 2**60 + 1]), (bool, [None, 1]), (tuple[int, str], [None, (1,), (1, 2), [1, "a"]])])
def test_wrong_keys_are_refused_and_the_current_key_stays(stage: Any, key_type: Any, wrong: list[Any]) -> None:
    right = {int: 1, str: "a", bytes: b"a", float: 1.5, bool: True}.get(key_type, (1, "a"))
    keyed = stage.keyed(key_type)
    value = keyed.state(ValueStateDescriptor("v", int))
    keyed.set_current_key(right)
    value.update(5)
    for key in wrong:
        with pytest.raises(InvalidRequest):
            keyed.set_current_key(key)
        assert keyed.current_key == right
        assert value.value() == 5


@pytest.mark.parametrize(("kind", "wrong"), [
    (int, ["1", 1.5, True, 2**63, -(2**63) - 1]), (pa.int8(), [128, -129]), (pa.uint16(), [-1, 65536]),
    (float, ["x", 2**70 + 1]),
    (str, [1, b"x", "\udfff"]), (bool, [1, "true"]), (list[int], [(1,), ["a"], 5]), (dict[str, int], [{"a": "b"}, {1: 1}])])
def test_wrong_values_name_state_and_key_and_change_nothing(stage: Any, kind: Any, wrong: list[Any]) -> None:
    keyed = stage.keyed()
    value, events = keyed.state(ValueStateDescriptor("the_value", kind)), keyed.state(ListStateDescriptor("the_list", kind))
    entries = keyed.state(MapStateDescriptor("the_map", str, kind))
    keyed.set_current_key("the_key")
    for bad in wrong:
        for call, name in ((lambda bad=bad: value.update(bad), "the_value"), (lambda bad=bad: events.add(bad), "the_list"),
                           (lambda bad=bad: events.update([bad]), "the_list"),
                           (lambda bad=bad: entries.put_all({"x": bad}), "the_map")):
            with pytest.raises(InvalidRequest) as caught:
                call()
            assert caught.value.context["state"] == name
            assert caught.value.context["key"] == "the_key"
    assert (value.value(), events.get(), entries.is_empty()) == (None, [], True)
    with pytest.raises(InvalidRequest):
        events.add(None)
    with pytest.raises(InvalidRequest):
        entries.put("x", None)


def test_wrong_map_keys_and_namespaces_are_refused(stage: Any) -> None:
    keyed = stage.keyed()
    entries = keyed.state(MapStateDescriptor("m", str, int), namespace_type=int)
    plain = keyed.state(ValueStateDescriptor("v", int))
    keyed.set_current_key("a")
    for wrong in (None, 1, b"x"):
        for call in (entries.get, entries.remove, entries.contains, lambda key: entries.put(key, 1)):
            with pytest.raises(InvalidRequest, match="m"):
                call(wrong)
    with pytest.raises(InvalidRequest):
        entries.set_current_namespace("x")
    with pytest.raises(InvalidRequest):
        plain.set_current_namespace(1)
    assert entries.is_empty()


def test_half_of_a_bad_call_is_not_done(stage: Any) -> None:
    keyed = stage.keyed()
    events, entries = keyed.state(ListStateDescriptor("l", int)), keyed.state(MapStateDescriptor("m", str, int))
    keyed.set_current_key("a")
    events.add(1)
    entries.put("x", 1)
    for call in (lambda: events.add_all([2, "no"]), lambda: events.update([2, "no"]),
                 lambda: entries.put_all([("x", 2), ("y", "no")])):
        with pytest.raises(InvalidRequest):
            call()
    assert events.get() == [1]
    assert list(entries.entries()) == [("x", 1)]


def test_a_value_larger_than_the_limit_is_refused(stage: Any) -> None:
    keyed = stage.keyed(max_value_bytes=1000)
    text, numbers = keyed.state(ValueStateDescriptor("text", str)), keyed.state(ValueStateDescriptor("n", list[int]))
    events = keyed.state(ListStateDescriptor("l", bytes))
    keyed.set_current_key("a")
    text.update("x" * 1000)
    for call in (lambda: text.update("x" * 1001), lambda: text.update("é" * 501), lambda: numbers.update([2**60] * 200),
                 lambda: events.add(b"x" * 1001), lambda: text.update_many(pa.array(["b", "a"]), pa.array(["", "x" * 1001])),
                 lambda: events.add_many(pa.array(["a"]), pa.array([b"x" * 1001])),
                 lambda: events.update_many(pa.array(["a"]), pa.array([[b"x" * 1001]]))):
        with pytest.raises(InvalidRequest, match="larger than the limit"):
            call()
    assert text.value() == "x" * 1000
    assert list(text.stream_keys()) == ["a"]
    assert events.get() == []
    events.update_many(pa.array(["a"]), pa.array([[b"x" * 1000] * 3]))
    assert len(events.get()) == 3


def test_a_state_registered_twice_must_be_the_same(stage: Any) -> None:
    keyed = stage.keyed()
    first = keyed.state(ValueStateDescriptor("s", int))
    assert keyed.state(ValueStateDescriptor("s", int)) is first
    for other in (ValueStateDescriptor("s", str), ListStateDescriptor("s", int), MapStateDescriptor("s", str, int),
                  ValueStateDescriptor("s", int, ttl=TtlConfig(5))):
        with pytest.raises(InvalidRequest, match="twice"):
            keyed.state(other)
    with pytest.raises(InvalidRequest, match="twice"):
        keyed.state(ValueStateDescriptor("s", int), namespace_type=int)
    with pytest.raises(InvalidRequest, match="twice"):
        keyed.state(ValueStateDescriptor("s", int, default=0))


def test_a_default_is_the_descriptors_own_and_compares_by_value(stage: Any) -> None:
    keyed, given = stage.keyed(), [1]
    first = keyed.state(ValueStateDescriptor("s", list[int], default=given))
    given.append(2)
    keyed.set_current_key("a")
    assert first.value() == [1]
    assert keyed.state(ValueStateDescriptor("s", list[int], default=[1])) is first
    number = keyed.state(ValueStateDescriptor("n", float, default=math.nan))
    assert keyed.state(ValueStateDescriptor("n", float, default=float("nan"))) is number


def test_ranges_and_backends_that_do_not_exist_are_refused(stage: Any) -> None:
    with pytest.raises(InvalidRequest):
        stage.keyed(max_parallelism=16, key_groups=KeyGroupRange(0, 16))
    with pytest.raises(InvalidRequest):
        stage.keyed(max_parallelism=0)
    with pytest.raises(InvalidRequest, match="memory"):
        create_backend("cassandra")
    with pytest.raises(InvalidRequest):
        stage.backend(no_such_option=1)
    with pytest.raises(InvalidRequest):
        stage.keyed(list[int])


@pytest.mark.parametrize("name", ["memory", "filesystem", "rocksdb"])
def test_every_backend_takes_a_directory(name: str, tmp_path: Path) -> None:
    with create_backend(name, directory=str(tmp_path / "state")) as backend:
        count = backend.keyed(uid="count", key_type=str).state(ValueStateDescriptor("count", int, default=0))
        count.update_many(pa.array(["bob", "eve"]), pa.array([3, 4]))
        assert count.value_many(pa.array(["eve", "alice"])).to_pylist() == [4, 0]


def test_one_operator_is_opened_once(stage: Any) -> None:
    backend = stage.backend()
    opened = backend.keyed(uid="one", key_type=int)
    with pytest.raises(Conflict):
        backend.keyed(uid="one", key_type=int)
    backend.keyed(uid="two", key_type=int)
    opened.close()
    backend.keyed(uid="one", key_type=int)


def test_keys_of_another_subtask_are_refused_by_a_batch(stage: Any) -> None:
    keyed = stage.keyed(int, key_groups=key_group_range(0, 4, 128))
    total = keyed.state(ReducingStateDescriptor("t", int, "sum"))
    for rows in (200, 20):
        keys = pa.array(list(range(rows)))
        with pytest.raises(InvalidRequest, match="key group"):
            total.add_many(keys, keys)
        assert list(total.stream_keys()) == []


def test_everything_is_refused_after_close(stage: Any) -> None:
    backend = stage.backend()
    keyed = backend.keyed(uid="one", key_type=int, clock=stage.clock)
    value, total = keyed.state(ValueStateDescriptor("v", int)), keyed.state(ReducingStateDescriptor("t", int, "sum"))
    timed = keyed.state(ValueStateDescriptor("x", int, ttl=TtlConfig(5)))
    entries = keyed.state(MapStateDescriptor("m", int, int))
    events = keyed.state(ListStateDescriptor("l", int))
    keyed.set_current_key(1)
    value.update(1)
    timers = keyed.timers
    keyed.close()
    keyed.close()
    keys = pa.array(range(100))
    for call in (value.value, lambda: value.update(1), value.clear, lambda: keyed.set_current_key(1), timed.value,
                 lambda: timed.update(3), lambda: entries.put(1, 1), lambda: entries.get(1), events.get,
                 lambda: events.add(1), total.get, lambda: total.add(1), lambda: total.add_many(keys, keys),
                 lambda: value.value_many(keys), lambda: list(value.stream_keys()), lambda: keyed.snapshot(1, stage.files),
                 lambda: keyed.state(ValueStateDescriptor("w", int)), keyed.schemas, keyed.entry_counts, keyed.sweep,
                 lambda: timers.register(TimeDomain.EVENT, 1), lambda: keyed.checkpoint_completed(1),
                 lambda: keyed.advance_watermark(5)):
        with pytest.raises(Closed):
            call()
    backend.close()
    backend.close()
    with pytest.raises(Closed):
        backend.keyed(uid="two", key_type=int)
    with pytest.raises(Closed):
        backend.operator(uid="two")


def test_two_parts_that_hold_the_same_key_groups_are_refused(stage: Any) -> None:
    keyed = stage.keyed(str)
    keyed.state(ListStateDescriptor("l", int))
    handle = stage.checkpoint(keyed)
    with pytest.raises(IncompatibleState, match=r"same key group.*each part once"):
        stage.keyed(str, restore=[handle, handle])


def test_a_migration_that_meets_a_number_that_is_no_float_leaves_the_state_as_it_was(stage: Any) -> None:
    keys, numbers = pa.array(range(300)), [*range(217), 2**53 + 1, *range(218, 300)]
    stored = stage.keyed(int)
    stored.state(ValueStateDescriptor("v", int)).update_many(keys, pa.array(numbers))
    keyed = stage.keyed(int, restore=[stage.checkpoint(stored)])
    with pytest.raises(IncompatibleState, match="9007199254740993"):
        keyed.state(ValueStateDescriptor("v", float))
    assert keyed.state(ValueStateDescriptor("v", int)).value_many(keys).to_pylist() == numbers

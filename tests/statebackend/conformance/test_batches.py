"""Batch calls over Arrow arrays: the same results as the calls per record, for every kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from statebackend import (
    AggregatingStateDescriptor,
    InvalidRequest,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    ValueStateDescriptor,
)

SIZES = [3, 500]


def _keys(kind: Any, numbers: Any) -> pa.Array:
    return pa.array([int(n) if kind is int else f"key-{n}" for n in numbers])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("key_type", [int, str])
def test_values_are_read_and_updated_by_batch(stage: Any, key_type: Any, size: int) -> None:
    keyed = stage.keyed(key_type)
    value = keyed.state(ValueStateDescriptor("v", int, default=-1))
    numbers = np.arange(size) % max(2, size // 2)
    keys = _keys(key_type, numbers)
    value.update_many(keys, pa.array(np.arange(size)))
    expected = {int(n): index for index, n in enumerate(numbers)}
    assert value.value_many(_keys(key_type, [*expected, 9999])).to_pylist() == [*expected.values(), -1]
    keyed.set_current_key(keys[0].as_py())
    assert value.value() == expected[int(numbers[0])]
    value.update(77)
    assert value.value_many(keys.slice(0, 1)).to_pylist() == [77]
    value.clear_many(keys.slice(0, 1))
    assert value.value() == -1
    assert len(list(value.stream_keys())) == len(expected) - 1


@pytest.mark.parametrize("size", SIZES)
def test_without_a_default_missing_values_are_null_and_nulls_clear(stage: Any, size: int) -> None:
    keyed = stage.keyed(int)
    value, maybe = keyed.state(ValueStateDescriptor("v", float)), keyed.state(ValueStateDescriptor("o", int | None))
    keys = pa.array(range(size))
    value.update_many(keys, pa.array([float(n) for n in range(size)]))
    value.update_many(pa.array([1] + [0] * (size - 1)), pa.array([None] + [1.5] * (size - 1), pa.float64()))
    assert value.value_many(pa.array([0, 1, size])).to_pylist() == [1.5, None, None]
    maybe.update_many(pa.array([0, 1]), pa.array([None, 4]))
    assert maybe.value_many(pa.array([0, 1, 2])).to_pylist() == [None, 4, None]
    assert sorted(maybe.stream_keys()) == [0, 1]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("key_type", [int, str])
@pytest.mark.parametrize("function", ["sum", "min", "max", "count"])
def test_built_in_functions_fold_batches_like_records(stage: Any, function: str, key_type: Any, size: int) -> None:
    keyed = stage.keyed(key_type)
    reducing = keyed.state(ReducingStateDescriptor("r", int, function))
    aggregating = keyed.state(AggregatingStateDescriptor("a", float, function))
    random = np.random.default_rng(size)
    model: dict[Any, list[int]] = {}
    for _ in range(3):
        numbers, values = random.integers(0, size // 3 + 1, size), random.integers(-50, 50, size)
        reducing.add_many(_keys(key_type, numbers), pa.array(values))
        aggregating.add_many(_keys(key_type, numbers), pa.array(values.astype(float)))
        for n, v in zip(numbers.tolist(), values.tolist()):
            model.setdefault(n, []).append(v)
        first = next(iter(model))
        keyed.set_current_key(_keys(key_type, [first])[0].as_py())
        reducing.add(5)
        aggregating.add(5.0)
        model[first].append(5)
    fold = {"sum": sum, "min": min, "max": max, "count": len}[function]
    expected = [fold(values) for values in model.values()]
    asked = _keys(key_type, [*model, 10_000])
    assert reducing.get_many(asked).to_pylist() == [*expected, None]
    assert aggregating.get_many(asked).to_pylist() == [*expected, None]
    keyed.set_current_key(asked[1].as_py())
    assert reducing.get() == expected[1]


@pytest.mark.parametrize("size", SIZES)
def test_averages_fold_batches(stage: Any, size: int) -> None:
    keyed = stage.keyed(int)
    mean = keyed.state(AggregatingStateDescriptor("mean", int, "avg"))
    mean.add_many(pa.array([n % 2 for n in range(size)]), pa.array(range(size)))
    evens, odds = list(range(0, size, 2)), list(range(1, size, 2))
    assert mean.get_many(pa.array([0, 1, 2])).to_pylist() == [sum(evens) / len(evens), sum(odds) / len(odds), None]
    handle = stage.checkpoint(keyed)
    later = stage.restored([handle], int)[0]
    mean = later.state(AggregatingStateDescriptor("mean", int, "avg"))
    later.set_current_key(0)
    assert mean.get() == sum(evens) / len(evens)


def test_own_functions_fold_batches(stage: Any) -> None:
    keyed = stage.keyed()
    joined = keyed.state(ReducingStateDescriptor("j", str, lambda old, new: old + new))
    joined.add_many(pa.array(["a", "b", "a"]), pa.array(["x", "y", "z"]))
    assert joined.get_many(pa.array(["a", "b", "c"])).to_pylist() == ["xz", "y", None]


def test_lists_are_read_added_to_and_replaced_by_batch(stage: Any) -> None:
    keyed = stage.keyed()
    events = keyed.state(ListStateDescriptor("l", int))
    events.add_many(pa.array(["a", "b", "a"]), pa.array([1, 2, 3]))
    assert events.get_many(pa.array(["a", "b", "c"])).to_pylist() == [[1, 3], [2], []]
    events.update_many(pa.array(["a", "b", "b"]), pa.array([[9], [8], []], pa.list_(pa.int64())))
    assert events.get_many(pa.array(["a", "b"])).to_pylist() == [[9], []]
    keyed.set_current_key("a")
    assert events.get() == [9]
    events.clear_many(pa.array(["a"]))
    assert events.get() == []


def test_maps_are_read_put_and_removed_by_batch(stage: Any) -> None:
    keyed = stage.keyed()
    seen = keyed.state(MapStateDescriptor("m", str, int))
    keys = pa.array(["a", "a", "b", "a"])
    seen.put_many(keys, pa.array(["y", "x", "x", "y"]), pa.array([1, 2, 3, 4]))
    assert seen.get_many(keys, pa.array(["x", "y", "z", "x"])).to_pylist() == [2, 4, None, 2]
    assert seen.entries_many(pa.array(["a", "b", "c"])).to_pylist() == [[("x", 2), ("y", 4)], [("x", 3)], []]
    seen.remove_many(pa.array(["a", "b"]), pa.array(["x", "nothing"]))
    keyed.set_current_key("a")
    assert list(seen.entries()) == [("y", 4)]
    seen.clear_many(pa.array(["a", "c"]))
    assert seen.is_empty()


def test_batches_work_in_the_current_namespace(stage: Any) -> None:
    keyed = stage.keyed(int)
    total = keyed.state(ReducingStateDescriptor("t", int, "sum"), namespace_type=int)
    keys = pa.array(list(range(100)))
    total.add_many(keys, keys)
    total.set_current_namespace(5)
    total.add_many(keys, pa.array([1] * 100))
    assert total.get_many(pa.array([7])).to_pylist() == [1]
    total.set_current_namespace(None)
    assert total.get_many(pa.array([7])).to_pylist() == [7]
    assert sorted(total.stream_keys(5)) == list(range(100))


@pytest.mark.parametrize("size", SIZES)
def test_a_sum_out_of_64_bits_is_an_error_that_changes_nothing(stage: Any, size: int) -> None:
    keyed = stage.keyed(int)
    total = keyed.state(ReducingStateDescriptor("total", int, "sum"))
    keys = pa.array([n % 3 for n in range(size)])
    total.add_many(keys, pa.array([1] * size))
    before = total.get_many(pa.array([0, 1, 2])).to_pylist()
    huge = pa.array([2**63 - 1 if n == size - 1 else 1 for n in range(size)])
    with pytest.raises(InvalidRequest, match="total") as caught:
        total.add_many(keys, huge)
    assert caught.value.context["key"] == (size - 1) % 3
    assert total.get_many(pa.array([0, 1, 2])).to_pylist() == before
    keyed.set_current_key(0)
    with pytest.raises(InvalidRequest, match="total"):
        total.add(2**63 - 1)
    assert total.get() == before[0]


@pytest.mark.parametrize("size", SIZES)
def test_a_bad_batch_changes_nothing(stage: Any, size: int) -> None:
    keyed = stage.keyed(int)
    value, total = keyed.state(ValueStateDescriptor("v", int)), keyed.state(ReducingStateDescriptor("t", int, "sum"))
    keys = pa.array(range(size))
    value.update_many(keys, keys)
    total.add_many(keys, keys)
    holed = pa.array([None, *range(size - 1)])
    for call in (lambda: value.update_many(holed, keys), lambda: value.value_many(holed),
                 lambda: total.add_many(keys, holed), lambda: total.add_many(holed, keys),
                 lambda: value.update_many(keys, pa.array(["x"] * size)),
                 lambda: value.update_many(pa.array(["x"] * size), keys),
                 lambda: value.update_many(keys, keys.slice(1)), lambda: total.add_many(keys, keys.slice(1)),
                 lambda: value.clear_many(holed)):
        with pytest.raises(InvalidRequest):
            call()
    assert value.value_many(keys).to_pylist() == list(range(size))
    assert total.get_many(keys).to_pylist() == list(range(size))


def test_chunked_arrays_and_narrower_integers_are_taken(stage: Any) -> None:
    keyed = stage.keyed(int)
    value = keyed.state(ValueStateDescriptor("v", int))
    value.update_many(pa.chunked_array([pa.array([1, 2], pa.int32()), pa.array([3], pa.int32())]),
                      pa.chunked_array([pa.array([4]), pa.array([5, 6])]))
    assert value.value_many(pa.array([1, 2, 3], pa.int16())).to_pylist() == [4, 5, 6]
    value.update_many(pa.array([], pa.int64()), pa.array([], pa.int64()))
    assert value.value_many(pa.array([], pa.int64())).to_pylist() == []


def test_batches_and_records_mix_over_snapshots(stage: Any) -> None:
    keyed = stage.keyed(int)
    total = keyed.state(ReducingStateDescriptor("t", int, "sum"))
    keys = pa.array(list(range(200)))
    total.add_many(keys, keys)
    first = stage.checkpoint(keyed)
    keyed.set_current_key(3)
    total.add(100)
    pending = keyed.snapshot(50, stage.files)
    total.add_many(keys, pa.array([1] * 200))
    keyed.set_current_key(4)
    total.clear()
    second = pending.run()
    keyed.checkpoint_aborted(50)
    keyed.set_current_key(5)
    total.add(1000)
    total.clear_many(pa.array([6, 7] * 40))
    third = stage.checkpoint(keyed)
    wanted = {3: (3, 103, 104), 4: (4, 4, None), 5: (5, 5, 1006), 6: (6, 6, None), 199: (199, 199, 200)}
    for index, handle in enumerate((first, second, third)):
        whole = stage.restored([handle], int)[0]
        state = whole.state(ReducingStateDescriptor("t", int, "sum"))
        assert state.get_many(pa.array(list(wanted))).to_pylist() == [values[index] for values in wanted.values()]

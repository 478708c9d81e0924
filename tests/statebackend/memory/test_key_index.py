"""The column index: exact for any keys, and the state goes on without it where it can't be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statebackend import LocalFiles, ReducingStateDescriptor, create_backend, state_type
from statebackend.memory.key_index import KeyIndex, NotColumnar, text_words

integers = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 3), min_size=1, max_size=60)
texts = st.lists(st.text(max_size=15) | st.sampled_from(["", "a", "a\0", "a\0\0"]), min_size=1, max_size=60)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([int, str]))
def test_equal_keys_share_a_slot_and_others_do_not(data: Any, kind: type) -> None:
    index, model = KeyIndex(state_type(kind)), dict[Any, int]()
    arrow = state_type(kind).arrow_type
    for _ in range(3):
        keys = data.draw(integers if kind is int else texts)
        slots, first = index.slots_or_new(pa.array(keys, arrow))
        assert len(first) == len({*keys} - {*model})
        for key, slot in zip(keys, slots.tolist()):
            assert model.setdefault(key, slot) == slot
    assert sorted(model.values()) == list(range(index.count))
    assert index.keys_of(np.array(list(model.values()))).to_pylist() == list(model)
    assert all(index.find(key) == slot for key, slot in model.items())
    assert index.find(12345 if kind is int else "never drawn, and long") in (-1, model.get(12345))


def test_an_index_keeps_what_it_is_told_to() -> None:
    index = KeyIndex(state_type(int))
    index.slots_or_new(pa.array(range(5000)))
    index.keep(np.arange(0, 5000, 1000))
    assert index.count == 5
    assert index.slots(pa.array([0, 1, 2000])).tolist() == [0, -1, 2]


def test_text_longer_than_the_index_takes_is_refused() -> None:
    assert len(text_words(pa.array(["x" * 63]), 1)) == 8
    with pytest.raises(NotColumnar):
        text_words(pa.array(["x" * 64]), 1)


def test_a_state_leaves_its_columns_when_a_key_is_too_long(tmp_path: Any) -> None:
    files = LocalFiles(tmp_path)
    with create_backend("filesystem") as backend:
        keyed = backend.keyed(uid="u", key_type=str)
        total = keyed.state(ReducingStateDescriptor("t", int, "sum"))
        keys = pa.array([f"k{number}" for number in range(200)])
        total.add_many(keys, pa.array(range(200)))
        keyed.snapshot(1, files).run()
        keyed.checkpoint_completed(1)
        keyed.set_current_key("k7")
        total.clear()
        total.add_many(pa.array(["k1"] * 100), pa.array([1] * 100))
        total.add_many(pa.array(["x" * 100] * 100), pa.array([1] * 100))
        assert total.columns is None
        total.add_many(keys, pa.array([1000] * 200))
        handle = keyed.snapshot(2, files).run()
        later = create_backend("memory").keyed(uid="u", key_type=str, restore=[handle], source=files)
        restored = later.state(ReducingStateDescriptor("t", int, "sum"))
        for state in (total, restored):
            assert state.get_many(pa.array(["k0", "k1", "k7", "x" * 100])).to_pylist() == [1000, 1101, 1000, 100]


def test_keys_that_no_state_holds_are_forgotten() -> None:
    with create_backend("filesystem") as backend:
        keyed = backend.keyed(uid="u", key_type=int)
        total = keyed.state(ReducingStateDescriptor("t", int, "sum"))
        for begin in range(0, 600_000, 20_000):
            keys = pa.array(np.arange(begin, begin + 20_000))
            total.add_many(keys, keys)
            total.columns.dirty[:] = False
            if begin:
                total.clear_many(keys)
            total.columns.dirty[:] = False
        assert keyed.index.count < 200_000
        assert total.get_many(pa.array([5, 19_999, 30_000])).to_pylist() == [5, 19_999, None]

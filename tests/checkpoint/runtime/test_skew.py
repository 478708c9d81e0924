"""How uneven the key groups of an operator are, from samples of its subtasks."""

from __future__ import annotations

from typing import Any

import numpy as np

from checkpoint.runtime.skew import ENOUGH, EVERY, WINDOW_MS, KeyGroupSample, skews
from statebackend.clock import ManualClock

GROUPS = 8


def sample(clock: ManualClock) -> KeyGroupSample:
    return KeyGroupSample(GROUPS, lambda keys: np.asarray(keys, np.int32), clock.now_ms)


def fill(one: KeyGroupSample, keys: list[Any], batches: int) -> None:
    """So many counted batches, and those between them."""
    for _ in range(batches):
        one.see(keys)
        for _ in range(EVERY - 1):
            one.see([0])  # not counted


def test_the_busiest_key_group_of_all_subtasks_is_held_against_the_mean() -> None:
    clock = ManualClock()
    low, high = sample(clock), sample(clock)
    fill(low, [0, 1, 2, 3], 20)
    fill(high, [4, 5, 6, 7, 7, 7, 7, 7], 20)
    found = skews([{"count": low.told()}, {"count": high.told()}])
    assert found == {"count": {"key_group": 7, "skew": round(5 * GROUPS / 12, 3)}}


def test_even_keys_have_a_skew_of_one() -> None:
    one = sample(ManualClock())
    fill(one, list(range(GROUPS)), ENOUGH)
    assert skews([{"count": one.told()}])["count"]["skew"] == 1.0


def test_too_few_records_tell_nothing() -> None:
    one = sample(ManualClock())
    fill(one, list(range(GROUPS)), ENOUGH - 1)
    assert skews([{"count": one.told()}]) == {}


def test_what_was_long_ago_is_forgotten_and_the_window_before_is_not() -> None:
    clock = ManualClock(10 * WINDOW_MS)
    one = sample(clock)
    fill(one, [3] * 100, 1)
    clock.advance(WINDOW_MS)
    fill(one, [5] * 50, 1)
    assert (one.told()["records"], one.told()["key_group"]) == (150, 3)
    clock.advance(WINDOW_MS)
    fill(one, [5] * 10, 1)
    assert (one.told()["records"], one.told()["key_group"]) == (60, 5)
    clock.advance(5 * WINDOW_MS)
    fill(one, [6], 1)
    assert one.told()["records"] == 1


def test_a_subtask_whose_windows_are_older_than_the_others_is_left_out() -> None:
    clock = ManualClock(10 * WINDOW_MS)
    old, new = sample(clock), sample(clock)
    fill(old, [0] * 1000, 1)
    clock.advance(3 * WINDOW_MS)
    fill(new, [4, 5, 6, 7], ENOUGH * 2)
    assert skews([{"count": old.told()}, {"count": new.told()}])["count"]["skew"] == 2.0

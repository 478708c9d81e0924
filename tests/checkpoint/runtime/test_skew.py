"""How uneven the key groups of an operator are, from samples of its subtasks."""

from __future__ import annotations

from typing import Any

import numpy as np

from checkpoint.runtime.skew import ENOUGH, LONGEST, PAUSE_MS, WINDOW_MS, KeyGroupSample, skews
from statebackend.clock import ManualClock

GROUPS = 8


def sample(clock: ManualClock) -> KeyGroupSample:
    return KeyGroupSample(GROUPS, lambda keys: np.asarray(keys, np.int32), clock.now_ms)


def fill(one: KeyGroupSample, clock: ManualClock, keys: list[Any], looks: int, unseen: int = 0) -> None:
    """So many batches that are looked at, and records that come too soon after each to be."""
    for _ in range(looks):
        clock.advance(PAUSE_MS)
        one.see(keys)
        one.see([0] * unseen)


def test_the_busiest_key_group_of_all_subtasks_is_held_against_the_mean() -> None:
    clock = ManualClock()
    low, high = sample(clock), sample(clock)
    fill(low, clock, [0, 1, 2, 3], 20)
    fill(high, clock, [4, 5, 6, 7, 7, 7, 7, 7], 20)
    found = skews([{"count": low.told()}, {"count": high.told()}])
    assert found == {"count": {"key_group": 7, "skew": round(5 * GROUPS / 12, 3)}}


def test_a_subtask_weighs_what_it_has_processed_not_how_often_it_was_looked_at() -> None:
    clock = ManualClock()
    busy, idle = sample(clock), sample(clock)
    fill(busy, clock, [0, 1, 2, 3], ENOUGH, unseen=36)
    fill(idle, clock, [4, 5, 6, 7], ENOUGH)
    found = skews([{"count": busy.told()}, {"count": idle.told()}])
    assert found["count"]["skew"] == round(10 * GROUPS / 44, 3)


def test_even_keys_have_a_skew_of_one() -> None:
    clock = ManualClock()
    one = sample(clock)
    fill(one, clock, list(range(GROUPS)), ENOUGH)
    assert skews([{"count": one.told()}])["count"]["skew"] == 1.0


def test_too_few_keys_tell_nothing() -> None:
    clock = ManualClock()
    one = sample(clock)
    fill(one, clock, list(range(GROUPS)), ENOUGH - 1, unseen=1000)
    assert skews([{"count": one.told()}]) == {}


def test_of_a_long_batch_only_the_first_keys_are_looked_at() -> None:
    clock = ManualClock()
    one = sample(clock)
    fill(one, clock, [1] * LONGEST + [2] * 10 * LONGEST, 1)
    assert (one.told()["records"], one.told()["looked_at"]) == (11 * LONGEST, LONGEST)


def test_what_was_long_ago_is_forgotten_and_the_window_before_is_not() -> None:
    clock = ManualClock(10 * WINDOW_MS)
    one = sample(clock)
    fill(one, clock, [3] * 100, 1)
    clock.advance(WINDOW_MS)
    fill(one, clock, [5] * 50, 1)
    assert (one.told()["records"], one.told()["looked_at"], one.told()["key_group"]) == (150, 150, 3)
    clock.advance(WINDOW_MS)
    fill(one, clock, [5] * 10, 1)
    assert (one.told()["records"], one.told()["looked_at"], one.told()["key_group"]) == (60, 60, 5)
    clock.advance(5 * WINDOW_MS)
    fill(one, clock, [6], 1)
    assert (one.told()["records"], one.told()["looked_at"]) == (1, 1)


def test_a_subtask_whose_windows_are_older_than_the_others_is_left_out() -> None:
    clock = ManualClock(10 * WINDOW_MS)
    old, new = sample(clock), sample(clock)
    fill(old, clock, [0] * 100, 1)
    clock.advance(3 * WINDOW_MS)
    fill(new, clock, [4, 5, 6, 7], ENOUGH * 2)
    assert skews([{"count": old.told()}, {"count": new.told()}])["count"]["skew"] == 2.0


def test_a_clock_that_was_set_back_stops_nothing() -> None:
    clock = ManualClock(10 * WINDOW_MS)
    one = sample(clock)
    fill(one, clock, [1], 1)
    clock.set(10 * WINDOW_MS - 5000)
    one.see([2])
    assert one.told()["looked_at"] == 1
    assert one.told()["key_group"] == 2

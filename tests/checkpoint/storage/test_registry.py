"""Reference counts, retention and deletion rules as pure decisions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.storage.registry import (
    DeletionRules,
    GenerationRecord,
    SharedFileRegistry,
    Verdict,
    is_void,
    retention,
)
from statebackend.errors import InvalidRequest


def test_a_file_is_freed_by_its_last_user() -> None:
    registry = SharedFileRegistry.rebuilt({1: ["a", "b"], 2: ["b", "c"]})
    assert registry.references("b") == 2
    assert registry.unregister(1) == {"a"}
    assert registry.unregister(1) == frozenset()
    assert registry.unregister(2) == {"b", "c"}
    assert registry.needed == frozenset()


def test_a_checkpoint_is_registered_once() -> None:
    registry = SharedFileRegistry.rebuilt({1: ["a"]})
    with pytest.raises(InvalidRequest, match="twice"):
        registry.register(1, ["a"])


@given(st.dictionaries(st.integers(1, 9), st.sets(st.sampled_from("abcdef"))), st.lists(st.integers(1, 9)))
def test_nothing_needed_is_ever_freed(checkpoints: dict[int, set[str]], dropped: list[int]) -> None:
    registry = SharedFileRegistry.rebuilt(checkpoints)
    freed: set[str] = set()
    for checkpoint in dropped:
        freed |= registry.unregister(checkpoint)
        checkpoints.pop(checkpoint, None)
        needed = set().union(*checkpoints.values()) if checkpoints else set()
        assert registry.needed == needed
        assert not freed & needed


def test_the_newest_stay() -> None:
    assert retention([3, 1, 2], 2).drop == (1,)
    assert retention([1, 2, 3, 4], 1, in_use={2}, pinned={1}).drop == (3,)
    assert retention([1, 2, 3, 4], 1, in_use={2}, pinned={1}).spared == (1, 2)
    assert retention([7], 1).drop == ()
    assert retention([], 3).keep == ()
    with pytest.raises(InvalidRequest):
        retention([1], 0)


def test_what_may_be_deleted() -> None:
    rules = DeletionRules(now_ms=1000, grace_ms=100, pinned=frozenset({"pinned"}))
    assert rules.verdict("a", 900, 0) is Verdict.DELETE
    assert rules.verdict("a", 901, 0) is Verdict.YOUNG
    assert rules.verdict("a", 900, 1) is Verdict.REFERENCED
    assert rules.verdict("pinned", 0, 0) is Verdict.PINNED
    assert DeletionRules(1000, 100, newest_generation=False).verdict("a", 0, 0) is Verdict.NOT_NEWEST


def test_a_clock_that_jumped_back_deletes_nothing() -> None:
    assert DeletionRules(now_ms=500, grace_ms=0).verdict("a", 900, 0) is Verdict.YOUNG


def test_what_an_older_run_published_beyond_a_newer_ones_start_is_void() -> None:
    claims = [GenerationRecord(1, 0), GenerationRecord(2, 5), GenerationRecord(3, None)]
    assert not is_void(5, 1, claims)
    assert is_void(6, 1, claims)
    assert not is_void(6, 2, claims)
    assert not is_void(6, 3, claims)

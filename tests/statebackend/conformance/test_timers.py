"""Timers: one per key, namespace and timestamp; ordered, deletable, snapshotted, restored by key group."""

from __future__ import annotations

from typing import Any

import pytest

from statebackend import InvalidRequest, ReducingStateDescriptor, TimeDomain, Timer

EVENT, PROCESSING = TimeDomain.EVENT, TimeDomain.PROCESSING


def _register(keyed: Any, key: Any, *times: int, domain: TimeDomain = EVENT, namespace: Any = None) -> None:
    keyed.set_current_key(key)
    for time in times:
        keyed.timers.register(domain, time, namespace)


def test_timers_fire_once_in_order_of_time_over_all_keys(stage: Any) -> None:
    keyed = stage.keyed()
    _register(keyed, "a", 30, 10, 30)
    _register(keyed, "b", 20, -5)
    assert keyed.timers.count(EVENT) == 4
    assert keyed.timers.next_timestamp(EVENT) == -5
    assert keyed.timers.pop_due(EVENT, 20) == [Timer(-5, "b", None), Timer(10, "a", None), Timer(20, "b", None)]
    assert keyed.timers.pop_due(EVENT, 29) == []
    assert keyed.timers.pop_due(EVENT, 30) == [Timer(30, "a", None)]
    assert keyed.timers.next_timestamp(EVENT) is None
    _register(keyed, "a", 30)
    assert keyed.timers.pop_due(EVENT, 30) == [Timer(30, "a", None)]


def test_the_two_domains_are_separate(stage: Any) -> None:
    keyed = stage.keyed()
    _register(keyed, "a", 1)
    _register(keyed, "a", 2, domain=PROCESSING)
    assert (keyed.timers.count(EVENT), keyed.timers.count(PROCESSING)) == (1, 1)
    assert keyed.timers.pop_due(PROCESSING, 10) == [Timer(2, "a", None)]
    assert keyed.timers.count(EVENT) == 1


def test_deleted_timers_do_not_fire_and_may_come_back(stage: Any) -> None:
    keyed = stage.keyed()
    _register(keyed, "a", 10, 20)
    keyed.timers.delete(EVENT, 10)
    keyed.timers.delete(EVENT, 99)
    assert keyed.timers.next_timestamp(EVENT) == 20
    _register(keyed, "a", 10)
    assert [timer.timestamp for timer in keyed.timers.pop_due(EVENT, 100)] == [10, 20]
    assert keyed.timers.count(EVENT) == 0


def test_a_limit_leaves_the_rest_for_later(stage: Any) -> None:
    keyed = stage.keyed(int)
    for key in range(100):
        _register(keyed, key, 1000 - key)
    fired = [timer.timestamp for _ in range(4) for timer in keyed.timers.pop_due(EVENT, 10_000, 30)]
    assert fired == sorted(range(901, 1001))


def test_timers_carry_their_namespace(stage: Any) -> None:
    keyed = stage.keyed()
    keyed.state(ReducingStateDescriptor("w", int, "sum"), namespace_type=tuple[int, int])
    _register(keyed, "a", 10, namespace=(0, 10))
    _register(keyed, "a", 10, namespace=(5, 10))
    _register(keyed, "a", 10)
    assert keyed.timers.count(EVENT) == 3
    keyed.timers.delete(EVENT, 10, (5, 10))
    handle = stage.checkpoint(keyed)
    later = stage.restored([handle])[0]
    found = sorted(later.timers.timers(EVENT), key=str)
    assert found == sorted([Timer(10, "a", (0, 10)), Timer(10, "a", None)], key=str)


def test_snapshots_hold_timers_as_they_were(stage: Any) -> None:
    keyed = stage.keyed()
    _register(keyed, "a", 10, 20)
    pending = keyed.snapshot(1, stage.files)
    _register(keyed, "b", 15)
    keyed.timers.pop_due(EVENT, 10)
    first = pending.run()
    keyed.checkpoint_completed(1)
    keyed.set_current_key("a")
    keyed.timers.delete(EVENT, 20)
    second = stage.checkpoint(keyed)
    assert [timer.timestamp for timer in stage.restored([first])[0].timers.pop_due(EVENT, 99)] == [10, 20]
    assert stage.restored([second])[0].timers.pop_due(EVENT, 99) == [Timer(15, "b", None)]
    keyed.timers.pop_due(EVENT, 99)
    third = stage.checkpoint(keyed)
    assert stage.restored([third])[0].timers.count(EVENT) == 0


@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_overdue_timers_fire_at_once_after_a_rescaling(stage: Any, parallelism: int) -> None:
    keyed = stage.keyed(int)
    for key in range(60):
        _register(keyed, key, key, domain=PROCESSING)
    handle = stage.checkpoint(keyed)
    stage.clock.advance(10_000)
    fired = []
    for subtask in stage.restored([handle], int, parallelism=parallelism):
        due = subtask.timers.pop_due(PROCESSING, stage.clock.now_ms())
        assert [timer.timestamp for timer in due] == sorted(timer.timestamp for timer in due)
        fired += due
    assert sorted(timer.key for timer in fired) == list(range(60))


def test_bad_timers_are_refused(stage: Any) -> None:
    keyed = stage.keyed()
    with pytest.raises(InvalidRequest):
        keyed.timers.register(EVENT, 1)
    keyed.set_current_key("a")
    for wrong in (2**63, "soon", 1.5, None):
        with pytest.raises(InvalidRequest):
            keyed.timers.register(EVENT, wrong)
    assert keyed.timers.count(EVENT) == 0


def test_looking_for_timers_makes_no_state(stage: Any) -> None:
    keyed = stage.keyed()
    keyed.state(ReducingStateDescriptor("sum", int, "sum"))
    for number in (1, 2):
        keyed.set_current_key("a")
        keyed.timers.delete(EVENT, 5)
        for domain in (EVENT, PROCESSING):
            assert keyed.timers.pop_due(domain, 10) == []
            assert keyed.timers.next_timestamp(domain) is None
            assert keyed.timers.count(domain) == 0
        handle = keyed.snapshot(number, stage.files).run()
        keyed.checkpoint_completed(number)
        assert [schema.name for schema in handle.schemas] == ["sum"]

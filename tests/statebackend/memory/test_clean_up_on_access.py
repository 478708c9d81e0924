"""Incremental clean-up: accesses remove expired entries a few at a time, as configured, in the backends held in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from statebackend import (
    Cleanup,
    ListStateDescriptor,
    ManualClock,
    MapStateDescriptor,
    SystemClock,
    TtlConfig,
    ValueStateDescriptor,
    create_backend,
)

ONLY_INCREMENTAL = {"on_read": False, "full_snapshot": False, "background": False}


@pytest.fixture(params=["memory", "filesystem"])
def keyed(request: pytest.FixtureRequest) -> Iterator[Any]:
    with create_backend(request.param) as backend:
        yield backend.keyed(uid="u", key_type=int, clock=ManualClock(0))


def _filled(keyed: Any, state: Any, write: Any) -> None:
    for key in range(20):
        keyed.set_current_key(key)
        write(state)
    keyed.clock.set(100)


@pytest.mark.parametrize(("descriptor", "write", "access"), [
    (lambda ttl: ValueStateDescriptor("s", int, ttl=ttl), lambda s: s.update(1), lambda s: s.value()),
    (lambda ttl: ValueStateDescriptor("s", str, ttl=ttl), lambda s: s.update("x"), lambda s: s.value()),
    (lambda ttl: ListStateDescriptor("s", int, ttl=ttl), lambda s: s.add(1), lambda s: s.get()),
    (lambda ttl: MapStateDescriptor("s", int, int, ttl=ttl), lambda s: s.put(1, 1), lambda s: s.is_empty()),
])
def test_each_access_examines_as_many_entries_as_configured(keyed: Any, descriptor: Any, write: Any, access: Any) -> None:
    state = keyed.state(descriptor(TtlConfig(100, cleanup=Cleanup(incremental=3, **ONLY_INCREMENTAL))))
    _filled(keyed, state, write)
    keyed.set_current_key(1000)
    assert keyed.entry_counts()["s"] == 20
    access(state)
    assert keyed.entry_counts()["s"] == 17
    for _ in range(6):
        access(state)
    assert keyed.entry_counts()["s"] == 0


def test_no_access_removes_anything_when_it_is_off(keyed: Any) -> None:
    state = keyed.state(ValueStateDescriptor("s", int, ttl=TtlConfig(100, cleanup=Cleanup(incremental=0,
                                                                                         **ONLY_INCREMENTAL))))
    _filled(keyed, state, lambda s: s.update(1))
    keyed.set_current_key(1000)
    for _ in range(50):
        state.value()
    assert keyed.entry_counts()["s"] == 20


def test_setting_a_key_cleans_up_if_told_to(keyed: Any) -> None:
    cleanup = Cleanup(incremental=4, every_record=True, **ONLY_INCREMENTAL)
    state = keyed.state(ValueStateDescriptor("s", int, ttl=TtlConfig(100, cleanup=cleanup)))
    _filled(keyed, state, lambda s: s.update(1))
    for key in range(3):
        keyed.set_current_key(1000 + key)
    assert keyed.entry_counts()["s"] == 8


def test_entries_that_live_survive_and_are_found_when_their_time_comes(keyed: Any) -> None:
    state = keyed.state(ValueStateDescriptor("s", int, ttl=TtlConfig(100, cleanup=Cleanup(incremental=50,
                                                                                         **ONLY_INCREMENTAL))))
    _filled(keyed, state, lambda s: s.update(1))
    keyed.set_current_key(7)
    state.update(2)
    for _ in range(3):
        state.value()
    assert keyed.entry_counts()["s"] == 1
    keyed.clock.set(200)
    keyed.set_current_key(8)
    for _ in range(3):
        state.value()
    assert keyed.entry_counts()["s"] == 0


def test_the_machines_clock_expires_entries_too(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("statebackend.memory.value_state.time", lambda: now[0])
    monkeypatch.setattr("statebackend.memory.expiry.time_ns", lambda: int(now[0] * 1_000_000_000))
    with create_backend("memory") as backend:
        keyed = backend.keyed(uid="u", key_type=int, clock=SystemClock())
        state = keyed.state(ValueStateDescriptor("s", int, default=0, ttl=TtlConfig(100)))
        for key in range(10):
            keyed.set_current_key(key)
            state.update(key + 1)
            assert state.value() == key + 1
            now[0] += 0.001
        now[0] += 0.0855
        keyed.set_current_key(0)
        assert state.value() == 1 if now[0] < 1000.1 else state.value() == 0
        keyed.set_current_key(9)
        assert state.value() == 10
        now[0] += 1
        assert state.value() == 0
        for _ in range(5):
            state.value()
        assert keyed.entry_counts()["s"] == 0

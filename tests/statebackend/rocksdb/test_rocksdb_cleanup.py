"""Clean-up on RocksDB removes bytes, not only sight; and does nothing where it is switched off."""

from __future__ import annotations

import os
from typing import Any

import pyarrow as pa
import pytest

from statebackend import (
    Cleanup,
    ListStateDescriptor,
    ManualClock,
    MapStateDescriptor,
    TimeDomain,
    TtlConfig,
    ValueStateDescriptor,
    create_backend,
)
from statebackend.rocksdb.keyed import RocksDBKeyed

KEYS = pa.array(range(3000))


class Ttl:
    def __init__(self, cleanup: Cleanup | None = None, **ttl: Any) -> None:
        self.clock = ManualClock(1_000)
        self.backend = create_backend("rocksdb")
        keyed = self.backend.keyed(uid="op", key_type=int, clock=self.clock)
        assert isinstance(keyed, RocksDBKeyed)
        self.keyed = keyed
        config = TtlConfig(100, cleanup=cleanup or Cleanup(), **ttl)
        self.value: Any = keyed.state(ValueStateDescriptor("value", bytes, ttl=config))
        self.number: Any = keyed.state(ValueStateDescriptor("number", int, ttl=config))
        self.list: Any = keyed.state(ListStateDescriptor("list", int, ttl=config))
        self.map: Any = keyed.state(MapStateDescriptor("map", str, int, ttl=config))

    def fill(self) -> None:
        self.value.update_many(KEYS, pa.array([os.urandom(100) for _ in range(3000)]))
        self.number.update_many(KEYS, KEYS)
        self.list.add_many(KEYS, KEYS)
        self.map.put_many(KEYS, pa.array(["x"] * 3000), KEYS)

    def stored_bytes(self) -> int:
        self.keyed._engine.flush()
        self.keyed._engine.parts.flush()
        return sum(part.store.table_bytes() for part in self.keyed._engine.parts.parts)

    def sweep_all(self) -> int:
        removed = sum(self.keyed.sweep(500) for _ in range(60))
        assert self.keyed.wait_for_maintenance(60)
        return removed


@pytest.fixture
def ttl() -> Any:
    made: list[Ttl] = []

    def make(*arguments: Any, **options: Any) -> Ttl:
        made.append(Ttl(*arguments, **options))
        return made[-1]
    yield make
    for one in made:
        one.backend.close()


@pytest.mark.parametrize("flushed", [False, True])
def test_the_sweep_removes_expired_entries_and_their_bytes(ttl: Any, flushed: bool) -> None:
    held = ttl()
    held.fill()
    before = held.stored_bytes() if flushed else 300_000
    assert held.sweep_all() == 0
    held.clock.advance(99)
    held.value.update_many(KEYS.slice(0, 10), pa.array([b"young"] * 10))
    held.clock.advance(1)
    assert held.sweep_all() == 4 * 3000 - 10
    assert held.stored_bytes() < before / 20
    assert sum(held.keyed.entry_counts().values()) == 10
    assert sorted(held.value.stream_keys()) == list(range(10))


def test_the_sweep_examines_only_as_many_as_told(ttl: Any) -> None:
    held = ttl()
    held.fill()
    held.clock.advance(100)
    assert held.keyed.sweep(10) <= 10
    assert held.keyed.sweep(100) <= 100


def test_nothing_is_removed_where_clean_up_is_switched_off(ttl: Any) -> None:
    held = ttl(Cleanup.none())
    held.fill()
    before = held.stored_bytes()
    held.clock.advance(1000)
    assert held.sweep_all() == 0
    held.keyed.set_current_key(1)
    assert (held.value.value(), held.number.value(), held.list.get(), list(held.map.entries())) == (None, None, [], [])
    assert held.stored_bytes() >= before
    assert held.keyed.entry_counts() == {"value": 3000, "number": 3000, "list": 3000, "map": 3000}


def test_a_read_removes_what_has_expired(ttl: Any) -> None:
    held = ttl(Cleanup(background=False))
    held.fill()
    held.keyed._engine.flush()
    held.clock.advance(100)
    held.value.value_many(KEYS)
    held.number.value_many(KEYS.slice(0, 2999))
    held.list.get_many(KEYS)
    held.map.entries_many(KEYS)
    held.keyed.set_current_key(2999)
    assert held.number.value() is None
    assert held.keyed.entry_counts() == {"value": 0, "number": 0, "list": 0, "map": 0}


def test_event_time_counts_the_watermark(ttl: Any) -> None:
    held = ttl(time=TimeDomain.EVENT)
    held.keyed.advance_watermark(50)
    held.fill()
    held.clock.advance(10_000)
    held.keyed.set_current_key(1)
    assert held.number.value() == 1
    held.keyed.advance_watermark(149)
    assert held.number.value() == 1
    held.keyed.advance_watermark(150)
    assert held.number.value() is None
    assert held.sweep_all() == 4 * 3000 - 1


def test_event_time_ttl_holds_before_the_first_watermark(ttl: Any) -> None:
    held = ttl(time=TimeDomain.EVENT)
    held.fill()
    held.keyed._engine.flush()
    held.keyed.set_current_key(1)
    assert held.number.value() == 1
    assert held.list.get() == [1]
    held.keyed.advance_watermark(0)
    assert held.number.value() == 1


def test_ttl_costs_at_most_twelve_bytes_an_entry() -> None:
    sizes = []
    for config in (None, TtlConfig("1h")):
        backend = create_backend("rocksdb")
        keyed = backend.keyed(uid="op", key_type=int)
        assert isinstance(keyed, RocksDBKeyed)
        state: Any = keyed.state(ValueStateDescriptor("v", bytes, ttl=config))
        state.update_many(KEYS, pa.array([os.urandom(100) for _ in range(3000)]))
        keyed.compact()
        sizes.append(sum(part.store.table_bytes() for part in keyed._engine.parts.parts))
        backend.close()
    assert sizes[1] - sizes[0] <= 12 * 3000

"""Timers on RocksDB: in order over all key groups, with a bounded number in memory."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from statebackend import KeyGroupRange, LocalFiles, TimeDomain, create_backend
from statebackend.rocksdb import timers as module
from statebackend.rocksdb.keyed import RocksDBKeyed

EVENT = TimeDomain.EVENT


def keyed_of(backend: Any, **options: Any) -> RocksDBKeyed:
    keyed = backend.keyed(uid="op", key_type=int, **options)
    assert isinstance(keyed, RocksDBKeyed)
    return keyed


def drain(keyed: RocksDBKeyed, until: int, limit: int = 700) -> list[Any]:
    fired = []
    while due := keyed.timers.pop_due(EVENT, until, limit):
        fired.extend(due)
    return fired


def test_many_timers_fire_in_order_with_few_in_memory() -> None:
    rng = random.Random(1)
    backend = create_backend("rocksdb", write_back_entries=5000)
    keyed = keyed_of(backend)
    expected = set()
    for number in range(40_000):
        keyed.set_current_key(number % 500)
        timestamp = rng.randrange(1_000_000)
        keyed.timers.register(EVENT, timestamp)
        expected.add((timestamp, number % 500))
        if number == 20_000:
            assert keyed.timers.next_timestamp(EVENT) == min(expected)[0]
    table = keyed._timer_tables[EVENT]
    fired = drain(keyed, 400_000)
    assert len(table._held) <= 2 * module.HEAD
    assert len(table._heap) <= 4 * module.HEAD
    assert [timer.timestamp for timer in fired] == sorted(timer.timestamp for timer in fired)
    assert {(timer.timestamp, timer.key) for timer in fired} == {one for one in expected if one[0] <= 400_000}
    keyed.set_current_key(3)
    keyed.timers.register(EVENT, 7)
    assert keyed.timers.next_timestamp(EVENT) == 7
    rest = drain(keyed, 10**9)
    assert len(fired) + len(rest) == len(expected) + 1
    assert keyed.timers.next_timestamp(EVENT) is None
    assert keyed.timers.count(EVENT) == 0
    backend.close()


def test_a_head_that_grows_is_cut_and_nothing_is_lost() -> None:
    backend = create_backend("rocksdb")
    keyed = keyed_of(backend)
    keyed.set_current_key(1)
    assert keyed.timers.next_timestamp(EVENT) is None
    count = 3 * module.HEAD
    for timestamp in range(count, 0, -1):
        keyed.timers.register(EVENT, timestamp)
        keyed.timers.register(EVENT, timestamp)
    assert len(keyed._timer_tables[EVENT]._held) <= 2 * module.HEAD
    keyed.timers.delete(EVENT, 5)
    keyed.timers.delete(EVENT, count)
    keyed.timers.delete(EVENT, -1)
    assert [timer.timestamp for timer in drain(keyed, count)] == [n for n in range(1, count) if n != 5]
    backend.close()


def test_timers_follow_their_key_groups_when_rescaled_and_overdue_ones_fire_at_once(tmp_path: Path) -> None:
    for options in ({}, {"log_floor_bytes": 0}):
        files = LocalFiles(tmp_path / "files")
        backend = create_backend("rocksdb", **options)
        keyed = keyed_of(backend)
        for key in range(300):
            keyed.set_current_key(key)
            keyed.timers.register(EVENT, -key, (key, "window"))
        handle = keyed.snapshot(1, files).run()
        backend.close()
        seen = []
        for groups in (KeyGroupRange(0, 40), KeyGroupRange(41, 127)):
            part = create_backend("rocksdb")
            keyed = keyed_of(part, key_groups=groups, restore=[handle], source=files)
            fired = drain(keyed, 0)
            assert [timer.timestamp for timer in fired] == sorted(timer.timestamp for timer in fired)
            seen.extend(fired)
            part.close()
        assert sorted((timer.key, timer.namespace) for timer in seen) == [(key, (key, "window")) for key in range(300)]

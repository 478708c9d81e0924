"""The RocksDB backend and the memory backend, driven by the same random calls, always answer alike."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from statebackend import (
    AggregatingStateDescriptor,
    KeyedBackend,
    KeyGroupRange,
    ListStateDescriptor,
    LocalFiles,
    ManualClock,
    MapStateDescriptor,
    ReducingStateDescriptor,
    TimeDomain,
    TtlConfig,
    ValueStateDescriptor,
    create_backend,
)

KEYS = [f"key-{number}" for number in range(12)]
NAMESPACES = [None, "a", "b"]


def longest(left: str, right: str) -> str:
    return left if len(left) >= len(right) else right


class Side:
    """One backend with every kind of state."""

    def __init__(self, name: str, clock: ManualClock, ttl: TtlConfig | None, restore: Any = (), source: Any = None,
                 key_groups: KeyGroupRange | None = None, **options: Any) -> None:
        self.backend = create_backend(name, **options)
        self.keyed: KeyedBackend = self.backend.keyed(uid="op", key_type=str, clock=clock, restore=restore,
                                                      source=source, key_groups=key_groups)
        register = self.keyed.state
        self.states: dict[str, Any] = {
            "value": register(ValueStateDescriptor("value", int, default=7, ttl=ttl), namespace_type=str),
            "text": register(ValueStateDescriptor("text", str, ttl=ttl), namespace_type=str),
            "list": register(ListStateDescriptor("list", int, ttl=ttl), namespace_type=str),
            "map": register(MapStateDescriptor("map", str, int, ttl=ttl), namespace_type=str),
            "sum": register(ReducingStateDescriptor("sum", int, "sum", ttl=ttl), namespace_type=str),
            "longest": register(ReducingStateDescriptor("longest", str, longest, ttl=ttl), namespace_type=str),
            "avg": register(AggregatingStateDescriptor("avg", float, "avg", ttl=ttl), namespace_type=str),
        }

    def do(self, call: tuple[Any, ...]) -> Any:
        name, key, namespace, method, *arguments = call
        self.keyed.set_current_key(key)
        if name == "timers":
            return getattr(self.keyed.timers, method)(*arguments)
        state = self.states[name]
        state.set_current_namespace(namespace)
        result = getattr(state, method)(*arguments)
        if isinstance(result, pa.Array):
            return result.to_pylist()
        if method == "namespaces":
            return set(result)
        return list(result) if hasattr(result, "__next__") else result

    def everything(self) -> Any:
        """All that can be read without changing anything (no TTL refresh is configured)."""
        found: dict[Any, Any] = {}
        for name, state in self.states.items():
            for namespace in NAMESPACES:
                found[name, namespace, "keys"] = sorted(state.stream_keys(namespace))
        for domain in TimeDomain:
            timers = list(self.keyed.timers.timers(domain))
            found[domain] = sorted(timers, key=repr)
            assert self.keyed.timers.count(domain) == len(timers)
        return found


def random_call(rng: random.Random) -> tuple[Any, ...]:
    key, namespace, number = rng.choice(KEYS), rng.choice(NAMESPACES), rng.randrange(-100, 100)
    several = pa.array(rng.choices(KEYS, k=4))
    numbers = pa.array(rng.choices(range(100), k=4))
    inner = rng.choice("xyz")
    domain = rng.choice(list(TimeDomain))
    return rng.choice([
        ("value", key, namespace, "value"), ("value", key, namespace, "update", number),
        ("value", key, namespace, "update", None), ("value", key, namespace, "value_many", several),
        ("value", key, namespace, "update_many", several, numbers), ("value", key, namespace, "clear_many", several),
        ("text", key, namespace, "value"), ("text", key, namespace, "update", "t" * (number % 5)),
        ("text", key, namespace, "clear"), ("text", key, namespace, "namespaces"),
        ("list", key, namespace, "get"), ("list", key, namespace, "add", number),
        ("list", key, namespace, "add_all", [number, 1]), ("list", key, namespace, "update", [number]),
        ("list", key, namespace, "clear"), ("list", key, namespace, "add_many", several, numbers),
        ("list", key, namespace, "get_many", several),
        ("list", key, namespace, "update_many", several, pa.array([[1], [], [2, 3], [4]])),
        ("list", key, namespace, "merge_namespaces", "a", ["b", "c"]),
        ("map", key, namespace, "get", inner), ("map", key, namespace, "put", inner, number),
        ("map", key, namespace, "put_all", {"x": number, "w": 1}), ("map", key, namespace, "remove", inner),
        ("map", key, namespace, "contains", inner), ("map", key, namespace, "entries"),
        ("map", key, namespace, "keys"), ("map", key, namespace, "values"), ("map", key, namespace, "is_empty"),
        ("map", key, namespace, "clear"), ("map", key, namespace, "entries_many", several),
        ("map", key, namespace, "put_many", several, pa.array(["x", "y", "x", "z"]), numbers),
        ("map", key, namespace, "get_many", several, pa.array(["x", "y", "x", "z"])),
        ("map", key, namespace, "remove_many", several, pa.array(["x", "y", "x", "z"])),
        ("map", key, namespace, "merge_namespaces", "a", ["b"]),
        ("sum", key, namespace, "add", number), ("sum", key, namespace, "get"),
        ("sum", key, namespace, "add_many", several, numbers), ("sum", key, namespace, "get_many", several),
        ("sum", key, namespace, "merge_namespaces", "b", ["a"]), ("sum", key, namespace, "clear"),
        ("longest", key, namespace, "add", "l" * (number % 7)), ("longest", key, namespace, "get"),
        ("longest", key, namespace, "add_many", several, pa.array(["a", "bb", "ccc", "d"])),
        ("avg", key, namespace, "add", float(number)), ("avg", key, namespace, "get"),
        ("avg", key, namespace, "add_many", several, pa.array([1.0, 2.0, 3.0, 4.5])),
        ("avg", key, namespace, "get_many", several), ("avg", key, namespace, "merge_namespaces", None, ["a", "b"]),
        ("timers", key, None, "register", domain, number, namespace),
        ("timers", key, None, "register", domain, number),
        ("timers", key, None, "delete", domain, number, namespace),
        ("timers", key, None, "next_timestamp", domain),
    ])


OPTIONS = [
    {},
    {"write_back_entries": 3},
    {"write_back_entries": 5, "log_floor_bytes": 0},
]


@pytest.mark.parametrize("ttl", [None, TtlConfig(50)], ids=["no-ttl", "ttl"])
@pytest.mark.parametrize("options", OPTIONS, ids=["cached", "write-through", "materialising"])
@pytest.mark.parametrize("seed", range(2))
def test_random_calls_snapshots_and_restores_answer_alike(tmp_path: Path, seed: int, options: dict[str, Any],
                                                          ttl: TtlConfig | None) -> None:
    rng, clock, files = random.Random(seed), ManualClock(1000), LocalFiles(tmp_path / "files")
    rocks = Side("rocksdb", clock, ttl, directory=tmp_path / "0", **options)
    memory = Side("memory", clock, ttl)
    checkpoint = 0
    for step in range(250):
        call = random_call(rng)
        assert rocks.do(call) == memory.do(call), (step, call)
        if rng.random() < 0.05:
            clock.advance(rng.randrange(30))
        if rng.random() < 0.04:
            checkpoint += 1
            pending = rocks.keyed.snapshot(checkpoint, files, full=rng.random() < 0.2)
            before = rocks.everything()
            for _ in range(rng.randrange(6)):
                later = random_call(rng)
                assert rocks.do(later) == memory.do(later)
            fate = rng.random()
            if fate < 0.2:
                pending.cancel()
                rocks.keyed.checkpoint_aborted(checkpoint)
                continue
            handle = pending.run()
            if fate < 0.8:
                rocks.keyed.checkpoint_completed(checkpoint)
            else:
                rocks.keyed.checkpoint_aborted(checkpoint)
            restored = Side(rng.choice(["rocksdb", "memory"]), clock, ttl, [handle], files)
            assert restored.everything() == before
            restored.backend.close()
        if rng.random() < 0.01:
            checkpoint += 1
            handle = rocks.keyed.snapshot(checkpoint, files).run()
            rocks.backend.close()
            rocks = Side("rocksdb", clock, ttl, [handle], files, directory=tmp_path / f"r{checkpoint}", **options)
        assert step % 20 or rocks.everything() == memory.everything()
    due = [rocks.keyed.timers.pop_due(domain, 1000, 10_000) for domain in TimeDomain]
    expected = [memory.keyed.timers.pop_due(domain, 1000, 10_000) for domain in TimeDomain]
    for found, wanted in zip(due, expected):
        assert [timer.timestamp for timer in found] == sorted(timer.timestamp for timer in found)
        assert sorted(found, key=repr) == sorted(wanted, key=repr)
    rocks.backend.close()
    memory.backend.close()

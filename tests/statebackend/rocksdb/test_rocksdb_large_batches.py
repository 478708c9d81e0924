"""Batches so large that they go to RocksDB at once, past the entries that wait in Python."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from statebackend import (
    AggregatingStateDescriptor,
    LocalFiles,
    TtlConfig,
    Unavailable,
    ValueStateDescriptor,
    create_backend,
)
from statebackend.rocksdb.changelog import batch_of
from statebackend.rocksdb.parts import Parts

LIMIT = 100
KEYS = pa.array(range(3 * LIMIT))


@pytest.mark.parametrize("ttl", [None, TtlConfig("1d")], ids=["plain", "ttl"])
def test_a_large_batch_replaces_what_waits_and_is_in_the_next_snapshot(tmp_path: Path, ttl: TtlConfig | None) -> None:
    files = LocalFiles(tmp_path)
    handles = []
    with create_backend("rocksdb", write_back_entries=LIMIT) as backend:
        keyed = backend.keyed(uid="x", key_type=int)
        name: Any = keyed.state(ValueStateDescriptor("name", str, ttl=ttl))
        count: Any = keyed.state(AggregatingStateDescriptor("count", int, "count", ttl=ttl))
        for key in (5, 7):
            keyed.set_current_key(key)
            name.update("waits")
            count.add(1)
        frozen = keyed.snapshot(1, files)
        keyed.set_current_key(7)
        name.update("waits again")
        name.update_many(KEYS, pa.array([f"batch {key}" for key in range(len(KEYS))]))
        count.add_many(KEYS, KEYS)
        keyed.set_current_key(8)
        name.update("later")
        handles = [frozen.run(), keyed.snapshot(2, files).run()]
        assert name.value_many(pa.array([5, 7, 8, 299])).to_pylist() == ["batch 5", "batch 7", "later", "batch 299"]
    with create_backend("rocksdb") as backend:
        keyed = backend.keyed(uid="x", key_type=int, restore=[handles[1]], source=files)
        name, count = (keyed.state(kind) for kind in (ValueStateDescriptor("name", str, ttl=ttl),
                                                      AggregatingStateDescriptor("count", int, "count", ttl=ttl)))
        assert name.value_many(KEYS).to_pylist() == [f"batch {key}" if key != 8 else "later" for key in range(len(KEYS))]
        assert count.get_many(KEYS).to_pylist() == [1 + (key in (5, 7)) for key in range(len(KEYS))]
    with create_backend("rocksdb") as backend:
        keyed = backend.keyed(uid="x", key_type=int, restore=[handles[0]], source=files)
        name = keyed.state(ValueStateDescriptor("name", str, ttl=ttl))
        assert name.value_many(pa.array([5, 7, 8])).to_pylist() == ["waits", "waits", None]


def test_of_repeated_keys_in_a_large_batch_the_last_wins_and_nulls_remove() -> None:
    with create_backend("rocksdb", write_back_entries=LIMIT) as backend:
        state: Any = backend.keyed(uid="x", key_type=int).state(ValueStateDescriptor("v", int))
        state.update_many(KEYS, KEYS)
        state.update_many(pa.array([*range(LIMIT), *range(LIMIT)]), pa.array([None] * LIMIT + [None, *range(1, LIMIT)]))
        assert state.value_many(pa.array([0, 1, LIMIT])).to_pylist() == [None, 1, LIMIT]


def test_a_large_batch_that_can_not_be_written_waits_until_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: Any) -> None:
        raise Unavailable("no space left")

    with create_backend("rocksdb", write_back_entries=LIMIT) as backend:
        keyed = backend.keyed(uid="x", key_type=int)
        state: Any = keyed.state(ValueStateDescriptor("v", int))
        with monkeypatch.context() as patched:
            patched.setattr(Parts, "write", fail)
            with pytest.raises(Unavailable):
                state.update_many(KEYS, KEYS)
            assert state.value_many(KEYS).to_pylist() == KEYS.to_pylist()
        keyed.compact()
        assert state.value_many(KEYS).to_pylist() == KEYS.to_pylist()


def test_a_batch_for_the_log_sets_off_no_garbage_collection() -> None:
    """A container for each row, all alive at once, would: of all that the process holds, while every thread waits."""
    operations = [(key.to_bytes(4, "big"), b"value") for key in range(10_000)]
    collections = []

    def collected(phase: str, _info: Any) -> None:
        if phase == "start":
            collections.append(phase)

    gc.collect()
    gc.callbacks.append(collected)
    try:
        batch = batch_of(operations)
    finally:
        gc.callbacks.remove(collected)
    assert batch.num_rows == 10_000
    assert len(collections) <= 1

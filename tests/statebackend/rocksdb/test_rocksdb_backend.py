"""The backend itself: its folder, its options, its limits, crashes, migration."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from statebackend import (
    Closed,
    Conflict,
    IncompatibleState,
    InvalidRequest,
    KeyGroupRange,
    ListStateDescriptor,
    LocalFiles,
    ManualClock,
    MapStateDescriptor,
    TtlConfig,
    ValueStateDescriptor,
    create_backend,
)
from statebackend.rocksdb.context import KeyContext
from statebackend.rocksdb.keyed import RocksDBKeyed
from statebackend.rocksdb.store import shared_memory
from statebackend.types import state_type


def test_wrong_options_are_refused_by_name() -> None:
    for options, word in (({"colour": 1}, "colour"), ({"memory_limit": "1 parsec"}, "size"),
                          ({"l0_trigger": 0}, "l0_trigger"), ({"write_back_entries": 0}, "write_back_entries")):
        with pytest.raises(InvalidRequest, match=word):
            create_backend("rocksdb", **options)


def test_a_temporary_folder_is_removed_and_a_given_one_is_emptied(tmp_path: Path) -> None:
    with create_backend("rocksdb") as backend:
        backend.keyed(uid="a/../b", key_type=str)
        folder = backend.directory  # type: ignore[attr-defined]
        assert folder.exists()
    assert not folder.exists()
    with create_backend("rocksdb", directory=tmp_path / "own") as backend:
        backend.keyed(uid="x", key_type=str)
    assert [entry.name for entry in (tmp_path / "own").iterdir()] == ["HOLDFAST-LOCK"]
    with create_backend("rocksdb", directory=tmp_path / "own"):
        pass


def test_one_keyed_state_per_operator_and_range() -> None:
    with create_backend("rocksdb") as backend:
        low = backend.keyed(uid="x", key_type=int, key_groups=KeyGroupRange(0, 63))
        backend.keyed(uid="x", key_type=int, key_groups=KeyGroupRange(64, 127))
        with pytest.raises(Conflict, match="open already"):
            backend.keyed(uid="x", key_type=int, key_groups=KeyGroupRange(60, 70))
        low.close()
        backend.keyed(uid="x", key_type=int, key_groups=KeyGroupRange(0, 63))
        with pytest.raises(InvalidRequest, match="max parallelism"):
            backend.keyed(uid="y", key_type=int, key_groups=KeyGroupRange(0, 128))


@pytest.mark.crash
def test_a_second_process_is_refused_and_a_killed_one_leaves_the_folder_free(tmp_path: Path) -> None:
    script = (f"import sys, time\nfrom statebackend import create_backend\n"
              f"backend = create_backend('rocksdb', directory={str(tmp_path / 'db')!r})\n"
              f"keyed = backend.keyed(uid='x', key_type=int)\nprint('ready', flush=True)\ntime.sleep(60)\n")
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready"
        with pytest.raises(Conflict) as refused:
            create_backend("rocksdb", directory=tmp_path / "db")
        assert refused.value.context["process"] == str(process.pid)
        assert refused.value.hint is not None
        process.send_signal(signal.SIGKILL)
        process.wait()
    create_backend("rocksdb", directory=tmp_path / "db").close()


@pytest.mark.crash
def test_a_process_killed_while_snapshotting_leaves_its_last_checkpoint_good(tmp_path: Path) -> None:
    script = f"""
import json, sys
import numpy as np, pyarrow as pa
from statebackend import *
files = LocalFiles({str(tmp_path / 'files')!r})
keyed = create_backend("rocksdb", write_back_entries=2000, log_floor_bytes=20000).keyed(uid="x", key_type=int)
state = keyed.state(ValueStateDescriptor("v", int))
for number in range(1, 10_000):
    state.update_many(pa.array(np.arange(3000)), pa.array(np.full(3000, number)))
    handle = keyed.snapshot(number, files).run()
    keyed.checkpoint_completed(number)
    print(json.dumps([number, handle.to_json()]), flush=True)
"""
    import json

    from statebackend import KeyedHandle

    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(12)]
        process.send_signal(signal.SIGKILL)
        process.wait()
    number, handle = json.loads(lines[-1])
    backend = create_backend("rocksdb")
    keyed = backend.keyed(uid="x", key_type=int, restore=[KeyedHandle.from_json(handle)],
                          source=LocalFiles(tmp_path / "files"))
    state: Any = keyed.state(ValueStateDescriptor("v", int))
    assert state.value_many(pa.array(range(3000))).to_pylist() == [number] * 3000
    backend.close()


def test_values_larger_than_the_limit_are_refused_and_the_old_value_stays() -> None:
    with create_backend("rocksdb", max_value_bytes=1000) as backend:
        keyed = backend.keyed(uid="x", key_type=str)
        value: Any = keyed.state(ValueStateDescriptor("value", bytes))
        lists: Any = keyed.state(ListStateDescriptor("list", bytes))
        maps: Any = keyed.state(MapStateDescriptor("map", str, bytes))
        keyed.set_current_key("k")
        value.update(b"small")
        large = b"x" * 2000
        for call in (lambda: value.update(large), lambda: lists.add(large), lambda: lists.update([b"a", large]),
                     lambda: maps.put("m", large), lambda: value.update_many(pa.array(["k"]), pa.array([large])),
                     lambda: lists.add_many(pa.array(["k"]), pa.array([large]))):
            with pytest.raises(InvalidRequest, match="larger than the limit") as refused:
                call()
            assert refused.value.context["state"] in ("value", "list", "map")
            assert refused.value.context["key"] == "k"
        assert (value.value(), lists.get(), list(maps.entries())) == (b"small", [], [])


def test_the_fast_key_encoding_gives_the_same_bytes_as_the_general_one() -> None:
    for most in (128, 100):
        context = KeyContext(state_type(int), most, KeyGroupRange(0, most - 1), ManualClock())
        fast, general = context._int_entry_keys(b"ab"), context._entry_key_maker(b"ab")
        keys = [0, 1, -1, 2**63 - 1, -(2**63), 12345678901, -98765]
        assert [fast[key] for key in keys] == [general(key) for key in keys]
        assert context.prefixes(pa.array(keys), b"ab") == [general(key) for key in keys]


def test_keys_of_other_key_groups_are_refused() -> None:
    with create_backend("rocksdb") as backend:
        keyed = backend.keyed(uid="x", key_type=str, key_groups=KeyGroupRange(0, 0))
        state: Any = keyed.state(ValueStateDescriptor("v", int))
        with pytest.raises(InvalidRequest, match="not held here"):
            state.update_many(pa.array(["a", "b", "c", "d"]), pa.array([1, 2, 3, 4]))
        keyed.set_current_key("a")
        with pytest.raises(InvalidRequest, match="not held here"):
            state.update(1)
        assert list(state.stream_keys()) == []


def test_memory_stays_bounded_while_state_grows_to_ten_times_the_limit() -> None:
    limit = shared_memory().limit
    try:
        with create_backend("rocksdb", memory_limit="8MiB", write_back_bytes="1MiB") as backend:
            keyed = backend.keyed(uid="x", key_type=int)
            assert isinstance(keyed, RocksDBKeyed)
            state: Any = keyed.state(ValueStateDescriptor("v", bytes))
            memory = shared_memory()
            used = []
            for begin in range(0, 80_000, 4_000):
                keys = pa.array(range(begin, begin + 4_000))
                state.update_many(keys, pa.array([os.urandom(1100) for _ in range(4_000)]))
                state.value_many(pa.array(range(0, begin + 1, 37)))
                used.append(memory.usage)
            stored = sum(part.store.table_bytes() for part in keyed._engine.parts.parts)
            assert stored > 9 * (8 << 20)
            # RocksDB allocates in blocks and lets the buffer that is being flushed live on: some MiB, whatever the limit.
            assert max(used) <= (8 << 20) + (5 << 20)
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0
    finally:
        shared_memory(limit)


# -- migration


def test_restored_state_is_migrated_at_registration(tmp_path: Path) -> None:
    old_type = make_dataclass("Point", [("x", int), ("y", int)])
    new_type = make_dataclass("Point", [("x", int), ("label", str, "none")])
    for options in ({}, {"log_floor_bytes": 0}):
        files = LocalFiles(tmp_path / "files")
        with create_backend("rocksdb", **options) as backend:
            keyed = backend.keyed(uid="x", key_type=int)
            point: Any = keyed.state(ValueStateDescriptor("point", old_type))
            small: Any = keyed.state(ListStateDescriptor("small", pa.int32()))
            timed: Any = keyed.state(ValueStateDescriptor("timed", int))
            for key in range(50):
                keyed.set_current_key(key)
                point.update(old_type(key, 2))
                small.add_all([key, 1])
                timed.update(key)
            handle = keyed.snapshot(1, files).run()
        clock = ManualClock(5_000)
        with create_backend("rocksdb") as backend:
            keyed = backend.keyed(uid="x", key_type=int, restore=[handle], source=files, clock=clock)
            point = keyed.state(ValueStateDescriptor("point", new_type))
            small = keyed.state(ListStateDescriptor("small", int))
            timed = keyed.state(ValueStateDescriptor("timed", int, ttl=TtlConfig(100)))
            keyed.set_current_key(7)
            assert point.value() == new_type(7, "none")
            small.add(2**40)
            assert small.get() == [7, 1, 2**40]
            assert timed.value() == 7
            again = keyed.snapshot(2, files).run()
            clock.advance(100)
            assert timed.value() is None
        with create_backend("memory") as backend:
            keyed = backend.keyed(uid="x", key_type=int, restore=[again], source=files)
            point = keyed.state(ValueStateDescriptor("point", new_type))
            keyed.set_current_key(7)
            assert point.value() == new_type(7, "none")
        with create_backend("rocksdb") as backend:
            keyed = backend.keyed(uid="x", key_type=int, restore=[handle], source=files)
            with pytest.raises(IncompatibleState, match="point"):
                keyed.state(ValueStateDescriptor("point", str))
            with pytest.raises(IncompatibleState, match="timed"):
                keyed.state(ListStateDescriptor("timed", int))
            kept: Any = keyed.state(ValueStateDescriptor("timed", int))
            keyed.set_current_key(3)
            assert kept.value() == 3


def test_a_state_registered_twice_must_be_the_same() -> None:
    with create_backend("rocksdb") as backend:
        keyed = backend.keyed(uid="x", key_type=int)
        state = keyed.state(ValueStateDescriptor("v", int))
        assert keyed.state(ValueStateDescriptor("v", int)) is state
        for other in (ValueStateDescriptor("v", str), ListStateDescriptor("v", int)):
            with pytest.raises(InvalidRequest, match="registered twice"):
                keyed.state(other)


def test_a_number_is_read_through_frozen_generations_and_refused_after_close(tmp_path: Path) -> None:
    backend, files = create_backend("rocksdb", directory=str(tmp_path / "db")), LocalFiles(tmp_path / "files")
    keyed = backend.keyed(uid="x", key_type=int)
    for ttl in (None, TtlConfig("1d")):
        state: Any = keyed.state(ValueStateDescriptor(f"n-{ttl is None}", int, default=0, ttl=ttl))
        keyed.set_current_key(1)
        state.update(10)
        first = keyed.snapshot(1, files)
        keyed.set_current_key(2)
        state.update(20)
        second = keyed.snapshot(2, files)
        assert [_value(keyed, state, key) for key in (1, 2, 3)] == [10, 20, 0]
        _value(keyed, state, 1)
        state.update(11)
        for snapshot in (first, second):
            snapshot.run()
        assert [_value(keyed, state, key) for key in (1, 2, 3)] == [11, 20, 0]
    backend.close()
    with pytest.raises(Closed):
        state.value()


def _value(keyed: Any, state: Any, key: int) -> Any:
    keyed.set_current_key(key)
    return state.value()

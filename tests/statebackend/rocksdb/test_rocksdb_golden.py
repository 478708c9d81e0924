"""A RocksDB snapshot that version 1 wrote: two databases, one of them clipped, and a log on top. Every release reads it.

The folder was written once by this file run as a script; it never changes:

    python tests/statebackend/rocksdb/test_rocksdb_golden.py tests/golden/v1/rocksdb
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from statebackend import (
    KeyedHandle,
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
    key_group_of,
)
from statebackend.rocksdb.handles import chain_of

GOLDEN = Path(__file__).resolve().parents[2] / "golden/v1/rocksdb"
KEY_GROUPS = KeyGroupRange(0, 95)
NOW = 1_700_000_000_000
KEYS = range(40)


class States:
    """States of several kinds over int keys, with and without TTL and namespaces, and timers."""

    def __init__(self, keyed: Any) -> None:
        self.keyed = keyed
        self.name = keyed.state(ValueStateDescriptor("name", str, ttl=TtlConfig("1d")))
        self.events = keyed.state(ListStateDescriptor("events", int))
        self.seen = keyed.state(MapStateDescriptor("seen", str, float))
        self.total = keyed.state(ReducingStateDescriptor("total", int, "sum"), namespace_type=int)

    def fill(self, keys: Sequence[int]) -> None:
        for key in keys:
            self.keyed.set_current_key(key)
            self.name.update(f"key {key}")
            self.events.add_all([key, -key])
            self.seen.put_all({"a": key / 2, "b": 0.0})
            self.total.set_current_namespace(key % 3)
            self.total.add(key)
            self.keyed.timers.register(TimeDomain.EVENT, 1000 + key)

    def change(self, keys: Sequence[int]) -> None:
        for key in keys:
            self.keyed.set_current_key(key)
            self.name.clear()
            self.events.add(7)
            self.seen.remove("b")

    def content(self) -> list[Any]:
        """Everything, as plain JSON values: a row for each key, and the timers."""
        rows = []
        for key in sorted(self.events.stream_keys()):
            self.keyed.set_current_key(key)
            totals = []
            for namespace in self.total.namespaces():
                self.total.set_current_namespace(namespace)
                totals.append([namespace, self.total.get()])
            rows.append([key, self.name.value(), self.events.get(), [list(entry) for entry in self.seen.entries()], totals])
        timers = sorted([timer.timestamp, timer.key] for timer in self.keyed.timers.timers(TimeDomain.EVENT))
        return [rows, timers]


def open_states(backend: Any, key_groups: KeyGroupRange, restore: Sequence[KeyedHandle] = (), source: Any = None) -> States:
    return States(backend.keyed(uid="golden", key_type=int, key_groups=key_groups, clock=ManualClock(NOW), restore=restore,
                                source=source))


def held(key_groups: KeyGroupRange) -> list[int]:
    return [key for key in KEYS if key_group_of(key, 128) in key_groups]


def write(folder: Path) -> None:
    """Two subtasks are snapshotted, restored by one that holds three quarters of the key groups, and changed twice."""
    with tempfile.TemporaryDirectory() as scratch:
        first = LocalFiles(Path(scratch) / "first")
        handles = []
        for number, key_groups in enumerate((KeyGroupRange(0, 63), KeyGroupRange(64, 127))):
            with create_backend("rocksdb", log_floor_bytes=0) as backend:
                states = open_states(backend, key_groups)
                states.fill(held(key_groups))
                handles.append(states.keyed.snapshot(number, first).run())
        files = LocalFiles(folder)
        with create_backend("rocksdb") as backend:
            states = open_states(backend, KEY_GROUPS, handles, first)
            states.keyed.snapshot(1, files).run()
            states.keyed.checkpoint_completed(1)
            states.change(held(KEY_GROUPS)[:5])
            states.keyed.snapshot(2, files).run()
            states.keyed.checkpoint_completed(2)
            states.change(held(KEY_GROUPS)[3:8])
            handle = states.keyed.snapshot(3, files).run()
            (folder / "handle.json").write_text(json.dumps(handle.to_json(), indent=1) + "\n")
            (folder / "content.json").write_text(json.dumps(states.content()) + "\n")


def golden_handle() -> KeyedHandle:
    return KeyedHandle.from_json(json.loads((GOLDEN / "handle.json").read_text()))


@pytest.mark.parametrize("name", ["memory", "filesystem", "rocksdb"])
@pytest.mark.parametrize("bounds", [[0, 95], [0, 40, 95], [0, 63, 70, 95]])
def test_every_backend_at_every_parallelism_reads_what_was_stored(name: str, bounds: list[int]) -> None:
    rows, timers = [], []
    for first, last in pairwise(bounds):
        with create_backend(name) as backend:
            key_groups = KeyGroupRange(first + (first > 0), last)
            part = open_states(backend, key_groups, [golden_handle()], LocalFiles(GOLDEN)).content()
        rows += part[0]
        timers += part[1]
    assert [sorted(rows), sorted(timers)] == json.loads((GOLDEN / "content.json").read_text())


def test_an_upgraded_backend_goes_on_where_the_golden_snapshot_ends(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path / "files")
    with create_backend("rocksdb") as backend:
        states = open_states(backend, KEY_GROUPS, [golden_handle()], LocalFiles(GOLDEN))
        states.fill([1000])
        expected, handle = states.content(), states.keyed.snapshot(4, files).run()
    with create_backend("rocksdb") as backend:
        assert open_states(backend, KEY_GROUPS, [handle], files).content() == expected


def test_the_golden_snapshot_has_one_of_everything() -> None:
    """Two databases, a table that only hides what was clipped, and a log of two files that overlap."""
    chain = chain_of(golden_handle())
    assert [part.key_groups for part in chain.parts] == [KeyGroupRange(0, 63), KeyGroupRange(64, 95)]
    assert sorted(sum(name.endswith(".sst") for name in part.files) for part in chain.parts) == [1, 2]
    assert len(chain.log) == 2


if __name__ == "__main__":
    target = Path(sys.argv[1])
    if target.exists():
        sys.exit(f"{target} exists: golden files never change")
    write(target)

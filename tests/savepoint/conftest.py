"""A small job's state, taken as a native snapshot by any backend, for the tests of the toolkit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from checkpoint.storage.files import CheckpointTarget
from checkpoint.storage.metadata import CheckpointMetadata, OperatorEntry, SubtaskEntry
from checkpoint.storage.store import FileStore
from statebackend import (
    KeyGroupRange,
    ListStateDescriptor,
    MapStateDescriptor,
    OperatorStateStore,
    TimeDomain,
    TtlConfig,
    ValueStateDescriptor,
    create_backend,
    key_group_of,
    key_group_range,
)

JOB_ID = "0123456789abcdef0123456789abcdef"
TOTAL = ValueStateDescriptor("total", int, default=0)
EVENTS = ListStateDescriptor("events", str)
SEEN = MapStateDescriptor("seen", str, float)
SESSION = ValueStateDescriptor("session", str, ttl=TtlConfig("7d"))


class SmallJob:
    """`users` keys with a value, a list, a map, a namespaced value with TTL and a timer each; offsets and rules."""

    def __init__(self, folder: Path, *, backend: str = "filesystem", users: int = 200, parallelism: int = 2,
                 max_parallelism: int = 128) -> None:
        self.folder, self.backend, self.users = folder, backend, users
        self.parallelism, self.max_parallelism = parallelism, max_parallelism
        self.totals = {f"user-{number}": number for number in range(users)}

    def native(self, *, rounds: int = 1, checkpoint: bool = False) -> Path:
        """A native savepoint (or checkpoint, whose later rounds build on earlier ones); its folder."""
        store = FileStore.at(str(self.folder))
        place = "chk-9" if checkpoint else ""
        subtasks = []
        for index in range(self.parallelism):
            target = CheckpointTarget(store, place, "count", index, inline_threshold=64,
                                      self_contained=not checkpoint)
            subtasks.append(self._subtask(index, target, rounds))
        entry = OperatorEntry("count", "count", self.parallelism, self.max_parallelism, tuple(subtasks))
        metadata = CheckpointMetadata(JOB_ID, "small", 9, 1, "checkpoint" if checkpoint else "savepoint",
                                      trigger_timestamp=1_000, completed_timestamp=2_000, operators=(entry,))
        store.write(f"{place}/_metadata" if place else "_metadata", metadata.to_bytes())
        return self.folder / place if place else self.folder

    def _subtask(self, index: int, target: CheckpointTarget, rounds: int) -> SubtaskEntry:
        span = key_group_range(index, self.parallelism, self.max_parallelism)
        options = {"directory": self.folder.parent / f"state-{index}-{self.folder.name}"} \
            if self.backend == "rocksdb" else {}
        with create_backend(self.backend, **options) as backend:
            keyed = backend.keyed(uid="count", key_type=str, max_parallelism=self.max_parallelism, key_groups=span)
            for number in range(rounds):
                self._fill(keyed, span, only_every=1 if number == 0 else 7)
                handle = keyed.snapshot(number + 1, target, full=False).run()
                keyed.checkpoint_completed(number + 1)
        return SubtaskEntry(index, keyed=(handle,), operator=target.put("operator", self._operator_state(index)))

    def _fill(self, keyed: Any, span: KeyGroupRange, only_every: int) -> None:
        total, events, seen = keyed.state(TOTAL), keyed.state(EVENTS), keyed.state(SEEN)
        session = keyed.state(SESSION, namespace_type=int)
        for number in range(0, self.users, only_every):
            user = f"user-{number}"
            if key_group_of(user, self.max_parallelism) not in span:
                continue
            keyed.set_current_key(user)
            total.update(number)
            events.update([f"e{place}" for place in range(number % 4)])
            seen.clear()
            seen.put_all({f"page-{place}": place / 2 for place in range(number % 3)})
            session.set_current_namespace(number % 5)
            session.update(f"s{number}")
            keyed.timers.register(TimeDomain.EVENT, 1_000 + number)

    def _operator_state(self, index: int) -> bytes:
        store = OperatorStateStore("count")
        store.list_state(ListStateDescriptor("offsets", int)).update([index * 10, index * 10 + 1])
        store.union_list_state(ListStateDescriptor("all", str)).update([f"from-{index}"])
        store.broadcast_state(MapStateDescriptor("rules", str, int)).put_all({"a": 1, "b": 2})
        return store.snapshot().to_bytes()


@pytest.fixture
def small_job(tmp_path: Path) -> Callable[..., SmallJob]:
    def make(name: str = "native", **options: Any) -> SmallJob:
        return SmallJob(tmp_path / name, **options)

    return make


@pytest.fixture
def open_savepoint_path(small_job: Callable[..., SmallJob], tmp_path: Path) -> Path:
    """An open savepoint of the small job."""
    import savepoint

    savepoint.convert_savepoint(small_job().native(), tmp_path / "sp")
    return tmp_path / "sp"


@pytest.fixture
def rows_of() -> Callable[..., list[dict[str, Any]]]:
    """The rows of a state as dicts, without their key groups, in a fixed order."""
    import savepoint

    def rows(path: Any, uid: str, state: str, without: Sequence[str] = ("key_group",)) -> list[dict[str, Any]]:
        with savepoint.open(path) as opened:
            found = opened.read(uid, state).read_all().to_pylist()
        return sorted(({name: value for name, value in row.items() if name not in without} for row in found), key=repr)

    return rows

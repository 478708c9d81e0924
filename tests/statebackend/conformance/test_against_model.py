"""A state machine that drives backends and a plain-Python model with the same random steps and compares them after each.

Steps: every kind of state with namespaces and TTL, per record and by batch; timers; time; snapshots that complete, fail,
are aborted or stay unfinished; restores of any completed one into any parallelism and any backend.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from statebackend import (
    AggregatingStateDescriptor,
    Cleanup,
    ListStateDescriptor,
    LocalFiles,
    ManualClock,
    MapStateDescriptor,
    ReducingStateDescriptor,
    TimeDomain,
    TtlConfig,
    Unavailable,
    ValueStateDescriptor,
    create_backend,
    key_group_of,
    key_group_range,
)

MAX_PARALLELISM = 16
TTL = 40
KEYS = [0, 1, 2, 3, -7, 2**40, 2**63 - 1]
NAMESPACES = [None, 1, 2]
MAP_KEYS = ["", "x", "y", "é"]
EVENT = TimeDomain.EVENT
key, namespace, map_key, small = (st.sampled_from(KEYS), st.sampled_from(NAMESPACES), st.sampled_from(MAP_KEYS),
                                  st.integers(-5, 5))
some_keys = st.lists(key, min_size=1, max_size=6)


class Model:
    """What the state must be. Entries with TTL are (value, expires_at) pairs."""

    def __init__(self) -> None:
        self.value: dict[int, int] = {}
        self.timed: dict[int, tuple[int, int]] = {}
        self.lists: dict[tuple[int, Any], list[int]] = {}
        self.timed_lists: dict[int, list[tuple[int, int]]] = {}
        self.maps: dict[tuple[int, Any], dict[str, int]] = {}
        self.timed_maps: dict[int, dict[str, tuple[int, int]]] = {}
        self.sums: dict[int, int] = {}
        self.window_sums: dict[tuple[int, Any], int] = {}
        self.means: dict[int, list[int]] = {}
        self.timers: set[tuple[int, int, Any]] = set()


class Failing:
    """A target that fails at the first byte."""

    def create(self, hint: str, *, shared: bool) -> Any:
        raise Unavailable("no space left on device")

    def upload(self, local: Path, hint: str, *, shared: bool) -> Any:
        raise Unavailable("no space left on device")


class Subtask:
    """One keyed backend with all states registered."""

    def __init__(self, keyed: Any) -> None:
        ttl = TtlConfig(TTL, cleanup=Cleanup(incremental=2))
        self.keyed = keyed
        self.value = keyed.state(ValueStateDescriptor("value", int, default=0))
        self.timed = keyed.state(ValueStateDescriptor("timed", int, ttl=ttl))
        self.lists = keyed.state(ListStateDescriptor("lists", int), namespace_type=int)
        self.timed_lists = keyed.state(ListStateDescriptor("timed_lists", int, ttl=ttl))
        self.maps = keyed.state(MapStateDescriptor("maps", str, int), namespace_type=int)
        self.timed_maps = keyed.state(MapStateDescriptor("timed_maps", str, int, ttl=ttl))
        self.sums = keyed.state(ReducingStateDescriptor("sums", int, "sum"))
        self.window_sums = keyed.state(ReducingStateDescriptor("window_sums", int, "sum"), namespace_type=int)
        self.means = keyed.state(AggregatingStateDescriptor("means", float, "avg"))


class BackendMachine(RuleBasedStateMachine):
    backends: tuple[str, ...] = ("memory", "filesystem")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-model-"))
        self.files = LocalFiles(self.folder / "snapshots")
        self.clock = ManualClock(1000)
        self.model = Model()
        self.opened: list[Any] = []
        self.subtasks: list[Subtask] = []
        self.next_checkpoint = 1
        self.pending: list[tuple[int, list[Any], Model]] = []
        self.unconfirmed: list[tuple[int, list[Any], Model]] = []
        self.completed: list[tuple[list[Any], Model]] = []

    def teardown(self) -> None:
        self._close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _close(self) -> None:
        for backend in self.opened:
            backend.close()
        self.opened, self.subtasks = [], []

    def _open(self, name: str, parallelism: int, handles: list[Any]) -> None:
        self._close()
        for index in range(parallelism):
            options = {"directory": tempfile.mkdtemp(dir=self.folder)} if name == "rocksdb" else {}
            backend = create_backend(name, **options)
            self.opened.append(backend)
            self.subtasks.append(Subtask(backend.keyed(
                uid="u", key_type=int, max_parallelism=MAX_PARALLELISM, clock=self.clock, restore=handles,
                source=self.files if handles else None, key_groups=key_group_range(index, parallelism, MAX_PARALLELISM))))

    def _of(self, key_: int) -> Subtask:
        group = key_group_of(key_, MAX_PARALLELISM)
        subtask = next(one for one in self.subtasks if group in one.keyed.key_groups)
        subtask.keyed.set_current_key(key_)
        return subtask

    def _split(self, keys: list[int], *columns: list[Any]) -> list[tuple[Subtask, list[list[Any]]]]:
        """The rows of a batch by the subtask they belong to."""
        found = []
        for subtask in self.subtasks:
            rows = [row for row in zip(keys, *columns) if key_group_of(row[0], MAX_PARALLELISM) in subtask.keyed.key_groups]
            if rows:
                found.append((subtask, [list(column) for column in zip(*rows)]))
        return found

    def _expires(self) -> int:
        return self.clock.now_ms() + TTL

    @initialize(data=st.data(), parallelism=st.integers(1, 3))
    def start(self, data: Any, parallelism: int) -> None:
        self._open(data.draw(st.sampled_from(self.backends)), parallelism, [])

    # -- per record

    @rule(key=key, number=small)
    def update_value(self, key: int, number: int) -> None:
        self._of(key).value.update(number)
        self.model.value[key] = number

    @rule(key=key)
    def clear_values(self, key: int) -> None:
        subtask = self._of(key)
        for state in (subtask.value, subtask.timed, subtask.timed_lists, subtask.timed_maps, subtask.sums, subtask.means):
            state.clear()
        for table in (self.model.value, self.model.timed, self.model.timed_lists, self.model.timed_maps, self.model.sums,
                      self.model.means):
            table.pop(key, None)

    @rule(key=key, number=small)
    def write_timed(self, key: int, number: int) -> None:
        subtask, expires = self._of(key), self._expires()
        subtask.timed.update(number)
        subtask.timed_lists.add(number)
        subtask.timed_maps.put(MAP_KEYS[number % 3], number)
        self.model.timed[key] = (number, expires)
        self.model.timed_lists.setdefault(key, []).append((number, expires))
        self.model.timed_maps.setdefault(key, {})[MAP_KEYS[number % 3]] = (number, expires)

    @rule(key=key, namespace=namespace, numbers=st.lists(small, max_size=3), replace=st.booleans())
    def write_list(self, key: int, namespace: Any, numbers: list[int], replace: bool) -> None:
        state = self._of(key).lists
        state.set_current_namespace(namespace)
        (state.update if replace else state.add_all)(numbers)
        held = [] if replace else self.model.lists.get((key, namespace), [])
        self.model.lists[key, namespace] = held + numbers

    @rule(key=key, namespace=namespace, map_key=map_key, number=small)
    def put_in_map(self, key: int, namespace: Any, map_key: str, number: int) -> None:
        state = self._of(key).maps
        state.set_current_namespace(namespace)
        state.put(map_key, number)
        self.model.maps.setdefault((key, namespace), {})[map_key] = number

    @rule(key=key, namespace=namespace, map_key=map_key)
    def remove_from_map(self, key: int, namespace: Any, map_key: str) -> None:
        state = self._of(key).maps
        state.set_current_namespace(namespace)
        state.remove(map_key)
        self.model.maps.get((key, namespace), {}).pop(map_key, None)

    @rule(key=key, namespace=namespace)
    def clear_collections(self, key: int, namespace: Any) -> None:
        subtask = self._of(key)
        for state, table in ((subtask.lists, self.model.lists), (subtask.maps, self.model.maps),
                             (subtask.window_sums, self.model.window_sums)):
            state.set_current_namespace(namespace)
            state.clear()
            table.pop((key, namespace), None)

    @rule(key=key, namespace=namespace, number=small)
    def add(self, key: int, namespace: Any, number: int) -> None:
        subtask = self._of(key)
        subtask.sums.add(number)
        subtask.means.add(float(number))
        subtask.window_sums.set_current_namespace(namespace)
        subtask.window_sums.add(number)
        self.model.sums[key] = self.model.sums.get(key, 0) + number
        self.model.means.setdefault(key, []).append(number)
        self.model.window_sums[key, namespace] = self.model.window_sums.get((key, namespace), 0) + number

    @rule(key=key, into=st.sampled_from([1, 2]), sources=st.lists(st.sampled_from([1, 2, 3]), max_size=2))
    def merge(self, key: int, into: int, sources: list[int]) -> None:
        subtask = self._of(key)
        for state in (subtask.lists, subtask.maps, subtask.window_sums):
            state.merge_namespaces(into, sources)
        model = self.model
        for source in dict.fromkeys(sources):
            if source == into:
                continue
            if (key, source) in model.lists:
                model.lists[key, into] = model.lists.get((key, into), []) + model.lists.pop((key, source))
            model.maps.setdefault((key, into), {}).update(model.maps.pop((key, source), {}))
            if (key, source) in model.window_sums:
                model.window_sums[key, into] = model.window_sums.get((key, into), 0) + \
                    model.window_sums.pop((key, source))

    # -- batches

    @rule(keys=some_keys, data=st.data())
    def update_batch(self, keys: list[int], data: Any) -> None:
        numbers = data.draw(st.lists(small | st.none(), min_size=len(keys), max_size=len(keys)))
        for subtask, (part, values) in self._split(keys, numbers):
            subtask.value.update_many(pa.array(part), pa.array(values, pa.int64()))
        for key_, number in zip(keys, numbers):
            if number is None:
                self.model.value.pop(key_, None)
            else:
                self.model.value[key_] = number

    @rule(keys=some_keys, data=st.data())
    def add_batch(self, keys: list[int], data: Any) -> None:
        numbers = data.draw(st.lists(small, min_size=len(keys), max_size=len(keys)))
        for subtask, (part, values) in self._split(keys, numbers):
            subtask.sums.add_many(pa.array(part), pa.array(values))
            subtask.means.add_many(pa.array(part), pa.array([float(value) for value in values]))
            subtask.timed_lists.add_many(pa.array(part), pa.array(values))
        for key_, number in zip(keys, numbers):
            self.model.sums[key_] = self.model.sums.get(key_, 0) + number
            self.model.means.setdefault(key_, []).append(number)
            self.model.timed_lists.setdefault(key_, []).append((number, self._expires()))

    @rule(keys=some_keys, data=st.data())
    def put_batch(self, keys: list[int], data: Any) -> None:
        inner = data.draw(st.lists(map_key, min_size=len(keys), max_size=len(keys)))
        for subtask, (part, names) in self._split(keys, inner):
            subtask.maps.set_current_namespace(None)
            subtask.maps.put_many(pa.array(part), pa.array(names), pa.array(range(len(part))))
            for index, (key_, name) in enumerate(zip(part, names)):
                self.model.maps.setdefault((key_, None), {})[name] = index

    @rule(keys=some_keys)
    def clear_batch(self, keys: list[int]) -> None:
        for subtask, (part,) in self._split(keys):
            for state in (subtask.value, subtask.sums, subtask.means):
                state.clear_many(pa.array(part))
        for key_ in keys:
            for table in (self.model.value, self.model.sums, self.model.means):
                table.pop(key_, None)

    # -- time

    @rule(by=st.sampled_from([1, 15, TTL]))
    def pass_time(self, by: int) -> None:
        self.clock.advance(by)

    @rule(limit=st.sampled_from([1, 100]))
    def sweep(self, limit: int) -> None:
        for subtask in self.subtasks:
            subtask.keyed.sweep(limit)

    @rule(key=key, time=st.integers(0, 20), namespace=namespace, delete=st.booleans())
    def set_timer(self, key: int, time: int, namespace: Any, delete: bool) -> None:
        timers = self._of(key).keyed.timers
        if delete:
            timers.delete(EVENT, time, namespace)
            self.model.timers.discard((time, key, namespace))
        else:
            timers.register(EVENT, time, namespace)
            self.model.timers.add((time, key, namespace))

    @rule(until=st.integers(0, 20), limit=st.sampled_from([1, 100]))
    def fire(self, until: int, limit: int) -> None:
        for subtask in self.subtasks:
            held = sorted(timer[0] for timer in self.model.timers
                          if key_group_of(timer[1], MAX_PARALLELISM) in subtask.keyed.key_groups and timer[0] <= until)
            fired = subtask.keyed.timers.pop_due(EVENT, until, limit)
            assert [timer.timestamp for timer in fired] == held[:limit]
            self.model.timers.difference_update(tuple(timer) for timer in fired)

    # -- snapshots

    @rule(full=st.booleans())
    def begin_snapshot(self, full: bool) -> None:
        number = self.next_checkpoint
        self.next_checkpoint += 1
        begun = [subtask.keyed.snapshot(number, self.files, full=full) for subtask in self.subtasks]
        self.pending.append((number, begun, copy.deepcopy(self.model)))

    @precondition(lambda self: self.pending)
    @rule(data=st.data(), complete=st.booleans())
    def write_snapshot(self, data: Any, complete: bool) -> None:
        number, begun, model = self.pending.pop(data.draw(st.integers(0, len(self.pending) - 1)))
        self.unconfirmed.append((number, [one.run() for one in begun], model))
        if complete:
            self.complete_snapshot(len(self.unconfirmed) - 1)

    @precondition(lambda self: self.unconfirmed)
    @rule(data=st.data())
    def confirm(self, data: Any) -> None:
        self.complete_snapshot(data.draw(st.integers(0, len(self.unconfirmed) - 1)))

    def complete_snapshot(self, index: int) -> None:
        number, handles, model = self.unconfirmed[index]
        for subtask in self.subtasks:
            subtask.keyed.checkpoint_completed(number)
        self.unconfirmed = [one for one in self.unconfirmed if one[0] > number]
        self.completed.append((handles, model))

    @precondition(lambda self: self.pending or self.unconfirmed)
    @rule(data=st.data())
    def abort_snapshot(self, data: Any) -> None:
        chosen = data.draw(st.sampled_from([one[0] for one in (*self.pending, *self.unconfirmed)]))
        for number, begun, _ in self.pending:
            if number == chosen and data.draw(st.booleans()):
                for one in begun:
                    one.cancel()
        for subtask in self.subtasks:
            subtask.keyed.checkpoint_aborted(chosen)
        self.pending = [one for one in self.pending if one[0] != chosen]
        self.unconfirmed = [one for one in self.unconfirmed if one[0] != chosen]

    @rule()
    def fail_snapshot(self) -> None:
        number = self.next_checkpoint
        self.next_checkpoint += 1
        begun = [subtask.keyed.snapshot(number, Failing(), full=True) for subtask in self.subtasks]
        for one in begun:
            with suppress(Unavailable):  # a subtask without state may have nothing to write
                one.run()
        for subtask in self.subtasks:
            subtask.keyed.checkpoint_aborted(number)

    @precondition(lambda self: self.completed)
    @rule(data=st.data(), parallelism=st.integers(1, 4))
    def restore(self, data: Any, parallelism: int) -> None:
        handles, model = self.completed[-1] if data.draw(st.booleans()) else data.draw(st.sampled_from(self.completed))
        self.pending, self.unconfirmed = [], []
        self.model = copy.deepcopy(model)
        self._open(data.draw(st.sampled_from(self.backends)), parallelism, handles)

    # -- the comparison

    @invariant()
    def backends_hold_what_the_model_holds(self) -> None:
        if not self.subtasks:
            return
        for key_ in KEYS:
            self._compare(self._of(key_), key_)
        model, now = self.model, self.clock.now_ms()
        assert self._streamed("value") == sorted(model.value)
        assert self._streamed("sums") == sorted(model.sums)
        assert self._streamed("timed") == sorted(key_ for key_, pair in model.timed.items() if now < pair[1])
        timers = {tuple(timer) for subtask in self.subtasks for timer in subtask.keyed.timers.timers(EVENT)}
        assert timers == model.timers
        assert sum(subtask.keyed.timers.count(EVENT) for subtask in self.subtasks) == len(model.timers)

    def _streamed(self, name: str) -> list[int]:
        return sorted(key_ for subtask in self.subtasks for key_ in getattr(subtask, name).stream_keys())

    def _compare(self, subtask: Subtask, key_: int) -> None:
        model, now = self.model, self.clock.now_ms()
        assert subtask.value.value() == model.value.get(key_, 0)
        assert subtask.sums.get() == model.sums.get(key_)
        means = model.means.get(key_)
        assert subtask.means.get() == (sum(means) / len(means) if means else None)
        timed = model.timed.get(key_)
        assert subtask.timed.value() == (timed[0] if timed is not None and now < timed[1] else None)
        assert subtask.timed_lists.get() == [v for v, expires in model.timed_lists.get(key_, []) if now < expires]
        assert list(subtask.timed_maps.entries()) == sorted(
            (name, v) for name, (v, expires) in model.timed_maps.get(key_, {}).items() if now < expires)
        for space in (*NAMESPACES, 3):
            for state in (subtask.lists, subtask.maps, subtask.window_sums):
                state.set_current_namespace(space)
            assert subtask.lists.get() == model.lists.get((key_, space), [])
            assert list(subtask.maps.entries()) == sorted(model.maps.get((key_, space), {}).items())
            assert subtask.window_sums.get() == model.window_sums.get((key_, space))


class AllBackendsMachine(BackendMachine):
    backends = ("memory", "filesystem", "rocksdb")


SLOW_CHECKS = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


@pytest.fixture(params=[1, 64], ids=["columns", "dicts"])
def batch_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Whether small batches already turn a state of the memory backend into columns."""
    monkeypatch.setattr("statebackend.memory.batch_state.MIN_ROWS", request.param)
    return int(request.param)


def test_backends_in_memory_behave_like_the_model(batch_rows: int) -> None:
    run_state_machine_as_test(BackendMachine, settings=settings(
        max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=SLOW_CHECKS))


def test_all_backends_behave_like_the_model(batch_rows: int) -> None:
    run_state_machine_as_test(AllBackendsMachine, settings=settings(
        max_examples=20, stateful_step_count=30, deadline=None, suppress_health_check=SLOW_CHECKS))

"""Checking a restore: the report tells the fate of every state without restoring anything."""

from __future__ import annotations

from dataclasses import make_dataclass, replace

import pyarrow as pa
import pytest

from checkpoint import CollectionSource, CollectSink, Dataflow, KeyedProcessFunction, check_restore, resolve_restore, run
from checkpoint.runtime.checking import Fate
from statebackend import NotFound, TtlConfig, ValueStateDescriptor
from statebackend.types import state_type


class Two(KeyedProcessFunction):
    states = (("count", int), ("name", str))
    ttl = None

    def open(self, ctx):
        self.all = [ctx.state(ValueStateDescriptor(name, kind, ttl=self.ttl)) for name, kind in self.states]

    def process(self, record, ctx):
        for state, value in zip(self.all, (1, "x")):
            state.update(value)
        return None


def flow_of(function, *, uid="two", key_type=int, max_parallelism=128) -> Dataflow:
    flow = Dataflow("checked", max_parallelism=max_parallelism)
    flow.source(CollectionSource([1, 2]), uid="s").key_by(lambda n: n, key_type=key_type).process(function, uid=uid) \
        .sink(CollectSink(), uid="o")
    return flow


@pytest.fixture
def metadata(tmp_path):
    path = run(flow_of(Two()), checkpoint_dir=str(tmp_path)).checkpoint
    point = resolve_restore(None, "checked", path)
    assert point is not None
    return point.metadata


def fates(report) -> dict:
    return {(state.operator, state.state): state.fate for state in report.states}


def variant(**attributes):
    return type("Variant", (Two,), attributes)()


def test_the_same_flow_restores_everything(metadata):
    report = check_restore(flow_of(Two()), metadata, parallelism={"two": 3})
    assert report
    assert fates(report)["two", "count"] is Fate.RESTORED
    assert report.parallelism["two"] == (1, 3)
    assert report.to_json()["ok"] is True


def test_a_state_that_is_not_declared_any_more_is_kept_and_a_new_one_is_new(metadata):
    report = check_restore(flow_of(variant(states=(("count", int), ("other", float)))), metadata)
    assert fates(report)["two", "name"] is Fate.KEPT
    assert fates(report)["two", "other"] is Fate.NEW


def test_a_state_with_another_ttl_is_migrated(metadata):
    assert fates(check_restore(flow_of(variant(ttl=TtlConfig("1d"))), metadata))["two", "count"] is Fate.MIGRATED


@pytest.fixture
def mixed(tmp_path):
    """A checkpoint of two subtasks that have `count` under schemas of their own."""
    def make(first, second):
        path = run(flow_of(Two()), checkpoint_dir=str(tmp_path / "mixed"), parallelism={"two": 2}).checkpoint
        metadata = resolve_restore(None, "checked", path).metadata
        entry = metadata.operator("two")
        kinds = dict(enumerate([first, second]))
        subtasks = tuple(replace(subtask, keyed=tuple(replace(handle, schemas=tuple(
            replace(schema, value_type=state_type(kinds[subtask.index])) if schema.name == "count" else schema
            for schema in handle.schemas)) for handle in subtask.keyed)) for subtask in entry.subtasks)
        assert [len(subtask.keyed) for subtask in subtasks] == [1, 1]
        others = tuple(one for one in metadata.operators if one.uid != "two")
        return replace(metadata, operators=(*others, replace(entry, subtasks=subtasks)))
    return make


@pytest.mark.parametrize("kinds", [(pa.int32(), int), (int, pa.int32())])
@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_a_state_that_only_some_subtasks_have_migrated_is_migrated(mixed, kinds, parallelism):
    report = check_restore(flow_of(Two()), mixed(*kinds), parallelism={"two": parallelism})
    assert fates(report)["two", "count"] is Fate.MIGRATED
    found = next(state for state in report.states if state.state == "count")
    assert {"value[int32]", "value[int]"} == set(found.stored.split(" and "))


@pytest.mark.parametrize("kinds", [(pa.int32(), int), (int, pa.int32())])
@pytest.mark.parametrize("parallelism", [1, 2])
def test_a_state_is_refused_if_the_part_of_any_subtask_is(mixed, kinds, parallelism):
    narrow = check_restore(flow_of(variant(states=(("count", pa.int32()),))), mixed(*kinds),
                           parallelism={"two": parallelism})
    assert fates(narrow)["two", "count"] is Fate.REFUSED


def test_parts_that_do_not_fit_each_other_are_refused_only_where_a_subtask_would_hold_both(mixed):
    one, other = make_dataclass("R", [("x", int), ("y", int, 7)]), make_dataclass("R", [("x", int), ("z", int, 0)])
    flow, metadata = flow_of(variant(states=(("count", make_dataclass("R", [("x", int)])),))), mixed(one, other)
    assert fates(check_restore(flow, metadata, parallelism={"two": 2}))["two", "count"] is Fate.MIGRATED
    report = check_restore(flow, metadata, parallelism={"two": 1})
    assert fates(report)["two", "count"] is Fate.REFUSED
    assert "disagree" in next(state.reason for state in report.states if state.fate is Fate.REFUSED)


def test_a_state_of_another_type_is_refused_with_both_types(metadata):
    report = check_restore(flow_of(variant(states=(("count", str),))), metadata)
    assert not report
    refused = next(state for state in report.states if state.fate is Fate.REFUSED)
    assert "int" in str(refused.stored)
    assert "str" in str(refused.declared)


def test_another_key_type_or_max_parallelism_is_refused(metadata):
    assert not check_restore(flow_of(Two(), key_type=str), metadata)
    assert not check_restore(flow_of(Two(), max_parallelism=64), metadata)


def test_a_renamed_operator_needs_a_mapping_or_the_permission_to_lose_state(metadata):
    flow = flow_of(Two(), uid="renamed")
    assert not check_restore(flow, metadata)
    assert fates(check_restore(flow, metadata, allow_non_restored_state=True))["two", None] is Fate.DROPPED
    assert check_restore(flow, metadata, uid_mapping={"two": "renamed"})


def test_an_open_that_needs_the_outside_world_is_told_and_not_a_refusal(metadata):
    class Connected(Two):
        def open(self, ctx):
            raise OSError("no network here")

    report = check_restore(flow_of(Connected()), metadata)
    assert report
    assert "no network" in str(report.to_json())


def test_what_is_no_checkpoint_is_named(tmp_path):
    with pytest.raises(NotFound):
        resolve_restore(None, "checked", str(tmp_path / "nothing"))
    assert resolve_restore(str(tmp_path), "checked", "latest") is None

"""Checking a restore: the report tells the fate of every state without restoring anything."""

from __future__ import annotations

import pytest

from checkpoint import CollectionSource, CollectSink, Dataflow, KeyedProcessFunction, check_restore, resolve_restore, run
from checkpoint.runtime.checking import Fate
from statebackend import NotFound, TtlConfig, ValueStateDescriptor


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

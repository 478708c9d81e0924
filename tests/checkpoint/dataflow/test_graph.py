"""The logical graph: what it refuses, how uids are made, what is chained."""

from __future__ import annotations

import json
import warnings

import pytest

from checkpoint import (
    BroadcastProcessFunction,
    CollectionSource,
    CollectSink,
    Dataflow,
    GeneratedUidWarning,
    KeyedProcessFunction,
    ProcessFunction,
    WatermarkStrategy,
)
from checkpoint.dataflow.plan import plan
from statebackend import InvalidRequest


class Keep(KeyedProcessFunction):
    def process(self, record, ctx):
        yield record


class Pass(ProcessFunction):
    def process(self, record, ctx):
        yield record


def source(flow: Dataflow, **options):
    return flow.source(CollectionSource([1, 2, 3]), **{"uid": "numbers", **options})


def tasks(flow: Dataflow, override=None) -> list[tuple[str, ...]]:
    return [vertex.uids for vertex in plan(flow, override).vertices]


def test_two_operators_with_one_uid_are_refused():
    flow = Dataflow("f")
    stream = source(flow)
    with pytest.raises(InvalidRequest, match="same uid"):
        stream.map(str, uid="numbers")


def test_a_parallelism_above_the_max_parallelism_is_refused():
    flow = Dataflow("f", max_parallelism=4)
    with pytest.raises(InvalidRequest, match="higher than the max parallelism"):
        source(flow, parallelism=5)
    source(flow).sink(CollectSink(), uid="out")
    with pytest.raises(InvalidRequest, match="higher than the max parallelism"):
        flow.parallelisms(8)


@pytest.mark.parametrize("parallelism", [0, -1, True, "2", 1.5])
def test_a_parallelism_that_is_none_is_refused(parallelism):
    with pytest.raises(InvalidRequest):
        source(Dataflow("f"), parallelism=parallelism)


@pytest.mark.parametrize("uid", ["", "a/b", "a\\b", "a\nb", "x" * 201, 7])
def test_a_uid_that_can_not_name_a_folder_is_refused(uid):
    with pytest.raises(InvalidRequest, match="uid"):
        source(Dataflow("f"), uid=uid)


def test_a_stream_that_goes_nowhere_is_refused():
    flow = Dataflow("f")
    source(flow).map(str, uid="text")
    with pytest.raises(InvalidRequest, match="goes nowhere"):
        flow.validate()


def test_an_empty_flow_is_refused():
    with pytest.raises(InvalidRequest, match="no source"):
        Dataflow("f").validate()


def test_a_keyed_function_needs_a_key_and_says_so():
    with pytest.raises(InvalidRequest, match="key_by"):
        source(Dataflow("f")).process(Keep(), uid="keep")


def test_key_by_needs_the_type_of_the_key_unless_the_record_type_tells_it():
    from typing import NamedTuple

    class Click(NamedTuple):
        user: str

    with pytest.raises(InvalidRequest, match="type of the key"):
        source(Dataflow("f")).key_by("user")
    flow = Dataflow("f")
    keyed = flow.source(CollectionSource([Click("a")], record_type=Click), uid="s").key_by("user")
    assert keyed.key.key_type in (str, "str")


def test_union_and_connect_take_streams_of_the_right_kind():
    flow, other = Dataflow("f"), Dataflow("g")
    stream = source(flow)
    with pytest.raises(InvalidRequest, match="one flow"):
        stream.union(source(other))
    with pytest.raises(InvalidRequest, match="unite first"):
        stream.union(stream.key_by(lambda n: n, key_type=int))
    with pytest.raises(InvalidRequest, match="broadcast"):
        stream.connect(stream)
    with pytest.raises(InvalidRequest, match="BroadcastProcessFunction"):
        stream.connect(stream.broadcast()).process(Pass(), uid="p")


def test_a_generated_uid_of_a_stateful_operator_is_warned_about_and_stable():
    def build() -> Dataflow:
        flow = Dataflow("f")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GeneratedUidWarning)
            flow.source(CollectionSource([1])).map(str).map(len).key_by(lambda n: n, key_type=int).process(Keep()) \
                .sink(CollectSink())
        return flow

    assert [node.uid for node in build().nodes] == [node.uid for node in build().nodes]
    assert len({node.uid for node in build().nodes}) == 5
    with pytest.warns(GeneratedUidWarning, match="generated uid"):
        Dataflow("f").source(CollectionSource([1]))


def test_a_stateless_operator_needs_no_uid():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        source(Dataflow("f")).map(str).filter(bool)


def test_operators_without_an_exchange_are_chained():
    flow = Dataflow("f")
    source(flow, parallelism=2).map(str, uid="text").filter(bool, uid="some").sink(CollectSink(), uid="out")
    assert tasks(flow) == [("numbers", "text", "some", "out")]
    assert tasks(flow, {"text": 3, "some": 3, "out": 3}) == [("numbers",), ("text", "some", "out")]
    assert tasks(flow, {"some": 1}) == [("numbers", "text"), ("some", "out")]


def test_a_key_exchange_is_chained_only_where_both_sides_have_one_subtask():
    flow = Dataflow("f")
    source(flow).key_by(lambda n: n, key_type=int).process(Keep(), uid="keep").sink(CollectSink(), uid="out")
    assert tasks(flow) == [("numbers", "keep", "out")]
    assert tasks(flow, 2) == [("numbers",), ("keep", "out")]


def test_chaining_can_be_switched_off():
    flow = Dataflow("f", chaining=False)
    source(flow).map(str, uid="text").sink(CollectSink(), uid="out")
    assert len(tasks(flow)) == 3
    flow = Dataflow("f")
    source(flow).map(str, uid="text").start_new_chain().sink(CollectSink(), uid="out")
    assert tasks(flow) == [("numbers",), ("text", "out")]


def test_an_operator_with_two_inputs_starts_a_chain():
    flow = Dataflow("f")
    left, right = source(flow), source(flow, uid="more")
    left.union(right).map(str, uid="text").sink(CollectSink(), uid="out")
    assert tasks(flow) == [("numbers",), ("more",), ("text", "out")]


def test_new_watermarks_stay_in_a_chain_only_where_every_record_takes_that_way():
    strategy = WatermarkStrategy.monotonous(lambda n: n)
    flow = Dataflow("f")
    source(flow).assign_timestamps(strategy, uid="times").sink(CollectSink(), uid="out")
    assert len(tasks(flow)) == 1
    flow = Dataflow("f")
    stream = source(flow)
    stream.assign_timestamps(strategy, uid="times").sink(CollectSink(), uid="out")
    stream.sink(CollectSink(), uid="other")
    assert [chain[0] for chain in tasks(flow)] == ["numbers", "times"]


def test_forward_between_different_parallelisms_is_refused():
    flow = Dataflow("f")
    source(flow, parallelism=2).forward().map(str, uid="text", parallelism=3).sink(CollectSink(), uid="out")
    with pytest.raises(InvalidRequest, match="same parallelism"):
        plan(flow)


def test_regions_are_the_tasks_that_exchange_records():
    flow = Dataflow("f", chaining=False)
    source(flow).sink(CollectSink(), uid="a")
    source(flow, uid="other").sink(CollectSink(), uid="b")
    assert sorted(sorted(region) for region in plan(flow).regions()) == [["a", "numbers"], ["b", "other"]]


def test_the_description_is_json_and_names_tasks_and_exchanges():
    flow = Dataflow("f")
    source(flow, parallelism=2).key_by(lambda n: n, key_type=int).process(Keep(), uid="keep", parallelism=4) \
        .sink(CollectSink(), uid="out")
    described = json.loads(json.dumps(flow.describe()))
    assert [operator["uid"] for operator in described["operators"]] == ["numbers", "keep", "out"]
    assert [edge["exchange"] for edge in described["edges"]] == ["hash", "forward"]
    assert [task["parallelism"] for task in described["tasks"]] == [2, 4]


def test_an_override_for_an_operator_that_is_not_there_names_those_that_are():
    flow = Dataflow("f")
    source(flow).sink(CollectSink(), uid="out")
    with pytest.raises(InvalidRequest, match="numbers, out"):
        flow.parallelisms({"nobody": 2})


def test_a_broadcast_function_is_a_stateful_operator():
    class Rules(BroadcastProcessFunction):
        def process(self, record, ctx):
            yield record

        def process_broadcast(self, record, ctx):
            return None

    flow = Dataflow("f")
    source(flow).connect(source(flow, uid="rules").broadcast()).process(Rules(), uid="apply") \
        .sink(CollectSink(), uid="out")
    assert flow.node("apply").stateful

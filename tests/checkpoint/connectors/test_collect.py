"""The collecting sink: it gives back records of the type that its stream names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest

from checkpoint import CollectSink, Dataflow, GeneratorSource, KeyedProcessFunction, run


@dataclass
class Click:
    user: int
    n: int = 1


class Seen(NamedTuple):
    user: int
    n: int


class Count(KeyedProcessFunction):
    def process(self, click, ctx):
        yield Seen(ctx.key, click.n)


def clicks(flow: Dataflow, *, typed: bool = True):
    return flow.source(GeneratorSource(lambda number: Click(number % 3, number), count=30,
                                       record_type=Click if typed else None), uid="clicks")


def test_the_record_type_is_that_of_the_stream(tmp_path):
    flow, plain, filtered, seen, late = Dataflow("f"), CollectSink(), CollectSink(), CollectSink(), CollectSink()
    stream = clicks(flow)
    stream.sink(plain, uid="plain")
    stream.filter(lambda click: click.n < 2, uid="few").sink(filtered, uid="filtered")
    stream.key_by("user").process(Count(), uid="count", record_type=Seen).sink(seen, uid="seen")
    stream.map(lambda click: click.n, uid="n").sink(late, uid="late")
    run(flow, checkpoint_dir=str(tmp_path))
    assert plain.results == [Click(number % 3, number) for number in range(30)]
    assert filtered.results == [Click(0, 0), Click(1, 1)]
    assert sorted(seen.results) == sorted(Seen(number % 3, number) for number in range(30))
    assert {type(record) for record in seen.results} == {Seen}
    assert late.results == list(range(30))


def test_records_that_a_restore_commits_have_it_too(tmp_path):
    def flow_into(sink: CollectSink) -> Dataflow:
        flow = Dataflow("f")
        clicks(flow).sink(sink, uid="out")
        return flow

    run(flow_into(CollectSink()), checkpoint_dir=str(tmp_path))
    again = CollectSink()
    run(flow_into(again), checkpoint_dir=str(tmp_path), restore="latest")
    assert again.results == [Click(number % 3, number) for number in range(30)]


def test_a_type_that_is_given_counts_where_the_stream_names_another_or_none():
    for typed in (True, False):
        flow, sink = Dataflow("f"), CollectSink(Seen)
        clicks(flow, typed=typed).map(lambda click: Seen(click.user, click.n), uid="seen",
                                      record_type=Click if typed else None).sink(sink, uid="out")
        run(flow)
        assert sink.results[:2] == [Seen(0, 0), Seen(1, 1)]
        assert type(sink.results[0]) is Seen


def test_records_of_a_type_that_nobody_names_are_refused_with_the_way_out():
    flow = Dataflow("f")
    clicks(flow, typed=False).sink(CollectSink(), uid="out")
    with pytest.raises(Exception, match="record_type="):
        run(flow)

"""The generator source: the same numbers, once each, at any parallelism, and at its rate."""

from __future__ import annotations

import time

import pytest

from checkpoint import CollectSink, Dataflow, GeneratorSource, run
from statebackend import InvalidRequest


def numbers(count: int, *, parallelism: int = 1, rate: float | None = None, **options) -> list[int]:
    flow, sink = Dataflow("numbers"), CollectSink()
    flow.source(GeneratorSource(lambda number: number, count=count, rate=rate), uid="s", parallelism=parallelism) \
        .sink(sink, uid="o")
    run(flow, **options)
    return sink.results


@pytest.mark.parametrize("count", [0, 1, 31, 5_000, 40_000])
def test_one_subtask_makes_the_numbers_in_order(count):
    assert numbers(count) == list(range(count))


@pytest.mark.parametrize("parallelism", [2, 5, 40])
def test_several_subtasks_share_the_numbers(parallelism):
    assert sorted(numbers(3_000, parallelism=parallelism)) == list(range(3_000))


def test_a_larger_count_goes_on_where_the_smaller_ended(tmp_path):
    assert sorted(numbers(1_000, parallelism=3, checkpoint_dir=str(tmp_path))) == list(range(1_000))
    again = numbers(1_500, checkpoint_dir=str(tmp_path), restore="latest", parallelism=2)
    assert sorted(set(again)) == list(range(1_500))


def test_the_rate_is_not_exceeded():
    began = time.monotonic()
    numbers(60, rate=200)
    assert time.monotonic() - began >= 0.25


@pytest.mark.parametrize("options", [{"rate": 0}, {"rate": -1}, {"count": -1}])
def test_what_can_not_be_is_refused(options):
    with pytest.raises(InvalidRequest):
        GeneratorSource(lambda number: number, **options)
    with pytest.raises(InvalidRequest):
        GeneratorSource([1, 2, 3])

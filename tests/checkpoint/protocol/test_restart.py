"""Restart strategies and regions: the same failures at the same times always give the same decisions."""

from random import Random

import pytest

from checkpoint.protocol.restart import (
    ExponentialDelay,
    FailureRate,
    FixedDelay,
    GiveUp,
    NoRestart,
    RepeatedFailures,
    Restart,
    default_strategy,
    region_of,
    regions,
    restart_strategy,
)
from statebackend.errors import InvalidRequest


class Middle(Random):
    """No jitter: always the middle of a range."""

    def uniform(self, a, b):
        return (a + b) / 2


def test_none_gives_up_at_once():
    assert isinstance(NoRestart().on_failure(0, Random(1)), GiveUp)


def test_fixed_delay_restarts_as_often_as_told():
    strategy = FixedDelay(attempts=2, delay="3s")
    assert [strategy.on_failure(now, Random(1)) for now in (0, 10)] == [Restart(3000), Restart(3000)]
    assert isinstance(strategy.on_failure(1_000_000, Random(1)), GiveUp)


def test_failure_rate_counts_within_its_interval():
    strategy = FailureRate(failures=2, interval="1m", delay="1s")
    for now in (0, 50_000, 70_000):
        assert strategy.on_failure(now, Random(1)) == Restart(1000)
    assert isinstance(strategy.on_failure(100_000, Random(1)), GiveUp)


def test_failure_rate_survives_a_clock_set_back():
    strategy = FailureRate(failures=1, interval="1m", delay=0)
    assert strategy.on_failure(10_000_000, Random(1)) == Restart(0)
    assert isinstance(strategy.on_failure(5, Random(1)), GiveUp)
    assert strategy.on_failure(100_000, Random(1)) == Restart(0)


def test_exponential_delay_grows_to_its_maximum_and_starts_anew_after_a_quiet_time():
    strategy = ExponentialDelay(initial="1s", multiplier=2, maximum="5s", reset_after="1h")
    delays = [strategy.on_failure(now, Middle()).delay_ms for now in range(4)]
    assert delays == [1000, 2000, 4000, 5000]
    assert strategy.on_failure(4_000_000, Middle()) == Restart(1000)


def test_jitter_comes_from_the_random_source_passed_in():
    first = [ExponentialDelay(jitter=0.5).on_failure(0, Random(seed)).delay_ms for seed in range(20)]
    again = [ExponentialDelay(jitter=0.5).on_failure(0, Random(seed)).delay_ms for seed in range(20)]
    assert first == again
    assert all(500 <= delay <= 1500 for delay in first)
    assert len(set(first)) > 10


def test_attempts_can_be_bounded():
    strategy = ExponentialDelay(attempts=1)
    assert isinstance(strategy.on_failure(0, Random(1)), Restart)
    assert isinstance(strategy.on_failure(1, Random(1)), GiveUp)


def test_the_default_restarts_only_where_there_are_checkpoints():
    assert isinstance(default_strategy(True), ExponentialDelay)
    assert isinstance(default_strategy(False), NoRestart)
    assert isinstance(restart_strategy(None, checkpointing=True), ExponentialDelay)


def test_strategies_are_found_by_name_and_wrong_options_refused():
    assert isinstance(restart_strategy("fixed-delay", checkpointing=False, attempts=3), FixedDelay)
    for name, options in [("sometimes", {}), ("fixed-delay", {"tries": 3}), ("fixed-delay", {"attempts": -1}),
                          ("failure-rate", {"failures": 0}), ("exponential-delay", {"multiplier": 0.5}),
                          ("exponential-delay", {"initial": "2m"}), ("exponential-delay", {"jitter": 2})]:
        with pytest.raises(InvalidRequest):
            restart_strategy(name, checkpointing=True, **options)


def test_a_region_is_what_channels_connect():
    nodes = ["a0", "a1", "b0", "b1", "c"]
    found = regions(nodes, [("a0", "b0"), ("a1", "b1")])
    assert sorted(map(sorted, found)) == [["a0", "b0"], ["a1", "b1"], ["c"]]
    assert region_of("b1", found) == {"a1", "b1"}
    assert regions(nodes, [("a0", "b0"), ("a1", "b0"), ("a1", "b1"), ("b1", "c")]) == [frozenset(nodes)]


def test_regions_of_many_subtasks_take_no_quadratic_time():
    nodes = [(task, index) for task in range(10) for index in range(1000)]
    edges = [((task, index), (task + 1, index)) for task in range(9) for index in range(1000)]
    assert len(regions(nodes, edges)) == 1000


def test_one_failure_is_given_up_when_it_comes_back_without_progress_whatever_its_numbers():
    repeated = RepeatedFailures()
    decisions = [repeated.on_failure(OSError(f"chk-{number}/a-9f86d081{number}884c could not be stored"), 5)
                 for number in range(4)]
    assert decisions[:3] == [None] * 3
    assert decisions[3].reason.startswith("the same failure came 4 times")


@pytest.mark.parametrize("failures", [
    [(OSError("disk full"), reached) for reached in range(8)],
    [(kind("disk full"), 5) for kind in (OSError, ValueError) * 4],
    [(OSError(text), 5) for text in ("disk full", "no route to host") * 4],
], ids=["a checkpoint completes", "other types", "other messages"])
def test_failures_that_differ_or_make_progress_are_not_given_up(failures):
    repeated = RepeatedFailures()
    assert [repeated.on_failure(*failure) for failure in failures] == [None] * 8

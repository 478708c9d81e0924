"""Thousands of seeds: whatever goes wrong, the committed output is that of a run with no fault."""

import pytest

from checkpoint.runtime.simulator import main, replay, simulate, simulate_many

SEEDS_PER_TEST = 100


@pytest.mark.parametrize("group", range(20))
def test_committed_output_equals_that_of_a_run_with_no_fault(group):
    first = group * SEEDS_PER_TEST
    summary = simulate_many(range(first, first + SEEDS_PER_TEST))
    assert summary.runs == SEEDS_PER_TEST
    assert summary.restores > 20
    assert summary.rescales > 3
    assert summary.with_channel_state > 10


@pytest.mark.soak
@pytest.mark.parametrize("group", range(100))
def test_soak_of_a_hundred_thousand_seeds(group):
    simulate_many(range(1_000_000 + group * 1000, 1_000_000 + (group + 1) * 1000))


def test_a_seed_replays_alone_and_always_alike(capsys):
    assert replay(7) == replay(7)
    assert main(["--seed", "7"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("seed 7")
    assert "is told: trigger checkpoint" in printed
    assert printed.rstrip().endswith("OK: the committed output is that of a run with no fault")


def test_a_range_of_seeds_tells_what_it_went_through(capsys):
    assert main(["--seeds", "0:3"]) == 0
    assert "runs=3" in capsys.readouterr().err


def test_a_single_seed_needs_no_summary():
    simulate(1)

"""The seeded simulator: thousands of random jobs, schedules and faults in one thread, each replayable from its seed.

    python -m checkpoint.runtime.simulator --seed 17            # one seed, with its trace
    python -m checkpoint.runtime.simulator --seeds 0:2000       # many; stops at the first that fails, prints its trace

Each run drives the real Coordinator, BarrierHandler and Subtask classes over a random topology with faults, and then
compares what the sinks have committed with what a run with no fault commits.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass

from checkpoint.runtime.simulated.cluster import SimCluster, SimulationFailed
from checkpoint.runtime.simulated.scenario import make_scenario

__all__ = ["SimulationFailed", "SimulationSummary", "replay", "simulate", "simulate_many"]


@dataclass
class SimulationSummary:
    """What many runs have gone through, to see that the faults really happen."""

    runs: int = 0
    checkpoints: int = 0
    with_channel_state: int = 0
    restores: int = 0
    rescales: int = 0


def simulate(seed: int, summary: SimulationSummary | None = None) -> None:
    """Play one seed. A failure is `SimulationFailed` with the way to replay it."""
    cluster = SimCluster(make_scenario(seed))
    try:
        cluster.play()
    except Exception as error:
        raise SimulationFailed(f"seed {seed}: {type(error).__name__}: {error}\n"
                               f"replay it: python -m checkpoint.runtime.simulator --seed {seed}") from error
    if summary is not None:
        summary.runs += 1
        summary.checkpoints += cluster.checkpoints
        summary.with_channel_state += cluster.unaligned
        summary.restores += cluster.restores
        summary.rescales += cluster.rescales


def simulate_many(seeds: Iterable[int]) -> SimulationSummary:
    """Play many seeds; the first failure ends it."""
    summary = SimulationSummary()
    for seed in seeds:
        simulate(seed, summary)
    return summary


def replay(seed: int) -> list[str]:
    """Play one seed and tell everything that happened; the last line is the verdict."""
    lines: list[str] = []
    scenario = make_scenario(seed)
    lines.append(f"seed {seed}\n{scenario.description}")
    try:
        SimCluster(scenario, lines.append).play()
        lines.append("OK: the committed output is that of a run with no fault")
    except Exception as error:
        lines.append(f"FAILED: {type(error).__name__}: {error}")
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m checkpoint.runtime.simulator", description=__doc__.split("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--seed", type=int, help="play one seed and print its trace")
    what.add_argument("--seeds", help="play seeds FIRST:LAST (LAST not included)")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        lines = replay(options.seed)
        print("\n".join(lines))
        return 0 if lines[-1].startswith("OK") else 1
    first, last = (int(part) for part in options.seeds.split(":"))
    began, summary = time.process_time(), SimulationSummary()
    for seed in range(first, last):
        try:
            simulate(seed, summary)
        except SimulationFailed:
            print("\n".join(replay(seed)))
            return 1
    print(f"{summary} in {time.process_time() - began:.1f} s of CPU", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

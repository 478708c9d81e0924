"""The simulated world: virtual time, storage and an external system with faults, and the runs of one job in it."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import Any

from checkpoint.protocol.messages import Outcome, Publish, TriggerCheckpoint, TriggerSavepoint
from checkpoint.runtime.simulated.run import SimRun
from checkpoint.runtime.simulated.scenario import Scenario, expected_output
from checkpoint.runtime.simulated.storage import SimStorage, StoredCheckpoint, TransactionLog

FAULTS_END_MS = 1500
GIVE_UP_AT_MS = 120_000
MAX_EVENTS = 200_000


class SimulationFailed(AssertionError):
    """The run broke a promise. The message tells which; the trace how it came to it."""


class SimClock:
    """The wall clock of the simulated machine; it may be set back."""

    def __init__(self) -> None:
        self.now = 0
        self.offset = 1_000_000

    def now_ms(self) -> int:
        return self.now + self.offset


class SimCluster:
    """Plays one scenario to its end and checks what it committed."""

    def __init__(self, scenario: Scenario, trace: Callable[[str], None] | None = None) -> None:
        self.scenario, self.random = scenario, Random(scenario.seed ^ 0x5EED)
        self.clock = SimClock()
        self.storage, self.log = SimStorage(), TransactionLog()
        self.restores = self.rescales = self.checkpoints = self.unaligned = 0
        self._trace = trace
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._sequence = 0
        self._crashes = scenario.faults.crashes
        self._drained: StoredCheckpoint | None = None
        self._outcome: Outcome | None = None
        self._attempts = 0
        self._parallelism: Mapping[str, int] = dict(scenario.parallelism)
        self.run: SimRun

    # -- from beginning to end -----------------------------------------------------------------------------------------

    def play(self) -> None:
        self._start_run(None)
        self._plan_faults()
        events = 0
        while self._outcome is not Outcome.FINISHED and not (self._outcome is Outcome.STOPPED and self._drained):
            if not self._heap:
                raise SimulationFailed("nothing is left to happen, but the job has not ended")
            at, _, action = heapq.heappop(self._heap)
            self.clock.now = at
            events += 1
            if at > GIVE_UP_AT_MS or events > MAX_EVENTS:
                raise SimulationFailed(f"the job has not ended after {at} ms and {events} events")
            action()
            if self._outcome is Outcome.STOPPED and not self._drained:
                self._continue_from_savepoint()
        self._check()

    def _plan_faults(self) -> None:
        for _ in range(self._crashes):
            self.after(self.random.randint(1, 150), self.crash)
        for _ in range(self.scenario.faults.clock_jumps):
            self.after(self.random.randint(1, 100), self._set_clock_back)
        for number, (at, what) in enumerate(self.scenario.requests):
            self.after(at, lambda number=number, what=what: self._request(number, what))  # type: ignore[misc]

    def _set_clock_back(self) -> None:
        self.clock.offset -= self.random.choice((10, 1000, 900_000))
        self.trace("the clock is set back")

    def _request(self, number: int, what: str) -> None:
        if what == "checkpoint":
            self.run.tell(TriggerCheckpoint(f"r{number}"))
        else:
            self.run.tell(TriggerSavepoint(f"r{number}", stop=what != "savepoint", drain=what == "drain"))

    def _check(self) -> None:
        scenario = self.scenario
        if self._drained is not None:
            scenario = replace(scenario, splits=self._positions(self._drained))
        expected, rules = expected_output(scenario)
        found = self.log.output()
        if not scenario.settings.exactly_once:
            missing, everything = set(expected) - set(found), expected_output(self.scenario)[0]
            if missing or set(found) - set(everything):
                raise SimulationFailed(f"at least once, but {sorted(map(str, missing))[:5]} are missing")
            return
        problems = [f"{node.id}: {node.chain.problem}" for node in self.run.nodes.values() if node.chain.problem]
        problems += [f"{node.id} holds broadcast state {node.chain.rules}" for node in self.run.nodes.values()
                     if node.id.task in rules and node.chain.rules != rules[node.id.task]]
        if found != expected:
            problems.append(f"lost {dict(list((expected - found).items())[:5])}, "
                            f"doubled {dict(list((found - expected).items())[:5])}")
        if problems:
            raise SimulationFailed("; ".join(problems))

    def _positions(self, stored: StoredCheckpoint) -> dict[str, tuple[int, ...]]:
        """How far each source had read in a savepoint: the input that a drained job must have accounted for."""
        result = {}
        for name, lengths in self.scenario.splits.items():
            states = self.storage.states(stored, name)
            read = {split: offset for state in states for split, offset, _ in state.splits}
            result[name] = tuple(read[split] for split in range(len(lengths)))
        return result

    # -- time and messages ---------------------------------------------------------------------------------------------

    def after(self, delay: int, action: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (self.clock.now + max(0, delay), self._sequence, action))

    def trace(self, text: str, *details: Any) -> None:
        if self._trace is not None:
            details = tuple(detail() if callable(detail) else detail for detail in details)
            self._trace(f"{self.clock.now:>6} ms  {text} {' '.join(map(str, details))}".rstrip())

    @property
    def faulty(self) -> bool:
        """Whether things still go wrong; in the end the job must be able to finish."""
        return self.clock.now < FAULTS_END_MS

    # -- what runs tell ------------------------------------------------------------------------------------------------

    def next_attempt(self) -> int:
        self._attempts += 1
        return self._attempts

    def on_end(self, run: SimRun, outcome: Outcome) -> None:
        if run is self.run:
            self._outcome = outcome

    def store(self, publish: Publish, run: SimRun) -> None:
        """Put a checkpoint or savepoint into the storage, if that still takes it from this run."""
        stored = self.storage.publish(run.generation, publish, run.parallelism)
        self.checkpoints += 1
        self.unaligned += any(snapshot.in_flight is not None for snapshot in publish.snapshots.values())
        if self.scenario.settings.exactly_once:
            self._check_broadcast_copies(stored)
        if publish.options.drain:
            self._drained = stored

    def _check_broadcast_copies(self, stored: StoredCheckpoint) -> None:
        """A barrier is at the same place among the broadcast records of every subtask, so their copies are equal."""
        for task in self.scenario.tasks:
            if task.kind == "rules":
                copies = [state.rules for state in self.storage.states(stored, task.name)]
                if any(copy != copies[0] for copy in copies):
                    raise SimulationFailed(f"checkpoint {stored.checkpoint_id} holds different copies of the broadcast "
                                           f"state of {task.name}: {copies}")

    # -- crashes and new runs ------------------------------------------------------------------------------------------

    def crash(self) -> None:
        if self._crashes <= 0 or self.run.restarting or not self.run.alive or self._outcome is not None:
            return
        self._crashes -= 1
        if self.random.random() < 0.5 or self._drained is not None:
            self.run.crash_of_one()
        elif self.random.random() < 0.6:
            self.trace("CRASH of everything, coordinator included")
            self.run.kill()
            self.after(self.random.randint(1, 30), self._take_over)
        else:
            self.trace(f"generation {self.run.generation} is CUT OFF and goes on; another one takes over")
            self._take_over()

    def _take_over(self) -> None:
        """A new process takes the job over from what is stored, perhaps at another parallelism."""
        if self._drained is not None:
            # It was stored after its coordinator had died, so nothing is committed by it: the job goes on without it.
            del self.storage.savepoints[self._drained.checkpoint_id]
            self._drained = None
        self._start_run(self.restore_point())

    def _continue_from_savepoint(self) -> None:
        self._outcome = None
        self.run.kill()
        self._start_run(self.restore_point())

    def restore_point(self) -> StoredCheckpoint | None:
        """The newest checkpoint that is stored, or the savepoint that the job was stopping with."""
        stops = [stored for stored in self.storage.savepoints.values() if stored.options.stop]
        newest = self.storage.newest()
        candidates = stops + ([newest] if newest is not None else [])
        return max(candidates, key=lambda stored: stored.checkpoint_id, default=None)

    def _start_run(self, stored: StoredCheckpoint | None) -> None:
        if stored is not None and self.random.random() < 0.7:
            self._parallelism = self.scenario.rescaled(self.random, self._parallelism)
            self.rescales += 1
        self.run = SimRun(self, self._parallelism, stored)

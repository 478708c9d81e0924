"""The simulated world: virtual time, channels with delay, lossy control messages, crashes, restarts, storage faults."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import Any

from checkpoint.protocol.coordinator import Coordinator
from checkpoint.protocol.messages import (
    Acknowledge,
    Action,
    CompleteRequest,
    Decline,
    DiscardCompleted,
    DiscardFiles,
    EndJob,
    Event,
    FailJob,
    Log,
    NotifyAborted,
    NotifyCompleted,
    NotifySavepointDone,
    Outcome,
    Publish,
    Published,
    PublishFailed,
    Report,
    RequestStatus,
    Restored,
    ScheduleTick,
    SendBarrier,
    StatusReport,
    SubtaskId,
    SubtasksFailed,
    Tick,
    TriggerCheckpoint,
    TriggerSavepoint,
)
from checkpoint.protocol.restart import region_of, regions
from checkpoint.runtime.channels import InputEdge, OutputEdge
from checkpoint.runtime.contracts import Barrier, CheckpointOptions, Element, InFlight, Partitioner, SubtaskRestore
from checkpoint.runtime.in_flight import EdgeShape, redistribute_in_flight
from checkpoint.runtime.simulated.chain import SimChain, SimCodec, SimState, partitioner, redistribute_state
from checkpoint.runtime.simulated.scenario import Scenario, expected_output
from checkpoint.runtime.simulated.storage import SimStorage, SimTarget, StoredCheckpoint, TransactionLog
from checkpoint.runtime.snapshots import SnapshotTask
from checkpoint.runtime.subtask import Blocked, Subtask
from statebackend.errors import Conflict

FAULTS_END_MS = 1500
GIVE_UP_AT_MS = 120_000
MAX_EVENTS = 200_000


class SimulationFailed(AssertionError):
    """The run broke a promise. The message tells which; the trace how it came to it."""


class Node:
    """One running subtask and its ends of the wires."""

    def __init__(self, cluster: SimCluster, subtask_id: SubtaskId, attempt: int) -> None:
        self.cluster, self.id, self.attempt = cluster, subtask_id, attempt
        self.alive = True
        self.step_at: int | None = None
        self.pace = 1 if cluster.random.random() < 0.8 else 8
        self.chain: SimChain
        self.subtask: Subtask

    # -- Transport -----------------------------------------------------------------------------------------------------

    def send(self, channel: int, element: Element) -> None:
        self.cluster.carry(self, channel, element)

    def grant(self, channel: int, credit: int) -> None:
        self.cluster.carry_credit(self, channel, credit)

    def report(self, report: Report) -> None:
        self.cluster.control(lambda: self.cluster.tell(report), f"{self.id} reports", lambda: _short(report))

    def start(self, task: SnapshotTask) -> None:
        self.cluster.after(self.cluster.random.randint(1, 6), lambda: self._run(task))

    def _run(self, task: SnapshotTask) -> None:
        if self.alive:
            task.run()
            self.subtask.on_task_done(task)
            self.cluster.wake(self)


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
        self._nodes: dict[SubtaskId, Node] = {}
        self._last_delivery: dict[tuple[SubtaskId, int], int] = {}
        self._routes: dict[tuple[SubtaskId, int], tuple[SubtaskId, int]] = {}
        self._back: dict[tuple[SubtaskId, int], tuple[SubtaskId, int]] = {}
        self._partitioners: dict[str, Partitioner] = {}
        self._parallelism: Mapping[str, int] = dict(scenario.parallelism)
        self._attempt = 0
        self._crashes = scenario.faults.crashes
        self._restarting = False
        self._all_dead = False
        self._failed: set[SubtaskId] = set()
        self._drained: StoredCheckpoint | None = None
        self._tick_id = 0
        self._outcome: Outcome | None = None
        self._coordinator: Coordinator
        self._generation = 0

    # -- the run -------------------------------------------------------------------------------------------------------

    def run(self) -> None:
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
            self.after(self.random.randint(1, 150), self._crash)
        for _ in range(self.scenario.faults.clock_jumps):
            self.after(self.random.randint(1, 100), self._set_clock_back)
        for number, (at, what) in enumerate(self.scenario.requests):
            self.after(at, lambda number=number, what=what: self._request(number, what))  # type: ignore[misc]

    def _set_clock_back(self) -> None:
        self.clock.offset -= self.random.choice((10, 1000, 900_000))
        self.trace("the clock is set back")

    def _request(self, number: int, what: str) -> None:
        if what == "checkpoint":
            self.tell(TriggerCheckpoint(f"r{number}"))
        else:
            self.tell(TriggerSavepoint(f"r{number}", stop=what != "savepoint", drain=what == "drain"))

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
        problems = [f"{node.id}: {node.chain.problem}" for node in self._nodes.values() if node.chain.problem]
        problems += [f"{node.id} holds broadcast state {node.chain.rules}" for node in self._nodes.values()
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
            states = self._states(stored, name)
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

    def control(self, deliver: Callable[[], None], text: str, *details: Any) -> None:
        """A message between the coordinator and a subtask: may be lost, may be late, may be overtaken."""
        faulty = self.clock.now < FAULTS_END_MS
        if faulty and self.random.random() < self.scenario.faults.lose:
            self.trace(f"LOST: {text}", *details)
            return
        late = faulty and self.random.random() < self.scenario.faults.delay
        delay = self.random.randint(10, 80) if late else self.random.randint(0, 2)
        coordinator = self._coordinator

        def arrive() -> None:
            if self._coordinator is coordinator:
                self.trace(text, *details)
                deliver()

        self.after(delay, arrive)

    def tell(self, event: Event) -> None:
        """An event for the coordinator, and what it makes of it."""
        if self._all_dead:
            return
        for action in self._coordinator.handle(event, self.clock.now_ms()):
            self._perform(action)

    def _to_subtasks(self, subtasks: tuple[SubtaskId, ...] | None, call: Callable[[Subtask], None],
                     text: str) -> None:
        for subtask_id in self._nodes if subtasks is None else subtasks:
            node = self._nodes[subtask_id]

            def deliver(node: Node = node) -> None:
                if node.alive:
                    call(node.subtask)
                    self.wake(node)

            self.control(deliver, f"{subtask_id} is told: {text}")

    # -- what the coordinator asks for ---------------------------------------------------------------------------------

    def _perform(self, action: Action) -> None:
        match action:
            case SendBarrier(subtasks, barrier):
                self._to_subtasks(subtasks, lambda subtask: subtask.on_trigger(barrier), f"trigger {_short(barrier)}")
            case NotifyCompleted(checkpoint_id, subtasks, last):
                self._to_subtasks(subtasks, lambda subtask: subtask.on_completed(checkpoint_id, last),
                                  f"checkpoint {checkpoint_id} is complete{', the last' if last else ''}")
            case NotifyAborted(checkpoint_id, reason):
                self._to_subtasks(None, lambda subtask: subtask.on_aborted(checkpoint_id),
                                  f"checkpoint {checkpoint_id} is given up, {reason.name}")
            case NotifySavepointDone(checkpoint_id):
                self._to_subtasks(None, lambda subtask: subtask.on_savepoint_done(checkpoint_id),
                                  f"savepoint {checkpoint_id} is stored")
            case RequestStatus(subtasks):
                self._to_subtasks(subtasks, lambda subtask: subtask.on_status_request(), "say how you are")
            case ScheduleTick(at_ms):
                self._tick_id += 1
                tick_id = self._tick_id
                self.after(at_ms - self.clock.now_ms(), lambda: self._tick(tick_id))
            case Publish():
                self._publish(action)
            case DiscardCompleted(checkpoint_ids):
                for checkpoint_id in checkpoint_ids:
                    self.storage.discard(self._generation, checkpoint_id)
            case DiscardFiles(_, snapshots):
                self.storage.discard_files(self._generation, snapshots)
            case FailJob(_, message):
                self.trace("THE JOB FAILS:", message)
                self._fail_over(frozenset(self._nodes))
            case EndJob(outcome):
                self.trace("the job has ended:", outcome.value)
                self._outcome = outcome
            case Log(_, line):
                self.trace("log:", line)
            case CompleteRequest(request_id, _, path, error):
                self.trace(f"request {request_id} is answered:", path, error)

    def _tick(self, tick_id: int) -> None:
        if tick_id == self._tick_id:
            self.tell(Tick())

    def _publish(self, publish: Publish) -> None:
        coordinator, generation, parallelism = self._coordinator, self._generation, self._parallelism
        fault = self.clock.now < FAULTS_END_MS and self.random.random() < self.scenario.faults.publish
        kind = self.random.choice(("refused", "stored but no reply", "no reply", "slow")) if fault else "stored"

        def finish() -> None:
            event: Event
            try:
                if kind not in ("refused", "no reply"):
                    self._stored(publish, generation, parallelism)
                event = Published(publish.checkpoint_id, f"chk-{publish.checkpoint_id}")
            except Conflict as error:
                event = PublishFailed(publish.checkpoint_id, str(error), fenced=True)
            if kind == "refused":
                event = PublishFailed(publish.checkpoint_id, "the store is full")
            elif "no reply" in kind and isinstance(event, Published):
                event = PublishFailed(publish.checkpoint_id, "the store gave no reply", settled=False)
            self.trace(f"publication of {publish.checkpoint_id} by generation {generation}: {kind},",
                       type(event).__name__)
            if self._coordinator is coordinator:
                self.tell(event)
            if self.random.random() < 0.05:
                self._crash()

        self.after(self.random.randint(100, 400) if kind == "slow" else self.random.randint(1, 8), finish)

    def _stored(self, publish: Publish, generation: int, parallelism: Mapping[str, int]) -> None:
        self.storage.publish(generation, publish, parallelism)
        self.checkpoints += 1
        self.unaligned += any(snapshot.in_flight is not None for snapshot in publish.snapshots.values())
        if publish.options.drain:
            self._drained = self.storage.savepoints[publish.checkpoint_id]

    # -- channels ------------------------------------------------------------------------------------------------------

    def carry(self, sender: Node, channel: int, element: Element) -> None:
        receiver_id, input_channel = self._routes[sender.id, channel]
        slow = (sender.id.task, receiver_id.task) in self.scenario.slow
        delay = self.random.randint(5, 15) if slow else self.random.randint(0, 2)
        key = (sender.id, channel)
        at = max(self.clock.now + delay, self._last_delivery.get(key, 0))
        self._last_delivery[key] = at
        receiver = self._nodes[receiver_id]

        def deliver() -> None:
            if receiver.alive and sender.alive:
                receiver.subtask.on_element(input_channel, element)
                self.wake(receiver)

        self.after(at - self.clock.now, deliver)

    def carry_credit(self, receiver: Node, channel: int, credit: int) -> None:
        sender_id, output_channel = self._back[receiver.id, channel]
        sender = self._nodes[sender_id]

        def deliver() -> None:
            if sender.alive:
                sender.subtask.on_credit(output_channel, credit)
                self.wake(sender)

        self.after(self.random.randint(0, 2), deliver)

    def wake(self, node: Node, delay: int | None = None) -> None:
        at = self.clock.now + (self.random.randint(0, node.pace) if delay is None else max(0, delay))
        if node.step_at is None or at < node.step_at:
            node.step_at = at
            self.after(at - self.clock.now, lambda: self._step(node, at))

    def _step(self, node: Node, at: int) -> None:
        if not node.alive or node.step_at != at:
            return
        node.step_at = None
        result = node.subtask.step(self.random.randint(1, 4))
        if result.blocked is Blocked.FINISHED:
            return
        if result.worked:
            self.wake(node)
        if result.wake_at is not None:
            self.wake(node, result.wake_at - self.clock.now_ms())

    # -- starting and failing ------------------------------------------------------------------------------------------

    def _crash(self) -> None:
        if self._crashes <= 0 or self._restarting or self._outcome is not None:
            return
        self._crashes -= 1
        if self.random.random() < 0.5 or (self._drained is not None):
            victim = self.random.choice(sorted(self._nodes))
            self.trace("CRASH of", victim)
            self._fail_over(region_of(victim, self._regions()))
            return
        self.trace("CRASH of everything, coordinator included")
        for node in self._nodes.values():
            node.alive = False
        self._restarting = self._all_dead = True
        self._tick_id += 1
        self.after(self.random.randint(1, 30), self._take_over)

    def _regions(self) -> list[frozenset[SubtaskId]]:
        return regions(self._nodes, ((sender, receiver) for (sender, _), (receiver, _) in self._routes.items()))

    def _fail_over(self, failed: frozenset[SubtaskId]) -> None:
        """The coordinator lives; the failed subtasks start again from the newest checkpoint."""
        begun, self._restarting = self._restarting, True
        self._failed |= failed
        self._attempt += 1
        for subtask_id in failed:
            self._nodes[subtask_id].alive = False
        self.tell(SubtasksFailed(failed, self._attempt, "a subtask crashed"))
        if begun:
            return
        coordinator = self._coordinator

        def restart() -> None:
            if self._coordinator is not coordinator:
                return
            if coordinator.publishing is not None:
                self.after(3, restart)
                return
            self._restarting = False
            stored = self._restore_point()
            self.trace("restart from", stored.checkpoint_id if stored else "nothing")
            self._tell_restored(stored)
            self._deploy(sorted(self._failed), stored, honour_ended=self._has_parallelism_of(stored))

        self.after(self.random.randint(1, 20), restart)

    def _take_over(self) -> None:
        """A new process takes the job over from what is stored, perhaps at another parallelism."""
        self._restarting = self._all_dead = False
        if self._drained is not None:
            # It was stored after its coordinator had died, so nothing is committed by it: the job goes on without it.
            del self.storage.savepoints[self._drained.checkpoint_id]
            self._drained = None
        self._start_run(self._restore_point())

    def _continue_from_savepoint(self) -> None:
        self._outcome = None
        for node in self._nodes.values():
            node.alive = False
        self._start_run(self._restore_point())

    def _restore_point(self) -> StoredCheckpoint | None:
        """The newest checkpoint that is stored, or the savepoint that the job was stopping with."""
        stops = [stored for stored in self.storage.savepoints.values() if stored.options.stop]
        newest = self.storage.newest()
        candidates = stops + ([newest] if newest is not None else [])
        return max(candidates, key=lambda stored: stored.checkpoint_id, default=None)

    def _start_run(self, stored: StoredCheckpoint | None) -> None:
        self._generation = self.storage.begin()
        self._attempt += 1
        if stored is not None and self.random.random() < 0.7:
            self._parallelism = self.scenario.rescaled(self.random, self._parallelism)
            self.rescales += 1
        plan = self.scenario.plan(self._parallelism)
        self._coordinator = Coordinator(plan, self.scenario.settings, attempt=self._attempt)
        self._nodes.clear()
        self._partitioners.clear()
        self._wire()
        self.trace(f"generation {self._generation} starts at {dict(self._parallelism)} from",
                   stored.checkpoint_id if stored else "nothing")
        self._tell_restored(stored)
        self._deploy(list(plan.subtasks()), stored,
                     honour_ended=self._has_parallelism_of(stored) and self.random.random() < 0.5)

    def _has_parallelism_of(self, stored: StoredCheckpoint | None) -> bool:
        return stored is not None and dict(stored.parallelism) == dict(self._parallelism)

    def _tell_restored(self, stored: StoredCheckpoint | None) -> None:
        if stored is not None:
            self.restores += 1
            self.tell(Restored(stored.checkpoint_id, f"chk-{stored.checkpoint_id}", stored.options.kind == "savepoint",
                               tuple(sorted(self.storage.checkpoints))))

    def _wire(self) -> None:
        """Number the channels of every subtask on both sides and connect them."""
        self._routes.clear()
        self._back.clear()
        inputs: dict[SubtaskId, int] = {}
        channels: dict[tuple[str, int, int], int] = {}
        for task in self.scenario.tasks:
            for receiver in range(self._parallelism[task.name]):
                for index, edge in enumerate(task.inputs):
                    for sender in self._senders(edge.source, edge.exchange, receiver):
                        receiver_id = SubtaskId(task.name, receiver)
                        channels[edge.id(task.name, index), sender, receiver] = inputs.get(receiver_id, 0)
                        inputs[receiver_id] = inputs.get(receiver_id, 0) + 1
        for task in self.scenario.tasks:
            for sender in range(self._parallelism[task.name]):
                output = 0
                for target, index, edge in self.scenario.outputs_of(task.name):
                    for receiver in self._receivers(target.name, edge.exchange, sender):
                        out = (SubtaskId(task.name, sender), output)
                        into = (SubtaskId(target.name, receiver), channels[edge.id(target.name, index), sender, receiver])
                        self._routes[out], self._back[into] = into, out
                        output += 1

    def _senders(self, task: str, exchange: str, receiver: int) -> range:
        return range(receiver, receiver + 1) if exchange == "forward" else range(self._parallelism[task])

    def _receivers(self, task: str, exchange: str, sender: int) -> range:
        return range(sender, sender + 1) if exchange == "forward" else range(self._parallelism[task])

    def _deploy(self, subtasks: list[SubtaskId], stored: StoredCheckpoint | None, honour_ended: bool) -> None:
        self._failed.clear()
        in_flight = self._in_flight(stored) if stored is not None else {}
        states: dict[str, list[SimState]] = {}
        nodes = []
        for subtask_id in subtasks:
            node = self._nodes[subtask_id] = Node(self, subtask_id, self._attempt)
            if subtask_id.task not in states:
                states[subtask_id.task] = self._initial_states(subtask_id.task, stored)
            self._build(node, states[subtask_id.task][subtask_id.index])
            nodes.append(node)
            for key in [key for key in self._last_delivery if key[0] == subtask_id]:
                del self._last_delivery[key]
        for node in nodes:
            restore = None
            if stored is not None:
                own = stored.snapshots.get(node.id)
                restore = SubtaskRestore(stored.checkpoint_id, self.storage,  # type: ignore[arg-type]
                                         in_flight=in_flight.get((node.id.task, node.id.index), ()),
                                         ended=honour_ended and own is not None and own.ended)
            node.subtask.open(restore)
            self.wake(node)

    def _build(self, node: Node, state: SimState) -> None:
        task, faults = self.scenario.task(node.id.task), self.scenario.faults
        outputs = [OutputEdge(edge.id(target.name, index), partitioner(edge.exchange),
                              self._receivers(target.name, edge.exchange, node.id.index))
                   for target, index, edge in self.scenario.outputs_of(task.name)]
        inputs = [InputEdge(edge.id(task.name, index), edge.source,
                            self._senders(edge.source, edge.exchange, node.id.index), edge.exchange == "broadcast")
                  for index, edge in enumerate(task.inputs)]
        node.chain = SimChain(task, node.id.index, self._parallelism[task.name], len(outputs), state, self.log,
                              self.random, self._attempt)

        def target(checkpoint_id: int, options: CheckpointOptions) -> SimTarget:
            return SimTarget(self.storage, self.random, faults.upload if self.clock.now < FAULTS_END_MS else 0.0)

        node.subtask = Subtask(node.id, node.chain, inputs, outputs, node, clock=self.clock, codec=SimCodec(),
                               target=target, attempt=self._attempt, credit=self.scenario.credit,
                               queue_limit=self.scenario.queue_limit)

    def _initial_states(self, task: str, stored: StoredCheckpoint | None) -> list[SimState]:
        parallelism = self._parallelism[task]
        if stored is not None:
            return redistribute_state(self._states(stored, task), parallelism)
        states = [SimState() for _ in range(parallelism)]
        for split, length in enumerate(self.scenario.splits.get(task, ())):
            states[split % parallelism].splits.append((split, 0, length))
        return states

    def _states(self, stored: StoredCheckpoint, task: str) -> list[SimState]:
        files = [stored.snapshots[SubtaskId(task, index)].operators[0].operator
                 for index in range(stored.parallelism[task])]
        return [self.storage.load(file).copy() for file in files if file is not None]

    def _in_flight(self, stored: StoredCheckpoint) -> dict[tuple[str, int], tuple[InFlight, ...]]:
        files = [snapshot.in_flight for snapshot in stored.snapshots.values() if snapshot.in_flight is not None]
        parts: list[InFlight] = [part for file in files for part in self.storage.load(file)]
        shapes = {edge.id(task.name, index): EdgeShape(task.name, partitioner(edge.exchange),
                                                       self._parallelism[task.name], stored.parallelism[task.name])
                  for task in self.scenario.tasks for index, edge in enumerate(task.inputs)}
        return redistribute_in_flight(parts, shapes)


def _short(message: Report | Barrier) -> str:
    """A message as a reader of a trace wants it."""
    match message:
        case Barrier(checkpoint_id, _, options):
            marks = [name for name in ("unaligned", "stop", "drain", "full") if getattr(options, name)]
            return " ".join([options.kind.value, str(checkpoint_id), *marks])
        case Acknowledge(_, checkpoint_id, snapshot, stats):
            in_flight = f", {stats.in_flight_records} records in flight" if stats.in_flight_records else ""
            return f"checkpoint {checkpoint_id} taken{' after its end' if snapshot.ended else ''}{in_flight}"
        case Decline(_, checkpoint_id, text):
            return f"checkpoint {checkpoint_id} declined: {text}"
        case StatusReport(_, phase, _, waiting):
            return phase.name.lower() + "".join(f", waits for {entry.checkpoint_id} on {', '.join(entry.channels)}"
                                                for entry in waiting)

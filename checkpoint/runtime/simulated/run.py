"""One run of a simulated job: a coordinator, its subtasks, and the wires between them.

A run that was superseded goes on until its storage refuses it, as a process does that was cut off from everybody else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

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
)
from checkpoint.protocol.restart import region_of, regions
from checkpoint.runtime.channels import InputEdge, OutputEdge
from checkpoint.runtime.contracts import Barrier, CheckpointOptions, Element, InFlight, SubtaskRestore
from checkpoint.runtime.in_flight import EdgeShape, redistribute_in_flight
from checkpoint.runtime.simulated.chain import SimChain, SimCodec, partitioner, redistribute_state
from checkpoint.runtime.simulated.storage import SimState, SimTarget, StoredCheckpoint
from checkpoint.runtime.snapshots import SnapshotTask
from checkpoint.runtime.subtask import Blocked, Subtask
from statebackend.errors import Conflict

if TYPE_CHECKING:
    from checkpoint.runtime.simulated.cluster import SimCluster

class Node:
    """One running subtask and its ends of the wires."""

    def __init__(self, run: SimRun, subtask_id: SubtaskId) -> None:
        self.run, self.id = run, subtask_id
        self.alive = True
        self.step_at: int | None = None
        self.pace = 1 if run.random.random() < 0.8 else 8
        self.chain: SimChain
        self.subtask: Subtask

    # -- Transport -----------------------------------------------------------------------------------------------------

    def send(self, channel: int, element: Element) -> None:
        self.run.carry(self, channel, element)

    def grant(self, channel: int, credit: int) -> None:
        self.run.carry_credit(self, channel, credit)

    def report(self, report: Report) -> None:
        self.run.control(lambda: self.run.tell(report), f"{self.id} reports", lambda: _short(report))

    def start(self, task: SnapshotTask) -> None:
        self.run.after(self.run.random.randint(1, 6), lambda: self._run(task))

    def _run(self, task: SnapshotTask) -> None:
        if self.alive:
            task.run()
            self.subtask.on_task_done(task)
            self.run.wake(self)


class SimRun:
    """One generation of the job. `alive` ends with its process; `on_end` of the cluster hears of its outcome."""

    def __init__(self, cluster: SimCluster, parallelism: Mapping[str, int], stored: StoredCheckpoint | None) -> None:
        self.cluster, self.scenario, self.random = cluster, cluster.scenario, cluster.random
        self.clock, self.storage = cluster.clock, cluster.storage
        self.after, self.trace = cluster.after, cluster.trace
        self.parallelism, self.alive = parallelism, True
        self.generation, self.restarting = self.storage.begin(), False
        self.nodes: dict[SubtaskId, Node] = {}
        self._last_delivery: dict[tuple[SubtaskId, int], int] = {}
        self._routes: dict[tuple[SubtaskId, int], tuple[SubtaskId, int]] = {}
        self._back: dict[tuple[SubtaskId, int], tuple[SubtaskId, int]] = {}
        self._attempt = cluster.next_attempt()
        self._failed: set[SubtaskId] = set()
        self._tick_id = 0
        self._plan = self.scenario.plan(parallelism)
        self._coordinator = Coordinator(self._plan, self.scenario.settings, attempt=self._attempt)
        self._wire()
        self.trace(f"generation {self.generation} starts at {dict(parallelism)} from",
                   stored.checkpoint_id if stored else "nothing")
        self._tell_restored(stored)
        self._deploy(list(self._plan.subtasks()), stored,
                     honour_ended=self._has_parallelism_of(stored) and self.random.random() < 0.5)

    def kill(self) -> None:
        """The process is gone, with everything in it."""
        self.alive = False
        for node in self.nodes.values():
            node.alive = False

    # -- messages ------------------------------------------------------------------------------------------------------

    def control(self, deliver: Callable[[], None], text: str, *details: Any) -> None:
        """A message between the coordinator and a subtask: may be lost, may be late, may be overtaken."""
        faulty = self.cluster.faulty
        if faulty and self.random.random() < self.scenario.faults.lose:
            self.trace(f"LOST: {text}", *details)
            return
        late = faulty and self.random.random() < self.scenario.faults.delay
        delay = self.random.randint(10, 80) if late else self.random.randint(0, 2)

        def arrive() -> None:
            if self.alive:
                self.trace(text, *details)
                deliver()

        self.after(delay, arrive)

    def tell(self, event: Event) -> None:
        """An event for the coordinator, and what it makes of it."""
        if self.alive:
            for action in self._coordinator.handle(event, self.clock.now_ms()):
                self._perform(action)

    def _to_subtasks(self, subtasks: tuple[SubtaskId, ...] | None, call: Callable[[Subtask], None],
                     text: str) -> None:
        for subtask_id in self.nodes if subtasks is None else subtasks:
            node = self.nodes[subtask_id]

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
                    self.storage.discard(self.generation, checkpoint_id)
            case DiscardFiles(_, snapshots):
                self.storage.discard_files(self.generation, snapshots)
            case FailJob(_, message, restartable):
                self.trace("THE JOB FAILS:", message)
                if restartable:
                    self._fail_over(frozenset(self.nodes))
                else:
                    self.kill()
            case EndJob(outcome):
                self.trace(f"generation {self.generation} has ended:", outcome.value)
                self.cluster.on_end(self, outcome)
            case Log(_, line):
                self.trace("log:", line)
            case CompleteRequest(request_id, _, path, error):
                self.trace(f"request {request_id} is answered:", path, error)

    def _tick(self, tick_id: int) -> None:
        if tick_id == self._tick_id:
            self.tell(Tick())

    def _publish(self, publish: Publish) -> None:
        fault = self.cluster.faulty and self.random.random() < self.scenario.faults.publish
        kind = self.random.choice(("refused", "stored but no reply", "no reply", "slow")) if fault else "stored"

        def finish() -> None:
            event: Event
            try:
                if kind not in ("refused", "no reply"):
                    self.cluster.store(publish, self)
                event = Published(publish.checkpoint_id, f"chk-{publish.checkpoint_id}")
            except Conflict as error:
                event = PublishFailed(publish.checkpoint_id, str(error), fenced=True)
            if kind == "refused":
                event = PublishFailed(publish.checkpoint_id, "the store is full")
            elif "no reply" in kind and isinstance(event, Published):
                event = PublishFailed(publish.checkpoint_id, "the store gave no reply", settled=False)
            self.trace(f"publication of {publish.checkpoint_id} by generation {self.generation}: {kind},",
                       type(event).__name__)
            self.tell(event)
            if self.random.random() < 0.05:
                self.cluster.crash()

        self.after(self.random.randint(100, 400) if kind == "slow" else self.random.randint(1, 8), finish)

    # -- channels ------------------------------------------------------------------------------------------------------

    def carry(self, sender: Node, channel: int, element: Element) -> None:
        receiver_id, input_channel = self._routes[sender.id, channel]
        slow = (sender.id.task, receiver_id.task) in self.scenario.slow
        delay = self.random.randint(5, 15) if slow else self.random.randint(0, 2)
        key = (sender.id, channel)
        at = max(self.clock.now + delay, self._last_delivery.get(key, 0))
        self._last_delivery[key] = at
        receiver = self.nodes[receiver_id]

        def deliver() -> None:
            if receiver.alive and sender.alive:
                receiver.subtask.on_element(input_channel, element)
                self.wake(receiver)

        self.after(at - self.clock.now, deliver)

    def carry_credit(self, receiver: Node, channel: int, credit: int) -> None:
        sender_id, output_channel = self._back[receiver.id, channel]
        sender = self.nodes[sender_id]

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

    def crash_of_one(self) -> None:
        victim = self.random.choice(sorted(self.nodes))
        self.trace("CRASH of", victim)
        self._fail_over(region_of(victim, self._regions()))

    def _regions(self) -> list[frozenset[SubtaskId]]:
        return regions(self.nodes, ((sender, receiver) for (sender, _), (receiver, _) in self._routes.items()))

    def _fail_over(self, failed: frozenset[SubtaskId]) -> None:
        """The coordinator lives; the failed subtasks start again from the newest checkpoint.

        A superseded run does not come back: what it would start from belongs to another one.
        """
        if self.cluster.run is not self:
            self.kill()
            return
        begun, self.restarting = self.restarting, True
        self._failed |= failed
        self._attempt = self.cluster.next_attempt()
        for subtask_id in failed:
            self.nodes[subtask_id].alive = False
        self.tell(SubtasksFailed(failed, self._attempt, "a subtask crashed"))
        if begun:
            return

        def restart() -> None:
            if not self.alive:
                return
            if self.cluster.run is not self:
                self.kill()
                return
            if self._coordinator.publishing is not None:
                self.after(3, restart)
                return
            self.restarting = False
            stored = self.cluster.restore_point()
            self.trace("restart from", stored.checkpoint_id if stored else "nothing")
            self._tell_restored(stored)
            self._deploy(sorted(self._failed), stored, honour_ended=self._has_parallelism_of(stored))

        self.after(self.random.randint(1, 20), restart)

    def _has_parallelism_of(self, stored: StoredCheckpoint | None) -> bool:
        return stored is not None and dict(stored.parallelism) == dict(self.parallelism)

    def _tell_restored(self, stored: StoredCheckpoint | None) -> None:
        if stored is not None:
            self.cluster.restores += 1
            self.tell(Restored(stored.checkpoint_id, f"chk-{stored.checkpoint_id}", stored.options.kind == "savepoint",
                               tuple(sorted(self.storage.checkpoints))))

    def _wire(self) -> None:
        """Number the channels of every subtask on both sides and connect them."""
        inputs: dict[SubtaskId, int] = {}
        channels: dict[tuple[str, int, int], int] = {}
        for task in self.scenario.tasks:
            for receiver in range(self.parallelism[task.name]):
                for index, edge in enumerate(task.inputs):
                    for sender in self._senders(edge.source, edge.exchange, receiver):
                        receiver_id = SubtaskId(task.name, receiver)
                        channels[edge.id(task.name, index), sender, receiver] = inputs.get(receiver_id, 0)
                        inputs[receiver_id] = inputs.get(receiver_id, 0) + 1
        for task in self.scenario.tasks:
            for sender in range(self.parallelism[task.name]):
                output = 0
                for target, index, edge in self.scenario.outputs_of(task.name):
                    for receiver in self._receivers(target.name, edge.exchange, sender):
                        out = (SubtaskId(task.name, sender), output)
                        into = (SubtaskId(target.name, receiver), channels[edge.id(target.name, index), sender, receiver])
                        self._routes[out], self._back[into] = into, out
                        output += 1

    def _senders(self, task: str, exchange: str, receiver: int) -> range:
        return range(receiver, receiver + 1) if exchange == "forward" else range(self.parallelism[task])

    def _receivers(self, task: str, exchange: str, sender: int) -> range:
        return range(sender, sender + 1) if exchange == "forward" else range(self.parallelism[task])

    def _deploy(self, subtasks: list[SubtaskId], stored: StoredCheckpoint | None, honour_ended: bool) -> None:
        self._failed.clear()
        in_flight = self._in_flight(stored) if stored is not None else {}
        states: dict[str, list[SimState]] = {}
        nodes = []
        for subtask_id in subtasks:
            node = self.nodes[subtask_id] = Node(self, subtask_id)
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
        node.chain = SimChain(task, node.id.index, self.parallelism[task.name], len(outputs), state, self.cluster.log,
                              self.random, self._attempt)

        def target(checkpoint_id: int, options: CheckpointOptions) -> SimTarget:
            return SimTarget(self.storage, self.random, faults.upload if self.cluster.faulty else 0.0)

        node.subtask = Subtask(node.id, node.chain, inputs, outputs, node, clock=self.clock, codec=SimCodec(),
                               target=target, attempt=self._attempt, credit=self.scenario.credit,
                               queue_limit=self.scenario.queue_limit)

    def _initial_states(self, task: str, stored: StoredCheckpoint | None) -> list[SimState]:
        parallelism = self.parallelism[task]
        if stored is not None:
            return redistribute_state(self.storage.states(stored, task), parallelism)
        states = [SimState() for _ in range(parallelism)]
        for split, length in enumerate(self.scenario.splits.get(task, ())):
            states[split % parallelism].splits.append((split, 0, length))
        return states

    def _in_flight(self, stored: StoredCheckpoint) -> dict[tuple[str, int], tuple[InFlight, ...]]:
        files = [snapshot.in_flight for snapshot in stored.snapshots.values() if snapshot.in_flight is not None]
        parts: list[InFlight] = [part for file in files for part in self.storage.load(file)]
        shapes = {edge.id(task.name, index): EdgeShape(task.name, partitioner(edge.exchange),
                                                       self.parallelism[task.name], stored.parallelism[task.name])
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

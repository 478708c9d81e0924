"""The core of one running subtask: input queues, barriers, watermarks, an operator chain, and output channels.

It has no thread, socket or clock of its own. A runtime drives it from one thread:

    subtask.open(restore)                     # once; then
    subtask.on_element(channel, element)      # an element arrived on an input channel (numbered over all input edges)
    subtask.on_credit(channel, n)             # the receiver of an output channel takes n more batches
    subtask.on_trigger(barrier)               # the coordinator's SendBarrier
    subtask.on_completed(id, last), on_aborted(id), on_savepoint_done(id), on_status_request()
    subtask.on_task_done(task)                # a SnapshotTask that `Transport.start` was given has run
    subtask.step() -> StepResult              # do some work; when there was none, wait for input, credit or `wake_at`
    subtask.close()                           # exactly once, also after a failure

What it has to tell goes through its Transport. An error of a user function or of the synchronous part of a snapshot
comes out of the call as it is: the runtime then fails the subtask. An asynchronous failure declines the checkpoint.

A subtask whose inputs have all ended (for a source: whose chain says ENDED) flushes, sends EndOfInput and stays. It
takes part in checkpoints that the coordinator triggers directly, until one is the last: `on_completed(id, last=True)`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from checkpoint.protocol.barriers import (
    AbortAlignment,
    BarrierAction,
    BarrierHandler,
    CaptureComplete,
    TakeSnapshot,
)
from checkpoint.protocol.messages import Decline, Phase, Report, StatusReport, SubtaskId, Waiting
from checkpoint.runtime.channels import DEFAULT_CREDIT, DEFAULT_QUEUE_LIMIT, InputEdge, OutputEdge, unaligned
from checkpoint.runtime.contracts import (
    MAX_WATERMARK,
    Barrier,
    CancelBarrier,
    ChannelIdle,
    ChannelStateCodec,
    CheckpointKind,
    CheckpointOptions,
    Element,
    EndOfInput,
    OperatorChain,
    Records,
    SourceStatus,
    SubtaskRestore,
    Watermark,
)
from checkpoint.runtime.load import Load
from checkpoint.runtime.outputs import SubtaskOutputs
from checkpoint.runtime.snapshots import RunningSnapshot, SnapshotTask
from checkpoint.runtime.watermarks import WatermarkMerger
from statebackend.clock import Clock
from statebackend.files import SnapshotTarget

POLL_LIMIT = 1024
IDLE_POLL_MS = 10
RESEND_MS = 1000


class Transport(Protocol):
    """How a subtask reaches the others. All calls come from the subtask's thread and must not call back into it."""

    def send(self, channel: int, element: Element) -> None:
        """Deliver on an output channel (numbered over all output edges), in order and without loss."""

    def grant(self, channel: int, credit: int) -> None:
        """Give the sender of an input channel credit for more batches."""

    def report(self, report: Report) -> None:
        """Tell the coordinator; may be lost."""

    def start(self, task: SnapshotTask) -> None:
        """Call `task.run()` on any thread (it never raises), then `Subtask.on_task_done(task)` on this one."""


class Blocked(Enum):
    """Why a step could not go on. NOTHING: call again at once."""

    NOTHING = "nothing"
    INPUT = "input"
    OUTPUT = "output"
    BARRIER = "barrier"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class StepResult:
    worked: bool
    blocked: Blocked
    wake_at: int | None


class Subtask:
    """One subtask. Belongs to one thread; see the module for how it is driven."""

    def __init__(self, subtask: SubtaskId, chain: OperatorChain, inputs: Sequence[InputEdge],
                 outputs: Sequence[OutputEdge], transport: Transport, *, clock: Clock, codec: ChannelStateCodec,
                 target: Callable[[int, CheckpointOptions], SnapshotTarget], attempt: int = 0,
                 credit: int = DEFAULT_CREDIT, queue_limit: int = DEFAULT_QUEUE_LIMIT) -> None:
        self.id, self.attempt, self.chain = subtask, attempt, chain
        self.phase = Phase.RESTORING
        self.load = Load()
        self.records_in = 0
        self._transport, self._clock, self._codec, self._target = transport, clock, codec, target
        self._inputs = tuple(inputs)
        self._channels = [(index, edge, sender) for index, edge in enumerate(inputs) for sender in edge.senders]
        self._queues: list[deque[Element]] = [deque() for _ in self._channels]
        self._listed = [False] * len(self._channels)
        self._ready: deque[int] = deque()
        self._owed = [0] * len(self._channels)
        self._grant_at = max(1, credit // 2)
        self._open_channels = [len(edge.senders) for edge in inputs]
        self._drained = True
        self._barriers = BarrierHandler(len(self._channels), [channel for channel, (_, edge, _) in
                                                              enumerate(self._channels) if edge.ordered])
        self._watermarks = WatermarkMerger(len(self._channels))
        self._outputs = SubtaskOutputs(subtask.index, outputs, transport.send, credit=credit, queue_limit=queue_limit)
        self._recovered: deque[tuple[int, Records]] = deque()
        self._snapshots: dict[int, RunningSnapshot] = {}
        self._unresolved: set[int] = set()
        self._savepoints: set[int] = set()
        self._holding: int | None = None
        self._next_timer: int | None = None
        self._timers_at = -1
        self._poll_at: int | None = None
        self._resend_at: int | None = None
        self._seen_coordinator = False
        self._records_at_barrier: dict[int, int] = {}
        self._stepped_at = clock.now_ms()

    # -- life ----------------------------------------------------------------------------------------------------------

    def open(self, restore: SubtaskRestore | None = None) -> None:
        """Open the chain on the state given; records in flight are processed by the first steps."""
        self.chain.open(self._outputs, restore)
        now = self._clock.now_ms()
        if restore is not None:
            index_of = {edge.edge: index for index, edge in enumerate(self._inputs)}
            # Edges that have come to lie inside the chain are the chain's own to replay.
            self._recovered.extend((index_of[part.edge], batch) for part in restore.in_flight
                                   if part.edge in index_of for batch in part.batches)
            if restore.ended:
                for channel in range(len(self._channels)):
                    self._barriers.on_end(channel, now)
                self._outputs.emit_watermark(MAX_WATERMARK)
                self._enter_ended(drained=True)
                return
        if not self._recovered:
            self._enter(Phase.RUNNING, now)

    def close(self) -> None:
        for snapshot in self._snapshots.values():
            snapshot.cancel()
        self._snapshots.clear()
        self.chain.close()

    @property
    def records_out(self) -> int:
        return self._outputs.records

    # -- arrivals ------------------------------------------------------------------------------------------------------

    def on_element(self, channel: int, element: Element) -> None:
        """Queue an element of an input channel; barriers that overtake are acted upon at once."""
        self._queues[channel].append(element)
        if type(element) is Records:
            if channel in self._barriers.capturing:
                self._capture(channel, element)
        else:
            self._control_arrived(channel, element)
        self._list(channel)

    def on_credit(self, channel: int, credit: int) -> None:
        if self._outputs.add_credit(channel, credit):
            self._pump(channel)

    def on_trigger(self, barrier: Barrier) -> None:
        """The coordinator starts a checkpoint here: at a source, or where all inputs have ended."""
        self._seen_coordinator = True
        if self.phase in (Phase.RESTORING, Phase.FINISHED) or not self._barriers.all_ended:
            return
        now = self._clock.now_ms()
        if self.chain.is_source and self.phase is Phase.RUNNING and barrier.options.drain:
            self._end_chain(drain=True)
        actions = self._barriers.on_trigger(barrier, now)
        self._perform(actions, now)
        if not actions and barrier.checkpoint_id not in self._unresolved:
            # A newer trigger came first. Nobody should wait for this one until it times out.
            self._transport.report(Decline(self.id, barrier.checkpoint_id, "a newer one was taken first", self.attempt,
                                           counts=False))

    def on_completed(self, checkpoint_id: int, last: bool = False) -> None:
        """The checkpoint is durable. `last`: the job ends with it, and so does this subtask."""
        self._seen_coordinator = True
        if self.phase is Phase.FINISHED:
            self._report_status()
            return
        # A savepoint stands for itself: a newer checkpoint does not take its place.
        kept = frozenset() if last else self._savepoints
        for older in [snapshot for snapshot in self._snapshots if snapshot <= checkpoint_id and snapshot not in kept]:
            self._snapshots.pop(older).cancel()
        self._unresolved = {taken for taken in self._unresolved if taken > checkpoint_id or taken in kept}
        self.chain.checkpoint_completed(checkpoint_id)
        if last:
            self._enter(Phase.FINISHED, self._clock.now_ms())

    def on_aborted(self, checkpoint_id: int) -> None:
        """The coordinator has given the checkpoint up."""
        self._seen_coordinator = True
        self._perform(self._barriers.on_cancel(checkpoint_id), self._clock.now_ms(), report=False)
        self._drop(checkpoint_id)

    def on_savepoint_done(self, checkpoint_id: int) -> None:
        """A savepoint is durable and the job goes on: nothing is committed by it and nothing builds on it."""
        self._seen_coordinator = True
        self._drop(checkpoint_id)

    def on_status_request(self) -> None:
        self._report_status()

    def on_task_done(self, task: SnapshotTask) -> None:
        """The asynchronous part of a snapshot has run."""
        snapshot = self._snapshots.get(task.checkpoint_id)
        if snapshot is None:
            return
        if task.error is not None:
            del self._snapshots[task.checkpoint_id]
            snapshot.cancel()
            self._transport.report(Decline(self.id, task.checkpoint_id, str(task.error), self.attempt))
            return
        snapshot.task_done(task, self._clock.now_ms())
        self._progress(snapshot)

    # -- work ----------------------------------------------------------------------------------------------------------

    def step(self, budget: int = 16) -> StepResult:
        """Process up to `budget` batches (a source: one poll), as far as input, alignment and back pressure allow."""
        now = self._clock.now_ms()
        if now < self._stepped_at:
            self._clock_was_set_back(self._stepped_at - now)
        self._stepped_at = now
        self.load.account(now)
        worked = self._on_time(now)
        blocked = Blocked.NOTHING
        for _ in range(1 if self.chain.is_source else budget):
            blocked = self._step_once(now)
            if blocked is not Blocked.NOTHING:
                break
            worked = True
        self.load.now_is(worked, blocked is Blocked.OUTPUT)
        return StepResult(worked, blocked, self._wake_at(now))

    def _step_once(self, now: int) -> Blocked:
        if self.phase is Phase.FINISHED:
            return Blocked.FINISHED
        if self._outputs.full:
            return Blocked.OUTPUT
        if self.phase is Phase.RESTORING:
            return self._step_recovered(now)
        if self.chain.is_source:
            return self._poll(now)
        while self._ready:
            channel = self._ready.popleft()
            self._listed[channel] = False
            queue = self._queues[channel]
            if not queue or channel in self._barriers.blocked:
                continue
            element = queue.popleft()
            self._reached(channel, element, now)
            self._list(channel)
            return Blocked.NOTHING
        return Blocked.BARRIER if self._barriers.blocked else Blocked.INPUT

    def _step_recovered(self, now: int) -> Blocked:
        if self._recovered:
            index, records = self._recovered.popleft()
            self.records_in += len(records.values)
            self.chain.process(index, records)
        if not self._recovered:
            self._enter(Phase.RUNNING, now)
        return Blocked.NOTHING

    def _poll(self, now: int) -> Blocked:
        if self.phase is Phase.ENDED or self._holding is not None:
            return Blocked.INPUT
        if self._poll_at is not None and now < self._poll_at:
            return Blocked.INPUT
        self._poll_at = None
        emitted = self.records_out
        status = self.chain.poll(POLL_LIMIT)
        if status is SourceStatus.ENDED:
            self._end_chain(drain=True)
        elif status is SourceStatus.IDLE:
            self._poll_at = now + IDLE_POLL_MS
            return Blocked.NOTHING if self.records_out > emitted else Blocked.INPUT
        return Blocked.NOTHING

    def _reached(self, channel: int, element: Element, now: int) -> None:
        if type(element) is Records:
            self._give_credit(channel)
            if self._watermarks.activate(channel):
                self._advance_watermark()
            self.records_in += len(element.values)
            self.chain.process(self._channels[channel][0], element)
        elif type(element) is Watermark:
            self._watermarks.update(channel, element.timestamp)
            self._advance_watermark()
        elif type(element) is Barrier:
            self._records_at_barrier.setdefault(element.checkpoint_id, self.records_in)
            self._perform(self._barriers.on_barrier(channel, element, now), now)
        elif type(element) is ChannelIdle:
            self._watermarks.deactivate(channel)
            self._advance_watermark()
        elif type(element) is EndOfInput:
            self._ended(channel, element, now)

    def _ended(self, channel: int, end: EndOfInput, now: int) -> None:
        index = self._channels[channel][0]
        self._drained = self._drained and end.drained
        self._open_channels[index] -= 1
        self._watermarks.deactivate(channel)
        self._advance_watermark()
        # The barriers first: a snapshot that this end completes is one of the time before the flush.
        self._perform(self._barriers.on_end(channel, now), now)
        if self.phase is not Phase.RUNNING:
            return
        if not self._open_channels[index]:
            self.chain.end_input(index)
        if not any(self._open_channels):
            self._end_chain(drain=self._drained)

    def _end_chain(self, drain: bool) -> None:
        if drain and self._watermarks.combined < MAX_WATERMARK:
            self.chain.process_watermark(MAX_WATERMARK)
        self.chain.finish(drain)
        self._enter_ended(drain)

    def _enter_ended(self, drained: bool) -> None:
        self._outputs.put_all(EndOfInput(drained))
        self._outputs.ended = True
        self._enter(Phase.ENDED, self._clock.now_ms())

    def _advance_watermark(self) -> None:
        advanced = self._watermarks.advance()
        if advanced is not None:
            self.chain.process_watermark(advanced)
        elif any(self._open_channels) and self._watermarks.became_idle():
            self._outputs.emit_idle()

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def _control_arrived(self, channel: int, element: Element) -> None:
        now = self._clock.now_ms()
        if type(element) is Barrier:
            if self._barriers.captures(channel, element.checkpoint_id):
                self._queues[channel].pop()
                self._perform(self._barriers.on_barrier(channel, element, now), now)
            else:
                self._perform(self._barriers.on_arrival(channel, element, now), now)
        elif type(element) is CancelBarrier:
            self._queues[channel].pop()
            self._perform(self._barriers.on_cancel(element.checkpoint_id), now)
            self._drop(element.checkpoint_id)
        elif type(element) is EndOfInput and channel in self._barriers.capturing:
            self._perform(self._barriers.on_end_arrived(channel, now), now)

    def _perform(self, actions: Sequence[BarrierAction], now: int, report: bool = True) -> None:
        for action in actions:
            if type(action) is TakeSnapshot:
                self._take(action, now)
            elif type(action) is CaptureComplete:
                snapshot = self._snapshots.get(action.checkpoint_id)
                if snapshot is not None:
                    snapshot.inputs_complete(action.alignment_ms)
                    self._progress(snapshot)
            elif type(action) is AbortAlignment:
                self._outputs.put_all(CancelBarrier(action.checkpoint_id))
                self._drop(action.checkpoint_id)
                if report:
                    self._transport.report(Decline(self.id, action.checkpoint_id, action.message, self.attempt, False))
        if actions:
            for channel in range(len(self._queues)):
                self._list(channel)

    def _take(self, action: TakeSnapshot, now: int) -> None:
        barrier = action.barrier
        if self._holding is not None and self._holding < barrier.checkpoint_id:
            # Nothing begins beside a stop: it was given up, and the word of that was lost.
            self._drop(self._holding)
        if action.unaligned and not barrier.options.unaligned:
            barrier = unaligned(barrier)
        target = self._target(barrier.checkpoint_id, barrier.options)
        snapshot = RunningSnapshot(barrier, action, self.phase is Phase.ENDED, target)
        began = self._records_at_barrier.get(barrier.checkpoint_id, self.records_in)
        snapshot.processed_records = self.records_in - began
        self._records_at_barrier = {known: count for known, count in self._records_at_barrier.items()
                                    if known > barrier.checkpoint_id}
        pending = self.chain.snapshot(barrier.checkpoint_id, barrier.options, target)
        self._snapshots[barrier.checkpoint_id] = snapshot
        self._unresolved.add(barrier.checkpoint_id)
        if barrier.options.kind is CheckpointKind.SAVEPOINT:
            self._savepoints.add(barrier.checkpoint_id)
        self._outputs.send_barrier(snapshot, barrier, action.unaligned, now)
        snapshot.sync_done(now, self._clock.now_ms())
        if barrier.options.stop and self.phase is Phase.RUNNING:
            self._holding = barrier.checkpoint_id
        self._capture_queued(action, barrier.checkpoint_id, now)
        task = SnapshotTask(barrier.checkpoint_id, pending.run, pending.cancel)
        snapshot.state_task = task
        self._transport.start(task)

    def _capture_queued(self, action: TakeSnapshot, checkpoint_id: int, now: int) -> None:
        """Record what is queued on the channels that the barrier overtakes, up to their own barrier or end."""
        for channel in action.capturing:
            queue, found = self._queues[channel], None
            for element in queue:
                if type(element) is Records:
                    self._capture(channel, element)
                elif type(element) is EndOfInput or \
                        (type(element) is Barrier and element.checkpoint_id == checkpoint_id):
                    found = element
                    break
            if type(found) is Barrier:
                queue.remove(found)
                self._perform(self._barriers.on_barrier(channel, found, now), now)
            elif found is not None:
                self._perform(self._barriers.on_end_arrived(channel, now), now)

    def _capture(self, channel: int, records: Records) -> None:
        _, edge, sender = self._channels[channel]
        for snapshot in self._snapshots.values():
            if snapshot.capturing:
                snapshot.add_input(edge.edge, sender, self.id.index, records)

    def _progress(self, snapshot: RunningSnapshot) -> None:
        """Start writing the channel state once it is whole; acknowledge once everything is written."""
        if snapshot.channel_state_is_due():
            snapshot.channel_task = snapshot.write_channel_state(self._codec)
            self._transport.start(snapshot.channel_task)
        if snapshot.is_complete():
            del self._snapshots[snapshot.checkpoint_id]
            self._transport.report(snapshot.acknowledge(self.id, self.attempt))

    def _drop(self, checkpoint_id: int) -> None:
        snapshot = self._snapshots.pop(checkpoint_id, None)
        if snapshot is not None:
            snapshot.cancel()
            self._outputs.drop_barrier(snapshot)
        self._savepoints.discard(checkpoint_id)
        if checkpoint_id in self._unresolved:
            self._unresolved.discard(checkpoint_id)
            self.chain.checkpoint_aborted(checkpoint_id)
        if self._holding == checkpoint_id:
            self._holding = None

    # -- time ----------------------------------------------------------------------------------------------------------

    def _on_time(self, now: int) -> bool:
        worked = False
        for channel in self._outputs.waiting:
            worked |= self._pump(channel)
        if self._barriers.deadline is not None:
            self._perform(self._barriers.on_time(now), now)
        for snapshot in list(self._snapshots.values()):
            if snapshot.output_deadline is not None and now >= snapshot.output_deadline:
                self._outputs.overtake_late(snapshot)
                self._progress(snapshot)
        if self._resend_at is not None and now >= self._resend_at:
            self._report_status()
            self._resend_at = now + RESEND_MS
        if self.phase is Phase.RUNNING and self._holding is None and now != self._timers_at and \
                not self._outputs.full:
            self._timers_at = now
            self._next_timer = self.chain.advance_processing_time(now)
        if self.phase is Phase.RUNNING and self._seen_coordinator:
            self._resend_at = (self._resend_at or now + RESEND_MS) if self._barriers.aligning else None
        return worked

    def _clock_was_set_back(self, by_ms: int) -> None:
        """What waits for a time of the old clock waits for the same span on the new one."""
        self._resend_at = None if self._resend_at is None else self._resend_at - by_ms
        self._poll_at = None
        self._barriers.clock_was_set_back(by_ms)
        for snapshot in self._snapshots.values():
            if snapshot.output_deadline is not None:
                snapshot.output_deadline -= by_ms

    def _wake_at(self, now: int) -> int | None:
        times = [at for at in (self._barriers.deadline, self._resend_at) if at is not None]
        times += [snapshot.output_deadline for snapshot in self._snapshots.values()
                  if snapshot.output_deadline is not None]
        # While back pressure holds it, credit wakes it, not timers.
        if self.phase is Phase.RUNNING and self._holding is None and not self._outputs.full:
            times += [at for at in (self._next_timer, self._poll_at) if at is not None]
        return max(now + 1, min(times)) if times else None

    def _pump(self, index: int) -> bool:
        sent = self._outputs.pump(index)
        if sent:
            for snapshot in list(self._snapshots.values()):
                if self._outputs.note_sent(index, snapshot):
                    self._progress(snapshot)
        return sent

    # -- the rest ------------------------------------------------------------------------------------------------------

    def _list(self, channel: int) -> None:
        if not self._listed[channel] and self._queues[channel] and channel not in self._barriers.blocked:
            self._listed[channel] = True
            self._ready.append(channel)

    def _give_credit(self, channel: int) -> None:
        owed = self._owed[channel] + 1
        if owed >= self._grant_at:
            self._transport.grant(channel, owed)
            owed = 0
        self._owed[channel] = owed

    def _enter(self, phase: Phase, now: int) -> None:
        self.phase = phase
        self._resend_at = None if phase is Phase.FINISHED else now + RESEND_MS
        self._report_status()

    def _report_status(self) -> None:
        now = self._clock.now_ms()
        waiting = tuple(Waiting(checkpoint_id, tuple(self._channel_name(channel) for channel in channels[:3]),
                                len(channels)) for checkpoint_id, channels in self._barriers.missing().items())
        self._transport.report(StatusReport(self.id, self.phase, self.load.back_pressure(now), waiting, self.attempt))

    def _channel_name(self, channel: int) -> str:
        _, edge, sender = self._channels[channel]
        return f"{SubtaskId(edge.task, sender)} -> {self.id}"

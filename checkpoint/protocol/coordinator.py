"""The checkpoint coordinator of one job, as a state machine: events in, actions out.

    coordinator = Coordinator(plan, settings)
    for action in coordinator.handle(event, now_ms): ...     # the runtime carries the actions out, in order

It has no thread, clock, socket or file. A runtime calls `handle` from one thread at a time with the wall clock's
milliseconds; a clock that is set back stands still for the coordinator, so that nothing expires or starves by it.

A checkpoint begins with SendBarrier to the sources and to the subtasks whose inputs have ended. When all subtasks have
acknowledged it is published (one at a time, in order), and only when the metadata is durable it is complete, older ones
in progress are given up and the subtasks are told. Savepoints commit nothing unless the job stops with them, because a
restart goes back to the newest *checkpoint*. When all input has ended, a last checkpoint ends the job.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from checkpoint.protocol.explain import explain
from checkpoint.protocol.failures import AckOutcome, FailureReason
from checkpoint.protocol.messages import (
    Acknowledge,
    Action,
    CancelJob,
    CompleteRequest,
    Decline,
    DiscardCompleted,
    DiscardFiles,
    EndJob,
    Event,
    FailJob,
    JobPlan,
    Log,
    NotifyAborted,
    NotifyCompleted,
    NotifySavepointDone,
    Outcome,
    Phase,
    Published,
    PublishFailed,
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
from checkpoint.protocol.pending import PendingCheckpoint
from checkpoint.protocol.settings import CheckpointSettings
from checkpoint.protocol.statistics import CheckpointRecord, CheckpointStatistics
from checkpoint.protocol.steady_time import SteadyTime
from checkpoint.runtime.contracts import Barrier, CheckpointOptions
from checkpoint.storage.registry import retention
from statebackend.errors import Closed, Conflict, HoldfastError, InvalidRequest, Unavailable

RESEND_MS = 1000
LATE_AT_LEAST_MS = 10_000
STATUS_REQUESTS = 100
REMEMBERED_ABORTS = 1000


@dataclass(frozen=True)
class Completed:
    """A checkpoint (or the savepoint that the job stopped with) that the job can be restored from."""

    checkpoint_id: int
    path: str
    options: CheckpointOptions


class Coordinator:
    """Decides when checkpoints begin, whether they succeed, and what follows. Belongs to one thread at a time."""

    def __init__(self, plan: JobPlan, settings: CheckpointSettings, *, first_checkpoint_id: int = 1,
                 attempt: int = 0) -> None:
        self.plan, self.settings = plan, settings
        self.statistics = CheckpointStatistics(settings.history)
        self._time = SteadyTime()
        self._subtasks = frozenset(plan.subtasks())
        sources = {task.task for task in plan.tasks if not task.inputs}
        self._sources = frozenset(subtask for subtask in self._subtasks if subtask.task in sources)
        self._attempt = attempt
        self._attempts: dict[SubtaskId, int] = {}
        self._not_ready = set(self._subtasks)
        self._ended: set[SubtaskId] = set()
        self._finished: set[SubtaskId] = set()
        self._status: dict[SubtaskId, StatusReport] = {}
        self._pending: dict[int, PendingCheckpoint] = {}
        self._publish_queue: deque[PendingCheckpoint] = deque()
        self._publishing: PendingCheckpoint | None = None
        self._given_up: deque[int] = deque(maxlen=REMEMBERED_ABORTS)
        self._requests: deque[TriggerCheckpoint | TriggerSavepoint] = deque()
        self._completed: deque[Completed] = deque()
        self._next_id = first_checkpoint_id
        self._last_trigger: int | None = None
        self._last_end: int | None = None
        self._retry_last_at: int | None = None
        self._failures = 0
        self._needs_full = self._may_discard = False
        self._last: Completed | None = None
        self._outcome: Outcome | None = None
        self._last_requests: list[str] = []
        self._resend_at: int | None = None
        self._over = False
        self._actions: list[Action] = []
        self._scheduled: int | None = None
        self._handlers = {
            Acknowledge: self._on_acknowledge, Decline: self._on_decline, StatusReport: self._on_status,
            TriggerCheckpoint: self._on_request, TriggerSavepoint: self._on_request, CancelJob: self._on_cancel,
            SubtasksFailed: self._on_failed, Restored: self._on_restored, Published: self._on_published,
            PublishFailed: self._on_publish_failed, Tick: lambda _event: None,
        }

    # -- what a runtime uses -------------------------------------------------------------------------------------------

    def handle(self, event: Event, now_ms: int) -> list[Action]:
        """What to do about an event. The actions are to be carried out in order."""
        # A tick that came has been used up, and one that was asked for by a clock that has been set back is too far off.
        if self._time.advance(now_ms) or type(event) is Tick:
            self._scheduled = None
        self._actions = []
        self._handlers[type(event)](event)  # type: ignore[operator]
        self._run_due()
        self._discard_surplus()
        return self._actions

    @property
    def publishing(self) -> int | None:
        """The checkpoint that is being published; a restart waits until there is none."""
        return None if self._publishing is None else self._publishing.id

    @property
    def latest(self) -> Completed | None:
        """What a restart starts from: the newest completed checkpoint, or the savepoint that the job ended with."""
        if self._last is not None:
            return self._last
        return self._completed[-1] if self._completed else None

    @property
    def retained(self) -> tuple[int, ...]:
        return tuple(completed.checkpoint_id for completed in self._completed)

    @property
    def in_progress(self) -> tuple[int, ...]:
        return tuple(self._pending)

    @property
    def is_ready(self) -> bool:
        """Whether every subtask runs."""
        return not self._not_ready

    @property
    def is_over(self) -> bool:
        return self._over

    # -- reports of subtasks -------------------------------------------------------------------------------------------

    def _on_acknowledge(self, ack: Acknowledge) -> None:
        outcome = self._outcome_of(ack)
        self.statistics.count_acknowledgement(outcome.value)
        if outcome is AckOutcome.ACCEPTED:
            pending = self._pending[ack.checkpoint_id]
            if pending.is_acknowledged:
                self._publish_queue.append(pending)
                self._publish_next()
        elif outcome is AckOutcome.CONTRADICTORY:
            pending = self._pending[ack.checkpoint_id]
            if pending is not self._publishing and pending not in self._publish_queue:
                self._give_up(pending, FailureReason.CONTRADICTION, f"by {ack.subtask}")
        elif outcome is AckOutcome.LATE and ack.checkpoint_id in self._given_up:
            self._actions.append(DiscardFiles(ack.checkpoint_id, {ack.subtask: ack.snapshot}))

    def _outcome_of(self, ack: Acknowledge) -> AckOutcome:
        if ack.subtask not in self._subtasks:
            return AckOutcome.UNKNOWN_SUBTASK
        if ack.attempt != self._attempt_of(ack.subtask):
            return AckOutcome.STALE_ATTEMPT
        pending = self._pending.get(ack.checkpoint_id)
        if pending is None:
            return AckOutcome.LATE if ack.checkpoint_id < self._next_id else AckOutcome.UNKNOWN_CHECKPOINT
        return pending.acknowledge(ack, self._time.wall_ms)

    def _on_decline(self, decline: Decline) -> None:
        pending = self._pending.get(decline.checkpoint_id)
        if pending is None or decline.attempt != self._attempt_of(decline.subtask) or \
                decline.subtask not in pending.missing:
            return
        reason = FailureReason.DECLINED if decline.counts else FailureReason.SUBSUMED
        self._give_up(pending, reason, f"by {decline.subtask}: {decline.message}")

    def _on_status(self, report: StatusReport) -> None:
        subtask = report.subtask
        if subtask not in self._subtasks or report.attempt != self._attempt_of(subtask):
            return
        self._status[subtask] = report
        if report.phase is Phase.RESTORING:
            return
        self._mark_ready(subtask)
        if report.phase is Phase.FINISHED:
            self._on_finished(subtask)
        elif self._last is not None:
            self._actions.append(NotifyCompleted(self._last.checkpoint_id, (subtask,), last=True))
        elif report.phase is Phase.ENDED:
            self._on_ended(subtask)

    def _mark_ready(self, subtask: SubtaskId) -> None:
        if subtask in self._not_ready:
            self._not_ready.discard(subtask)
            if not self._not_ready:
                self._last_trigger = self._time.now_ms

    def _on_ended(self, subtask: SubtaskId) -> None:
        self._ended.add(subtask)
        # Its barrier will never come on a channel, because all channels have ended: trigger it directly.
        for pending in self._pending.values():
            if subtask in pending.missing:
                pending.triggered.add(subtask)
                self._actions.append(SendBarrier((subtask,), pending.barrier))

    def _on_finished(self, subtask: SubtaskId) -> None:
        self._finished.add(subtask)
        if self._last is None or len(self._finished) < len(self._subtasks) or self._over:
            return
        self._over = True
        assert self._outcome is not None
        for request_id in self._last_requests:
            self._actions.append(CompleteRequest(request_id, self._last.checkpoint_id, self._last.path))
        self._refuse_requests(Closed("the job has ended"))
        self._actions.append(EndJob(self._outcome))

    # -- requests ------------------------------------------------------------------------------------------------------

    def _on_request(self, request: TriggerCheckpoint | TriggerSavepoint) -> None:
        error: HoldfastError | None = None
        if self._over or self._last is not None:
            error = Closed("the job has ended")
        elif isinstance(request, TriggerSavepoint):
            if request.stop and self._is_stopping():
                error = Conflict("the job is already stopping with a savepoint")
            else:
                try:
                    self._options(request)
                except InvalidRequest as invalid:
                    error = invalid
        if error is not None:
            self._actions.append(CompleteRequest(request.request_id, error=error))
        else:
            self._requests.append(request)

    def _on_cancel(self, request: CancelJob) -> None:
        if self._over:
            self._actions.append(CompleteRequest(request.request_id, error=Closed("the job has ended")))
            return
        self._over = True
        for pending in list(self._pending.values()):
            if pending is not self._publishing:
                self._give_up(pending, FailureReason.CANCELLED)
        self._refuse_requests(Conflict("the job was cancelled"))
        if not self.settings.retain_on_cancellation and self._completed:
            self._discard(completed.checkpoint_id for completed in self._completed)
            self._completed.clear()
        self._actions += [EndJob(Outcome.CANCELLED), CompleteRequest(request.request_id)]

    def _refuse_requests(self, error: HoldfastError) -> None:
        self._actions += [CompleteRequest(request.request_id, error=error) for request in self._requests]
        self._requests.clear()

    def _savepoint_in_progress(self) -> bool:
        return any(pending.is_savepoint for pending in self._pending.values())

    def _stop_in_progress(self) -> bool:
        """Nothing may begin beside it: with a drain, all input ends only for the savepoint's sake."""
        return any(pending.options.stop for pending in self._pending.values())

    def _is_stopping(self) -> bool:
        return self._stop_in_progress() or \
            any(isinstance(request, TriggerSavepoint) and request.stop for request in self._requests)

    def _options(self, request: TriggerCheckpoint | TriggerSavepoint | None) -> CheckpointOptions:
        if isinstance(request, TriggerSavepoint):
            return self.settings.savepoint_options(location=request.location, stop=request.stop, drain=request.drain,
                                                   native=request.native)
        return self.settings.checkpoint_options(full=self._needs_full or (request is not None and request.full))

    # -- failures and restores -----------------------------------------------------------------------------------------

    def _on_failed(self, event: SubtasksFailed) -> None:
        for subtask in event.subtasks & self._subtasks:
            self._attempts[subtask] = event.attempt
            self._not_ready.add(subtask)
            self._ended.discard(subtask)
            self._finished.discard(subtask)
            self._status.pop(subtask, None)
        for pending in list(self._pending.values()):
            if pending is not self._publishing:
                self._give_up(pending, FailureReason.SUBTASK_FAILED, event.message)
        self._failures = 0
        self._retry_last_at = None

    def _on_restored(self, event: Restored) -> None:
        self._next_id = max(self._next_id, event.checkpoint_id + 1, *(known + 1 for known in event.retained))
        self.statistics.restored(event.checkpoint_id, event.path, event.is_savepoint, self._time.wall_ms)
        known = {completed.checkpoint_id for completed in self._completed}
        options = self.settings.checkpoint_options()
        self._completed.extend(Completed(checkpoint_id, event.path if checkpoint_id == event.checkpoint_id else "",
                                         options)
                               for checkpoint_id in event.retained if checkpoint_id not in known)
        self._completed = deque(sorted(self._completed, key=lambda completed: completed.checkpoint_id))
        # What was restored without being ours may be deleted by its owner: the next checkpoint must stand alone.
        self._needs_full = event.checkpoint_id not in event.retained

    def _attempt_of(self, subtask: SubtaskId) -> int:
        return self._attempts.get(subtask, self._attempt) if self._attempts else self._attempt

    # -- publication ---------------------------------------------------------------------------------------------------

    def _publish_next(self) -> None:
        if self._publishing is None and self._publish_queue:
            self._publishing = self._publish_queue.popleft()
            self._actions.append(self._publishing.publish())

    def _on_published(self, event: Published) -> None:
        pending = self._take_publishing(event.checkpoint_id)
        if pending is None:
            return
        if pending.id not in self._pending:
            # It had been given up while it was being stored, and nobody was told that it is complete.
            self._discard((pending.id,))
            self._publish_next()
            return
        del self._pending[pending.id]
        self._last_end = self._time.now_ms
        self.statistics.completed(pending.record, event.path, self._time.wall_ms)
        completed = Completed(pending.id, event.path, pending.options)
        if not self._over:
            self._complete(pending, completed)
        elif not self.settings.retain_on_cancellation and not pending.is_savepoint:
            self._discard((pending.id,))
        self._publish_next()

    def _complete(self, pending: PendingCheckpoint, completed: Completed) -> None:
        # A savepoint belongs to its user: unless it was to stop the job, the last checkpoint is one of our own. It does
        # not come while somebody still waits for a savepoint.
        ends = pending.options.stop or (pending.all_ended and not pending.is_savepoint and
                                        not self._savepoint_in_progress())
        if not pending.is_savepoint:
            self._failures, self._needs_full, self._may_discard = 0, False, True
            self._completed.append(completed)
        if ends or not pending.is_savepoint:
            for older in [other for other in self._pending.values() if other.id < pending.id and
                          (ends or not other.is_savepoint)]:
                self._give_up(older, FailureReason.SUBSUMED)
        if ends:
            self._end_with(pending, completed)
        elif pending.is_savepoint:
            self._actions.append(NotifySavepointDone(pending.id))
        else:
            self._actions.append(NotifyCompleted(pending.id))
        if pending.request_id is not None and not ends:
            self._actions.append(CompleteRequest(pending.request_id, pending.id, completed.path))

    def _end_with(self, pending: PendingCheckpoint, completed: Completed) -> None:
        for other in list(self._pending.values()):
            self._give_up(other, FailureReason.STOPPED)
        self._last = completed
        self._outcome = Outcome.STOPPED if pending.options.stop else Outcome.FINISHED
        if pending.request_id is not None:
            self._last_requests.append(pending.request_id)
        self._resend_at = self._time.now_ms + RESEND_MS
        self._actions.append(NotifyCompleted(pending.id, last=True))

    def _discard_surplus(self) -> None:
        """Drop what is beyond the retained count, but nothing that a checkpoint in progress may refer to.

        A subtask builds its incremental snapshot on the newest checkpoint that it knows to be complete, which need not be
        the newest there is: its own notice may still be on the way.
        """
        if not self._may_discard or len(self._completed) <= self.settings.retained:
            return  # nothing is deleted before this run has completed a checkpoint of its own
        in_use = frozenset[int]().union(*(pending.builds_on for pending in self._pending.values()))
        surplus = retention(self.retained, self.settings.retained, in_use=in_use).drop
        if surplus:
            self._completed = deque(kept for kept in self._completed if kept.checkpoint_id not in surplus)
            self._discard(surplus)

    def _discard(self, checkpoint_ids: Iterable[int]) -> None:
        ids = tuple(checkpoint_ids)
        self.statistics.discarded(ids)
        self._actions.append(DiscardCompleted(ids))

    def _on_publish_failed(self, event: PublishFailed) -> None:
        pending = self._take_publishing(event.checkpoint_id)
        if pending is not None and pending.id in self._pending:
            reason = FailureReason.FENCED if event.fenced else FailureReason.PUBLISH_FAILED
            self._give_up(pending, reason, event.message, discard=event.settled)
        elif pending is not None and event.settled:
            self._actions.append(DiscardFiles(pending.id, dict(pending.snapshots)))
        if event.fenced and not self._over:
            self._over = True
            self._refuse_requests(Conflict("a newer run of this job has taken over"))
            self._actions.append(FailJob(FailureReason.FENCED, event.message, restartable=False))
        self._publish_next()

    def _take_publishing(self, checkpoint_id: int) -> PendingCheckpoint | None:
        if self._publishing is None or self._publishing.id != checkpoint_id:
            return None
        pending, self._publishing = self._publishing, None
        return pending

    # -- giving up -----------------------------------------------------------------------------------------------------

    def _give_up(self, pending: PendingCheckpoint, reason: FailureReason, detail: str = "",
                 discard: bool = True) -> None:
        del self._pending[pending.id]
        if pending in self._publish_queue:
            self._publish_queue.remove(pending)
        self._last_end = self._time.now_ms
        message = f"{_name(pending)} {reason.message}" + (f" ({detail})" if detail else "")
        self.statistics.failed(pending.record, message, self._time.wall_ms)
        self._log_failure(pending, reason, message)
        self._actions.append(NotifyAborted(pending.id, reason))
        # Files of a checkpoint whose publication is under way, or undecided, may be needed after all.
        if discard and pending is not self._publishing:
            self._given_up.append(pending.id)
            if pending.snapshots:
                self._actions.append(DiscardFiles(pending.id, dict(pending.snapshots)))
        if pending.request_id is not None:
            kind = Unavailable if reason.counts else Conflict
            self._actions.append(CompleteRequest(pending.request_id, pending.id, error=kind(message)))
        self._count_failure(pending, reason, message)

    def _log_failure(self, pending: PendingCheckpoint, reason: FailureReason, message: str) -> None:
        if reason is FailureReason.EXPIRED or (reason.counts and pending.missing):
            after = self._time.now_ms - pending.started_ms
            why = explain(pending.id, pending.missing, pending.total, pending.triggered, self._status)
            self._actions.append(Log("warning", f"{message} after {after / 1000:.1f} s: {why}"))
        else:
            self._actions.append(Log("warning" if reason.counts else "info", message))

    def _count_failure(self, pending: PendingCheckpoint, reason: FailureReason, message: str) -> None:
        if self._over or self._last is not None:
            return
        if pending.options.drain and self._not_ready != self._subtasks:
            # The sources have ended for this savepoint and can't go on: only a restart brings them back, and of all
            # regions, not only of one that failed.
            self._actions.append(FailJob(reason, f"{message}; its sources are drained and can't go on"))
            return
        if not reason.counts or pending.is_savepoint:
            return
        self._failures += 1
        if self._failures > self.settings.tolerable_failures:
            self._failures = 0
            tolerated = self.settings.tolerable_failures
            self._actions.append(FailJob(reason, f"{message}; {tolerated} consecutive failures are tolerated"))
        elif pending.all_ended or len(self._ended) == len(self._subtasks):
            self._retry_last_at = self._time.now_ms + max(self.settings.min_pause_ms, RESEND_MS)

    # -- time and triggers ---------------------------------------------------------------------------------------------

    def _run_due(self) -> None:
        if self._over:
            return
        now = self._time.now_ms
        for pending in list(self._pending.values()):
            if pending.id in self._pending:
                self._look_at(pending, now)
        if self._last is not None:
            if self._resend_at is not None and now >= self._resend_at:
                self._resend_at = now + RESEND_MS
                waiting = tuple(sorted(self._subtasks - self._finished - self._not_ready))
                self._actions.append(NotifyCompleted(self._last.checkpoint_id, waiting, last=True))
        elif not self._not_ready:
            self._trigger_due(now)
        self._schedule(now)

    def _look_at(self, pending: PendingCheckpoint, now: int) -> None:
        if pending.ask_at_ms is not None and now >= pending.ask_at_ms:
            pending.ask_at_ms = None
            if pending.missing:
                self._actions.append(RequestStatus(self._worth_asking(pending.missing)))
        if now >= pending.deadline_ms:
            self._give_up(pending, FailureReason.EXPIRED)
        elif pending.late_at_ms is not None and now >= pending.late_at_ms:
            pending.late_at_ms = None
            why = explain(pending.id, pending.missing, pending.total, pending.triggered, self._status)
            after = (now - pending.started_ms) / 1000
            self._actions.append(Log("warning", f"{_name(pending)} is late, {after:.1f} s after its trigger: {why}"))

    def _worth_asking(self, missing: set[SubtaskId]) -> tuple[SubtaskId, ...]:
        """Those without acknowledgement, and those that send to them: the back pressure there is the usual reason."""
        asked = sorted(missing)[:STATUS_REQUESTS]
        tasks = {subtask.task for subtask in asked}
        senders = {sender for task in self.plan.tasks if task.task in tasks for sender in task.inputs}
        upstream = (SubtaskId(task.task, index) for task in self.plan.tasks if task.task in senders
                    for index in range(min(task.parallelism, STATUS_REQUESTS)))
        return tuple(dict.fromkeys((*asked, *upstream)))

    def _trigger_due(self, now: int) -> None:
        while self._requests and not self._stop_in_progress() and self._may_start(self._requests[0]):
            request = self._requests.popleft()
            self._trigger(self._options(request), now, request.request_id)
        if self._is_stopping():
            return
        if len(self._ended) == len(self._subtasks):
            due = self._retry_last_at is None or now >= self._retry_last_at
            under_way = any(pending.is_savepoint or _covers_end(pending) for pending in self._pending.values())
            if due and not under_way:
                self._trigger(self.settings.checkpoint_options(full=self._needs_full), now, None)
            return
        due_at = self._next_periodic()
        if due_at is not None and now >= due_at and self._may_start(None):
            self._trigger(self._options(None), now, None)

    def _next_periodic(self) -> int | None:
        interval = self.settings.interval_ms
        if interval is None or self._last_trigger is None:
            return None
        due = self._last_trigger + interval
        return due if self._last_end is None else max(due, self._last_end + self.settings.min_pause_ms)

    def _may_start(self, request: TriggerCheckpoint | TriggerSavepoint | None) -> bool:
        """Unaligned checkpoints share the channels with nothing else; otherwise only checkpoints are counted.

        A stop does not wait for them: what is in progress is given up for it.
        """
        if isinstance(request, TriggerSavepoint) and request.stop:
            return self._publishing is None
        if self.settings.unaligned and (self._pending or self._publishing is not None):
            return False
        if isinstance(request, TriggerSavepoint):
            return True
        running = sum(not pending.is_savepoint for pending in self._pending.values())
        return running < self.settings.max_concurrent

    def _trigger(self, options: CheckpointOptions, now: int, request_id: str | None) -> None:
        if options.stop:
            for other in list(self._pending.values()):
                self._give_up(other, FailureReason.STOPPED)
        barrier = Barrier(self._next_id, self._time.wall_ms, options)
        self._next_id += 1
        record = CheckpointRecord(barrier.checkpoint_id, options, self._time.wall_ms, self.plan, len(self._subtasks))
        pending = PendingCheckpoint(barrier, set(self._subtasks), record, started_ms=now, request_id=request_id,
                                    timeout_ms=self.settings.timeout_ms, late_after_ms=self._late_after())
        pending.triggered |= self._sources | self._ended
        if not pending.is_savepoint and not options.full:
            pending.builds_on = frozenset(self.retained)
        self._pending[pending.id] = pending
        self._retry_last_at = None
        if not pending.is_savepoint:
            self._last_trigger = now
        self.statistics.started(record)
        self._actions.append(SendBarrier(tuple(sorted(pending.triggered)), barrier))

    def _late_after(self) -> int:
        """Half the timeout, or three intervals if that is less, but no hurry below ten seconds."""
        usual = max(3 * (self.settings.interval_ms or self.settings.timeout_ms), LATE_AT_LEAST_MS)
        return min(self.settings.timeout_ms // 2, usual)

    def _schedule(self, now: int) -> None:
        times = [pending.next_time() for pending in self._pending.values()]
        if self._last is not None:
            times += [self._resend_at] if self._resend_at is not None else []
        elif not self._not_ready and not self._is_stopping():
            periodic = self._retry_last_at if len(self._ended) == len(self._subtasks) else self._next_periodic()
            # What is due but has not begun waits for something in progress, whose end is looked at anyway.
            if periodic is not None and periodic > now and self._may_start(None):
                times.append(periodic)
        at = min(times, default=None)
        if at is not None and at != self._scheduled:
            self._actions.append(ScheduleTick(self._time.to_wall(max(at, now))))
        self._scheduled = at if at is not None and at > now else None


def _covers_end(pending: PendingCheckpoint) -> bool:
    """Whether everything had ended when this checkpoint was triggered, or since, so that it will be the last."""
    return len(pending.triggered) == pending.total


def _name(pending: PendingCheckpoint) -> str:
    return f"{pending.options.kind.value} {pending.id}"

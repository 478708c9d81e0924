"""Runs one job: drives the coordinator, publishes what it decides, restarts what fails, and answers requests.

One thread owns all decisions; events reach it through a queue. Storage work of publishing and discarding is done on a
second thread, so that reports and failures never wait for a slow store.
"""

from __future__ import annotations

import heapq
import logging
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from random import Random
from typing import Any

from checkpoint.dataflow.graph import NodeKind
from checkpoint.protocol.coordinator import Coordinator
from checkpoint.protocol.messages import (
    Action,
    CancelJob,
    CompleteRequest,
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
    SubtaskId,
    SubtasksFailed,
    Tick,
    TriggerCheckpoint,
    TriggerSavepoint,
)
from checkpoint.protocol.restart import Decision, GiveUp, RepeatedFailures, RestartStrategy, default_strategy
from checkpoint.protocol.settings import CheckpointSettings
from checkpoint.runtime.deployment import Builder
from checkpoint.runtime.executor import Deployment, Executor, RestoreFrom
from checkpoint.runtime.publishing import Publisher
from statebackend.errors import Conflict, CorruptData, HoldfastError, IncompatibleState, InvalidRequest, Unavailable

log = logging.getLogger("holdfast.job")

LONGEST_WAIT_MS = 1000


def _steady_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class JobState(StrEnum):
    """Flink's words."""

    INITIALIZING = "INITIALIZING"
    RUNNING = "RUNNING"
    RESTARTING = "RESTARTING"
    FINISHED = "FINISHED"
    CANCELED = "CANCELED"
    FAILED = "FAILED"

    @property
    def is_final(self) -> bool:
        return self in (JobState.FINISHED, JobState.CANCELED, JobState.FAILED)


@dataclass(frozen=True)
class Failure:
    """One failure of the job, for people."""

    timestamp: int
    message: str
    subtask: str | None
    trace: str


@dataclass(frozen=True)
class _SubtaskFailure:
    subtask: SubtaskId | None
    attempt: int
    error: BaseException


@dataclass(frozen=True)
class _Call:
    """Something to do on the supervisor's thread."""

    call: Callable[[], None]


@dataclass(order=True)
class _Timed:
    at_ms: int
    number: int
    call: Callable[[], None] = field(compare=False)


class Supervisor:
    """The life of one job. `start` once; requests may come from any thread."""

    def __init__(self, builder: Builder, settings: CheckpointSettings, restart: RestartStrategy | None = None, *,
                 restore: RestoreFrom | None = None, restored: Restored | None = None, region_restart: bool = True,
                 properties: Mapping[str, Any] | None = None, first_completed: Callable[[], None] | None = None,
                 closing: Callable[[], None] | None = None) -> None:
        self.builder, self.settings = builder, settings
        self.state = JobState.INITIALIZING
        self.outcome: Outcome | None = None
        self.error: BaseException | None = None
        self.failures: deque[Failure] = deque(maxlen=50)
        self.restarts = 0
        self.has_started = False
        self.last_restore_ms: int | None = None
        """How long the last restore took, from its beginning until every subtask had its state."""
        self._restore_began: int | None = None
        self._random = Random()
        self.last_statistics: list[dict[str, Any]] = []
        self.done = threading.Event()
        self.coordinator = Coordinator(builder.wiring.job_plan(), settings)
        self._clock = builder.clock
        self._restart, self._region_restart = restart, region_restart
        self._default_restart = default_strategy(settings.enabled)
        self._repeated = RepeatedFailures()
        self._restore, self._restored = restore, restored
        self._first_completed, self._closing = first_completed, closing
        self._publisher = Publisher(builder.plan, builder.storage, properties or {})
        self._executor: Executor
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._storage_work = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._timed: list[_Timed] = []
        self._numbers = count()
        self._tick_at: int | None = None
        self._requests: dict[str, Future[CompleteRequest]] = {}
        self._attempt = 0
        self._attempts: dict[SubtaskId, int] = {}
        self._down: set[SubtaskId] = set()
        self._unsettled = False
        self._restart_pending = False
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    # -- from any thread -------------------------------------------------------------------------------------------------

    def start(self, executor: Executor) -> None:
        self._executor = executor
        self._thread.start()

    def on_report(self, report: Report) -> None:
        self._events.put(report)

    def on_failure(self, subtask: SubtaskId | None, attempt: int, error: BaseException) -> None:
        self._events.put(_SubtaskFailure(subtask, attempt, error))

    def on_finished(self, subtask: SubtaskId, attempt: int) -> None:
        """The subtask's own report of its last phase has told the coordinator already."""

    def request(self, event: TriggerCheckpoint | TriggerSavepoint | CancelJob) -> Future[CompleteRequest]:
        """Ask the coordinator; the future has its answer, or its error."""
        future: Future[CompleteRequest] = Future()
        self._requests[event.request_id] = future  # before the look at `done`: one of the two sees the other's
        self._events.put(_Call(lambda: self._handle(event)))
        if self.done.is_set():
            self._refuse_requests()
        return future

    # -- the supervisor's thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._begin()
            while not self.state.is_final:
                self._next()
        except BaseException as error:
            self._fail(error)
        finally:
            self._finish()

    def _begin(self) -> None:
        if self._restored is not None:
            self._handle(self._restored)
        subtasks = tuple(self.coordinator.plan.subtasks())
        self._attempts = dict.fromkeys(subtasks, 0)
        self._deploy(subtasks, self._restore)
        self.state = JobState.RUNNING

    def _next(self) -> None:
        event = self._take()
        if event is None:
            self._tick()
        elif isinstance(event, _Call):
            event.call()
        elif isinstance(event, _SubtaskFailure):
            self._on_subtask_failure(event)
        else:
            self._handle(event)
        while self._timed and self._timed[0].at_ms <= _steady_ms() and not self.state.is_final:
            heapq.heappop(self._timed).call()

    def _take(self) -> Any:
        waits = [timed.at_ms - _steady_ms() for timed in self._timed[:1]]
        if self._tick_at is not None:
            # Not for longer than this, because the wall clock may be set back while we wait.
            waits.append(min(self._tick_at - self._clock.now_ms(), LONGEST_WAIT_MS))
        timeout = None if not waits else max(0.0, min(waits) / 1000)
        try:
            return self._events.get(timeout=timeout)
        except queue.Empty:
            return None

    def _tick(self) -> None:
        if self._tick_at is not None:
            if self._clock.now_ms() >= self._tick_at:
                self._tick_at = None
            self._handle(Tick())

    def _after(self, delay_ms: int, call: Callable[[], None]) -> None:
        heapq.heappush(self._timed, _Timed(_steady_ms() + delay_ms, next(self._numbers), call))

    def _handle(self, event: Event) -> None:
        actions = self.coordinator.handle(event, self._clock.now_ms())
        if self.coordinator.is_ready:
            self.has_started = True
            self._note_restored()
        for action in actions:
            self._perform(action)

    def _note_restored(self) -> None:
        if self._restore_began is not None:
            self.last_restore_ms, self._restore_began = _steady_ms() - self._restore_began, None

    # -- actions -----------------------------------------------------------------------------------------------------------

    def _perform(self, action: Action) -> None:
        match action:
            case SendBarrier(subtasks, barrier):
                self._executor.trigger(subtasks, barrier)
            case Publish():
                self._storage_work.submit(self._publish, action)
            case NotifyCompleted(checkpoint_id, subtasks, last):
                self._executor.completed(checkpoint_id, subtasks, last)
                self._note_completed()
            case NotifySavepointDone(checkpoint_id):
                self._executor.savepoint_done(checkpoint_id)
            case NotifyAborted(checkpoint_id, _):
                self._executor.aborted(checkpoint_id)
            case DiscardFiles(checkpoint_id, snapshots):
                self._storage_work.submit(self._quietly, lambda: self._publisher.discard(checkpoint_id, snapshots))
            case DiscardCompleted(checkpoint_ids):
                self._storage_work.submit(self._quietly, lambda: self._discard(checkpoint_ids))
            case RequestStatus(subtasks):
                self._executor.request_status(subtasks)
            case ScheduleTick(at_ms):
                self._tick_at = at_ms
            case Log(level, line):
                log.log(logging.getLevelNamesMapping()[level.upper()], "%s", line)
            case CompleteRequest():
                self._answer(action)
            case FailJob(_, message, restartable):
                self._on_job_failure(message, restartable)
            case EndJob(outcome):
                self._end(outcome)

    def _publish(self, publish: Publish) -> None:
        """On the storage thread."""
        try:
            path = self._publisher.publish(publish, self._clock.now_ms())
        except Conflict as error:
            fenced = self._is_fenced()
            self._events.put(PublishFailed(publish.checkpoint_id, str(error), fenced=fenced))
        except Unavailable as error:
            # Whether it was stored after all is not known: its files stay, and a restart asks the storage.
            log.warning("checkpoint %d: no answer from the storage: %s", publish.checkpoint_id, error)
            self._unsettled = True
            self._events.put(PublishFailed(publish.checkpoint_id, str(error), settled=False))
        except Exception as error:
            log.warning("checkpoint %d could not be published: %s", publish.checkpoint_id, error)
            self._events.put(PublishFailed(publish.checkpoint_id, f"{type(error).__name__}: {error}"))
        else:
            self._events.put(Published(publish.checkpoint_id, path))

    def _is_fenced(self) -> bool:
        try:
            self.builder.storage.require_newest()
        except Conflict:
            return True
        except HoldfastError:
            return False
        return False

    def _discard(self, checkpoint_ids: tuple[int, ...]) -> None:
        for checkpoint_id in checkpoint_ids:
            self.builder.storage.discard(checkpoint_id)

    def _quietly(self, work: Callable[[], None]) -> None:
        """Clean-up that fails is told, and left to the next garbage collection."""
        try:
            work()
        except Exception as error:
            log.warning("files of a dropped checkpoint could not be removed yet: %s", error)

    def _note_completed(self) -> None:
        """Nothing depends on what was restored any more: a claimed checkpoint can go."""
        if self._first_completed is not None:
            self._storage_work.submit(self._run_first_completed)

    def _run_first_completed(self) -> None:
        if self._first_completed is None:
            return
        try:
            self._first_completed()
        except Conflict:
            return  # somebody still reads it; the next completed checkpoint, or the end of the job, tries again
        except Exception as error:
            log.warning("the claimed checkpoint could not be deleted: %s", error)
        self._first_completed = None

    def _answer(self, answer: CompleteRequest) -> None:
        future = self._requests.pop(answer.request_id, None)
        if future is None:
            return
        if answer.error is not None:
            future.set_exception(answer.error)
        else:
            future.set_result(answer)

    def _end(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.state = JobState.CANCELED if outcome is Outcome.CANCELLED else JobState.FINISHED

    # -- failures

    def _on_subtask_failure(self, failure: _SubtaskFailure) -> None:
        if failure.subtask is not None and failure.attempt != self._attempts.get(failure.subtask):
            return
        self._note_failure(failure.error, failure.subtask)
        if isinstance(failure.error, (IncompatibleState, CorruptData, InvalidRequest)) or \
                not isinstance(failure.error, Exception):
            # Trying again can't help: the job, its state or its input has to change.
            self._fail(failure.error)
            return
        region = self._region_of(failure.subtask)
        self._executor.cancel(region)
        self._restart_after(region, failure.error)

    def _on_job_failure(self, message: str, restartable: bool) -> None:
        error = Conflict(message) if not restartable else HoldfastError(message)
        self._note_failure(error, None)
        if not restartable:
            self._fail(error)
            return
        everything = frozenset(self._attempts)
        self._executor.cancel(everything)
        self._restart_after(everything, error)

    def _region_of(self, subtask: SubtaskId | None) -> frozenset[SubtaskId]:
        """All subtasks that exchange records with the failed one, directly or not."""
        if subtask is None or not self._region_restart:
            return frozenset(self._attempts)
        region = next(region for region in self.builder.plan.regions() if subtask.task in region)
        return frozenset(other for other in self._attempts if other.task in region)

    def _restart_after(self, subtasks: frozenset[SubtaskId], error: BaseException) -> None:
        decision = self._decide(error)
        if isinstance(decision, GiveUp):
            log.error("giving up: %s", decision.reason)
            self._fail(error)
            return
        delay = decision.delay_ms
        self.state = JobState.RESTARTING
        self._attempt += 1
        self._attempts.update(dict.fromkeys(subtasks, self._attempt))
        self._down |= subtasks
        self._handle(SubtasksFailed(subtasks, self._attempt, str(error)))
        log.warning("restarting %d subtasks in %d ms after: %s", len(subtasks), delay, error)
        if not self._restart_pending and not self.state.is_final:
            self._restart_pending = True
            self._after(delay, self._restart_now)

    def _decide(self, error: BaseException) -> Decision:
        """As the strategy says; the default one also gives up on a failure that comes back without any progress."""
        if self._restart is not None:
            return self._restart.on_failure(self._clock.now_ms(), self._random)
        latest = self.coordinator.latest
        given_up = self._repeated.on_failure(error, latest.checkpoint_id if latest is not None else 0)
        return given_up or self._default_restart.on_failure(self._clock.now_ms(), self._random)

    def _restart_now(self) -> None:
        if self.coordinator.publishing is not None:
            self._after(10, self._restart_now)
            return
        self._restart_pending = False
        self.restarts += 1
        subtasks, self._down = tuple(sorted(self._down)), set()
        try:
            self._adopt_unsettled()
            self._deploy(subtasks, self._latest())
        except (IncompatibleState, CorruptData, InvalidRequest) as error:
            self._note_failure(error, None)
            self._fail(error)
        except Exception as error:
            self._note_failure(error, None)
            self._restart_after(frozenset(subtasks), error)
        else:
            self.state = JobState.RUNNING

    def _adopt_unsettled(self) -> None:
        """A publication whose outcome was unknown may have happened: then it is what the restart starts from."""
        if not self._unsettled:
            return
        stored = [info for info in self.builder.storage.list_checkpoints() if info.error is None]
        latest = self.coordinator.latest
        if stored and (latest is None or stored[-1].checkpoint_id > latest.checkpoint_id):
            self._handle(Restored(stored[-1].checkpoint_id, stored[-1].path,
                                  retained=tuple(info.checkpoint_id for info in stored)))
        self._unsettled = False

    def _latest(self) -> RestoreFrom | None:
        latest = self.coordinator.latest
        if latest is None or (self._restored is not None and latest.checkpoint_id == self._restored.checkpoint_id):
            return self._restore
        path: str | int = latest.path if latest.options.location is not None else latest.checkpoint_id
        return RestoreFrom(path, foreign=latest.options.location is not None, same_run=True)

    def _deploy(self, subtasks: tuple[SubtaskId, ...], restore: RestoreFrom | None) -> None:
        self._restore_began = None if restore is None else _steady_ms()
        tasks = {subtask.task for subtask in subtasks}
        uids = {uid for vertex in self.builder.plan.vertices if vertex.id in tasks for uid in vertex.uids}
        enumerations = {node.uid: node.body.enumerate() for node in self.builder.flow.nodes
                        if node.kind is NodeKind.SOURCE and node.uid in uids}
        self._executor.deploy(Deployment(subtasks, self._attempt, restore, enumerations))

    def _note_failure(self, error: BaseException, subtask: SubtaskId | None) -> None:
        self.failures.append(Failure(self._clock.now_ms(), f"{type(error).__name__}: {error}",
                                     str(subtask) if subtask is not None else None,
                                     "".join(traceback.format_exception(error))))

    def _fail(self, error: BaseException) -> None:
        self.error = error
        self.state = JobState.FAILED

    def _finish(self) -> None:
        """Stop everything, whatever happened, and tell whoever waits."""
        try:
            self.last_statistics = self._executor.statistics()
            self._executor.cancel(read_mail=self.state is not JobState.FAILED)
            self.last_statistics = self._executor.statistics() or self.last_statistics
            self._executor.close()
        except Exception as error:
            log.warning("the runtime did not close cleanly: %s", error)
        self._storage_work.shutdown(wait=True)
        if self.outcome is not None and self.state is not JobState.FAILED:
            self._settle_storage()
            if self.coordinator.statistics.counts["completed"]:
                self._run_first_completed()
        self._quietly(self.builder.storage.close)
        self.builder.close()
        if self._closing is not None:
            self._quietly(self._closing)
        self.done.set()
        self._refuse_requests()

    def _refuse_requests(self) -> None:
        """Nobody will answer any more. From any thread: whoever takes a future out of the table answers it."""
        for request_id in list(self._requests):
            future = self._requests.pop(request_id, None)
            if future is not None:
                future.set_exception(self.error if isinstance(self.error, HoldfastError) else
                                     Conflict("the job has ended"))

    def _settle_storage(self) -> None:
        """Events of the storage thread that came after the end: a publication that a cancellation overtook."""
        while True:
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                return
            if isinstance(event, (Published, PublishFailed)):
                for action in self.coordinator.handle(event, self._clock.now_ms()):
                    if isinstance(action, DiscardCompleted):
                        self._quietly(lambda ids=action.checkpoint_ids: self._discard(ids))  # type: ignore[misc]

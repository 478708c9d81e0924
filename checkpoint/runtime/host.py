"""Runs subtasks on threads of this process, one thread each, and moves elements between them.

A thread sleeps on a condition until it has mail or its next timer is due; nobody polls. Elements between two subtasks of
the same host are handed over by reference; for others the host asks its `Remote`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from checkpoint.dataflow.chain import FlowChain
from checkpoint.protocol.messages import Report, SubtaskId
from checkpoint.runtime.contracts import Barrier, Element, SubtaskRestore
from checkpoint.runtime.snapshots import SnapshotTask
from checkpoint.runtime.subtask import Blocked, Subtask, Transport
from checkpoint.runtime.wiring import Endpoint
from statebackend.clock import Clock
from statebackend.errors import Unavailable

log = logging.getLogger("holdfast.runtime")

SNAPSHOT_THREADS = 4
LONGEST_WAIT_SECONDS = 5.0


class HostListener(Protocol):
    """Whom a host tells what happens. Calls come from subtask threads and must return at once."""

    def on_report(self, report: Report) -> None: ...
    def on_failure(self, subtask: SubtaskId, attempt: int, error: BaseException) -> None: ...
    def on_finished(self, subtask: SubtaskId, attempt: int) -> None: ...


class Remote(Protocol):
    """Reaches subtasks of other hosts. Calls come from subtask threads."""

    def send(self, to: Endpoint, attempt: int, element: Element) -> None: ...
    def grant(self, to: Endpoint, attempt: int, credit: int) -> None: ...


@dataclass(frozen=True)
class Assignment:
    """A subtask to run: how to build its core, what it starts from, and where its channels lead."""

    subtask: SubtaskId
    attempt: int
    build: Callable[[Transport], Subtask]
    restore: SubtaskRestore | None
    receivers: list[Endpoint]
    senders: list[Endpoint]


class TaskHost:
    """The subtasks of one process."""

    def __init__(self, listener: HostListener, clock: Clock, remote: Remote | None = None) -> None:
        self._listener, self._clock, self._remote = listener, clock, remote
        self._runners: dict[SubtaskId, Runner] = {}
        self._prepared: list[Runner] = []
        self._pool = ThreadPoolExecutor(SNAPSHOT_THREADS, thread_name_prefix="snapshot")

    def deploy(self, assignments: Iterable[Assignment]) -> None:
        """Wire the subtasks to each other and to those that run already, then start them."""
        self.prepare(assignments)
        self.start_prepared()

    def prepare(self, assignments: Iterable[Assignment]) -> None:
        """Everything but the start: from now on elements for these subtasks find their mailbox."""
        new = [Runner(assignment, self._listener, self._clock, self._pool) for assignment in assignments]
        self._runners.update({runner.id: runner for runner in new})
        for runner in new:
            attempt = runner.assignment.attempt
            runner.connect([self._sender(endpoint, attempt) for endpoint in runner.assignment.receivers],
                           [self._granter(endpoint, attempt) for endpoint in runner.assignment.senders])
        self._prepared = new

    def start_prepared(self) -> None:
        prepared, self._prepared = self._prepared, []
        for runner in prepared:
            runner.start()

    def trigger(self, subtasks: Iterable[SubtaskId], barrier: Barrier) -> None:
        self._each(subtasks, lambda runner: runner.post(runner.core_call("on_trigger"), barrier))

    def completed(self, checkpoint_id: int, subtasks: Iterable[SubtaskId] | None, last: bool) -> None:
        self._each(subtasks, lambda runner: runner.post(runner.core_call("on_completed"), checkpoint_id, last))

    def savepoint_done(self, checkpoint_id: int, subtasks: Iterable[SubtaskId] | None) -> None:
        self._each(subtasks, lambda runner: runner.post(runner.core_call("on_savepoint_done"), checkpoint_id))

    def aborted(self, checkpoint_id: int) -> None:
        self._each(None, lambda runner: runner.post(runner.core_call("on_aborted"), checkpoint_id))

    def request_status(self, subtasks: Iterable[SubtaskId]) -> None:
        self._each(subtasks, lambda runner: runner.post(runner.core_call("on_status_request")))

    def element(self, to: Endpoint, attempt: int, element: Element) -> None:
        """An element from another host; those of an earlier attempt are dropped."""
        runner = self._runners.get(to.subtask)
        if runner is not None and runner.assignment.attempt == attempt:
            runner.post_element(to.channel, element)

    def credit(self, to: Endpoint, attempt: int, credit: int) -> None:
        runner = self._runners.get(to.subtask)
        if runner is not None and runner.assignment.attempt == attempt:
            runner.post_credit(to.channel, credit)

    def cancel(self, subtasks: Iterable[SubtaskId] | None = None, timeout: float = 10.0, *,
               read_mail: bool = False) -> None:
        """Stop these subtasks (None: all) where they stand, and wait until they have closed."""
        wanted = None if subtasks is None else set(subtasks)
        chosen = [runner for runner in self._runners.values() if wanted is None or runner.id in wanted]
        for runner in chosen:
            runner.stop(read_mail)
        deadline = time.monotonic() + timeout
        for runner in chosen:
            runner.join(max(0.0, deadline - time.monotonic()))
            self._runners.pop(runner.id, None)

    def is_running(self) -> bool:
        return any(runner.is_alive() for runner in self._runners.values())

    def statistics(self) -> list[dict[str, Any]]:
        return [runner.statistics() for runner in list(self._runners.values())]

    def close(self) -> None:
        self.cancel()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _each(self, subtasks: Iterable[SubtaskId] | None, call: Callable[[Runner], None]) -> None:
        chosen = list(self._runners.values()) if subtasks is None else \
            [self._runners[subtask] for subtask in subtasks if subtask in self._runners]
        for runner in chosen:
            call(runner)

    def _sender(self, to: Endpoint, attempt: int) -> Callable[[Element], None]:
        runner = self._runners.get(to.subtask)
        if runner is not None:
            channel, post = to.channel, runner.post_element
            return lambda element: post(channel, element)
        remote = self._require_remote(to)
        return lambda element: remote.send(to, attempt, element)

    def _granter(self, to: Endpoint, attempt: int) -> Callable[[int], None]:
        runner = self._runners.get(to.subtask)
        if runner is not None:
            channel, post = to.channel, runner.post_credit
            return lambda credit: post(channel, credit)
        remote = self._require_remote(to)
        return lambda credit: remote.grant(to, attempt, credit)

    def _require_remote(self, to: Endpoint) -> Remote:
        if self._remote is None:
            raise Unavailable("a subtask is not deployed here", subtask=str(to.subtask))
        return self._remote


class Runner:
    """The thread of one subtask. Everything that comes from outside goes through its mailbox."""

    def __init__(self, assignment: Assignment, listener: HostListener, clock: Clock, pool: ThreadPoolExecutor) -> None:
        self.id, self.assignment = assignment.subtask, assignment
        self._listener, self._clock, self._pool = listener, clock, pool
        self._mail: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._wake = threading.Condition()
        self._sleeping = False
        self._stopped = self._reads_mail = False
        self._core: Subtask | None = None
        self._senders: list[Callable[[Element], None]] = []
        self._granters: list[Callable[[int], None]] = []
        self._thread = threading.Thread(target=self._run, name=str(self.id), daemon=True)

    def connect(self, senders: list[Callable[[Element], None]], granters: list[Callable[[int], None]]) -> None:
        self._senders, self._granters = senders, granters

    def start(self) -> None:
        self._thread.start()

    def stop(self, read_mail: bool = False) -> None:
        self._reads_mail = read_mail
        self._stopped = True
        with self._wake:
            self._wake.notify()

    def join(self, timeout: float) -> None:
        if self._thread.ident is not None:
            self._thread.join(timeout)
        if self._thread.is_alive():
            log.warning("%s does not stop: a function is still busy; its thread is left behind", self.id)

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    # -- mail, from any thread -----------------------------------------------------------------------------------------

    def post(self, call: Callable[..., None], *arguments: Any) -> None:
        self._mail.append((call, arguments))
        if self._sleeping:
            with self._wake:
                self._wake.notify()

    def core_call(self, method: str) -> Callable[..., None]:
        """A call to the core that is looked up when the mail is read: the core may not have been built yet."""
        return lambda *arguments: getattr(self._core, method)(*arguments)

    def post_element(self, channel: int, element: Element) -> None:
        self.post(self._on_element, channel, element)

    def post_credit(self, channel: int, credit: int) -> None:
        self.post(self._on_credit, channel, credit)

    def _on_element(self, channel: int, element: Element) -> None:
        assert self._core is not None
        self._core.on_element(channel, element)

    def _on_credit(self, channel: int, credit: int) -> None:
        assert self._core is not None
        self._core.on_credit(channel, credit)

    # -- Transport, from the subtask's thread ----------------------------------------------------------------------------

    def send(self, channel: int, element: Element) -> None:
        self._senders[channel](element)

    def grant(self, channel: int, credit: int) -> None:
        self._granters[channel](credit)

    def report(self, report: Report) -> None:
        self._listener.on_report(report)

    def start_task(self, task: SnapshotTask) -> None:
        def run() -> None:
            task.run()
            self.post(self.core_call("on_task_done"), task)

        with contextlib.suppress(RuntimeError):  # the pool is closed: the subtask is being stopped
            self._pool.submit(run)

    # -- the thread ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            core = self._core = self.assignment.build(_RunnerTransport(self))
            core.open(self.assignment.restore)
            self._loop(core)
        except BaseException as error:
            failure = error
        finally:
            failure = self._close() or failure
        if failure is not None and not self._stopped:
            self._listener.on_failure(self.id, self.assignment.attempt, failure)
        elif failure is None and not self._stopped:
            self._listener.on_finished(self.id, self.assignment.attempt)

    def _loop(self, core: Subtask) -> None:
        mail = self._mail
        while not self._stopped:
            while mail:
                call, arguments = mail.popleft()
                call(*arguments)
            # One batch at a time: a barrier that may overtake must not wait behind a row of slow batches.
            result = core.step(1)
            if result.blocked is Blocked.FINISHED:
                return
            if result.blocked is not Blocked.NOTHING and not mail:
                self._sleep(result.wake_at)
        while self._reads_mail and mail:
            call, arguments = mail.popleft()
            call(*arguments)

    def _sleep(self, wake_at: int | None) -> None:
        seconds = LONGEST_WAIT_SECONDS
        if wake_at is not None:
            seconds = min(seconds, (wake_at - self._clock.now_ms()) / 1000)
            if seconds <= 0:
                return
        with self._wake:
            self._sleeping = True
            if not self._mail and not self._stopped:
                self._wake.wait(seconds)
            self._sleeping = False

    def _close(self) -> BaseException | None:
        if self._core is None:
            return None
        try:
            self._core.close()
        except Exception as error:
            log.warning("%s failed to close: %s", self.id, error)
            return error if not self._stopped else None
        return None

    def statistics(self) -> dict[str, Any]:
        """Numbers for people; read from other threads, so a batch or two behind."""
        core = self._core
        if core is None:
            return {"task": self.id.task, "subtask": self.id.index, "phase": "RESTORING", "operators": {}}
        ratios = {activity.value: round(share, 3) for activity, share in core.load.ratios(self._clock.now_ms()).items()}
        flow = core.chain if isinstance(core.chain, FlowChain) else None
        return {"task": self.id.task, "subtask": self.id.index, "phase": core.phase.name, "attempt": core.attempt,
                "records_in": core.records_in, "records_out": core.records_out, "load": ratios,
                "operators": flow.counters() if flow is not None else {},
                "key_groups": flow.key_groups() if flow is not None else {}}


class _RunnerTransport:
    """The Transport face of a runner."""

    def __init__(self, runner: Runner) -> None:
        self.send, self.grant, self.report, self.start = runner.send, runner.grant, runner.report, runner.start_task

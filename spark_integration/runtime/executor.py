"""The driver's side: submits the barrier stage, keeps the coordinator's connections, submits again after a failure.

Spark never retries a barrier result stage, and its attempt number would not tell one try from the next. So each try is a
submission of our own with its own token: a task of an earlier one can connect to nothing any more.
"""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

from checkpoint.runtime import wire
from checkpoint.runtime.deployment import Builder
from checkpoint.runtime.executor import ExecutorListener
from checkpoint.runtime.network import TcpNetwork, new_token
from checkpoint.runtime.wire import Kind
from checkpoint.runtime.workers import CANCEL_SECONDS, WorkerLink, WorkersExecutor
from spark_integration.runtime.shipping import folder_of, pack_flow
from spark_integration.runtime.slots import is_local, require_slots
from spark_integration.runtime.task import BarrierTask
from statebackend.errors import HoldfastError, InvalidRequest, Unavailable

log = logging.getLogger("holdfast.runtime")

START_SECONDS = 180.0
LEAVE_SECONDS = 60.0
_PYTHON_ERROR = re.compile(r"(?!org\.|java\.)[\w.]*(Error|Exception|Interrupt|Exit)\b")


class SparkExecutor(WorkersExecutor):
    """One barrier task for each worker."""

    def __init__(self, builder: Builder, listener: ExecutorListener, context: Any, *, workers: int | None = None,
                 closing: Callable[[], None] | None = None) -> None:
        super().__init__(builder, listener, workers)
        self._context, self._closing = context, closing
        self._flow = pack_flow(builder.flow)
        self._numbers = count(1)
        self._submission: Submission | None = None
        require_slots(context, self._count)

    def close(self) -> None:
        self._closed = True
        if self._submission is not None:
            self._submission.close()
        if self._closing is not None:
            self._closing()

    def lost(self, worker: WorkerLink, how: str) -> None:
        """Spark ends the whole stage with one of its tasks: it is told once."""
        assert isinstance(worker, TaskLink)
        if worker.submission is self._submission and worker.submission.lose():
            super().lost(worker, how)

    def ended(self, submission: Submission, reason: str) -> None:
        """The Spark job is over. From the submission's thread."""
        if self._closed or submission is not self._submission or not submission.lose():
            return
        first = self._all_subtasks()[0]
        self._listener.on_failure(first, self._attempts.get(first, 0), Unavailable(f"Spark ended the tasks: {reason}"))

    def _ensure_workers(self) -> None:
        """All tasks, or all again."""
        if self._submission is not None:
            if self._submission.is_whole:
                return
            self._submission.abandon()
        if self._context._jsc is None:
            raise InvalidRequest("the Spark session was stopped while the job was running")
        require_slots(self._context, self._count)
        task = BarrierTask("", b"", self._flow, self._builder.spec, folder_of(self._builder.flow))
        submission = Submission(self, self._context, next(self._numbers), self._count)
        submission.start(task, f"holdfast: {self._builder.flow.name}")
        try:
            self._workers = submission.links()
        except BaseException:
            submission.abandon()
            raise
        self._submission = submission


class Submission:
    """One run of the barrier stage: its token, its listening socket, its tasks, and the Spark job that they belong to."""

    def __init__(self, owner: SparkExecutor, context: Any, number: int, tasks: int) -> None:
        self._owner, self._context, self._tasks = owner, context, tasks
        self._group = f"holdfast-{owner._builder.spec.run_id}-{number}"
        self._token = new_token()
        self._network = TcpNetwork(self._token, *_driver_address(context))
        self._server, self._address = self._network.listen("control")
        self._links: dict[int, WorkerLink] = {}
        self._changed = threading.Condition()
        self._failure: HoldfastError | None = None
        self._reason: str | None = None
        self._lost = self._over = False
        self._thread: threading.Thread | None = None

    def start(self, task: BarrierTask, description: str) -> None:
        from pyspark import InheritableThread

        sent = replace(task, driver=self._address, token=self._token)
        threading.Thread(target=self._accept, name="accept", daemon=True).start()
        self._thread = InheritableThread(target=self._run, args=(sent, description), daemon=True)
        self._thread.start()

    @property
    def is_whole(self) -> bool:
        return not self._over and not self._lost and all(link.alive for link in self._links.values())

    def lose(self) -> bool:
        """Whether this is the first time that a part of it is found to be gone."""
        with self._changed:
            first, self._lost = not self._lost, True
            return first

    def links(self) -> dict[int, WorkerLink]:
        """All tasks, once each has connected."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._links) == self._tasks or self._over or self._failure is not None,
                                   START_SECONDS)
            if self._failure is None and len(self._links) == self._tasks and not self._over:
                return dict(self._links)
            failure = self._failure
        if failure is not None:
            raise failure
        raise Unavailable("the tasks did not start", connected=len(self._links), needed=self._tasks,
                          reason=self._reason or f"no word from Spark for {START_SECONDS:.0f} s",
                          hint="executors need the same Python with holdfast in it (see holdfast spark pack), and must "
                               "reach the driver")

    def close(self) -> None:
        """Tell the tasks that it is over and wait until they have left."""
        self._lost = True
        for link in self._links.values():
            link.try_ask(Kind.CLOSE, None)
        self._leave(CANCEL_SECONDS)
        self.abandon()

    def abandon(self) -> None:
        """End it, whatever state it is in. What is left of it is fenced off in any case."""
        self._lost = True
        _stop(self._server)
        if not self._over:
            with contextlib.suppress(Exception):  # a session that was stopped has ended its jobs already
                self._context.cancelJobGroup(self._group)
        for link in list(self._links.values()):
            link.disconnect()
        if not self._leave(LEAVE_SECONDS):
            log.warning("Spark still runs tasks of an abandoned submission; they can no longer connect to anything")

    def _leave(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._over, seconds)

    # -- threads

    def _run(self, task: BarrierTask, description: str) -> None:
        reason = "all tasks have ended"
        try:
            self._context.setJobGroup(self._group, description, interruptOnCancel=True)
            self._context.parallelize(range(self._tasks), self._tasks).barrier().mapPartitions(task).collect()
        except Exception as error:
            reason = brief(error)
            if not self._lost:
                log.warning("Spark ended the tasks of the job: %s", reason)
        finally:
            with self._changed:
                self._over, self._reason = True, reason
                self._changed.notify_all()
            self._owner.ended(self, reason)

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._admit, args=(connected,), name="admit", daemon=True).start()

    def _admit(self, connected: socket.socket) -> None:
        connection = self._network.admit(connected)
        frame = connection.receive() if connection is not None else None
        if connection is None or frame is None:
            return
        kind, body = frame
        with self._changed:
            if kind is Kind.FAILURE:
                self._failure = wire.error_from_json(wire.decode(body)[2])
                self._failure.add_note(wire.decode(body)[3])
                connection.close()
            elif kind is Kind.HELLO:
                number, address, pid = wire.decode(body)
                if number in self._links or not 0 <= number < self._tasks:
                    connection.close()
                    return
                link = self._links[number] = TaskLink(number, self._owner, self, pid)
                link.connected(connection, address)
            self._changed.notify_all()


class TaskLink(WorkerLink):
    """The coordinator's side of one barrier task."""

    kind_name = "barrier task"

    def __init__(self, number: int, owner: SparkExecutor, submission: Submission, pid: int) -> None:
        super().__init__(number, owner)
        self.submission, self.pid = submission, pid

    @property
    def name(self) -> str:
        return f"{super().name} on {self.data_address.rpartition(':')[0]}, process {self.pid},"

    def kill(self) -> None:
        """One task can't be ended alone: the submission is, and the next deployment makes a new one."""
        self.submission.abandon()

    def how_it_ended(self) -> str:
        """Spark's own word comes later, and goes to its log."""
        return "its connection broke"


def _driver_address(context: Any) -> tuple[str, str | None]:
    """Where the coordinator listens, and the name that executors know it by: as Spark's own driver."""
    if is_local(context):
        return "127.0.0.1", None
    conf = context.getConf()
    host = conf.get("spark.driver.host")
    return conf.get("spark.driver.bindAddress", host), host


def _stop(server: socket.socket) -> None:
    with contextlib.suppress(OSError):
        server.shutdown(socket.SHUT_RDWR)
    server.close()


def brief(error: Exception) -> str:
    """What Spark says, in a line: its own words first, then the Python error at the bottom of it, if there is one."""
    told = getattr(error, "java_exception", None)
    text = str(told.getMessage()) if told is not None else f"{type(error).__name__}: {error}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    causes = [line for line in lines if _PYTHON_ERROR.match(line)]
    return "; ".join(dict.fromkeys([*lines[:1], *causes[-1:]]))[:1000]

"""Subtasks in workers that are reached by connections: what runtimes with worker processes, wherever these run, share.

Subtask i of every task runs in worker i mod the number of workers.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from checkpoint.protocol.messages import SubtaskId
from checkpoint.runtime import wire
from checkpoint.runtime.contracts import Barrier
from checkpoint.runtime.deployment import Builder
from checkpoint.runtime.executor import Deployment, ExecutorListener
from checkpoint.runtime.wire import Connection, Kind
from statebackend.errors import HoldfastError, InvalidRequest, Unavailable

log = logging.getLogger("holdfast.runtime")

ANSWER_SECONDS = 120.0
CANCEL_SECONDS = 15.0


class WorkersExecutor(ABC):
    """Feeds and watches the workers; how they come to be is left open."""

    def __init__(self, builder: Builder, listener: ExecutorListener, workers: int | None) -> None:
        self._builder, self._listener = builder, listener
        refuse_local_only(builder)
        widest = max(vertex.parallelism for vertex in builder.plan.vertices)
        if workers is not None and workers < 1:
            raise InvalidRequest("there must be at least one worker", found=workers)
        self._count = min(workers, widest) if workers is not None else widest
        self._workers: dict[int, WorkerLink] = {}
        self._attempts: dict[SubtaskId, int] = {}
        self._closed = False

    @abstractmethod
    def _ensure_workers(self) -> None:
        """All workers are connected and ready when this returns; `Unavailable` if they can't be."""

    @abstractmethod
    def close(self) -> None: ...

    def deploy(self, deployment: Deployment) -> None:
        """Two steps: all workers make mailboxes for their subtasks before any subtask starts to send."""
        self._attempts.update(dict.fromkeys(deployment.subtasks, deployment.attempt))
        self._ensure_workers()
        placement = [(subtask, self._workers[self._worker_of(subtask)].data_address) for subtask in self._all_subtasks()]
        parts = {number: replace(deployment, subtasks=tuple(
            subtask for subtask in deployment.subtasks if self._worker_of(subtask) == number))
            for number in self._workers}
        for number, part in parts.items():
            self._workers[number].ask(Kind.DEPLOY, {"deployment": wire.deployment_json(part), "placement": placement})
        for number in parts:
            error = self._workers[number].answer(Kind.DEPLOYED, ANSWER_SECONDS)
            if error is not None:
                raise wire.error_from_json(error)
        self._each(Kind.START, None)

    def trigger(self, subtasks: Iterable[SubtaskId], barrier: Barrier) -> None:
        for number, part in self._by_worker(subtasks).items():
            self._tell(number, Kind.TRIGGER, [part, barrier])

    def completed(self, checkpoint_id: int, subtasks: Iterable[SubtaskId] | None, last: bool) -> None:
        self._each(Kind.COMPLETED, [checkpoint_id, list(subtasks) if subtasks is not None else None, last])

    def savepoint_done(self, checkpoint_id: int) -> None:
        self._each(Kind.SAVEPOINT_DONE, checkpoint_id)

    def aborted(self, checkpoint_id: int) -> None:
        self._each(Kind.ABORTED, checkpoint_id)

    def request_status(self, subtasks: Iterable[SubtaskId]) -> None:
        for number, part in self._by_worker(subtasks).items():
            self._tell(number, Kind.STATUS, part)

    def cancel(self, subtasks: Iterable[SubtaskId] | None = None, *, read_mail: bool = False) -> None:
        wanted = list(subtasks) if subtasks is not None else None
        asked = [worker for worker in self._workers.values() if worker.alive and worker.try_ask(
            Kind.CANCEL, [worker.number, wanted, read_mail])]
        for worker in asked:
            try:
                worker.answer(Kind.CANCELLED, CANCEL_SECONDS)
            except HoldfastError:
                if worker.alive:
                    log.warning("worker %d does not stop its subtasks: it is killed", worker.number)
                    worker.kill()

    def statistics(self) -> list[dict[str, Any]]:
        return [subtask for worker in self._workers.values() for subtask in worker.statistics]

    # -- from a worker's reader thread -------------------------------------------------------------------------------------

    def lost(self, worker: WorkerLink, how: str) -> None:
        """A worker is gone: all its subtasks have failed."""
        if self._closed or self._workers.get(worker.number, worker) is not worker:
            return
        error = Unavailable(f"{worker.name} is gone ({how})")
        mine = [subtask for subtask in self._all_subtasks() if self._worker_of(subtask) == worker.number]
        self._listener.on_failure(mine[0] if mine else None, self._attempts.get(mine[0], 0) if mine else 0, error)

    def heard(self, kind: Kind, body: bytes) -> None:
        """A message that is no answer."""
        if kind is Kind.REPORT:
            self._listener.on_report(wire.unpack_report(body))
        elif kind is Kind.FAILURE:
            subtask, attempt, error, trace = wire.decode(body)
            failure = wire.error_from_json(error)
            failure.add_note(trace)
            self._listener.on_failure(SubtaskId(*subtask) if subtask is not None else None, attempt, failure)
        elif kind is Kind.FINISHED:
            subtask, attempt = wire.decode(body)
            self._listener.on_finished(SubtaskId(*subtask), attempt)

    def _all_subtasks(self) -> list[SubtaskId]:
        return [SubtaskId(task, index) for task, index in self._builder.plan.subtasks]

    def _worker_of(self, subtask: SubtaskId) -> int:
        return subtask.index % self._count

    def _by_worker(self, subtasks: Iterable[SubtaskId]) -> dict[int, list[SubtaskId]]:
        parts: dict[int, list[SubtaskId]] = {}
        for subtask in subtasks:
            parts.setdefault(self._worker_of(subtask), []).append(subtask)
        return parts

    def _each(self, kind: Kind, value: Any) -> None:
        for number in self._workers:
            self._tell(number, kind, value)

    def _tell(self, number: int, kind: Kind, value: Any) -> None:
        worker = self._workers.get(number)
        if worker is not None and worker.alive:
            worker.try_ask(kind, value)


class WorkerLink(ABC):
    """The supervisor's side of one worker."""

    kind_name = "worker"

    def __init__(self, number: int, owner: WorkersExecutor) -> None:
        self.number = number
        self.data_address = ""
        self.statistics: list[dict[str, Any]] = []
        self._owner = owner
        self._connection: Connection | None = None
        self._reader: threading.Thread | None = None
        self._answers: dict[Kind, Any] = {}
        self._changed = threading.Condition()
        self._gone = False

    @property
    def name(self) -> str:
        return f"{self.kind_name} {self.number}"

    @property
    def alive(self) -> bool:
        return not self._gone

    @abstractmethod
    def kill(self) -> None: ...

    @abstractmethod
    def how_it_ended(self) -> str:
        """Why the connection broke, in words; waits a moment to find out."""

    def connected(self, connection: Connection, data_address: str) -> None:
        self._connection, self.data_address = connection, data_address
        self._reader = threading.Thread(target=self._read, args=(connection,), name=f"worker-{self.number}", daemon=True)
        self._reader.start()

    def ask(self, kind: Kind, value: Any) -> None:
        if not self.try_ask(kind, value):
            raise Unavailable(f"{self.name} is gone")

    def try_ask(self, kind: Kind, value: Any) -> bool:
        if self._connection is None:
            return False
        try:
            self._connection.send_value(kind, value)
        except OSError:
            return False
        return True

    def answer(self, kind: Kind, seconds: float) -> Any:
        """Wait for the answer of this kind; `Unavailable` if the worker goes or takes too long."""
        with self._changed:
            if not self._changed.wait_for(lambda: kind in self._answers or self._gone, seconds):
                raise Unavailable(f"{self.name} does not answer", expected=kind.name)
            if kind in self._answers:
                return self._answers.pop(kind)
            failure = self._answers.pop(Kind.FAILURE, None)
        if failure is not None:
            raise wire.error_from_json(failure)
        raise Unavailable(f"{self.name} ended while it was asked to", expected=kind.name)

    def disconnect(self) -> None:
        """Close the connection and wait for its reader."""
        if self._connection is not None:
            self._connection.close()
        if self._reader is not None:
            self._reader.join(CANCEL_SECONDS)

    def _read(self, connection: Connection) -> None:
        while (frame := connection.receive()) is not None:
            kind, body = frame
            if kind is Kind.STATISTICS:
                self.statistics = wire.decode(body)
            elif kind in (Kind.READY, Kind.DEPLOYED, Kind.CANCELLED):
                self._put(kind, wire.decode(body))
            elif kind is Kind.FAILURE and wire.decode(body)[0] is None:
                self._put(kind, wire.decode(body)[2])
            else:
                self._owner.heard(kind, body)
        connection.close()
        how = self.how_it_ended()
        with self._changed:
            self._gone = True
            self._changed.notify_all()
        self._owner.lost(self, how)

    def _put(self, kind: Kind, value: Any) -> None:
        with self._changed:
            self._answers[kind] = value
            self._changed.notify_all()


def refuse_local_only(builder: Builder) -> None:
    for node in builder.flow.nodes:
        if getattr(node.body, "local_only", False):
            raise InvalidRequest("this connector keeps its records in one process and can't run in workers",
                                 operator=node.uid, found=type(node.body).__name__,
                                 hint="use the thread runtime, or a FileSink")

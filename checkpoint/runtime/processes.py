"""The process runtime: subtasks in worker processes of this machine, for functions that need more than one core.

Every worker loads the flow from its job file, so the flow must be reachable as `file.py:attribute`: a global of its
module, or a function without arguments that builds it. Subtask i of every task runs in worker i mod the number of
workers; records between workers go over Unix sockets, in batches, with credit.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from checkpoint.protocol.messages import SubtaskId
from checkpoint.runtime import wire
from checkpoint.runtime.contracts import Barrier
from checkpoint.runtime.deployment import Builder
from checkpoint.runtime.executor import Deployment, ExecutorListener
from checkpoint.runtime.loading import reference_of, split_reference
from checkpoint.runtime.wire import Connection, Kind
from statebackend.errors import HoldfastError, InvalidRequest, Unavailable

log = logging.getLogger("holdfast.runtime")

START_SECONDS = 60.0
ANSWER_SECONDS = 120.0
CANCEL_SECONDS = 15.0


class ProcessExecutor:
    """Starts, feeds and watches the workers."""

    def __init__(self, builder: Builder, listener: ExecutorListener, *, job: str | None = None,
                 workers: int | None = None) -> None:
        self._builder, self._listener = builder, listener
        self._job = _reference(builder, job)
        _refuse_local_only(builder)
        widest = max(vertex.parallelism for vertex in builder.plan.vertices)
        if workers is not None and workers < 1:
            raise InvalidRequest("there must be at least one worker", found=workers)
        self._count = min(workers, widest) if workers is not None else widest
        self._folder = Path(tempfile.mkdtemp(prefix="holdfast-"))
        os.chmod(self._folder, 0o700)
        self._server = wire.listen(str(self._folder / "control"))
        self._server.settimeout(START_SECONDS)
        self._workers: dict[int, WorkerProcess] = {}
        self._attempts: dict[SubtaskId, int] = {}
        self._incarnation = count(1)
        self._closed = False

    def deploy(self, deployment: Deployment) -> None:
        """Two steps: all workers make mailboxes for their subtasks before any subtask starts to send."""
        self._attempts.update(dict.fromkeys(deployment.subtasks, deployment.attempt))
        self._ensure_workers()
        placement = [(subtask, self._workers[self._worker_of(subtask)].data_path) for subtask in self._all_subtasks()]
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
                log.warning("worker %d does not stop its subtasks: it is killed", worker.number)
                worker.kill()

    def statistics(self) -> list[dict[str, Any]]:
        return [subtask for worker in self._workers.values() for subtask in worker.statistics]

    def close(self) -> None:
        self._closed = True
        for worker in self._workers.values():
            worker.close()
        self._server.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- workers -----------------------------------------------------------------------------------------------------------

    def _ensure_workers(self) -> None:
        """Start those that are missing, all at once."""
        missing = [number for number in range(self._count)
                   if number not in self._workers or not self._workers[number].alive]
        started = {number: self._spawn(number) for number in missing}
        for _ in missing:
            try:
                connected, _address = self._server.accept()
            except TimeoutError:
                raise self._not_started(started) from None
            connection = Connection(connected)
            hello = connection.receive()
            if hello is None:
                raise self._not_started(started)
            number = int(wire.decode(hello[1]))
            started[number].connected(connection)
            self._workers[number] = started[number]
        init = {"spec": self._builder.spec.to_json(), "job": self._job}
        for number in missing:
            self._workers[number].ask(Kind.INIT, init)
        for number in missing:
            self._workers[number].answer(Kind.READY, START_SECONDS)

    def _spawn(self, number: int) -> WorkerProcess:
        data_path = str(self._folder / f"data-{number}-{next(self._incarnation)}")
        # -P keeps the current folder off the module path: a job's own api/ or checkpoint.py must not shadow ours.
        command = [sys.executable, "-P", "-c", "from checkpoint.runtime.worker import main; main()",
                   str(self._folder / "control"), str(number), data_path]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        return WorkerProcess(number, process, data_path, self)

    def _not_started(self, started: dict[int, WorkerProcess]) -> Unavailable:
        for worker in started.values():
            worker.kill()
        return Unavailable("a worker process did not start", hint="its messages are on stderr")

    def lost(self, worker: WorkerProcess, code: int | None) -> None:
        """A worker is gone: all its subtasks have failed. From the worker's reader thread."""
        if self._closed:
            return
        how = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        error = Unavailable(f"worker process {worker.number} is gone ({how})")
        mine = [subtask for subtask in self._all_subtasks() if self._worker_of(subtask) == worker.number]
        self._listener.on_failure(mine[0] if mine else None, self._attempts.get(mine[0], 0) if mine else 0, error)

    def heard(self, kind: Kind, body: bytes) -> None:
        """A message that is no answer. From a worker's reader thread."""
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


class WorkerProcess:
    """The supervisor's side of one worker."""

    def __init__(self, number: int, process: subprocess.Popen[bytes], data_path: str, owner: ProcessExecutor) -> None:
        self.number, self.data_path = number, data_path
        self.statistics: list[dict[str, Any]] = []
        self._process, self._owner = process, owner
        self._connection: Connection | None = None
        self._reader: threading.Thread | None = None
        self._answers: dict[Kind, Any] = {}
        self._changed = threading.Condition()
        self._gone = False

    @property
    def alive(self) -> bool:
        return not self._gone and self._process.poll() is None

    def connected(self, connection: Connection) -> None:
        self._connection = connection
        self._reader = threading.Thread(target=self._read, args=(connection,), name=f"worker-{self.number}", daemon=True)
        self._reader.start()

    def ask(self, kind: Kind, value: Any) -> None:
        if not self.try_ask(kind, value):
            raise Unavailable(f"worker process {self.number} is gone")

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
                raise Unavailable(f"worker process {self.number} does not answer", expected=kind.name)
            if kind in self._answers:
                return self._answers.pop(kind)
            failure = self._answers.pop(Kind.FAILURE, None)
        if failure is not None:
            raise wire.error_from_json(failure)
        raise Unavailable(f"worker process {self.number} ended while it was asked to", expected=kind.name)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        if self.alive:
            self.try_ask(Kind.CLOSE, None)
        try:
            self._process.wait(CANCEL_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
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
        try:
            code: int | None = self._process.wait(5)
        except subprocess.TimeoutExpired:
            self.kill()
            code = None
        with self._changed:
            self._gone = True
            self._changed.notify_all()
        self._owner.lost(self, code)

    def _put(self, kind: Kind, value: Any) -> None:
        with self._changed:
            self._answers[kind] = value
            self._changed.notify_all()


def _reference(builder: Builder, job: str | None) -> str:
    if job is not None:
        path, attribute = split_reference(job)
        return f"{path}:{attribute}"
    found = reference_of(builder.flow)
    if found is None:
        raise InvalidRequest("the process runtime loads the flow in each worker, and can't tell from where",
                             flow=builder.flow.name, found=builder.flow.origin,
                             hint="assign the flow to a global name in a file, or pass job='file.py:name' where the name "
                                  "is the flow or a function without arguments that builds it")
    return found


def _refuse_local_only(builder: Builder) -> None:
    for node in builder.flow.nodes:
        if getattr(node.body, "local_only", False):
            raise InvalidRequest("this connector keeps its records in one process and can't run in workers",
                                 operator=node.uid, found=type(node.body).__name__,
                                 hint="use the thread runtime, or a FileSink")

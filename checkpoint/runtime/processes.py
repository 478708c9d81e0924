"""The process runtime: subtasks in worker processes of this machine, for functions that need more than one core.

Every worker loads the flow from its job file, so the flow must be reachable as `file.py:attribute`: a global of its
module, or a function without arguments that builds it. Records between workers go over Unix sockets, in batches, with
credit.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from checkpoint.runtime import wire
from checkpoint.runtime.deployment import Builder
from checkpoint.runtime.executor import ExecutorListener
from checkpoint.runtime.loading import reference_of, split_reference
from checkpoint.runtime.network import UnixNetwork
from checkpoint.runtime.wire import Connection, Kind
from checkpoint.runtime.workers import CANCEL_SECONDS, WorkerLink, WorkersExecutor
from statebackend.errors import InvalidRequest, Unavailable

START_SECONDS = 60.0


class ProcessExecutor(WorkersExecutor):
    """Starts the workers, and those again that have ended."""

    def __init__(self, builder: Builder, listener: ExecutorListener, *, job: str | None = None,
                 workers: int | None = None) -> None:
        self._job = _reference(builder, job)
        super().__init__(builder, listener, workers)
        self._folder = Path(tempfile.mkdtemp(prefix="holdfast-"))
        os.chmod(self._folder, 0o700)
        self._server, self._address = UnixNetwork(str(self._folder)).listen("control")
        self._server.settimeout(START_SECONDS)

    def close(self) -> None:
        self._closed = True
        for worker in self._workers.values():
            assert isinstance(worker, WorkerProcess)
            worker.close()
        self._server.close()
        shutil.rmtree(self._folder, ignore_errors=True)

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
            number, data_address = wire.decode(hello[1])
            started[number].connected(connection, data_address)
            self._workers[number] = started[number]
        init = {"spec": self._builder.spec.to_json(), "job": self._job}
        for number in missing:
            self._workers[number].ask(Kind.INIT, init)
        for number in missing:
            self._workers[number].answer(Kind.READY, START_SECONDS)

    def _spawn(self, number: int) -> WorkerProcess:
        # -P keeps the current folder off the module path: a job's own api/ or checkpoint.py must not shadow ours.
        command = [sys.executable, "-P", "-c", "from checkpoint.runtime.worker import main; main()",
                   self._address, str(number), str(self._folder)]
        return WorkerProcess(number, subprocess.Popen(command, stdin=subprocess.DEVNULL), self)

    def _not_started(self, started: dict[int, WorkerProcess]) -> Unavailable:
        for worker in started.values():
            worker.kill()
        return Unavailable("a worker process did not start", hint="its messages are on stderr")


class WorkerProcess(WorkerLink):
    """A worker that is a child of this process."""

    kind_name = "worker process"

    def __init__(self, number: int, process: subprocess.Popen[bytes], owner: ProcessExecutor) -> None:
        super().__init__(number, owner)
        self._process = process

    @property
    def alive(self) -> bool:
        return super().alive and self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def how_it_ended(self) -> str:
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            self.kill()
            return "it closed its connection, and was killed"
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"

    def close(self) -> None:
        if self.alive:
            self.try_ask(Kind.CLOSE, None)
        try:
            self._process.wait(CANCEL_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        self.disconnect()


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

"""The executor's side: one barrier task is one worker, which lives as long as the run."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from checkpoint.runtime import wire
from checkpoint.runtime.deployment import JobSpec
from checkpoint.runtime.network import TcpNetwork, local_host
from checkpoint.runtime.wire import Connection, Kind
from checkpoint.runtime.worker import Worker
from checkpoint.storage.generations import newest_generation
from spark_integration.runtime.shipping import unpack_flow
from statebackend.errors import InvalidRequest

LINGER_SECONDS = 2.0


@dataclass(frozen=True)
class BarrierTask:
    """What every task of a submission is sent, token included: it is in the task's own bytes and nowhere else.

    driver       address of the coordinator
    job_folder   of the job file, for imports that functions do late; used where the executor sees it
    """

    driver: str
    token: bytes = field(repr=False)
    flow: bytes = field(repr=False)
    spec: JobSpec = field(repr=False)
    job_folder: str | None = None

    def __call__(self, _rows: Iterable[Any]) -> Iterator[int]:
        from pyspark import BarrierTaskContext

        context = BarrierTaskContext.get()
        number = int(context.partitionId())
        run_worker(self, number)
        return iter([number])


def run_worker(task: BarrierTask, number: int) -> None:
    """Returns when the coordinator says that it is over. When it is gone, this process ends at once: nothing of an
    abandoned run may go on, whatever its threads are busy with."""
    before = set(threading.enumerate())
    control = TcpNetwork(task.token).connect(task.driver)
    folder = tempfile.mkdtemp(prefix="holdfast-", dir=_local_dir())
    try:
        closed = _work(task, number, control, folder)
    except BaseException as error:
        _tell_failure(control, error)
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not closed or _left_behind(before):
        # Spark must not give a process to anybody else while a function of ours is still busy in it.
        os._exit(1)
    control.close()


def _work(task: BarrierTask, number: int, control: Connection, folder: str) -> bool:
    spec = task.spec if task.spec.work_dir is not None else replace(task.spec, work_dir=folder)
    require_storage(spec)
    if task.job_folder is not None and os.path.isdir(task.job_folder) and task.job_folder not in sys.path:
        sys.path.append(task.job_folder)  # at the end: it never takes the place of an installed module
    flow = unpack_flow(task.flow)
    # The interface that leads to the driver is the one that other executors reach us on.
    worker = Worker(control, TcpNetwork(task.token, local_host(control)))
    worker.prepare(flow, spec)
    control.send_value(Kind.HELLO, [number, worker.data_address, os.getpid()])
    return worker.run()


def require_storage(spec: JobSpec) -> None:
    """The driver has claimed the job in the checkpoint folder; who does not see that sees another folder."""
    with spec.storage() as storage:
        found = newest_generation(storage.store)
        storage.require_newest()
        if found < spec.generation:
            raise InvalidRequest("an executor does not see the checkpoint folder that the driver writes to",
                                 path=storage.url, hint="give a folder or URL that every machine reaches")


def _tell_failure(control: Connection, error: BaseException) -> None:
    body = wire.encode([None, 0, wire.error_json(error), "".join(traceback.format_exception(error))])
    try:
        control.send(Kind.FAILURE, body)
    except OSError:
        os._exit(1)


def _local_dir() -> str | None:
    """Where this executor keeps its own temporary files; Spark removes it with the executor."""
    for folder in os.environ.get("SPARK_LOCAL_DIRS", "").split(","):
        if folder and os.path.isdir(folder):
            return folder
    return None


def _left_behind(before: set[threading.Thread]) -> list[threading.Thread]:
    new = [thread for thread in threading.enumerate() if thread not in before]
    for thread in new:
        if thread.name not in ("data", "peer", "statistics"):
            thread.join(LINGER_SECONDS)
    return [thread for thread in new if thread.is_alive() and thread.name not in ("data", "peer", "statistics")]

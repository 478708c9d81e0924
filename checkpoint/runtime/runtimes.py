"""Where a job can run: threads and processes of this machine, and what others register (`holdfast.runtimes`)."""

from __future__ import annotations

import tempfile
from importlib.metadata import entry_points
from typing import Protocol

from checkpoint.runtime.deployment import Builder
from checkpoint.runtime.executor import Executor, ExecutorListener, ThreadExecutor
from statebackend.errors import InvalidRequest


class Runtime(Protocol):
    """A place for jobs; `start` takes one in place of a name.

    region_restart  whether a part of a job can fail and be restarted by itself
    """

    @property
    def name(self) -> str: ...

    @property
    def region_restart(self) -> bool: ...

    def checkpoint_root(self, given: str | None, run_id: str) -> str:
        """Where checkpoints go; where none is given, a place that lives as long as the run. Refuses unfit ones."""

    def executor(self, builder: Builder, listener: ExecutorListener, *, job: str | None, workers: int | None) -> Executor:
        """`job`: the flow as `file.py:attribute`, if known. Refuses a flow that can't run here."""


class Threads:
    """All subtasks in this process."""

    name = "threads"
    region_restart = True

    def checkpoint_root(self, given: str | None, run_id: str) -> str:
        return given if given is not None else f"memory://holdfast-{run_id}"

    def executor(self, builder: Builder, listener: ExecutorListener, *, job: str | None, workers: int | None) -> Executor:
        return ThreadExecutor(builder, listener)


class Processes:
    """Subtasks in worker processes."""

    name = "processes"
    region_restart = True

    def checkpoint_root(self, given: str | None, run_id: str) -> str:
        return given if given is not None else tempfile.mkdtemp(prefix="holdfast-")

    def executor(self, builder: Builder, listener: ExecutorListener, *, job: str | None, workers: int | None) -> Executor:
        from checkpoint.runtime.processes import ProcessExecutor

        return ProcessExecutor(builder, listener, job=job, workers=workers)


def runtime_of(given: str | Runtime) -> Runtime:
    """The runtime of this name, or the one that was given."""
    if not isinstance(given, str):
        return given
    if given in ("threads", "processes"):
        return Threads() if given == "threads" else Processes()
    registered = {entry.name: entry for entry in entry_points(group="holdfast.runtimes")}
    if given not in registered:
        known = ("threads", "processes", *registered)
        raise InvalidRequest("there is no such runtime here", found=given, expected=" or ".join(known))
    made: Runtime = registered[given].load()()
    return made

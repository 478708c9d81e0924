"""What a supervisor needs of a runtime, and the thread runtime that fulfils it in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from checkpoint.protocol.messages import Report, SubtaskId
from checkpoint.runtime.contracts import Barrier
from checkpoint.runtime.deployment import Builder
from checkpoint.runtime.host import HostListener, TaskHost
from checkpoint.runtime.restoring import RestoreOptions, Restorer
from checkpoint.storage.files import CheckpointSource
from statebackend.errors import CorruptData


@dataclass(frozen=True)
class RestoreFrom:
    """A checkpoint of this job by number, or any checkpoint or savepoint by URL; plain values, to be sent to workers.

    `foreign`: its files belong to somebody else, so no checkpoint of ours may build on them.
    """

    path: str | int
    foreign: bool = False
    same_run: bool = False
    uid_mapping: Mapping[str, str] = field(default_factory=dict)
    allow_non_restored_state: bool = False

    @property
    def options(self) -> RestoreOptions:
        return RestoreOptions(self.uid_mapping, self.allow_non_restored_state, self.same_run)


@dataclass(frozen=True)
class Deployment:
    """Subtasks to start together."""

    subtasks: tuple[SubtaskId, ...]
    attempt: int
    restore: RestoreFrom | None
    enumerations: Mapping[str, Any] = field(default_factory=dict)


class ExecutorListener(Protocol):
    """Whom an executor tells what happens; calls come from any thread and return at once."""

    def on_report(self, report: Report) -> None: ...
    def on_failure(self, subtask: SubtaskId | None, attempt: int, error: BaseException) -> None: ...
    def on_finished(self, subtask: SubtaskId, attempt: int) -> None: ...


class Executor(Protocol):
    """Runs subtasks somewhere. Calls come from the supervisor's thread."""

    def deploy(self, deployment: Deployment) -> None: ...
    def trigger(self, subtasks: Iterable[SubtaskId], barrier: Barrier) -> None: ...
    def completed(self, checkpoint_id: int, subtasks: Iterable[SubtaskId] | None, last: bool) -> None: ...
    def savepoint_done(self, checkpoint_id: int) -> None: ...
    def aborted(self, checkpoint_id: int) -> None: ...
    def request_status(self, subtasks: Iterable[SubtaskId]) -> None: ...

    def cancel(self, subtasks: Iterable[SubtaskId] | None = None, *, read_mail: bool = False) -> None:
        """Stop these subtasks (None: all) and wait. `read_mail`: notices that were sent before still count."""

    def statistics(self) -> list[dict[str, Any]]: ...
    def close(self) -> None: ...


class ThreadExecutor:
    """All subtasks as threads of this process."""

    def __init__(self, builder: Builder, listener: ExecutorListener) -> None:
        self._builder, self._listener = builder, listener
        self._host = TaskHost(listener, builder.clock)
        self._sources: list[CheckpointSource] = []

    def deploy(self, deployment: Deployment) -> None:
        self._close_sources(1)
        self._host.deploy(assignments(self._builder, deployment, self._sources.append, self._listener))

    def trigger(self, subtasks: Iterable[SubtaskId], barrier: Barrier) -> None:
        self._host.trigger(subtasks, barrier)

    def completed(self, checkpoint_id: int, subtasks: Iterable[SubtaskId] | None, last: bool) -> None:
        self._close_sources(0)
        self._host.completed(checkpoint_id, subtasks, last)

    def savepoint_done(self, checkpoint_id: int) -> None:
        self._host.savepoint_done(checkpoint_id, None)

    def aborted(self, checkpoint_id: int) -> None:
        self._host.aborted(checkpoint_id)

    def request_status(self, subtasks: Iterable[SubtaskId]) -> None:
        self._host.request_status(subtasks)

    def cancel(self, subtasks: Iterable[SubtaskId] | None = None, *, read_mail: bool = False) -> None:
        self._host.cancel(subtasks, read_mail=read_mail)

    def statistics(self) -> list[dict[str, Any]]:
        return self._host.statistics()

    def close(self) -> None:
        self._host.close()
        self._close_sources(0)

    def _close_sources(self, keep: int) -> None:
        """A source is done with when a checkpoint has completed, for that takes every subtask, or when they are gone."""
        while len(self._sources) > keep:
            self._sources.pop(0).close()


def assignments(builder: Builder, deployment: Deployment, opened: Callable[[CheckpointSource], None],
                listener: HostListener | ExecutorListener) -> list[Any]:
    """The assignments of a deployment, with what each subtask starts from."""
    restore = deployment.restore
    restorer: Restorer | None = None
    if restore is not None:
        def damaged(error: CorruptData) -> None:
            listener.on_failure(deployment.subtasks[0], deployment.attempt, error)

        metadata = builder.storage.load(restore.path)
        source = builder.storage.source(restore.path, on_damage=damaged)
        opened(source)
        restorer = Restorer(builder.plan, metadata, source, builder.codec, restore.options)
        restorer.check()
    return [builder.assignment(
        subtask, deployment.attempt,
        restorer.subtask(builder.vertex(subtask.task), subtask.index) if restorer is not None else None,
        foreign=restore is not None and restore.foreign, enumerations=deployment.enumerations)
        for subtask in deployment.subtasks]

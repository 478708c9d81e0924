"""What goes into the coordinator and what comes out: the job's plan, events, actions, and reports of subtasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import NamedTuple

from checkpoint.protocol.failures import FailureReason
from checkpoint.runtime.contracts import Barrier, CheckpointOptions, SubtaskSnapshot
from statebackend.errors import HoldfastError


class SubtaskId(NamedTuple):
    """One parallel instance of a task (a chain of operators)."""

    task: str
    index: int  # type: ignore[assignment]  # shadows tuple.index, which nobody calls on an id

    def __str__(self) -> str:
        return f"{self.task}[{self.index}]"


@dataclass(frozen=True)
class TaskPlan:
    """One task: its operators' uids in chain order, its parallelism, and the tasks it reads from."""

    task: str
    parallelism: int
    inputs: tuple[str, ...] = ()
    uids: tuple[str, ...] = ()
    max_parallelism: int = 128


@dataclass(frozen=True)
class JobPlan:
    """All tasks of a job, sources first."""

    tasks: tuple[TaskPlan, ...]

    def subtasks(self) -> Iterator[SubtaskId]:
        return (SubtaskId(task.task, index) for task in self.tasks for index in range(task.parallelism))


class Phase(Enum):
    """Where a subtask is in its life. ENDED: all input ended and flushed; it waits for the last checkpoint."""

    RESTORING = 0
    RUNNING = 1
    ENDED = 2
    FINISHED = 3


@dataclass(frozen=True, slots=True)
class SubtaskStats:
    """What one subtask measured for one checkpoint. Durations in milliseconds."""

    sync_ms: int = 0
    async_ms: int = 0
    alignment_ms: int = 0
    start_delay_ms: int = 0
    state_bytes: int = 0
    incremental_bytes: int = 0
    in_flight_bytes: int = 0
    in_flight_records: int = 0
    processed_records: int = 0
    unaligned: bool = False


@dataclass(frozen=True, slots=True)
class Waiting:
    """A subtask waits for a checkpoint's barrier on these channels (`clicks[0] -> count[1]`)."""

    checkpoint_id: int
    channels: tuple[str, ...]
    channel_count: int


# -- reports: from subtasks to the coordinator ------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class Acknowledge:
    subtask: SubtaskId
    checkpoint_id: int
    snapshot: SubtaskSnapshot
    stats: SubtaskStats = SubtaskStats()
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Decline:
    """The subtask can't do this checkpoint (its asynchronous part failed, or its barriers were overtaken)."""

    subtask: SubtaskId
    checkpoint_id: int
    message: str
    attempt: int = 0
    counts: bool = True


@dataclass(frozen=True, slots=True)
class StatusReport:
    """Sent at each change of phase, again while an answer is due, and while an alignment drags on.

    `back_pressure` is the share of recent time in which the subtask could not emit.
    """

    subtask: SubtaskId
    phase: Phase
    back_pressure: float = 0.0
    waiting: tuple[Waiting, ...] = ()
    attempt: int = 0


Report = Acknowledge | Decline | StatusReport


# -- events: from the runtime ------------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class TriggerCheckpoint:
    """A person wants a checkpoint now; `full` stores everything anew."""

    request_id: str
    full: bool = False


@dataclass(frozen=True, slots=True)
class TriggerSavepoint:
    """A person wants a savepoint, and perhaps the job to stop after it."""

    request_id: str
    location: str | None = None
    native: bool = False
    stop: bool = False
    drain: bool = False


@dataclass(frozen=True, slots=True)
class CancelJob:
    request_id: str


@dataclass(frozen=True, slots=True)
class SubtasksFailed:
    """These subtasks are gone and will be started again as `attempt`. Everything in progress is given up.

    A checkpoint that is being published is not: wait until `Coordinator.publishing` is None before choosing what to
    restart from, because it may turn out to be the newest.
    """

    subtasks: frozenset[SubtaskId]
    attempt: int
    message: str = ""


@dataclass(frozen=True, slots=True)
class Restored:
    """The job starts from this checkpoint; `retained` are the checkpoints of this job that are still stored."""

    checkpoint_id: int
    path: str
    is_savepoint: bool = False
    retained: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Published:
    checkpoint_id: int
    path: str


@dataclass(frozen=True, slots=True)
class PublishFailed:
    """`fenced`: a newer generation has published; this run must end.

    `settled` False: nobody knows whether it was published after all, so its files must stay. A restart then starts
    from the newest checkpoint that the storage has, whatever the coordinator believes.
    """

    checkpoint_id: int
    message: str
    fenced: bool = False
    settled: bool = True


Event = (Report | Tick | TriggerCheckpoint | TriggerSavepoint | CancelJob | SubtasksFailed | Restored | Published
         | PublishFailed)


# -- actions: what the runtime has to do ------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class SendBarrier:
    """Hand the barrier to these subtasks (`Subtask.on_trigger`): the sources, and those whose inputs have all ended."""

    subtasks: tuple[SubtaskId, ...]
    barrier: Barrier


@dataclass(frozen=True)
class Publish:
    """Every subtask has acknowledged: write the metadata, then answer with Published or PublishFailed."""

    checkpoint_id: int
    timestamp: int
    options: CheckpointOptions
    snapshots: Mapping[SubtaskId, SubtaskSnapshot] = field(repr=False)


@dataclass(frozen=True, slots=True)
class NotifyCompleted:
    """Tell these subtasks (None: all) that the checkpoint is durable. `last`: the job ends with it."""

    checkpoint_id: int
    subtasks: tuple[SubtaskId, ...] | None = None
    last: bool = False


@dataclass(frozen=True, slots=True)
class NotifySavepointDone:
    """A savepoint is stored and the job goes on (`Subtask.on_savepoint_done`): nothing is committed by it."""

    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class NotifyAborted:
    checkpoint_id: int
    reason: FailureReason


@dataclass(frozen=True, slots=True)
class DiscardFiles:
    """The checkpoint was given up before it was published: files that subtasks stored for it alone can go."""

    checkpoint_id: int
    snapshots: Mapping[SubtaskId, SubtaskSnapshot] = field(repr=False)


@dataclass(frozen=True, slots=True)
class DiscardCompleted:
    """Newer checkpoints have taken the place of these: delete them, as far as the registry and grace period allow."""

    checkpoint_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RequestStatus:
    """A checkpoint is late: ask these subtasks for a status report (`Subtask.on_status_request`)."""

    subtasks: tuple[SubtaskId, ...]


@dataclass(frozen=True, slots=True)
class FailJob:
    """Too many checkpoints failed, or the run lost its job. `restartable`: the restart strategy decides what now."""

    reason: FailureReason
    message: str
    restartable: bool = True


class Outcome(StrEnum):
    FINISHED = "finished"
    STOPPED = "stopped"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class EndJob:
    """The job is over. Every subtask has finished, or (CANCELLED) is to be stopped where it stands."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class ScheduleTick:
    """Send a Tick at this time, or earlier; a later ScheduleTick replaces this one."""

    at_ms: int


@dataclass(frozen=True, slots=True)
class Log:
    level: str
    line: str


@dataclass(frozen=True, slots=True)
class CompleteRequest:
    """The answer to a trigger: the path and checkpoint id, or the error."""

    request_id: str
    checkpoint_id: int | None = None
    path: str | None = None
    error: HoldfastError | None = None


Action = (SendBarrier | Publish | NotifyCompleted | NotifySavepointDone | NotifyAborted | DiscardFiles
          | DiscardCompleted | RequestStatus | FailJob | EndJob | ScheduleTick | Log | CompleteRequest)

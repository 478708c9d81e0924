"""The seams between the pieces of a running job: what travels on channels, and what a subtask asks of its operators.

The subtask core (runtime/subtask.py) owns channels, barriers, alignment and back pressure; the operator chain
(dataflow/operators.py) owns user functions, state, timers and watermarks. Neither knows threads, sockets or the
wall clock, so that the thread, process, Spark and simulated runtimes drive the very same code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any, Protocol

from statebackend.backend import KeyedHandle
from statebackend.files import SnapshotSource, SnapshotTarget, StateFile
from statebackend.operator_state import OperatorStatePart

MIN_WATERMARK, MAX_WATERMARK = -(2**63), 2**63 - 1


class Records:
    """A batch of records on a channel. `timestamps` and `keys` are parallel lists, or None where there are none."""

    __slots__ = ("keys", "timestamps", "values")

    def __init__(self, values: list[Any], timestamps: list[int | None] | None = None,
                 keys: list[Any] | None = None) -> None:
        self.values, self.timestamps, self.keys = values, timestamps, keys

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True)
class Watermark:
    """No record with a smaller or equal timestamp is to be expected on this channel."""

    timestamp: int


@dataclass(frozen=True)
class ChannelIdle:
    """The channel takes no part in the watermark until a record or watermark arrives on it."""


@dataclass(frozen=True)
class EndOfInput:
    """The last element of a channel. `drained`: the sender emitted MAX_WATERMARK before it."""

    drained: bool = True


class CheckpointKind(StrEnum):
    CHECKPOINT = "checkpoint"
    SAVEPOINT = "savepoint"


@dataclass(frozen=True)
class CheckpointOptions:
    """What a barrier asks for. Savepoints are always aligned. `stop`: end after it; `drain`: MAX_WATERMARK first.

    `location` is the folder of a savepoint; checkpoints go to the job's own folder and leave it None.
    """

    kind: CheckpointKind = CheckpointKind.CHECKPOINT
    unaligned: bool = False
    aligned_timeout_ms: int | None = None
    exactly_once: bool = True
    full: bool = False
    stop: bool = False
    drain: bool = False
    native: bool = True
    location: str | None = None


@dataclass(frozen=True)
class Barrier:
    checkpoint_id: int
    timestamp: int
    options: CheckpointOptions


@dataclass(frozen=True)
class CancelBarrier:
    """The checkpoint is given up: nobody waits for its barrier any longer."""

    checkpoint_id: int


Element = Records | Watermark | ChannelIdle | EndOfInput | Barrier | CancelBarrier


@dataclass(frozen=True)
class OperatorSnapshot:
    """The state of one operator in one subtask's snapshot."""

    uid: str
    keyed: tuple[KeyedHandle, ...] = ()
    operator: StateFile | None = None

    @property
    def size(self) -> int:
        return sum(handle.size for handle in self.keyed) + (self.operator.size if self.operator is not None else 0)


@dataclass(frozen=True)
class InFlight:
    """Records of one channel that an unaligned barrier has overtaken, in order. Watermarks are not kept.

    `edge` is the edge's id in the job graph (the same in every run of a flow), `sender` and `receiver` are subtask
    indexes at the time of the checkpoint. `output`: they were in the sender's output queue; such records come after
    those that were in the receiver's input queue. `receivers`: how many the receiving operator had at the checkpoint and
    after each time that its state was re-cut since; empty where it never was.
    """

    edge: str
    sender: int
    receiver: int
    batches: tuple[Records, ...]
    output: bool = False
    receivers: tuple[int, ...] = ()


@dataclass(frozen=True)
class SubtaskSnapshot:
    """What a subtask hands to the coordinator: its operators' state, its channel state, and whether it had ended.

    `in_flight` is what the job's `ChannelStateCodec` wrote, None where nothing was overtaken. `ended`: all inputs had
    ended and `finish` had run, so a restart of the same job must not call `finish` again.
    """

    operators: tuple[OperatorSnapshot, ...]
    in_flight: StateFile | None = None
    ended: bool = False


class ChannelStateCodec(Protocol):
    """Writes and reads in-flight records; `write` is called on any thread."""

    def write(self, in_flight: Sequence[InFlight], target: SnapshotTarget) -> StateFile: ...
    def read(self, file: StateFile, source: SnapshotSource) -> list[InFlight]: ...


@dataclass(frozen=True)
class OperatorRestore:
    """What one operator of one subtask starts from. Handles may overlap its key-group range only partly."""

    keyed: tuple[KeyedHandle, ...] = ()
    operator: tuple[OperatorStatePart, ...] = ()


@dataclass(frozen=True)
class SubtaskRestore:
    """What a subtask starts from, by operator uid; `source` reads the files that the handles name.

    `in_flight` are the records to process before any new input (see runtime/in_flight.py, which deals them out).
    `ended` is set only when the same job restarts at the same parallelism and the subtask had ended in the checkpoint;
    a new run from that checkpoint leaves it False, so that sources look for new data.
    """

    checkpoint_id: int
    source: SnapshotSource
    operators: dict[str, OperatorRestore] = field(default_factory=dict)
    in_flight: tuple[InFlight, ...] = ()
    ended: bool = False


class PendingChainSnapshot(Protocol):
    """The asynchronous part of a chain's snapshot; `run` once, on any thread."""

    def run(self) -> tuple[OperatorSnapshot, ...]: ...
    def cancel(self) -> None: ...


class SourceStatus(Enum):
    """What a source has after a poll. IDLE: ask again later; ENDED: it will never have more."""

    MORE = "more"
    IDLE = "idle"
    ENDED = "ended"


class ChainOutput(Protocol):
    """Where a chain's last operators emit to; the subtask core routes to channels."""

    def emit(self, edge: int, records: Records) -> None:
        """Records for one outgoing edge of the chain (edges are numbered in graph order, side outputs included)."""

    def emit_watermark(self, watermark: int) -> None: ...
    def emit_idle(self) -> None: ...


class OperatorChain(ABC):
    """The chained operators of one subtask. All calls come from the subtask's one thread unless said otherwise."""

    uids: Sequence[str]
    is_source: bool

    @abstractmethod
    def open(self, output: ChainOutput, restore: SubtaskRestore | None) -> None: ...

    @abstractmethod
    def process(self, input_index: int, records: Records) -> None:
        """Records of the `input_index`-th input edge of the chain's first operator."""

    @abstractmethod
    def process_watermark(self, watermark: int) -> None:
        """The combined watermark of all inputs has advanced: fire event-time timers, then pass it on."""

    @abstractmethod
    def poll(self, limit: int) -> SourceStatus:
        """Sources only: emit up to `limit` records."""

    @abstractmethod
    def advance_processing_time(self, now_ms: int) -> int | None:
        """Fire processing-time timers and periodic work that are due; the next time it wants to be called."""

    @abstractmethod
    def end_input(self, input_index: int) -> None:
        """One input edge has ended on all its channels."""

    @abstractmethod
    def finish(self, drain: bool) -> None:
        """All inputs ended (or a stop with drain): flush; with `drain`, MAX_WATERMARK was processed before."""

    @abstractmethod
    def snapshot(self, checkpoint_id: int, options: CheckpointOptions,
                 target: SnapshotTarget) -> PendingChainSnapshot:
        """The synchronous part of a snapshot of every operator in the chain (sinks pre-commit here)."""

    @abstractmethod
    def checkpoint_completed(self, checkpoint_id: int) -> None:
        """The checkpoint is durable: sinks commit this and every older pre-committed transaction.

        Notices may be lost or come late; the next one then stands for those before it.
        """

    @abstractmethod
    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        """The checkpoint was given up. Sinks keep what they pre-committed for it: the next completed one commits it."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; called exactly once, also after a failure."""


class Partitioner(ABC):
    """Chooses channels for the records of one edge."""

    broadcast: bool = False

    @abstractmethod
    def split(self, records: Records, channels: int) -> list[tuple[int, Records]]:
        """The parts of a batch by channel index; order within a channel is the order of the batch."""

    @abstractmethod
    def reroute(self, records: Records, old_channel: tuple[int, int],
                new_parallelism: int) -> list[tuple[int, Records]]:
        """Where in-flight records of an unaligned checkpoint go when the receiving parallelism has changed.

        `old_channel` is (sender subtask, receiver subtask) at the time of the checkpoint.
        """

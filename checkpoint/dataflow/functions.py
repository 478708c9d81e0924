"""What users write: the functions of a dataflow, and the contexts through which they reach state, timers and outputs.

The same function object runs in the thread and process runtimes and in Spark: a runtime copies it for every subtask,
calls `open` once, then `process` for each record on the subtask's one thread, and `close` at the end. Resources that
can't be copied (connections, locks, files) belong in `open`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from statebackend.errors import InvalidRequest

if TYPE_CHECKING:
    from statebackend.descriptors import ListStateDescriptor, MapStateDescriptor, StateDescriptor
    from statebackend.operator_state import (
        BroadcastState,
        OperatorListState,
        OperatorStateStore,
        ReadOnlyBroadcastState,
    )
    from statebackend.state import State
    from statebackend.ttl import TimeDomain

MIN_TIMESTAMP = -(2**63)


@dataclass(frozen=True)
class OutputTag:
    """Names a side output: `ctx.output(tag, value)` writes to it, `stream.side_output(tag)` reads it."""

    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InvalidRequest("an output tag needs a name that is not empty", found=self.name)


class Timers(ABC):
    """The timers of the current key, as a function sees them. Times are milliseconds since the epoch."""

    @abstractmethod
    def register_event_time_timer(self, timestamp: int) -> None:
        """`on_timer` is called for this key once the watermark has reached `timestamp`; registering twice is once."""

    @abstractmethod
    def register_processing_time_timer(self, timestamp: int) -> None:
        """`on_timer` is called for this key once the clock has reached `timestamp`; registering twice is once."""

    @abstractmethod
    def delete_event_time_timer(self, timestamp: int) -> None:
        """Take an event-time timer back; nothing happens if there is none."""

    @abstractmethod
    def delete_processing_time_timer(self, timestamp: int) -> None:
        """Take a processing-time timer back; nothing happens if there is none."""

    @abstractmethod
    def current_watermark(self) -> int:
        """The event time that this operator has reached; the smallest 64-bit number before the first watermark."""

    @abstractmethod
    def current_processing_time(self) -> int:
        """The runtime's clock, which tests and replays may control."""


class OpenContext(ABC):
    """What a function has in `open`, `close` and the checkpoint hooks: its place in the job, and its state.

    Not every context offers everything; a call that makes no sense in its place is `InvalidRequest` with the reason.
    """

    job_id: str = ""
    job_name: str = ""
    run_id: str = ""
    """Differs from start to start of a job; `attempt` counts the restarts within one."""
    uid: str
    subtask_index: int
    parallelism: int
    max_parallelism: int
    attempt: int = 0
    is_restored: bool = False
    restored_checkpoint_id: int | None = None
    enumeration: Any = None
    """For sources: what `Source.enumerate` found at this start."""

    def state(self, descriptor: StateDescriptor, *, namespace_type: Any = None) -> State:
        """The keyed state of this name; keyed functions only. Ask in `open` and keep it: it follows the current key.

        With a `namespace_type` it is one for each window, or whatever a namespace stands for, of the key.
        """
        raise InvalidRequest("keyed state needs a keyed stream", operator=self.uid, state=descriptor.name,
                             hint="put key_by(...) before process(...)")

    @property
    def operator_state(self) -> OperatorStateStore:
        """List, union list and broadcast state of this subtask."""
        raise InvalidRequest("operator state is not available here", operator=self.uid)

    def list_state(self, descriptor: ListStateDescriptor) -> OperatorListState:
        """Operator list state: elements are dealt out evenly when the parallelism changes."""
        return self.operator_state.list_state(descriptor)

    def union_list_state(self, descriptor: ListStateDescriptor) -> OperatorListState:
        """Operator list state of which every subtask gets all elements on a restore."""
        return self.operator_state.union_list_state(descriptor)

    def broadcast_state(self, descriptor: MapStateDescriptor) -> BroadcastState | ReadOnlyBroadcastState:
        """The broadcast map of this name: writable in `process_broadcast`, read-only elsewhere."""
        raise InvalidRequest("broadcast state needs a connected broadcast stream", operator=self.uid,
                             state=descriptor.name, hint="use stream.connect(other.broadcast()).process(...)")


class ProcessContext(OpenContext):
    """What a function has while it works on a record or timer. One object per subtask, changed from record to record.

    key        of the record or timer; None on streams that are not keyed
    timestamp  event time of the record in milliseconds, or of the timer; None where records carry none
    """

    key: Any = None
    timestamp: int | None = None
    time_domain: TimeDomain | None = None
    """In `on_timer`: which clock the timer counted. None while a record is processed."""

    @property
    def watermark(self) -> int:
        """The event time that this operator has reached."""
        return self.timer_service().current_watermark()

    @property
    def timers(self) -> Timers:
        """The same as `timer_service()`."""
        return self.timer_service()

    @abstractmethod
    def timer_service(self) -> Timers:
        """Timers of the current key; on streams that are not keyed only the clocks work."""

    @abstractmethod
    def output(self, tag: OutputTag, value: Any, timestamp: int | None = None) -> None:
        """Emit to a side output, with the current timestamp unless another is given."""

    def apply_to_keyed_state(self, descriptor: StateDescriptor, function: Callable[[Any, Any], None]) -> None:
        """Call `function(key, state)` for every key that has this state; in `process_broadcast` of keyed functions."""
        raise InvalidRequest("apply_to_keyed_state belongs in process_broadcast of a KeyedBroadcastProcessFunction",
                             operator=self.uid, state=descriptor.name)


class SnapshotContext(OpenContext):
    """What `snapshot_state` gets."""

    checkpoint_id: int
    checkpoint_timestamp: int


Output = Iterable[Any] | None
"""What processing gives: a generator, any other iterable of output records, or None for nothing."""


class Function:
    """What all functions share. None of these methods has to be overridden."""

    def open(self, ctx: Any) -> None:
        """Called once per subtask before the first record; state is registered here."""

    def close(self) -> None:
        """Called once per subtask at the end, also after a failure."""

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        """The checkpoint is durable. Best effort: after a failure the notice may be missed."""

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        """The checkpoint was given up. Best effort."""


class CheckpointedFunction(ABC):
    """Mix-in for functions with operator state: fill it in `snapshot_state`, take it back in `initialize_state`."""

    @abstractmethod
    def snapshot_state(self, ctx: SnapshotContext) -> None:
        """A checkpoint is being taken: bring the operator state up to date."""

    @abstractmethod
    def initialize_state(self, ctx: OpenContext) -> None:
        """Called before `open`: register operator state through `ctx.operator_state`; `ctx.is_restored` tells."""


class ProcessFunction(Function, ABC):
    """Record by record on a stream that is not keyed."""

    @abstractmethod
    def process(self, record: Any, ctx: ProcessContext) -> Output:
        """The outputs of one record, as a generator, an iterable, or None."""


class KeyedProcessFunction(Function, ABC):
    """Record by record on a keyed stream, with keyed state and timers.

    `process_batch(table, ctx)`, where a subclass defines it, takes an Arrow table instead of single records and
    returns an Arrow table or None: Spark micro-batches use it where it is there.
    """

    process_batch: ClassVar[Any] = None

    @abstractmethod
    def process(self, record: Any, ctx: ProcessContext) -> Output:
        """The outputs of one record, as a generator, an iterable, or None."""

    def on_timer(self, timestamp: int, ctx: ProcessContext) -> Output:
        """A timer of `ctx.key` is due; `ctx.time_domain` tells which clock it counted."""
        return None


class BroadcastProcessFunction(Function, ABC):
    """A stream connected with a broadcast stream: every subtask sees all broadcast records."""

    @abstractmethod
    def process(self, record: Any, ctx: ProcessContext) -> Output:
        """A record of the main stream; `ctx.broadcast_state(...)` is read-only here."""

    @abstractmethod
    def process_broadcast(self, record: Any, ctx: ProcessContext) -> Output:
        """A broadcast record; must write the same on every subtask."""


class KeyedBroadcastProcessFunction(Function, ABC):
    """A keyed stream connected with a broadcast stream."""

    @abstractmethod
    def process(self, record: Any, ctx: ProcessContext) -> Output:
        """A record of the keyed stream; `ctx.broadcast_state(...)` is read-only here."""

    @abstractmethod
    def process_broadcast(self, record: Any, ctx: ProcessContext) -> Output:
        """A broadcast record; there is no key, but `ctx.apply_to_keyed_state` reaches every one."""

    def on_timer(self, timestamp: int, ctx: ProcessContext) -> Output:
        """A timer of `ctx.key` is due; broadcast state is read-only."""
        return None

"""The contracts of sources and sinks: what a connector must do so that checkpoints stay exact."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from checkpoint.dataflow.functions import OpenContext
from checkpoint.runtime.contracts import SourceStatus


class SourceBatch(NamedTuple):
    """What a poll gave. `timestamps` is parallel to `values`, or None where the source knows none."""

    values: list[Any]
    status: SourceStatus
    timestamps: list[int | None] | None = None


class SourceReader(ABC):
    """Reads one subtask's share of a source. All calls come from the subtask's thread."""

    @abstractmethod
    def poll(self, limit: int) -> SourceBatch:
        """Up to `limit` records, without waiting. IDLE: nothing now; ENDED: nothing ever again."""

    @abstractmethod
    def snapshot(self, checkpoint_id: int) -> None:
        """Put the positions after the last record that was polled into the operator state."""

    def wake_at_ms(self) -> int | None:
        """After IDLE: when to poll again (milliseconds since the epoch); None leaves it to the runtime."""
        return None

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        """The positions of this checkpoint are durable."""

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        """The checkpoint was given up."""

    def close(self) -> None:
        """Release everything."""


class Source(ABC):
    """Where records come from. Must be replayable: a reader that restores its positions gives the same records again."""

    bounded: bool = True
    record_type: Any = None
    """A dataclass or NamedTuple that the records are instances of, where they are."""
    local_only: bool = False
    """True where source or sink keeps something in this process and so can't run in worker processes."""

    def enumerate(self) -> Any:
        """What there is to read now, as plain values; asked once at each start and given to all readers alike."""
        return None

    @abstractmethod
    def reader(self, ctx: OpenContext) -> SourceReader:
        """The reader of subtask `ctx.subtask_index` of `ctx.parallelism`, at the positions in `ctx.operator_state`.

        `ctx.enumeration` is what `enumerate` gave: subtasks that share things out by it never disagree.
        """


class SinkWriter(ABC):
    """Writes one subtask's records. All calls come from the subtask's thread."""

    @abstractmethod
    def write(self, values: list[Any], timestamps: list[int | None] | None) -> None: ...

    def finish(self) -> None:
        """No more records will come; what was written still waits for its checkpoint."""

    def snapshot(self, checkpoint_id: int) -> None:
        """A checkpoint is being taken: what was written so far must survive (pre-commit), and state tells where."""

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        """The checkpoint is durable: make its records visible."""

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        """The checkpoint was given up: its records go with the next one."""

    def close(self) -> None:
        """Release everything; what has not been committed stays invisible."""


class Sink(ABC):
    """Where records go."""

    local_only: bool = False

    def receives(self, record_type: Any) -> None:
        """Told when it ends a stream: the dataclass or NamedTuple that the records are; None where the stream names none."""

    @abstractmethod
    def writer(self, ctx: OpenContext) -> SinkWriter:
        """The writer of subtask `ctx.subtask_index`; commits what a restored checkpoint left pending."""

"""One subtask's part of one checkpoint, from the barrier to the acknowledgement."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from checkpoint.protocol.barriers import TakeSnapshot
from checkpoint.protocol.messages import Acknowledge, SubtaskId, SubtaskStats
from checkpoint.runtime.contracts import (
    Barrier,
    ChannelStateCodec,
    InFlight,
    OperatorSnapshot,
    Records,
    SubtaskSnapshot,
)
from statebackend.files import SnapshotTarget, StateFile


class SnapshotTask:
    """The asynchronous part of a snapshot. `run` never raises; `error` and `result` tell what came of it."""

    def __init__(self, checkpoint_id: int, work: Callable[[], Any], cancel: Callable[[], None] | None = None) -> None:
        self.checkpoint_id = checkpoint_id
        self.result: Any = None
        self.error: Exception | None = None
        self._work, self._cancel = work, cancel

    def run(self) -> None:
        """Once, on any thread."""
        try:
            self.result = self._work()
        except Exception as error:  # every failure of the asynchronous part declines the checkpoint, none is lost
            self.error = error

    def cancel(self) -> None:
        if self._cancel is not None:
            self._cancel()


class RunningSnapshot:
    """What has been gathered so far. Complete when state and channel state are written and nothing more can come."""

    def __init__(self, barrier: Barrier, action: TakeSnapshot, ended: bool, target: SnapshotTarget) -> None:
        self.barrier, self.checkpoint_id = barrier, barrier.checkpoint_id
        self.capturing = action.unaligned
        self.waiting_outputs: set[int] = set()
        self.output_deadline: int | None = None
        self.state_task: SnapshotTask | None = None
        self.channel_task: SnapshotTask | None = None
        self.processed_records = 0
        self._action, self._ended, self._target = action, ended, target
        self._alignment_ms = action.alignment_ms
        self._unaligned = action.unaligned
        self._inputs: dict[tuple[str, int, int], list[Records]] = defaultdict(list)
        self._outputs: list[InFlight] = []
        self._operators: tuple[OperatorSnapshot, ...] | None = None
        self._file: StateFile | None = None
        self._records = 0
        self._sync_ms = self._async_ms = self._sync_end = 0

    # -- what is gathered ----------------------------------------------------------------------------------------------

    def sync_done(self, began_ms: int, now_ms: int) -> None:
        self._sync_ms, self._sync_end = max(0, now_ms - began_ms), now_ms

    def add_input(self, edge: str, sender: int, receiver: int, records: Records) -> None:
        self._inputs[edge, sender, receiver].append(records)
        self._records += len(records)

    def add_output(self, edge: str, sender: int, receiver: int, batches: tuple[Records, ...]) -> None:
        if batches:
            self._outputs.append(InFlight(edge, sender, receiver, batches, output=True))
            self._records += sum(map(len, batches))

    def inputs_complete(self, alignment_ms: int) -> None:
        self.capturing, self._alignment_ms = False, alignment_ms

    def wait_for_output(self, channel: int, now_ms: int) -> None:
        """The barrier, still aligned, waits in this output queue: it may have to overtake when the timeout passes."""
        self.waiting_outputs.add(channel)
        timeout = self.barrier.options.aligned_timeout_ms
        assert timeout is not None
        self.output_deadline = min(self.barrier.timestamp, now_ms) + timeout

    def output_sent(self, channel: int) -> None:
        self.waiting_outputs.discard(channel)
        if not self.waiting_outputs:
            self.output_deadline = None

    def outputs_overtaken(self) -> None:
        self.waiting_outputs.clear()
        self.output_deadline = None
        self._unaligned = True

    def task_done(self, task: SnapshotTask, now_ms: int) -> None:
        if task is self.channel_task:
            self._file = task.result
        else:
            self._operators = task.result
        self._async_ms = max(self._async_ms, now_ms - self._sync_end)

    # -- what follows --------------------------------------------------------------------------------------------------

    def _channel_state_is_whole(self) -> bool:
        return not self.capturing and not self.waiting_outputs

    def channel_state_is_due(self) -> bool:
        return self._records > 0 and self.channel_task is None and self._channel_state_is_whole()

    def write_channel_state(self, codec: ChannelStateCodec) -> SnapshotTask:
        parts = [InFlight(edge, sender, receiver, tuple(batches))
                 for (edge, sender, receiver), batches in self._inputs.items()] + self._outputs
        return SnapshotTask(self.checkpoint_id, lambda: codec.write(parts, self._target))

    def is_complete(self) -> bool:
        return self._operators is not None and self._channel_state_is_whole() and \
            (not self._records or self._file is not None)

    def acknowledge(self, subtask: SubtaskId, attempt: int) -> Acknowledge:
        operators = self._operators or ()
        handles = [handle for operator in operators for handle in operator.keyed]
        other = sum(operator.operator.size for operator in operators if operator.operator is not None)
        in_flight = self._file.size if self._file is not None else 0
        stats = SubtaskStats(
            self._sync_ms, max(0, self._async_ms), self._alignment_ms, self._action.start_delay_ms,
            state_bytes=sum(handle.size for handle in handles) + other + in_flight,
            incremental_bytes=sum(handle.new_bytes for handle in handles) + other + in_flight,
            in_flight_bytes=in_flight, in_flight_records=self._records,
            processed_records=self.processed_records, unaligned=self._unaligned)
        return Acknowledge(subtask, self.checkpoint_id, SubtaskSnapshot(operators, self._file, self._ended), stats,
                           attempt)

    def cancel(self) -> None:
        for task in (self.state_task, self.channel_task):
            if task is not None:
                task.cancel()

"""A checkpoint between its trigger and its end, as the coordinator sees it."""

from __future__ import annotations

from checkpoint.protocol.failures import AckOutcome
from checkpoint.protocol.messages import Acknowledge, Publish, SubtaskId
from checkpoint.protocol.statistics import CheckpointRecord
from checkpoint.runtime.contracts import Barrier, CheckpointKind, SubtaskSnapshot


class PendingCheckpoint:
    """Who has acknowledged, who has not, and when it is too late. Times are the coordinator's own."""

    def __init__(self, barrier: Barrier, missing: set[SubtaskId], record: CheckpointRecord, *, started_ms: int,
                 timeout_ms: int, late_after_ms: int, request_id: str | None) -> None:
        self.barrier, self.id, self.options = barrier, barrier.checkpoint_id, barrier.options
        self.missing, self.record, self.request_id = missing, record, request_id
        self.total = len(missing)
        self.triggered: set[SubtaskId] = set()
        self.builds_on: frozenset[int] = frozenset()
        """Completed checkpoints whose files it may refer to."""
        self.snapshots: dict[SubtaskId, SubtaskSnapshot] = {}
        self.deadline_ms = started_ms + timeout_ms
        self.ask_at_ms: int | None = started_ms + late_after_ms * 9 // 10
        self.late_at_ms: int | None = started_ms + late_after_ms
        self.started_ms = started_ms
        self._ended = 0

    def acknowledge(self, ack: Acknowledge, now_ms: int) -> AckOutcome:
        subtask = ack.subtask
        if subtask not in self.missing:
            same = self.snapshots.get(subtask) == ack.snapshot
            return AckOutcome.DUPLICATE if same else AckOutcome.CONTRADICTORY
        self.missing.discard(subtask)
        self.snapshots[subtask] = ack.snapshot
        self._ended += ack.snapshot.ended
        self.record.acknowledged(subtask, ack, now_ms)
        return AckOutcome.ACCEPTED

    @property
    def is_savepoint(self) -> bool:
        return self.options.kind is CheckpointKind.SAVEPOINT

    @property
    def is_acknowledged(self) -> bool:
        return not self.missing

    @property
    def all_ended(self) -> bool:
        """Every subtask had ended when it took its snapshot: nothing can come after this checkpoint."""
        return self._ended == self.total

    def next_time(self) -> int:
        """When the coordinator has to look at it again."""
        return min(at for at in (self.ask_at_ms, self.late_at_ms, self.deadline_ms) if at is not None)

    def publish(self) -> Publish:
        return Publish(self.id, self.barrier.timestamp, self.options, self.snapshots)

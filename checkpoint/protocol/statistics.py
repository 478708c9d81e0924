"""Statistics of checkpoints: a bounded history with every subtask's figures, counters, and summaries with percentiles.

The dictionaries have the field names of Flink's REST API, so that its users and tools find what they know. Beyond it,
`subtasks` tells when the barrier reached each subtask and where the time went.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from checkpoint.protocol.messages import Acknowledge, JobPlan, SubtaskId, SubtaskStats
from checkpoint.runtime.contracts import CheckpointKind, CheckpointOptions

SUMMARY_WINDOW = 10_000
_SUMMARY_FIELDS = ("checkpointed_size", "state_size", "end_to_end_duration", "alignment_buffered", "processed_data",
                   "persisted_data")
_PERCENTILES = {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "p999": 99.9}


class CheckpointStatus(StrEnum):
    IN_PROGRESS = "IN_PROGRESS"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"


class CheckpointRecord:
    """What is known of one checkpoint; filled while it runs, kept in the history after."""

    __slots__ = ("_acks", "checkpointed_size", "discarded", "end_ms", "failure", "id", "in_flight_size",
                 "latest_ack_ms", "num_subtasks", "operators", "options", "path", "plan", "processed", "state_size",
                 "status", "trigger_ms")

    def __init__(self, checkpoint_id: int, options: CheckpointOptions, trigger_ms: int, plan: JobPlan,
                 num_subtasks: int) -> None:
        self.id, self.options, self.trigger_ms, self.plan = checkpoint_id, options, trigger_ms, plan
        self.num_subtasks = num_subtasks
        self.status = CheckpointStatus.IN_PROGRESS
        self.latest_ack_ms: int | None = None
        self.end_ms: int | None = None
        self.checkpointed_size = self.state_size = self.in_flight_size = self.processed = 0
        self.path: str | None = None
        self.failure: str | None = None
        self.discarded = False
        self.operators: dict[str, int] = {}
        """Bytes of state by operator uid."""
        self._acks: dict[SubtaskId, tuple[int, SubtaskStats]] = {}

    def acknowledged(self, subtask: SubtaskId, ack: Acknowledge, now_ms: int) -> None:
        stats = ack.stats
        self._acks[subtask] = (now_ms, stats)
        self.latest_ack_ms = now_ms
        self.checkpointed_size += stats.incremental_bytes
        self.state_size += stats.state_bytes
        self.in_flight_size += stats.in_flight_bytes
        self.processed += stats.processed_records
        for operator in ack.snapshot.operators:
            self.operators[operator.uid] = self.operators.get(operator.uid, 0) + operator.size

    @property
    def duration_ms(self) -> int:
        """From the trigger to the end, or to the latest acknowledgement while it runs."""
        end = self.end_ms if self.end_ms is not None else self.latest_ack_ms
        return 0 if end is None else max(0, end - self.trigger_ms)

    def to_rest(self) -> dict[str, Any]:
        """An entry of Flink's history."""
        savepoint = self.options.kind is CheckpointKind.SAVEPOINT
        data: dict[str, Any] = {
            "className": self.status.value.lower(), "id": self.id, "status": self.status.value,
            "is_savepoint": savepoint,
            "savepointFormat": ("NATIVE" if self.options.native else "CANONICAL") if savepoint else None,
            "trigger_timestamp": self.trigger_ms,
            "latest_ack_timestamp": -1 if self.latest_ack_ms is None else self.latest_ack_ms,
            "checkpointed_size": self.checkpointed_size, "state_size": self.state_size,
            "end_to_end_duration": self.duration_ms, "alignment_buffered": 0, "processed_data": self.processed,
            "persisted_data": self.in_flight_size, "num_subtasks": self.num_subtasks,
            "num_acknowledged_subtasks": len(self._acks), "checkpoint_type": self._type(), "tasks": {},
        }
        if self.status is CheckpointStatus.COMPLETED:
            data |= {"external_path": self.path, "discarded": self.discarded}
        elif self.status is CheckpointStatus.FAILED:
            data |= {"failure_timestamp": self.end_ms, "failure_message": self.failure}
        return data

    def to_rest_details(self) -> dict[str, Any]:
        """Flink's details: the entry, a summary of each task, and beyond Flink the state of each operator."""
        return self.to_rest() | {
            "operators": dict(self.operators),
            "tasks": {task.task: self._task(task.task, task.parallelism) for task in self.plan.tasks}}

    def to_rest_subtasks(self, task: str) -> dict[str, Any] | None:
        """Flink's details of one task: every subtask with its durations. None if there is no such task."""
        planned = next((planned for planned in self.plan.tasks if planned.task == task), None)
        if planned is None:
            return None
        acks = self._acks_of(task, planned.parallelism)
        entries = [_subtask(index, ack, self.trigger_ms) for index, ack in enumerate(acks)]
        stats = [ack[1] for ack in acks if ack is not None]
        return self._task(task, planned.parallelism) | {"subtasks": entries, "summary": {
            "state_size": summarize(stat.state_bytes for stat in stats),
            "checkpointed_size": summarize(stat.incremental_bytes for stat in stats),
            "end_to_end_duration": summarize(max(0, ack[0] - self.trigger_ms) for ack in acks if ack is not None),
            "checkpoint_duration": {"sync": summarize(stat.sync_ms for stat in stats),
                                    "async": summarize(stat.async_ms for stat in stats)},
            "alignment": {"buffered": summarize(0 for _ in stats),
                          "processed": summarize(stat.processed_records for stat in stats),
                          "persisted": summarize(stat.in_flight_bytes for stat in stats),
                          "duration": summarize(stat.alignment_ms for stat in stats)},
            "start_delay": summarize(stat.start_delay_ms for stat in stats)}}

    def _acks_of(self, task: str, parallelism: int) -> list[tuple[int, SubtaskStats] | None]:
        return [self._acks.get(SubtaskId(task, index)) for index in range(parallelism)]

    def _task(self, task: str, parallelism: int) -> dict[str, Any]:
        acks = [ack for ack in self._acks_of(task, parallelism) if ack is not None]
        latest = max((at for at, _ in acks), default=-1)
        return {"id": self.id, "status": self.status.value, "latest_ack_timestamp": latest,
                "checkpointed_size": sum(stats.incremental_bytes for _, stats in acks),
                "state_size": sum(stats.state_bytes for _, stats in acks),
                "end_to_end_duration": max(0, latest - self.trigger_ms) if acks else -1, "alignment_buffered": 0,
                "processed_data": sum(stats.processed_records for _, stats in acks),
                "persisted_data": sum(stats.in_flight_bytes for _, stats in acks),
                "num_subtasks": parallelism, "num_acknowledged_subtasks": len(acks)}

    def _type(self) -> str:
        if self.options.kind is CheckpointKind.SAVEPOINT:
            return "SYNC_SAVEPOINT" if self.options.stop else "SAVEPOINT"
        return "UNALIGNED_CHECKPOINT" if self.options.unaligned else "CHECKPOINT"


def _subtask(index: int, ack: tuple[int, SubtaskStats] | None, trigger_ms: int) -> dict[str, Any]:
    if ack is None:
        return {"index": index, "status": "pending_or_failed"}
    at, stats = ack
    return {"index": index, "status": "completed", "ack_timestamp": at,
            "end_to_end_duration": max(0, at - trigger_ms), "checkpointed_size": stats.incremental_bytes,
            "state_size": stats.state_bytes, "checkpoint": {"sync": stats.sync_ms, "async": stats.async_ms},
            "alignment": {"buffered": 0, "processed": stats.processed_records, "persisted": stats.in_flight_bytes,
                          "duration": stats.alignment_ms},
            "start_delay": stats.start_delay_ms, "unaligned_checkpoint": stats.unaligned, "aborted": False}


def summarize(values: Iterable[int]) -> dict[str, Any]:
    """min, max, avg and percentiles of a sample, as Flink shows them."""
    ordered = sorted(values)
    if not ordered:
        return {"min": 0, "max": 0, "avg": 0, **dict.fromkeys(_PERCENTILES, "NaN")}
    return {"min": ordered[0], "max": ordered[-1], "avg": sum(ordered) // len(ordered),
            **{name: _percentile(ordered, percent) for name, percent in _PERCENTILES.items()}}


def _percentile(ordered: Sequence[int], percent: float) -> float:
    position = percent / 100 * (len(ordered) + 1)
    if position < 1:
        return float(ordered[0])
    if position >= len(ordered):
        return float(ordered[-1])
    lower = int(position)
    return ordered[lower - 1] + (position - lower) * (ordered[lower] - ordered[lower - 1])


class CheckpointStatistics:
    """All checkpoints of a job: counters since its start, the last ones in detail."""

    def __init__(self, history: int = 10) -> None:
        self._history: deque[CheckpointRecord] = deque(maxlen=history)
        self._in_progress: dict[int, CheckpointRecord] = {}
        self._samples: dict[str, deque[int]] = {name: deque(maxlen=SUMMARY_WINDOW) for name in _SUMMARY_FIELDS}
        self._completed: CheckpointRecord | None = None
        self._savepoint: CheckpointRecord | None = None
        self._failed: CheckpointRecord | None = None
        self._restored: dict[str, Any] | None = None
        self.counts = {"restored": 0, "total": 0, "in_progress": 0, "completed": 0, "failed": 0}
        self.acknowledgements: dict[str, int] = {}

    def started(self, record: CheckpointRecord) -> None:
        self._in_progress[record.id] = record
        self.counts["total"] += 1
        self.counts["in_progress"] = len(self._in_progress)

    def completed(self, record: CheckpointRecord, path: str, now_ms: int) -> None:
        record.status, record.path = CheckpointStatus.COMPLETED, path
        self._end(record, now_ms)
        self.counts["completed"] += 1
        entry = record.to_rest()
        for name, sample in self._samples.items():
            sample.append(entry[name])
        if record.options.kind is CheckpointKind.SAVEPOINT:
            self._savepoint = record
        else:
            self._completed = record

    def failed(self, record: CheckpointRecord, message: str, now_ms: int) -> None:
        record.status, record.failure = CheckpointStatus.FAILED, message
        self._end(record, now_ms)
        self.counts["failed"] += 1
        self._failed = record

    def restored(self, checkpoint_id: int, path: str, is_savepoint: bool, now_ms: int) -> None:
        self.counts["restored"] += 1
        self._restored = {"id": checkpoint_id, "restore_timestamp": now_ms, "is_savepoint": is_savepoint,
                          "external_path": path}

    def discarded(self, checkpoint_ids: Iterable[int]) -> None:
        ids = set(checkpoint_ids)
        for record in self._history:
            if record.id in ids:
                record.discarded = True

    def count_acknowledgement(self, outcome: str) -> None:
        self.acknowledgements[outcome] = self.acknowledgements.get(outcome, 0) + 1

    def record(self, checkpoint_id: int) -> CheckpointRecord | None:
        """A checkpoint that is in progress or remembered."""
        known = self._in_progress.get(checkpoint_id)
        return known or next((record for record in self._history if record.id == checkpoint_id), None)

    def to_rest(self) -> dict[str, Any]:
        """Flink's `/jobs/:jobid/checkpoints`, newest first."""
        records = [*self._history, *self._in_progress.values()]
        return {"counts": dict(self.counts), "summary": self.summary(),
                "latest": {"completed": _entry(self._completed), "savepoint": _entry(self._savepoint),
                           "failed": _entry(self._failed), "restored": self._restored},
                "history": [record.to_rest() for record in sorted(records, key=lambda record: -record.id)]}

    def summary(self) -> Mapping[str, Any]:
        return {name: summarize(sample) for name, sample in self._samples.items()}

    def _end(self, record: CheckpointRecord, now_ms: int) -> None:
        record.end_ms = now_ms
        self._in_progress.pop(record.id, None)
        self.counts["in_progress"] = len(self._in_progress)
        self._history.append(record)


def _entry(record: CheckpointRecord | None) -> dict[str, Any] | None:
    return None if record is None else record.to_rest()

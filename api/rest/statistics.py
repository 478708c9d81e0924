"""Checkpoint records of a job as Flink's REST shows them: counts, summary, latest, history, details."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

SUMMARISED = ("checkpointed_size", "state_size", "end_to_end_duration", "alignment_buffered", "processed_data",
              "persisted_data")
_QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99), ("p999", 0.999))
_TASK_FIELDS = ("id", "status", "latest_ack_timestamp", "checkpointed_size", "state_size", "end_to_end_duration",
                "alignment_buffered", "processed_data", "persisted_data", "num_subtasks", "num_acknowledged_subtasks")
_DEFAULTS: dict[str, Any] = {
    "status": "COMPLETED", "is_savepoint": False, "savepointFormat": None, "trigger_timestamp": 0,
    "latest_ack_timestamp": 0, "checkpointed_size": 0, "state_size": 0, "end_to_end_duration": 0,
    "alignment_buffered": 0, "processed_data": 0, "persisted_data": 0, "num_subtasks": 0,
    "num_acknowledged_subtasks": 0, "checkpoint_type": "CHECKPOINT", "external_path": None, "discarded": False,
    "alignment_duration": 0,
}


def summary(values: Iterable[float]) -> dict[str, float]:
    """Minimum, maximum, average and quantiles; zeros where there is nothing."""
    ordered = sorted(values)
    if not ordered:
        return {"min": 0, "max": 0, "avg": 0, **{name: 0.0 for name, _ in _QUANTILES}}
    quantiles = {name: float(ordered[min(len(ordered) - 1, int(share * len(ordered)))]) for name, share in _QUANTILES}
    return {"min": int(ordered[0]), "max": int(ordered[-1]), "avg": int(sum(ordered) / len(ordered)), **quantiles}


def checkpoint_json(record: dict[str, Any], *, tasks: bool = False) -> dict[str, Any]:
    """One checkpoint object; every field that Flink's client needs is there, whatever the job reported."""
    shown = {"id": record["id"], **{name: record.get(name, default) for name, default in _DEFAULTS.items()}}
    shown["className"] = {"COMPLETED": "completed", "FAILED": "failed"}.get(shown["status"], "in_progress")
    shown["tasks"] = {vertex: _task_json(record["id"], task) for vertex, task in _tasks(record).items()} if tasks else {}
    if shown["status"] == "FAILED":
        shown["failure_timestamp"] = record.get("failure_timestamp") or shown["latest_ack_timestamp"]
        shown["failure_message"] = record.get("failure_message")
    return shown


_COUNT_METRICS = {"total": "totalNumberOfCheckpoints", "in_progress": "numberOfInProgressCheckpoints",
                  "completed": "numberOfCompletedCheckpoints", "failed": "numberOfFailedCheckpoints"}


def checkpoints_json(records: Sequence[dict[str, Any]], restored: dict[str, Any] | None,
                     metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of `/jobs/:id/checkpoints` from records, newest first; a job itself counts beyond what is kept of it."""
    history = [checkpoint_json(record) for record in records]
    completed = [item for item in history if item["status"] == "COMPLETED"]
    failed = [item for item in history if item["status"] == "FAILED"]
    counted = {"total": len(history), "in_progress": len(history) - len(completed) - len(failed),
               "completed": len(completed), "failed": len(failed)}
    told = {name: metrics[metric] for name, metric in _COUNT_METRICS.items() if isinstance(metrics.get(metric), int)}
    return {
        "counts": {"restored": int(restored is not None), **counted, **told},
        "summary": {name: summary(_number(item[name]) for item in completed) for name in SUMMARISED},
        "latest": {
            "completed": next((item for item in completed if not item["is_savepoint"]), None),
            "savepoint": next((item for item in completed if item["is_savepoint"]), None),
            "failed": next(iter(failed), None),
            "restored": restored,
        },
        "history": history,
    }


def with_alignment(record: dict[str, Any]) -> dict[str, Any]:
    """The record with its longest alignment, which Flink tells per subtask only."""
    durations = [_number(subtask.get("alignment", {}).get("duration")) for task in _tasks(record).values()
                 for subtask in task.get("subtasks", []) if isinstance(subtask, dict)]
    return {**record, "alignment_duration": max(durations)} if durations else record


def subtasks_json(record: dict[str, Any], vertex: str) -> dict[str, Any] | None:
    """The answer of `/details/:cid/subtasks/:vertex`; None where the checkpoint knows no such vertex."""
    task = _tasks(record).get(vertex)
    if task is None:
        return None
    subtasks = [_subtask_json(index, item) for index, item in enumerate(task.get("subtasks", []))]
    done = [item for item in subtasks if item["status"] == "completed"]
    return {
        **_task_json(record["id"], task),
        "summary": {
            **{name: summary(_number(item[name]) for item in done)
               for name in ("state_size", "checkpointed_size", "end_to_end_duration", "start_delay")},
            "checkpoint_duration": {name: summary(_number(item["checkpoint"][name]) for item in done)
                                    for name in ("sync", "async")},
            "alignment": {name: summary(_number(item["alignment"][name]) for item in done)
                          for name in ("buffered", "processed", "persisted", "duration")},
        },
        "subtasks": subtasks,
    }


def _tasks(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    tasks = record.get("tasks")
    return {vertex: task for vertex, task in tasks.items() if isinstance(task, dict)} if isinstance(tasks, dict) else {}


def _task_json(checkpoint_id: int, task: dict[str, Any]) -> dict[str, Any]:
    shown = {name: task.get(name, 0) for name in _TASK_FIELDS}
    shown["id"], shown["status"] = checkpoint_id, task.get("status", "COMPLETED")
    return shown


def _subtask_json(index: int, item: dict[str, Any]) -> dict[str, Any]:
    if item.get("status", "completed").lower() != "completed":
        return {"index": item.get("index", index), "status": "pending_or_failed"}
    durations, alignment = item.get("checkpoint", {}), item.get("alignment", {})
    return {
        "index": item.get("index", index), "status": "completed",
        **{name: item.get(name, 0) for name in ("ack_timestamp", "end_to_end_duration", "checkpointed_size",
                                                "state_size", "start_delay")},
        "checkpoint": {name: durations.get(name, 0) for name in ("sync", "async")},
        "alignment": {name: alignment.get(name, 0) for name in ("buffered", "processed", "persisted", "duration")},
        "unaligned_checkpoint": bool(item.get("unaligned_checkpoint", False)), "aborted": bool(item.get("aborted", False)),
    }


def _number(value: Any) -> float:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else 0

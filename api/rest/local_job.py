"""A running local job as the service sees it: its handle's statistics in the service's shapes, and commands done on it."""

from __future__ import annotations

import threading
import time
from typing import Any

from checkpoint.protocol.settings import CheckpointSettings
from checkpoint.runtime.job import JobHandle
from statebackend.errors import InvalidRequest

_ENDED = ("COMPLETED", "FAILED")


class LocalJob:
    """Fulfils `api.rest.reporter.ReportedJob` for a job of the thread or process runtime."""

    def __init__(self, handle: JobHandle) -> None:
        self._handle = handle
        self.job_id = str(handle.job_id)
        self._started = time.time_ns() // 1_000_000
        self._sent: dict[int, str] = {}
        self._told_failures = 0
        self._lock = threading.Lock()

    def registration(self) -> dict[str, Any]:
        handle, plan, settings = self._handle, self._handle.plan(), self._handle.settings
        self._sent.clear()
        vertex_of = {uid: task["id"] for task in plan["tasks"] for uid in task["operators"]}
        inputs: dict[str, list[dict[str, Any]]] = {task["id"]: [] for task in plan["tasks"]}
        for number, edge in enumerate(plan["edges"]):
            source, target = vertex_of[edge["source"]], vertex_of[edge["target"]]
            if source != target:
                inputs[target].append({"id": source, "num": number, "exchange": "pipelined_bounded",
                                       "ship_strategy": str(edge["exchange"]).upper()})
        return {
            "name": handle.flow.name, "state": self._state(), "start_time": self._started, "runtime": handle.runtime,
            "max_parallelism": plan["max_parallelism"], "checkpoint_dir": handle.root, "backend": handle.backend,
            "vertices": [{"id": task["id"], "name": task["name"], "parallelism": task["parallelism"],
                          "max_parallelism": plan["max_parallelism"], "uids": task["operators"]} for task in plan["tasks"]],
            "plan": {"nodes": [{"id": task["id"], "parallelism": task["parallelism"], "operator": "",
                                "operator_strategy": "", "description": task["name"], "optimizer_properties": {},
                                "inputs": inputs[task["id"]]} for task in plan["tasks"]]},
            "checkpoint_config": _configuration(settings, handle.backend),
            "restored": handle.statistics()["checkpoints"]["latest"]["restored"],
        }

    def report(self) -> dict[str, Any]:
        statistics = self._handle.statistics()
        failures = statistics["exceptions"]
        fresh, self._told_failures = failures[self._told_failures:], len(failures)
        last = statistics["checkpoints"]["latest"]["completed"] or {}
        return {
            "state": self._state(), "checkpoints": self._changed(statistics["checkpoints"]["history"]),
            "exceptions": [{"timestamp": item["timestamp"],
                            "message": item.get("stacktrace") or item["message"]} for item in fresh],
            "vertices": self._vertices(statistics["tasks"]),
            "metrics": {
                "numRestarts": statistics["restarts"], "uptime": statistics["duration_ms"],
                "lastCheckpointDuration": last.get("end_to_end_duration"),
                "lastCheckpointSize": last.get("checkpointed_size"),
                "lastCheckpointFullSize": last.get("state_size"), "lastCompletedCheckpointId": last.get("id"),
                **{f"{uid}.{name}": value for uid, counters in statistics["records"].items()
                   for name, value in counters.items()}},
        }

    def execute(self, kind: str, arguments: dict[str, Any]) -> dict[str, Any]:
        handle = self._handle
        target, form = arguments.get("target"), str(arguments.get("format", "open"))
        if kind == "checkpoint":
            path = handle.trigger_checkpoint(full=bool(arguments.get("full")))
            return {"location": path, "checkpoint_id": handle.result().checkpoint_id}
        if kind == "savepoint":
            return {"location": handle.trigger_savepoint(target, format=form)}
        if kind == "stop":
            return {"location": handle.stop_with_savepoint(target, format=form, drain=bool(arguments.get("drain")))}
        if kind == "cancel":
            handle.cancel()
            return {}
        raise InvalidRequest("a job does not know this command", found=kind)

    def _state(self) -> str:
        return str(self._handle.state.value)

    def _changed(self, history: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Records that are new or have another status or path since they were sent; ended ones with all details."""
        with self._lock:
            changed = []
            for record in history:
                mark = f"{record['status']} {record.get('discarded')}"
                if self._sent.get(record["id"]) != mark:
                    self._sent[record["id"]] = mark
                    changed.append(self._detailed(record) if record["status"] in _ENDED else record)
            return changed

    def _detailed(self, record: dict[str, Any]) -> dict[str, Any]:
        details = self._handle.checkpoint_details(record["id"])
        if details is None:
            return record
        for task, summary in details["tasks"].items():
            found = self._handle.checkpoint_subtasks(record["id"], task)
            summary["subtasks"] = found["subtasks"] if found is not None else []
        return details

    def _vertices(self, subtasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for subtask in subtasks:
            vertex = found.setdefault(subtask["task"], {"id": subtask["task"], "records_in": 0, "records_out": 0,
                                                        "back_pressure": 0.0})
            vertex["records_in"] += subtask.get("records_in", 0)
            vertex["records_out"] += subtask.get("records_out", 0)
            load = subtask.get("load", {})
            vertex["back_pressure"] = max(vertex["back_pressure"], load.get("back_pressured", 0.0))
        return list(found.values())


def _configuration(settings: CheckpointSettings, backend: str) -> dict[str, Any]:
    """The settings under Flink's names."""
    return {
        "mode": "exactly_once" if settings.exactly_once else "at_least_once", "interval": settings.interval_ms or 0,
        "timeout": settings.timeout_ms, "min_pause": settings.min_pause_ms, "max_concurrent": settings.max_concurrent,
        "externalization": {"enabled": True, "delete_on_cancellation": not settings.retain_on_cancellation},
        "state_backend": backend, "unaligned_checkpoints": settings.unaligned,
        "tolerable_failed_checkpoints": settings.tolerable_failures,
        "aligned_checkpoint_timeout": settings.aligned_timeout_ms or 0,
    }

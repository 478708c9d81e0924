"""A running job as the service wants to hear of it."""

from __future__ import annotations

import time
from typing import Any

from checkpoint.runtime.job import JobHandle
from statebackend.errors import InvalidRequest


class RunningJob:
    """Fulfils the reporter's `ReportedJob` for a job of this process."""

    def __init__(self, handle: JobHandle) -> None:
        self._handle = handle
        self.job_id = handle.job_id
        self._plan = handle.plan()
        self._start_ms = int(time.time() * 1000)
        self._sent: dict[int, str] = {}
        self._last_exception: dict[str, Any] | None = None

    def registration(self) -> dict[str, Any]:
        handle, point = self._handle, self._handle.restore_point
        return {
            "name": handle.flow.name, "state": handle.state.value, "start_time": self._start_ms,
            "runtime": handle.runtime, "max_parallelism": handle.flow.max_parallelism, "checkpoint_dir": handle.root,
            "backend": handle.backend, "vertices": self._vertices(),
            "plan": {"nodes": self._nodes(), **self._plan},
            "checkpoint_config": handle.settings.rest_config(state_backend=handle.backend,
                                                             checkpoint_storage=handle.root or "memory"),
            "restored": None if point is None else {
                "id": point.metadata.checkpoint_id, "external_path": point.url,
                "is_savepoint": point.metadata.is_savepoint, "restore_timestamp": self._start_ms},
        }

    def report(self) -> dict[str, Any]:
        statistics = self._handle.statistics()
        new = self._unsent(statistics["exceptions"])
        return {"state": statistics["state"], "checkpoints": self._changed(statistics["checkpoints"]["history"]),
                "exceptions": new, "metrics": self._metrics(statistics), "vertices": self._live_vertices(statistics),
                "operators": self._operators(statistics)}

    def execute(self, kind: str, arguments: dict[str, Any]) -> dict[str, Any]:
        handle = self._handle
        target, form = arguments.get("target"), str(arguments.get("format") or "open")
        if kind == "checkpoint":
            location = handle.trigger_checkpoint(full=bool(arguments.get("full")))
            return {"location": location, "checkpoint_id": handle.result().checkpoint_id}
        if kind == "savepoint":
            return {"location": handle.trigger_savepoint(target, format=form)}
        if kind == "stop":
            return {"location": handle.stop_with_savepoint(target, format=form, drain=bool(arguments.get("drain")))}
        if kind == "cancel":
            handle.cancel()
            return {}
        raise InvalidRequest("a job does not know this command", found=kind)

    def _unsent(self, exceptions: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Failures after the last one sent; of old ones the job keeps only so many."""
        known = self._last_exception
        start = exceptions.index(known) + 1 if known is not None and known in exceptions else 0
        self._last_exception = exceptions[-1] if exceptions else known
        return exceptions[start:]

    def _changed(self, history: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Records that are new or changed since the last report, with every task and subtask."""
        changed = []
        for entry in history:
            seen = f"{entry['status']} {entry['num_acknowledged_subtasks']} {entry.get('discarded')}"
            if self._sent.get(entry["id"]) == seen:
                continue
            self._sent[entry["id"]] = seen
            details = self._handle.checkpoint_details(entry["id"])
            if details is not None:
                details["tasks"] = {task: {**summary, **(self._handle.checkpoint_subtasks(entry["id"], task) or {})}
                                    for task, summary in details["tasks"].items()}
                changed.append(details)
        oldest = min((entry["id"] for entry in history), default=0)
        self._sent = {number: seen for number, seen in self._sent.items() if number >= oldest}
        return changed

    def _vertices(self) -> list[dict[str, Any]]:
        return [{"id": task["id"], "name": task["name"], "parallelism": task["parallelism"],
                 "max_parallelism": self._handle.flow.max_parallelism, "uids": task["operators"]}
                for task in self._plan["tasks"]]

    def _nodes(self) -> list[dict[str, Any]]:
        """The plan as Flink's web page draws it: tasks and the exchanges between them."""
        task_of = {uid: task["id"] for task in self._plan["tasks"] for uid in task["operators"]}
        nodes = []
        for task in self._plan["tasks"]:
            inputs = [{"num": number, "id": task_of[edge["source"]], "ship_strategy": edge["exchange"].upper(),
                       "exchange": "pipelined_bounded"}
                      for number, edge in enumerate(self._plan["edges"])
                      if task_of[edge["target"]] == task["id"] and task_of[edge["source"]] != task["id"]]
            nodes.append({"id": task["id"], "parallelism": task["parallelism"], "operator": "", "inputs": inputs,
                          "description": task["name"], "operator_strategy": "", "optimizer_properties": {}})
        return nodes

    def _live_vertices(self, statistics: dict[str, Any]) -> list[dict[str, Any]]:
        live: dict[str, dict[str, Any]] = {}
        for subtask in statistics["tasks"]:
            vertex = live.setdefault(subtask["task"], {"id": subtask["task"], "records_in": 0, "records_out": 0,
                                                       "back_pressure": 0.0, "subtasks": []})
            load = subtask.get("load", {})
            vertex["records_in"] += subtask.get("records_in", 0)
            vertex["records_out"] += subtask.get("records_out", 0)
            vertex["back_pressure"] = max(vertex["back_pressure"], load.get("back_pressured", 0.0))
            vertex["subtasks"].append({"index": subtask["subtask"], "phase": subtask["phase"], **load})
        return list(live.values())

    def _operators(self, statistics: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """What is told of each operator that has state, or of whose keys enough were seen."""
        last = statistics["checkpoints"]["latest"]["completed"]
        details = self._handle.checkpoint_details(last["id"]) if last is not None else None
        told = {uid: {"state_bytes": size} for uid, size in (details or {}).get("operators", {}).items() if size}
        for uid, found in statistics["key_groups"].items():
            told[uid] = {**told.get(uid, {}), "key_group_skew": found["skew"], "busiest_key_group": found["key_group"]}
        return told

    def _metrics(self, statistics: dict[str, Any]) -> dict[str, Any]:
        checkpoints = statistics["checkpoints"]
        last = checkpoints["latest"]["completed"] or {}
        return {
            "numRestarts": statistics["restarts"], "uptime": statistics["duration_ms"],
            "numberOfCompletedCheckpoints": checkpoints["counts"]["completed"],
            "numberOfFailedCheckpoints": checkpoints["counts"]["failed"],
            "numberOfInProgressCheckpoints": checkpoints["counts"]["in_progress"],
            "totalNumberOfCheckpoints": checkpoints["counts"]["total"],
            "lastCheckpointDuration": last.get("end_to_end_duration"),
            "lastCheckpointSize": last.get("checkpointed_size"), "lastCheckpointFullSize": last.get("state_size"),
            "lastRestoreDuration": statistics["last_restore_ms"],
            "lastCheckpointExternalPath": last.get("external_path"), "lastCompletedCheckpointId": last.get("id"),
            "numRecordsIn": sum(counters["records_in"] for counters in statistics["records"].values()),
            "numRecordsOut": sum(counters["records_out"] for counters in statistics["records"].values()),
        }

"""A streaming query as the service shows it: a job whose checkpoints are its epochs, and which takes commands.

Nothing here knows HTTP: who carries reports and commands is registered by entry point (`holdfast.reporters`).
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, Protocol

from checkpoint.storage.store import FileStore
from spark_integration.epoch_store import EpochStore
from spark_integration.query_savepoints import list_epochs, operators_of, savepoint
from statebackend.errors import HoldfastError, InvalidRequest

CLOSE_SECONDS = 600.0
"""How long the end of a query waits for a savepoint that it was stopped with."""


class Reporting(Protocol):
    """Reports a job until it is closed."""

    def start(self) -> Reporting: ...

    def close(self, timeout: float = ...) -> None: ...


class ReportedQuery:
    """One query and the folder of its state. Calls come from the threads of whoever reports it."""

    def __init__(self, query: Any, checkpoint: str | os.PathLike[str], storage: Mapping[str, Any] | None = None) -> None:
        self._query, self._checkpoint, self._storage = query, os.fspath(checkpoint), dict(storage or {})
        self._store = FileStore.at(self._checkpoint, **self._storage)
        self.job_id = str(query.id).replace("-", "")
        self._started_ms = int(time.time() * 1000)
        self._last_epoch = -1
        self._vertices: list[dict[str, Any]] = []
        self._state_bytes: dict[str, int] = {}
        self._restore_ms: int | None = None
        self._ending: str | None = None
        self._busy = 0
        self._failure_told = False

    def registration(self) -> dict[str, Any]:
        query = self._query
        return {"name": query.name or f"query {self.job_id[:8]}", "state": "RUNNING", "start_time": self._started_ms,
                "runtime": "spark", "checkpoint_dir": self._store.url, "vertices": [],
                "checkpoint_config": {"checkpoint_storage": self._store.url}}

    def report(self) -> dict[str, Any]:
        """What is new since the last report: epochs as checkpoints, progress as metrics, a failure once."""
        state = self._state()
        return {"state": state, "checkpoints": self._new_epochs(), "vertices": self._vertices, "metrics": self._metrics(),
                "operators": {uid: {"state_bytes": size} for uid, size in self._state_bytes.items()},
                "exceptions": self._failure() if state == "FAILED" else []}

    def execute(self, kind: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Savepoint, stop with savepoint, cancel. A query's checkpoints are its batches, so none is triggered."""
        if kind == "cancel":
            self._stop("CANCELED")
            return {}
        if kind not in ("savepoint", "stop"):
            raise InvalidRequest(f"a Spark query does not take the command {kind}", hint="each of its batches ends with a "
                                 "checkpoint of its own; savepoint, stop and cancel are what it takes")
        if arguments.get("drain"):
            raise InvalidRequest("a Spark query can't be drained", hint="stop it without drain")
        target = arguments.get("target")
        if not target:
            raise InvalidRequest("name the folder of the savepoint", hint="a Spark query has no default for it")
        self._busy += 1
        try:
            if kind == "stop":
                self._stop("FINISHED")
            return {"location": self._savepoint(str(target), str(arguments.get("format") or "open"))}
        finally:
            self._busy -= 1

    def _savepoint(self, target: str, form: str) -> str:
        destination = f"{target.rstrip('/')}/savepoint-{self.job_id[:6]}-{secrets.token_hex(6)}"
        return savepoint(self._checkpoint, destination, checkpoint_location=self._spark_checkpoint(), format=form,
                         storage=self._storage)

    def _spark_checkpoint(self) -> str:
        """Where Spark keeps its own log of the query; the JVM writes local URLs with one slash."""
        location = str(self._query._jsq.streamingQuery().resolvedCheckpointRoot())
        return location.removeprefix("file:") if location.startswith("file:/") else location

    def _stop(self, ending: str) -> None:
        self._ending = ending
        self._query.stop()

    def _state(self) -> str:
        """A query that was stopped with a savepoint has not ended before that is there."""
        if self._query.isActive:
            return "RUNNING"
        if self._busy:
            return "CANCELLING"
        if self._ending is None and self._query.exception() is not None:
            return "FAILED"
        return self._ending or "FINISHED"

    def _failure(self) -> list[dict[str, Any]]:
        if self._failure_told:
            return []
        self._failure_told = True
        return [{"timestamp": int(time.time() * 1000), "message": str(self._query.exception())}]

    def _new_epochs(self) -> list[dict[str, Any]]:
        """Checkpoint records of the epochs that were published since the last call."""
        try:
            uids = operators_of(self._store)
            newest = max((EpochStore(self._store, uid).latest().id.epoch for uid in uids), default=-1)
            if newest <= self._last_epoch:
                return []
            rows = [row for row in list_epochs(self._checkpoint, storage=self._storage) if row["epoch"] > self._last_epoch]
        except HoldfastError:
            return []  # the next report finds them
        self._last_epoch = newest
        latest = {row["operator"]: row for row in reversed(rows)}
        self._vertices = [_vertex(row) for row in latest.values()] or self._vertices
        self._state_bytes |= {uid: row["state_bytes"] for uid, row in latest.items()}
        self._restore_ms = next((row["restore_ms"] for row in rows if row["restore_ms"]), self._restore_ms)
        by_epoch: dict[int, list[dict[str, Any]]] = {}
        for row in rows:
            by_epoch.setdefault(row["epoch"], []).append(row)
        return [_checkpoint(epoch, by_epoch[epoch]) for epoch in sorted(by_epoch)]

    def _metrics(self) -> dict[str, Any]:
        progress = self._query.lastProgress
        if progress is None:
            return {}
        return {"batchId": progress["batchId"], "numInputRows": progress["numInputRows"],
                "inputRowsPerSecond": progress.get("inputRowsPerSecond"),
                "processedRowsPerSecond": progress.get("processedRowsPerSecond"),
                "batchDuration": progress.get("batchDuration"), "lastCompletedCheckpointId": self._last_epoch,
                "lastRestoreDuration": self._restore_ms}


def report_query(query: Any, checkpoint: str | os.PathLike[str], service: str,
                 storage: Mapping[str, Any] | None = None) -> Reporting:
    """Report a query to the service at a URL until it ends; a service that is down never disturbs it."""
    for entry in entry_points(group="holdfast.reporters"):
        reporter: Reporting = entry.load()(service, ReportedQuery(query, checkpoint, storage)).start()
        # No daemon: a driver that ends with its query still says how it ended.
        threading.Thread(target=_close_at_the_end, args=(query, reporter), name="holdfast-report").start()
        return reporter
    raise InvalidRequest("nothing here can report to a service", hint="install the whole package `holdfast`")


def _close_at_the_end(query: Any, reporter: Reporting) -> None:
    main = threading.main_thread()
    while main.is_alive() and query.isActive:
        main.join(0.5)
    reporter.close(CLOSE_SECONDS)


def _vertex(row: dict[str, Any]) -> dict[str, Any]:
    return {"id": row["operator"], "name": row["operator"], "parallelism": row["parallelism"], "uids": [row["operator"]],
            "records_in": row["rows_in"], "records_out": row["rows_out"]}


def _checkpoint(epoch: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """An epoch of all operators as one checkpoint record."""
    tasks = {row["operator"]: {
        "status": "COMPLETED", "latest_ack_timestamp": row["published_ms"], "checkpointed_size": row["new_bytes"],
        "state_size": row["state_bytes"], "end_to_end_duration": row["slowest_ms"], "num_subtasks": row["parallelism"],
        "num_acknowledged_subtasks": row["parallelism"]} for row in rows}
    published, slowest = max(row["published_ms"] for row in rows), max(row["slowest_ms"] for row in rows)
    subtasks = sum(row["parallelism"] for row in rows)
    return {"id": epoch, "status": "COMPLETED", "trigger_timestamp": published - slowest, "latest_ack_timestamp": published,
            "end_to_end_duration": slowest, "checkpointed_size": sum(row["new_bytes"] for row in rows),
            "state_size": sum(row["state_bytes"] for row in rows), "num_subtasks": subtasks,
            "num_acknowledged_subtasks": subtasks, "tasks": tasks}

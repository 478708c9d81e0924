"""A sink that keeps committed records in a list: for tests and notebooks."""

from __future__ import annotations

import base64
import threading
import uuid
from typing import Any

from checkpoint.connectors.two_phase import TwoPhaseCommitSink
from checkpoint.dataflow.functions import OpenContext
from checkpoint.dataflow.records import RecordCodec
from checkpoint.runtime.contracts import Records


class CollectSink(TwoPhaseCommitSink):
    """`sink.results` holds every committed record, exactly once. Lives in one process.

    `record_type` is that of the stream unless one is given.
    """

    local_only = True

    def __init__(self, record_type: Any = None) -> None:
        self._codec, self._given = RecordCodec(record_type), record_type is not None
        self._lock = threading.Lock()
        self._open: dict[str, list[Any]] = {}
        self._committed: set[str] = set()
        self._results: list[Any] = []

    @property
    def results(self) -> list[Any]:
        """What has been committed so far; a copy."""
        with self._lock:
            return list(self._results)

    def clear(self) -> None:
        with self._lock:
            self._results.clear()

    def receives(self, record_type: Any) -> None:
        if record_type is not None and not self._given:
            self._codec = RecordCodec(record_type)

    def begin(self, ctx: OpenContext) -> Any:
        name = uuid.uuid4().hex
        with self._lock:
            self._open[name] = []
        return name

    def write(self, transaction: Any, values: list[Any], timestamps: list[int | None] | None) -> None:
        self._open[transaction].extend(values)

    def pre_commit(self, transaction: Any) -> Any:
        with self._lock:
            values = self._open.pop(transaction)
        return {"id": transaction, "records": base64.b64encode(self._codec.encode(Records(values))).decode()}

    def commit(self, transaction: Any) -> None:
        with self._lock:
            if transaction["id"] not in self._committed:
                self._committed.add(transaction["id"])
                self._results.extend(self._codec.decode(base64.b64decode(transaction["records"])).values)

    def abort(self, transaction: Any) -> None:
        with self._lock:
            self._open.pop(transaction, None)

"""Background operations on savepoints: queued, run by a few threads, with progress, cancellation, and a lasting result.

An operation that a killed service left behind is taken up again: where its destination is whole it had finished, else
what is left of the destination is removed and it runs once more.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from api.rest import savepoint_operations as work
from api.rest.registry import Operation, Registry
from statebackend.errors import Conflict, HoldfastError, Unavailable

log = logging.getLogger("holdfast.service")
Progress = Callable[[int, int], None]
_BEGAN = "began"
RECORD_AGAIN_SECONDS = 1.0


class Canceled(Exception):
    """Raised inside a running operation to end it."""


class Operations:
    """Runs operations in the order they came. All state that matters is in the registry."""

    def __init__(self, registry: Registry, *, workers: int) -> None:
        self._registry = registry
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._canceled: set[str] = set()
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=self._work, name=f"operation-{index}", daemon=True)
                         for index in range(workers)]
        for thread in self._threads:
            thread.start()

    def start(self, kind: str, arguments: dict[str, Any], operation_id: str | None = None) -> Operation:
        """Queue an operation; the same id again gives the known one and starts nothing."""
        destination = arguments.get("destination")
        if destination is not None and operation_id is None:
            for other in self._registry.unfinished_operations():
                if other.arguments.get("destination") == destination:
                    raise Conflict("another operation is writing this destination", path=destination, operation_id=other.id)
        operation, is_new = self._registry.add_operation(kind, arguments, operation_id)
        if is_new:
            self._queue.put(operation.id)
        return operation

    def cancel(self, operation_id: str) -> Operation:
        """Ask an operation to end; it leaves no partial result."""
        operation = self._registry.operation(operation_id)
        if operation.status in ("QUEUED", "RUNNING"):
            self._canceled.add(operation_id)
        if operation.status == "QUEUED":
            self._registry.update_operation(operation_id, "CANCELED", operation.progress)
        return self._registry.operation(operation_id)

    def resume(self) -> None:
        """Take up what an earlier run of the service left unfinished."""
        for operation in self._registry.unfinished_operations():
            self._queue.put(operation.id)

    def close(self) -> None:
        self._closed.set()
        for _ in self._threads:
            self._queue.put(None)

    def _work(self) -> None:
        while (operation_id := self._queue.get()) is not None:
            try:
                operation = self._registry.operation(operation_id)
                if operation.status in ("QUEUED", "RUNNING"):
                    self._run(operation)
            except Exception:
                log.exception("operation %s is left to the next start of the service", operation_id)

    def _run(self, operation: Operation) -> None:
        try:
            result = self._left_behind(operation)
            if result is None:
                result = work.run(operation.kind, operation.arguments, self._progress_of(operation.id))
        except Canceled:
            self._ended(operation.id, "CANCELED", 0.0, {})
        except HoldfastError as error:
            self._ended(operation.id, "FAILED", 0.0, {"failure": str(error), "kind": error.kind})
        except Exception as error:
            log.exception("operation failed", extra={"operation_id": operation.id})
            self._ended(operation.id, "FAILED", 0.0, {"failure": f"{type(error).__name__}: {error}"})
        else:
            self._ended(operation.id, "COMPLETED", 1.0, result)
        self._canceled.discard(operation.id)

    def _ended(self, operation_id: str, status: str, progress: float, result: dict[str, Any]) -> None:
        """Record how an operation ended. What filled the disk for it may have filled it for the records: wait for room."""
        warned = False
        while True:
            try:
                self._registry.update_operation(operation_id, status, progress, result)
                return
            except Unavailable as error:
                if not warned:
                    log.warning("operation %s is %s, which can't be recorded yet: %s", operation_id, status, error)
                warned = True
                if self._closed.wait(RECORD_AGAIN_SECONDS):
                    return  # the next start of the service takes it up

    def _left_behind(self, operation: Operation) -> dict[str, Any] | None:
        """The result of an operation that a killed service had brought to its end; else it may begin, with nothing there.

        Only what the operation itself began is taken for its work, or removed.
        """
        if operation.result.get(_BEGAN):
            if work.finished_already(operation.kind, operation.arguments):
                return work.result_of(operation.kind, operation.arguments)
            work.remove_partial(operation.arguments)
            return None
        began = {_BEGAN: True} if work.nothing_there(operation.kind, operation.arguments) else {}
        self._registry.update_operation(operation.id, "RUNNING", 0.0, began)
        return None

    def _progress_of(self, operation_id: str) -> Progress:
        last = 0.0

        def report(done: int, total: int) -> None:
            nonlocal last
            if operation_id in self._canceled:
                raise Canceled
            if time.monotonic() - last > 0.25:
                last = time.monotonic()
                self._registry.update_operation(operation_id, "RUNNING", min(done / total, 1.0) if total else 0.0)
        return report

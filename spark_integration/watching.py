"""A query listener: logs what each epoch did, and stops queries whose settings break the commit protocol."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from pyspark.sql.streaming import StreamingQueryListener

from checkpoint.storage.store import FileStore
from spark_integration.epoch_store import EpochStore
from spark_integration.query_savepoints import _epoch_row, operators_of
from statebackend.errors import HoldfastError

logger = logging.getLogger("holdfast.spark")


class EpochListener(StreamingQueryListener):  # type: ignore[misc]
    """Logs one line per operator and epoch of one checkpoint folder; `rows` keeps the last one of each operator."""

    def __init__(self, session: Any, checkpoint: str, storage: Mapping[str, Any]) -> None:
        self._session = session
        self._store = FileStore.at(checkpoint, **storage)
        self.rows: dict[str, dict[str, Any]] = {}

    def onQueryStarted(self, event: Any) -> None:
        reason = unsafe_execution(self._session, event.id)
        if reason is not None:
            logger.error("query %s is stopped: %s", event.id, reason)
            self._session.streams.get(str(event.id)).stop()

    def onQueryProgress(self, event: Any) -> None:
        try:
            for uid in operators_of(self._store):
                row = _epoch_row(EpochStore(self._store, uid).latest())
                if row != self.rows.get(uid):
                    self.rows[uid] = row
                    logger.info("%s", " ".join(f"{name}={value}" for name, value in row.items()))
        except HoldfastError as error:
            logger.warning("the epochs of %s can't be read: %s", self._store.url, error)

    def onQueryIdle(self, event: Any) -> None:
        """Nothing to tell."""

    def onQueryTerminated(self, event: Any) -> None:
        """Nothing to tell."""


def watch(session: Any, checkpoint: str | os.PathLike[str], storage: Mapping[str, Any] | None = None) -> EpochListener:
    """Log the epochs of a checkpoint folder from now on, and refuse asynchronous progress tracking."""
    listener = EpochListener(session, os.fspath(checkpoint), storage or {})
    session.streams.addListener(listener)
    return listener


def unsafe_execution(session: Any, query_id: Any) -> str | None:
    """Why a query can't keep state exactly once: it commits offsets on the side, or has no micro-batches."""
    query = session.streams.get(str(query_id))
    wrapped = getattr(query, "_jsq", None)
    if wrapped is None:
        return None
    name = str(wrapped.streamingQuery().getClass().getSimpleName())
    if "AsyncProgressTracking" in name:
        return "asynchronous progress tracking skips commits that exactly-once state needs; leave the option out"
    if "Continuous" in name:
        return "continuous processing has no micro-batches to commit with"
    return None

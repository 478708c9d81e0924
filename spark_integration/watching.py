"""A query listener that logs what each epoch did."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from pyspark.sql.streaming import StreamingQueryListener

from checkpoint.storage.store import FileStore
from spark_integration.epoch_store import EpochStore
from spark_integration.query_savepoints import _epoch_row, operators_of
from spark_integration.reporting import report_query
from statebackend.errors import HoldfastError

logger = logging.getLogger("holdfast.spark")


class EpochListener(StreamingQueryListener):  # type: ignore[misc]
    """Logs one line per operator and epoch of one checkpoint folder; `rows` keeps the last one of each operator."""

    def __init__(self, checkpoint: str, storage: Mapping[str, Any]) -> None:
        self._store = FileStore.at(checkpoint, **storage)
        self.rows: dict[str, dict[str, Any]] = {}

    def onQueryStarted(self, event: Any) -> None:
        """Nothing to tell."""

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


def watch(session: Any, checkpoint: str | os.PathLike[str], storage: Mapping[str, Any] | None = None, *,
          query: Any = None, service: str | None = None) -> EpochListener:
    """Log the epochs of a checkpoint folder from now on.

    With a started query it is also shown by the service at a URL (or at that of `spark.holdfast.service`), and takes
    savepoint, stop and cancel from there.
    """
    listener = EpochListener(os.fspath(checkpoint), storage or {})
    session.streams.addListener(listener)
    service = service or session.conf.get("spark.holdfast.service", None)
    if service is not None and query is not None:
        report_query(query, checkpoint, service, storage)
    elif service is not None:
        logger.warning("the service at %s shows a query only if it is given: watch(..., query=query)", service)
    return listener

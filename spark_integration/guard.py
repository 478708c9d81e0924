"""Refuses ways of running a query that break the commit protocol, with no call by the user: a listener of each session.

Spark calls `onQueryStarted` on the thread that will run the query's batches, before the first one. What is wrong is left
there as a local property, which reaches every task, so that the query's first task fails with the reason.

Over Spark Connect no code of ours runs on the driver, and tasks see no difference: no local property of theirs tells the
engine or its options. But the client that made the DataFrame sends the command that starts the query, and looks at it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from statebackend.errors import InvalidRequest

REFUSED = "holdfast.refused"
_ASYNCHRONOUS = "asynchronous progress tracking skips commits that exactly-once state needs; leave the option out"
_CONTINUOUS = "continuous processing has no micro-batches to commit with"

_OPERATOR = b"spark_integration.task"
"""The module of the operator's function, as it stands in any plan that holds one."""

_guarded: set[str] = set()


def guard(session: Any) -> None:
    """Watch the queries of a session, once."""
    inner = getattr(session, "_jsparkSession", None)
    if inner is None:
        _guard_client(session.client)
        return
    name = str(inner.sessionUUID())
    if name in _guarded:
        return
    from pyspark.java_gateway import ensure_callback_server_started

    gateway = session.sparkContext._gateway
    ensure_callback_server_started(gateway)
    wrapper = gateway.jvm.org.apache.spark.sql.streaming.PythonStreamingQueryListenerWrapper
    inner.streams().addListener(wrapper(_Listener(session)))
    _guarded.add(name)


class _Listener:
    """A Java listener as it stands: PySpark's own would take every progress report apart, batch by batch."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def onQueryStarted(self, event: Any) -> None:
        reason = unsafe_execution(self._session, event.id().toString())
        if reason is not None:
            self._session.sparkContext.setLocalProperty(REFUSED, reason)

    def onQueryProgress(self, event: Any) -> None:
        """Not looked at."""

    def onQueryIdle(self, event: Any) -> None:
        """Not looked at."""

    def onQueryTerminated(self, event: Any) -> None:
        """Not looked at."""

    class Java:
        implements = ("org.apache.spark.sql.streaming.PythonStreamingQueryListener",)


def unsafe_execution(session: Any, query_id: str) -> str | None:
    """Why a query can't keep state exactly once: it commits offsets on the side, or has no micro-batches."""
    query = session._jsparkSession.streams().get(query_id)
    name = str(query.streamingQuery().getClass().getSimpleName())
    if "AsyncProgressTracking" in name:
        return _ASYNCHRONOUS
    return _CONTINUOUS if "Continuous" in name else None


def _guard_client(client: Any) -> None:
    """Look at every command of a Spark Connect client before it is sent."""
    if getattr(client.execute_command, "is_guarded", False):
        return
    client.execute_command = guarded(client.execute_command)


def guarded(execute: Callable[..., Any]) -> Callable[..., Any]:
    """The same call; it raises `InvalidRequest` for a command that starts a query of ours in an unsafe way."""
    def execute_command(command: Any, *arguments: Any, **options: Any) -> Any:
        if command.HasField("write_stream_operation_start"):
            start = command.write_stream_operation_start
            given = {name.lower(): value for name, value in start.options.items()}
            if given.get("asyncprogresstrackingenabled", "").lower() == "true" and \
                    _OPERATOR in start.input.SerializeToString():
                raise InvalidRequest(_ASYNCHRONOUS)
        return execute(command, *arguments, **options)

    execute_command.is_guarded = True  # type: ignore[attr-defined]
    return execute_command

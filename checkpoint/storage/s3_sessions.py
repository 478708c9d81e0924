"""S3 sessions of this process, shared by all stores that reach the same server with the same credentials.

A session costs a hundred milliseconds of its own and new connections; a job opens several stores one after the other
(to look for its checkpoint, to restore from it, to write the next). So a session that nobody uses waits a while.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fsspec.asyn import sync

log = logging.getLogger("holdfast.storage")

IDLE_SECONDS = 60.0
"""How long a session waits for its next user; credentials that have changed on disk are seen after that."""


@dataclass
class _Session:
    filesystem: Any
    users: int = 0
    idle_since: float = 0.0


class Sessions:
    """Lends filesystems by options. Usable from several threads; a forked child starts with none."""

    def __init__(self, make: Callable[[dict[str, Any]], Any], now: Callable[[], float] = time.monotonic) -> None:
        self._make, self._now = make, now
        self._sessions: dict[str, _Session] = {}
        self._lock = threading.Lock()

    def borrow(self, options: Mapping[str, Any]) -> Any:
        """A filesystem; `give_back` it once."""
        name = _name(options)
        with self._lock:
            self._end_idle()
            session = self._sessions.get(name)
            if session is None:
                session = self._sessions[name] = _Session(self._make(dict(options)))
            session.users += 1
            return session.filesystem

    def give_back(self, filesystem: Any) -> None:
        with self._lock:
            for session in self._sessions.values():
                if session.filesystem is filesystem:
                    session.users -= 1
                    session.idle_since = self._now()
            self._end_idle()

    def close(self) -> None:
        """End every session that nobody uses."""
        with self._lock:
            self._end_idle(for_seconds=0.0)

    def _end_idle(self, for_seconds: float = IDLE_SECONDS) -> None:
        before = self._now() - for_seconds
        for name, session in list(self._sessions.items()):
            if session.users == 0 and session.idle_since <= before:
                del self._sessions[name]
                _end(session.filesystem)

    def forget(self) -> None:
        """In a forked child: the sessions and their event loop belong to the parent."""
        self._lock = threading.Lock()
        self._sessions = {}


def _name(options: Mapping[str, Any]) -> str:
    """What a session depends on. It holds secrets: never shown, never stored."""
    environment = sorted(item for item in os.environ.items() if item[0].startswith("AWS_"))
    return repr((sorted(options.items()), environment))


def _end(filesystem: Any) -> None:
    """End a session; s3fs would leave that to the garbage collector, which may run after the event loop."""
    client, filesystem._s3 = filesystem._s3, None
    if client is None:
        return
    try:
        sync(filesystem.loop, client.__aexit__, None, None, None, timeout=5)
    except Exception as error:  # whoever comes to borrow another one is not to blame
        log.warning("an S3 session did not end orderly: %s", type(error).__name__)


def shared_sessions(make: Callable[[dict[str, Any]], Any]) -> Sessions:
    """Sessions that end with the process."""
    sessions = Sessions(make)
    atexit.register(sessions.close)
    os.register_at_fork(after_in_child=sessions.forget)
    return sessions

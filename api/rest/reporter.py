"""A running job's side of the service: register, report, take commands. Uses the standard library only.

A service that is down never disturbs the job: reports are tried again with the next beat, and a job registers anew
when the service has forgotten it. A command is done once, however often it is sent.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any, Protocol

from statebackend.errors import HoldfastError, InvalidRequest, Unavailable

log = logging.getLogger("holdfast.reporter")


class ReportedJob(Protocol):
    """What the service needs of a job; calls come from the reporter's threads."""

    job_id: str

    def registration(self) -> dict[str, Any]:
        """The body of a registration (name, runtime, vertices, plan, checkpoint_config, ...)."""

    def report(self) -> dict[str, Any]:
        """The body of a heartbeat: state, changed checkpoint records, metrics, vertices, exceptions."""

    def execute(self, kind: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Do a command (checkpoint, savepoint, stop, cancel) and tell what came of it; may take long."""


class ServiceClient:
    """One service's HTTP interface as far as jobs need it."""

    def __init__(self, url: str, token: str | None = None, timeout: float = 10.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise InvalidRequest("a service is named by an http or https URL", found=url)
        self._url, self._token, self._timeout = url.rstrip("/"), token, timeout

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """One request; `Unavailable` when the service does not answer, `InvalidRequest` when it refuses."""
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        request = urllib.request.Request(self._url + path, method=method, headers=headers,
                                         data=None if body is None else json.dumps(body).encode())
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as response:
                answer: dict[str, Any] = json.loads(response.read() or b"{}")
                return answer
        except urllib.error.HTTPError as error:
            with error:
                detail = error.read(2000).decode(errors="replace")
            kind = Unavailable if error.code >= 500 else InvalidRequest
            raise kind(f"the service answered {error.code}: {detail}", path=path, status=error.code) from None
        except (OSError, ValueError) as error:
            raise Unavailable(f"the service does not answer: {error}", path=path) from error


class Reporter:
    """Reports one job until it is closed; `close` sends a last report with the job's final state."""

    def __init__(self, url: str, job: ReportedJob, *, token: str | None = None, every_seconds: float = 1.0) -> None:
        self._client = ServiceClient(url, token or os.environ.get("HOLDFAST_SERVICE_TOKEN"))
        self._job, self._every = job, every_seconds
        self._stop = threading.Event()
        self._registered = False
        self._warned = False
        self._taken: set[str] = set()
        self._workers: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._pending: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._loop, name="service-reporter", daemon=True)

    def start(self) -> Reporter:
        self._thread.start()
        return self

    def close(self, timeout: float = 10.0) -> None:
        """Stop reporting, wait for running commands, and send the last report."""
        self._stop.set()
        self._thread.join(timeout)
        for worker in list(self._workers):
            worker.join(timeout)
        self._beat()

    def _loop(self) -> None:
        while not self._stop.is_set():
            self._beat()
            self._stop.wait(self._every)

    def _beat(self) -> None:
        try:
            if not self._registered:
                body = {"pid": os.getpid(), "host": socket.gethostname(), **self._job.registration()}
                self._client.call("PUT", f"/jobs/{self._job.job_id}/registration", body)
                self._registered = True
            answer = self._client.call("POST", f"/jobs/{self._job.job_id}/heartbeat", self._report())
            self._pending.clear()
            self._warned = False
        except InvalidRequest as error:
            self._registered = self._registered and error.context.get("status") != 404
            self._warn(error)
        except Unavailable as error:
            self._warn(error)
        else:
            for command in answer.get("commands", []):
                self._take(command)

    def _report(self) -> dict[str, Any]:
        """The next report; checkpoint records and exceptions of reports that did not arrive are sent again."""
        report = self._job.report()
        self._pending.append({name: report.get(name) or [] for name in ("checkpoints", "exceptions")})
        merged = {name: [item for part in self._pending for item in part[name]][-100:]
                  for name in ("checkpoints", "exceptions")}
        self._pending[:] = [merged]
        return {**report, **merged}

    def _take(self, command: dict[str, Any]) -> None:
        request_id = str(command.get("request-id"))
        with self._lock:
            if request_id in self._taken:
                return
            self._taken.add(request_id)
        worker = threading.Thread(target=self._execute, args=(request_id, command), name=f"command-{request_id[:8]}",
                                  daemon=True)
        self._workers = [other for other in self._workers if other.is_alive()] + [worker]
        worker.start()

    def _execute(self, request_id: str, command: dict[str, Any]) -> None:
        try:
            result = self._job.execute(str(command.get("kind")), dict(command.get("arguments") or {}))
        except HoldfastError as error:
            result = {"failure": str(error)}
        except Exception as error:
            log.exception("a command of the service failed")
            result = {"failure": f"{type(error).__name__}: {error}"}
        self._retrying(lambda: self._client.call(
            "POST", f"/jobs/{self._job.job_id}/commands/{request_id}/result", result))

    def _retrying(self, send: Callable[[], object], attempts: int = 30) -> None:
        for attempt in range(attempts):
            try:
                send()
                return
            except Unavailable as error:
                self._warn(error)
                threading.Event().wait(min(0.2 * 2**attempt, 5.0))
            except InvalidRequest as error:
                self._warn(error)
                return

    def _warn(self, error: HoldfastError) -> None:
        if not self._warned:
            log.warning("reporting to the service failed, the job goes on: %s", error)
            self._warned = True

"""What every request passes: the guard before, safe headers, the request id, metrics and a log line after.

Plain ASGI, because the framework's convenience costs more than a handler. For the same reason requests that come by the
hundreds a second (jobs' reports, reads of the records) go straight to their handler; everything else, and everything
that is not quite as expected, takes the framework's way with its checks.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import Response
from pydantic import ValidationError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.rest import bodies, flink, jobs, problems
from api.rest.context import Service
from api.rest.metrics import Metrics
from api.rest.security import HEADERS, SCOPES, Guard, ids_of, pattern_of
from statebackend.errors import HoldfastError

log = logging.getLogger("holdfast.access")
_SAFE = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
_READS: dict[str, Callable[..., Awaitable[Any]]] = {
    "/overview": flink.overview, "/jobs": flink.jobs, "/jobs/overview": flink.jobs_overview, "/jobs/{}": flink.job_details,
    "/jobs/{}/checkpoints": flink.checkpoints, "/jobs/{}/checkpoints/config": flink.checkpoint_config,
    "/jobs/{}/checkpoints/details/{}": flink.checkpoint_details, "/jobs/{}/metrics": flink.metrics,
}
_BEAT = ("POST", "/jobs/{}/heartbeat")


class Edge:
    """The outermost layer of the app."""

    def __init__(self, app: ASGIApp, service: Service, guard: Guard, metrics: Metrics) -> None:
        self._app, self._service, self._guard, self._metrics = app, service, guard, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, request, status = time.perf_counter(), Request(scope), 500
        request_id = request.headers.get("x-request-id", "")[:64] or uuid.uuid4().hex
        method, path = scope["method"], scope["path"]
        pattern = pattern_of(path)
        if path.startswith("/v1/"):
            scope["root_path"] = "/v1"

        async def send_guarded(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                given = {name for name, _ in message["headers"]}
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode("latin-1", "replace")),
                                      *(header for header in _SAFE if header[0] not in given)]
            await send(message)

        answer = self._guard.refuse(request, pattern) or await self._straight(request, pattern, receive)
        await (answer or self._app)(scope, receive, send_guarded)
        seconds = time.perf_counter() - started
        known = (method, pattern) in SCOPES
        self._metrics.observe(method if known else "other", pattern if known else "other", status, seconds)
        level = logging.DEBUG if (method, pattern) == _BEAT and status == 200 else logging.INFO
        if log.isEnabledFor(level):
            log.log(level, msgspec.json.encode({"request_id": request_id, "method": method, "path": path,
                                                "status": status, "ms": round(seconds * 1000, 2)}).decode())

    async def _straight(self, request: Request, pattern: str, receive: Receive) -> Response | None:
        """The answer to a request of a frequent kind; None if it is none of these, and then nothing of it was read."""
        scope = request.scope
        read = _READS.get(pattern) if scope["method"] == "GET" else None
        beats = (scope["method"], pattern) == _BEAT and request.headers.get("content-type") == "application/json"
        if (read is None and not beats) or scope["query_string"]:
            return None
        ids = ids_of(scope["path"])
        if any(len(found) != 32 for found in ids[:1]) or any(not found.isdecimal() or len(found) > 18 for found in ids[1:]):
            return None
        try:
            if read is not None:
                return _as_response(await read(*ids[:1], *map(int, ids[1:]), self._service))
            body = bodies.Heartbeat.model_validate_json(await _whole(receive))
            return _as_response(await jobs.heartbeat(ids[0], body, self._service))
        except HoldfastError as error:
            return problems.problem_of(error)
        except ValidationError as error:
            return problems.invalid(error.errors(), "body")
        except Exception as error:
            return problems.unexpected(scope["path"], error)


def _as_response(answer: Any) -> Response:
    return answer if isinstance(answer, Response) else Response(msgspec.json.encode(answer), media_type="application/json")


async def _whole(receive: Receive) -> bytes:
    """A request's body; the guard has checked its size."""
    pieces = []
    while True:
        message = await receive()
        pieces.append(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return b"".join(pieces)

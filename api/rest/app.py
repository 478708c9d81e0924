"""The app: middleware that guards, measures and logs each request, the routers, health, metrics, and the page."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, RedirectResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.rest import browse, flink, jobs, problems
from api.rest.context import Service
from api.rest.metrics import Metrics
from api.rest.security import HEADERS, SCOPES, Guard, pattern_of
from api.rest.settings import ServiceSettings

log = logging.getLogger("holdfast.access")
WEB = Path(__file__).resolve().parent.parent / "web"


def package_version() -> str:
    try:
        return version("holdfast")
    except PackageNotFoundError:
        return "0+unknown"


def create_app(settings: ServiceSettings) -> FastAPI:
    """The whole service as an ASGI app. Creating it opens the database; closing the app closes it."""
    found = Service(settings, package_version())
    guard, metrics = Guard(settings, found.launcher), Metrics(found.registry)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        found.start()
        watcher = asyncio.create_task(_watch(found))
        yield
        watcher.cancel()
        found.close()

    app = FastAPI(title="Holdfast", version=found.version, lifespan=lifespan, openapi_url="/openapi.json",
                  docs_url=None, redoc_url=None, description=(
                      "Savepoint management over HTTP. Paths and field names are those of Apache Flink's REST where "
                      "Flink has them, with and without `/v1`; what Flink lacks is below `/api`."))
    app.state.service, app.state.metrics = found, metrics
    problems.install(app)
    for prefix in ("", "/v1"):
        for router in (flink.router, jobs.router):
            app.include_router(router, prefix=prefix, include_in_schema=prefix == "")
    app.include_router(browse.router, prefix="/api")
    _add_plain_routes(app, found, metrics)

    app.add_middleware(Edge, guard=guard, metrics=metrics)
    return app


class Edge:
    """What every request passes: the guard before, safe headers, the request id, metrics and a log line after.

    Plain ASGI, because the convenience class costs as much as a whole handler.
    """

    def __init__(self, app: ASGIApp, guard: Guard, metrics: Metrics) -> None:
        self._app, self._guard, self._metrics = app, guard, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, request, status = time.perf_counter(), Request(scope), 500
        request_id = request.headers.get("x-request-id", "")[:64] or uuid.uuid4().hex
        pattern = pattern_of(scope["path"])

        async def send_guarded(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = request_id
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        refusal = self._guard.refuse(request, pattern)
        await (refusal or self._app)(scope, receive, send_guarded)
        seconds = time.perf_counter() - started
        known = (scope["method"], pattern) in SCOPES
        self._metrics.observe(scope["method"], pattern if known else "other", status, seconds)
        if log.isEnabledFor(logging.INFO):
            log.info(json.dumps({"request_id": request_id, "method": scope["method"], "path": scope["path"],
                                 "status": status, "ms": round(seconds * 1000, 2)}))


def _add_plain_routes(app: FastAPI, found: Service, metrics: Metrics) -> None:
    @app.get("/health", tags=["Service"])
    async def health() -> dict[str, str]:
        """The process is alive."""
        return {"status": "ok"}

    @app.get("/ready", tags=["Service"])
    async def ready() -> dict[str, str]:
        """The service's records can be read."""
        found.registry.operations(1)
        return {"status": "ready"}

    @app.get("/metrics", tags=["Service"], response_class=Response)
    def prometheus() -> Response:
        """Prometheus metrics."""
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return RedirectResponse("/web/")

    @app.get("/web/", include_in_schema=False)
    async def index() -> Response:
        return FileResponse(WEB / "index.html", headers={"Cache-Control": "no-cache"})

    app.mount("/web", StaticFiles(directory=WEB), name="web")


async def _watch(found: Service) -> None:
    """Tell those who wait for commands of jobs that died."""
    while True:
        await asyncio.sleep(2)
        found.registry.fail_commands_of_lost_jobs()


def openapi_document(settings: ServiceSettings) -> dict[str, Any]:
    """The OpenAPI document, as committed in docs and as served."""
    app = create_app(settings)
    try:
        return app.openapi()
    finally:
        app.state.service.close()

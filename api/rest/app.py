"""The app: the routers behind the edge, health, metrics, the page, and what is done every few seconds."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse, RedirectResponse, Response
from fastapi.staticfiles import StaticFiles

from api.rest import browse, flink, jobs, problems
from api.rest.context import Service
from api.rest.edge import Edge
from api.rest.metrics import Metrics
from api.rest.security import Guard
from api.rest.settings import ServiceSettings
from statebackend.errors import HoldfastError

log = logging.getLogger("holdfast.service")
PAGE_FILES = (".html", ".js", ".css", ".svg")
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
    app.include_router(flink.router)
    app.include_router(jobs.router)
    app.include_router(browse.router, prefix="/api")
    _add_plain_routes(app, found, metrics)

    app.add_middleware(Edge, service=found, guard=guard, metrics=metrics)
    return app


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

    app.mount("/web", _Page(directory=WEB), name="web")


class _Page(StaticFiles):
    """The page's own files; the folder is a Python package too, which is nobody's business."""

    def lookup_path(self, path: str) -> tuple[str, os.stat_result | None]:
        return super().lookup_path(path) if path.endswith(PAGE_FILES) else ("", None)


async def _watch(found: Service) -> None:
    """Keep house beside the requests; a failure of it is tried again, and logged where it is not the one before."""
    last = ""
    while True:
        await asyncio.sleep(2)
        try:
            await run_in_threadpool(found.keep_house)
            last = ""
        except Exception as error:
            if repr(error) != last:
                log.error("housekeeping failed: %s", error, exc_info=None if isinstance(error, HoldfastError) else error)
            last = repr(error)


def openapi_document(settings: ServiceSettings) -> dict[str, Any]:
    """The OpenAPI document, as committed in docs and as served."""
    app = create_app(settings)
    try:
        return app.openapi()
    finally:
        app.state.service.close()

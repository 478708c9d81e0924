"""What the handlers share: the registry, the roots, background operations, the launcher, small response caches."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, ParamSpec

import msgspec
from fastapi import Request
from fastapi.responses import Response

from api.rest.launcher import Launcher
from api.rest.operations import Operations
from api.rest.registry import Registry
from api.rest.roots import Place, Roots
from api.rest.settings import ServiceSettings

P = ParamSpec("P")


class Service:
    """One running service. Handlers get it by dependency injection."""

    def __init__(self, settings: ServiceSettings, version: str) -> None:
        self.settings, self.version = settings, version
        self.registry = Registry(settings.database, lost_after_ms=settings.lost_after_ms, history=settings.history)
        self.roots = Roots(settings.roots)
        self.operations = Operations(self.registry, workers=settings.max_operations)
        self.launcher = Launcher(settings, self.registry, self.roots)
        self.heavy = threading.BoundedSemaphore(settings.max_heavy_requests)
        self._cache: dict[str, tuple[object, bytes]] = {}

    @property
    def starts_jobs(self) -> bool:
        return bool(self.settings.jobs_dirs)

    def start(self) -> None:
        """Take up what an earlier run of the service left unfinished."""
        self.operations.resume()
        self.launcher.resume()

    def close(self) -> None:
        self.operations.close()
        self.registry.close()

    def root_urls(self) -> list[str]:
        return list(self.roots.urls)

    def place(self, path: str) -> Place:
        return self.roots.place(path)

    def jobs_version(self) -> tuple[int, int]:
        """Changes with every record, and once a second, because durations and lost jobs depend on the time."""
        return self.registry.changes, self.registry.second()

    def cached(self, name: str, version: object, make: Callable[[], Any]) -> Response:
        """A JSON response that is built again only when its version has changed."""
        known = self._cache.get(name)
        if known is None or known[0] != version:
            known = (version, msgspec.json.encode(make()))
            if len(self._cache) > 5_000:
                self._cache.clear()
            self._cache[name] = known
        return Response(known[1], media_type="application/json")


def encoded(handler: Callable[P, Awaitable[Any]]) -> Callable[P, Awaitable[Any]]:
    """Encode a handler's answer at once: the framework's own way walks every value first, which costs more than the rest."""

    @wraps(handler)
    async def handle(*args: P.args, **kwargs: P.kwargs) -> Any:
        answer = await handler(*args, **kwargs)
        return answer if isinstance(answer, Response) else Response(msgspec.json.encode(answer),
                                                                    media_type="application/json")
    return handle


def service(request: Request) -> Service:
    """The service of the app that handles a request."""
    found: Service = request.app.state.service
    return found

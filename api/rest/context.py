"""What the handlers share: the registry, the roots, background operations, the launcher, small response caches."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, ParamSpec

import msgspec
from fastapi import Request
from fastapi.responses import Response

from api.rest.beats import Beats
from api.rest.instance import InstanceLock
from api.rest.launcher import Launcher
from api.rest.operations import Operations
from api.rest.registry import Registry, now_ms
from api.rest.roots import Place, Roots
from api.rest.settings import ServiceSettings

P = ParamSpec("P")
CACHE_BYTES = 64 << 20
_PRUNE_EVERY_SECONDS = 60


class Service:
    """One running service. Handlers get it by dependency injection."""

    def __init__(self, settings: ServiceSettings, version: str) -> None:
        self.settings, self.version = settings, version
        self.registry = Registry(settings.database, lost_after_ms=settings.lost_after_ms, history=settings.history)
        self.roots = Roots(settings.roots)
        self.operations = Operations(self.registry, workers=settings.max_operations)
        self.launcher = Launcher(settings, self.registry, self.roots)
        self.heavy = threading.BoundedSemaphore(settings.max_heavy_requests)
        self.beats = Beats(self.registry)
        self._cache: OrderedDict[str, tuple[object, bytes]] = OrderedDict()
        self._cached_bytes = 0
        self._caching = threading.Lock()
        self._pruned = time.monotonic()
        self._lock = InstanceLock(settings.database.with_suffix(".lock"))

    @property
    def starts_jobs(self) -> bool:
        return bool(self.settings.jobs_dirs)

    def start(self) -> None:
        """Take up what an earlier run of the service left unfinished; one service at a time may do so."""
        self._lock.take()
        self.operations.resume()
        self.launcher.resume()

    def keep_house(self) -> None:
        """What is due every few seconds, away from the requests."""
        self.registry.fail_commands_of_lost_jobs()
        self.launcher.look_after()
        self.registry.database.tidy()
        if time.monotonic() - self._pruned > _PRUNE_EVERY_SECONDS:
            self._pruned = time.monotonic()
            gone = self.registry.prune(self.settings.kept_jobs, self.settings.kept_records)
            self.launcher.forget(gone)
            for job_id in gone:
                self._drop(f"checkpoints-{job_id}")

    def close(self) -> None:
        self.operations.close()
        self.beats.close()
        self.registry.close()
        self._lock.release()

    def root_urls(self) -> list[str]:
        return list(self.roots.urls)

    def place(self, path: str) -> Place:
        return self.roots.place(path)

    def jobs_version(self) -> tuple[int, int]:
        """Changes with every record, and once a second, because durations and lost jobs depend on the time."""
        return self.registry.changes, now_ms() // 1000

    def cached(self, name: str, version: object, make: Callable[[], Any]) -> Response:
        """A JSON response that is built again only when its version has changed. The least lately used give way."""
        known = self._drop(name)
        if known is None or known[0] != version:
            known = (version, msgspec.json.encode(make()))
        with self._caching:
            self._cache[name] = known
            self._cached_bytes += len(known[1])
            while self._cached_bytes > CACHE_BYTES and len(self._cache) > 1:
                self._cached_bytes -= len(self._cache.popitem(last=False)[1][1])
        return Response(known[1], media_type="application/json")

    def _drop(self, name: str) -> tuple[object, bytes] | None:
        with self._caching:
            known = self._cache.pop(name, None)
            self._cached_bytes -= len(known[1]) if known else 0
        return known


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

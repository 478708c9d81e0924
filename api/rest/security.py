"""Who may do what: bearer tokens with roles, the route table, host and origin checks, safe headers.

Tokens are kept hashed. A line of the token file is `role:sha256-hex` or `role:sha256-hex:name`; `holdfast serve
--new-token ROLE` prints a token once with the line to add.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from enum import IntEnum
from pathlib import Path
from urllib.parse import urlsplit

from fastapi import Request
from starlette.responses import Response

from api.rest.launcher import Launcher
from api.rest.problems import problem
from api.rest.settings import ServiceSettings
from statebackend.errors import InvalidRequest


class Role(IntEnum):
    """Each role may do all that the ones below it may."""

    VIEWER = 1
    OPERATOR = 2
    ADMIN = 3


PUBLIC = ("/health", "/ready", "/web", "/favicon.ico")
"""Paths that need no token: liveness, and the page itself (its data needs one)."""

VIEW, OPERATE, ADMINISTER = Role.VIEWER, Role.OPERATOR, Role.ADMIN
SCOPES: dict[tuple[str, str], Role] = {
    ("GET", "/overview"): VIEW, ("GET", "/config"): VIEW, ("GET", "/metrics"): VIEW, ("GET", "/openapi.json"): VIEW,
    ("GET", "/health"): VIEW, ("GET", "/ready"): VIEW,
    ("GET", "/jobs"): VIEW, ("POST", "/jobs"): ADMINISTER, ("POST", "/jobs/check"): ADMINISTER,
    ("GET", "/jobs/overview"): VIEW, ("GET", "/jobs/{}"): VIEW, ("PATCH", "/jobs/{}"): OPERATE,
    ("PUT", "/jobs/{}/registration"): OPERATE, ("POST", "/jobs/{}/heartbeat"): OPERATE,
    ("POST", "/jobs/{}/commands/{}/result"): OPERATE,
    ("GET", "/jobs/{}/checkpoints"): VIEW, ("POST", "/jobs/{}/checkpoints"): OPERATE,
    ("GET", "/jobs/{}/checkpoints/config"): VIEW, ("GET", "/jobs/{}/checkpoints/{}"): VIEW,
    ("GET", "/jobs/{}/checkpoints/details/{}"): VIEW, ("GET", "/jobs/{}/checkpoints/details/{}/subtasks/{}"): VIEW,
    ("POST", "/jobs/{}/savepoints"): OPERATE, ("GET", "/jobs/{}/savepoints/{}"): VIEW, ("POST", "/jobs/{}/stop"): OPERATE,
    ("PATCH", "/jobs/{}/rescaling"): ADMINISTER, ("GET", "/jobs/{}/rescaling/{}"): VIEW,
    ("GET", "/jobs/{}/exceptions"): VIEW, ("GET", "/jobs/{}/metrics"): VIEW,
    ("POST", "/savepoint-disposal"): OPERATE, ("GET", "/savepoint-disposal/{}"): VIEW,
    ("GET", "/api/roots"): VIEW, ("GET", "/api/changes"): VIEW, ("GET", "/api/snapshots"): VIEW,
    ("GET", "/api/snapshot"): VIEW, ("GET", "/api/snapshot/entries"): VIEW, ("GET", "/api/snapshot/lookup"): VIEW,
    ("GET", "/api/snapshot/download"): VIEW, ("POST", "/api/query"): VIEW, ("POST", "/api/diff"): VIEW,
    ("POST", "/api/edit/preview"): VIEW, ("POST", "/api/verify"): VIEW,
    ("GET", "/api/operations"): VIEW, ("POST", "/api/operations"): OPERATE, ("GET", "/api/operations/{}"): VIEW,
    ("DELETE", "/api/operations/{}"): OPERATE, ("GET", "/api/jobs/{}/state"): VIEW,
}
"""The one table of routes and the role each needs; what is not in it needs the highest."""
_ID = re.compile(r"/(?:[0-9a-f]{32}|\d+)(?=/|$)")
_VERTEX = re.compile(r"(/subtasks)/[^/]+$")


def pattern_of(path: str) -> str:
    """A path with its ids taken out: what roles and metrics are keyed by."""
    path = path.removeprefix("/v1") or "/"
    return _VERTEX.sub(r"\1/{}", _ID.sub("/{}", path))


def ids_of(path: str) -> list[str]:
    """The ids that `pattern_of` takes out of a path, in order."""
    return [found[1:] for found in _ID.findall(path)]


def required_role(method: str, pattern: str) -> Role:
    """The role that a request needs."""
    return SCOPES.get(("GET" if method == "HEAD" else method, pattern), Role.ADMIN)


def new_token(role: Role, name: str = "") -> tuple[str, str]:
    """A fresh token, and the line for the token file."""
    token = secrets.token_urlsafe(32)
    digest = hashlib.sha256(token.encode()).hexdigest()
    return token, ":".join(filter(None, [role.name.lower(), digest, name]))


class Tokens:
    """The hashed tokens of a token file."""

    def __init__(self, path: Path) -> None:
        self._hashes: list[tuple[bytes, Role]] = []
        for number, line in enumerate(path.read_text().splitlines(), 1):
            line = line.split("#")[0].strip()
            if not line:
                continue
            role, _, rest = line.partition(":")
            digest = rest.split(":")[0].strip().lower()
            if role.upper() not in Role.__members__ or len(digest) != 64:
                raise InvalidRequest("a line of the token file is not role:sha256-hex[:name]", path=str(path), line=number)
            self._hashes.append((bytes.fromhex(digest), Role[role.upper()]))
        if not self._hashes:
            raise InvalidRequest("the token file has no token", path=str(path))

    def add(self, token: str, role: Role) -> None:
        """Accept one more token: that of the jobs which the service starts."""
        self._hashes.append((hashlib.sha256(token.encode()).digest(), role))

    def role_of(self, token: str) -> Role | None:
        """The role of a token; compares with every stored hash in constant time."""
        digest = hashlib.sha256(token.encode()).digest()
        found: Role | None = None
        for stored, role in self._hashes:
            if hmac.compare_digest(stored, digest):
                found = role if found is None else max(found, role)
        return found


HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
                               "connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; "
                               "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Guard:
    """Decides on each request before any handler runs."""

    def __init__(self, settings: ServiceSettings, launcher: Launcher) -> None:
        self._settings = settings
        self._tokens = Tokens(settings.token_file) if settings.token_file else None
        if self._tokens is not None:
            self._tokens.add(launcher.token(), Role.OPERATOR)
        names = {"localhost", "127.0.0.1", "[::1]", "::1", settings.host, *settings.allowed_hosts}
        self._hosts = {name.lower() for name in names}

    def refuse(self, request: Request, pattern: str) -> Response | None:
        """The refusal of a request, or None if it may go on."""
        path = request.url.path
        if not self._known_host(request.headers.get("host", "")):
            return problem(421, "wrong host", "this service does not answer under that Host name")
        origin = request.headers.get("origin")
        if origin is not None and not self._own_origin(origin, request):
            return problem(403, "foreign origin", "requests from pages of other origins are refused")
        if request.headers.get("sec-fetch-site") == "cross-site" and request.method not in ("GET", "HEAD"):
            return problem(403, "foreign origin", "requests from pages of other origins are refused")
        if "transfer-encoding" in request.headers:
            return problem(411, "length needed", "send the body with a Content-Length")
        length = request.headers.get("content-length", "0")
        if not length.isdigit() or int(length) > self._settings.max_body_bytes:
            return problem(413, "body too large", f"a body may have {self._settings.max_body_bytes} bytes")
        if self._tokens is None or path == "/" or path.startswith(PUBLIC):
            return None
        return self._check_token(request, pattern)

    def _check_token(self, request: Request, pattern: str) -> Response | None:
        assert self._tokens is not None
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        role = self._tokens.role_of(token.strip()) if scheme.lower() == "bearer" and token else None
        if role is None:
            response = problem(401, "token needed", "send `Authorization: Bearer TOKEN` with a token of this service")
            response.headers["WWW-Authenticate"] = "Bearer"
            return response
        needed = required_role(request.method, pattern)
        if role < needed:
            return problem(403, "role too low", f"this needs the role {needed.name.lower()}, the token has "
                                                f"{role.name.lower()}")
        return None

    def _known_host(self, host: str) -> bool:
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        return name.lower() in self._hosts

    def _own_origin(self, origin: str, request: Request) -> bool:
        parts = urlsplit(origin)
        return parts.netloc.lower() == request.headers.get("host", "").lower() and self._known_host(parts.netloc)


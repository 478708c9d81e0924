"""Errors over HTTP: every failure is an `application/problem+json` document that names what to change."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from statebackend.errors import HoldfastError

log = logging.getLogger("holdfast.service")
MEDIA_TYPE = "application/problem+json"


def problem(status: int, title: str, detail: str, **more: Any) -> JSONResponse:
    """A problem document. `errors` repeats the text in the place where Flink's client looks for it."""
    body = {"type": "about:blank", "status": status, "title": title, "detail": detail, **more, "errors": [detail]}
    return JSONResponse(body, status, media_type=MEDIA_TYPE)


def problem_of(error: HoldfastError) -> JSONResponse:
    """The problem document of one of our errors; the same kind has the same status everywhere."""
    context = {name: _plain(value) for name, value in error.context.items()}
    more: dict[str, Any] = {"kind": error.kind}
    if context:
        more["context"] = context
    if error.hint:
        more["hint"] = error.hint
    return problem(error.http_status, error.kind.replace("_", " "), str(error), **more)


def invalid(errors: Sequence[Any], *where: str) -> JSONResponse:
    """The problem document of a request whose fields are not what they should be; it names each."""
    fields = [{"field": ".".join(str(part) for part in (*where, *item["loc"])), "message": item["msg"]} for item in errors]
    named = "; ".join(f"{item['field']}: {item['message']}" for item in fields)
    return problem(400, "invalid request", named, kind="invalid_request", fields=fields)


def unexpected(path: str, error: Exception) -> JSONResponse:
    """The problem document of an error that is ours; the log has its trace."""
    log.error("unexpected error at %s", path, exc_info=error)
    return problem(500, "internal error", f"{type(error).__name__} while handling the request; the log has the details")


def install(app: FastAPI) -> None:
    """Make every error of the app a problem document."""

    @app.exception_handler(HoldfastError)
    async def _ours(_request: Request, error: HoldfastError) -> Response:
        return problem_of(error)

    @app.exception_handler(HTTPException)
    async def _http(_request: Request, error: HTTPException) -> Response:
        response = problem(error.status_code, "request refused", str(error.detail))
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(RequestValidationError)
    async def _invalid(_request: Request, error: RequestValidationError) -> Response:
        return invalid(error.errors())

    @app.exception_handler(Exception)
    async def _unexpected(request: Request, error: Exception) -> Response:
        return unexpected(request.url.path, error)


def _plain(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool)) else repr(value)

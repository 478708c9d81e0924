"""The one error tree. Each kind tells the caller what to do and maps to one exit code and HTTP status.

    HoldfastError
    ├── InvalidRequest     400, exit 2   what was asked for can't be right: change the call
    ├── NotFound           404, exit 4   the thing named is not there: check the name
    ├── IncompatibleState  409, exit 5   stored state does not fit the job: migrate, map or drop it
    ├── Conflict           409, exit 6   somebody else holds it or got there first: look, then retry
    ├── Unavailable        503, exit 7   storage or a peer does not answer: retry later
    ├── CorruptData        500, exit 8   bytes are not what was written: restore from an older copy
    └── Closed             409, exit 9   used after close
"""

from __future__ import annotations

from typing import Any, ClassVar


class HoldfastError(Exception):
    """Root of all errors that Holdfast raises on purpose.

    `context` (path, checkpoint_id, state, key, expected, found, ...) is printed after the message, `hint` last.
    """

    kind: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None, **context: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.context = {name: value for name, value in context.items() if value is not None}

    def __str__(self) -> str:
        details = ", ".join(f"{name}={value!r}" for name, value in self.context.items())
        text = f"{self.message} ({details})" if details else self.message
        return f"{text}; {self.hint}" if self.hint else text

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.hint, self.context)


def _rebuild(kind: type[HoldfastError], message: str, hint: str | None, context: dict[str, Any]) -> HoldfastError:
    return kind(message, hint=hint, **context)


class InvalidRequest(HoldfastError):
    kind, http_status, exit_code = "invalid_request", 400, 2


class NotFound(HoldfastError):
    kind, http_status, exit_code = "not_found", 404, 4


class IncompatibleState(HoldfastError):
    kind, http_status, exit_code = "incompatible_state", 409, 5


class Conflict(HoldfastError):
    kind, http_status, exit_code = "conflict", 409, 6


class Unavailable(HoldfastError):
    kind, http_status, exit_code = "unavailable", 503, 7


class CorruptData(HoldfastError):
    kind, http_status, exit_code = "corrupt_data", 500, 8


class Closed(HoldfastError):
    kind, http_status, exit_code = "closed", 409, 9

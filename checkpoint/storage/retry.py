"""When a storage call is tried again, how long it may take, and which error it ends in."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from statebackend.errors import Conflict, HoldfastError, InvalidRequest, NotFound, Unavailable

T = TypeVar("T")

_PERMANENT_ERRNO = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR,
                              errno.ENAMETOOLONG, errno.EINVAL, errno.ENOSYS, errno.EMSGSIZE, errno.EFBIG,
                              errno.EXDEV, errno.ELOOP})
_PERMANENT_NAMES = frozenset({"NoCredentialsError", "PartialCredentialsError", "ParamValidationError",
                              "ProfileNotFound", "InvalidRegionError", "NoRegionError"})
_FULL_ERRNO = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential back-off with jitter: `attempts` in all, pauses doubling from `first_pause` up to `longest_pause`.

    `timeout` (seconds) ends an attempt that hangs; None waits for as long as the store does.
    """

    attempts: int = 6
    first_pause: float = 0.1
    longest_pause: float = 5.0
    timeout: float | None = None
    sleep: Callable[[float], None] = time.sleep

    def pause(self, attempt: int) -> float:
        """Seconds to wait after the `attempt`-th failure (counted from 1), half of them at random."""
        full = min(self.longest_pause, self.first_pause * float(2 ** (attempt - 1)))
        return full * (0.5 + random.random() / 2)


class AttemptTimedOut(TimeoutError):
    """One attempt took longer than allowed; whether it took effect is not known."""


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed a moment later."""
    if isinstance(error, (HoldfastError, FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError,
                          NotADirectoryError, ValueError, TypeError, KeyError, AttributeError, NotImplementedError,
                          ImportError)):
        return False
    if type(error).__name__ in _PERMANENT_NAMES:
        return False
    return not (isinstance(error, OSError) and error.errno in _PERMANENT_ERRNO)


def with_deadline(call: Callable[[], T], seconds: float | None) -> T:
    """Run a call, giving up on it after `seconds`. A call that hangs keeps its (daemon) thread; its result is dropped."""
    if seconds is None:
        return call()
    box: list[Any] = []

    def run() -> None:
        try:
            box.append((True, call()))
        except BaseException as error:  # handed over to the caller's thread
            box.append((False, error))

    thread = threading.Thread(target=run, name="holdfast-storage-call", daemon=True)
    thread.start()
    thread.join(seconds)
    if not box:
        raise AttemptTimedOut(f"no answer within {seconds:g} s")
    ok, value = box[0]
    if ok:
        result: T = value
        return result
    raise value


def retrying(call: Callable[[], T], policy: RetryPolicy, *,
             on_failure: Callable[[BaseException], None] | None = None) -> T:
    """Run a call until it succeeds, fails for good, or has used up its attempts; the last error is raised as it is."""
    attempt = 0
    while True:
        attempt += 1
        try:
            return with_deadline(call, policy.timeout)
        except Exception as error:
            if on_failure is not None:
                on_failure(error)
            if attempt >= policy.attempts or not is_transient(error):
                raise
            policy.sleep(policy.pause(attempt))


def translated(error: BaseException, *, path: str, what: str, scrub: Callable[[str], str],
               attempts: int) -> HoldfastError:
    """The error of our tree for what a store raised."""
    if isinstance(error, HoldfastError):
        return error
    text = scrub(f"{type(error).__name__}: {error}")
    if isinstance(error, NotADirectoryError) and what in ("write", "create"):
        return InvalidRequest("a file stands where a folder has to be", path=path,
                              hint="name another folder, or move the file away")
    if isinstance(error, (FileNotFoundError, IsADirectoryError, NotADirectoryError)):
        return NotFound("there is no such file in the store", path=path)
    if isinstance(error, FileExistsError):
        return Conflict("the file exists already", path=path)
    if isinstance(error, PermissionError):
        return Unavailable(f"the store refuses access: {text}", path=path,
                           hint="check the credentials and rights of this process for the store")
    if isinstance(error, OSError) and error.errno in _FULL_ERRNO:
        return Unavailable("the store is full", path=path, hint="make room, or point to another store")
    if isinstance(error, (ValueError, TypeError, NotImplementedError)):
        return InvalidRequest(f"the store can't {what}: {text}", path=path)
    if is_transient(error):
        return Unavailable(f"the store did not {what} in {attempts} attempts: {text}", path=path,
                           hint="check that it is up and reachable, then retry")
    return Unavailable(f"the store can't {what}: {text}", path=path)

"""TTL of the states of one backend: what time it is, what has expired, and when to look for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import time_ns
from typing import Any

from statebackend.clock import Clock, SystemClock
from statebackend.ttl import NEVER, TimeDomain, TtlConfig, expires_at

_NEVER_CLEAN = NEVER + 1


def _system_now_ms() -> int:
    """`SystemClock.now_ms` without the method call: every access of a state with TTL asks for the time."""
    return time_ns() // 1_000_000


class Expiry:
    """The TTL of one state, ready for use. `now` tells the time that this state counts.

    Clean-up on access looks at nothing while nothing can have expired: `due` is a lower bound of every stored
    `expires_at`, kept by writes and renewed by each full pass over the state.
    """

    __slots__ = ("background", "config", "cursor", "due", "full_snapshot", "incremental", "now", "on_read", "pass_start",
                 "refresh", "returns_expired", "survivor", "ttl_ms")

    def __init__(self, config: TtlConfig, clock: Clock, watermark: Callable[[], int]) -> None:
        self.config = config
        self.ttl_ms = config.ttl_ms
        self.now = watermark if config.time is TimeDomain.EVENT else \
            _system_now_ms if type(clock) is SystemClock else clock.now_ms
        self.refresh = config.updates_on_read
        self.returns_expired = config.returns_expired
        self.on_read = config.cleanup.on_read
        self.full_snapshot = config.cleanup.full_snapshot
        self.incremental = config.cleanup.incremental
        self.background = config.cleanup.background
        self.due = NEVER if self.incremental > 0 or self.background else _NEVER_CLEAN
        self.cursor: Iterator[Any] | None = None
        self.pass_start = 0
        self.survivor = NEVER

    def stamp(self) -> int:
        """The `expires_at` of an entry written now."""
        expires = expires_at(self.now(), self.ttl_ms)
        if expires < self.due:
            self.due = expires
        return expires

    def clean(self, keys: Callable[[], list[Any]], examine: Callable[[Any, int], tuple[int, int, int]],
              limit: int, now: int) -> int:
        """Examine up to `limit` entries from where the last call stopped; the number removed.

        `examine(key, now)` removes what has expired under a key and tells how many entries it looked at, how many it
        removed, and the earliest expiry left.
        """
        removed = 0
        while limit > 0:
            if self.cursor is None:
                if now < self.due:
                    break
                self.cursor, self.pass_start, self.survivor = iter(keys()), now, NEVER
            key = next(self.cursor, None)
            if key is None:
                self.cursor = None
                self.due = min(self.survivor, self.pass_start + self.ttl_ms)
                break
            looked, gone, earliest = examine(key, now)
            limit -= max(looked, 1)
            removed += gone
            if earliest < self.survivor:
                self.survivor = earliest
        return removed

"""Clocks are passed in, never read from the side, so that tests, replays and the simulator decide what time it is."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Processing time in milliseconds since the epoch. Safe to call from any thread."""

    def now_ms(self) -> int: ...


class SystemClock:
    """The machine's wall clock."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, now_ms: int = 0) -> None:
        self._now_ms = now_ms

    def now_ms(self) -> int:
        return self._now_ms

    def set(self, now_ms: int) -> None:
        self._now_ms = now_ms

    def advance(self, by_ms: int) -> None:
        self._now_ms += by_ms

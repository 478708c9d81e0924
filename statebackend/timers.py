"""The contract of timers: one per (key, namespace, timestamp) and time domain, ordered, deletable, snapshotted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

from statebackend.ttl import TimeDomain

TIMER_STATES = {TimeDomain.EVENT: "_timers_event", TimeDomain.PROCESSING: "_timers_processing"}
"""The reserved state names under which timers are stored."""


class Timer(NamedTuple):
    """A timer: compares by timestamp first, which is the order of firing within a key group."""

    timestamp: int
    key: Any
    namespace: Any


class TimerService(ABC):
    """The timers of one keyed backend. Registering one that exists, or deleting one that does not, does nothing."""

    @abstractmethod
    def register(self, domain: TimeDomain, timestamp: int, namespace: Any = None) -> None:
        """Set a timer for the current key."""

    @abstractmethod
    def delete(self, domain: TimeDomain, timestamp: int, namespace: Any = None) -> None: ...

    @abstractmethod
    def pop_due(self, domain: TimeDomain, until: int, limit: int = 1000) -> list[Timer]:
        """Remove and return timers with timestamp <= until, earliest first over all key groups, at most `limit`.

        Overdue timers of a restored backend are due at once.
        """

    @abstractmethod
    def next_timestamp(self, domain: TimeDomain) -> int | None:
        """The earliest timestamp set, or None."""

    @abstractmethod
    def timers(self, domain: TimeDomain) -> Iterator[Timer]:
        """All timers, in no fixed order: for tools and tests."""

    @abstractmethod
    def count(self, domain: TimeDomain) -> int: ...

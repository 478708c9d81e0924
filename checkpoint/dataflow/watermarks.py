"""Event time: how records get timestamps, how far a stream has come, and when it counts as idle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from operator import attrgetter, itemgetter
from typing import Any

from checkpoint.runtime.contracts import MIN_WATERMARK
from statebackend.durations import duration_ms
from statebackend.errors import InvalidRequest


@dataclass(frozen=True)
class WatermarkStrategy:
    """Timestamps from records, and a watermark that stays `out_of_orderness_ms` behind the largest of them.

    `timestamp` is a field name or a function of the record; both may give milliseconds or a datetime (one without a
    zone is read as UTC). A source or subtask without records for `idleness` stops holding the others back.
    """

    timestamp: Callable[[Any], Any] | str | None = None
    out_of_orderness_ms: int = 0
    idle_after_ms: int | None = None

    @classmethod
    def bounded_out_of_orderness(cls, bound: str | int | timedelta,
                                 timestamp: Callable[[Any], Any] | str | None = None) -> WatermarkStrategy:
        """Records come at most `bound` after one with a later timestamp."""
        out_of_orderness_ms = duration_ms(bound)
        if out_of_orderness_ms < 0:
            raise InvalidRequest("a bound of out-of-orderness can't be negative", found=str(bound))
        return cls(timestamp, out_of_orderness_ms)

    @classmethod
    def monotonous(cls, timestamp: Callable[[Any], Any] | str | None = None) -> WatermarkStrategy:
        """Timestamps never go back within a source subtask."""
        return cls(timestamp, 0)

    def with_timestamps(self, timestamp: Callable[[Any], Any] | str) -> WatermarkStrategy:
        return WatermarkStrategy(timestamp, self.out_of_orderness_ms, self.idle_after_ms)

    def with_idleness(self, timeout: str | int | timedelta) -> WatermarkStrategy:
        return WatermarkStrategy(self.timestamp, self.out_of_orderness_ms, duration_ms(timeout))

    def generator(self) -> WatermarkGenerator:
        """A fresh generator, for one subtask."""
        return WatermarkGenerator(self)


class WatermarkGenerator:
    """Follows one subtask's records. Pure: the clock is passed in."""

    def __init__(self, strategy: WatermarkStrategy) -> None:
        self._select = strategy.timestamp
        self._delay = strategy.out_of_orderness_ms + 1
        self._idle_after = strategy.idle_after_ms
        self._largest = MIN_WATERMARK
        self._active_at: int | None = None
        self.watermark = MIN_WATERMARK
        self.idle = False

    def timestamps(self, values: list[Any], given: list[int | None] | None) -> list[int | None] | None:
        """The timestamps of a batch: by the strategy's function, else those that the records came with."""
        if self._select is None or not values:
            return given
        return [milliseconds(stamp) for stamp in map(_getter(self._select, values[0]), values)]

    def observe(self, timestamps: list[int | None] | None, now_ms: int) -> int | None:
        """Take note of a batch; the new watermark where it has advanced."""
        self._active_at, self.idle = now_ms, False
        known = [stamp for stamp in timestamps if stamp is not None] if timestamps else []
        if not known:
            return None
        self._largest = max(self._largest, max(known))
        candidate = self._largest - self._delay
        if candidate <= self.watermark:
            return None
        self.watermark = candidate
        return candidate

    def becomes_idle(self, now_ms: int) -> bool:
        """Whether the idle timeout has just passed without a record."""
        if self._idle_after is None or self.idle:
            return False
        if self._active_at is None or now_ms < self._active_at:
            self._active_at = now_ms
        if now_ms - self._active_at < self._idle_after:
            return False
        self.idle = True
        return True

    def idle_at(self) -> int | None:
        """When to ask `becomes_idle` again."""
        if self._idle_after is None or self.idle or self._active_at is None:
            return None
        return self._active_at + self._idle_after


def milliseconds(stamp: Any) -> int:
    """Milliseconds since the epoch of a number or a datetime."""
    if isinstance(stamp, int):
        return stamp
    if isinstance(stamp, datetime):
        stamp = stamp if stamp.tzinfo is not None else stamp.replace(tzinfo=UTC)
        rounded: int = round(stamp.timestamp() * 1000)
        return rounded
    if isinstance(stamp, float):
        return int(stamp)
    raise InvalidRequest("a timestamp must be milliseconds or a datetime", found=repr(stamp))


def _getter(select: Callable[[Any], Any] | str, sample: Any) -> Callable[[Any], Any]:
    if not isinstance(select, str):
        return select
    return itemgetter(select) if isinstance(sample, dict) else attrgetter(select)

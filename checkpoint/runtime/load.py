"""How a subtask spends its time: busy, idle or held back by its receivers, over recent time and in all."""

from __future__ import annotations

from enum import Enum

WINDOW_MS = 1000


class Activity(Enum):
    BUSY = "busy"
    IDLE = "idle"
    BACK_PRESSURED = "back_pressured"


class Load:
    """Time by activity. The time between two steps belongs to what the first of them found."""

    def __init__(self) -> None:
        self.total_ms = dict.fromkeys(Activity, 0)
        self._window = dict.fromkeys(Activity, 0)
        self._last_ratios = dict.fromkeys(Activity, 0.0)
        self._activity = Activity.IDLE
        self._since: int | None = None

    def account(self, now_ms: int) -> None:
        """A step begins: book the time since the last one. A clock that was set back books nothing."""
        if self._since is not None and now_ms > self._since:
            spent = now_ms - self._since
            self.total_ms[self._activity] += spent
            self._window[self._activity] += spent
            if sum(self._window.values()) >= WINDOW_MS:
                self._last_ratios = _ratios(self._window)
                self._window = dict.fromkeys(Activity, 0)
        self._since = now_ms

    def now_is(self, worked: bool, back_pressured: bool) -> None:
        """What the step found."""
        if back_pressured:
            self._activity = Activity.BACK_PRESSURED
        else:
            self._activity = Activity.BUSY if worked else Activity.IDLE

    def ratios(self, now_ms: int) -> dict[Activity, float]:
        """Shares of recent time (at least the last second, where there was one)."""
        window = dict(self._window)
        if self._since is not None and now_ms > self._since:
            window[self._activity] += now_ms - self._since
        spent = sum(window.values())
        if spent >= WINDOW_MS or not any(self._last_ratios.values()):
            return _ratios(window)
        weight = spent / WINDOW_MS
        current = _ratios(window)
        return {activity: weight * current[activity] + (1 - weight) * self._last_ratios[activity]
                for activity in Activity}

    def back_pressure(self, now_ms: int) -> float:
        return self.ratios(now_ms)[Activity.BACK_PRESSURED]


def _ratios(window: dict[Activity, int]) -> dict[Activity, float]:
    spent = sum(window.values())
    return {activity: (window[activity] / spent if spent else 0.0) for activity in Activity}

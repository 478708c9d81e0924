"""Time that never goes back, made from a wall clock that may."""

from __future__ import annotations


class SteadyTime:
    """`now_ms` grows with the wall clock; where the clock is set back it stands still and goes on from there."""

    def __init__(self) -> None:
        self.wall_ms = 0
        self.now_ms = 0
        self._offset = 0
        self._begun = False

    def advance(self, wall_ms: int) -> bool:
        """Take the wall clock's reading; True if it has been set back since the last one."""
        set_back = self._begun and wall_ms + self._offset < self.now_ms
        if set_back:
            self._offset = self.now_ms - wall_ms
        self._begun = True
        self.wall_ms = wall_ms
        self.now_ms = wall_ms + self._offset
        return set_back

    def to_wall(self, steady_ms: int) -> int:
        """The wall clock's reading at a steady time, as far as is known now."""
        return steady_ms - self._offset

"""The watermark of a subtask: the smallest of its channels, those that are idle or have ended left out."""

from __future__ import annotations

from checkpoint.runtime.contracts import MAX_WATERMARK, MIN_WATERMARK


class WatermarkMerger:
    """Event time over all input channels. It never goes back, even if a channel comes out of idleness behind it."""

    def __init__(self, channels: int) -> None:
        self._channels = [MIN_WATERMARK] * channels
        self._inactive: set[int] = set()
        self._combined = MIN_WATERMARK
        self._idle = False

    @property
    def combined(self) -> int:
        return self._combined

    def update(self, channel: int, watermark: int) -> None:
        self._inactive.discard(channel)
        if watermark > self._channels[channel]:
            self._channels[channel] = watermark

    def activate(self, channel: int) -> bool:
        """A record came: the channel takes part again. True if it did not before."""
        if not self._inactive or channel not in self._inactive:
            return False
        self._inactive.discard(channel)
        return True

    def deactivate(self, channel: int) -> None:
        self._inactive.add(channel)

    def advance(self) -> int | None:
        """The new combined watermark, if it has advanced."""
        if self._inactive:
            active = [watermark for channel, watermark in enumerate(self._channels) if channel not in self._inactive]
            # With no channel active there is nothing to wait for but what was promised already.
            lowest = min(active) if active else self._combined
        else:
            lowest = min(self._channels, default=MAX_WATERMARK)
        if len(self._inactive) < len(self._channels):
            self._idle = False
        if lowest <= self._combined:
            return None
        self._combined = lowest
        return lowest

    def became_idle(self) -> bool:
        """True once, when the last active channel has gone idle or ended."""
        if self._idle or len(self._inactive) < len(self._channels):
            return False
        self._idle = True
        return True

"""Alignment of barriers over the input channels of one subtask, as a state machine: barriers in, decisions out.

Channels of all gates are numbered through. For every element the subtask tells two moments: when a barrier *arrives*
in a channel's queue, and when it is *reached* at the head of the queue. An aligned barrier counts when it is reached,
an unaligned one when it arrives, because it overtakes what is queued before it. With TakeSnapshot the subtask looks
through the queues of the `capturing` channels: barriers and ends that are in there have arrived and are told at once.

    aligned         channels whose barrier was reached are `blocked` until the last one has it; then TakeSnapshot
    at least once   nothing is blocked; TakeSnapshot when the last channel has it
    unaligned       TakeSnapshot at the first barrier; the others are `capturing` until theirs arrives
    with timeout    aligned until `deadline`, then unaligned

A channel that has ended counts as one that has delivered every barrier. `ordered` channels (broadcast edges) are never
overtaken: an unaligned snapshot waits until their barriers have been reached. A newer barrier ends the wait for an
older one, whose barriers are lost or cancelled; a barrier of a closed checkpoint is ignored.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from checkpoint.runtime.contracts import Barrier, CheckpointKind


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Take the snapshot now and pass the barrier on. `capturing`: channels whose records are channel state until
    their barrier arrives; empty and `unaligned` False when the alignment is complete."""

    barrier: Barrier
    unaligned: bool
    capturing: tuple[int, ...]
    start_delay_ms: int
    alignment_ms: int


@dataclass(frozen=True, slots=True)
class CaptureComplete:
    """The barrier has arrived on every channel: the channel state is whole."""

    checkpoint_id: int
    alignment_ms: int


@dataclass(frozen=True, slots=True)
class AbortAlignment:
    """The checkpoint will not be: pass a cancellation on. `snapshot_taken`: it had already been taken here."""

    checkpoint_id: int
    message: str
    snapshot_taken: bool


BarrierAction = TakeSnapshot | CaptureComplete | AbortAlignment


@dataclass(slots=True)
class _Alignment:
    barrier: Barrier
    first_ms: int
    missing: set[int]
    deadline: int | None = None
    overtaking: bool = False
    taken: bool = False

    @property
    def id(self) -> int:
        return self.barrier.checkpoint_id


@dataclass(slots=True)
class _Tracker:
    """Barriers of several checkpoints at a time, when nothing is aligned."""

    barrier: Barrier
    first_ms: int
    missing: set[int] = field(default_factory=set)


class BarrierHandler:
    """The barriers of one subtask. `blocked` channels must not be read; arrivals on `capturing` ones are recorded."""

    def __init__(self, channels: int, ordered: Iterable[int] = ()) -> None:
        self.blocked: set[int] = set()
        self.capturing: set[int] = set()
        self._open = set(range(channels))
        self._ordered = frozenset(ordered)
        self._current: _Alignment | None = None
        self._tracked: dict[int, _Tracker] = {}
        self._cancelled: set[int] = set()
        self._closed_id = -1

    # -- what happens on channels --------------------------------------------------------------------------------------

    def on_arrival(self, channel: int, barrier: Barrier, now_ms: int) -> list[BarrierAction]:
        """The barrier is in the queue. One that overtakes starts its checkpoint now, one with a timeout its clock."""
        options = barrier.options
        if not _may_overtake(barrier) or not (options.unaligned or options.aligned_timeout_ms is not None) or \
                channel in self._ordered or self._is_over(barrier.checkpoint_id):
            return []
        actions, current = self._align(barrier, now_ms)
        if current is None or current.taken or not options.unaligned:
            return actions
        current.overtaking = True
        return actions + self._advance(now_ms)

    def captures(self, channel: int, checkpoint_id: int) -> bool:
        """Whether this checkpoint's barrier, arriving on the channel, ends the capture there."""
        return channel in self.capturing and self._current is not None and self._current.id == checkpoint_id

    def on_barrier(self, channel: int, barrier: Barrier, now_ms: int) -> list[BarrierAction]:
        """The barrier was reached at the head of its channel, or ends the capture of the channel by its arrival."""
        if self._is_over(barrier.checkpoint_id):
            return []
        if not barrier.options.exactly_once:
            return self._track(channel, barrier, now_ms)
        actions, current = self._align(barrier, now_ms)
        if current is None:
            return actions
        if barrier.options.unaligned and _may_overtake(barrier):
            current.overtaking = True
        current.missing.discard(channel)
        if not current.taken:
            self.blocked.add(channel)
        return actions + self._advance(now_ms)

    def on_end(self, channel: int, now_ms: int) -> list[BarrierAction]:
        """The channel has delivered its last element: it counts as having delivered every barrier from now on."""
        self._open.discard(channel)
        return self.on_end_arrived(channel, now_ms)

    def on_end_arrived(self, channel: int, now_ms: int) -> list[BarrierAction]:
        """The last element is queued: nothing more will arrive, so a capture of this channel is whole."""
        actions: list[BarrierAction] = []
        if channel not in self._open:
            for tracker in list(self._tracked.values()):
                tracker.missing.discard(channel)
                actions += self._advance_tracker(tracker, now_ms)
        current = self._current
        if current is not None and channel in current.missing and (current.taken or channel not in self._open):
            current.missing.discard(channel)
            actions += self._advance(now_ms)
        return actions

    def on_cancel(self, checkpoint_id: int) -> list[BarrierAction]:
        """Somebody upstream, or the coordinator, has given the checkpoint up."""
        if self._is_over(checkpoint_id):
            return []
        if self._current is not None and self._current.id == checkpoint_id:
            return self._close_current("it was cancelled")
        self._tracked.pop(checkpoint_id, None)
        self._cancelled.add(checkpoint_id)
        return [AbortAlignment(checkpoint_id, "it was cancelled", False)]

    def on_time(self, now_ms: int) -> list[BarrierAction]:
        """Time has passed: an alignment past its deadline goes unaligned."""
        current = self._current
        if current is None or current.taken or current.deadline is None or now_ms < current.deadline:
            return []
        current.overtaking, current.deadline = True, None
        return self._advance(now_ms)

    def clock_was_set_back(self, by_ms: int) -> None:
        """A deadline of the old clock is the same span away on the new one."""
        if self._current is not None and self._current.deadline is not None:
            self._current.deadline -= by_ms

    def on_trigger(self, barrier: Barrier, now_ms: int) -> list[BarrierAction]:
        """The coordinator triggers directly: right for a subtask with no open channel, ignored otherwise."""
        if self._open or self._is_over(barrier.checkpoint_id):
            return []
        self._close(barrier.checkpoint_id)
        overtaking = barrier.options.unaligned and _may_overtake(barrier)
        taken = TakeSnapshot(barrier, overtaking, (), max(0, now_ms - barrier.timestamp), 0)
        return [taken, CaptureComplete(barrier.checkpoint_id, 0)] if overtaking else [taken]

    # -- what can be seen ----------------------------------------------------------------------------------------------

    @property
    def deadline(self) -> int | None:
        """When `on_time` wants to be called at the latest."""
        current = self._current
        return None if current is None or current.taken else current.deadline

    @property
    def aligning(self) -> bool:
        """Whether any checkpoint waits for barriers here."""
        return self._current is not None or bool(self._tracked)

    @property
    def all_ended(self) -> bool:
        return not self._open

    def missing(self) -> dict[int, tuple[int, ...]]:
        """The channels that each checkpoint in progress still waits for."""
        waiting = {tracker.barrier.checkpoint_id: tuple(sorted(tracker.missing)) for tracker in self._tracked.values()}
        if self._current is not None:
            waiting[self._current.id] = tuple(sorted(self._current.missing))
        return waiting

    # -- how it goes on ------------------------------------------------------------------------------------------------

    def _is_over(self, checkpoint_id: int) -> bool:
        return checkpoint_id <= self._closed_id or checkpoint_id in self._cancelled

    def _align(self, barrier: Barrier, now_ms: int) -> tuple[list[BarrierAction], _Alignment | None]:
        """The alignment that this barrier belongs to; None if a newer one is under way."""
        current, checkpoint_id = self._current, barrier.checkpoint_id
        if current is not None and current.id > checkpoint_id:
            return [], None
        actions: list[BarrierAction] = []
        if current is not None and current.id < checkpoint_id:
            actions = self._close_current(f"barrier {checkpoint_id} came while the one of {current.id} was missing")
            current = None
        if current is None:
            current = self._current = _Alignment(barrier, now_ms, set(self._open), _deadline(barrier, now_ms))
        return actions, current

    def _advance(self, now_ms: int) -> list[BarrierAction]:
        current = self._current
        assert current is not None
        actions: list[BarrierAction] = []
        if not current.taken and (not current.missing or
                                  (current.overtaking and not current.missing & self._ordered)):
            actions.append(self._take(current, now_ms))
        if current.taken:
            self.capturing &= current.missing
            if not current.missing:
                self._current = None
                self._close(current.id)
                if current.overtaking:
                    actions.append(CaptureComplete(current.id, max(0, now_ms - current.first_ms)))
        return actions

    def _take(self, current: _Alignment, now_ms: int) -> TakeSnapshot:
        # An alignment that completes on its own needs no channel state, even if it was allowed to overtake.
        current.overtaking = current.overtaking and bool(current.missing or current.barrier.options.unaligned)
        current.taken = True
        self.blocked.clear()
        self.capturing = set(current.missing)
        return TakeSnapshot(current.barrier, current.overtaking, tuple(sorted(current.missing)),
                            max(0, current.first_ms - current.barrier.timestamp), max(0, now_ms - current.first_ms))

    def _close_current(self, message: str) -> list[BarrierAction]:
        current = self._current
        assert current is not None
        self._current = None
        self.blocked.clear()
        self.capturing.clear()
        self._close(current.id)
        return [AbortAlignment(current.id, message, current.taken)]

    def _close(self, checkpoint_id: int) -> None:
        self._closed_id = max(self._closed_id, checkpoint_id)
        if self._cancelled:
            self._cancelled = {cancelled for cancelled in self._cancelled if cancelled > self._closed_id}

    def _track(self, channel: int, barrier: Barrier, now_ms: int) -> list[BarrierAction]:
        tracker = self._tracked.get(barrier.checkpoint_id)
        if tracker is None:
            tracker = self._tracked[barrier.checkpoint_id] = _Tracker(barrier, now_ms, set(self._open))
        tracker.missing.discard(channel)
        return self._advance_tracker(tracker, now_ms)

    def _advance_tracker(self, tracker: _Tracker, now_ms: int) -> list[BarrierAction]:
        checkpoint_id = tracker.barrier.checkpoint_id
        if tracker.missing or checkpoint_id not in self._tracked:
            return []
        overtaken = sorted(older for older in self._tracked if older < checkpoint_id)
        for closed in (*overtaken, checkpoint_id):
            del self._tracked[closed]
        self._close(checkpoint_id)
        message = f"checkpoint {checkpoint_id} was complete first"
        return [*(AbortAlignment(older, message, False) for older in overtaken),
                TakeSnapshot(tracker.barrier, False, (), max(0, tracker.first_ms - tracker.barrier.timestamp),
                             max(0, now_ms - tracker.first_ms))]


def _may_overtake(barrier: Barrier) -> bool:
    return barrier.options.exactly_once and barrier.options.kind is CheckpointKind.CHECKPOINT


def _deadline(barrier: Barrier, now_ms: int) -> int | None:
    """Counted from the trigger; from now if the clock has since been set back."""
    timeout = barrier.options.aligned_timeout_ms
    if timeout is None or not _may_overtake(barrier) or barrier.options.unaligned:
        return None
    return min(barrier.timestamp, now_ms) + timeout

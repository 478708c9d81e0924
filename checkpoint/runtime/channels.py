"""The output channels of one subtask: bounded queues that send as far as the receiver has given credit.

A unit of credit is one batch of records; everything else on a channel needs none, but keeps its place in the order.
Small batches that wait for credit are joined, so that a slow receiver gets fewer and larger ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from checkpoint.runtime.contracts import Barrier, Element, EndOfInput, Partitioner, Records, Watermark

DEFAULT_CREDIT = 8
DEFAULT_QUEUE_LIMIT = 8
JOIN_UP_TO = 1024


@dataclass(frozen=True)
class InputEdge:
    """An edge that a subtask reads: its id in the graph, the sending task, and the sending subtask of each channel.

    `ordered`: barriers never overtake records on it (broadcast edges).
    """

    edge: str
    task: str
    senders: Sequence[int]
    ordered: bool = False


@dataclass(frozen=True)
class OutputEdge:
    """An edge that a subtask writes: its id in the graph, and the receiving subtask of each channel."""

    edge: str
    partitioner: Partitioner
    receivers: Sequence[int]

    @property
    def ordered(self) -> bool:
        return self.partitioner.broadcast


class OutputChannel:
    """The queue in front of one channel. `send` is called in order, from the subtask's thread."""

    __slots__ = ("_joinable", "_joined", "_send", "credit", "edge", "index", "limit", "ordered", "queue", "receiver")

    def __init__(self, index: int, edge: str, receiver: int, *, ordered: bool, credit: int, limit: int,
                 send: Callable[[int, Element], None]) -> None:
        self.index, self.edge, self.receiver, self.ordered = index, edge, receiver, ordered
        self.credit, self.limit = credit, limit
        self.queue: deque[Element] = deque()
        self._send = send
        self._joinable = self._joined = False

    @property
    def full(self) -> bool:
        return len(self.queue) >= self.limit

    def put_records(self, records: Records) -> None:
        if not self.queue and self.credit > 0:
            self.credit -= 1
            self._send(self.index, records)
        elif not self._join(records):
            self.queue.append(records)
            self._joinable, self._joined = True, False

    def put(self, element: Element) -> None:
        """A watermark, barrier or end: behind everything that is queued."""
        queue = self.queue
        self._joinable = False
        if not queue:
            self._send(self.index, element)
        elif type(element) is Watermark and type(queue[-1]) is Watermark:
            queue[-1] = element
        elif type(queue[-1]) is EndOfInput:
            queue.insert(len(queue) - 1, element)  # the end stays last; only a barrier comes after it was queued
        else:
            queue.append(element)

    def pump(self) -> bool:
        """Send what the credit allows; whether anything was sent."""
        queue, sent = self.queue, False
        while queue:
            if type(queue[0]) is Records:
                if self.credit <= 0:
                    break
                self.credit -= 1
            self._send(self.index, queue.popleft())
            sent = True
        return sent

    def holds(self, checkpoint_id: int) -> bool:
        """Whether this checkpoint's barrier still waits here."""
        return any(type(element) is Barrier and element.checkpoint_id == checkpoint_id for element in self.queue)

    def overtake(self, barrier: Barrier) -> tuple[Records, ...]:
        """Send the barrier now, ahead of everything queued; the records that it overtook."""
        self._joinable = False
        overtaken = tuple(element for element in self.queue if type(element) is Records)
        self._send(self.index, barrier)
        return overtaken

    def overtake_late(self, barrier: Barrier) -> tuple[Records, ...]:
        """The same for a barrier that has waited in the queue for too long."""
        before: list[Element] = []
        queue = self.queue
        while queue:
            element = queue.popleft()
            if type(element) is Barrier and element.checkpoint_id == barrier.checkpoint_id:
                break
            before.append(element)
        queue.extendleft(reversed(before))
        self._joinable = False
        self._send(self.index, barrier)
        return tuple(element for element in before if type(element) is Records)

    def drop(self, checkpoint_id: int) -> None:
        """Take a cancelled checkpoint's barrier out of the queue."""
        if self.holds(checkpoint_id):
            kept = [element for element in self.queue
                    if not (type(element) is Barrier and element.checkpoint_id == checkpoint_id)]
            self.queue = deque(kept)
            self._joinable = False

    def _join(self, records: Records) -> bool:
        """Add to the last queued batch, where both are small and alike. A joined batch is our own copy."""
        if not self._joinable or not self.queue:
            return False
        last = self.queue[-1]
        assert type(last) is Records
        if len(last.values) + len(records.values) > JOIN_UP_TO or \
                (last.timestamps is None) is not (records.timestamps is None) or \
                (last.keys is None) is not (records.keys is None):
            return False
        if not self._joined:
            last = Records(list(last.values), None if last.timestamps is None else list(last.timestamps),
                           None if last.keys is None else list(last.keys))
            self.queue[-1] = last
            self._joined = True
        last.values.extend(records.values)
        if last.timestamps is not None and records.timestamps is not None:
            last.timestamps.extend(records.timestamps)
        if last.keys is not None and records.keys is not None:
            last.keys.extend(records.keys)
        return True


def unaligned(barrier: Barrier) -> Barrier:
    """The same barrier, now allowed to overtake."""
    return replace(barrier, options=replace(barrier.options, unaligned=True, aligned_timeout_ms=None))

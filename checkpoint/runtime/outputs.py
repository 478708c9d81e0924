"""The output half of one subtask: records routed to channels, watermarks and barriers put behind or ahead of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from checkpoint.runtime.channels import OutputChannel, OutputEdge, unaligned
from checkpoint.runtime.contracts import Barrier, ChannelIdle, Element, Records, Watermark
from checkpoint.runtime.snapshots import RunningSnapshot


class SubtaskOutputs:
    """What a chain emits into. Belongs to the subtask's thread; `send` delivers on a channel, numbered over all edges."""

    def __init__(self, subtask_index: int, edges: Sequence[OutputEdge], send: Callable[[int, Element], None], *,
                 credit: int, queue_limit: int) -> None:
        self.records = 0
        self.ended = False
        """The end has been put: it is the last element of every channel."""
        self._index, self._edges = subtask_index, tuple(edges)
        self._channels: list[OutputChannel] = []
        self._by_edge: list[list[OutputChannel]] = []
        for edge in edges:
            channels = [OutputChannel(len(self._channels) + place, edge.edge, receiver, ordered=edge.ordered,
                                      credit=credit, limit=queue_limit, send=send)
                        for place, receiver in enumerate(edge.receivers)]
            self._channels += channels
            self._by_edge.append(channels)
        self._waiting: set[int] = set()

    # -- ChainOutput ---------------------------------------------------------------------------------------------------

    def emit(self, edge: int, records: Records) -> None:
        """Route a batch of the chain to the channels of one edge."""
        count = len(records.values)
        if not count:
            return
        self.records += count
        channels = self._by_edge[edge]
        if len(channels) == 1:
            self._put(channels[0], records)
            return
        for index, part in self._edges[edge].partitioner.split(records, len(channels)):
            self._put(channels[index], part)

    def emit_watermark(self, watermark: int) -> None:
        self.put_all(Watermark(watermark))

    def emit_idle(self) -> None:
        self.put_all(ChannelIdle())

    def _put(self, channel: OutputChannel, records: Records) -> None:
        channel.put_records(records)
        if channel.queue:
            self._waiting.add(channel.index)

    # -- queues --------------------------------------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """Whether some queue takes no more: back pressure."""
        channels = self._channels
        return any(channels[index].full for index in self._waiting)

    @property
    def waiting(self) -> list[int]:
        """The channels that have something queued."""
        return list(self._waiting)

    def put_all(self, element: Element) -> None:
        """A watermark, cancellation or end on every channel, behind what is queued."""
        for channel in self._channels:
            if self.ended and not channel.queue:
                continue
            channel.put(element)
            if channel.queue:
                self._waiting.add(channel.index)

    def add_credit(self, index: int, credit: int) -> bool:
        """The receiver takes more batches; whether some are queued for it."""
        channel = self._channels[index]
        channel.credit += credit
        return bool(channel.queue)

    def pump(self, index: int) -> bool:
        """Send what the credit of a channel allows; whether anything was sent."""
        channel = self._channels[index]
        sent = channel.pump()
        if not channel.queue:
            self._waiting.discard(index)
        return sent

    # -- barriers ------------------------------------------------------------------------------------------------------

    def send_barrier(self, snapshot: RunningSnapshot, barrier: Barrier, overtaking: bool, now: int) -> None:
        """Pass the barrier on; the records that it overtakes become part of the snapshot."""
        may_overtake = overtaking or barrier.options.aligned_timeout_ms is not None
        for channel in self._channels:
            # The end of a channel counts as every barrier. It is only where the end itself waits behind records, which
            # an unaligned checkpoint must not wait for, that a barrier goes ahead of it.
            if self.ended and not (channel.queue and may_overtake):
                continue
            if overtaking and not channel.ordered:
                snapshot.add_output(channel.edge, self._index, channel.receiver, channel.overtake(barrier))
                continue
            channel.put(barrier)
            if channel.queue:
                self._waiting.add(channel.index)
                if barrier.options.aligned_timeout_ms is not None and not channel.ordered:
                    snapshot.wait_for_output(channel.index, now)

    def note_sent(self, index: int, snapshot: RunningSnapshot) -> bool:
        """After something was sent: whether this snapshot's barrier, which had waited in that queue, was among it."""
        if index not in snapshot.waiting_outputs or self._channels[index].holds(snapshot.checkpoint_id):
            return False
        snapshot.output_sent(index)
        return True

    def overtake_late(self, snapshot: RunningSnapshot) -> None:
        """Barriers have waited in output queues for longer than the aligned timeout: they overtake now."""
        barrier = unaligned(snapshot.barrier)
        for index in snapshot.waiting_outputs:
            channel = self._channels[index]
            snapshot.add_output(channel.edge, self._index, channel.receiver, channel.overtake_late(barrier))
        snapshot.outputs_overtaken()

    def drop_barrier(self, snapshot: RunningSnapshot) -> None:
        """Take the barriers of a checkpoint that was given up out of the queues."""
        for index in snapshot.waiting_outputs:
            self._channels[index].drop(snapshot.checkpoint_id)

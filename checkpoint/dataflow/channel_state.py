"""In-flight records in a checkpoint: every batch in the records codec, with its edge and channel.

    file  = version (u8 = 1) | msgpack [[edge, sender, receiver, output, [batch, ...]], ...]

A savepoint in another format has a note in its place, which that format reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from checkpoint.dataflow.chain import edge_id
from checkpoint.dataflow.graph import Dataflow
from checkpoint.dataflow.records import RecordCodec
from checkpoint.runtime.contracts import InFlight
from statebackend.errors import CorruptData, IncompatibleState
from statebackend.files import SnapshotSource, SnapshotTarget, StateFile, writing
from statebackend.formats import noted_channel_state

CHANNEL_STATE_VERSION = 1


class FlowChannelCodec:
    """The ChannelStateCodec of a flow; the record types of its streams are known by edge."""

    def __init__(self, flow: Dataflow) -> None:
        self._codecs: Mapping[str, RecordCodec] = {
            edge_id(flow.nodes, flow.edges, edge):
                RecordCodec(flow.nodes[edge.source].record_type if edge.tag is None else None)
            for edge in flow.edges}

    def write(self, in_flight: Sequence[InFlight], target: SnapshotTarget) -> StateFile:
        body: list[Any] = [[part.edge, part.sender, part.receiver, part.output,
                            [self._codecs[part.edge].encode(batch) for batch in part.batches]] for part in in_flight]
        with writing(target, "in-flight", shared=False) as (writer, done):
            writer.write(bytes([CHANNEL_STATE_VERSION]) + msgspec.msgpack.encode(body))
        return done[0]

    def read(self, file: StateFile, source: SnapshotSource) -> list[InFlight]:
        """Batches of edges that the flow no longer has are left undecoded: their parts come back empty."""
        with source.open(file) as stream:
            data = stream.read()
        noted = noted_channel_state(data, file, source)
        if noted is not None:
            return [self._part(*part) for part in noted]
        if not data or data[0] != CHANNEL_STATE_VERSION:
            raise IncompatibleState("in-flight records have a version that this release does not read", path=file.path,
                                    expected=CHANNEL_STATE_VERSION, found=data[0] if data else None)
        try:
            parts = msgspec.msgpack.decode(memoryview(data)[1:])
            return [self._part(*part) for part in parts]
        except (msgspec.DecodeError, TypeError, ValueError) as error:
            raise CorruptData(f"in-flight records can't be decoded: {error}", path=file.path) from error

    def _part(self, edge: str, sender: int, receiver: int, output: bool, batches: list[bytes],
              receivers: tuple[int, ...] = ()) -> InFlight:
        codec = self._codecs.get(edge)
        decoded = tuple(codec.decode(batch) for batch in batches) if codec is not None else ()
        return InFlight(edge, sender, receiver, decoded, output, receivers)

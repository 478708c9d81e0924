"""Batches and channel state that were written once are read for ever (docs/formats/records.md)."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple
from uuid import UUID

import pytest

from checkpoint import CollectionSource, CollectSink, Dataflow
from checkpoint.dataflow.channel_state import FlowChannelCodec
from checkpoint.dataflow.records import RecordCodec
from checkpoint.runtime.contracts import InFlight, Records
from statebackend import CorruptData, IncompatibleState, LocalFiles
from statebackend.files import StateFile

GOLDEN = Path(__file__).resolve().parents[2] / "golden/v1"


class Click(NamedTuple):
    user: str
    n: int


PLAIN = Records([None, True, -5, 2**63, 1.5, "ä", b"\x00", [1, [2]], {"a": 1, 7: "b"}], [1, None, *range(7)])
SPECIAL = Records([(1, ("x",)), {3}, frozenset({"y"}), datetime(2026, 11, 18, 12, 30, tzinfo=UTC), datetime(2026, 1, 1),
                   date(2026, 2, 3), time(4, 5, 6, 7), timedelta(days=-1, seconds=5), Decimal("-1.50"), UUID(int=42),
                   2**80, {(1, 2): [(3,)]}], None, [("k", number) for number in range(12)])
TYPED = Records([Click("ann", 1), Click("bob", 2**70)])


@pytest.mark.parametrize(("name", "records", "kind"), [
    ("plain", PLAIN, None), ("special", SPECIAL, None), ("typed", TYPED, Click)])
def test_batches_of_version_1_are_read_and_written_as_ever(name, records, kind):
    stored = (GOLDEN / f"records_{name}.bin").read_bytes()
    decoded = RecordCodec(kind).decode(stored)
    assert (decoded.values, decoded.timestamps, decoded.keys) == (records.values, records.timestamps, records.keys)
    assert RecordCodec(kind).encode(records) == stored


def flow() -> Dataflow:
    built = Dataflow("golden")
    built.source(CollectionSource([Click("a", 1)], record_type=Click), uid="clicks").rebalance() \
        .map(str, uid="text", parallelism=2).sink(CollectSink(), uid="out")
    return built


IN_FLIGHT = [InFlight("clicks->text#0", 0, 1, (TYPED, TYPED)), InFlight("clicks->text#0", 0, 0, (TYPED,), output=True)]


def shape(parts: list[InFlight]) -> list:
    return [(part.edge, part.sender, part.receiver, part.output, [batch.values for batch in part.batches])
            for part in parts]


def stored_channel_state(data: bytes) -> StateFile:
    import xxhash

    return StateFile("in-flight", len(data), xxhash.xxh3_128_hexdigest(data), inline=data)


def test_channel_state_of_version_1_is_read_and_written_as_ever(tmp_path):
    data = (GOLDEN / "channel_state.bin").read_bytes()
    codec = FlowChannelCodec(flow())
    assert shape(codec.read(stored_channel_state(data), LocalFiles(tmp_path))) == shape(IN_FLIGHT)
    written = codec.write(IN_FLIGHT, LocalFiles(tmp_path))
    assert (tmp_path / written.path).read_bytes() == data


def test_channel_state_of_an_edge_that_is_gone_is_not_decoded(tmp_path):
    data = (GOLDEN / "channel_state.bin").read_bytes()
    other = Dataflow("other")
    other.source(CollectionSource([1]), uid="s").sink(CollectSink(), uid="o")
    parts = FlowChannelCodec(other).read(stored_channel_state(data), LocalFiles(tmp_path))
    assert [(part.edge, part.batches) for part in parts] == [("clicks->text#0", ()), ("clicks->text#0", ())]


def test_channel_state_that_is_newer_or_cut_short_is_refused(tmp_path):
    data = (GOLDEN / "channel_state.bin").read_bytes()
    codec = FlowChannelCodec(flow())
    with pytest.raises(IncompatibleState, match="version"):
        codec.read(stored_channel_state(bytes([2]) + data[1:]), LocalFiles(tmp_path))
    with pytest.raises(CorruptData):
        codec.read(stored_channel_state(data[:20]), LocalFiles(tmp_path))

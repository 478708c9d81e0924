"""Partitioners: every record of a batch takes exactly one channel, in order."""

from __future__ import annotations

import pytest

from checkpoint.dataflow.graph import KeySpec
from checkpoint.dataflow.keys import (
    BroadcastPartitioner,
    ForwardPartitioner,
    KeyPartitioner,
    KeySelector,
    RebalancePartitioner,
)
from checkpoint.runtime.contracts import Records
from statebackend import InvalidRequest, key_group_of, subtask_of


@pytest.mark.parametrize("channels", [1, 2, 3, 7])
def test_keys_go_to_the_subtask_that_owns_their_key_group(channels):
    partitioner = KeyPartitioner(KeySelector(KeySpec("user", str)), 128)
    values = [{"user": f"u{number}"} for number in range(200)]
    parts = dict(partitioner.split(Records(values, list(range(200))), channels))
    assert sum(map(len, parts.values())) == 200
    for channel, part in parts.items():
        assert part.timestamps == sorted(part.timestamps)
        for value in part.values:
            assert subtask_of(key_group_of(value["user"], 128), channels, 128) == channel


def test_records_in_flight_are_rerouted_by_key():
    partitioner = KeyPartitioner(KeySelector(KeySpec(lambda n: n, int)), 16)
    parts = partitioner.reroute(Records(list(range(50))), (0, 1), 3)
    assert sorted(value for _, part in parts for value in part.values) == list(range(50))
    assert all(subtask_of(key_group_of(value, 16), 3, 16) == channel for channel, part in parts for value in part.values)


def test_a_key_of_another_type_is_refused():
    partitioner = KeyPartitioner(KeySelector(KeySpec(lambda n: n, str)), 16)
    with pytest.raises(InvalidRequest):
        partitioner.split(Records(["a", 1]), 2)
    with pytest.raises(InvalidRequest):
        partitioner.split(Records(["a", None]), 2)


def test_a_record_without_the_key_field_is_named():
    with pytest.raises(InvalidRequest, match="lacks the field"):
        KeySelector(KeySpec("user", str)).many([{"user": "a"}, {"name": "b"}])


@pytest.mark.parametrize("size", [0, 1, 2, 5, 1000])
def test_rebalance_deals_evenly_over_time(size):
    partitioner, counts = RebalancePartitioner(), [0, 0, 0]
    for _ in range(30):
        for channel, part in partitioner.split(Records(list(range(size))), 3):
            counts[channel] += len(part)
    assert sum(counts) == 30 * size
    assert max(counts) - min(counts) <= 1


def test_broadcast_and_forward():
    records = Records([1, 2])
    assert BroadcastPartitioner().split(records, 3) == [(0, records), (1, records), (2, records)]
    assert ForwardPartitioner().split(records, 1) == [(0, records)]
    assert ForwardPartitioner().reroute(records, (2, 2), 2) == [(0, records)]

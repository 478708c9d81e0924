"""In-flight records after a restore: each goes to whoever owns its key now, in the order of its old channel."""

from checkpoint.runtime.contracts import InFlight, Records
from checkpoint.runtime.in_flight import EdgeShape, redistribute_in_flight
from checkpoint.runtime.simulated.chain import BroadcastPartitioner, HashPartitioner, RebalancePartitioner
from checkpoint.runtime.simulated.scenario import MAX_PARALLELISM, key_group, key_of


def values(parts):
    return [value for part in parts for batch in part.batches for value in batch.values]


def test_unchanged_parallelism_gives_everyone_its_own_input_before_output():
    stored = [InFlight("e", 0, 1, (Records([3]),), output=True), InFlight("e", 0, 1, (Records([1]), Records([2]))),
              InFlight("e", 0, 0, (Records([9]),))]
    dealt = redistribute_in_flight(stored, {"e": EdgeShape("op", HashPartitioner(), 2, 2)})
    assert values(dealt["op", 1]) == [1, 2, 3]
    assert values(dealt["op", 0]) == [9]


def test_keyed_records_follow_their_keys_to_another_parallelism():
    records = [("r", number) for number in range(60)]
    stored = [InFlight("e", 0, 0, (Records(records[:30], [None] * 30),)),
              InFlight("e", 0, 0, (Records(records[30:], [None] * 30),), output=True)]
    dealt = redistribute_in_flight(stored, {"e": EdgeShape("op", HashPartitioner(), 3, 2)})
    assert sorted(value for parts in dealt.values() for value in values(parts)) == records
    for (_, subtask), parts in dealt.items():
        got = values(parts)
        assert got == sorted(got), "the order of the old channel"
        assert {key_group(key_of(value)) * 3 // MAX_PARALLELISM for value in got} == {subtask}


def test_unkeyed_records_are_not_lost_when_their_receiver_is_gone():
    stored = [InFlight("e", 1, receiver, (Records([receiver]),)) for receiver in range(3)]
    dealt = redistribute_in_flight(stored, {"e": EdgeShape("op", RebalancePartitioner(), 1, 3)})
    assert values(dealt["op", 0]) == [0, 1, 2]


def test_broadcast_records_go_where_the_broadcast_state_of_their_receiver_goes():
    stored = [InFlight("e", 0, receiver, (Records([receiver]),)) for receiver in range(2)]
    wider = redistribute_in_flight(stored, {"e": EdgeShape("op", BroadcastPartitioner(), 3, 2)})
    assert [values(wider["op", index]) for index in range(3)] == [[0], [1], [0]]
    narrower = redistribute_in_flight(stored, {"e": EdgeShape("op", BroadcastPartitioner(), 1, 2)})
    assert {subtask: values(parts) for subtask, parts in narrower.items()} == {("op", 0): [0]}


def test_records_of_an_edge_that_is_gone_are_left_out():
    assert redistribute_in_flight([InFlight("gone", 0, 0, (Records([1]),))], {}) == {}

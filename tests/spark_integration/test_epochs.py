"""Which epoch a batch starts from, when it is whole, what may be forgotten."""

from __future__ import annotations

import pytest

from spark_integration.epochs import (
    Acknowledgement,
    EpochId,
    Generation,
    Manifest,
    OpenGeneration,
    OwnGeneration,
    Publish,
    TaskRun,
    WaitFor,
    chain_of,
    decide_generation,
    decide_publication,
    decide_retention,
    manifest_of,
    newest_below,
    require_same_cut,
    require_whole,
)
from statebackend.backend import KeyedHandle
from statebackend.errors import Conflict, IncompatibleState, NotFound
from statebackend.keygroups import KeyGroupRange, key_group_range
from statebackend.types import state_type

KEY_TYPE = state_type(int).to_json()


def handle(key_groups: KeyGroupRange) -> KeyedHandle:
    return KeyedHandle("entries", key_groups, 128, KEY_TYPE, (), ())


def ack(index: int, parallelism: int, attempt: str, time: int | None = None) -> Acknowledgement:
    key_groups = key_group_range(index, parallelism, 128)
    return Acknowledgement(key_groups, attempt, handle(key_groups), b"op", time, time)


def generation(number: int, run: str, first: int = 0, base: EpochId | None = None) -> Generation:
    return Generation(number, run, "query", first, 2, base)


def epochs(number: int, *batches: int) -> set[EpochId]:
    return {EpochId(batch, number) for batch in batches}


def test_the_first_run_opens_the_first_generation() -> None:
    assert decide_generation(TaskRun("query", "run-1", 0), [], [], []) == OpenGeneration(1, None)


def test_a_later_task_of_a_run_finds_its_generation() -> None:
    known = [generation(1, "run-1")]
    assert decide_generation(TaskRun("query", "run-1", 5), known, [], []) == OwnGeneration(known[0])


def test_a_restart_is_based_on_the_newest_epoch_below_its_batch() -> None:
    known = [generation(1, "run-1")]
    decision = decide_generation(TaskRun("query", "run-2", 3), known, epochs(1, 0, 1, 2, 3), epochs(1, 0, 1, 2, 3))
    assert decision == OpenGeneration(2, EpochId(2, 1))


def test_a_replayed_first_batch_starts_from_nothing() -> None:
    known = [generation(1, "run-1")]
    assert decide_generation(TaskRun("query", "run-2", 0), known, epochs(1, 0), epochs(1, 0)) == OpenGeneration(2, None)


def test_manifests_off_the_chain_do_not_exist() -> None:
    first = generation(1, "run-1")
    second = generation(2, "run-2", 3, EpochId(2, 1))
    published = epochs(1, 0, 1, 2, 3, 4) | epochs(2, 3)
    assert chain_of(second, [first, second], published) == [EpochId(3, 2), EpochId(2, 1), EpochId(1, 1), EpochId(0, 1)]
    assert newest_below(5, second, [first, second], published) == EpochId(3, 2)


def test_a_chain_that_went_back_twice_keeps_only_what_the_last_run_was_based_on() -> None:
    first = generation(1, "run-1")
    second = generation(2, "run-2", 5, EpochId(4, 1))
    third = generation(3, "run-3", 2, EpochId(1, 1))
    published = epochs(1, 0, 1, 2, 3, 4) | epochs(2, 5, 6)
    assert chain_of(third, [first, second, third], published) == [EpochId(1, 1), EpochId(0, 1)]


def test_an_older_run_is_fenced_off() -> None:
    known = [generation(1, "run-1"), generation(2, "run-2", 3, EpochId(2, 1))]
    with pytest.raises(Conflict, match="newer run"):
        decide_generation(TaskRun("query", "run-1", 4), known, [], [])


def test_the_state_of_another_query_is_refused() -> None:
    with pytest.raises(Conflict, match="another query"):
        decide_generation(TaskRun("other", "run-2", 0), [generation(1, "run-1")], [], [])


def test_a_query_that_lost_its_state_is_told() -> None:
    with pytest.raises(NotFound, match="there is no state for it"):
        decide_generation(TaskRun("query", "run-1", 7), [], [], [])
    assert decide_generation(TaskRun("query", "run-1", 7), [], [], [], True) == OpenGeneration(1, None)


def test_a_restart_further_back_than_what_is_kept_is_refused() -> None:
    with pytest.raises(NotFound, match="no epoch below batch 3"):
        decide_generation(TaskRun("query", "run-2", 3), [generation(1, "run-1")], epochs(1, 7, 8), [])


def test_a_torn_epoch_is_named_in_the_same_run_and_in_the_next() -> None:
    with pytest.raises(Conflict, match="batch 3 was computed only in part"):
        require_whole(4, EpochId(2, 1), epochs(1, 0, 1, 2, 3), epochs(1, 0, 1, 2))
    with pytest.raises(Conflict, match="batch 3 was computed only in part"):
        decide_generation(TaskRun("query", "run-2", 4), [generation(1, "run-1")], epochs(1, 2), epochs(1, 2, 3))


def test_a_torn_epoch_that_is_about_to_be_replayed_is_no_error() -> None:
    decision = decide_generation(TaskRun("query", "run-2", 3), [generation(1, "run-1")], epochs(1, 2), epochs(1, 2, 3))
    assert decision == OpenGeneration(2, EpochId(2, 1))


def test_an_epoch_is_published_when_every_range_is_acknowledged() -> None:
    assert decide_publication(2, 128, [ack(0, 2, "a")]) == WaitFor((KeyGroupRange(64, 127),))
    decision = decide_publication(2, 128, [ack(1, 2, "c"), ack(0, 2, "b"), ack(0, 2, "a")])
    assert isinstance(decision, Publish)
    assert [part.attempt for part in decision.parts] == ["a", "c"]


def test_acknowledgements_of_another_parallelism_do_not_count() -> None:
    decision = decide_publication(2, 128, [ack(0, 3, "a"), ack(1, 3, "b"), ack(2, 3, "c")])
    assert isinstance(decision, WaitFor)
    assert len(decision.missing) == 2


def test_times_only_grow_along_the_chain() -> None:
    run, own = TaskRun("query", "run-1", 1), generation(1, "run-1")
    first = manifest_of(run, own, "count", 128, None, [ack(0, 2, "a", 50), ack(1, 2, "b", 90)], 0)
    second = manifest_of(run, own, "count", 128, first, [ack(0, 2, "c", None), ack(1, 2, "d", 70)], 0)
    assert (first.max_event_time, second.max_event_time, second.parent) == (90, 90, first.id)


def test_records_survive_json() -> None:
    manifest = manifest_of(TaskRun("query", "run-1", 1), generation(1, "run-1"), "count", 128, None,
                           [ack(0, 2, "a", 5), ack(1, 2, "b")], 17)
    assert Manifest.from_json(manifest.to_json()) == manifest
    own = generation(3, "run-3", 9, EpochId(8, 2))
    assert Generation.from_json(own.to_json()) == own


def test_a_record_of_a_newer_release_is_refused() -> None:
    with pytest.raises(IncompatibleState):
        Generation.from_json({**generation(1, "run").to_json(), "version": 2})


def test_retention_keeps_a_floor_to_start_from() -> None:
    own = generation(1, "run-1")
    published = epochs(1, *range(20))
    plan = decide_retention(EpochId(19, 1), 5, own, [own], published, published)
    assert plan is not None
    assert plan.floor == EpochId(14, 1)
    assert [epoch.epoch for epoch in plan.epochs] == list(range(14))
    assert decide_retention(EpochId(19, 1), 50, own, [own], published, published) is None


def test_another_key_type_or_max_parallelism_is_refused() -> None:
    manifest = manifest_of(TaskRun("query", "run-1", 1), generation(1, "run-1"), "count", 128, None, [ack(0, 1, "a")], 0)
    require_same_cut(manifest, 128, KEY_TYPE)
    with pytest.raises(IncompatibleState, match="another type"):
        require_same_cut(manifest, 128, state_type(str).to_json())
    with pytest.raises(IncompatibleState, match="max_parallelism"):
        require_same_cut(manifest, 256, KEY_TYPE)

"""Alignment as facts: what a subtask does for each order in which barriers can come."""

from checkpoint.protocol.barriers import AbortAlignment, BarrierHandler, CaptureComplete, TakeSnapshot
from checkpoint.runtime.contracts import Barrier, CheckpointKind, CheckpointOptions

ALIGNED = CheckpointOptions()
AT_LEAST_ONCE = CheckpointOptions(exactly_once=False)
UNALIGNED = CheckpointOptions(unaligned=True)
TIMED = CheckpointOptions(aligned_timeout_ms=50)
SAVEPOINT = CheckpointOptions(CheckpointKind.SAVEPOINT, unaligned=True)


def barrier(checkpoint_id, options=ALIGNED, timestamp=0):
    return Barrier(checkpoint_id, timestamp, options)


def test_early_channels_are_blocked_until_the_last_barrier_is_reached():
    handler = BarrierHandler(3)
    assert handler.on_barrier(0, barrier(1), 10) == []
    assert handler.on_barrier(2, barrier(1), 20) == []
    assert handler.blocked == {0, 2}
    assert handler.missing() == {1: (1,)}
    [taken] = handler.on_barrier(1, barrier(1), 30)
    assert taken == TakeSnapshot(barrier(1), False, (), start_delay_ms=10, alignment_ms=20)
    assert handler.blocked == set()
    assert not handler.aligning


def test_a_single_channel_needs_no_alignment():
    [taken] = BarrierHandler(1).on_barrier(0, barrier(1), 5)
    assert isinstance(taken, TakeSnapshot)
    assert taken.alignment_ms == 0


def test_at_least_once_blocks_nothing_and_waits_for_all():
    handler = BarrierHandler(2)
    assert handler.on_barrier(0, barrier(1, AT_LEAST_ONCE), 0) == []
    assert handler.blocked == set()
    assert handler.on_barrier(0, barrier(2, AT_LEAST_ONCE), 1) == []
    [first] = handler.on_barrier(1, barrier(1, AT_LEAST_ONCE), 2)
    [second] = handler.on_barrier(1, barrier(2, AT_LEAST_ONCE), 3)
    assert (first.barrier.checkpoint_id, second.barrier.checkpoint_id) == (1, 2)


def test_at_least_once_gives_up_older_checkpoints_that_a_newer_one_passes():
    handler = BarrierHandler(2)
    handler.on_barrier(0, barrier(1, AT_LEAST_ONCE), 0)
    handler.on_barrier(0, barrier(2, AT_LEAST_ONCE), 0)
    aborted, taken = handler.on_barrier(1, barrier(2, AT_LEAST_ONCE), 0)
    assert isinstance(aborted, AbortAlignment)
    assert aborted.checkpoint_id == 1
    assert taken.barrier.checkpoint_id == 2


def test_an_unaligned_barrier_takes_the_snapshot_when_it_arrives():
    handler = BarrierHandler(3)
    [taken] = handler.on_arrival(1, barrier(1, UNALIGNED), 5)
    assert taken.unaligned
    assert taken.capturing == (0, 1, 2)
    assert handler.blocked == set()
    assert handler.on_barrier(1, barrier(1, UNALIGNED), 5) == []
    assert handler.captures(0, 1)
    assert not handler.captures(1, 1)
    assert handler.on_barrier(0, barrier(1, UNALIGNED), 15) == []
    assert handler.on_barrier(2, barrier(1, UNALIGNED), 25) == [CaptureComplete(1, 20)]
    assert handler.capturing == set()


def test_savepoints_are_aligned_whatever_is_asked():
    handler = BarrierHandler(2)
    assert handler.on_arrival(0, barrier(1, SAVEPOINT), 0) == []
    assert handler.on_barrier(0, barrier(1, SAVEPOINT), 0) == []
    assert handler.blocked == {0}
    [taken] = handler.on_barrier(1, barrier(1, SAVEPOINT), 0)
    assert not taken.unaligned


def test_an_alignment_past_its_timeout_goes_unaligned():
    handler = BarrierHandler(2)
    handler.on_barrier(0, barrier(1, TIMED, timestamp=100), 120)
    assert handler.deadline == 150
    assert handler.on_time(149) == []
    [taken] = handler.on_time(150)
    assert taken.unaligned
    assert taken.capturing == (1,)
    assert handler.blocked == set()
    assert handler.deadline is None
    assert handler.on_barrier(1, barrier(1, TIMED), 170) == [CaptureComplete(1, 50)]


def test_the_timeout_counts_from_the_arrival_of_a_barrier_that_is_stuck_behind_records():
    handler = BarrierHandler(2)
    assert handler.on_arrival(0, barrier(1, TIMED, timestamp=100), 110) == []
    assert handler.deadline == 150
    [taken] = handler.on_time(160)
    assert taken.capturing == (0, 1)


def test_an_alignment_that_is_complete_in_time_stays_aligned():
    handler = BarrierHandler(2)
    handler.on_barrier(0, barrier(1, TIMED), 0)
    [taken] = handler.on_barrier(1, barrier(1, TIMED), 10)
    assert not taken.unaligned
    assert handler.on_time(100) == []


def test_a_clock_set_back_does_not_stretch_the_timeout():
    handler = BarrierHandler(2)
    handler.on_barrier(0, barrier(1, TIMED, timestamp=10_000), 100)
    assert handler.deadline == 150


def test_an_unaligned_barrier_makes_a_timed_alignment_overtake():
    handler = BarrierHandler(3)
    handler.on_barrier(0, barrier(1, TIMED), 0)
    [taken] = handler.on_arrival(1, barrier(1, UNALIGNED), 10)
    assert taken.unaligned
    assert taken.capturing == (1, 2)


def test_ordered_channels_are_never_overtaken():
    handler = BarrierHandler(3, ordered=[2])
    assert handler.on_arrival(0, barrier(1, UNALIGNED), 0) == []
    assert handler.on_arrival(2, barrier(1, UNALIGNED), 1) == []
    [taken] = handler.on_barrier(2, barrier(1, UNALIGNED), 5)
    assert taken.unaligned
    assert taken.capturing == (0, 1)


def test_a_newer_barrier_ends_the_wait_for_a_lost_one():
    handler = BarrierHandler(2)
    handler.on_barrier(0, barrier(1), 0)
    [aborted] = handler.on_barrier(1, barrier(2), 5)
    assert aborted.checkpoint_id == 1
    assert handler.blocked == {1}
    [taken] = handler.on_barrier(0, barrier(2), 6)
    assert taken.barrier.checkpoint_id == 2


def test_a_newer_barrier_ends_a_capture():
    handler = BarrierHandler(2)
    handler.on_arrival(0, barrier(1, UNALIGNED), 0)
    aborted, taken = handler.on_arrival(1, barrier(2, UNALIGNED), 1)
    assert (aborted.checkpoint_id, aborted.snapshot_taken) == (1, True)
    assert taken.barrier.checkpoint_id == 2


def test_a_barrier_of_a_closed_checkpoint_is_ignored():
    handler = BarrierHandler(2)
    handler.on_barrier(0, barrier(5), 0)
    handler.on_barrier(1, barrier(5), 0)
    assert handler.on_barrier(0, barrier(4), 0) == []
    assert handler.on_barrier(0, barrier(5), 0) == []
    assert handler.blocked == set()


def test_a_cancellation_unblocks_and_is_passed_on_once():
    handler = BarrierHandler(2)
    handler.on_barrier(0, barrier(1), 0)
    [aborted] = handler.on_cancel(1)
    assert aborted == AbortAlignment(1, "it was cancelled", False)
    assert handler.blocked == set()
    assert handler.on_cancel(1) == []
    assert handler.on_barrier(1, barrier(1), 0) == []


def test_a_cancellation_may_come_before_its_barrier_and_leaves_others_alone():
    handler = BarrierHandler(2)
    handler.on_barrier(0, barrier(1), 0)
    assert [action.checkpoint_id for action in handler.on_cancel(2)] == [2]
    assert handler.blocked == {0}
    [taken] = handler.on_barrier(1, barrier(1), 0)
    assert taken.barrier.checkpoint_id == 1
    assert handler.on_barrier(0, barrier(2), 0) == []
    assert handler.blocked == set()


def test_a_channel_that_ended_counts_as_having_every_barrier():
    handler = BarrierHandler(3)
    assert handler.on_end(2, 0) == []
    handler.on_barrier(0, barrier(1), 0)
    [taken] = handler.on_barrier(1, barrier(1), 0)
    assert taken.barrier.checkpoint_id == 1


def test_an_end_can_complete_an_alignment_and_a_capture():
    handler = BarrierHandler(2)
    handler.on_barrier(0, barrier(1), 0)
    [taken] = handler.on_end(1, 4)
    assert taken.alignment_ms == 4
    capturing = BarrierHandler(2)
    capturing.on_arrival(0, barrier(1, UNALIGNED), 0)
    capturing.on_barrier(0, barrier(1, UNALIGNED), 0)
    assert capturing.on_end_arrived(1, 7) == [CaptureComplete(1, 7)]


def test_an_end_completes_tracking_without_alignment():
    handler = BarrierHandler(2)
    handler.on_barrier(0, barrier(1, AT_LEAST_ONCE), 0)
    [taken] = handler.on_end(1, 3)
    assert isinstance(taken, TakeSnapshot)


def test_a_direct_trigger_counts_only_where_no_channel_is_open():
    handler = BarrierHandler(1)
    assert handler.on_trigger(barrier(1), 0) == []
    handler.on_end(0, 0)
    [taken] = handler.on_trigger(barrier(1), 9)
    assert taken.start_delay_ms == 9
    assert handler.on_trigger(barrier(1), 10) == []
    assert BarrierHandler(0).on_trigger(barrier(1), 0) != []

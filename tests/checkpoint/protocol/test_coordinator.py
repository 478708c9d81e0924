"""The coordinator, told as stories: what it is told, and what it then asks for."""

import json

import pytest

from checkpoint.protocol.coordinator import Coordinator
from checkpoint.protocol.failures import FailureReason
from checkpoint.protocol.messages import (
    Acknowledge,
    CancelJob,
    CompleteRequest,
    Decline,
    DiscardCompleted,
    DiscardFiles,
    EndJob,
    FailJob,
    JobPlan,
    Log,
    NotifyAborted,
    NotifyCompleted,
    NotifySavepointDone,
    Outcome,
    Phase,
    Publish,
    Published,
    PublishFailed,
    RequestStatus,
    Restored,
    ScheduleTick,
    SendBarrier,
    StatusReport,
    SubtaskId,
    SubtasksFailed,
    SubtaskStats,
    TaskPlan,
    Tick,
    TriggerCheckpoint,
    TriggerSavepoint,
    Waiting,
)
from checkpoint.protocol.settings import CheckpointSettings
from checkpoint.runtime.contracts import OperatorSnapshot, SubtaskSnapshot
from statebackend.errors import Closed, Conflict, InvalidRequest, Unavailable

PLAN = JobPlan((TaskPlan("clicks", 2), TaskPlan("count", 3, ("clicks",)), TaskPlan("out", 1, ("count",))))
ALL = list(PLAN.subtasks())
SOURCES = (SubtaskId("clicks", 0), SubtaskId("clicks", 1))


class Story:
    """A coordinator, its clock, and everything it has asked for."""

    def __init__(self, plan=PLAN, ready=True, **settings):
        defaults = {"interval": 100, "timeout": 1000, "savepoint_dir": "/sp", "tolerable_failures": 5}
        self.coordinator = Coordinator(plan, CheckpointSettings(**(defaults | settings)))
        self.now = 10_000
        self.actions = []
        if ready:
            for subtask in plan.subtasks():
                self.tell(StatusReport(subtask, Phase.RUNNING))

    def tell(self, event, after=0):
        self.now += after
        self.actions = self.coordinator.handle(event, self.now)
        return self.actions

    def tick(self, after):
        return self.tell(Tick(), after)

    def ack(self, checkpoint_id, *subtasks, ended=False, **details):
        for subtask in subtasks or ALL:
            snapshot = SubtaskSnapshot((OperatorSnapshot(subtask.task),), ended=ended)
            self.tell(Acknowledge(subtask, checkpoint_id, snapshot, **details))
        return self.actions

    def publish(self, checkpoint_id):
        return self.tell(Published(checkpoint_id, f"/job/chk-{checkpoint_id}"))

    def complete(self, checkpoint_id):
        self.ack(checkpoint_id)
        return self.publish(checkpoint_id)

    def of(self, kind):
        return [action for action in self.actions if isinstance(action, kind)]


def test_nothing_is_triggered_before_every_subtask_runs():
    story = Story(ready=False)
    for subtask in ALL[:-1]:
        story.tell(StatusReport(subtask, Phase.RUNNING))
    assert not [action for action in story.tick(1000) if isinstance(action, SendBarrier)]
    story.tell(StatusReport(ALL[-1], Phase.RESTORING))
    assert not story.coordinator.is_ready
    story.tell(StatusReport(ALL[-1], Phase.RUNNING))
    assert story.of(ScheduleTick)[0].at_ms == story.now + 100
    [barrier] = [action for action in story.tick(100) if isinstance(action, SendBarrier)]
    assert barrier.subtasks == SOURCES


def test_a_checkpoint_is_complete_only_when_it_is_published():
    story = Story()
    story.tick(100)
    story.ack(1, *ALL[:-1])
    assert not story.of(Publish)
    story.ack(1, ALL[-1])
    [publish] = story.of(Publish)
    assert set(publish.snapshots) == set(ALL)
    assert story.coordinator.latest is None
    assert story.coordinator.publishing == 1
    story.publish(1)
    assert story.of(NotifyCompleted) == [NotifyCompleted(1)]
    assert story.coordinator.latest.path == "/job/chk-1"
    assert story.coordinator.publishing is None


def test_the_interval_counts_from_trigger_to_trigger_and_the_pause_from_the_end():
    story = Story(interval=100, min_pause=80)
    story.tick(100)
    story.now += 50
    story.complete(1)
    assert story.of(ScheduleTick)[0].at_ms == story.now + 80
    assert not [a for a in story.tick(79) if isinstance(a, SendBarrier)]
    assert [a for a in story.tick(1) if isinstance(a, SendBarrier)]


def test_no_more_than_max_concurrent_checkpoints_are_in_progress():
    story = Story(max_concurrent=2)
    for _ in range(5):
        story.tick(100)
    assert story.coordinator.in_progress == (1, 2)
    story.complete(1)
    assert story.of(SendBarrier)[0].barrier.checkpoint_id == 3


def test_a_newer_checkpoint_that_completes_first_subsumes_the_older():
    story = Story(max_concurrent=2)
    story.tick(100)
    story.tick(100)
    story.complete(2)
    assert NotifyAborted(1, FailureReason.SUBSUMED) in story.actions
    assert 1 not in story.coordinator.in_progress


def test_surplus_checkpoints_are_discarded_after_a_newer_one_is_published():
    story = Story(retained=2)
    for checkpoint_id in (1, 2):
        story.tick(100)
        assert not [a for a in story.complete(checkpoint_id) if isinstance(a, DiscardCompleted)]
    story.tick(100)
    assert DiscardCompleted((1,)) in story.complete(3)
    assert story.coordinator.retained == (2, 3)


def test_a_completed_checkpoint_stays_as_long_as_one_in_progress_may_build_on_it():
    story = Story(max_concurrent=2)
    story.tick(100)
    story.complete(1)
    story.tick(100)
    story.tick(100)
    assert story.coordinator.in_progress == (2, 3)
    assert not [action for action in story.complete(2) if isinstance(action, DiscardCompleted)]
    assert story.coordinator.retained == (1, 2)
    assert DiscardCompleted((1, 2)) in story.complete(3)


def test_what_a_given_up_checkpoint_built_on_goes():
    story = Story(max_concurrent=2)
    story.tick(100)
    story.complete(1)
    story.tick(100)
    story.tick(100)
    story.complete(2)
    story.tell(Decline(ALL[3], 3, "its disk is full"))
    assert DiscardCompleted((1,)) in story.actions
    assert story.coordinator.retained == (2,)


def test_a_full_checkpoint_or_a_savepoint_in_progress_holds_nothing_back():
    story = Story(max_concurrent=3)
    story.tick(100)
    story.complete(1)
    story.tell(TriggerCheckpoint("full", full=True))
    story.tell(TriggerSavepoint("savepoint"))
    story.tick(100)
    assert story.coordinator.in_progress == (2, 3, 4)
    assert not [action for action in story.complete(2) if isinstance(action, DiscardCompleted)]  # 4 builds on it
    story.tell(Decline(ALL[3], 4, "its disk is full"))
    assert DiscardCompleted((1,)) in story.actions


def test_an_expired_checkpoint_tells_in_one_line_who_is_missing_and_why():
    story = Story()
    story.tick(100)
    story.ack(1, *SOURCES, SubtaskId("count", 0))
    [asked] = [action for action in story.tick(450) if isinstance(action, RequestStatus)]
    assert set(asked.subtasks) == set(ALL), "those without acknowledgement, and those that send to them"
    story.tell(StatusReport(SubtaskId("clicks", 0), Phase.RUNNING, back_pressure=0.98))
    story.tell(StatusReport(SubtaskId("count", 1), Phase.RUNNING,
                            waiting=(Waiting(1, ("clicks[0] -> count[1]",), 1),)))
    story.tick(60)
    [late] = story.of(Log)
    assert "is late" in late.line
    story.tick(600)
    [line] = [log.line for log in story.of(Log)]
    assert line == ("checkpoint 1 expired before all subtasks acknowledged it after 1.1 s: 3 of 6 subtasks have not "
                    "acknowledged: count[1] waits for the barrier on channel clicks[0] -> count[1] (back pressure 98% "
                    "at clicks[0]); count[2] has not seen a barrier; out[0] has not seen a barrier")
    assert NotifyAborted(1, FailureReason.EXPIRED) in story.actions
    assert len(story.of(DiscardFiles)[0].snapshots) == 3


def test_late_duplicate_unknown_stale_and_contradictory_acknowledgements_are_counted():
    story = Story()
    story.tick(100)
    count = SubtaskId("count", 0)
    story.ack(1, count)
    story.ack(1, count)
    story.ack(9, count)
    story.ack(1, SubtaskId("nobody", 0))
    story.ack(1, SubtaskId("count", 1), attempt=3)
    story.tell(Acknowledge(count, 1, SubtaskSnapshot((), ended=True)))
    assert NotifyAborted(1, FailureReason.CONTRADICTION) in story.actions
    story.ack(1, SubtaskId("count", 2))
    assert [type(action) for action in story.actions][:1] == [DiscardFiles]
    assert story.coordinator.statistics.acknowledgements == {
        "accepted": 1, "duplicate": 1, "unknown_checkpoint": 1, "unknown_subtask": 1, "stale_attempt": 1,
        "contradictory": 1, "late": 1}


def test_an_acknowledgement_after_publication_began_changes_nothing():
    story = Story()
    story.tick(100)
    story.ack(1)
    story.tell(Acknowledge(SubtaskId("count", 0), 1, SubtaskSnapshot((), ended=True)))
    assert not story.of(NotifyAborted)
    story.publish(1)
    assert story.of(NotifyCompleted)


def test_a_declined_checkpoint_is_given_up_and_says_by_whom():
    story = Story()
    story.tick(100)
    story.tell(Decline(SubtaskId("count", 1), 1, "disk full"))
    assert "was declined by a subtask (by count[1]: disk full)" in story.of(Log)[0].line
    story.tell(Decline(SubtaskId("count", 2), 1, "disk full"))
    assert not story.of(Log)


def test_the_job_fails_after_more_consecutive_failures_than_tolerated():
    story = Story(tolerable_failures=1)
    story.tick(100)
    story.tell(Decline(SubtaskId("count", 1), 1, "x"))
    assert not story.of(FailJob)
    story.tick(100)
    story.complete(2)
    story.tick(100)
    story.tell(Decline(SubtaskId("count", 1), 3, "x"))
    assert not story.of(FailJob), "a success in between starts the count anew"
    story.tick(100)
    story.tell(PublishFailed(4, "ignored: it is not being published"))
    story.ack(4)
    story.tell(PublishFailed(4, "storage is full"))
    assert story.of(FailJob)[0].restartable
    assert story.coordinator.latest.checkpoint_id == 2


def test_a_run_that_was_fenced_ends_for_good():
    story = Story()
    story.tick(100)
    story.ack(1)
    story.tell(PublishFailed(1, "generation 3 has taken over", fenced=True))
    assert not story.of(FailJob)[0].restartable
    assert story.coordinator.is_over


def test_files_stay_where_publication_is_undecided():
    story = Story()
    story.tick(100)
    story.ack(1)
    story.tell(PublishFailed(1, "no reply", settled=False))
    assert not story.of(DiscardFiles)
    assert NotifyAborted(1, FailureReason.PUBLISH_FAILED) in story.actions


def test_a_checkpoint_that_expires_while_it_is_published_is_removed_when_it_appears():
    story = Story()
    story.tick(100)
    story.ack(1)
    story.tick(2000)
    assert NotifyAborted(1, FailureReason.EXPIRED) in story.actions
    assert not story.of(DiscardFiles)
    story.publish(1)
    assert DiscardCompleted((1,)) in story.actions
    assert story.coordinator.latest is None


def test_a_manual_checkpoint_answers_its_request():
    story = Story(interval=None)
    story.tell(TriggerCheckpoint("r1", full=True))
    assert story.of(SendBarrier)[0].barrier.options.full
    story.complete(1)
    assert CompleteRequest("r1", 1, "/job/chk-1") in story.actions


def test_a_savepoint_commits_nothing_and_is_not_retained():
    story = Story()
    story.tell(TriggerSavepoint("s1"))
    assert story.of(SendBarrier)[0].barrier.options.location == "/sp"
    story.complete(1)
    assert NotifySavepointDone(1) in story.actions
    assert not story.of(NotifyCompleted)
    assert story.coordinator.retained == ()
    assert story.coordinator.latest is None


def test_a_savepoint_does_not_overlap_an_unaligned_checkpoint():
    story = Story(unaligned=True)
    story.tick(100)
    story.tell(TriggerSavepoint("s1"))
    assert not story.of(SendBarrier)
    story.complete(1)
    assert story.of(SendBarrier)[0].barrier.options.kind == "savepoint"


def test_a_savepoint_without_folder_or_with_drain_alone_is_refused():
    story = Story(savepoint_dir=None)
    story.tell(TriggerSavepoint("s1"))
    assert isinstance(story.of(CompleteRequest)[0].error, InvalidRequest)
    story.tell(TriggerSavepoint("s2", location="/x", drain=True))
    assert isinstance(story.of(CompleteRequest)[0].error, InvalidRequest)


def test_stop_with_savepoint_ends_the_job_when_every_subtask_has_finished():
    story = Story()
    story.tell(TriggerSavepoint("s1", stop=True))
    story.tell(TriggerSavepoint("s2", stop=True))
    assert isinstance(story.of(CompleteRequest)[0].error, Conflict)
    story.tick(500)
    assert not story.of(SendBarrier), "no checkpoint begins while the job stops"
    story.complete(1)
    assert NotifyCompleted(1, last=True) in story.actions
    assert story.coordinator.latest.checkpoint_id == 1
    for subtask in ALL[:-1]:
        story.tell(StatusReport(subtask, Phase.FINISHED))
    assert not story.of(EndJob)
    assert NotifyCompleted(1, (ALL[-1],), last=True) in story.tick(1000), "the notice may have been lost"
    story.tell(StatusReport(ALL[-1], Phase.FINISHED))
    assert EndJob(Outcome.STOPPED) in story.actions
    assert CompleteRequest("s1", 1, "/job/chk-1") in story.actions
    story.tell(TriggerCheckpoint("r"))
    assert isinstance(story.of(CompleteRequest)[0].error, Closed)


def test_a_failed_stop_lets_the_job_go_on_but_a_failed_drain_fails_it():
    story = Story()
    story.tell(TriggerSavepoint("s1", stop=True))
    story.tell(Decline(SubtaskId("count", 0), 1, "x"))
    assert isinstance(story.of(CompleteRequest)[0].error, Unavailable)
    assert not story.of(FailJob)
    story.tell(TriggerSavepoint("s2", stop=True, drain=True))
    story.tell(Decline(SubtaskId("count", 0), 2, "x"))
    assert story.of(FailJob)[0].restartable


def test_a_region_that_fails_during_a_drain_takes_the_others_with_it():
    story = Story()
    story.tell(TriggerSavepoint("s", stop=True, drain=True))
    story.tell(SubtasksFailed(frozenset(SOURCES), attempt=1))
    assert story.of(FailJob)[0].restartable, "the other sources have ended for the savepoint's sake"
    whole = Story()
    whole.tell(TriggerSavepoint("s", stop=True, drain=True))
    whole.tell(SubtasksFailed(frozenset(ALL), attempt=1))
    assert not whole.of(FailJob)


def test_subtasks_that_have_ended_are_triggered_directly():
    story = Story()
    story.tick(100)
    count = SubtaskId("count", 2)
    story.tell(StatusReport(count, Phase.ENDED))
    assert story.of(SendBarrier)[0].subtasks == (count,)
    story.ack(1, count, ended=True)
    story.tell(StatusReport(count, Phase.ENDED))
    assert not story.of(SendBarrier)
    story.complete(1)
    assert story.of(EndJob) == []
    story.tick(100)
    assert story.of(SendBarrier)[0].subtasks == (*SOURCES, count)


def test_when_all_input_has_ended_a_last_checkpoint_ends_the_job():
    story = Story(interval=None)
    for subtask in ALL:
        story.tell(StatusReport(subtask, Phase.ENDED))
    assert story.of(SendBarrier)[0].subtasks == tuple(sorted(ALL))
    story.tell(StatusReport(ALL[0], Phase.ENDED))
    story.ack(1, ended=True)
    story.publish(1)
    assert NotifyCompleted(1, last=True) in story.actions
    for subtask in ALL:
        story.tell(StatusReport(subtask, Phase.FINISHED))
    assert EndJob(Outcome.FINISHED) in story.actions
    assert story.coordinator.retained == (1,)


def test_a_savepoint_after_the_end_of_all_input_is_not_the_last_checkpoint():
    story = Story(interval=None)
    story.tell(TriggerSavepoint("s"))
    for subtask in ALL:
        story.tell(StatusReport(subtask, Phase.ENDED))
    assert story.coordinator.in_progress == (1,), "the last checkpoint waits for it"
    story.ack(1, ended=True)
    story.publish(1)
    assert NotifySavepointDone(1) in story.actions
    story.ack(2, ended=True)
    story.publish(2)
    assert NotifyCompleted(2, last=True) in story.actions


def test_a_last_checkpoint_that_fails_is_tried_again():
    story = Story(interval=None)
    for subtask in ALL:
        story.tell(StatusReport(subtask, Phase.ENDED))
    story.tell(Decline(ALL[0], 1, "x"))
    assert not story.of(SendBarrier)
    assert [a for a in story.tick(1000) if isinstance(a, SendBarrier)]


def test_a_failure_gives_up_everything_in_progress_but_what_is_being_published():
    story = Story(max_concurrent=2)
    story.tick(100)
    story.tick(100)
    story.ack(1)
    story.tell(SubtasksFailed(frozenset(ALL), attempt=1, message="boom"))
    assert story.of(NotifyAborted) == [NotifyAborted(2, FailureReason.SUBTASK_FAILED)]
    assert story.coordinator.publishing == 1
    story.publish(1)
    assert story.coordinator.latest.checkpoint_id == 1
    story.tell(StatusReport(ALL[0], Phase.RUNNING, attempt=0))
    assert ALL[0] in story.coordinator._not_ready
    for subtask in ALL:
        story.tell(StatusReport(subtask, Phase.RUNNING, attempt=1))
    story.tick(100)
    assert story.of(SendBarrier)[0].barrier.checkpoint_id == 3


def test_ids_go_on_after_a_restore_and_a_foreign_checkpoint_is_not_built_upon():
    story = Story(ready=False)
    story.tell(Restored(7, "/other/chk-7"))
    for subtask in ALL:
        story.tell(StatusReport(subtask, Phase.RUNNING))
    story.tick(100)
    [sent] = story.of(SendBarrier)
    assert (sent.barrier.checkpoint_id, sent.barrier.options.full) == (8, True)
    story.complete(8)
    story.tick(100)
    assert not story.of(SendBarrier)[0].barrier.options.full
    own = Story(ready=False)
    own.tell(Restored(7, "/job/chk-7", retained=(6, 7)))
    assert own.coordinator.retained == (6, 7)


def test_cancelling_keeps_or_deletes_checkpoints_as_set():
    for retain in (True, False):
        story = Story(retain_on_cancellation=retain)
        story.tick(100)
        story.complete(1)
        story.tick(100)
        story.tell(CancelJob("c"))
        assert bool(story.of(DiscardCompleted)) is not retain
        assert EndJob(Outcome.CANCELLED) in story.actions
        assert NotifyAborted(2, FailureReason.CANCELLED) in story.actions
        assert story.tick(5000) == []


@pytest.mark.parametrize("jump", [-5_000, -10_000_000])
def test_a_clock_set_back_neither_expires_nor_starves_checkpoints(jump):
    story = Story()
    story.tick(100)
    story.now += jump
    story.tick(0)
    assert story.coordinator.in_progress == (1,)
    story.complete(1)
    story.tick(99)
    assert not story.of(SendBarrier)
    story.tick(1)
    assert story.of(SendBarrier)
    entry = story.coordinator.statistics.to_rest()["latest"]["completed"]
    assert entry["end_to_end_duration"] >= 0


def test_a_tick_is_asked_for_again_after_the_clock_was_set_back():
    story = Story()
    assert story.of(ScheduleTick)[0].at_ms == story.now + 100
    story.now -= 50_000
    assert [action.at_ms for action in story.tick(0) if isinstance(action, ScheduleTick)] == [story.now + 100]


def test_no_tick_is_asked_for_a_time_that_has_passed():
    story = Story(interval=None)
    for subtask in ALL:
        story.tell(StatusReport(subtask, Phase.ENDED))
    story.tell(Decline(ALL[0], 1, "x"))
    story.tell(TriggerSavepoint("s"))
    story.tick(2000)
    assert all(action.at_ms > story.now for action in story.of(ScheduleTick)), "the last one waits for the savepoint"


def test_a_decline_of_a_subtask_that_has_acknowledged_changes_nothing():
    story = Story()
    story.tick(100)
    story.ack(1, SOURCES[0])
    story.tell(Decline(SOURCES[0], 1, "a newer one was taken first", counts=False))
    assert story.coordinator.in_progress == (1,)


def test_statistics_have_the_shape_of_flinks_rest_api():
    story = Story(history=2)
    for checkpoint_id in range(1, 5):
        story.tick(100)
        story.now += 7
        story.ack(checkpoint_id, stats=SubtaskStats(sync_ms=1, async_ms=2, alignment_ms=3, start_delay_ms=4,
                                                    state_bytes=100, incremental_bytes=10, in_flight_bytes=5))
        story.publish(checkpoint_id)
    data = story.coordinator.statistics.to_rest()
    json.dumps(data)
    assert data["counts"] == {"restored": 0, "total": 4, "in_progress": 0, "completed": 4, "failed": 0}
    assert [entry["id"] for entry in data["history"]] == [4, 3]
    entry = data["latest"]["completed"]
    assert (entry["state_size"], entry["checkpointed_size"], entry["persisted_data"]) == (600, 60, 30)
    assert (entry["num_subtasks"], entry["num_acknowledged_subtasks"]) == (6, 6)
    assert data["summary"]["end_to_end_duration"]["p99"] == 7.0
    record = story.coordinator.statistics.record(4)
    assert record.to_rest_details()["tasks"]["count"]["num_acknowledged_subtasks"] == 3
    subtasks = record.to_rest_subtasks("count")
    assert subtasks["subtasks"][1]["checkpoint"] == {"sync": 1, "async": 2}
    assert subtasks["summary"]["alignment"]["duration"]["max"] == 3
    assert record.to_rest_subtasks("nobody") is None
    assert story.coordinator.statistics.record(1) is None


def test_ten_thousand_subtasks_need_few_actions():
    plan = JobPlan((TaskPlan("a", 10_000), TaskPlan("b", 10_000, ("a",)), TaskPlan("c", 10_000, ("b",))))
    story = Story(plan)
    story.tick(100)
    actions = 0
    for subtask in plan.subtasks():
        actions += len(story.tell(Acknowledge(subtask, 1, SubtaskSnapshot(()))))
    assert actions == 1
    assert story.of(Publish)

"""The subtask core, driven by hand: one thread, a manual clock, and wires that end in lists."""

import pytest

from checkpoint.protocol.messages import Acknowledge, Decline, Phase, StatusReport, SubtaskId
from checkpoint.runtime.channels import InputEdge, OutputEdge
from checkpoint.runtime.contracts import (
    MAX_WATERMARK,
    Barrier,
    CancelBarrier,
    ChannelIdle,
    CheckpointKind,
    CheckpointOptions,
    EndOfInput,
    InFlight,
    OperatorChain,
    OperatorSnapshot,
    Records,
    SourceStatus,
    SubtaskRestore,
    Watermark,
)
from checkpoint.runtime.simulated.chain import BroadcastPartitioner, HashPartitioner, RebalancePartitioner
from checkpoint.runtime.subtask import Blocked, Subtask
from statebackend.clock import ManualClock
from statebackend.errors import Unavailable
from statebackend.files import StateFile

ALIGNED, UNALIGNED = CheckpointOptions(), CheckpointOptions(unaligned=True)
STOP = CheckpointOptions(CheckpointKind.SAVEPOINT, stop=True)
DRAIN = CheckpointOptions(CheckpointKind.SAVEPOINT, stop=True, drain=True)


class Chain(OperatorChain):
    """Passes everything on, and remembers what it was told."""

    uids = ("op",)

    def __init__(self, is_source=False, polls=()):
        self.is_source, self.polls = is_source, list(polls)
        self.calls, self.state = [], []
        self.failing = False

    def open(self, output, restore):
        self.output = output

    def process(self, input_index, records):
        self.state += records.values
        self.calls.append((input_index, records.values))
        self.output.emit(0, records)

    def process_watermark(self, watermark):
        self.calls.append(("watermark", watermark))
        self.output.emit_watermark(watermark)

    def poll(self, limit):
        if not self.polls:
            return SourceStatus.IDLE
        item = self.polls.pop(0)
        if isinstance(item, SourceStatus):
            return item
        self.process(0, Records(item))
        return SourceStatus.MORE

    def advance_processing_time(self, now_ms):
        return None

    def end_input(self, input_index):
        self.calls.append(("end", input_index))

    def finish(self, drain):
        self.calls.append(("finish", drain))

    def snapshot(self, checkpoint_id, options, target):
        self.calls.append(("snapshot", checkpoint_id))
        state, chain = list(self.state), self

        class Pending:
            cancelled = False

            def run(self):
                if chain.failing:
                    raise Unavailable("disk full")
                return (OperatorSnapshot("op", operator=StateFile("f", len(state), "")),)

            def cancel(self):
                Pending.cancelled = True

        self.pending = Pending
        return Pending()

    def checkpoint_completed(self, checkpoint_id):
        self.calls.append(("completed", checkpoint_id))

    def checkpoint_aborted(self, checkpoint_id):
        self.calls.append(("aborted", checkpoint_id))

    def close(self):
        self.calls.append("closed")


class Codec:
    """Remembers channel state instead of writing it."""

    def write(self, in_flight, target):
        self.written = {(part.edge, part.sender, part.receiver, part.output):
                        [value for batch in part.batches for value in batch.values] for part in in_flight}
        return StateFile("in-flight", 7, "")


class Rig:
    """A subtask with its transport."""

    def __init__(self, senders=(2,), receivers=1, *, source=False, polls=(), partitioner=None, credit=2, limit=2,
                 ordered=(), restore=None):
        self.clock, self.codec, self.chain = ManualClock(1000), Codec(), Chain(source, polls)
        self.sent, self.granted, self.reports, self.tasks = [], [], [], []
        inputs = [] if source else [InputEdge(f"in{index}", f"up{index}", range(count), index in ordered)
                                    for index, count in enumerate(senders)]
        outputs = [OutputEdge("out", partitioner or RebalancePartitioner(), range(receivers))] if receivers else []
        self.subtask = Subtask(SubtaskId("op", 0), self.chain, inputs, outputs, self, clock=self.clock,
                               codec=self.codec, target=lambda checkpoint_id, options: None, credit=credit,
                               queue_limit=limit)
        self.subtask.open(restore)

    def send(self, channel, element):
        self.sent.append((channel, element.values if isinstance(element, Records) else element))

    def grant(self, channel, credit):
        self.granted.append((channel, credit))

    def report(self, report):
        self.reports.append(report)

    def start(self, task):
        self.tasks.append(task)

    def give(self, channel, *elements):
        for element in elements:
            self.subtask.on_element(channel, Records(element) if isinstance(element, list) else element)

    def steps(self, count=20):
        for _ in range(count):
            result = self.subtask.step()
        return result

    def run_tasks(self):
        while self.tasks:
            task = self.tasks.pop(0)
            task.run()
            self.subtask.on_task_done(task)

    def acks(self):
        self.run_tasks()
        return [report for report in self.reports if isinstance(report, Acknowledge)]

    def barriers(self):
        return [element.checkpoint_id for _, element in self.sent if isinstance(element, Barrier)]

    def values(self):
        return [value for _, values in self.sent if isinstance(values, list) for value in values]


def barrier(checkpoint_id, options=ALIGNED, timestamp=1000):
    return Barrier(checkpoint_id, timestamp, options)


def test_records_after_an_early_barrier_wait_for_the_other_channel():
    rig = Rig()
    rig.give(0, [1], barrier(1), [2])
    rig.steps()
    rig.give(1, [3])
    assert rig.steps().blocked is Blocked.BARRIER
    assert rig.chain.state == [1, 3]
    rig.give(1, barrier(1), [4])
    rig.steps()
    assert rig.chain.calls.index(("snapshot", 1)) == 2
    assert sorted(rig.chain.state) == [1, 2, 3, 4]
    [ack] = rig.acks()
    assert ack.stats.state_bytes == 2
    assert ack.stats.processed_records == 1, "what the open channel delivered while the other one waited"
    assert rig.barriers() == [1]


def test_the_barrier_leaves_between_the_records_of_before_and_after():
    rig = Rig(senders=(1,), credit=10)
    rig.give(0, [1], barrier(1), [2])
    rig.steps()
    assert [element if isinstance(element, list) else "barrier" for _, element in rig.sent] == [[1], "barrier", [2]]


def test_an_unaligned_barrier_overtakes_queued_input_and_output():
    rig = Rig(credit=1, limit=1)
    rig.give(0, [1], [2], [3])
    rig.steps()
    assert rig.steps().blocked is Blocked.OUTPUT
    rig.give(1, [4], barrier(1, UNALIGNED))
    assert rig.barriers() == [1], "no step was needed"
    rig.give(0, [5], barrier(1, UNALIGNED), [6])
    [ack] = rig.acks()
    assert rig.codec.written == {("out", 0, 0, True): [2], ("in0", 0, 0, False): [3, 5], ("in0", 1, 0, False): [4]}
    assert ack.stats.in_flight_records == 4
    assert ack.stats.unaligned
    assert rig.values() == [1]


def test_an_unaligned_source_overtakes_its_own_output():
    rig = Rig(source=True, polls=[[1], [2], [3]], credit=1, limit=5)
    rig.steps()
    rig.subtask.on_trigger(barrier(1, UNALIGNED))
    assert rig.barriers() == [1]
    rig.acks()
    assert rig.codec.written == {("out", 0, 0, True): [2, 3]}


def test_an_aligned_barrier_that_waits_too_long_in_the_output_overtakes():
    options = CheckpointOptions(aligned_timeout_ms=50)
    rig = Rig(source=True, polls=[[1], [2]], credit=1, limit=5)
    rig.steps()
    rig.subtask.on_trigger(barrier(1, options))
    assert rig.barriers() == []
    assert rig.acks() == []
    assert rig.steps().wake_at <= 1050
    rig.clock.advance(50)
    rig.steps()
    assert rig.sent[-1][1].options.unaligned
    [ack] = rig.acks()
    assert rig.codec.written == {("out", 0, 0, True): [2]}
    assert ack.stats.unaligned


def test_a_barrier_that_leaves_the_output_in_time_is_acknowledged_without_channel_state():
    rig = Rig(source=True, polls=[[1], [2]], credit=1, limit=5)
    rig.steps()
    rig.subtask.on_trigger(barrier(1, CheckpointOptions(aligned_timeout_ms=50)))
    rig.subtask.on_credit(0, 1)
    [ack] = rig.acks()
    assert rig.barriers() == [1]
    assert ack.snapshot.in_flight is None


def test_an_alignment_past_its_timeout_captures_what_is_queued():
    options = CheckpointOptions(aligned_timeout_ms=50)
    rig = Rig(credit=100, limit=100)
    rig.give(0, barrier(1, options), [1])
    rig.steps()
    rig.clock.advance(60)
    rig.steps()
    rig.give(1, [2], barrier(1, options), [3])
    rig.steps()
    [ack] = rig.acks()
    assert rig.codec.written == {("in0", 1, 0, False): [2]}
    assert ack.stats.alignment_ms == 60
    assert sorted(rig.chain.state) == [1, 2, 3]


def test_broadcast_edges_are_not_overtaken():
    rig = Rig(senders=(1, 1), partitioner=BroadcastPartitioner(), ordered=(1,), credit=1, limit=5)
    rig.give(0, [1], [2], barrier(1, UNALIGNED))
    rig.give(1, [9], barrier(1, UNALIGNED))
    assert ("snapshot", 1) not in rig.chain.calls
    rig.steps()
    rig.acks()
    assert 9 in rig.chain.state
    assert rig.barriers() == [], "on the way out it keeps its place as well"
    rig.subtask.on_credit(0, 10)
    assert rig.barriers() == [1]


def test_credit_bounds_what_is_sent_and_small_batches_are_joined():
    rig = Rig(senders=(1,), credit=1, limit=10)
    rig.give(0, [1], [2], [3], [4])
    rig.steps()
    assert rig.sent == [(0, [1])]
    rig.subtask.on_credit(0, 1)
    assert rig.sent == [(0, [1]), (0, [2, 3, 4])]


def test_a_full_output_stops_the_input_and_shows_as_back_pressure():
    rig = Rig(senders=(1,), credit=1, limit=1)
    rig.give(0, [1], Watermark(5), [2], Watermark(6), [3])
    assert rig.steps().blocked is Blocked.OUTPUT
    for _ in range(20):
        rig.clock.advance(100)
        rig.subtask.step()
    assert rig.subtask.load.back_pressure(rig.clock.now_ms()) > 0.9
    rig.subtask.on_status_request()
    assert rig.reports[-1].back_pressure > 0.9
    rig.subtask.on_credit(0, 10)
    assert rig.steps().blocked is Blocked.INPUT
    assert rig.values() == [1, 2, 3]


def test_credit_is_given_back_in_portions():
    rig = Rig(senders=(1,), credit=4, limit=100)
    rig.give(0, [1], [2], [3])
    rig.steps()
    assert rig.granted == [(0, 2)]


def test_the_watermark_is_the_smallest_of_the_channels_that_are_not_idle():
    rig = Rig(senders=(2, 1))
    rig.give(0, Watermark(10))
    rig.give(1, Watermark(5))
    rig.give(2, Watermark(20))
    rig.steps()
    assert rig.chain.calls == [("watermark", 5)]
    rig.give(1, ChannelIdle())
    rig.steps()
    assert rig.chain.calls[-1] == ("watermark", 10)
    rig.give(1, [1], Watermark(11))
    rig.give(0, Watermark(30))
    rig.steps()
    assert rig.chain.calls[-1] == ("watermark", 11)
    for channel in range(3):
        rig.give(channel, ChannelIdle())
    rig.steps()
    assert rig.sent[-1] == (0, ChannelIdle())


def test_the_end_of_all_input_flushes_once_and_waits_for_the_last_checkpoint():
    rig = Rig(senders=(1, 1))
    rig.give(0, Watermark(MAX_WATERMARK), EndOfInput())
    rig.steps()
    assert ("end", 0) in rig.chain.calls
    assert ("finish", True) not in rig.chain.calls
    rig.give(1, Watermark(MAX_WATERMARK), EndOfInput())
    rig.steps()
    assert rig.chain.calls[-2:] == [("end", 1), ("finish", True)]
    assert rig.chain.calls.count(("watermark", MAX_WATERMARK)) == 1
    assert rig.sent[-1] == (0, EndOfInput())
    assert rig.subtask.phase is Phase.ENDED
    rig.subtask.on_trigger(barrier(1))
    [ack] = rig.acks()
    assert ack.snapshot.ended
    assert rig.barriers() == [], "the end has been sent, which counts as every barrier"
    rig.subtask.on_completed(1, last=True)
    assert rig.chain.calls[-1] == ("completed", 1)
    assert rig.reports[-1].phase is Phase.FINISHED
    assert rig.steps().blocked is Blocked.FINISHED


def test_a_snapshot_that_an_end_completes_is_one_of_before_the_flush():
    rig = Rig()
    rig.give(0, barrier(1), EndOfInput())
    rig.give(1, EndOfInput())
    rig.steps()
    calls = [call for call in rig.chain.calls if call[0] in ("snapshot", "end", "finish")]
    assert calls == [("snapshot", 1), ("end", 0), ("finish", True)]
    assert not rig.acks()[0].snapshot.ended


def test_an_ended_subtask_is_asked_again_until_the_coordinator_knows():
    rig = Rig(source=True, polls=[SourceStatus.ENDED])
    rig.steps()
    reported = [report.phase for report in rig.reports if isinstance(report, StatusReport)]
    assert reported == [Phase.RUNNING, Phase.ENDED]
    rig.clock.advance(1000)
    rig.steps()
    assert rig.reports[-1].phase is Phase.ENDED
    rig.clock.set(0)
    rig.steps()
    count = len(rig.reports)
    rig.clock.advance(1000)
    rig.steps()
    assert len(rig.reports) == count + 1, "also after the clock was set back"


def test_an_unaligned_checkpoint_overtakes_records_that_wait_before_the_end():
    rig = Rig(source=True, polls=[[1], [2], SourceStatus.ENDED], credit=1, limit=5)
    rig.steps()
    rig.subtask.on_trigger(barrier(1, UNALIGNED))
    assert rig.barriers() == [1]
    [ack] = rig.acks()
    assert ack.snapshot.ended
    assert rig.codec.written == {("out", 0, 0, True): [2]}
    rig.subtask.on_credit(0, 1)
    assert rig.sent[-1] == (0, EndOfInput())


def test_stop_with_savepoint_emits_nothing_after_the_barrier():
    rig = Rig(source=True, polls=[[1], [2]], credit=10)
    rig.subtask.step()
    rig.subtask.on_trigger(barrier(1, STOP))
    rig.steps()
    assert rig.values() == [1]
    assert ("finish", True) not in rig.chain.calls
    rig.subtask.on_completed(1, last=True)
    assert rig.subtask.phase is Phase.FINISHED


def test_a_stop_that_failed_lets_the_source_go_on():
    rig = Rig(source=True, polls=[[1], [2]], credit=10)
    rig.subtask.step()
    rig.subtask.on_trigger(barrier(1, STOP))
    rig.subtask.on_aborted(1)
    rig.steps()
    assert rig.values() == [1, 2]
    assert ("aborted", 1) in rig.chain.calls


def test_a_stop_that_failed_without_the_sources_hearing_of_it_ends_with_the_next_checkpoint():
    rig = Rig(source=True, polls=[[1], [2]], credit=10)
    rig.subtask.step()
    rig.subtask.on_trigger(barrier(1, STOP))
    rig.steps()
    assert rig.values() == [1]
    rig.subtask.on_trigger(barrier(2))
    rig.steps()
    assert rig.values() == [1, 2]
    assert ("aborted", 1) in rig.chain.calls


def test_drain_flushes_before_the_savepoint():
    rig = Rig(source=True, polls=[[1], [2]], credit=10)
    rig.subtask.step()
    rig.subtask.on_trigger(barrier(1, DRAIN))
    assert rig.chain.calls[-3:] == [("watermark", MAX_WATERMARK), ("finish", True), ("snapshot", 1)]
    assert rig.acks()[0].snapshot.ended


def test_a_failed_upload_declines_the_checkpoint_and_nothing_else():
    rig = Rig(senders=(1,))
    rig.chain.failing = True
    rig.give(0, barrier(1))
    rig.steps()
    assert rig.acks() == []
    assert isinstance(rig.reports[-1], Decline)
    assert "disk full" in rig.reports[-1].message
    rig.chain.failing = False
    rig.give(0, barrier(2))
    rig.steps()
    assert rig.acks()[0].checkpoint_id == 2


def test_triggers_in_the_wrong_order_decline_the_older():
    rig = Rig(source=True)
    rig.subtask.on_trigger(barrier(2))
    rig.subtask.on_trigger(barrier(2))
    rig.subtask.on_trigger(barrier(1))
    declined = [report.checkpoint_id for report in rig.reports if isinstance(report, Decline)]
    assert declined == [1]


def test_a_cancelled_checkpoint_unblocks_and_is_passed_on():
    rig = Rig(credit=10)
    rig.give(0, barrier(1), [1])
    rig.steps()
    rig.give(1, CancelBarrier(1))
    rig.steps()
    assert rig.chain.state == [1]
    assert (0, CancelBarrier(1)) in rig.sent
    assert isinstance(rig.reports[-1], Decline)
    assert not rig.reports[-1].counts


def test_an_abort_cancels_what_is_being_written():
    rig = Rig(senders=(1,))
    rig.give(0, barrier(1))
    rig.steps()
    rig.subtask.on_aborted(1)
    assert rig.chain.pending.cancelled
    assert rig.acks() == []
    assert rig.chain.calls[-1] == ("aborted", 1)


def test_a_savepoint_that_is_stored_commits_nothing():
    rig = Rig(senders=(1,))
    rig.give(0, barrier(1, CheckpointOptions(CheckpointKind.SAVEPOINT)))
    rig.steps()
    rig.acks()
    rig.subtask.on_savepoint_done(1)
    assert ("completed", 1) not in rig.chain.calls


def test_records_in_flight_come_before_new_input_and_before_it_says_it_runs():
    parts = (InFlight("in0", 0, 0, (Records([1]), Records([2]))), InFlight("in1", 0, 0, (Records([3]),), True))
    rig = Rig(senders=(1, 1), credit=10, restore=SubtaskRestore(4, None, in_flight=parts))
    assert rig.reports == []
    rig.give(0, [4])
    rig.steps()
    assert rig.chain.calls == [(0, [1]), (0, [2]), (1, [3]), (0, [4])]
    assert rig.reports[0].phase is Phase.RUNNING


def test_a_subtask_that_had_ended_stays_ended_after_a_restart():
    rig = Rig(senders=(1,), restore=SubtaskRestore(4, None, ended=True))
    assert rig.sent == [(0, Watermark(MAX_WATERMARK)), (0, EndOfInput())]
    rig.give(0, Watermark(MAX_WATERMARK), EndOfInput())
    rig.steps()
    assert ("finish", True) not in rig.chain.calls
    rig.subtask.on_trigger(barrier(5))
    assert rig.acks()[0].snapshot.ended


def test_keyed_records_go_to_the_channel_of_their_key():
    rig = Rig(senders=(1,), receivers=3, partitioner=HashPartitioner(), credit=10)
    values = [("k", number) for number in range(30)]
    rig.give(0, values)
    rig.steps()
    assert sorted(rig.values()) == values
    assert len({channel for channel, _ in rig.sent}) > 1


@pytest.mark.parametrize("options", [ALIGNED, UNALIGNED])
def test_a_subtask_without_outputs_acknowledges_all_the_same(options):
    rig = Rig(senders=(1,), receivers=0)
    rig.chain.process = lambda index, records: rig.chain.state.extend(records.values)
    rig.give(0, [1], barrier(1, options))
    rig.steps()
    assert rig.acks()[0].checkpoint_id == 1


def test_a_late_alignment_tells_which_channel_it_waits_for():
    rig = Rig()
    rig.subtask.on_completed(0)
    rig.give(0, barrier(1))
    rig.steps()
    rig.clock.advance(1000)
    rig.steps()
    [waiting] = rig.reports[-1].waiting
    assert (waiting.checkpoint_id, waiting.channels) == (1, ("up0[1] -> op[0]",))
    rig.subtask.close()
    assert rig.chain.calls[-1] == "closed"

"""What functions can do while they run: timers, side outputs, broadcast state, operator state, notices, watermarks."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from checkpoint import (
    BroadcastProcessFunction,
    CheckpointedFunction,
    CheckpointSettings,
    CollectionSource,
    CollectSink,
    Dataflow,
    FixedDelay,
    GeneratorSource,
    KeyedBroadcastProcessFunction,
    KeyedProcessFunction,
    OutputTag,
    ProcessFunction,
    WatermarkStrategy,
    run,
)
from statebackend import (
    HoldfastError,
    InvalidRequest,
    ListStateDescriptor,
    MapStateDescriptor,
    TimeDomain,
    ValueStateDescriptor,
)

BY_TIME = WatermarkStrategy.bounded_out_of_orderness(5, "at")


def keyed_run(records, function, *, watermarks=BY_TIME, **options):
    flow, sink = Dataflow("functions"), CollectSink()
    flow.source(CollectionSource(records), uid="records", watermarks=watermarks) \
        .key_by("key", key_type=str).process(function, uid="function").sink(sink, uid="out")
    run(flow, **options)
    return sink.results


def at(key: str, *times: int) -> list[dict]:
    return [{"key": key, "at": moment} for moment in times]


class Alarm(KeyedProcessFunction):
    """Rings ten after each record, once per moment."""

    def process(self, record, ctx):
        ctx.timers.register_event_time_timer(ctx.timestamp + 10)
        return [(ctx.key, "record", ctx.timestamp)]

    def on_timer(self, timestamp, ctx):
        assert ctx.time_domain is TimeDomain.EVENT
        assert ctx.watermark >= timestamp == ctx.timestamp
        yield (ctx.key, "timer", timestamp)


def test_event_time_timers_fire_in_order_once_and_all_at_the_end():
    results = keyed_run(at("a", 1, 2, 2, 30, 3) + at("b", 4), Alarm())
    timers = [result for result in results if result[1] == "timer"]
    assert timers == [("a", "timer", 11), ("a", "timer", 12), ("a", "timer", 13), ("b", "timer", 14), ("a", "timer", 40)]


def test_a_timer_that_was_deleted_does_not_fire_even_if_it_was_due_together():
    class Deleting(Alarm):
        def on_timer(self, timestamp, ctx):
            ctx.timers.delete_event_time_timer(timestamp + 1)
            yield timestamp

    assert keyed_run(at("a", 1, 2, 3), Deleting())[3:] == [11, 13]


def test_a_timer_set_by_a_timer_fires_in_its_place():
    class Chained(Alarm):
        def on_timer(self, timestamp, ctx):
            if timestamp == 11:
                ctx.timers.register_event_time_timer(12)
            yield timestamp

    assert keyed_run(at("a", 1, 5, 9), Chained())[3:] == [11, 12, 15, 19]


def test_processing_time_timers_fire_without_any_record():
    class Later(KeyedProcessFunction):
        def process(self, record, ctx):
            now = ctx.timers.current_processing_time()
            ctx.timers.register_processing_time_timer(now + 30)
            return None

        def on_timer(self, timestamp, ctx):
            assert ctx.time_domain is TimeDomain.PROCESSING
            fired.set()
            yield ctx.key

    fired = threading.Event()
    flow, sink = Dataflow("later"), CollectSink()
    flow.source(GeneratorSource(lambda number: "a", count=3, rate=8), uid="s").key_by(lambda r: r, key_type=str) \
        .process(Later(), uid="later").sink(sink, uid="out")
    run(flow)
    assert fired.is_set()
    assert sink.results


def test_timers_survive_a_restart(tmp_path):
    records = at("a", 1, 2, 3)
    flow, sink = Dataflow("alarm"), CollectSink()
    flow.source(CollectionSource([*records, *at("b", 100)]), uid="s", watermarks=BY_TIME).key_by("key", key_type=str) \
        .process(Alarm(), uid="alarm").sink(sink, uid="o")
    run(flow, checkpoint_dir=str(tmp_path))
    assert Counter(sink.results)["a", "timer", 11] == 1


def test_watermarks_wait_for_the_slowest_source_and_not_for_an_idle_one():
    class Watermarks(ProcessFunction):
        def process(self, record, ctx):
            yield ctx.watermark

    flow, sink = Dataflow("idle"), CollectSink()
    strategy = WatermarkStrategy.monotonous(lambda number: number)
    busy = flow.source(GeneratorSource(lambda number: number, count=400, rate=400), uid="busy", watermarks=strategy)
    idle = flow.source(GeneratorSource(lambda number: number, count=2, rate=1), uid="idle",
                       watermarks=strategy.with_idleness(50))
    busy.union(idle).process(Watermarks(), uid="w").sink(sink, uid="out")
    run(flow)
    assert max(sink.results) > 10


def test_side_outputs_carry_what_the_main_output_does_not():
    late = OutputTag("late")

    class Split(ProcessFunction):
        def process(self, record, ctx):
            if record % 2:
                ctx.output(late, record)
            else:
                yield record

    flow, even, odd = Dataflow("sides"), CollectSink(), CollectSink()
    stream = flow.source(CollectionSource(range(10)), uid="s").process(Split(), uid="split")
    stream.sink(even, uid="even")
    stream.side_output(late).map(str, uid="text").sink(odd, uid="odd")
    run(flow)
    assert even.results == [0, 2, 4, 6, 8]
    assert odd.results == ["1", "3", "5", "7", "9"]


RULES = MapStateDescriptor("rules", str, int)
TOTAL = ValueStateDescriptor("total", int, default=0)


class Apply(BroadcastProcessFunction):
    written = threading.Semaphore(0)

    def process(self, record, ctx):
        rules = ctx.broadcast_state(RULES)
        with pytest.raises(InvalidRequest, match="read-only"):
            rules.put("x", 1)
        yield (record, dict(rules.entries()))

    def process_broadcast(self, record, ctx):
        ctx.broadcast_state(RULES).put(record, len(record))
        self.written.release()


def test_every_subtask_sees_all_broadcast_records(tmp_path):
    def after_the_rules(number):
        if number == 0:
            assert all(Apply.written.acquire(timeout=30) for _ in range(2 * 3))
        return number

    flow, sink = Dataflow("broadcast"), CollectSink()
    rules = flow.source(CollectionSource(["a", "bb"]), uid="rules")
    numbers = flow.source(GeneratorSource(after_the_rules, count=400), uid="numbers")
    numbers.connect(rules.broadcast()).process(Apply(), uid="apply", parallelism=3).sink(sink, uid="out")
    run(flow, checkpoint_dir=str(tmp_path))
    assert sorted(record for record, _ in sink.results) == list(range(400))
    assert all(rules == {"a": 1, "bb": 2} for _, rules in sink.results)
    flow2, again = Dataflow("broadcast"), CollectSink()
    rules = flow2.source(CollectionSource(["a", "bb"]), uid="rules")
    numbers = flow2.source(GeneratorSource(lambda number: number, count=420), uid="numbers")
    numbers.connect(rules.broadcast()).process(Apply(), uid="apply", parallelism=5).sink(again, uid="out")
    run(flow2, checkpoint_dir=str(tmp_path), restore="latest")
    assert [rules for record, rules in again.results if record >= 400] == [{"a": 1, "bb": 2}] * 20


class Totals(KeyedBroadcastProcessFunction):
    counted = threading.Semaphore(0)

    def open(self, ctx):
        self.total = ctx.state(TOTAL)

    def process(self, record, ctx):
        self.total.update(self.total.value() + 1)
        self.counted.release()
        return None

    def process_broadcast(self, record, ctx):
        with pytest.raises(InvalidRequest, match="no current key"):
            ctx.state(TOTAL)
        found = []
        ctx.apply_to_keyed_state(TOTAL, lambda key, state: found.append((key, state.value())))
        return found


class Forbidden(Totals, CheckpointedFunction):
    """Reaches for keyed state where there is no key: on the broadcast side, and when a snapshot is taken."""

    def __init__(self, place):
        self.place = place

    def process_broadcast(self, record, ctx):
        if self.place == "broadcast":
            self.total.update(100)

    def initialize_state(self, ctx):
        pass

    def snapshot_state(self, ctx):
        if self.place == "snapshot":
            self.total.update(100)


@pytest.mark.parametrize("backend", ["filesystem", "rocksdb"])
@pytest.mark.parametrize("place", ["broadcast", "snapshot"])
def test_the_key_of_the_last_record_is_out_of_reach_between_records(place, backend, tmp_path):
    flow, sink = Dataflow("stale"), CollectSink()

    def ask(number):
        for _ in range(100):
            assert Totals.counted.acquire(timeout=30)
        return "now"

    questions = flow.source(GeneratorSource(ask, count=1), uid="questions")
    numbers = flow.source(CollectionSource([number % 5 for number in range(100)]), uid="numbers")
    numbers.key_by(lambda number: number, key_type=int).connect(questions.broadcast()) \
        .process(Forbidden(place), uid="totals").sink(sink, uid="out")
    with pytest.raises(InvalidRequest, match="no current key"):
        run(flow, checkpoint_dir=str(tmp_path), backend=backend, restart="none")


@pytest.mark.parametrize("before", [0, 5])
def test_a_key_of_another_type_is_told_with_operator_and_record_wherever_it_comes(before):
    class Through(KeyedProcessFunction):
        def process(self, value, ctx):
            yield value

    flow = Dataflow("keys")
    flow.source(CollectionSource([*range(before), "ann"]), uid="s").key_by(lambda one: one, key_type=int) \
        .process(Through(), uid="through").sink(CollectSink(), uid="out")
    with pytest.raises(InvalidRequest, match="another type") as told:
        run(flow, restart="none")
    assert told.value.__notes__ == ["in operator 'through', subtask 0 of 1, at the record 'ann'"]


@pytest.mark.parametrize("record", [{"user": "ann"}, "ann", b"ann"])
def test_a_record_that_is_returned_bare_is_told_and_not_taken_apart(record):
    class Returns(ProcessFunction):
        def process(self, value, ctx):
            return record

    class ReturnsKeyed(KeyedProcessFunction):
        def process(self, value, ctx):
            ctx.timers.register_event_time_timer(value)

        def on_timer(self, timestamp, ctx):
            return record

    flow = Dataflow("bare")
    flow.source(CollectionSource([1]), uid="s").process(Returns(), uid="p").sink(CollectSink(), uid="out")
    with pytest.raises(InvalidRequest, match=r"process gave a single record.*yield it, or return \[record\]"):
        run(flow)
    flow = Dataflow("bare")
    flow.source(CollectionSource([1]), uid="s").key_by(lambda n: n, key_type=int).process(ReturnsKeyed(), uid="p") \
        .sink(CollectSink(), uid="out")
    with pytest.raises(InvalidRequest, match="on_timer gave a single record"):
        run(flow)


def test_the_broadcast_side_reaches_the_state_of_every_key():
    flow, sink = Dataflow("apply"), CollectSink()

    def ask(number):
        for _ in range(100):
            assert Totals.counted.acquire(timeout=30)
        return "how many?"

    questions = flow.source(GeneratorSource(ask, count=1), uid="questions")
    numbers = flow.source(CollectionSource([number % 5 for number in range(100)]), uid="numbers")
    numbers.key_by(lambda number: number, key_type=int).connect(questions.broadcast()) \
        .process(Totals(), uid="totals", parallelism=2).sink(sink, uid="out")
    run(flow)
    assert sorted(sink.results) == [(key, 20) for key in range(5)]


class Buffering(ProcessFunction, CheckpointedFunction):
    """Keeps every third record back until the next ones come."""

    notices: Counter[str] = Counter()

    def initialize_state(self, ctx):
        self.kept = ctx.operator_state.list_state(ListStateDescriptor("kept", int))
        self.buffer = self.kept.get()

    def snapshot_state(self, ctx):
        self.kept.update(self.buffer)

    def process(self, record, ctx):
        self.buffer.append(record)
        if len(self.buffer) >= 3:
            out, self.buffer = self.buffer, []
            return out
        return None

    def checkpoint_completed(self, checkpoint_id):
        self.notices["completed"] += 1


def test_operator_state_is_kept_through_failures_and_dealt_out_on_a_restore(tmp_path):
    seen = []

    def once(number):
        seen.append(number)
        if len(seen) == 700:
            raise RuntimeError("injected")
        return number

    def flow_of(count, parallelism, sink):
        flow = Dataflow("buffering")
        flow.source(GeneratorSource(lambda number: number, count=count, rate=8000), uid="s").rebalance() \
            .map(once, uid="once", parallelism=1).rebalance() \
            .process(Buffering(), uid="buffer", parallelism=parallelism).sink(sink, uid="o")
        return flow

    sink = CollectSink()
    settings = CheckpointSettings(interval="15ms")
    run(flow_of(1000, 2, sink), checkpoint_dir=str(tmp_path), settings=settings, restart=FixedDelay(2, 1))
    assert Buffering.notices["completed"] > 0
    run(flow_of(2000, 3, sink), checkpoint_dir=str(tmp_path), settings=settings, restore="latest")
    counts = Counter(sink.results)
    assert set(counts.values()) == {1}
    assert len(counts) >= 2000 - 3 * 2


def test_calls_that_make_no_sense_in_their_place_say_why():
    class Wrong(ProcessFunction):
        def process(self, record, ctx):
            with pytest.raises(InvalidRequest, match="key_by"):
                ctx.state(TOTAL)
            with pytest.raises(InvalidRequest, match="keyed"):
                ctx.timers.register_event_time_timer(1)
            with pytest.raises(InvalidRequest, match="broadcast"):
                ctx.broadcast_state(RULES)
            with pytest.raises(InvalidRequest, match="process_broadcast"):
                ctx.apply_to_keyed_state(TOTAL, lambda key, state: None)
            yield (ctx.subtask_index, ctx.parallelism, ctx.uid)

    flow, sink = Dataflow("wrong"), CollectSink()
    flow.source(CollectionSource([1]), uid="s").process(Wrong(), uid="wrong").sink(sink, uid="o")
    run(flow)
    assert sink.results == [(0, 1, "wrong")]


def test_flat_map_filter_and_map_keep_timestamps_of_their_records():
    class Stamp(ProcessFunction):
        def process(self, record, ctx):
            yield (record, ctx.timestamp)

    flow, sink = Dataflow("stamps"), CollectSink()
    flow.source(CollectionSource([3, 1, 2]), uid="s", watermarks=WatermarkStrategy.monotonous(lambda n: n * 100)) \
        .filter(lambda n: n != 1).flat_map(lambda n: [n] * n).map(str).process(Stamp(), uid="stamp").sink(sink, uid="o")
    run(flow)
    assert sink.results == [("3", 300)] * 3 + [("2", 200)] * 2


def test_a_key_of_the_wrong_type_ends_the_job_and_is_named():
    with pytest.raises(HoldfastError, match="7"):
        keyed_run([{"key": 7, "at": 1}], Alarm())


def test_generators_run_one_record_at_a_time():
    order = []

    class Slowly(KeyedProcessFunction):
        def process(self, record, ctx):
            order.append(("begin", ctx.key))
            yield record
            order.append(("end", ctx.key))

    keyed_run(at("a", 1) + at("b", 2), Slowly())
    assert order == [("begin", "a"), ("end", "a"), ("begin", "b"), ("end", "b")]

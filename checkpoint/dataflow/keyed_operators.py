"""Keyed and broadcast operators: current key, keyed state, timers in order."""

from __future__ import annotations

from typing import Any

from checkpoint.dataflow.context import (
    BroadcastReadContext,
    BroadcastWriteContext,
    KeyedBroadcastReadContext,
    KeyedBroadcastWriteContext,
    KeyedContext,
    KeyedTimers,
    PlainTimers,
)
from checkpoint.dataflow.graph import Node
from checkpoint.dataflow.keys import KeySelector
from checkpoint.dataflow.operators import Environment, FunctionOperator, Stamps, earliest, giving_records, noted
from checkpoint.runtime.contracts import OperatorRestore
from checkpoint.runtime.skew import KeyGroupSample
from statebackend.backend import KeyedBackend
from statebackend.errors import InvalidRequest
from statebackend.files import SnapshotSource
from statebackend.keygroups import key_group_range
from statebackend.timers import Timer
from statebackend.ttl import TimeDomain

SWEEP_INTERVAL_MS = 1000
MAIN, BROADCAST = 0, 1


class KeyedOperator(FunctionOperator):
    """What both keyed operators share: the keyed backend, the loop over records, the firing of timers."""

    _keyed: KeyedBackend | None = None

    def __init__(self, node: Node, environment: Environment) -> None:
        super().__init__(node, environment)
        if node.key is None:
            raise InvalidRequest("a keyed operator needs a key", operator=node.uid)
        self.selector = KeySelector(node.key)
        self.timer_call = giving_records(self.function.on_timer)
        self.sample = KeyGroupSample(environment.max_parallelism,
                                     lambda keys: self.selector.key_groups(keys, environment.max_parallelism),
                                     environment.clock.now_ms)

    def open(self, restore: OperatorRestore, source: SnapshotSource | None, checkpoint_id: int | None) -> None:
        super().open(restore, source, checkpoint_id)
        environment = self.environment
        self._keyed = environment.backend.keyed(
            uid=self.uid, key_type=self.selector.key_type, max_parallelism=environment.max_parallelism,
            key_groups=key_group_range(environment.subtask_index, environment.parallelism, environment.max_parallelism),
            clock=environment.clock, restore=restore.keyed, source=source)
        self._timers = KeyedTimers(self._keyed, environment.clock)
        self._next_sweep: int | None = None
        self._ctx = self.context(self._keyed)
        self.open_function(self._ctx)
        self._sweeps = any(getattr(schema, "ttl", None) is not None for schema in self._keyed.schemas())

    def context(self, keyed: KeyedBackend) -> KeyedContext:
        return KeyedContext(self.place, self._timers, self.store, self.side, keyed)

    def keyed(self) -> KeyedBackend | None:
        return self._keyed

    def process(self, values: list[Any], timestamps: Stamps) -> None:
        """The hot loop: nothing here but what every record needs."""
        assert self._keyed is not None
        self.records_in += len(values)
        ctx, set_key, process = self._ctx, self._keyed.set_current_key, self.call
        keys = self.selector.many(values)
        out: list[Any] = []
        extend = out.extend
        ctx.time_domain = None
        if timestamps is None:
            ctx.timestamp = None
            try:
                for key, value in zip(keys, values):
                    set_key(key)
                    ctx.key = key
                    result = process(value, ctx)
                    if result is not None:
                        extend(result)
            except Exception as error:
                raise noted(error, self, value) from None
            self.emit(out, None)
        else:
            self._process_stamped(keys, values, timestamps, out)
        self._keyed.unset_current_key()  # what runs between records must not write to the key of the last one
        self.sample.see(keys)  # now that each is known to be a key: one that is none was told with its record
        if self.side.values:
            self.emit_side(self.side)

    def _process_stamped(self, keys: list[Any], values: list[Any], timestamps: list[int | None],
                         out: list[Any]) -> None:
        assert self._keyed is not None
        ctx, set_key, process, extend = self._ctx, self._keyed.set_current_key, self.call, out.extend
        stamps: list[int | None] = []
        try:
            for key, value, stamp in zip(keys, values, timestamps):
                set_key(key)
                ctx.key = key
                ctx.timestamp = stamp
                result = process(value, ctx)
                if result is not None:
                    extend(result)
                    stamps.extend([stamp] * (len(out) - len(stamps)))
        except Exception as error:
            raise noted(error, self, value) from None
        self.emit(out, stamps)

    def watermark(self, watermark: int) -> None:
        assert self._keyed is not None
        self._timers.watermark = watermark
        self._keyed.advance_watermark(watermark)
        self._fire(TimeDomain.EVENT, watermark)

    def processing_time(self, now_ms: int) -> int | None:
        assert self._keyed is not None
        self._fire(TimeDomain.PROCESSING, now_ms)
        return earliest(self._keyed.timers.next_timestamp(TimeDomain.PROCESSING), self._sweep(now_ms))

    def close(self) -> None:
        try:
            super().close()
        finally:
            if self._keyed is not None:
                self._keyed.close()

    def _sweep(self, now_ms: int) -> int | None:
        """Background clean-up of expired state, once a second where any state has a TTL."""
        if not self._sweeps or self._keyed is None:
            return None
        if self._next_sweep is None or now_ms >= self._next_sweep:
            if self._next_sweep is not None:
                self._keyed.sweep()
            self._next_sweep = now_ms + SWEEP_INTERVAL_MS
        return self._next_sweep

    def _fire(self, domain: TimeDomain, until: int) -> None:
        """Fire due timers in order; one that a firing timer deletes does not fire, an earlier one it sets fires next."""
        assert self._keyed is not None
        service, timers = self._keyed.timers, self._timers
        first = service.next_timestamp(domain)
        if first is None or first > until:
            return
        timers.firing = domain
        try:
            while due := service.pop_due(domain, until):
                timers.deleted.clear()
                self._fire_batch(domain, due)
        finally:
            timers.firing = None

    def _fire_batch(self, domain: TimeDomain, due: list[Timer]) -> None:
        assert self._keyed is not None
        timers, ctx = self._timers, self._ctx
        out, stamps = list[Any](), list[int | None]()
        ctx.time_domain = domain
        for index, timer in enumerate(due):
            if timers.deleted and (timer.key, timer.timestamp) in timers.deleted:
                continue
            timers.earliest = None
            self._keyed.set_current_key(timer.key)
            ctx.key, ctx.timestamp = timer.key, timer.timestamp
            try:
                result = self.timer_call(timer.timestamp, ctx)
                if result is not None:
                    out.extend(result)
                    stamps.extend([timer.timestamp] * (len(out) - len(stamps)))
            except Exception as error:
                raise noted(error, self, timer) from None
            if timers.earliest is not None and index + 1 < len(due) and timers.earliest < due[index + 1].timestamp:
                self._put_back(domain, due[index + 1:])
                break
        ctx.time_domain = None
        self._keyed.unset_current_key()
        self.emit(out, stamps)
        self.emit_side(self.side)

    def _put_back(self, domain: TimeDomain, rest: list[Timer]) -> None:
        assert self._keyed is not None
        deleted = self._timers.deleted
        for timer in rest:
            if (timer.key, timer.timestamp) not in deleted:
                self._keyed.set_current_key(timer.key)
                self._keyed.timers.register(domain, timer.timestamp, timer.namespace)


class KeyedProcessOperator(KeyedOperator):
    """Runs a KeyedProcessFunction."""


class KeyedBroadcastOperator(KeyedOperator):
    """Runs a KeyedBroadcastProcessFunction: logical input 0 is keyed, 1 is the broadcast side."""

    def __init__(self, node: Node, environment: Environment) -> None:
        super().__init__(node, environment)
        self.broadcast_call = giving_records(self.function.process_broadcast)

    def context(self, keyed: KeyedBackend) -> KeyedContext:
        self._broadcast_ctx = KeyedBroadcastWriteContext(self.place, self._timers, self.store, self.side, keyed)
        return KeyedBroadcastReadContext(self.place, self._timers, self.store, self.side, keyed)

    def process_input(self, logical_input: int, values: list[Any], timestamps: Stamps) -> None:
        if logical_input == MAIN:
            self.process(values, timestamps)
            return
        self.records_in += len(values)
        self._broadcast_ctx.timestamp = None
        self.run_batch(self.broadcast_call, self._broadcast_ctx, values, timestamps)


class BroadcastOperator(FunctionOperator):
    """Runs a BroadcastProcessFunction: logical input 0 is the main stream, 1 is the broadcast side."""

    def __init__(self, node: Node, environment: Environment) -> None:
        super().__init__(node, environment)
        self.broadcast_call = giving_records(self.function.process_broadcast)

    def open(self, restore: OperatorRestore, source: SnapshotSource | None, checkpoint_id: int | None) -> None:
        super().open(restore, source, checkpoint_id)
        self._clocks = PlainTimers(self.uid, self.environment.clock)
        self._read = BroadcastReadContext(self.place, self._clocks, self.store, self.side)
        self._write = BroadcastWriteContext(self.place, self._clocks, self.store, self.side)
        self.open_function(self._read)

    def process(self, values: list[Any], timestamps: Stamps) -> None:
        self.process_input(MAIN, values, timestamps)

    def process_input(self, logical_input: int, values: list[Any], timestamps: Stamps) -> None:
        self.records_in += len(values)
        call, ctx = (self.call, self._read) if logical_input == MAIN else (self.broadcast_call, self._write)
        ctx.timestamp = None
        self.run_batch(call, ctx, values, timestamps)

    def watermark(self, watermark: int) -> None:
        self._clocks.watermark = watermark

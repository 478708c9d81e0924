"""The contexts that local runtimes hand to functions: key, time, state and side outputs of one operator subtask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from checkpoint.dataflow.functions import OpenContext, OutputTag, ProcessContext, SnapshotContext, Timers
from checkpoint.runtime.contracts import MIN_WATERMARK
from statebackend.backend import KeyedBackend
from statebackend.clock import Clock
from statebackend.descriptors import MapStateDescriptor, StateDescriptor
from statebackend.errors import InvalidRequest
from statebackend.operator_state import BroadcastState, OperatorStateStore, ReadOnlyBroadcastState
from statebackend.state import State
from statebackend.ttl import TimeDomain


class Place:
    """Where an operator subtask stands: what every context tells, and what a chain needs to open an operator."""

    def __init__(self, uid: str, subtask_index: int, parallelism: int, max_parallelism: int, *, attempt: int = 0,
                 job_id: str = "", job_name: str = "", run_id: str = "",
                 restored_checkpoint_id: int | None = None) -> None:
        self.uid, self.subtask_index = uid, subtask_index
        self.parallelism, self.max_parallelism, self.attempt = parallelism, max_parallelism, attempt
        self.job_id, self.job_name, self.run_id = job_id, job_name, run_id
        self.restored_checkpoint_id = restored_checkpoint_id

    def fill(self, ctx: OpenContext) -> None:
        ctx.uid, ctx.subtask_index, ctx.parallelism = self.uid, self.subtask_index, self.parallelism
        ctx.max_parallelism, ctx.attempt = self.max_parallelism, self.attempt
        ctx.job_id, ctx.job_name, ctx.run_id = self.job_id, self.job_name, self.run_id
        ctx.restored_checkpoint_id = self.restored_checkpoint_id
        ctx.is_restored = self.restored_checkpoint_id is not None


class SideOutputs:
    """Collects side outputs during a batch."""

    def __init__(self) -> None:
        self.values: dict[str, list[Any]] = {}
        self.timestamps: dict[str, list[int | None]] = {}

    def add(self, tag: OutputTag, value: Any, timestamp: int | None) -> None:
        if tag.name not in self.values:
            self.values[tag.name], self.timestamps[tag.name] = [], []
        self.values[tag.name].append(value)
        self.timestamps[tag.name].append(timestamp)

    def take(self) -> list[tuple[str, list[Any], list[int | None]]]:
        taken = [(name, values, self.timestamps[name]) for name, values in self.values.items()]
        self.values, self.timestamps = {}, {}
        return taken


class PlainTimers(Timers):
    """The clocks of an operator that is not keyed; it has no timers."""

    def __init__(self, uid: str, clock: Clock) -> None:
        self._uid, self._clock = uid, clock
        self.watermark = MIN_WATERMARK

    def _refuse(self, timestamp: int) -> None:
        raise InvalidRequest("timers need a keyed stream", operator=self._uid, hint="put key_by(...) before process(...)")

    register_event_time_timer = register_processing_time_timer = _refuse
    delete_event_time_timer = delete_processing_time_timer = _refuse

    def current_watermark(self) -> int:
        return self.watermark

    def current_processing_time(self) -> int:
        return self._clock.now_ms()


class KeyedTimers(Timers):
    """Timers of the current key. While timers fire, deletions and earlier registrations are kept for the firing loop."""

    def __init__(self, keyed: KeyedBackend, clock: Clock) -> None:
        self._keyed, self._clock = keyed, clock
        self._service = keyed.timers
        self.watermark = MIN_WATERMARK
        self.firing: TimeDomain | None = None
        self.deleted: set[tuple[Any, int]] = set()
        self.earliest: int | None = None

    def register_event_time_timer(self, timestamp: int) -> None:
        self._register(TimeDomain.EVENT, timestamp)

    def register_processing_time_timer(self, timestamp: int) -> None:
        self._register(TimeDomain.PROCESSING, timestamp)

    def delete_event_time_timer(self, timestamp: int) -> None:
        self._delete(TimeDomain.EVENT, timestamp)

    def delete_processing_time_timer(self, timestamp: int) -> None:
        self._delete(TimeDomain.PROCESSING, timestamp)

    def current_watermark(self) -> int:
        return self.watermark

    def current_processing_time(self) -> int:
        return self._clock.now_ms()

    def _register(self, domain: TimeDomain, timestamp: int) -> None:
        self._service.register(domain, timestamp)
        if self.firing is domain:
            self.deleted.discard((self._keyed.current_key, timestamp))
            if self.earliest is None or timestamp < self.earliest:
                self.earliest = timestamp

    def _delete(self, domain: TimeDomain, timestamp: int) -> None:
        self._service.delete(domain, timestamp)
        if self.firing is domain:
            self.deleted.add((self._keyed.current_key, timestamp))


class OperatorContext(ProcessContext):
    """Of an operator that is not keyed."""

    def __init__(self, place: Place, timers: Timers, store: OperatorStateStore, side: SideOutputs) -> None:
        place.fill(self)
        self._timers, self._store, self._side = timers, store, side

    @property
    def operator_state(self) -> OperatorStateStore:
        return self._store

    def timer_service(self) -> Timers:
        return self._timers

    def output(self, tag: OutputTag, value: Any, timestamp: int | None = None) -> None:
        self._side.add(tag, value, self.timestamp if timestamp is None else timestamp)


class KeyedContext(OperatorContext):
    """Of a keyed operator."""

    def __init__(self, place: Place, timers: Timers, store: OperatorStateStore, side: SideOutputs,
                 keyed: KeyedBackend) -> None:
        super().__init__(place, timers, store, side)
        self._keyed = keyed

    def state(self, descriptor: StateDescriptor, *, namespace_type: Any = None) -> State:
        return self._keyed.state(descriptor, namespace_type=namespace_type)


class _ReadsBroadcast(OperatorContext):
    def broadcast_state(self, descriptor: MapStateDescriptor) -> BroadcastState | ReadOnlyBroadcastState:
        return self._store.broadcast_state(descriptor).read_only()


class _WritesBroadcast(OperatorContext):
    def broadcast_state(self, descriptor: MapStateDescriptor) -> BroadcastState | ReadOnlyBroadcastState:
        return self._store.broadcast_state(descriptor)


class BroadcastReadContext(_ReadsBroadcast):
    """Of the main side of a BroadcastProcessFunction."""


class BroadcastWriteContext(_WritesBroadcast):
    """Of the broadcast side of a BroadcastProcessFunction."""


class KeyedBroadcastReadContext(_ReadsBroadcast, KeyedContext):
    """Of the keyed side of a KeyedBroadcastProcessFunction."""


class KeyedBroadcastWriteContext(_WritesBroadcast):
    """Of the broadcast side of a KeyedBroadcastProcessFunction: no current key, but a way to all of them."""

    def __init__(self, place: Place, timers: Timers, store: OperatorStateStore, side: SideOutputs,
                 keyed: KeyedBackend) -> None:
        super().__init__(place, timers, store, side)
        self._keyed = keyed

    def state(self, descriptor: StateDescriptor, *, namespace_type: Any = None) -> State:
        raise InvalidRequest("the broadcast side has no current key", operator=self.uid, state=descriptor.name,
                             hint="use ctx.apply_to_keyed_state(descriptor, f)")

    def apply_to_keyed_state(self, descriptor: StateDescriptor, function: Callable[[Any, Any], None]) -> None:
        state = self._keyed.state(descriptor)
        for key in list(state.stream_keys()):
            self._keyed.set_current_key(key)
            function(key, state)
        self._keyed.unset_current_key()


class CheckpointContext(SnapshotContext):
    """What `snapshot_state` gets."""

    def __init__(self, place: Place, store: OperatorStateStore, checkpoint_id: int, timestamp: int) -> None:
        place.fill(self)
        self._store = store
        self.checkpoint_id, self.checkpoint_timestamp = checkpoint_id, timestamp

    @property
    def operator_state(self) -> OperatorStateStore:
        return self._store

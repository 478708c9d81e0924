"""The contexts that a function sees inside a Spark task: state, timers and clocks of the current key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from checkpoint.dataflow.functions import OutputTag, ProcessContext, SnapshotContext, Timers
from spark_integration.kept import Kept, can_keep, can_keep_keys
from statebackend.backend import KeyedBackend
from statebackend.clock import Clock
from statebackend.descriptors import MapStateDescriptor, StateDescriptor
from statebackend.errors import InvalidRequest
from statebackend.operator_state import BroadcastState, OperatorStateStore, ReadOnlyBroadcastState
from statebackend.state import State
from statebackend.ttl import TimeDomain


class TaskTimers(Timers):
    """Timers of the backend's current key. Both clocks stand still during a batch."""

    def __init__(self, keyed: KeyedBackend, clock: Clock) -> None:
        self._keyed, self._clock = keyed, clock
        self._timers = keyed.timers

    def register_event_time_timer(self, timestamp: int) -> None:
        self._timers.register(TimeDomain.EVENT, timestamp)

    def register_processing_time_timer(self, timestamp: int) -> None:
        self._timers.register(TimeDomain.PROCESSING, timestamp)

    def delete_event_time_timer(self, timestamp: int) -> None:
        self._timers.delete(TimeDomain.EVENT, timestamp)

    def delete_processing_time_timer(self, timestamp: int) -> None:
        self._timers.delete(TimeDomain.PROCESSING, timestamp)

    def current_watermark(self) -> int:
        return self._keyed.watermark

    def current_processing_time(self) -> int:
        return self._clock.now_ms()


class TaskContext(ProcessContext, SnapshotContext):
    """One context for `open`, `process`, `on_timer` and the snapshot hooks of one task."""

    def __init__(self, *, uid: str, subtask_index: int, parallelism: int, max_parallelism: int, attempt: int,
                 restored_checkpoint_id: int | None, keyed: KeyedBackend, clock: Clock,
                 operator_state: OperatorStateStore, output: Callable[[str, Any], None]) -> None:
        self.uid, self.subtask_index, self.parallelism = uid, subtask_index, parallelism
        self.max_parallelism, self.attempt = max_parallelism, attempt
        self.restored_checkpoint_id = restored_checkpoint_id
        self.is_restored = restored_checkpoint_id is not None
        self.keyed = keyed
        self.in_broadcast = False
        self.kept: Kept | None = None
        """Where value states are held while a chunk of records is processed; None where nobody does that."""
        self._operator_state = operator_state
        self._timers = TaskTimers(keyed, clock)
        self._output = output

    def state(self, descriptor: StateDescriptor, *, namespace_type: Any = None) -> State:
        if self.kept is not None and namespace_type is None and can_keep(descriptor):
            return self.kept.state(descriptor)
        return self.keyed.state(descriptor, namespace_type=namespace_type)

    def keep_values(self) -> None:
        """From now on hold value states chunk by chunk, if the key allows it."""
        if can_keep_keys(self.keyed.key_type):
            self.kept = Kept(self.keyed)

    @property
    def operator_state(self) -> OperatorStateStore:
        return self._operator_state

    def broadcast_state(self, descriptor: MapStateDescriptor) -> BroadcastState | ReadOnlyBroadcastState:
        state = self._operator_state.broadcast_state(descriptor)
        return state if self.in_broadcast else state.read_only()

    def timer_service(self) -> Timers:
        return self._timers

    def output(self, tag: OutputTag, value: Any, timestamp: int | None = None) -> None:
        self._output(tag.name if isinstance(tag, OutputTag) else str(tag), value)

    def apply_to_keyed_state(self, descriptor: StateDescriptor, function: Callable[[Any, Any], None]) -> None:
        if not self.in_broadcast:
            raise InvalidRequest("apply_to_keyed_state belongs in process_broadcast", operator=self.uid,
                                 state=descriptor.name)
        state = self.keyed.state(descriptor)
        for key in list(state.stream_keys()):
            self.keyed.set_current_key(key)
            function(key, state)

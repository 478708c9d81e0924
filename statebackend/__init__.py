"""Typed state for streaming operators: keyed, operator and broadcast state with TTL, in three backends.

Names are imported on first use, so that importing an error class does not load Arrow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from statebackend.backend import Backend, KeyedBackend, KeyedHandle, PendingSnapshot, backend_names, create_backend
    from statebackend.clock import Clock, ManualClock, SystemClock
    from statebackend.descriptors import (
        AggregateFunction,
        AggregatingStateDescriptor,
        ListStateDescriptor,
        MapStateDescriptor,
        ReducingStateDescriptor,
        StateDescriptor,
        StateKind,
        ValueStateDescriptor,
    )
    from statebackend.errors import (
        Closed,
        Conflict,
        CorruptData,
        HoldfastError,
        IncompatibleState,
        InvalidRequest,
        NotFound,
        Unavailable,
    )
    from statebackend.files import LocalFiles, StateFile
    from statebackend.keygroups import (
        KeyGroupRange,
        default_max_parallelism,
        key_group_of,
        key_group_range,
        key_groups_of,
        subtask_of,
    )
    from statebackend.operator_state import OperatorStateStore, redistribute
    from statebackend.state import AggregatingState, ListState, MapState, ReducingState, State, ValueState
    from statebackend.timers import Timer, TimerService
    from statebackend.ttl import Cleanup, TimeDomain, TtlConfig, UpdateType, Visibility
    from statebackend.types import Digits, Pickled, StateType, Zoned, state_type

_HOME = {
    "backend": ["Backend", "KeyedBackend", "KeyedHandle", "PendingSnapshot", "backend_names", "create_backend"],
    "clock": ["Clock", "ManualClock", "SystemClock"],
    "descriptors": ["AggregateFunction", "AggregatingStateDescriptor", "ListStateDescriptor", "MapStateDescriptor",
                    "ReducingStateDescriptor", "StateDescriptor", "StateKind", "ValueStateDescriptor"],
    "errors": ["Closed", "Conflict", "CorruptData", "HoldfastError", "IncompatibleState", "InvalidRequest", "NotFound",
               "Unavailable"],
    "files": ["LocalFiles", "StateFile"],
    "keygroups": ["KeyGroupRange", "default_max_parallelism", "key_group_of", "key_group_range", "key_groups_of",
                  "subtask_of"],
    "operator_state": ["OperatorStateStore", "redistribute"],
    "state": ["AggregatingState", "ListState", "MapState", "ReducingState", "State", "ValueState"],
    "timers": ["Timer", "TimerService"],
    "ttl": ["Cleanup", "TimeDomain", "TtlConfig", "UpdateType", "Visibility"],
    "types": ["Digits", "Pickled", "StateType", "Zoned", "state_type"],
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "AggregateFunction", "AggregatingState", "AggregatingStateDescriptor", "Backend", "Cleanup", "Clock", "Closed",
    "Conflict", "CorruptData", "Digits", "HoldfastError", "IncompatibleState", "InvalidRequest", "KeyGroupRange",
    "KeyedBackend", "KeyedHandle", "ListState", "ListStateDescriptor", "LocalFiles", "ManualClock", "MapState",
    "MapStateDescriptor", "NotFound", "OperatorStateStore", "PendingSnapshot", "Pickled", "ReducingState",
    "ReducingStateDescriptor", "State", "StateDescriptor", "StateFile", "StateKind", "StateType", "SystemClock",
    "TimeDomain", "Timer", "TimerService", "TtlConfig", "Unavailable", "UpdateType", "ValueState",
    "ValueStateDescriptor", "Visibility", "Zoned", "backend_names", "create_backend", "default_max_parallelism",
    "key_group_of", "key_group_range", "key_groups_of", "redistribute", "state_type", "subtask_of",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'statebackend' has no attribute {name!r}")
    value = getattr(import_module(f"statebackend.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value

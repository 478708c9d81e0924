"""What a state is: its name, its kind, its types, its default, its TTL. A descriptor holds no data."""

from __future__ import annotations

import builtins
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Generic, TypeVar

from statebackend.errors import InvalidRequest
from statebackend.ttl import TtlConfig
from statebackend.types import StateType, state_type

IN = TypeVar("IN")
ACC = TypeVar("ACC")
OUT = TypeVar("OUT")


class StateKind(StrEnum):
    """The five keyed kinds, and the timers that are kept like them."""

    VALUE = "value"
    LIST = "list"
    MAP = "map"
    REDUCING = "reducing"
    AGGREGATING = "aggregating"
    TIMER = "timer"


class AggregateFunction(ABC, Generic[IN, ACC, OUT]):
    """How an aggregating state folds inputs into an accumulator. Must not keep state of its own."""

    @abstractmethod
    def create_accumulator(self) -> ACC: ...

    @abstractmethod
    def add(self, accumulator: ACC, value: IN) -> ACC: ...

    @abstractmethod
    def get_result(self, accumulator: ACC) -> OUT: ...

    @abstractmethod
    def merge(self, left: ACC, right: ACC) -> ACC: ...


BUILT_IN_FUNCTIONS = ("sum", "count", "min", "max", "avg")
"""Functions that fold Arrow batches without a Python object per row."""


class StateDescriptor:
    """Base of the five descriptors. `value_type` is the type of what is stored per entry."""

    kind: StateKind
    __slots__ = ("default", "name", "ttl", "value_type")

    def __init__(self, name: str, value_type: Any, *, default: Any = None, ttl: TtlConfig | None = None) -> None:
        if not isinstance(name, str) or not name:
            raise InvalidRequest("a state needs a name that is not empty", found=name)
        if name.startswith("_"):
            raise InvalidRequest("state names that start with an underscore are reserved", state=name)
        if ttl is not None and not isinstance(ttl, TtlConfig):
            raise InvalidRequest("ttl takes a TtlConfig", state=name, found=type(ttl).__name__)
        self.name = name
        self.value_type: StateType = state_type(value_type)
        self.ttl = ttl
        if default is not None:
            self.value_type.check(default)
            default = self.value_type.decode(self.value_type.encode(default))  # the caller may change the one given
        self.default = default

    def has_same_default(self, other: StateDescriptor) -> bool:
        """Whether unset entries of both read alike; NaN is NaN here."""
        if self.default is None or other.default is None:
            return self.default is other.default
        return self.value_type.encode(self.default) == other.value_type.encode(other.default)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.value_type})"


class ValueStateDescriptor(StateDescriptor):
    """One value per key and namespace."""

    kind = StateKind.VALUE
    __slots__ = ()


class ListStateDescriptor(StateDescriptor):
    """A list per key and namespace; `value_type` is the type of an element."""

    kind = StateKind.LIST
    __slots__ = ()

    def __init__(self, name: str, element_type: Any, *, ttl: TtlConfig | None = None) -> None:
        super().__init__(name, element_type, ttl=ttl)


class MapStateDescriptor(StateDescriptor):
    """A map per key and namespace; map keys are ordered like keys."""

    kind = StateKind.MAP
    __slots__ = ("map_key_type",)

    def __init__(self, name: str, key_type: Any, value_type: Any, *, ttl: TtlConfig | None = None) -> None:
        super().__init__(name, value_type, ttl=ttl)
        self.map_key_type: StateType = state_type(key_type)
        self.map_key_type.require_key()


class ReducingStateDescriptor(StateDescriptor):
    """One value per key and namespace, folded by `reduce(old, new)`.

    `reduce` is a function of two values or one of "sum", "min", "max" ("count" counts the values added). It may also
    come before the type, as in Flink.
    """

    kind = StateKind.REDUCING
    __slots__ = ("built_in", "reduce")

    def __init__(self, name: str, value_type: Any, reduce: Callable[[Any, Any], Any] | str, *,
                 default: Any = None, ttl: TtlConfig | None = None) -> None:
        if _is_function(value_type):
            value_type, reduce = reduce, value_type
        super().__init__(name, value_type, default=default, ttl=ttl)
        self.built_in = _built_in_name(reduce)
        if self.built_in == "avg":
            raise InvalidRequest("an average is no reduction; use AggregatingStateDescriptor", state=name)
        if self.built_in == "count":
            _require_number(name, "a count", self.value_type)
        if self.built_in is None and not callable(reduce):
            raise InvalidRequest(f"{reduce!r} is no reduce function", state=name,
                                 hint=f"pass a function of two values or one of {', '.join(BUILT_IN_FUNCTIONS[:4])}")
        self.reduce: Callable[[Any, Any], Any] = _REDUCERS[self.built_in] if self.built_in else reduce  # type: ignore[assignment]


class AggregatingStateDescriptor(StateDescriptor):
    """An accumulator per key and namespace; `add` folds an input in, `get` gives the result.

    With an `AggregateFunction`, `accumulator_type` is the type of the accumulator, which is what is stored. With a
    built-in name ("sum", "count", "min", "max", "avg") it is the type of the inputs, and the accumulator follows.
    The function may also come before the type, as in Flink.
    """

    kind = StateKind.AGGREGATING
    __slots__ = ("built_in", "function", "input_type")

    def __init__(self, name: str, accumulator_type: Any, function: AggregateFunction[Any, Any, Any] | str, *,
                 ttl: TtlConfig | None = None) -> None:
        if _is_function(accumulator_type):
            accumulator_type, function = function, accumulator_type
        self.built_in = _built_in_name(function)
        self.input_type: StateType | None = None
        if self.built_in is not None:
            self.input_type = state_type(accumulator_type)
            if self.built_in == "avg":
                _require_number(name, "an average", self.input_type)
            self.function = built_in_aggregate(self.built_in)
            accumulator_type = _accumulator_type(self.built_in, accumulator_type)
        elif isinstance(function, AggregateFunction):
            self.function = function
        else:
            raise InvalidRequest(f"{function!r} is no aggregate function", state=name,
                                 hint=f"pass an AggregateFunction or one of {', '.join(BUILT_IN_FUNCTIONS)}")
        super().__init__(name, accumulator_type, ttl=ttl)


def _is_function(given: Any) -> bool:
    """Whether this says how to fold, and is no type."""
    return isinstance(given, (str, AggregateFunction, FunctionType, BuiltinFunctionType, MethodType, partial))


def _require_number(name: str, what: str, kind: StateType) -> None:
    try:
        kind.check(1)
    except InvalidRequest:
        raise InvalidRequest(f"{what} is of numbers", state=name, expected="int or float", found=str(kind),
                             hint="fold other types with a function of your own") from None


def _built_in_name(function: Any) -> str | None:
    if isinstance(function, str):
        if function not in BUILT_IN_FUNCTIONS:
            raise InvalidRequest(f"no built-in function {function!r}", hint=f"use one of {', '.join(BUILT_IN_FUNCTIONS)}")
        return function
    known: tuple[tuple[Any, str], ...] = (
        (builtins.sum, "sum"), (operator.add, "sum"), (builtins.min, "min"), (builtins.max, "max"))
    return next((name for candidate, name in known if function is candidate), None)


_REDUCERS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": operator.add,
    "min": min,
    "max": max,
    "count": lambda old, _new: old + 1,
}


def _accumulator_type(built_in: str, input_type: Any) -> Any:
    if built_in == "count":
        return int
    if built_in == "avg":
        return tuple[float, int]
    return input_type


def built_in_aggregate(name: str) -> AggregateFunction[Any, Any, Any]:
    """The per-record form of a built-in function; `None` is the empty accumulator of sum, min and max."""
    return _BUILT_INS[name]


class _Fold(AggregateFunction[Any, Any, Any]):
    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        self._function = function

    def create_accumulator(self) -> Any:
        return None

    def add(self, accumulator: Any, value: Any) -> Any:
        return value if accumulator is None else self._function(accumulator, value)

    def get_result(self, accumulator: Any) -> Any:
        return accumulator

    def merge(self, left: Any, right: Any) -> Any:
        return right if left is None else left if right is None else self._function(left, right)


class _Count(AggregateFunction[Any, int, int]):
    def create_accumulator(self) -> int:
        return 0

    def add(self, accumulator: int, value: Any) -> int:
        return accumulator + 1

    def get_result(self, accumulator: int) -> int:
        return accumulator

    def merge(self, left: int, right: int) -> int:
        return left + right


class _Average(AggregateFunction[float, tuple[float, int], float | None]):
    def create_accumulator(self) -> tuple[float, int]:
        return 0.0, 0

    def add(self, accumulator: tuple[float, int], value: float) -> tuple[float, int]:
        return accumulator[0] + value, accumulator[1] + 1

    def get_result(self, accumulator: tuple[float, int]) -> float | None:
        total, count = accumulator
        return total / count if count else None

    def merge(self, left: tuple[float, int], right: tuple[float, int]) -> tuple[float, int]:
        return left[0] + right[0], left[1] + right[1]


_BUILT_INS: dict[str, AggregateFunction[Any, Any, Any]] = {
    "sum": _Fold(operator.add),
    "min": _Fold(min),
    "max": _Fold(max),
    "count": _Count(),
    "avg": _Average(),
}

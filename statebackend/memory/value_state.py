"""Value state: one value per key and namespace. The common cases have classes of their own, made to be fast."""

from __future__ import annotations

from time import time
from typing import Any

import pyarrow as pa

from statebackend.clock import Clock, SystemClock
from statebackend.codecs.scalars import BoolType, FloatType
from statebackend.memory.batch_state import Batches, dtype_of, is_number
from statebackend.memory.columns import ColumnTable
from statebackend.memory.forms import is_int64
from statebackend.memory.key_index import I64
from statebackend.memory.layers import MISSING
from statebackend.memory.stamped import BIAS, MASK, base_of, expiry_of, least_live, value_of
from statebackend.memory.table_state import TableState
from statebackend.state import ValueState
from statebackend.ttl import NEVER, TimeDomain


class MemoryValueState(TableState, ValueState[Any]):
    """Any type, with or without namespaces, without TTL."""

    mergeable = False

    def value(self) -> Any:
        stored = self.delta[self.slot()]
        if stored is MISSING:
            return self.default()
        return stored if self._outgoing is None else self._outgoing(stored)

    def default(self) -> Any:
        default = self.descriptor.default
        return default if default is None or self._outgoing is None else self._outgoing(default)

    def update(self, value: Any) -> None:
        slot = self.slot()
        if value is None and not self.value_type.nullable:
            self.remove(slot)
        else:
            self.delta[slot] = self.accept(value)

    def is_live(self, slot: Any) -> bool:
        return self.delta[slot] is not MISSING

    def examine(self, slot: Any, now: int) -> tuple[int, int, int]:
        return 1, 0, NEVER

    def value_many(self, keys: pa.Array) -> pa.Array:
        delta, default = self.delta, self.descriptor.default
        found = [delta[slot] for slot in self.slots_of(self.held_keys(keys))]
        return self.value_type.to_arrow([default if stored is MISSING else stored for stored in found])

    def update_many(self, keys: pa.Array, values: pa.Array) -> None:
        with self.batch(keys) as held:
            column = self.values_of(values, len(held))
            delta, nullable = self.delta, self.value_type.nullable
            for slot, value in zip(self.slots_of(held), column):
                if value is None and not nullable:
                    self.remove(slot)
                else:
                    delta[slot] = value

    def get_values(self, keys: pa.Array) -> list[Any]:
        delta, default = self.delta, self.default
        found = [delta[slot] for slot in self.slots_of(self.held_keys(keys))]
        found = [default() if stored is MISSING else stored for stored in found]
        return found if self._outgoing is None else [None if one is None else self._outgoing(one) for one in found]

    def put_values(self, keys: pa.Array, values: list[Any]) -> None:
        with self.batch(keys) as held:
            column = [None if value is None else self._incoming(value) for value in values]
            delta = self.delta
            for slot, value in zip(self.slots_of(held), column):
                if value is None:
                    self.remove(slot)
                else:
                    delta[slot] = value


class TtlValueState(MemoryValueState):
    """Values that expire: stored as (value, expires_at)."""

    get_values, put_values = ValueState.get_values, ValueState.put_values

    def value(self) -> Any:
        self.touched()
        return self._read(self.slot())

    def _read(self, slot: Any) -> Any:
        stored = self.delta[slot]
        if stored is MISSING:
            return self.default()
        expiry = self.expiry
        assert expiry is not None
        if expiry.now() >= stored[1]:
            if expiry.on_read:
                self.remove(slot)
            if not expiry.returns_expired:
                return self.default()
        elif expiry.refresh:
            self.delta[slot] = (stored[0], expiry.stamp())
        return stored[0] if self._outgoing is None else self._outgoing(stored[0])

    def update(self, value: Any) -> None:
        slot = self.slot()
        if value is None and not self.value_type.nullable:
            self.remove(slot)
        else:
            assert self.expiry is not None
            self.delta[slot] = (self.accept(value), self.expiry.stamp())
        self.touched()

    def is_live(self, slot: Any) -> bool:
        stored = self.delta[slot]
        assert self.expiry is not None
        return stored is not MISSING and self.expiry.now() < stored[1]

    def examine(self, slot: Any, now: int) -> tuple[int, int, int]:
        stored = self.delta[slot]
        if stored is MISSING:
            return 0, 0, NEVER
        if now < stored[1]:
            return 1, 0, stored[1]
        self.remove(slot)
        return 1, 1, NEVER

    def value_many(self, keys: pa.Array) -> pa.Array:
        return self.value_type.to_arrow([self._read(slot) for slot in self.slots_of(self.held_keys(keys))])

    def update_many(self, keys: pa.Array, values: pa.Array) -> None:
        assert self.expiry is not None
        with self.batch(keys) as held:
            column = self.values_of(values, len(held))
            delta, nullable, expires = self.delta, self.value_type.nullable, self.expiry.stamp()
            for slot, value in zip(self.slots_of(held), column):
                if value is None and not nullable:
                    self.remove(slot)
                else:
                    delta[slot] = (value, expires)


class _Direct(MemoryValueState):
    """No namespaces, no TTL, values that can't be changed: a read is one look-up."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.absent = self.descriptor.default
        if is_number(self.value_type) and Batches.possible(self):
            self.batches = Batches(self, (dtype_of(self.value_type),))

    def value(self) -> Any:
        return self.delta[self.keyed.key]

    def is_live(self, slot: Any) -> bool:
        return slot in self.delta or (slot not in self.delta.removed and self.stored_below(slot))

    def value_many(self, keys: pa.Array) -> pa.Array:
        column = None if self.batches is None else self.batches.keys(keys)
        read = self.batches.read(column) if self.batches is not None and column is not None else None
        if read is None:
            delta = self.delta
            return self.value_type.to_arrow([delta[key] for key in self.held_keys(keys)])
        (numbers,), there = read
        if self.descriptor.default is not None:
            numbers[~there] = self.descriptor.default
            return pa.array(numbers)
        return pa.array(numbers, mask=~there)

    def update_many(self, keys: pa.Array, values: pa.Array) -> None:
        column = None if self.batches is None else self.batches.keys(keys)
        if column is None or self.batches is None or not self._put_many(self.batches, column, values):
            super().update_many(keys, values)

    def _put_many(self, batches: Batches, keys: pa.Array, values: Any) -> bool:
        if isinstance(values, (pa.Array, pa.ChunkedArray)) and values.null_count:
            return False
        numbers = batches.numbers(values, self.value_type, len(keys))

        def put(table: ColumnTable, slots: I64) -> bool:
            table.put(slots, [numbers])
            return True
        return batches.change(keys, put)

    def _update_other(self, value: Any) -> None:
        MemoryValueState.update(self, value)


class IntValueState(_Direct):
    """64-bit integers. Small ones are told first because the interpreter compares them fastest."""

    def update(self, value: Any) -> None:
        if type(value) is int and ((value > -0x3FFFFFFF and value < 0x3FFFFFFF)
                                   or -0x8000000000000000 <= value <= 0x7FFFFFFFFFFFFFFF):
            self.delta[self.keyed.key] = value
        else:
            self._update_other(value)


class ExactValueState(_Direct):
    """Types all of whose values of one Python class fit: float and bool."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._exact = self.value_type.python_type

    def update(self, value: Any) -> None:
        if type(value) is self._exact:
            self.delta[self.keyed.key] = value
        else:
            self._update_other(value)


class StampedValueState(TtlValueState):
    """Values that expire, over integers: value and expiry are one number."""

    def _read(self, slot: Any) -> Any:
        stored = self.delta[slot]
        if stored is MISSING:
            return self.default()
        expiry = self.expiry
        assert expiry is not None
        if expiry.now() >= expiry_of(stored):
            if expiry.on_read:
                self.remove(slot)
            if not expiry.returns_expired:
                return self.default()
        elif expiry.refresh:
            self.delta[slot] = base_of(expiry.stamp()) + value_of(stored)
        return value_of(stored)

    def update(self, value: Any) -> None:
        slot = self.slot()
        if value is None:
            self.remove(slot)
        else:
            assert self.expiry is not None
            self.delta[slot] = base_of(self.expiry.stamp()) + self.accept(value)
        self.touched()

    def is_live(self, slot: Any) -> bool:
        stored = self.delta[slot]
        assert self.expiry is not None
        return stored is not MISSING and self.expiry.now() < expiry_of(stored)

    def examine(self, slot: Any, now: int) -> tuple[int, int, int]:
        stored = self.delta[slot]
        if stored is MISSING:
            return 0, 0, NEVER
        if now < expiry_of(stored):
            return 1, 0, expiry_of(stored)
        self.remove(slot)
        return 1, 1, NEVER

    def update_many(self, keys: pa.Array, values: pa.Array) -> None:
        assert self.expiry is not None
        with self.batch(keys) as held:
            column = self.values_of(values, len(held))
            delta, base = self.delta, base_of(self.expiry.stamp())
            for slot, value in zip(self.slots_of(held), column):
                if value is None:
                    self.remove(slot)
                else:
                    delta[slot] = base + value


class DirectTtlValueState(StampedValueState):
    """The same without namespaces, with fewer calls: what depends on the time is worked out once a millisecond."""

    __slots__ = ("_base", "_live", "_stamped", "_time")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        assert self.expiry is not None
        self._time = self.expiry.now
        self._stamped: int | None = None
        self._base = self._live = 0

    def _tick(self, now: int) -> None:
        expiry = self.expiry
        assert expiry is not None
        self.touched()
        self._base, self._live = base_of(expiry.stamp()), least_live(now)
        # While clean-up has work to do, each access does a part of it.
        self._stamped = None if expiry.incremental and now >= expiry.due else now

    def value(self) -> Any:
        if (now := self._time()) != self._stamped:
            self._tick(now)
        stored = self.delta[self.keyed.key]
        if stored is not MISSING and stored >= self._live:
            return (stored & MASK) - BIAS
        return self._read(self.keyed.key)

    def update(self, value: Any) -> None:
        if type(value) is int and ((value > -0x3FFFFFFF and value < 0x3FFFFFFF)
                                   or -0x8000000000000000 <= value <= 0x7FFFFFFFFFFFFFFF):
            if (now := self._time()) != self._stamped:
                self._tick(now)
            self.delta[self.keyed.key] = self._base + value
        else:
            StampedValueState.update(self, value)


class SystemTtlValueState(DirectTtlValueState):
    """The same on the machine's clock: milliseconds are worked out once each, not at every access.

    `_until` is the second at which the current millisecond ends, or 0 while clean-up has work to do at each access.
    """

    __slots__ = ("_until",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._until = 0.0

    def _next_millisecond(self) -> None:
        self._tick(now := self._time())
        self._until = 0.0 if self._stamped is None else (now + 1) / 1000

    def value(self) -> Any:
        if time() >= self._until:
            self._next_millisecond()
        stored = self.delta[self.keyed.key]
        if stored is not MISSING and stored >= self._live:
            return (stored & MASK) - BIAS
        return self._read(self.keyed.key)

    def update(self, value: Any) -> None:
        if type(value) is int and ((value > -0x3FFFFFFF and value < 0x3FFFFFFF)
                                   or -0x8000000000000000 <= value <= 0x7FFFFFFFFFFFFFFF):
            if time() >= self._until:
                self._next_millisecond()
            self.delta[self.keyed.key] = self._base + value
        else:
            StampedValueState.update(self, value)


def _ttl_class(descriptor: Any, named: bool, clock: Clock) -> type[MemoryValueState]:
    if not is_int64(descriptor.value_type):
        return TtlValueState
    if named or descriptor.ttl.updates_on_read:
        return StampedValueState
    on_system_clock = descriptor.ttl.time is TimeDomain.PROCESSING and type(clock) is SystemClock
    return SystemTtlValueState if on_system_clock else DirectTtlValueState


def value_state_class(descriptor: Any, named: bool, clock: Clock) -> type[MemoryValueState]:
    """The class that serves a value state best."""
    kind = descriptor.value_type
    if descriptor.ttl is not None:
        return _ttl_class(descriptor, named, clock)
    plain = not named and kind.immutable
    if plain and is_int64(kind):
        return IntValueState
    if plain and (type(kind) is BoolType or (type(kind) is FloatType and kind.bits == 64)):
        return ExactValueState
    return MemoryValueState

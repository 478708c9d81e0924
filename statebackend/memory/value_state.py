"""Value state: one value per key and namespace. The common cases have classes of their own, made to be fast."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from statebackend.codecs.scalars import BoolType, FloatType
from statebackend.memory.forms import is_int64
from statebackend.memory.layers import MISSING
from statebackend.memory.table_state import TableState
from statebackend.state import ValueState
from statebackend.ttl import NEVER


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


class TtlValueState(MemoryValueState):
    """Values that expire: stored as (value, expires_at)."""

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

    def value(self) -> Any:
        return self.delta[self.keyed.key]

    def is_live(self, slot: Any) -> bool:
        return slot in self.delta or (slot not in self.delta.removed and self.stored_below(slot))

    def value_many(self, keys: pa.Array) -> pa.Array:
        delta = self.delta
        return self.value_type.to_arrow([delta[key] for key in self.held_keys(keys)])

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


class DirectTtlValueState(TtlValueState):
    """TTL without namespaces over values that can't be changed: the same rules as `TtlValueState`, with fewer calls."""

    def value(self) -> Any:
        stored = self.delta[self.keyed.key]
        expiry = self.expiry
        now = expiry.now()  # type: ignore[union-attr]
        if now >= expiry.due:  # type: ignore[union-attr]
            self.touched()
        if stored is not MISSING and now < stored[1] and not expiry.refresh:  # type: ignore[union-attr]
            return stored[0]
        return self._read(self.keyed.key)

    def update(self, value: Any) -> None:
        if value is None:
            TtlValueState.update(self, value)
            return
        value = self.accept(value)
        expiry = self.expiry
        now = expiry.now()  # type: ignore[union-attr]
        expires = now + expiry.ttl_ms  # type: ignore[union-attr]
        if expires < expiry.due or expires > NEVER:  # type: ignore[union-attr]
            expires = expiry.stamp()  # type: ignore[union-attr]
        self.delta[self.keyed.key] = (value, expires)
        if now >= expiry.due:  # type: ignore[union-attr]
            self.touched()


def value_state_class(descriptor: Any, named: bool) -> type[MemoryValueState]:
    """The class that serves a value state best."""
    kind = descriptor.value_type
    plain = not named and kind.immutable
    if descriptor.ttl is not None:
        return DirectTtlValueState if plain else TtlValueState
    if plain and is_int64(kind):
        return IntValueState
    if plain and (type(kind) is BoolType or (type(kind) is FloatType and kind.bits == 64)):
        return ExactValueState
    return MemoryValueState

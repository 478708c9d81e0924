"""List state: a list per key and namespace; with TTL each element expires on its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from statebackend.codecs.containers import ListType
from statebackend.errors import InvalidRequest
from statebackend.memory.layers import MISSING
from statebackend.memory.table_state import TableState
from statebackend.state import ListState
from statebackend.ttl import NEVER


class MemoryListState(TableState, ListState[Any]):
    """Stored under a slot: a Python list of values, or of (value, expires_at) pairs; never an empty one.

    A list in the active layer belongs to it and grows in place; one found below is copied first.
    """

    def get(self) -> list[Any]:
        self.touched()
        return self._read(self.slot())

    def _read(self, slot: Any) -> list[Any]:
        stored = self.delta[slot]
        if stored is MISSING:
            return []
        if self.expiry is not None:
            stored = self._visible(slot, stored)
        give = self._outgoing
        return list(stored) if give is None else [give(value) for value in stored]

    def _visible(self, slot: Any, stored: list[tuple[Any, int]]) -> list[Any]:
        """The values to return; expired ones are dropped and live ones renewed as the TTL says."""
        expiry = self.expiry
        assert expiry is not None
        now = expiry.now()
        live = [pair for pair in stored if now < pair[1]]
        kept = live if expiry.on_read else stored
        if expiry.refresh and live:
            expires = expiry.stamp()
            kept = [(value, expires) if now < end else (value, end) for value, end in kept]
            self._replace(slot, kept)
        elif len(kept) != len(stored):
            self._replace(slot, kept)
        return [value for value, _ in (stored if expiry.returns_expired else live)]

    def _replace(self, slot: Any, stored: list[Any]) -> None:
        if stored:
            self.delta[slot] = stored
        else:
            self.remove(slot)

    def _own(self, slot: Any) -> list[Any]:
        """The list of a slot in the active layer, ready to grow."""
        owned = self.delta.get(slot)
        if owned is None:
            below = self.delta[slot]
            owned = self.delta[slot] = [] if below is MISSING else list(below)
        return owned  # type: ignore[no-any-return]

    def _packed(self, values: Iterable[Any]) -> list[Any]:
        accepted = [self.accept(value) for value in values]
        if self.expiry is None or not accepted:
            return accepted
        expires = self.expiry.stamp()
        return [(value, expires) for value in accepted]

    def add(self, value: Any) -> None:
        packed = self._packed((value,))
        self._own(self.slot()).extend(packed)
        self.touched()

    def add_all(self, values: Iterable[Any]) -> None:
        packed = self._packed(self._several(values))
        if packed:
            self._own(self.slot()).extend(packed)
        self.touched()

    def update(self, values: Iterable[Any]) -> None:
        packed = self._packed(self._several(values))
        self._replace(self.slot(), packed)
        self.touched()

    def _several(self, values: Iterable[Any]) -> Iterable[Any]:
        if values is None or isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
            raise InvalidRequest("a list state takes an iterable of elements", state=self.name,
                                 key=self.keyed.shown_key(), found=type(values).__name__)
        return values

    def is_live(self, slot: Any) -> bool:
        stored = self.delta[slot]
        if stored is MISSING:
            return False
        if self.expiry is None:
            return True
        now = self.expiry.now()
        return any(now < expires for _, expires in stored)

    def examine(self, slot: Any, now: int) -> tuple[int, int, int]:
        stored = self.delta[slot]
        if stored is MISSING or self.expiry is None:
            return 0, 0, NEVER
        live = [pair for pair in stored if now < pair[1]]
        if len(live) != len(stored):
            self._replace(slot, live)
        return len(stored), len(stored) - len(live), min((pair[1] for pair in live), default=NEVER)

    def merge_slots(self, target: Any, sources: list[Any]) -> None:
        found = [stored for stored in (self.delta[slot] for slot in sources) if stored is not MISSING]
        if found:
            self._own(target).extend(element for stored in found for element in stored)
        for slot in sources:
            self.remove(slot)

    # -- batches

    def get_many(self, keys: pa.Array) -> pa.Array:
        lists = [self._read(slot) for slot in self.slots_of(self.held_keys(keys))]
        return ListType(self.value_type).to_arrow(lists)

    def add_many(self, keys: pa.Array, values: pa.Array) -> None:
        with self.batch(keys) as held:
            packed = self._packed(self.values_of(values, len(held)))
            for slot, element in zip(self.slots_of(held), packed):
                self._own(slot).append(element)

    def update_many(self, keys: pa.Array, values: pa.Array) -> None:
        with self.batch(keys) as held:
            lists = self.values_of(values, len(held), ListType(self.value_type))
            self.require_small(values, (element for elements in lists for element in elements or ()))
            for slot, elements in zip(self.slots_of(held), lists):
                self._replace(slot, self._packed(elements or ()))

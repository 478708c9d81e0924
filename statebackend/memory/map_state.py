"""Map state: a map per key and namespace, changed and snapshotted entry by entry; with TTL each entry expires alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from statebackend.codecs.containers import MapType
from statebackend.errors import InvalidRequest
from statebackend.memory.forms import KeyForm
from statebackend.memory.layers import MISSING, Layer, chunks
from statebackend.memory.table_state import TableState
from statebackend.state import MapState
from statebackend.ttl import NEVER


class MapPart(dict[Any, Any]):
    """What a layer knows of one map: entries put and removed; `whole` if nothing below it counts any more."""

    __slots__ = ("removed", "whole")

    def __init__(self, whole: bool = False) -> None:
        super().__init__()
        self.whole = whole
        self.removed: set[Any] = set()

    def apply(self, newer: MapPart) -> None:
        """Become this part followed by a newer one."""
        if newer.whole:
            self.clear()
            self.removed = set()
            self.whole = True
        for key in newer.removed:
            self.pop(key, None)
            if not self.whole:
                self.removed.add(key)
        self.update(newer)
        self.removed.difference_update(newer)


class MemoryMapState(TableState, MapState[Any, Any]):
    """Stored under a slot of any layer, the base included: a `MapPart`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.map_key_type = self.descriptor.map_key_type  # type: ignore[attr-defined]
        self.map_form = KeyForm(self.map_key_type)

    # -- layers

    def _find(self, slot: Any, key: Any) -> Any:
        for layer in (self.delta, *self.frozen, self.base):
            part = layer.get(slot)
            if part is not None:
                stored = part.get(key, MISSING)
                if stored is not MISSING:
                    return stored
                if part.whole or key in part.removed:
                    return MISSING
        return MISSING

    def stored_map(self, slot: Any) -> dict[Any, Any]:
        """All stored entries of a slot, expired or not: a copy."""
        parts: list[MapPart] = []
        for layer in (self.delta, *self.frozen, self.base):
            part = layer.get(slot)
            if part is not None:
                parts.append(part)
                if part.whole:
                    break
        found: dict[Any, Any] = dict(parts[-1]) if parts else {}
        for part in reversed(parts[:-1]):
            for key in part.removed:
                found.pop(key, None)
            found.update(part)
        return found

    def _own(self, slot: Any) -> MapPart:
        """The active layer's part of a map."""
        part = self.delta.get(slot)
        if part is None:
            part = self.delta[slot] = MapPart()
        return part  # type: ignore[no-any-return]

    def _drop(self, slot: Any, key: Any) -> None:
        part = self._own(slot)
        part.pop(key, None)
        if not part.whole:
            part.removed.add(key)

    def _put(self, slot: Any, key: Any, stored: Any) -> None:
        part = self._own(slot)
        part[key] = stored
        part.removed.discard(key)

    def remove_slot(self, slot: Any) -> None:
        if any(slot in layer for layer in (*self.frozen, self.base)):
            self.delta[slot] = MapPart(whole=True)
        else:
            self.delta.pop(slot, None)

    def clear(self) -> None:
        self.remove_slot(self.slot())

    def clear_many(self, keys: pa.Array) -> None:
        with self.batch(keys) as held:
            for slot in self.slots_of(held):
                self.remove_slot(slot)

    def merge_layer(self, before: Layer, changed: Layer) -> None:
        for slot, part in changed.items():
            older = before.get(slot)
            if older is None:
                before[slot] = part
            else:
                older.apply(part)

    def merged(self, layers: Iterable[Layer]) -> tuple[dict[Any, Any], set[Any]]:
        several = [layer for layer in layers if layer]
        if len(several) == 1:
            return several[0], set()
        puts: dict[Any, Any] = {}
        for layer in several:
            for slot, part in layer.items():
                sum_ = puts.get(slot)
                if sum_ is None:
                    sum_ = puts[slot] = MapPart()
                sum_.apply(part)
        return puts, set()

    def fold(self, layer: Layer, base: Layer) -> Iterator[None]:
        for part in chunks(layer.items(), 1024):
            for slot, newer in part:
                self._fold_map(slot, newer, base)
            yield

    @staticmethod
    def _fold_map(slot: Any, newer: MapPart, base: Layer) -> None:
        older = base.get(slot)
        if older is None or newer.whole:
            older = MapPart(whole=True)
        older.apply(newer)
        older.whole = True
        if older:
            base[slot] = older
        else:
            base.pop(slot, None)

    # -- reading

    def _hold(self, key: Any) -> Any:
        try:
            if key is None:
                raise InvalidRequest("a map key must not be None")
            return self.map_form.hold(key)
        except InvalidRequest as error:
            raise self.named_error(error, map_key=repr(key)[:80]) from error

    def get(self, key: Any) -> Any:
        slot, held = self.slot(), self._hold(key)
        self.touched()
        stored = self._visible(slot, held)
        return None if stored is MISSING else stored if self._outgoing is None else self._outgoing(stored)

    def _visible(self, slot: Any, held: Any) -> Any:
        """The value of an entry as a read sees it, with what a read does to its TTL."""
        stored = self._find(slot, held)
        expiry = self.expiry
        if stored is MISSING or expiry is None:
            return stored
        if expiry.now() >= stored[1]:
            if expiry.on_read:
                self._drop(slot, held)
            return stored[0] if expiry.returns_expired else MISSING
        if expiry.refresh:
            self._put(slot, held, (stored[0], expiry.stamp()))
        return stored[0]

    def contains(self, key: Any) -> bool:
        slot, held = self.slot(), self._hold(key)
        self.touched()
        return self._visible(slot, held) is not MISSING

    def is_empty(self) -> bool:
        self.touched()
        slot, expiry = self.slot(), self.expiry
        stored = self.stored_map(slot)
        if expiry is None or expiry.returns_expired:
            return not stored
        now = expiry.now()
        return not any(now < expires for _, expires in stored.values())

    def _read(self, slot: Any) -> list[tuple[Any, Any]]:
        stored = self.stored_map(slot)
        if self.expiry is not None:
            stored = {key: value for key in stored if (value := self._visible(slot, key)) is not MISSING}
        give = self._outgoing
        return [(key, stored[key] if give is None else give(stored[key])) for key in self.map_form.ordered(list(stored))]

    def entries(self) -> Iterator[tuple[Any, Any]]:
        self.touched()
        give = self.map_form.give
        return iter([(give(key), value) for key, value in self._read(self.slot())])

    def keys(self) -> Iterator[Any]:
        return iter([key for key, _ in self.entries()])

    def values(self) -> Iterator[Any]:
        return iter([value for _, value in self.entries()])

    # -- writing

    def _packed(self, value: Any) -> Any:
        accepted = self.accept(value)
        return accepted if self.expiry is None else (accepted, self.expiry.stamp())

    def put(self, key: Any, value: Any) -> None:
        slot, held = self.slot(), self._hold(key)
        self._put(slot, held, self._packed(value))
        self.touched()

    def put_all(self, entries: Mapping[Any, Any] | Iterable[tuple[Any, Any]]) -> None:
        slot = self.slot()
        pairs = entries.items() if isinstance(entries, Mapping) else entries
        packed = [(self._hold(key), self._packed(value)) for key, value in pairs]
        for key, stored in packed:
            self._put(slot, key, stored)
        self.touched()

    def remove(self, key: Any) -> None:
        slot, held = self.slot(), self._hold(key)
        if self._find(slot, held) is not MISSING:
            self._drop(slot, held)
        self.touched()

    # -- what tables need

    def is_live(self, slot: Any) -> bool:
        stored = self.stored_map(slot)
        if self.expiry is None:
            return bool(stored)
        now = self.expiry.now()
        return any(now < expires for _, expires in stored.values())

    def examine(self, slot: Any, now: int) -> tuple[int, int, int]:
        stored = self.stored_map(slot)
        gone = [key for key, (_, expires) in stored.items() if now >= expires] if self.expiry is not None else []
        for key in gone:
            self._drop(slot, key)
        left = (stored[key][1] for key in stored if stored[key][1] > now) if self.expiry is not None else ()
        return len(stored), len(gone), min(left, default=NEVER)

    def merge_slots(self, target: Any, sources: list[Any]) -> None:
        for slot in sources:
            for key, stored in self.stored_map(slot).items():
                self._put(target, key, stored)
            self.remove_slot(slot)

    # -- batches

    def _map_keys(self, map_keys: Any, rows: int) -> list[Any]:
        held = self.map_form.held(map_keys, "map key")
        if len(held) != rows:
            raise InvalidRequest("keys and map keys of a batch differ in length", state=self.name, keys=rows,
                                 map_keys=len(held))
        return held

    def get_many(self, keys: pa.Array, map_keys: pa.Array) -> pa.Array:
        held = self.held_keys(keys)
        found = [self._visible(slot, key) for slot, key in zip(self.slots_of(held), self._map_keys(map_keys, len(held)))]
        return self.value_type.to_arrow([None if value is MISSING else value for value in found])

    def put_many(self, keys: pa.Array, map_keys: pa.Array, values: pa.Array) -> None:
        with self.batch(keys) as held:
            inner = self._map_keys(map_keys, len(held))
            for slot, key, value in zip(self.slots_of(held), inner, self.values_of(values, len(held))):
                self._put(slot, key, self._packed(value))

    def remove_many(self, keys: pa.Array, map_keys: pa.Array) -> None:
        with self.batch(keys) as held:
            for slot, key in zip(self.slots_of(held), self._map_keys(map_keys, len(held))):
                if self._find(slot, key) is not MISSING:
                    self._drop(slot, key)

    def entries_many(self, keys: pa.Array) -> pa.Array:
        give = self.map_form.give
        maps = [[(give(key), value) for key, value in self._read(slot)] for slot in self.slots_of(self.held_keys(keys))]
        return MapType(self.map_key_type, self.value_type).to_arrow([dict(entries) for entries in maps])

"""What a snapshot contains of one table: fixed at the freeze, turned into entries on the writer's thread."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import compress
from typing import Any

from statebackend.descriptors import StateKind
from statebackend.entries import OP_DELETE, OP_PUT
from statebackend.memory.columns import ColumnView, column_encoder
from statebackend.memory.encode import CHUNK_ROWS, EntryEncoder
from statebackend.memory.expiry import Expiry
from statebackend.memory.layers import Layer, Layers, chunks, columns
from statebackend.memory.map_state import MapPart
from statebackend.memory.runs import Rows
from statebackend.memory.stamped import is_stamped, least_live
from statebackend.schema import StateSchema


class TableView:
    """A table as it was at a freeze. `layers` and `changed` are oldest first; `changed` is what a delta covers."""

    def __init__(self, table: Layers, schema: StateSchema, encoder: EntryEncoder, changed: list[Layer],
                 expiry: Expiry | None, columns: ColumnView | None, changed_columns: list[Any]) -> None:
        self.schema = schema
        self._table = table
        self._kind = StateKind(schema.kind)
        self._encoder = encoder
        self._base = table.base
        self._layers = tuple(reversed(table.frozen))
        self._changed = changed
        self._columns = columns
        self._changed_columns = changed_columns
        self._drop_before = expiry.now() if expiry is not None and expiry.full_snapshot else None

    def full(self) -> Iterator[Rows]:
        """All entries; those that have expired are left out where the TTL says so."""
        puts, removed = self._table.merged(self._layers)
        if self._columns is not None:
            hidden = self._hidden(puts, removed)
            yield from self._columns.full(self._encoder, hidden, column_encoder(self.schema.value_type))
        if self._kind is StateKind.MAP:
            yield from self._full_maps(puts)
            return
        for slots, stored in columns(self._base, CHUNK_ROWS):
            if puts or removed:
                slots, stored = _picked(slots, stored, [slot not in puts and slot not in removed for slot in slots])
            yield from self._puts(*self._unexpired(slots, stored))
        for slots, stored in columns(puts, CHUNK_ROWS):
            yield from self._puts(*self._unexpired(slots, stored))

    def release(self) -> None:
        """Nobody will ask for entries any more."""
        if self._columns is not None:
            self._columns.release()

    def _hidden(self, puts: dict[Any, Any], removed: set[Any]) -> set[Any]:
        """Keys whose entry in the columns is overridden by the dicts above them."""
        return {*puts, *removed, *self._base, *self._base.removed}

    def delta(self) -> Iterator[Rows]:
        """What changed, with what is gone."""
        puts, removed = self._table.merged(self._changed)
        if self._columns is not None:
            yield from self._columns.delta(self._encoder, {*puts, *removed}, column_encoder(self.schema.value_type),
                                           self._changed_columns)
        for gone in chunks(removed, CHUNK_ROWS):
            yield from self._deletes(gone)
        for slots, stored in columns(puts, CHUNK_ROWS):
            yield from self._puts(slots, stored, replace=True)

    # -- by kind

    def _puts(self, slots: list[Any], stored: list[Any], *, replace: bool = False) -> Iterator[Rows]:
        if not slots:
            return
        if self._kind is StateKind.LIST:
            yield from self._encoder.lists(slots, stored, replace=replace)
        elif self._kind is StateKind.MAP:
            yield from self._encoder.map_changes(slots, stored)
        elif self._kind is StateKind.TIMER:
            yield self._encoder.timers(slots, OP_PUT)
        else:
            yield self._encoder.puts(slots, stored)

    def _deletes(self, slots: list[Any]) -> Iterator[Rows]:
        if self._kind is StateKind.LIST:
            yield from self._encoder.lists(slots, [[] for _ in slots], replace=True)
        elif self._kind is StateKind.TIMER:
            yield self._encoder.timers(slots, OP_DELETE)
        else:
            yield self._encoder.deletes(slots)

    def _full_maps(self, puts: dict[Any, Any]) -> Iterator[Rows]:
        for part in chunks(self._base.items(), 1024):
            kept = [(slot, self._live_map(stored)) for slot, stored in part if slot not in puts]
            yield from self._encoder.maps([slot for slot, _ in kept], [entries for _, entries in kept])
        for part in chunks(puts.items(), 1024):
            merged = [(slot, self._live_map(self._over_base(slot, stored))) for slot, stored in part]
            yield from self._encoder.maps([slot for slot, _ in merged], [entries for _, entries in merged])

    def _over_base(self, slot: Any, newer: MapPart) -> MapPart:
        older = self._base.get(slot)
        if older is None or newer.whole:
            return newer
        merged = MapPart(whole=True)
        merged.update(older)
        merged.apply(newer)
        return merged

    # -- TTL

    def _unexpired(self, slots: list[Any], stored: list[Any]) -> tuple[list[Any], list[Any]]:
        now = self._drop_before
        if now is None:
            return slots, stored
        if self._kind is StateKind.LIST:
            lists = [[pair for pair in elements if now < pair[1]] for elements in stored]
            return _picked(slots, lists, lists)
        if is_stamped(self.schema):
            live = least_live(now)
            return _picked(slots, stored, [one >= live for one in stored])
        return _picked(slots, stored, [now < pair[1] for pair in stored])

    def _live_map(self, entries: dict[Any, Any]) -> dict[Any, Any]:
        now = self._drop_before
        return entries if now is None else {key: pair for key, pair in entries.items() if now < pair[1]}


def _picked(slots: list[Any], stored: list[Any], wanted: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """The entries for which `wanted` is true."""
    wanted = list(wanted)
    return list(compress(slots, wanted)), list(compress(stored, wanted))

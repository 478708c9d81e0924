"""Timers on RocksDB: stored in firing order within each key group, with only the earliest held in memory.

The head of a domain holds every timer up to a horizon (in firing order); later ones are only stored. When the head
runs empty it is filled again by one ordered pass over the key groups.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Any

from statebackend.entries import DEFAULT_NAMESPACE, pack_time, unpack_time
from statebackend.errors import InvalidRequest
from statebackend.rocksdb.base import MISSING
from statebackend.rocksdb.context import KeyContext, decode_namespace, encode_namespace
from statebackend.rocksdb.writeback import Table, WriteBack, after
from statebackend.timers import Timer, TimerService
from statebackend.ttl import TimeDomain
from statebackend.types import StateType

HEAD = 4096
MIN_TIME, MAX_TIME = -(2**63), 2**63 - 1
_BEYOND_ALL = b"\xff" * 9


class TimerTable(Table):
    """The timers of one time domain. Entry keys are `key group | state id | timestamp | key | namespace`.

    The firing order is that of `timestamp | key group | key | namespace`.
    """

    def __init__(self, state_id: bytes, engine: WriteBack) -> None:
        super().__init__(state_id, collection=False)
        self._engine = engine
        self._heap: list[bytes] = []
        self._held: set[bytes] = set()
        self._horizon = b""
        """Every stored timer whose order is at or below this is in the head."""

    def add(self, entry: bytes) -> None:
        self._dirty[entry] = b""
        order = _order(entry)
        if order <= self._horizon and order not in self._held:
            self._held.add(order)
            heapq.heappush(self._heap, order)
            if len(self._held) > 2 * HEAD:
                self._shrink()
        self._make_room()

    def remove(self, entry: bytes) -> None:
        self._dirty[entry] = None
        self._held.discard(_order(entry))
        self._make_room()

    def forget_head(self) -> None:
        """What is stored has changed under us: read it again when asked."""
        self._heap, self._held, self._horizon = [], set(), b""

    def _make_room(self) -> None:
        if len(self._dirty) >= self._engine.limit:
            self._engine.evict(self)

    def _shrink(self) -> None:
        """Keep the earlier half; the rest stays stored and comes back in time."""
        self._heap = sorted(self._held)[:HEAD]
        self._held = set(self._heap)
        self._horizon = self._heap[-1]

    def first(self) -> bytes | None:
        """The order of the earliest timer."""
        while True:
            while self._heap:
                if self._heap[0] in self._held:
                    return self._heap[0]
                heapq.heappop(self._heap)
            if self._horizon == _BEYOND_ALL:
                return None
            self._fill()

    def pop(self) -> bytes:
        """Remove the earliest timer, which `first` has just given."""
        order = heapq.heappop(self._heap)
        self._held.discard(order)
        entry = order[8:10] + self.state_id + order[:8] + order[10:]
        self._dirty[entry] = None
        self._make_room()
        return entry

    def _fill(self) -> None:
        orders = []
        for entry in self._walk(self._horizon):
            orders.append(_order(entry))
            if len(orders) >= HEAD:
                break
        self._horizon = orders[-1] if len(orders) >= HEAD else _BEYOND_ALL
        self._heap, self._held = orders, set(orders)

    def _walk(self, horizon: bytes) -> Iterator[bytes]:
        """Entry keys of all stored timers beyond a horizon, in firing order."""
        overlay = self.overlay()
        parts = self._engine.parts
        late = sorted((entry for entry, present in overlay.items()
                       if present is not None and _order(entry) > horizon), key=_order)
        streams: list[Iterator[bytes]] = [iter(late)]
        for group in parts.groups():
            prefix = group.to_bytes(2, "big") + self.state_id
            keys = parts.scan(prefix + horizon[:8], after(prefix), keys_only=True)
            streams.append(_beyond(iter(keys), overlay, horizon))
        return heapq.merge(*streams, key=_order)

    def overlay(self) -> dict[bytes, bytes | None]:
        """The timers that are not, or no longer, as RocksDB has them."""
        changed: dict[bytes, bytes | None] = {}
        for layer in (*self._frozen, self._dirty):
            for entry in list(layer):
                value = layer.get(entry, MISSING)
                if value is not MISSING:
                    changed[entry] = value
        return changed

    def all(self) -> Iterator[bytes]:
        overlay = self.overlay()
        yield from (entry for entry, present in overlay.items() if present is not None)
        for group in self._engine.parts.groups():
            prefix = group.to_bytes(2, "big") + self.state_id
            for key in self._engine.parts.scan(prefix, after(prefix), keys_only=True):
                if key not in overlay:
                    yield key


def _check_time(timestamp: int) -> None:
    if type(timestamp) is not int or not MIN_TIME <= timestamp <= MAX_TIME:
        raise InvalidRequest("a timer's timestamp is a 64-bit number of milliseconds", found=timestamp)


def _order(entry: bytes) -> bytes:
    return entry[4:12] + entry[:2] + entry[12:]


def _beyond(keys: Iterator[bytes], overlay: dict[bytes, bytes | None], horizon: bytes) -> Iterator[bytes]:
    for key in keys:
        if key not in overlay and _order(key) > horizon:
            yield key


class RocksTimerService(TimerService):
    """Timers of both domains. `table_of` makes a domain's table when its first timer is set."""

    def __init__(self, context: KeyContext, table_of: Callable[[TimeDomain, bool], TimerTable | None],
                 namespace_type: Callable[[Any], StateType | None]) -> None:
        self._context = context
        self._table_of = table_of
        self._namespace_type = namespace_type

    def _entry_key(self, table: TimerTable, timestamp: int, namespace: Any) -> bytes:
        encoded = self._context.encoded()
        end = DEFAULT_NAMESPACE if namespace is None else encode_namespace(self._namespace_type(namespace), namespace)
        return encoded[:2] + table.state_id + pack_time(timestamp) + encoded[2:] + end

    def register(self, domain: TimeDomain, timestamp: int, namespace: Any = None) -> None:
        _check_time(timestamp)
        self._context.encoded()
        table = self._table_of(domain, True)
        assert table is not None
        table.add(self._entry_key(table, timestamp, namespace))

    def delete(self, domain: TimeDomain, timestamp: int, namespace: Any = None) -> None:
        _check_time(timestamp)
        self._context.encoded()
        table = self._table_of(domain, False)
        if table is not None:
            table.remove(self._entry_key(table, timestamp, namespace))

    def pop_due(self, domain: TimeDomain, until: int, limit: int = 1000) -> list[Timer]:
        table = self._table_of(domain, False)
        due: list[Timer] = []
        if table is None:
            return due
        bound = pack_time(max(MIN_TIME, min(until, MAX_TIME)))
        while len(due) < limit:
            order = table.first()
            if order is None or order[:8] > bound:
                break
            due.append(self._timer(table.pop()))
        return due

    def next_timestamp(self, domain: TimeDomain) -> int | None:
        table = self._table_of(domain, False)
        order = table.first() if table is not None else None
        return None if order is None else unpack_time(order)

    def timers(self, domain: TimeDomain) -> Iterator[Timer]:
        table = self._table_of(domain, False)
        if table is not None:
            yield from map(self._timer, table.all())

    def count(self, domain: TimeDomain) -> int:
        table = self._table_of(domain, False)
        return 0 if table is None else sum(1 for _ in table.all())

    def _timer(self, entry: bytes) -> Timer:
        key, end = self._context.key_type.decode_key_from(entry, 12)
        namespace, _ = decode_namespace(self._namespace_type(None), entry, end)
        return Timer(unpack_time(entry, 4), key, namespace)

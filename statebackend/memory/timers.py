"""Timers in memory: a heap per time domain over a layered set, so that they are snapshotted like any state."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any

from statebackend.errors import InvalidRequest
from statebackend.keygroups import type_of_value
from statebackend.memory.forms import KeyForm
from statebackend.memory.layers import MISSING, Layers
from statebackend.schema import StateSchema
from statebackend.timers import TIMER_STATES, Timer, TimerService
from statebackend.ttl import TimeDomain
from statebackend.types import StateType, state_type

if TYPE_CHECKING:
    from statebackend.memory.keyed import MemoryKeyed

_MIN_TIME, _MAX_TIME = -(2**63), 2**63 - 1


class TimerTable(Layers):
    """The timers of one domain: slots are (timestamp, key, namespace), keys and namespaces as dicts hold them.

    The heap may hold timers that are gone; they are skipped when they come up, and swept when they are the most.
    """

    def __init__(self, name: str, state_id: int) -> None:
        super().__init__()
        self.name = name
        self.state_id = state_id
        self.size = 0
        self._heap: list[tuple[int, int, Any]] = []
        self._order = 0

    def load(self, slots: list[Any]) -> None:
        """Add timers that were restored."""
        for slot in slots:
            self.base[slot] = True
            self._heap.append((slot[0], self._next(), slot))
        heapify(self._heap)
        self.size = len(self.base)

    def _next(self) -> int:
        self._order += 1
        return self._order

    def add(self, slot: Any) -> None:
        if self.delta[slot] is MISSING:
            self.delta[slot] = True
            self.size += 1
            heappush(self._heap, (slot[0], self._next(), slot))

    def delete(self, slot: Any) -> None:
        if self.delta[slot] is not MISSING:
            self.remove(slot)
            self.size -= 1
            if len(self._heap) > 2 * self.size + 1024:
                self._sweep()

    def _sweep(self) -> None:
        live: dict[Any, tuple[int, int, Any]] = {}
        for entry in self._heap:
            if entry[2] not in live and self.delta[entry[2]] is not MISSING:
                live[entry[2]] = entry
        self._heap = list(live.values())
        heapify(self._heap)

    def first(self) -> Any:
        """The slot of the earliest timer, or None."""
        heap = self._heap
        while heap:
            slot = heap[0][2]
            if self.delta[slot] is not MISSING:
                return slot
            heappop(heap)
        return None

    def pop(self, slot: Any) -> None:
        """Remove the earliest timer, which `first` has just given."""
        heappop(self._heap)
        self.remove(slot)
        self.size -= 1


class MemoryTimers(TimerService):
    """The timers of a keyed backend. The namespace type follows from the first namespace used, or from what was restored."""

    def __init__(self, keyed: MemoryKeyed) -> None:
        self._keyed = keyed
        self.tables: dict[TimeDomain, TimerTable] = {}
        self.namespace_form: KeyForm | None = None

    def table(self, domain: TimeDomain) -> TimerTable:
        found = self.tables.get(domain)
        if found is None or self._keyed.closed:
            self._keyed.require_open()
            name = TIMER_STATES[domain]
            found = self.tables[domain] = TimerTable(name, self._keyed.take_id(name))
        return found

    def _held(self, domain: TimeDomain) -> TimerTable | None:
        """The table, if any timer was ever registered: to look for timers makes no state."""
        if self._keyed.closed:
            self._keyed.require_open()
        return self.tables.get(domain)

    def schema(self, table: TimerTable) -> StateSchema:
        namespace = None if self.namespace_form is None else self.namespace_form.kind
        return StateSchema(table.name, table.state_id, "timer", state_type(bytes), None, namespace)

    def use_namespace_type(self, kind: StateType | None) -> None:
        if kind is not None and self.namespace_form is None:
            self.namespace_form = KeyForm(kind)

    def _slot(self, timestamp: int, namespace: Any) -> Any:
        if type(timestamp) is not int or not _MIN_TIME <= timestamp <= _MAX_TIME:
            raise InvalidRequest("a timer's timestamp is a 64-bit number of milliseconds", found=timestamp)
        key = self._keyed.key
        hash(key)  # refuses the absence of a current key
        if namespace is None:
            return timestamp, key, None
        if self.namespace_form is None:
            self.namespace_form = KeyForm(self._keyed.namespace_type_for(namespace) or type_of_value(namespace))
        return timestamp, key, self.namespace_form.hold(namespace)

    def register(self, domain: TimeDomain, timestamp: int, namespace: Any = None) -> None:
        self.table(domain).add(self._slot(timestamp, namespace))

    def delete(self, domain: TimeDomain, timestamp: int, namespace: Any = None) -> None:
        slot, table = self._slot(timestamp, namespace), self._held(domain)
        if table is not None:
            table.delete(slot)

    def pop_due(self, domain: TimeDomain, until: int, limit: int = 1000) -> list[Timer]:
        table, due = self._held(domain), list[Timer]()
        while table is not None and len(due) < limit:
            slot = table.first()
            if slot is None or slot[0] > until:
                break
            table.pop(slot)
            due.append(self._timer(slot))
        return due

    def next_timestamp(self, domain: TimeDomain) -> int | None:
        table = self._held(domain)
        slot = None if table is None else table.first()
        return None if slot is None else slot[0]

    def timers(self, domain: TimeDomain) -> Iterator[Timer]:
        table = self._held(domain)
        return iter([] if table is None else [self._timer(slot) for slot in table.slots()])

    def count(self, domain: TimeDomain) -> int:
        table = self._held(domain)
        return 0 if table is None else table.size

    def _timer(self, slot: Any) -> Timer:
        namespace = slot[2] if slot[2] is None or self.namespace_form is None else self.namespace_form.give(slot[2])
        return Timer(slot[0], self._keyed.form.give(slot[1]), namespace)

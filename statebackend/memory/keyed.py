"""The keyed state of one operator subtask in memory: registration, the current key, freezing, folding, restoring."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa

from statebackend.backend import KeyedBackend, KeyedHandle, PendingBase
from statebackend.clock import Clock
from statebackend.descriptors import StateDescriptor, StateKind
from statebackend.entries import key_groups_of_entries
from statebackend.errors import Closed, HoldfastError, InvalidRequest
from statebackend.files import SnapshotSource, SnapshotTarget, StateFile
from statebackend.keygroups import KeyGroupRange, key_groups_of
from statebackend.memory import following
from statebackend.memory.batch_state import leave_columns
from statebackend.memory.columns import ColumnView
from statebackend.memory.encode import EntryEncoder
from statebackend.memory.folding_state import MemoryAggregatingState, MemoryReducingState
from statebackend.memory.forms import KeyForm, is_int64
from statebackend.memory.key_index import KeyIndex, indexable
from statebackend.memory.layers import NO_KEY, Layer, Layers, give_way, release
from statebackend.memory.list_state import MemoryListState
from statebackend.memory.map_state import MapPart, MemoryMapState
from statebackend.memory.restore import EntryDecoder, RawState, larger_batches, read_handles
from statebackend.memory.runs import Rows
from statebackend.memory.snapshot import Chain, MemoryBase, MemorySnapshot, SnapshotPlan
from statebackend.memory.table_state import TableState
from statebackend.memory.timers import MemoryTimers, TimerTable
from statebackend.memory.value_state import value_state_class
from statebackend.memory.views import TableView
from statebackend.schema import StateSchema, Verdict, require_compatible, state_id_of
from statebackend.state import State
from statebackend.timers import TIMER_STATES, TimerService
from statebackend.ttl import NEVER, TimeDomain
from statebackend.types import StateType, state_type

MIN_WATERMARK = -(2**63)
MAX_EPOCHS = 32
"""Snapshots that were neither completed nor aborted before the next one is a full one."""


class Epoch:
    """What changed in each table between two freezes."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.layers: dict[str, Layer] = {}
        self.dirty: dict[str, Any] = {}
        self.views: dict[str, ColumnView] = {}


class MemoryKeyed(KeyedBackend):
    """Keyed state as Python objects. See `layers` for how it is versioned.

    incremental     whether snapshots may be deltas over the last completed one (the filesystem backend)
    max_state_size  the largest state that a snapshot takes, in bytes (the memory backend)
    """

    __slots__ = ("_exact", "key")

    def __init__(self, *, uid: str, key_type: StateType, max_parallelism: int, key_groups: KeyGroupRange, clock: Clock,
                 incremental: bool, max_state_size: int | None, max_value_bytes: int) -> None:
        self.uid = uid
        self.key_type = key_type
        self.max_parallelism = max_parallelism
        self.key_groups = key_groups
        self.clock = clock
        self.form = KeyForm(key_type)
        self.max_value_bytes = max_value_bytes
        self.key: Any = NO_KEY
        self.lock = threading.RLock()
        self._every_record: list[TableState] = []
        self._incremental = incremental
        self._max_state_size = max_state_size
        self._closed = False
        self._watermark = MIN_WATERMARK
        self._tables: dict[str, TableState] = {}
        self._ids: dict[str, int] = {}
        self._raw: dict[str, RawState] = {}
        self._timers = MemoryTimers(self)
        self._epochs: list[Epoch] = []
        self._next_epoch = 0
        self._chain: Chain | None = None
        self._candidates: dict[int, Chain] = {}
        self._unfinished: list[MemorySnapshot] = []
        self._garbage: list[Layer] = []
        self._folding = threading.Condition(self.lock)
        self.index = KeyIndex(key_type)
        self.columnar: bool = indexable(key_type)
        self._compacted_at = 1 << 16
        self._is_folding = False
        self._exact: type | None = None
        self._use_fast_keys()

    # -- the current key

    def _use_fast_keys(self) -> None:
        """Which Python class of keys needs no further check; None sends every key the long way."""
        self._exact = None if self._closed or self._every_record or not is_int64(self.key_type) else int

    def set_current_key(self, key: Any) -> None:
        if type(key) is self._exact and (  # small numbers first: the interpreter compares them fastest
                (key > -0x3FFFFFFF and key < 0x3FFFFFFF)  # type: ignore[operator]
                or -0x8000000000000000 <= key <= 0x7FFFFFFFFFFFFFFF):  # type: ignore[operator]
            self.key = key
        else:
            self._set_key(key)

    def _set_key(self, key: Any) -> None:
        self.require_open()
        if key is None:
            raise InvalidRequest("a key must not be None", operator=self.uid, expected=str(self.key_type))
        try:
            self.key = self.form.hold(key)
        except InvalidRequest as error:
            raise InvalidRequest(error.message, hint=error.hint, operator=self.uid, key=repr(key)[:80],
                                 **error.context) from error
        for table in self._every_record:
            table.touched()

    @property
    def current_key(self) -> Any:
        return None if self.key is NO_KEY else self.form.give(self.key)

    def unset_current_key(self) -> None:
        self.key = NO_KEY

    def shown_key(self) -> Any:
        """The current key for an error message."""
        return self.current_key

    # -- registration

    def state(self, descriptor: StateDescriptor, *, namespace_type: Any = None) -> State:
        self.require_open()
        known = self._tables.get(descriptor.name)
        state_id = known.schema.state_id if known is not None else self.take_id(descriptor.name)
        schema = StateSchema.of(descriptor, state_id, namespace_type)
        if known is not None:
            return self._again(known, descriptor, schema)
        raw = self._raw.get(descriptor.name)
        verdict = require_compatible(raw.schema, schema).verdict if raw is not None else Verdict.COMPATIBLE
        table = self._new_table(descriptor, schema)
        if raw is not None:
            self._load(table, raw)
            del self._raw[descriptor.name]
        self._tables[descriptor.name] = table
        if descriptor.ttl is not None and descriptor.ttl.cleanup.every_record and descriptor.ttl.cleanup.incremental:
            self._every_record.append(table)
            self._use_fast_keys()
        if verdict is Verdict.MIGRATED:
            self._forget_chain()  # stored files have the old form of this state
        return table

    def _again(self, known: TableState, descriptor: StateDescriptor, schema: StateSchema) -> State:
        if schema.to_json() != known.schema.to_json() or not descriptor.has_same_default(known.descriptor):
            raise InvalidRequest("a state is registered twice with different types", state=descriptor.name,
                                 operator=self.uid, expected=str(known.schema), found=str(schema),
                                 hint="use one descriptor for one name")
        return known

    def _new_table(self, descriptor: StateDescriptor, schema: StateSchema) -> TableState:
        classes: dict[StateKind, type[TableState]] = {
            StateKind.VALUE: value_state_class(descriptor, schema.namespace_type is not None, self.clock),
            StateKind.LIST: MemoryListState, StateKind.MAP: MemoryMapState,
            StateKind.REDUCING: MemoryReducingState, StateKind.AGGREGATING: MemoryAggregatingState}
        return classes[descriptor.kind](self, descriptor, schema)

    def take_id(self, name: str) -> int:
        """The state id of a name; the same one for as long as this backend lives."""
        if name not in self._ids:
            self._ids[name] = state_id_of(name, set(self._ids.values()))
        return self._ids[name]

    def namespace_type_for(self, namespace: Any) -> StateType | None:
        """The namespace type of a registered state that takes this namespace."""
        for table in self._tables.values():
            kind = table.schema.namespace_type
            if kind is not None:
                try:
                    kind.check(namespace)
                except HoldfastError:
                    continue
                return kind
        return None

    @property
    def timers(self) -> TimerService:
        self.require_open()
        return self._timers

    # -- time

    @property
    def watermark(self) -> int:
        return self._watermark

    def watermark_now(self) -> int:
        return self._watermark

    def advance_watermark(self, watermark_ms: int) -> None:
        self.require_open()
        if type(watermark_ms) is not int or not MIN_WATERMARK <= watermark_ms <= NEVER:
            raise InvalidRequest("a watermark is a 64-bit number of milliseconds", found=watermark_ms)
        if watermark_ms > self._watermark:
            self._watermark = watermark_ms

    # -- what is held

    def schemas(self) -> tuple[StateSchema, ...]:
        self.require_open()
        return self._schemas()

    def _schemas(self) -> tuple[StateSchema, ...]:
        timers = [self._timers.schema(table) for table in self._timers.tables.values() if table.size or self._written(table)]
        return (*(table.schema for table in self._tables.values()), *(raw.schema for raw in self._raw.values()), *timers)

    def _written(self, table: TimerTable) -> bool:
        """Whether files that later snapshots build on may hold timers of a table that is empty now."""
        return self._chain is not None or bool(self._candidates) or bool(self._epochs)

    def entry_counts(self) -> dict[str, int]:
        self.require_open()
        counts = {name: _entries(table) for name, table in self._tables.items()}
        counts.update({name: raw.count() for name, raw in self._raw.items()})
        counts.update({table.name: table.size for table in self._timers.tables.values() if table.size})
        return counts

    def sweep(self, limit: int = 2048) -> int:
        self.require_open()
        return sum(table.sweep(limit) for table in self._tables.values())

    # -- snapshots: the synchronous part

    def snapshot(self, checkpoint_id: int, target: SnapshotTarget, *, full: bool = False) -> MemorySnapshot:
        self.require_open()
        with self.lock:
            epoch = self._freeze()
            parent = None if full or not self._incremental else self._chain
            if parent is not None and parent.wants_new_base(self.log_patience):
                parent = None
            pending = MemorySnapshot(self, target, self._plan(checkpoint_id, epoch, parent))
            self._unfinished.append(pending)
        return pending

    def _plan(self, checkpoint_id: int, epoch: Epoch, parent: Chain | None) -> SnapshotPlan:
        views = [self._view(table, epoch) for table in self._all_tables()]
        raw = [] if parent is not None else [(state.schema, state.entries()) for state in self._raw.values()]
        return SnapshotPlan(checkpoint_id, epoch.number, parent, views, list(raw), self._schemas(), self._incremental,
                            self._max_state_size)

    def new_base(self, target: SnapshotTarget) -> PendingBase | None:
        self.require_open()
        with self.lock:
            under = self._newest_chain()
            if under is None or not under.files or not under.wants_new_base() or \
                    following.has_changes(self._all_tables()):
                return None
            pending = MemoryBase(self, target, self._plan(-1, self._freeze(), None), under)
            self._unfinished.append(pending)
        return pending

    def rebase(self, under: Chain, base: tuple[StateFile, ...]) -> bool:
        """Put a new base under the deltas: it holds what `under` did, which the chain has grown from."""
        self.require_open()
        with self.lock:
            chain = self._chain
            if chain is None or self._candidates or chain.files[:len(under.files)] != under.files:
                return False
            self._chain = Chain(chain.checkpoint_id, chain.epoch, (*base, *chain.files[len(under.files):]))
        return True

    def _newest_chain(self) -> Chain | None:
        return max(self._candidates.values(), key=lambda chain: chain.epoch, default=self._chain)

    def _all_tables(self) -> list[Layers]:
        return [*self._tables.values(), *self._timers.tables.values()]

    def _freeze(self) -> Epoch:
        epoch = Epoch(self._next_epoch)
        self._next_epoch += 1
        for table in self._all_tables():
            epoch.layers[_name(table)] = table.freeze()
            if table.columns is not None:
                epoch.views[_name(table)], epoch.dirty[_name(table)] = table.columns.freeze()
        if self._incremental:
            if len(self._epochs) >= MAX_EPOCHS:
                self._forget_chain()
            self._epochs.append(epoch)
        return epoch

    def _view(self, table: Layers, epoch: Epoch) -> TableView:
        changed = [older.layers[_name(table)] for older in self._epochs if _name(table) in older.layers]
        if isinstance(table, TimerTable):
            schema, namespace_form = self._timers.schema(table), self._timers.namespace_form
            expiry = None
        else:
            assert isinstance(table, TableState)
            schema, namespace_form, expiry = table.schema, table.namespace_form, table.expiry
        encoder = EntryEncoder(schema, self.form, self.max_parallelism, namespace_form)
        dirty = [older.dirty[_name(table)] for older in self._epochs if _name(table) in older.dirty]
        return TableView(table, schema, encoder, changed, expiry, epoch.views.pop(_name(table), None), dirty)

    def _forget_chain(self) -> None:
        """The next snapshot is a full one."""
        self._chain = None
        self._candidates.clear()
        for epoch in self._epochs:
            self._garbage.extend(epoch.layers.values())
        self._epochs = []

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        self.require_open()
        with self.lock:
            chain = self._candidates.pop(checkpoint_id, None)
            if chain is None or (self._chain is not None and chain.epoch < self._chain.epoch):
                return
            self._chain = chain
            self._candidates = {number: newer for number, newer in self._candidates.items() if newer.epoch > chain.epoch}
            for epoch in [epoch for epoch in self._epochs if epoch.number <= chain.epoch]:
                self._garbage.extend(epoch.layers.values())
            self._epochs = [epoch for epoch in self._epochs if epoch.number > chain.epoch]

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        self.require_open()
        with self.lock:
            self._candidates.pop(checkpoint_id, None)
            pending = [one for one in self._unfinished if one.checkpoint_id == checkpoint_id]
        for one in pending:
            one.cancel()

    # -- columns

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """While the block runs, nobody folds layers into a base."""
        with self._folding:
            self._folding.wait_for(lambda: not self._is_folding)
            yield

    def require_columns(self) -> None:
        """Called before a state turns into columns."""
        self.require_open()

    def take_uncommitted(self, name: str) -> list[Layer]:
        """The layers of a state that later deltas must cover; the caller now sees to that."""
        return [epoch.layers.pop(name) for epoch in self._epochs if name in epoch.layers]

    def leave_columns(self) -> None:
        """Go back to dicts for good: some key can't be indexed."""
        self.columnar = False
        with self.quiet():
            for table in self._tables.values():
                if table.columns is not None:
                    dirty = [epoch.dirty.pop(table.name) for epoch in self._epochs if table.name in epoch.dirty]
                    leave_columns(table, dirty)
        self.index = KeyIndex(self.key_type)

    def compact_index(self) -> None:
        """Forget keys that no state holds, once they are the most and no snapshot is under way."""
        if self.index.count < self._compacted_at or self._unfinished:
            return
        with self.quiet():
            used = np.zeros(self.index.count, bool)
            tables = [table.columns for table in self._tables.values() if table.columns is not None]
            parts = [part for columns in tables for part in (columns.live, columns.dirty)]
            for part in (*parts, *(dirty for epoch in self._epochs for dirty in epoch.dirty.values())):
                size = min(len(part), len(used))
                used[:size] |= part[:size]
            kept = np.flatnonzero(used)
            if 2 * len(kept) < self.index.count:
                for epoch in self._epochs:
                    epoch.dirty = {name: _kept(dirty, kept) for name, dirty in epoch.dirty.items()}
                for columns in tables:
                    columns.keep(kept)
                self.index.keep(kept)
            self._compacted_at = max(1 << 16, 2 * self.index.count)

    def require_held_keys(self, keys: pa.Array, state: str) -> None:
        if len(self.key_groups) < self.max_parallelism:
            self.require_held(key_groups_of(keys, self.max_parallelism, self.key_type), state)

    # -- snapshots: what the writer's thread calls

    def await_folding(self) -> None:
        """Wait until the base is at rest. While a snapshot is unfinished, nobody starts to change it."""
        with self._folding:
            self._folding.wait_for(lambda: not self._is_folding)

    def snapshot_ended(self, snapshot: MemorySnapshot, chain: Chain | None) -> None:
        with self.lock:
            self._unfinished = [one for one in self._unfinished if one is not snapshot]
            if chain is not None and self._incremental and not self._closed and \
                    any(epoch.number == chain.epoch for epoch in self._epochs):
                self._candidates[chain.checkpoint_id] = chain
            if self._unfinished or self._is_folding or self._closed:
                return
            self._is_folding = True
            garbage, self._garbage = self._garbage, []
            kept = {id(layer) for epoch in self._epochs for layer in epoch.layers.values()}
            work = [(table, [layer for layer in reversed(table.frozen) if not layer.folded])
                    for table in self._all_tables()]
            for _, layers in work:
                for layer in layers:
                    if not layer and not layer.removed:
                        layer.folded = True
        try:
            for table, layers in work:
                for layer in layers:
                    if not layer.folded:
                        self._fold(table, layer)
            garbage.extend(layer for _, layers in work for layer in layers if id(layer) not in kept)
            for layer in garbage:
                if layer.folded and layer.table.base is not layer:
                    release(layer)
        finally:
            with self._folding:
                self._is_folding = False
                self._folding.notify_all()

    @staticmethod
    def _fold(table: Layers, layer: Layer) -> None:
        """Make a frozen layer part of the base. The first one becomes the base, as filling a large dict would stall all."""
        if not table.base and table.columns is None:
            table.base = layer
        else:
            for _ in table.fold(layer, table.base):
                give_way()
        layer.folded = True

    def snapshot_cancelled(self, snapshot: MemorySnapshot) -> None:
        """A snapshot was given up before it ran; folding is left to the next one that runs."""
        with self.lock:
            self._unfinished = [one for one in self._unfinished if one is not snapshot]

    def require_held(self, groups: Any, state: str) -> None:
        """Refuse entries whose key should never have been given to this subtask."""
        held = self.key_groups
        if len(groups) and (int(groups.min()) < held.first or int(groups.max()) > held.last):
            wrong = int(groups[(groups < held.first) | (groups > held.last)][0])
            raise InvalidRequest("a key belongs to a key group that is not held here", operator=self.uid, state=state,
                                 found=wrong, expected=str(held))

    def raw_rows(self, batch: pa.RecordBatch) -> Rows:
        return Rows(key_groups_of_entries(batch.column(0)), batch.column(0), batch.column(1),
                    np.zeros(batch.num_rows, np.uint8))

    # -- following other writers of the same chain

    def build_on(self, handle: KeyedHandle) -> bool:
        self.require_open()
        with self.lock:
            if not self._incremental or self._epochs or not following.can_build_on(self, handle, self._ids) or \
                    following.has_changes(self._all_tables()):
                return False
            self._chain = Chain(0, self._next_epoch - 1, handle.files)
        return True

    def catch_up(self, handle: KeyedHandle, source: SnapshotSource) -> bool:
        self.require_open()
        newest = self._newest_chain()
        if newest is None or self._raw or not following.can_build_on(self, handle, self._ids) or \
                set(handle.schemas) != set(self._schemas()) or following.has_changes(self._all_tables()):
            return False
        files = following.missing_files(newest.files, handle.files)
        tables = {table.schema.state_id: table for table in self._tables.values()
                  if table.descriptor.kind.value in following.FLAT_KINDS}
        changes = None if files is None else following.read_changes(self, files, source, tables)
        if changes is None:
            return False
        following.apply_changes(self, changes)
        with self.lock:
            self._forget_chain()
            for table in self._all_tables():
                table.freeze()
            self._chain = Chain(0, self._next_epoch - 1, handle.files)
        return True

    # -- restoring

    def restore(self, handles: Sequence[KeyedHandle], source: SnapshotSource) -> None:
        """Take over the entries of the range; timers at once, other states when they are registered."""
        self._raw = read_handles(handles, source, self.key_type, self.max_parallelism, self.key_groups, self.uid,
                                 self.take_id, self._now_for)
        for domain, name in TIMER_STATES.items():
            raw = self._raw.pop(name, None)
            if raw is None:
                continue
            self._timers.use_namespace_type(raw.schema.namespace_type)
            decoder = EntryDecoder(raw.schema, raw.schema, self.form, self._timers.namespace_form, 0)
            table, slots = self._timers.table(domain), list[Any]()
            for batch in raw.entries():
                keys, namespaces, _ = decoder.columns(batch)
                slots.extend(zip(decoder.times(batch), keys, namespaces or [None] * len(keys)))
            table.load(slots)

    def _now_for(self, schema: StateSchema) -> int:
        """The time that counts for the TTL of a state."""
        return self._watermark if schema.ttl is not None and schema.ttl.time is TimeDomain.EVENT else self.clock.now_ms()

    def _load(self, table: TableState, raw: RawState) -> None:
        now = table.expiry.now() if table.expiry is not None else 0
        decoder = EntryDecoder(raw.schema, table.schema, self.form, table.namespace_form, now)
        base, kind = table.base, table.descriptor.kind
        for batch in larger_batches(raw.entries()):
            keys, namespaces, suffixes = decoder.columns(batch)
            slots, stored = decoder.slots(keys, namespaces), decoder.stored(batch.column(1))
            if kind is StateKind.LIST:
                for slot, element in zip(slots, stored):
                    base.setdefault(slot, []).append(element)
            elif kind is StateKind.MAP:
                for slot, key, value in zip(slots, suffixes or (), stored):
                    part = base.get(slot)
                    if part is None:
                        part = base[slot] = MapPart(whole=True)
                    part[key] = value
            else:
                base.update(zip(slots, stored))
        if table.expiry is not None and base:
            table.expiry.due = MIN_WATERMARK

    # -- the end

    @property
    def closed(self) -> bool:
        return self._closed

    def require_open(self) -> None:
        if self._closed:
            raise Closed("this state backend has been closed", operator=self.uid)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for pending in list(self._unfinished):
            pending.cancel()
        self.key = NO_KEY
        self._use_fast_keys()
        for table in self._all_tables():
            table.close()
        self._tables, self._raw, self._epochs, self._garbage = {}, {}, [], []


def _name(table: Any) -> str:
    return str(table.name)


def _entries(table: TableState) -> int:
    """Stored entries: values, list elements or map entries."""
    if isinstance(table, MemoryListState):
        return sum(len(table.delta[slot]) for slot in table.slots())
    if isinstance(table, MemoryMapState):
        return sum(len(table.stored_map(slot)) for slot in table.slots())
    return len(table.slots())


def _kept(dirty: Any, slots: Any) -> Any:
    """A bitmap of changed slots after the slots were numbered anew."""
    inside = slots < len(dirty)
    new = np.zeros(len(slots), bool)
    new[inside] = dirty[slots[inside]]
    return new


def keyed_type(key_type: Any) -> StateType:
    kind = state_type(key_type)
    kind.require_key()
    return kind

"""The keyed state of one operator subtask on RocksDB: registration, the current key, snapshots, clean-up."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from statebackend.backend import KeyedBackend, KeyedHandle, PendingBase, PendingSnapshot
from statebackend.clock import Clock
from statebackend.descriptors import StateDescriptor, StateKind
from statebackend.errors import Closed, InvalidRequest
from statebackend.files import SnapshotSource, SnapshotTarget
from statebackend.keygroups import KeyGroupRange, type_of_value
from statebackend.migration import change_between
from statebackend.rocksdb.base import Expiry, RocksState
from statebackend.rocksdb.checkpoints import Checkpoints
from statebackend.rocksdb.cleanup import Maintenance, Sweeper
from statebackend.rocksdb.collection import ListSequence, RocksListState, RocksMapState
from statebackend.rocksdb.context import CLOSED_KEY, KeyContext
from statebackend.rocksdb.counting import entry_counts
from statebackend.rocksdb.folding import RocksAggregatingState, RocksReducingState
from statebackend.rocksdb.following import apply_log, chain_to_build_on, missing_log, stored_tables
from statebackend.rocksdb.options import RocksDBOptions
from statebackend.rocksdb.restore import Restored, restore
from statebackend.rocksdb.snapshot import Description
from statebackend.rocksdb.store import Operation, Store
from statebackend.rocksdb.timers import RocksTimerService, TimerTable
from statebackend.rocksdb.value import value_state_class
from statebackend.rocksdb.writeback import WriteBack, after
from statebackend.schema import StateSchema, is_identity, migrator, require_compatible, state_id_of
from statebackend.state import State
from statebackend.timers import TIMER_STATES, TimerService
from statebackend.ttl import TimeDomain
from statebackend.types import StateType, state_type

_KINDS: dict[StateKind, type[RocksState]] = {
    StateKind.LIST: RocksListState,
    StateKind.MAP: RocksMapState,
    StateKind.REDUCING: RocksReducingState,
    StateKind.AGGREGATING: RocksAggregatingState,
}
MIGRATED_ROWS = 4_096


class _ClosedDirty(dict[bytes, Any]):
    """What a closed state has in place of its dirty entries."""

    def _refuse(self, *_arguments: Any, **_options: Any) -> Any:
        raise Closed("this state backend has been closed")

    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = __len__ = _refuse  # type: ignore[assignment]
    get = pop = items = keys = values = update = setdefault = clear = _refuse  # type: ignore[assignment]


class RocksDBKeyed(KeyedBackend):
    """See `KeyedBackend`. All states share one set of databases; entries are told apart by state id."""

    def __init__(self, directory: Path, options: RocksDBOptions, *, uid: str, key_type: StateType,
                 max_parallelism: int, key_groups: KeyGroupRange, clock: Clock, handles: Sequence[KeyedHandle],
                 source: SnapshotSource | None, on_close: Callable[[RocksDBKeyed], None]) -> None:
        self.uid = uid
        self.key_type = key_type
        self.max_parallelism = max_parallelism
        self.key_groups = key_groups
        self.clock = clock
        self.directory = directory
        self._options = options
        self._on_close = on_close
        self._closed = False
        self._context = KeyContext(key_type, max_parallelism, key_groups, clock)
        self.set_current_key = self._context.key_setter()  # type: ignore[method-assign,assignment]
        restored = restore(handles, source, directory, key_groups, key_type, max_parallelism, self._open_store, uid)
        self._engine = WriteBack(restored.parts, directory / "log", entries=options.write_back_entries,
                                 weight=options.size("write_back_bytes"), logging=not handles)
        self._sequence = ListSequence(restored.next_sequence)
        self._unregistered = restored.schemas
        self._schemas: dict[str, StateSchema] = {}
        self._states: dict[str, RocksState] = {}
        self._timer_tables: dict[TimeDomain, TimerTable] = {}
        self._timer_namespace: StateType | None = None
        self._unite(handles)
        self._timers = RocksTimerService(self._context, self._timer_table, self._timer_namespace_type)
        self._adopt_timers()
        self._maintenance = Maintenance(uid)
        self._sweeper = Sweeper(self._engine, lambda: list(self._states.values()), self._compact_in_background)
        self._checkpoints = Checkpoints(self._engine, directory / "captures", options, fresh=not handles)
        self._clean_up_after(restored)

    def _open_store(self, path: Path) -> Store:
        return Store(path, l0_trigger=self._options.l0_trigger)

    def _clean_up_after(self, restored: Restored) -> None:
        for store in restored.clipped:
            self._maintenance.submit(store.compact)

    # -- keys and time

    def set_current_key(self, key: Any) -> None:  # replaced by the context's own method: one call less a record
        self._context.set_key(key)

    @property
    def current_key(self) -> Any:
        return self._context.key

    def unset_current_key(self) -> None:
        self._context.unset_key()

    @property
    def watermark(self) -> int:
        return self._context.watermark

    def advance_watermark(self, watermark_ms: int) -> None:
        self._require_open()
        if watermark_ms > self._context.watermark:
            self._context.watermark = watermark_ms

    @property
    def timers(self) -> TimerService:
        return self._timers

    # -- registration

    def state(self, descriptor: StateDescriptor, *, namespace_type: Any = None) -> State:
        self._require_open()
        known = self._schemas.get(descriptor.name)
        if known is not None:
            again = StateSchema.of(descriptor, known.state_id, namespace_type)
            if again != known or not descriptor.has_same_default(self._states[descriptor.name].descriptor):
                raise InvalidRequest("a state is registered twice with different types", state=descriptor.name,
                                     registered=str(known), declared=str(again),
                                     hint="use one descriptor for a state, or give the second another name")
            return self._states[descriptor.name]
        stored = self._unregistered.get(descriptor.name)
        number = stored.state_id if stored is not None else state_id_of(descriptor.name, self._taken())
        schema = StateSchema.of(descriptor, number, namespace_type)
        if stored is not None:
            require_compatible(stored, schema)
            if not is_identity(stored, schema):
                self._migrate(stored, schema, self.key_groups)
        state = self._make(descriptor, schema)
        self._unregistered.pop(descriptor.name, None)
        self._schemas[descriptor.name] = schema
        self._states[descriptor.name] = state
        self._engine.add_table(state)
        return state

    def _taken(self) -> set[int]:
        return {schema.state_id for schema in (*self._schemas.values(), *self._unregistered.values())}

    def _make(self, descriptor: StateDescriptor, schema: StateSchema) -> RocksState:
        kind = value_state_class(descriptor) if descriptor.kind is StateKind.VALUE else _KINDS[descriptor.kind]
        state = kind(
            descriptor, schema.state_id.to_bytes(2, "big"), schema.namespace_type, self._context, self._engine,
            self._options.size("max_value_bytes"))  # type: ignore[call-arg]
        return state.bind(self._sequence) if isinstance(state, RocksListState) else state

    def _unite(self, handles: Sequence[KeyedHandle]) -> None:
        """Bring states that handles stored under different schemas to the one under which they are held together."""
        try:
            for handle in handles:
                overlap = handle.key_groups.intersect(self.key_groups)
                for stored in handle.schemas if overlap is not None else ():
                    held = self._unregistered[stored.name]
                    if overlap is not None and not is_identity(stored, held):
                        self._migrate(stored, held, overlap)
        except BaseException:
            self._engine.parts.close()
            raise

    def _migrate(self, stored: StateSchema, schema: StateSchema, key_groups: KeyGroupRange) -> None:
        """Rewrite the restored entries of a range from one schema to another; both have the state id of the second.

        Where a value may be refused, all are converted once before any is written: the state then stays as it was.
        """
        now = self._context.watermark if schema.ttl is not None and schema.ttl.time is TimeDomain.EVENT else \
            self.clock.now_ms()
        convert = migrator(stored, schema, now)
        if change_between(stored.value_type, schema.value_type).may_fail:
            for _ in self._converted(convert, schema, key_groups):
                pass
        for rows in self._converted(convert, schema, key_groups):
            self._engine.apply(rows)

    def _converted(self, convert: Callable[[bytes], bytes], schema: StateSchema,
                   key_groups: KeyGroupRange) -> Iterator[list[Operation]]:
        for group in key_groups:
            prefix = group.to_bytes(2, "big") + schema.state_id.to_bytes(2, "big")
            scan = self._engine.parts.scan(prefix, after(prefix))
            while rows := scan.take(MIGRATED_ROWS):
                yield [(key, convert(value)) for key, value in rows]

    # -- timers

    def _timer_table(self, domain: TimeDomain, create: bool) -> TimerTable | None:
        self._require_open()
        table = self._timer_tables.get(domain)
        if table is None and create:
            name = TIMER_STATES[domain]
            schema = StateSchema(name, state_id_of(name, self._taken()), StateKind.TIMER.value, state_type(bytes),
                                 namespace_type=self._timer_namespace)
            table = self._add_timer_table(domain, schema)
        return table

    def _add_timer_table(self, domain: TimeDomain, schema: StateSchema) -> TimerTable:
        self._schemas[schema.name] = schema
        table = self._timer_tables[domain] = TimerTable(schema.state_id.to_bytes(2, "big"), self._engine)
        self._engine.add_table(table)
        return table

    def _adopt_timers(self) -> None:
        for domain, name in TIMER_STATES.items():
            stored = self._unregistered.pop(name, None)
            if stored is not None:
                self._timer_namespace = stored.namespace_type or self._timer_namespace
                self._add_timer_table(domain, stored)

    def _timer_namespace_type(self, namespace: Any) -> StateType | None:
        if self._timer_namespace is None and namespace is not None:
            declared = (schema.namespace_type for schema in self._schemas.values() if schema.namespace_type is not None)
            self._timer_namespace = next(declared, None) or namespace_type_of(namespace)
        return self._timer_namespace

    # -- snapshots

    def schemas(self) -> tuple[StateSchema, ...]:
        self._require_open()
        timers = {TIMER_STATES[domain] for domain in self._timer_tables}
        namespace = self._timer_namespace
        known = [StateSchema(schema.name, schema.state_id, schema.kind, schema.value_type, namespace_type=namespace)
                 if name in timers else schema for name, schema in self._schemas.items()]
        return (*known, *self._unregistered.values())

    def entry_counts(self) -> dict[str, int]:
        self._require_open()
        return entry_counts(self._engine, self.schemas())

    def snapshot(self, checkpoint_id: int, target: SnapshotTarget, *, full: bool = False) -> PendingSnapshot:
        self._require_open()
        description = Description(self.key_groups, self.max_parallelism, self.key_type, self.schemas(),
                                  self._sequence.next)
        return self._checkpoints.snapshot(checkpoint_id, target, description, self._live_filter() if full else None,
                                          full=full)

    @property
    def log_patience(self) -> int:  # type: ignore[override]
        return self._checkpoints.patience

    @log_patience.setter
    def log_patience(self, times: int) -> None:
        self._checkpoints.patience = times

    def new_base(self, target: SnapshotTarget) -> PendingBase | None:
        self._require_open()
        return self._checkpoints.new_base(target, Description(
            self.key_groups, self.max_parallelism, self.key_type, self.schemas(), self._sequence.next))

    def _live_filter(self) -> Callable[[bytes, bytes], bool] | None:
        """Which entries a full snapshot keeps, as of now."""
        limits = {state.state_id: state._expiry.limit() for state in self._states.values()
                  if isinstance(state._expiry, Expiry) and state._expiry.filter_snapshots}
        if not limits:
            return None

        def live(state_id: bytes, value: bytes) -> bool:
            limit = limits.get(state_id)
            return limit is None or value[:8] > limit
        return live

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        self._require_open()
        self._checkpoints.completed(checkpoint_id)

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        self._require_open()
        self._checkpoints.aborted(checkpoint_id)

    # -- following other writers of the same chain

    def build_on(self, handle: KeyedHandle) -> bool:
        self._require_open()
        chain = chain_to_build_on(handle, self.key_groups)
        if chain is None or self._engine.has_changes():
            return False
        self._engine.restart_log()
        self._checkpoints.adopt(chain, stored_tables(chain))
        return True

    def catch_up(self, handle: KeyedHandle, source: SnapshotSource) -> bool:
        self._require_open()
        held, wanted = self._checkpoints.newest_chain(), chain_to_build_on(handle, self.key_groups)
        if held is None or wanted is None or set(handle.schemas) != set(self.schemas()):
            return False
        files = missing_log(held, wanted)
        if files is None or self._engine.has_changes():
            return False
        self._engine.settle_all()
        apply_log(files, source, self._engine.parts, self.key_groups)
        self._engine.restart_log()
        self._sequence.next = max(self._sequence.next, int(handle.meta.get("next_sequence", 0)))
        for table in self._timer_tables.values():
            table.forget_head()
        named = set(wanted.files())
        self._checkpoints.adopt(wanted, {name: file for name, file in self._checkpoints.tables.items() if file in named})
        return True

    # -- clean-up

    def sweep(self, limit: int = 2048) -> int:
        self._require_open()
        return self._sweeper.tick(limit)

    def compact(self) -> None:
        """Write everything to RocksDB and compact it now; what was deleted then takes no space."""
        self._require_open()
        self._engine.flush()
        self._engine.parts.compact()

    def _compact_in_background(self) -> None:
        for part in self._engine.parts.parts:
            self._maintenance.submit(part.store.compact)

    def wait_for_maintenance(self, timeout: float | None = None) -> bool:
        """Until background compactions are done: for tests and tools."""
        return self._maintenance.wait(timeout)

    def _require_open(self) -> None:
        if self._closed:
            raise Closed("this state backend has been closed", uid=self.uid)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._engine.close()
        self._maintenance.close()
        self._engine.parts.close()
        for table in self._engine.tables:
            table._dirty, table._frozen = _ClosedDirty(), ()
        self._context._token = CLOSED_KEY
        self.set_current_key = self._refuse_key  # type: ignore[method-assign,assignment]
        shutil.rmtree(self.directory, ignore_errors=True)
        self._on_close(self)

    def _refuse_key(self, _key: Any) -> None:
        self._require_open()


def namespace_type_of(namespace: Any) -> StateType:
    """The type of a timer's namespace where no state declares one."""
    kind = type_of_value(namespace)
    kind.require_key()
    return kind

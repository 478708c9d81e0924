"""Would this flow restore from this checkpoint? Found out without restoring: `open` runs against a recording context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import reduce
from typing import Any

from checkpoint.dataflow.context import KeyedBroadcastReadContext, OperatorContext, Place, PlainTimers, SideOutputs
from checkpoint.dataflow.functions import CheckpointedFunction
from checkpoint.dataflow.graph import Dataflow, Node
from checkpoint.dataflow.operators import own_copy
from checkpoint.runtime.restoring import holds_state
from checkpoint.storage.metadata import CheckpointMetadata, OperatorEntry
from statebackend.backend import KeyedHandle, create_backend
from statebackend.clock import SystemClock
from statebackend.descriptors import MapStateDescriptor, StateDescriptor
from statebackend.errors import HoldfastError, IncompatibleState
from statebackend.keygroups import key_group_range
from statebackend.operator_state import BroadcastState, OperatorStateStore, ReadOnlyBroadcastState
from statebackend.schema import StateSchema, Verdict, compare_schemas, require_key_type, united_schema
from statebackend.state import State
from statebackend.timers import TIMER_STATES
from statebackend.types import state_type, state_type_from_json


class Fate(StrEnum):
    """What becomes of a state."""

    RESTORED = "restored"
    MIGRATED = "migrated"
    KEPT = "kept"
    DROPPED = "dropped"
    REFUSED = "refused"
    NEW = "new"


@dataclass(frozen=True)
class StateFate:
    """One state (or a whole operator, `state` None) in the report."""

    operator: str
    state: str | None
    fate: Fate
    reason: str = ""
    stored: str | None = None
    declared: str | None = None


@dataclass(frozen=True)
class RestoreReport:
    """What a restore would do. True where nothing is refused."""

    checkpoint: str
    states: tuple[StateFate, ...]
    parallelism: Mapping[str, tuple[int | None, int]]

    def __bool__(self) -> bool:
        return not any(state.fate is Fate.REFUSED for state in self.states)

    def to_json(self) -> dict[str, Any]:
        return {"checkpoint": self.checkpoint, "ok": bool(self),
                "states": [{"operator": state.operator, "state": state.state, "fate": state.fate.value,
                            "reason": state.reason, "stored": state.stored, "declared": state.declared}
                           for state in self.states],
                "parallelism": {uid: {"stored": old, "new": new} for uid, (old, new) in self.parallelism.items()}}


class _Recording(KeyedBroadcastReadContext):
    """Hands out real but empty state, and remembers what was asked for."""

    def __init__(self, place: Place, store: OperatorStateStore, keyed: Any) -> None:
        OperatorContext.__init__(self, place, PlainTimers(place.uid, SystemClock()), store, SideOutputs())
        self._keyed = keyed
        self.declared: dict[str, StateSchema] = {}

    def state(self, descriptor: StateDescriptor, *, namespace_type: Any = None) -> State:
        if self._keyed is None:
            return super().state(descriptor)
        self.declared[descriptor.name] = StateSchema.of(descriptor, 0, namespace_type)
        found: State = self._keyed.state(descriptor, namespace_type=namespace_type)
        return found

    def broadcast_state(self, descriptor: MapStateDescriptor) -> BroadcastState | ReadOnlyBroadcastState:
        return self._store.broadcast_state(descriptor).read_only()


def check_restore(flow: Dataflow, metadata: CheckpointMetadata, *, uid_mapping: Mapping[str, str] | None = None,
                  allow_non_restored_state: bool = False,
                  parallelism: int | Mapping[str, int] | None = None) -> RestoreReport:
    """What restoring `metadata` into `flow` would restore, migrate, keep, drop or refuse. Reads no state.

    State that the job has not declared in `open` is *kept*: it stays in later checkpoints.
    """
    flow.validate()
    widths = flow.parallelisms(parallelism)
    mapping = uid_mapping or {}
    entries = {mapping.get(entry.uid, entry.uid): entry for entry in metadata.operators}
    states: list[StateFate] = []
    for node in flow.nodes:
        states += _node_fates(flow, node, entries.get(node.uid), widths[node.index])
    for uid, entry in entries.items():
        if all(node.uid != uid for node in flow.nodes) and holds_state(entry):
            fate = Fate.DROPPED if allow_non_restored_state else Fate.REFUSED
            reason = "the flow has no such operator" + ("" if allow_non_restored_state else
                                                        "; map its uid, or allow the loss of its state")
            states.append(StateFate(uid, None, fate, reason))
    known = {node.uid: (entries[node.uid].parallelism if node.uid in entries else None, widths[node.index])
             for node in flow.nodes}
    return RestoreReport(f"{metadata.job_name} {metadata.kind} {metadata.checkpoint_id}", tuple(states), known)


def _node_fates(flow: Dataflow, node: Node, entry: OperatorEntry | None, parallelism: int) -> list[StateFate]:
    if entry is None:
        return [StateFate(node.uid, None, Fate.NEW, "starts with no state")] if node.stateful else []
    handles = [handle for subtask in entry.subtasks for handle in subtask.keyed]
    fates: list[StateFate] = []
    if any(subtask.operator is not None for subtask in entry.subtasks):
        fates.append(StateFate(node.uid, "(operator state)", Fate.RESTORED))
    if not handles:
        return fates
    if not node.kind.keyed:
        return [*fates, StateFate(node.uid, None, Fate.REFUSED, "it has keyed state, but the operator is not keyed")]
    if handles[0].max_parallelism != flow.max_parallelism:
        return [*fates, StateFate(node.uid, None, Fate.REFUSED, "the max parallelism differs; change it with holdfast "
                                  "savepoint rescale", str(handles[0].max_parallelism), str(flow.max_parallelism))]
    return fates + _keyed_fates(flow, node, handles, parallelism)


def _keyed_fates(flow: Dataflow, node: Node, handles: list[KeyedHandle], parallelism: int) -> list[StateFate]:
    assert node.key is not None
    try:
        require_key_type(state_type_from_json(handles[0].key_type), state_type(node.key.key_type), node.uid)
        declared = _declared(flow, node)
    except HoldfastError as error:
        return [StateFate(node.uid, None, Fate.REFUSED, str(error))]
    except Exception as error:
        return [StateFate(node.uid, None, Fate.KEPT, f"open() could not be tried here: {type(error).__name__}: {error}")]
    stored: dict[str, list[StateSchema]] = {}
    for schema in (schema for handle in handles for schema in handle.schemas):
        if schema not in stored.setdefault(schema.name, []):
            stored[schema.name].append(schema)
    fates = [_fate(node.uid, schemas[0], declared.get(name)) if len(schemas) == 1 else
             _fate_of_parts(node.uid, schemas, handles, parallelism, declared.get(name)) for name, schemas in stored.items()]
    fates += [StateFate(node.uid, name, Fate.NEW, declared=str(schema))
              for name, schema in declared.items() if name not in stored]
    return fates


def _fate_of_parts(uid: str, stored: list[StateSchema], handles: list[KeyedHandle], parallelism: int,
                   declared: StateSchema | None) -> StateFate:
    """The fate of a state that parts of the checkpoint hold under different schemas: refused if any subtask can't restore
    what falls to it, and migrated if any part is."""
    state, shown = stored[0].name, " and ".join(dict.fromkeys(map(str, stored)))
    try:
        united = _united_by_subtask(state, handles, parallelism)
    except IncompatibleState as error:
        return StateFate(uid, state, Fate.REFUSED, str(error), shown, None if declared is None else str(declared))
    fates = [_fate(uid, schema, declared) for schema in united]
    refused = next((fate for fate in fates if fate.fate is Fate.REFUSED), None)
    fates += [_fate(uid, schema, declared) for schema in stored]
    migrated = next((fate for fate in fates if fate.fate is Fate.MIGRATED), None)
    return replace(refused or migrated or fates[0], stored=shown)


def _united_by_subtask(state: str, handles: list[KeyedHandle], parallelism: int) -> list[StateSchema]:
    """The schemas under which the new subtasks hold their parts of a state before it is registered."""
    united: dict[StateSchema, None] = {}
    for index in range(parallelism):
        mine = key_group_range(index, parallelism, handles[0].max_parallelism)
        found = dict.fromkeys(schema for handle in handles if handle.key_groups.intersect(mine) is not None
                              for schema in handle.schemas if schema.name == state)
        if found:
            united[reduce(united_schema, found)] = None
    return list(united)


def _fate(uid: str, stored: StateSchema, declared: StateSchema | None) -> StateFate:
    if stored.name in TIMER_STATES.values():
        return StateFate(uid, stored.name, Fate.RESTORED, "timers")
    if declared is None:
        return StateFate(uid, stored.name, Fate.KEPT, "not declared in open(); stays in later checkpoints", str(stored))
    comparison = compare_schemas(stored, replace(declared, state_id=stored.state_id))
    fate = {Verdict.COMPATIBLE: Fate.RESTORED, Verdict.MIGRATED: Fate.MIGRATED, Verdict.REFUSED: Fate.REFUSED}
    return StateFate(uid, stored.name, fate[comparison.verdict], "; ".join(comparison.reasons), str(stored), str(declared))


def _declared(flow: Dataflow, node: Node) -> dict[str, StateSchema]:
    """The keyed states that the function registers in `open`."""
    assert node.key is not None
    backend = create_backend("memory")
    try:
        keyed = backend.keyed(uid=node.uid, key_type=node.key.key_type, max_parallelism=flow.max_parallelism)
        ctx = _Recording(Place(node.uid, 0, 1, flow.max_parallelism), OperatorStateStore(node.uid), keyed)
        function = own_copy(node)
        if isinstance(function, CheckpointedFunction):
            function.initialize_state(ctx)
        function.open(ctx)
        function.close()
        return ctx.declared
    finally:
        backend.close()

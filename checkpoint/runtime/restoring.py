"""From a checkpoint to what each subtask of a plan starts from: state by key group, lists dealt out, records re-routed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from checkpoint.dataflow.chain import edge_id, partitioner_of
from checkpoint.dataflow.graph import Exchange, Node
from checkpoint.dataflow.plan import Plan, PlannedEdge, Vertex
from checkpoint.runtime.contracts import ChannelStateCodec, InFlight, OperatorRestore, SubtaskRestore
from checkpoint.runtime.in_flight import EdgeShape, redistribute_in_flight
from checkpoint.storage.metadata import CheckpointMetadata, OperatorEntry
from statebackend.backend import KeyedHandle
from statebackend.errors import IncompatibleState
from statebackend.files import SnapshotSource, StateFile
from statebackend.formats import operator_state
from statebackend.keygroups import key_group_range
from statebackend.operator_state import OperatorStateSnapshot, redistribute


@dataclass(frozen=True)
class RestoreOptions:
    """uid_mapping: stored uid -> uid in the flow. same_run: a restart after a failure, where what had ended stays so."""

    uid_mapping: Mapping[str, str] = field(default_factory=dict)
    allow_non_restored_state: bool = False
    same_run: bool = False


@dataclass(frozen=True)
class RestoredSubtask:
    """What the core starts from, and the records for edges that now lie inside the chain."""

    restore: SubtaskRestore
    inner: tuple[InFlight, ...] = ()


class Restorer:
    """Deals a checkpoint out to the subtasks of a plan. Reads operator and channel state once, when first asked."""

    def __init__(self, plan: Plan, metadata: CheckpointMetadata, source: SnapshotSource, codec: ChannelStateCodec,
                 options: RestoreOptions | None = None) -> None:
        self._plan, self._metadata, self._source, self._codec = plan, metadata, source, codec
        self._options = options or RestoreOptions()
        self._operator_states: dict[str, list[OperatorStateSnapshot]] = {}
        self._in_flight: dict[tuple[str, int], tuple[InFlight, ...]] | None = None
        stored = {operator.uid: operator for operator in metadata.operators}
        self._entries = {self._options.uid_mapping.get(uid, uid): entry for uid, entry in stored.items()}

    def check(self) -> None:
        """Refuse a restore that would lose state or can't work, before anything is started."""
        for node in self._plan.flow.nodes:
            self._check_node(node)
        if self._options.allow_non_restored_state:
            return
        uids = {node.uid for node in self._plan.flow.nodes}
        for uid, entry in self._entries.items():
            if uid not in uids and holds_state(entry):
                raise IncompatibleState(
                    "the checkpoint holds state of an operator that the flow does not have", operator=uid,
                    checkpoint_id=self._metadata.checkpoint_id,
                    hint="map its uid to the new one, or allow the loss with allow_non_restored_state "
                         "(--allow-non-restored-state)")

    def subtask(self, vertex: Vertex, index: int) -> RestoredSubtask:
        operators = {uid: self._operator(uid, vertex.parallelism, index) for uid in vertex.uids}
        records = self._records().get((vertex.id, index), ())
        outer = {self._edge_id(edge) for edge in vertex.inputs}
        return RestoredSubtask(
            SubtaskRestore(self._metadata.checkpoint_id, self._source,
                           {uid: restore for uid, restore in operators.items() if restore is not None},
                           tuple(part for part in records if part.edge in outer), self._had_ended(vertex, index)),
            tuple(part for part in records if part.edge not in outer))

    def _check_node(self, node: Node) -> None:
        entry = self._entries.get(node.uid)
        if entry is None or not any(subtask.keyed for subtask in entry.subtasks):
            return
        if not node.kind.keyed:
            raise IncompatibleState("the checkpoint holds keyed state for an operator that is not keyed in the flow",
                                    operator=node.uid, checkpoint_id=self._metadata.checkpoint_id)
        stored = {handle.max_parallelism for subtask in entry.subtasks for handle in subtask.keyed}
        if stored != {self._plan.flow.max_parallelism}:
            raise IncompatibleState("the max parallelism differs from that of the checkpoint", operator=node.uid,
                                    expected=max(stored), found=self._plan.flow.max_parallelism,
                                    hint="use the stored one, or change it with holdfast savepoint rescale "
                                         "--max-parallelism")

    def _operator(self, uid: str, parallelism: int, index: int) -> OperatorRestore | None:
        entry = self._entries.get(uid)
        if entry is None:
            return None
        keyed: tuple[KeyedHandle, ...] = ()
        if any(subtask.keyed for subtask in entry.subtasks):
            mine = key_group_range(index, parallelism, self._plan.flow.max_parallelism)
            keyed = tuple(handle for subtask in entry.subtasks for handle in subtask.keyed
                          if handle.key_groups.intersect(mine) is not None)
        if uid not in self._operator_states:
            self._operator_states[uid] = redistribute(self._stored_operator_state(entry), parallelism)
        return OperatorRestore(keyed, self._operator_states[uid][index].parts)

    def _stored_operator_state(self, entry: OperatorEntry) -> list[OperatorStateSnapshot]:
        by_index = {subtask.index: subtask.operator for subtask in entry.subtasks}
        return [self._read_operator_state(by_index.get(index)) for index in range(entry.parallelism)]

    def _read_operator_state(self, file: StateFile | None) -> OperatorStateSnapshot:
        return operator_state(file, self._source) if file is not None else OperatorStateSnapshot()

    def _had_ended(self, vertex: Vertex, index: int) -> bool:
        if not self._options.same_run:
            return False
        entries = [self._entries.get(uid) for uid in vertex.uids]
        return all(entry is not None and entry.parallelism == vertex.parallelism and
                   any(subtask.index == index and subtask.finished for subtask in entry.subtasks) for entry in entries)

    # -- records in flight -----------------------------------------------------------------------------------------------

    def _records(self) -> dict[tuple[str, int], tuple[InFlight, ...]]:
        if self._in_flight is None:
            files = [subtask.in_flight for entry in self._metadata.operators for subtask in entry.subtasks
                     if subtask.in_flight is not None]
            stored = [self._renamed(part) for file in files for part in self._codec.read(file, self._source)]
            shapes = self._shapes()
            lost = sorted({part.edge for part in stored if part.edge not in shapes})
            if lost and not self._options.allow_non_restored_state:
                raise IncompatibleState("the checkpoint holds records on their way over an edge that the flow does not "
                                        "have", edge=lost[0], checkpoint_id=self._metadata.checkpoint_id,
                                        hint="restore with the flow as it was, or from a savepoint, which has none")
            self._in_flight = redistribute_in_flight(stored, shapes)
        return self._in_flight

    def _renamed(self, part: InFlight) -> InFlight:
        """The edge id with mapped uids."""
        if not self._options.uid_mapping:
            return part
        source, _, target = part.edge.partition("->")
        uid, colon, tag = source.partition(":")
        receiver, mark, twin = target.rpartition("#")
        mapping = self._options.uid_mapping
        edge = f"{mapping.get(uid, uid)}{colon}{tag}->{mapping.get(receiver, receiver)}{mark}{twin}"
        return replace(part, edge=edge)

    def _shapes(self) -> dict[str, EdgeShape]:
        flow, shapes = self._plan.flow, dict[str, EdgeShape]()
        outer = {edge.edge.index: edge for vertex in self._plan.vertices for edge in vertex.inputs}
        for edge in flow.edges:
            planned = outer.get(edge.index) or PlannedEdge(
                edge, Exchange.HASH if edge.key is not None else Exchange.FORWARD, 0, 0, 0, 0,
                self._plan.parallelism[edge.source], self._plan.parallelism[edge.target])
            target = flow.nodes[edge.target].uid
            entry = self._entries.get(target)
            parallelism = self._plan.parallelism[edge.target]
            shapes[edge_id(flow.nodes, flow.edges, edge)] = EdgeShape(
                self._plan.vertex_of(target).id, partitioner_of(planned, flow.max_parallelism), parallelism,
                entry.parallelism if entry is not None else parallelism)
        return shapes

    def _edge_id(self, planned: PlannedEdge) -> str:
        return edge_id(self._plan.flow.nodes, self._plan.flow.edges, planned.edge)


def holds_state(entry: OperatorEntry) -> bool:
    return any(True for _ in entry.files())

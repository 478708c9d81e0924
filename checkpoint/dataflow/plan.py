"""From the logical graph to tasks: which operators are chained, and which channels connect the chains' subtasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from checkpoint.dataflow.graph import Dataflow, Edge, Exchange, NodeKind, resolved_exchange


@dataclass(frozen=True)
class PlannedEdge:
    """An exchange between two tasks.

    output_index  its number among the sending task's outgoing edges
    input_index   its number among the receiving task's incoming edges
    """

    edge: Edge
    exchange: Exchange
    source: int
    target: int
    output_index: int
    input_index: int
    source_parallelism: int
    target_parallelism: int

    @property
    def pointwise(self) -> bool:
        """Subtask i talks to subtask i only."""
        return self.exchange is Exchange.FORWARD

    def receivers(self, sender: int) -> range:
        """The receiving subtasks that a sending subtask has a channel to, by channel index."""
        return range(sender, sender + 1) if self.pointwise else range(self.target_parallelism)

    def senders(self, receiver: int) -> range:
        """The sending subtasks that a receiving subtask has a channel from, by channel index."""
        return range(receiver, receiver + 1) if self.pointwise else range(self.source_parallelism)


@dataclass(frozen=True)
class Vertex:
    """Chained operators that run as one task, in `parallelism` subtasks. `nodes` are in topological order, head first."""

    index: int
    id: str
    name: str
    nodes: tuple[int, ...]
    uids: tuple[str, ...]
    parallelism: int
    is_source: bool
    inputs: tuple[PlannedEdge, ...] = ()
    outputs: tuple[PlannedEdge, ...] = ()


@dataclass(frozen=True)
class Plan:
    """All tasks of a flow at given parallelisms."""

    flow: Dataflow
    parallelism: Mapping[int, int]
    vertices: tuple[Vertex, ...]
    chained: frozenset[int] = field(default_factory=frozenset)
    """Indexes of the edges that lie inside a chain."""

    def vertex_of(self, uid: str) -> Vertex:
        return next(vertex for vertex in self.vertices if uid in vertex.uids)

    @property
    def subtasks(self) -> list[tuple[str, int]]:
        return [(vertex.id, index) for vertex in self.vertices for index in range(vertex.parallelism)]

    def regions(self) -> list[frozenset[str]]:
        """Tasks that are connected by exchanges: a failure of one restarts its region only."""
        group = {vertex.id: {vertex.id} for vertex in self.vertices}
        for vertex in self.vertices:
            for edge in vertex.outputs:
                merged = group[vertex.id] | group[self.vertices[edge.target].id]
                for member in merged:
                    group[member] = merged
        return list({frozenset(members) for members in group.values()})


def plan(flow: Dataflow, override: int | Mapping[str, int] | None = None) -> Plan:
    """Chain operators where no exchange lies between them; number the exchanges that remain."""
    parallelism = flow.parallelisms(override)
    chained = frozenset(edge.index for edge in flow.edges if _chains(flow, edge, parallelism))
    vertex_of: dict[int, int] = {}
    members: list[list[int]] = []
    for node in flow.nodes:
        joined = next((edge for edge in flow.inputs_of(node.index) if edge.index in chained), None)
        if joined is not None:
            vertex_of[node.index] = vertex_of[joined.source]
            members[vertex_of[node.index]].append(node.index)
        else:
            vertex_of[node.index] = len(members)
            members.append([node.index])
    edges = _planned_edges(flow, parallelism, chained, vertex_of)
    vertices = tuple(_vertex(flow, index, nodes, parallelism, edges) for index, nodes in enumerate(members))
    return Plan(flow, parallelism, vertices, chained)


def _vertex(flow: Dataflow, index: int, nodes: list[int], parallelism: Mapping[int, int],
            edges: list[PlannedEdge]) -> Vertex:
    head = flow.nodes[nodes[0]]
    uids = tuple(flow.nodes[node].uid for node in nodes)
    return Vertex(index, head.uid, " -> ".join(flow.nodes[node].name for node in nodes), tuple(nodes), uids,
                  parallelism[head.index], head.kind is NodeKind.SOURCE,
                  tuple(sorted((edge for edge in edges if edge.target == index), key=lambda edge: edge.input_index)),
                  tuple(sorted((edge for edge in edges if edge.source == index), key=lambda edge: edge.output_index)))


def _planned_edges(flow: Dataflow, parallelism: Mapping[int, int], chained: frozenset[int],
                   vertex_of: Mapping[int, int]) -> list[PlannedEdge]:
    outputs: dict[int, int] = {}
    inputs: dict[int, int] = {}
    planned = []
    for edge in flow.edges:
        if edge.index in chained:
            continue
        source, target = vertex_of[edge.source], vertex_of[edge.target]
        planned.append(PlannedEdge(edge, resolved_exchange(edge, parallelism), source, target, outputs.get(source, 0),
                                   inputs.get(target, 0), parallelism[edge.source], parallelism[edge.target]))
        outputs[source] = outputs.get(source, 0) + 1
        inputs[target] = inputs.get(target, 0) + 1
    return planned


def _chains(flow: Dataflow, edge: Edge, parallelism: Mapping[int, int]) -> bool:
    """Whether an edge needs no exchange: both ends have one subtask each in the same place, and no other input."""
    exchange = resolved_exchange(edge, parallelism)
    target = flow.nodes[edge.target]
    if not flow.chaining or not target.chain or len(flow.inputs_of(edge.target)) != 1:
        return False
    if target.kind is NodeKind.TIMESTAMPS and not _only_path(flow, edge, parallelism):
        return False
    single = parallelism[edge.source] == parallelism[edge.target] == 1
    return exchange is Exchange.FORWARD or (single and exchange in (Exchange.HASH, Exchange.REBALANCE))


def _only_path(flow: Dataflow, edge: Edge, parallelism: Mapping[int, int]) -> bool:
    """A chain has one watermark: new ones are assigned inside it only where every record takes this way."""
    node = edge.source
    while True:
        if len(flow.outputs_of(node)) != 1:
            return False
        inputs = flow.inputs_of(node)
        if len(inputs) != 1 or not _chains(flow, inputs[0], parallelism):
            return True
        node = inputs[0].source

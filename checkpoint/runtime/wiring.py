"""Which channel of which subtask leads where: numbers of channels on both ends, from the plan alone."""

from __future__ import annotations

from dataclasses import dataclass

from checkpoint.dataflow.chain import edge_id, partitioner_of
from checkpoint.dataflow.graph import Exchange
from checkpoint.dataflow.plan import Plan, PlannedEdge, Vertex
from checkpoint.protocol.messages import JobPlan, SubtaskId, TaskPlan
from checkpoint.runtime.channels import InputEdge, OutputEdge


@dataclass(frozen=True)
class Endpoint:
    """One end of a channel: a subtask, and the channel's number there."""

    subtask: SubtaskId
    channel: int


class Wiring:
    """The channels of a plan. Input channels are numbered over all input edges of a subtask, outputs likewise."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._first_input: dict[tuple[int, int], int] = {}
        self._first_output: dict[tuple[int, int], int] = {}
        for vertex in plan.vertices:
            count = 0
            for edge in vertex.inputs:
                self._first_input[vertex.index, edge.input_index] = count
                count += len(edge.senders(0))
            count = 0
            for edge in vertex.outputs:
                self._first_output[vertex.index, edge.output_index] = count
                count += len(edge.receivers(0))

    def receivers(self, vertex: Vertex, index: int) -> list[Endpoint]:
        """Where each output channel of a subtask leads, by channel number."""
        return [Endpoint(SubtaskId(self.plan.vertices[edge.target].id, receiver),
                         self._first_input[edge.target, edge.input_index] + edge.senders(receiver).index(index))
                for edge in vertex.outputs for receiver in edge.receivers(index)]

    def senders(self, vertex: Vertex, index: int) -> list[Endpoint]:
        """Where each input channel of a subtask comes from, by channel number."""
        return [Endpoint(SubtaskId(self.plan.vertices[edge.source].id, sender),
                         self._first_output[edge.source, edge.output_index] + edge.receivers(sender).index(index))
                for edge in vertex.inputs for sender in edge.senders(index)]

    def input_edges(self, vertex: Vertex, index: int) -> list[InputEdge]:
        return [InputEdge(self._edge_id(edge), self.plan.vertices[edge.source].id, edge.senders(index),
                          ordered=edge.exchange is Exchange.BROADCAST) for edge in vertex.inputs]

    def output_edges(self, vertex: Vertex, index: int) -> list[OutputEdge]:
        return [OutputEdge(self._edge_id(edge), partitioner_of(edge, self.plan.flow.max_parallelism),
                           edge.receivers(index)) for edge in vertex.outputs]

    def job_plan(self) -> JobPlan:
        """What the coordinator has to know."""
        return JobPlan(tuple(
            TaskPlan(vertex.id, vertex.parallelism,
                     tuple(dict.fromkeys(self.plan.vertices[edge.source].id for edge in vertex.inputs)), vertex.uids,
                     self.plan.flow.max_parallelism) for vertex in self.plan.vertices))

    def _edge_id(self, planned: PlannedEdge) -> str:
        return edge_id(self.plan.flow.nodes, self.plan.flow.edges, planned.edge)

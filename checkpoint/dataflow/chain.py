"""The chained operators of one subtask: the concrete OperatorChain that runtimes drive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from checkpoint.dataflow.graph import Edge, Exchange, Node, NodeKind
from checkpoint.dataflow.keyed_operators import (
    BroadcastOperator,
    KeyedBroadcastOperator,
    KeyedOperator,
    KeyedProcessOperator,
)
from checkpoint.dataflow.keys import (
    BroadcastPartitioner,
    ForwardPartitioner,
    KeyPartitioner,
    KeySelector,
    RebalancePartitioner,
)
from checkpoint.dataflow.operators import (
    Emit,
    Environment,
    FilterOperator,
    FlatMapOperator,
    MapOperator,
    Operator,
    PendingOperatorSnapshot,
    ProcessOperator,
    SinkOperator,
    SourceOperator,
    Stamps,
    TimestampsOperator,
    earliest,
)
from checkpoint.dataflow.plan import Plan, PlannedEdge, Vertex
from checkpoint.runtime.contracts import (
    MAX_WATERMARK,
    ChainOutput,
    CheckpointOptions,
    InFlight,
    OperatorChain,
    OperatorRestore,
    OperatorSnapshot,
    Partitioner,
    PendingChainSnapshot,
    Records,
    SourceStatus,
    SubtaskRestore,
)
from statebackend.errors import InvalidRequest
from statebackend.files import SnapshotTarget

_OPERATORS: dict[NodeKind, type[Operator]] = {
    NodeKind.SOURCE: SourceOperator, NodeKind.MAP: MapOperator, NodeKind.FILTER: FilterOperator,
    NodeKind.FLAT_MAP: FlatMapOperator, NodeKind.PROCESS: ProcessOperator,
    NodeKind.KEYED_PROCESS: KeyedProcessOperator, NodeKind.BROADCAST_PROCESS: BroadcastOperator,
    NodeKind.KEYED_BROADCAST_PROCESS: KeyedBroadcastOperator, NodeKind.TIMESTAMPS: TimestampsOperator,
    NodeKind.SINK: SinkOperator,
}


def edge_id(nodes: Sequence[Node], edges: Sequence[Edge], edge: Edge) -> str:
    """What names an edge in channel state: the same in every run, whatever the parallelism and the chaining."""
    twins = [other.index for other in edges if (other.source, other.target, other.tag) ==
             (edge.source, edge.target, edge.tag)]
    side = f":{edge.tag}" if edge.tag else ""
    return f"{nodes[edge.source].uid}{side}->{nodes[edge.target].uid}#{twins.index(edge.index)}"


def partitioner_of(planned: PlannedEdge, max_parallelism: int) -> Partitioner:
    """A fresh partitioner for one sending subtask of an edge."""
    if planned.exchange is Exchange.HASH:
        if planned.edge.key is None:
            raise InvalidRequest("an edge that goes by key has none")
        return KeyPartitioner(KeySelector(planned.edge.key), max_parallelism)
    if planned.exchange is Exchange.BROADCAST:
        return BroadcastPartitioner()
    return ForwardPartitioner() if planned.exchange is Exchange.FORWARD else RebalancePartitioner()


class SnapshotObserver(Protocol):
    """Hears of the chain's snapshots: local recovery keeps copies of their files."""

    def taken(self, checkpoint_id: int, snapshots: tuple[OperatorSnapshot, ...]) -> None: ...
    def completed(self, checkpoint_id: int) -> None: ...


class FlowChain(OperatorChain):
    """The operators of one vertex, connected. Batches go depth first: each operator's output to all that follow."""

    def __init__(self, plan: Plan, vertex: Vertex, environment: Environment, *, inner: Sequence[InFlight] = (),
                 first_full: bool = False, observer: SnapshotObserver | None = None) -> None:
        """`inner`: restored records for edges inside this chain. `first_full`: build on no restored file."""
        self.uids = vertex.uids
        self.is_source = vertex.is_source
        self._plan, self._vertex, self._environment = plan, vertex, environment
        self._output: ChainOutput
        self._inner, self._full_until_completed, self._observer = tuple(inner), first_full, observer
        flow = plan.flow
        self._operators = [_OPERATORS[flow.nodes[index].kind](flow.nodes[index], environment) for index in vertex.nodes]
        self._by_node = {operator.node.index: operator for operator in self._operators}
        self._head = self._operators[0]
        self._inputs = [planned.edge.input for planned in vertex.inputs]
        self._assigner = next((operator for operator in self._operators if isinstance(operator, TimestampsOperator)), None)
        self._watermark_from = self._operators.index(self._assigner) if self._assigner is not None else 0

    # -- life ---------------------------------------------------------------------------------------------------------

    def open(self, output: ChainOutput, restore: SubtaskRestore | None) -> None:
        self._output = output
        self._connect(output)
        for operator in self._operators:
            if isinstance(operator, (SourceOperator, TimestampsOperator)):
                operator.on_watermark, operator.on_idle = self._own_watermark, output.emit_idle
        # Downstream first, so that whatever an operator emits while it opens finds the next one ready.
        for operator in reversed(self._operators):
            part = restore.operators.get(operator.uid, OperatorRestore()) if restore is not None else OperatorRestore()
            try:
                operator.open(part, restore.source if restore is not None else None,
                              restore.checkpoint_id if restore is not None else None)
            except Exception as error:
                error.add_note(f"while opening operator {operator.uid!r}, subtask {self._environment.subtask_index}")
                raise
        self._replay(self._inner)
        self._inner = ()

    def _replay(self, in_flight: Sequence[InFlight]) -> None:
        """Records that were on their way over an edge which now lies inside the chain come before all others."""
        flow = self._plan.flow
        inner = {edge_id(flow.nodes, flow.edges, edge): self._by_node[edge.target]
                 for edge in flow.edges if edge.index in self._plan.chained and edge.target in self._by_node}
        for part in in_flight:
            for batch in part.batches:
                inner[part.edge].process(batch.values, batch.timestamps)

    def close(self) -> None:
        failures: list[Exception] = []
        for close in [*(operator.close for operator in self._operators), self._environment.close]:
            try:
                close()
            except Exception as error:
                failures.append(error)
        if failures:
            raise failures[0]

    # -- data ---------------------------------------------------------------------------------------------------------

    def process(self, input_index: int, records: Records) -> None:
        self._head.process_input(self._inputs[input_index], records.values, records.timestamps)

    def poll(self, limit: int) -> SourceStatus:
        if not isinstance(self._head, SourceOperator):
            raise InvalidRequest("only a chain with a source is polled", operator=self._head.uid)
        return self._head.poll(limit)

    def process_watermark(self, watermark: int) -> None:
        if self._assigner is not None and watermark != MAX_WATERMARK:
            self._pass_watermark(self._operators[:self._watermark_from], watermark)
            return
        self._pass_watermark(self._operators, watermark)
        self._output.emit_watermark(watermark)

    def advance_processing_time(self, now_ms: int) -> int | None:
        wake: int | None = None
        for operator in self._operators:
            wake = earliest(wake, operator.processing_time(now_ms))
        return wake

    def end_input(self, input_index: int) -> None:
        """Nothing to do: no operator treats the end of one of several inputs in a special way."""

    def finish(self, drain: bool) -> None:
        for operator in self._operators:
            operator.finish()

    # -- checkpoints ----------------------------------------------------------------------------------------------------

    def snapshot(self, checkpoint_id: int, options: CheckpointOptions,
                 target: SnapshotTarget) -> PendingChainSnapshot:
        now = self._environment.clock.now_ms()
        full = options.full or self._full_until_completed
        parts = [operator.snapshot(checkpoint_id, target, now, full=full) for operator in self._operators]
        return _PendingChain(checkpoint_id, parts, self._observer)

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        self._full_until_completed = False
        if self._observer is not None:
            self._observer.completed(checkpoint_id)
        for operator in self._operators:
            operator.checkpoint_completed(checkpoint_id)

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        for operator in self._operators:
            operator.checkpoint_aborted(checkpoint_id)

    def counters(self) -> dict[str, dict[str, int]]:
        """Records in and out, by operator uid. Any thread may ask; the numbers may be a batch behind."""
        return {operator.uid: {"records_in": operator.records_in, "records_out": operator.records_out}
                for operator in self._operators}

    def key_groups(self) -> dict[str, dict[str, int]]:
        """What the keyed operators tell of their key groups, by uid. Any thread may ask."""
        return {operator.uid: operator.sample.told() for operator in self._operators if isinstance(operator, KeyedOperator)}

    # -- wiring ---------------------------------------------------------------------------------------------------------

    def _own_watermark(self, watermark: int) -> None:
        """A watermark made inside this chain, by its source or assigner."""
        self._pass_watermark(self._operators[self._watermark_from:], watermark)
        self._output.emit_watermark(watermark)

    @staticmethod
    def _pass_watermark(operators: Sequence[Operator], watermark: int) -> None:
        for operator in operators:
            operator.watermark(watermark)

    def _connect(self, output: ChainOutput) -> None:
        for edge in self._plan.flow.edges:
            sender = self._by_node.get(edge.source)
            if sender is None:
                continue
            if edge.index in self._plan.chained:
                self._attach(sender, edge, self._by_node[edge.target].process)
            else:
                index = next(planned.output_index for planned in self._vertex.outputs if planned.edge is edge)
                self._attach(sender, edge, _emitter(output, index))

    @staticmethod
    def _attach(sender: Operator, edge: Edge, emit: Emit) -> None:
        if edge.tag is None:
            sender.emits.append(emit)
        else:
            sender.side_emits.setdefault(edge.tag, []).append(emit)


def _emitter(output: ChainOutput, index: int) -> Callable[[list[Any], Stamps], None]:
    def emit(values: list[Any], timestamps: Stamps) -> None:
        output.emit(index, Records(values, timestamps))

    return emit


class _PendingChain:
    def __init__(self, checkpoint_id: int, parts: list[PendingOperatorSnapshot],
                 observer: SnapshotObserver | None) -> None:
        self._checkpoint_id, self._parts, self._observer = checkpoint_id, parts, observer

    def run(self) -> tuple[OperatorSnapshot, ...]:
        snapshots = tuple(part.run() for part in self._parts)
        if self._observer is not None:
            self._observer.taken(self._checkpoint_id, snapshots)
        return snapshots

    def cancel(self) -> None:
        for part in self._parts:
            part.cancel()

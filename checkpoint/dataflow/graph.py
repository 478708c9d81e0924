"""The logical graph of a dataflow: operators, the edges between them, their uids; checked, and described as JSON."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import xxhash

from checkpoint.dataflow.functions import CheckpointedFunction, OutputTag
from statebackend.errors import InvalidRequest

if TYPE_CHECKING:
    from checkpoint.connectors.base import Source
    from checkpoint.dataflow.streams import DataStream
    from checkpoint.dataflow.watermarks import WatermarkStrategy

MAX_PARALLELISM_LIMIT = 32768
_UID = re.compile(r"[^\x00-\x1f/\\]{1,200}")


class GeneratedUidWarning(UserWarning):
    """A stateful operator has no uid of its own: an edit of the flow can separate it from its state."""


class Exchange(StrEnum):
    """How records travel over an edge."""

    FORWARD = "forward"
    HASH = "hash"
    REBALANCE = "rebalance"
    BROADCAST = "broadcast"


class NodeKind(StrEnum):
    SOURCE = "source"
    MAP = "map"
    FILTER = "filter"
    FLAT_MAP = "flat_map"
    PROCESS = "process"
    KEYED_PROCESS = "keyed_process"
    BROADCAST_PROCESS = "broadcast_process"
    KEYED_BROADCAST_PROCESS = "keyed_broadcast_process"
    TIMESTAMPS = "timestamps"
    SINK = "sink"

    @property
    def keyed(self) -> bool:
        return self in (NodeKind.KEYED_PROCESS, NodeKind.KEYED_BROADCAST_PROCESS)


@dataclass(frozen=True)
class KeySpec:
    """How a stream is keyed."""

    select: Callable[[Any], Any] | str | int
    key_type: Any


@dataclass(frozen=True)
class Edge:
    """Records of `source`'s main output (or of a side output) to the `input`-th logical input of `target`.

    `exchange` is None where the flow leaves it open: forward between equal parallelisms, rebalance otherwise.
    """

    index: int
    source: int
    target: int
    input: int
    exchange: Exchange | None = None
    key: KeySpec | None = None
    tag: str | None = None


@dataclass
class Node:
    """One operator. `body` is the user's function, source or sink; subtasks work on copies of it."""

    index: int
    kind: NodeKind
    uid: str
    generated_uid: bool
    name: str
    body: Any
    parallelism: int | None = None
    key: KeySpec | None = None
    watermarks: WatermarkStrategy | None = None
    record_type: Any = None
    chain: bool = True
    tags: list[str] = field(default_factory=list)

    @property
    def stateful(self) -> bool:
        return self.kind in (NodeKind.SOURCE, NodeKind.SINK) or self.kind.keyed or \
            self.kind is NodeKind.BROADCAST_PROCESS or isinstance(self.body, CheckpointedFunction)


class Dataflow:
    """A dataflow under construction. It holds no data and runs nothing: `checkpoint.run(flow)` does.

    max_parallelism  number of key groups: the most subtasks that a keyed operator can ever have
    parallelism      of sources that name none; other operators take that of their input
    chaining         False gives every operator its own thread
    """

    def __init__(self, name: str, *, max_parallelism: int = 128, parallelism: int = 1, chaining: bool = True) -> None:
        if not isinstance(name, str) or not name:
            raise InvalidRequest("a dataflow needs a name that is not empty", found=name)
        if not 1 <= max_parallelism <= MAX_PARALLELISM_LIMIT:
            raise InvalidRequest(f"max_parallelism must be between 1 and {MAX_PARALLELISM_LIMIT}", flow=name,
                                 found=max_parallelism)
        check_parallelism(parallelism, max_parallelism, name)
        self.name = name
        self.max_parallelism = max_parallelism
        self.parallelism = parallelism
        self.chaining = chaining
        self.nodes: list[Node] = []
        self.edges: list[Edge] = []
        self.origin = _caller_file()
        """The file that built the flow: worker processes import it again from there."""

    def source(self, source: Source, *, uid: str | None = None, parallelism: int | None = None,
               watermarks: WatermarkStrategy | None = None, name: str | None = None) -> DataStream:
        """A stream of the source's records."""
        from checkpoint.connectors.base import Source
        from checkpoint.dataflow.streams import DataStream, Upstream

        if not isinstance(source, Source):
            raise InvalidRequest("flow.source takes a Source", found=type(source).__name__,
                                 hint="for example FileSource(...) or GeneratorSource(...)")
        node = self.add_node(NodeKind.SOURCE, source, uid=uid, parallelism=parallelism, name=name,
                             watermarks=watermarks, record_type=source.record_type)
        return DataStream(self, (Upstream(node.index),))

    def add_node(self, kind: NodeKind, body: Any, *, uid: str | None, parallelism: int | None = None,
                 name: str | None = None, key: KeySpec | None = None, watermarks: WatermarkStrategy | None = None,
                 record_type: Any = None, upstream: tuple[int, ...] = ()) -> Node:
        """Add an operator; streams call this."""
        if parallelism is not None:
            check_parallelism(parallelism, self.max_parallelism, uid or kind.value)
        if uid is not None and (not isinstance(uid, str) or not _UID.fullmatch(uid)):
            raise InvalidRequest("a uid is a text of 1 to 200 characters without / \\ and control characters", found=uid)
        generated = uid is None
        chosen = uid if uid is not None else self._generate_uid(kind, upstream)
        if any(node.uid == chosen for node in self.nodes):
            raise InvalidRequest("two operators have the same uid", uid=chosen, hint="give each operator its own")
        node = Node(len(self.nodes), kind, chosen, generated, name or chosen, body, parallelism, key, watermarks,
                    record_type)
        if generated and node.stateful:
            warnings.warn(GeneratedUidWarning(
                f"the stateful operator {chosen!r} of flow {self.name!r} has a generated uid, which changes when "
                "operators are added before it; give it one with uid=..."), stacklevel=4)
        self.nodes.append(node)
        return node

    def add_edge(self, source: int, target: int, *, input: int = 0, exchange: Exchange | None = None,
                 key: KeySpec | None = None, tag: OutputTag | None = None) -> Edge:
        """Connect two operators; streams call this."""
        edge = Edge(len(self.edges), source, target, input, exchange, key, tag.name if tag else None)
        self.edges.append(edge)
        if tag is not None and tag.name not in self.nodes[source].tags:
            self.nodes[source].tags.append(tag.name)
        return edge

    def inputs_of(self, node: int) -> list[Edge]:
        return [edge for edge in self.edges if edge.target == node]

    def outputs_of(self, node: int) -> list[Edge]:
        return [edge for edge in self.edges if edge.source == node]

    def node(self, uid: str) -> Node:
        found = next((node for node in self.nodes if node.uid == uid), None)
        if found is None:
            raise InvalidRequest(f"the flow {self.name!r} has no operator {uid!r}",
                                 hint="its operators are " + ", ".join(node.uid for node in self.nodes))
        return found

    def parallelisms(self, override: int | Mapping[str, int] | None = None) -> dict[int, int]:
        """The parallelism of every operator: as overridden, else as written, else that of its first input.

        A number overrides all operators; a mapping names operators by uid, `""` standing for all others.
        """
        named = dict(override) if isinstance(override, Mapping) else {}
        everyone = override if isinstance(override, int) else named.pop("", None)
        for uid in named:
            self.node(uid)
        chosen: dict[int, int] = {}
        for node in self.nodes:
            inputs = self.inputs_of(node.index)
            inherited = chosen[inputs[0].source] if inputs else self.parallelism
            chosen[node.index] = named.get(node.uid) or everyone or node.parallelism or inherited
            check_parallelism(chosen[node.index], self.max_parallelism, node.uid)
        return chosen

    def validate(self) -> None:
        """Refuse what can't run, naming the operator."""
        if not self.nodes:
            raise InvalidRequest("the dataflow has no source", flow=self.name, hint="start with flow.source(...)")
        for node in self.nodes:
            if node.kind is not NodeKind.SINK and not self.outputs_of(node.index):
                raise InvalidRequest("the output of an operator goes nowhere", flow=self.name, operator=node.uid,
                                     hint="end the stream with .sink(...)")

    def describe(self, override: int | Mapping[str, int] | None = None) -> dict[str, Any]:
        """The flow as JSON: operators, edges, and which of them are chained into one task."""
        from checkpoint.dataflow.plan import plan

        self.validate()
        parallelism = self.parallelisms(override)
        tasks = plan(self, override).vertices
        return {
            "name": self.name, "max_parallelism": self.max_parallelism,
            "operators": [{"uid": node.uid, "name": node.name, "kind": node.kind.value,
                           "parallelism": parallelism[node.index], "stateful": node.stateful,
                           "generated_uid": node.generated_uid,
                           "key_type": str(node.key.key_type) if node.key else None} for node in self.nodes],
            "edges": [{"source": self.nodes[edge.source].uid, "target": self.nodes[edge.target].uid,
                       "exchange": resolved_exchange(edge, parallelism).value, "side_output": edge.tag}
                      for edge in self.edges],
            "tasks": [{"id": task.id, "name": task.name, "operators": list(task.uids),
                       "parallelism": task.parallelism} for task in tasks],
        }

    def _generate_uid(self, kind: NodeKind, upstream: tuple[int, ...]) -> str:
        """From kind and position only, so that it is the same in every process and run."""
        path = "|".join([kind.value, *(self.nodes[index].uid for index in upstream)])
        taken = {node.uid for node in self.nodes}
        for repeat in range(len(taken) + 1):
            candidate = f"{kind.value}-{xxhash.xxh32_hexdigest(f'{path}|{repeat}'.encode())}"
            if candidate not in taken:
                return candidate
        raise AssertionError("unreachable: one more candidate than uids taken")


def resolved_exchange(edge: Edge, parallelism: Mapping[int, int]) -> Exchange:
    """The exchange of an edge once the parallelisms are known."""
    same = parallelism[edge.source] == parallelism[edge.target]
    if edge.exchange is None:
        return Exchange.FORWARD if same else Exchange.REBALANCE
    if edge.exchange is Exchange.FORWARD and not same:
        raise InvalidRequest("forward() needs the same parallelism on both sides", expected=parallelism[edge.source],
                             found=parallelism[edge.target], hint="use rebalance(), or give both the same parallelism")
    return edge.exchange


def check_parallelism(parallelism: Any, max_parallelism: int, operator: str) -> None:
    if not isinstance(parallelism, int) or isinstance(parallelism, bool) or parallelism < 1:
        raise InvalidRequest("parallelism must be a whole number of at least 1", operator=operator, found=parallelism)
    if parallelism > max_parallelism:
        raise InvalidRequest("the parallelism is higher than the max parallelism", operator=operator,
                             expected=f"at most {max_parallelism}", found=parallelism,
                             hint="lower it, or build the flow with a higher max_parallelism")


def _caller_file() -> str | None:
    """The file of the first frame outside this package."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("checkpoint."):
        frame = frame.f_back  # type: ignore[assignment]
    return frame.f_code.co_filename if frame is not None else None

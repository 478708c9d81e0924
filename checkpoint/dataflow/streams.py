"""The streams that a flow is built from: each call adds an operator or chooses how records travel to the next one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_type_hints

from checkpoint.dataflow.functions import (
    BroadcastProcessFunction,
    KeyedBroadcastProcessFunction,
    KeyedProcessFunction,
    OutputTag,
    ProcessFunction,
)
from checkpoint.dataflow.graph import Dataflow, Exchange, KeySpec, Node, NodeKind
from statebackend.errors import InvalidRequest

if TYPE_CHECKING:
    from checkpoint.connectors.base import Sink
    from checkpoint.dataflow.watermarks import WatermarkStrategy


@dataclass(frozen=True)
class Upstream:
    """One output that a stream reads, and how it is to travel."""

    node: int
    tag: OutputTag | None = None
    exchange: Exchange | None = None


class _Stream:
    def __init__(self, flow: Dataflow, upstreams: tuple[Upstream, ...]) -> None:
        self.flow = flow
        self.upstreams = upstreams

    def _connect(self, node: Node, *, input: int = 0, key: KeySpec | None = None) -> None:
        for upstream in self.upstreams:
            exchange = Exchange.HASH if key is not None else upstream.exchange
            self.flow.add_edge(upstream.node, node.index, input=input, exchange=exchange, key=key, tag=upstream.tag)

    def _add(self, kind: NodeKind, body: Any, *, uid: str | None, parallelism: int | None, name: str | None,
             key: KeySpec | None = None, watermarks: WatermarkStrategy | None = None, record_type: Any = None) -> Node:
        upstream = tuple(upstream.node for upstream in self.upstreams)
        node = self.flow.add_node(kind, body, uid=uid, parallelism=parallelism, name=name, key=key,
                                  watermarks=watermarks, record_type=record_type, upstream=upstream)
        self._connect(node, key=key)
        return node

    def _record_type(self) -> Any:
        types = {self.flow.nodes[upstream.node].record_type for upstream in self.upstreams if upstream.tag is None}
        return types.pop() if len(types) == 1 else None


class DataStream(_Stream):
    """Records that are not partitioned by key."""

    def map(self, function: Callable[[Any], Any], *, uid: str | None = None, parallelism: int | None = None,
            name: str | None = None, record_type: Any = None) -> DataStream:
        """One output for each record. `record_type` names the dataclass or NamedTuple that the outputs are."""
        return self._apply(NodeKind.MAP, _callable(function, "map"), uid, parallelism, name, record_type)

    def filter(self, predicate: Callable[[Any], bool], *, uid: str | None = None, parallelism: int | None = None,
               name: str | None = None) -> DataStream:
        """The records for which the predicate is true."""
        return self._apply(NodeKind.FILTER, _callable(predicate, "filter"), uid, parallelism, name, self._record_type())

    def flat_map(self, function: Callable[[Any], Iterable[Any]], *, uid: str | None = None,
                 parallelism: int | None = None, name: str | None = None, record_type: Any = None) -> DataStream:
        """Any number of outputs for each record."""
        return self._apply(NodeKind.FLAT_MAP, _callable(function, "flat_map"), uid, parallelism, name, record_type)

    def process(self, function: ProcessFunction, *, uid: str | None = None, parallelism: int | None = None,
                name: str | None = None, record_type: Any = None) -> DataStream:
        """A ProcessFunction: side outputs, operator state, notices."""
        function = _instance(function, ProcessFunction, "process on a stream that is not keyed",
                             "a KeyedProcessFunction needs key_by(...) before it")
        return self._apply(NodeKind.PROCESS, function, uid, parallelism, name, record_type)

    def assign_timestamps(self, strategy: WatermarkStrategy, *, uid: str | None = None) -> DataStream:
        """New timestamps and watermarks, by the strategy."""
        node = self._add(NodeKind.TIMESTAMPS, None, uid=uid, parallelism=None, name=None, watermarks=strategy,
                         record_type=self._record_type())
        return DataStream(self.flow, (Upstream(node.index),))

    def key_by(self, key: Callable[[Any], Any] | str | int, *, key_type: Any = None) -> KeyedStream:
        """Partition by key: a function of the record, a field name, or a position in a tuple."""
        if not callable(key) and not isinstance(key, (str, int)):
            raise InvalidRequest("key_by takes a function, a field name or a position", found=repr(key))
        if key_type is None:
            key_type = self._type_of_field(key)
        if key_type is None:
            raise InvalidRequest("key_by needs the type of the key", hint="for example key_by('user', key_type=str)")
        return KeyedStream(self.flow, self.upstreams, KeySpec(key, key_type))

    def rebalance(self) -> DataStream:
        """Deal records out evenly to all subtasks of the next operator."""
        return self._travelling(Exchange.REBALANCE)

    def forward(self) -> DataStream:
        """Subtask i sends to subtask i of the next operator, which needs the same parallelism."""
        return self._travelling(Exchange.FORWARD)

    def broadcast(self) -> BroadcastStream:
        """Send every record to all subtasks of the next operator."""
        return BroadcastStream(self.flow, self._travelling(Exchange.BROADCAST).upstreams)

    def union(self, *others: DataStream) -> DataStream:
        """The records of all the streams, in no fixed order between them."""
        for other in others:
            if not isinstance(other, DataStream):
                raise InvalidRequest("union takes streams that are not keyed", found=type(other).__name__,
                                     hint="unite first, then key_by")
            if other.flow is not self.flow:
                raise InvalidRequest("union takes streams of one flow", expected=self.flow.name, found=other.flow.name)
        upstreams = self.upstreams + tuple(upstream for other in others for upstream in other.upstreams)
        return DataStream(self.flow, upstreams)

    def connect(self, broadcast: BroadcastStream) -> ConnectedStreams:
        """This stream together with a broadcast one, for a BroadcastProcessFunction."""
        return ConnectedStreams(self, broadcast)

    def side_output(self, tag: OutputTag) -> DataStream:
        """What the operator wrote with `ctx.output(tag, ...)`."""
        if len(self.upstreams) != 1 or self.upstreams[0].tag is not None:
            raise InvalidRequest("side_output is asked of the stream that process(...) returned", tag=tag.name)
        return DataStream(self.flow, (Upstream(self.upstreams[0].node, tag),))

    def start_new_chain(self) -> DataStream:
        """Keep the operator that made this stream from being chained to its input: it runs in a thread of its own."""
        for upstream in self.upstreams:
            self.flow.nodes[upstream.node].chain = False
        return self

    def sink(self, sink: Sink, *, uid: str | None = None, parallelism: int | None = None,
             name: str | None = None) -> None:
        """The end of the stream."""
        from checkpoint.connectors.base import Sink

        if not isinstance(sink, Sink):
            raise InvalidRequest("sink takes a Sink", found=type(sink).__name__, hint="for example FileSink('out/')")
        self._add(NodeKind.SINK, sink, uid=uid, parallelism=parallelism, name=name)
        sink.receives(self._record_type())

    def _apply(self, kind: NodeKind, body: Any, uid: str | None, parallelism: int | None, name: str | None,
               record_type: Any) -> DataStream:
        node = self._add(kind, body, uid=uid, parallelism=parallelism, name=name, record_type=record_type)
        return DataStream(self.flow, (Upstream(node.index),))

    def _travelling(self, exchange: Exchange) -> DataStream:
        return DataStream(self.flow, tuple(dataclasses.replace(upstream, exchange=exchange)
                                           for upstream in self.upstreams))

    def _type_of_field(self, key: Any) -> Any:
        record_type = self._record_type()
        return get_type_hints(record_type).get(key) if record_type is not None and isinstance(key, str) else None


class KeyedStream(_Stream):
    """Records partitioned by key: all records of a key reach the same subtask, in order."""

    def __init__(self, flow: Dataflow, upstreams: tuple[Upstream, ...], key: KeySpec) -> None:
        super().__init__(flow, upstreams)
        self.key = key

    def process(self, function: KeyedProcessFunction, *, uid: str | None = None, parallelism: int | None = None,
                name: str | None = None, record_type: Any = None) -> DataStream:
        """A KeyedProcessFunction: keyed state and timers."""
        function = _instance(function, KeyedProcessFunction, "process on a keyed stream",
                             "derive it from KeyedProcessFunction")
        node = self._add(NodeKind.KEYED_PROCESS, function, uid=uid, parallelism=parallelism, name=name, key=self.key,
                         record_type=record_type)
        return DataStream(self.flow, (Upstream(node.index),))

    def connect(self, broadcast: BroadcastStream) -> KeyedConnectedStreams:
        """This stream together with a broadcast one, for a KeyedBroadcastProcessFunction."""
        return KeyedConnectedStreams(self, broadcast)


class BroadcastStream(DataStream):
    """Records that every subtask of the next operator gets."""


class ConnectedStreams:
    """A stream and a broadcast stream, side by side."""

    def __init__(self, main: DataStream, broadcast: BroadcastStream) -> None:
        self._main, self._broadcast = main, _broadcast_of(main.flow, broadcast)

    def process(self, function: BroadcastProcessFunction, *, uid: str | None = None, parallelism: int | None = None,
                name: str | None = None, record_type: Any = None) -> DataStream:
        function = _instance(function, BroadcastProcessFunction, "process on a stream connected with a broadcast stream",
                             "a KeyedBroadcastProcessFunction needs key_by(...) on the main stream")
        node = self._main._add(NodeKind.BROADCAST_PROCESS, function, uid=uid, parallelism=parallelism, name=name,
                               record_type=record_type)
        self._broadcast._connect(node, input=1)
        return DataStream(self._main.flow, (Upstream(node.index),))


class KeyedConnectedStreams:
    """A keyed stream and a broadcast stream, side by side."""

    def __init__(self, main: KeyedStream, broadcast: BroadcastStream) -> None:
        self._main, self._broadcast = main, _broadcast_of(main.flow, broadcast)

    def process(self, function: KeyedBroadcastProcessFunction, *, uid: str | None = None,
                parallelism: int | None = None, name: str | None = None, record_type: Any = None) -> DataStream:
        function = _instance(function, KeyedBroadcastProcessFunction,
                             "process on a keyed stream connected with a broadcast stream",
                             "derive it from KeyedBroadcastProcessFunction")
        node = self._main._add(NodeKind.KEYED_BROADCAST_PROCESS, function, uid=uid, parallelism=parallelism, name=name,
                               key=self._main.key, record_type=record_type)
        self._broadcast._connect(node, input=1)
        return DataStream(self._main.flow, (Upstream(node.index),))


def _broadcast_of(flow: Dataflow, stream: Any) -> BroadcastStream:
    if not isinstance(stream, BroadcastStream):
        raise InvalidRequest("connect takes a broadcast stream", found=type(stream).__name__,
                             hint="call .broadcast() on it first")
    if stream.flow is not flow:
        raise InvalidRequest("connect takes streams of one flow", expected=flow.name, found=stream.flow.name)
    return stream


def _callable(function: Any, where: str) -> Any:
    if not callable(function):
        raise InvalidRequest(f"{where} takes a function", found=repr(function))
    return function


def _instance(function: Any, kind: type, where: str, hint: str) -> Any:
    """The function itself, or one of its class where the class was given."""
    given = function if isinstance(function, type) else type(function)
    if not issubclass(given, kind):
        raise InvalidRequest(f"{where} takes a {kind.__name__}", found=given.__name__, hint=hint)
    return function() if isinstance(function, type) else function

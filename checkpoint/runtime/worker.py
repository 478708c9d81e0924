"""A worker: runs the subtasks of a flow that it is told to, and ends with its supervisor.

`main` is the worker process of the process runtime, which loads the flow from its job file.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import traceback
from typing import Any

import msgspec

from checkpoint.dataflow.graph import Dataflow
from checkpoint.dataflow.records import RecordCodec
from checkpoint.protocol.messages import Report, SubtaskId
from checkpoint.runtime import wire
from checkpoint.runtime.contracts import Barrier, Element
from checkpoint.runtime.deployment import Builder, JobSpec
from checkpoint.runtime.executor import assignments
from checkpoint.runtime.host import TaskHost
from checkpoint.runtime.loading import load_flow
from checkpoint.runtime.network import Network, UnixNetwork
from checkpoint.runtime.wire import Connection, Kind
from checkpoint.runtime.wiring import Endpoint
from checkpoint.storage.files import CheckpointSource
from statebackend.clock import SystemClock

STATISTICS_SECONDS = 0.5


class Numbering:
    """Subtasks by number and channel codecs, alike in every process of a job."""

    def __init__(self, builder: Builder) -> None:
        plan = builder.plan
        self.subtasks = [SubtaskId(task, index) for task, index in plan.subtasks]
        self.number_of = {subtask: number for number, subtask in enumerate(self.subtasks)}
        self._codecs: dict[tuple[str, int], RecordCodec] = {}
        for vertex in plan.vertices:
            channel = 0
            for edge in vertex.inputs:
                kind = plan.flow.nodes[edge.edge.source].record_type if edge.edge.tag is None else None
                codec = RecordCodec(kind)
                for _ in edge.senders(0):
                    self._codecs[vertex.id, channel] = codec
                    channel += 1

    def codec(self, to: Endpoint) -> RecordCodec:
        return self._codecs[to.subtask.task, to.channel]


class Peers:
    """The connections to the other workers; fulfils the host's `Remote`."""

    def __init__(self, numbering: Numbering, network: Network) -> None:
        self._numbering, self._network = numbering, network
        self._connections: dict[str, Connection] = {}
        self._route: dict[SubtaskId, str] = {}
        self._lock = threading.Lock()

    def route(self, placement: dict[SubtaskId, str]) -> None:
        """Where each subtask is now: the address of its worker."""
        self._route = placement
        with self._lock:
            for address in set(self._connections) - set(placement.values()):
                self._connections.pop(address).close()

    def send(self, to: Endpoint, attempt: int, element: Element) -> None:
        number = self._numbering.number_of[to.subtask]
        kind, body = wire.pack_element(number, to.channel, attempt, element, self._numbering.codec(to))
        self._connection(to.subtask).send(kind, body)

    def grant(self, to: Endpoint, attempt: int, credit: int) -> None:
        number = self._numbering.number_of[to.subtask]
        self._connection(to.subtask).send(Kind.CREDIT, wire.pack_credit(number, to.channel, attempt, credit))

    def _connection(self, subtask: SubtaskId) -> Connection:
        address = self._route[subtask]
        with self._lock:
            found = self._connections.get(address)
            if found is None:
                found = self._connections[address] = self._network.connect(address)
            return found


class Worker:
    """The process's side of the control connection. Its calls all come from the control loop's thread."""

    def __init__(self, control: Connection, network: Network) -> None:
        self._control, self._network = control, network
        self._server, self.data_address = network.listen(f"data-{os.getpid()}")
        self._closing = threading.Event()
        self._host: TaskHost
        self._builder: Builder
        self._numbering: Numbering
        self._peers: Peers
        self._sources: list[CheckpointSource] = []
        self._handlers = {
            Kind.INIT: self._init, Kind.DEPLOY: self._deploy, Kind.START: self._start, Kind.TRIGGER: self._trigger,
            Kind.COMPLETED: self._completed, Kind.SAVEPOINT_DONE: self._savepoint_done, Kind.ABORTED: self._aborted,
            Kind.STATUS: self._status, Kind.CANCEL: self._cancel}

    def run(self) -> bool:
        """Until the supervisor says that it is over (True), or is gone."""
        while (frame := self._control.receive()) is not None:
            kind, body = frame
            if kind is Kind.CLOSE:
                self._close()
                return True
            self._handlers[kind](wire.decode(body) if body else None)
        return False

    def prepare(self, flow: Dataflow, spec: JobSpec) -> None:
        """Everything that is the same for all deployments of a run; from now on others may connect."""
        self._builder = Builder(flow, spec, spec.storage(), SystemClock())
        self._numbering = Numbering(self._builder)
        self._peers = Peers(self._numbering, self._network)
        self._host = TaskHost(self, self._builder.clock, self._peers)
        threading.Thread(target=self._accept, name="data", daemon=True).start()
        threading.Thread(target=self._report_statistics, name="statistics", daemon=True).start()

    def _close(self) -> None:
        self._host.close()
        self._closing.set()
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._server.close()
        self._peers.route({})
        self._close_sources(0)
        self._builder.close()

    # -- HostListener, from subtask threads ------------------------------------------------------------------------------

    def on_report(self, report: Report) -> None:
        self._tell(Kind.REPORT, wire.pack_report(report))

    def on_failure(self, subtask: SubtaskId | None, attempt: int, error: BaseException) -> None:
        trace = "".join(traceback.format_exception(error))
        self._tell(Kind.FAILURE, wire.encode([subtask, attempt, wire.error_json(error), trace]))

    def on_finished(self, subtask: SubtaskId, attempt: int) -> None:
        self._tell(Kind.FINISHED, wire.encode([subtask, attempt]))

    def _tell(self, kind: Kind, body: bytes) -> None:
        try:
            self._control.send(kind, body)
        except OSError:
            if not self._closing.is_set():
                os._exit(1)

    # -- commands --------------------------------------------------------------------------------------------------------

    def _init(self, data: Any) -> None:
        self.prepare(load_flow(data["job"]), JobSpec.from_json(data["spec"]))
        self._control.send_value(Kind.READY, None)

    def _deploy(self, data: Any) -> None:
        deployment = wire.deployment_from_json(data["deployment"])
        self._peers.route({SubtaskId(*subtask): path for subtask, path in data["placement"]})
        try:
            self._close_sources(1)
            self._host.prepare(assignments(self._builder, deployment, self._sources.append, self))
        except Exception as error:
            self._control.send_value(Kind.DEPLOYED, wire.error_json(error))
        else:
            self._control.send_value(Kind.DEPLOYED, None)

    def _start(self, data: Any) -> None:
        self._host.start_prepared()

    def _trigger(self, data: Any) -> None:
        subtasks, barrier = data
        self._host.trigger(_subtasks(subtasks), msgspec.convert(barrier, Barrier))

    def _completed(self, data: Any) -> None:
        checkpoint_id, subtasks, last = data
        self._close_sources(0)
        self._host.completed(checkpoint_id, _subtasks(subtasks) if subtasks is not None else None, last)

    def _savepoint_done(self, data: Any) -> None:
        self._host.savepoint_done(data, None)

    def _aborted(self, data: Any) -> None:
        self._host.aborted(data)

    def _status(self, data: Any) -> None:
        self._host.request_status(_subtasks(data))

    def _cancel(self, data: Any) -> None:
        number, subtasks, read_mail = data
        self._control.send_value(Kind.STATISTICS, self._host.statistics())
        self._host.cancel(_subtasks(subtasks) if subtasks is not None else None, read_mail=read_mail)
        self._control.send_value(Kind.CANCELLED, number)

    def _close_sources(self, keep: int) -> None:
        while len(self._sources) > keep:
            self._sources.pop(0).close()

    # -- data ------------------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._receive, args=(connected,), name="peer", daemon=True).start()

    def _receive(self, connected: socket.socket) -> None:
        peer = self._network.admit(connected)
        if peer is None:
            return
        host, numbering = self._host, self._numbering
        while (frame := peer.receive()) is not None:
            kind, body = frame
            number, channel, attempt = wire.unpack_to(body)
            to = Endpoint(numbering.subtasks[number], channel)
            if kind is Kind.CREDIT:
                host.credit(to, attempt, wire.unpack_credit(body))
            else:
                host.element(to, attempt, wire.unpack_element(kind, body, numbering.codec(to)))

    def _report_statistics(self) -> None:
        while not self._closing.wait(STATISTICS_SECONDS):
            self._tell(Kind.STATISTICS, wire.encode(self._host.statistics()))


def _subtasks(data: Any) -> list[SubtaskId]:
    return [SubtaskId(*subtask) for subtask in data]


def main() -> None:
    """Arguments: the supervisor's socket, this worker's number, and the folder of all sockets."""
    address, number, folder = sys.argv[1:4]
    # Ctrl-C reaches the whole process group: the supervisor alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    network = UnixNetwork(folder)
    control = network.connect(address)
    try:
        worker = Worker(control, network)
        control.send_value(Kind.HELLO, [int(number), worker.data_address])
        worker.run()
    except BaseException as error:
        control.send(Kind.FAILURE, wire.encode([None, 0, wire.error_json(error),
                                                "".join(traceback.format_exception(error))]))
        os._exit(1)
    # Threads of user functions may still be busy; nothing they do counts any more.
    os._exit(0)

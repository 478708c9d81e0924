"""What travels between the supervisor and its worker processes, and between workers: framed messages, never pickle.

    frame   = length (u32 LE, of what follows) | kind (u8) | body
    control = msgpack
    data    = subtask number (u32) | channel (u32) | attempt (u32) | payload        numbers in plan order
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import msgspec

from checkpoint.dataflow.records import RecordCodec
from checkpoint.protocol.messages import Acknowledge, Decline, Report, StatusReport, SubtaskId, SubtaskStats
from checkpoint.runtime.contracts import (
    Barrier,
    CancelBarrier,
    ChannelIdle,
    Element,
    EndOfInput,
    OperatorSnapshot,
    Records,
    SubtaskSnapshot,
    Watermark,
)
from checkpoint.runtime.executor import Deployment, RestoreFrom
from statebackend import errors
from statebackend.backend import KeyedHandle
from statebackend.errors import HoldfastError
from statebackend.files import StateFile

_HEAD = struct.Struct("<IB")
_TO = struct.Struct("<III")
_I64 = struct.Struct("<q")
encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode


class Kind(IntEnum):
    """Control messages first, then data."""

    HELLO = 1
    INIT = 2
    READY = 3
    DEPLOY = 4
    DEPLOYED = 5
    START = 6
    TRIGGER = 7
    COMPLETED = 8
    SAVEPOINT_DONE = 9
    ABORTED = 10
    STATUS = 11
    CANCEL = 12
    CANCELLED = 13
    REPORT = 14
    FAILURE = 15
    FINISHED = 16
    STATISTICS = 17
    CLOSE = 18
    RECORDS = 32
    WATERMARK = 33
    IDLE = 34
    END = 35
    BARRIER = 36
    CANCEL_BARRIER = 37
    CREDIT = 38


class Connection:
    """A stream socket with frames. `send` may be called from several threads; `receive` belongs to one."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._lock = threading.Lock()
        self._reader = connected.makefile("rb", buffering=1 << 18)

    def send(self, kind: Kind, body: bytes = b"") -> None:
        frame = _HEAD.pack(len(body) + 1, kind)
        with self._lock:
            if len(body) < 1 << 16:
                self._socket.sendall(frame + body)
            else:
                self._socket.sendall(frame)
                self._socket.sendall(body)

    def send_value(self, kind: Kind, value: Any) -> None:
        self.send(kind, encode(value))

    def receive(self) -> tuple[Kind, bytes] | None:
        """The next frame; None when the other side has gone."""
        frame = self._read()
        if frame is None:
            self._reader.close()
        return frame

    def _read(self) -> tuple[Kind, bytes] | None:
        try:
            head = self._reader.read(_HEAD.size)
            if len(head) < _HEAD.size:
                return None
            length, kind = _HEAD.unpack(head)
            body = self._reader.read(length - 1)
        except OSError:
            return None
        return (Kind(kind), body) if len(body) == length - 1 else None

    @property
    def local_address(self) -> Any:
        return self._socket.getsockname()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


# -- data ------------------------------------------------------------------------------------------------------------------

def pack_element(number: int, channel: int, attempt: int, element: Element, codec: RecordCodec) -> tuple[Kind, bytes]:
    to = _TO.pack(number, channel, attempt)
    match element:
        case Records():
            return Kind.RECORDS, to + codec.encode(element)
        case Watermark(timestamp):
            return Kind.WATERMARK, to + _I64.pack(timestamp)
        case ChannelIdle():
            return Kind.IDLE, to
        case EndOfInput(drained):
            return Kind.END, to + bytes([drained])
        case Barrier():
            return Kind.BARRIER, to + encode(element)
        case CancelBarrier(checkpoint_id):
            return Kind.CANCEL_BARRIER, to + _I64.pack(checkpoint_id)


def pack_credit(number: int, channel: int, attempt: int, credit: int) -> bytes:
    return _TO.pack(number, channel, attempt) + _I64.pack(credit)


def unpack_to(body: bytes) -> tuple[int, int, int]:
    number, channel, attempt = _TO.unpack_from(body)
    return number, channel, attempt


def unpack_credit(body: bytes) -> int:
    return int(_I64.unpack_from(body, _TO.size)[0])


def unpack_element(kind: Kind, body: bytes, codec: RecordCodec) -> Element:
    payload = memoryview(body)[_TO.size:]
    if kind is Kind.RECORDS:
        return codec.decode(payload)
    if kind is Kind.WATERMARK:
        return Watermark(_I64.unpack(payload)[0])
    if kind is Kind.IDLE:
        return ChannelIdle()
    if kind is Kind.END:
        return EndOfInput(bool(payload[0]))
    if kind is Kind.BARRIER:
        return decode(payload, type=Barrier)
    return CancelBarrier(_I64.unpack(payload)[0])


# -- control ---------------------------------------------------------------------------------------------------------------

def pack_report(report: Report) -> bytes:
    if not isinstance(report, Acknowledge):
        return encode([type(report).__name__, report])
    snapshot = report.snapshot
    return encode(["Acknowledge", {
        "subtask": report.subtask, "checkpoint_id": report.checkpoint_id, "attempt": report.attempt,
        "stats": report.stats, "ended": snapshot.ended,
        "in_flight": snapshot.in_flight.to_json() if snapshot.in_flight is not None else None,
        "operators": [{"uid": operator.uid, "keyed": [handle.to_json() for handle in operator.keyed],
                       "operator": operator.operator.to_json() if operator.operator is not None else None}
                      for operator in snapshot.operators]}])


def unpack_report(body: bytes) -> Report:
    name, data = decode(body)
    if name == "Decline":
        return msgspec.convert(data, Decline)
    if name == "StatusReport":
        return msgspec.convert(data, StatusReport)
    snapshot = SubtaskSnapshot(
        tuple(OperatorSnapshot(operator["uid"], tuple(KeyedHandle.from_json(handle) for handle in operator["keyed"]),
                               _file(operator["operator"])) for operator in data["operators"]),
        _file(data["in_flight"]), data["ended"])
    return Acknowledge(SubtaskId(*data["subtask"]), data["checkpoint_id"], snapshot,
                       msgspec.convert(data["stats"], SubtaskStats), data["attempt"])


def _file(data: Mapping[str, Any] | None) -> StateFile | None:
    return StateFile.from_json(data) if data is not None else None


def deployment_json(deployment: Deployment) -> dict[str, Any]:
    return {"subtasks": deployment.subtasks, "attempt": deployment.attempt, "restore": deployment.restore,
            "enumerations": deployment.enumerations}


def deployment_from_json(data: Mapping[str, Any]) -> Deployment:
    restore = data["restore"]
    return Deployment(tuple(SubtaskId(*subtask) for subtask in data["subtasks"]), data["attempt"],
                      RestoreFrom(**restore) if restore is not None else None, data["enumerations"])


def error_json(error: BaseException) -> dict[str, Any]:
    """An error as words: kind, message, hint, and what its notes say."""
    notes = [str(note) for note in getattr(error, "__notes__", ())]
    if isinstance(error, HoldfastError):
        return {"kind": type(error).__name__, "message": error.message, "hint": error.hint, "notes": notes,
                "context": {name: str(value) for name, value in error.context.items()}}
    return {"kind": "HoldfastError", "message": f"{type(error).__name__}: {error}", "hint": None, "context": {},
            "notes": notes}


def error_from_json(data: Mapping[str, Any]) -> HoldfastError:
    kind = getattr(errors, data["kind"], HoldfastError)
    error: HoldfastError = kind(data["message"], hint=data["hint"])
    error.context = dict(data["context"])
    for note in data["notes"]:
        error.add_note(note)
    return error

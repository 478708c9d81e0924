"""The base of exactly-once sinks: transactions that open, are pre-committed by a barrier and committed on completion.

    records -> open transaction -> (barrier n) pre-committed, in the state of checkpoint n -> (n completed) committed

A transaction that is in a restored checkpoint is committed again on restore: the checkpoint was complete, so its commit
may or may not have happened, and commits must be idempotent. One that is in no checkpoint is never committed. A
checkpoint that is given up leaves its transactions to the next one.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import msgspec

from checkpoint.connectors.base import Sink, SinkWriter
from checkpoint.dataflow.functions import OpenContext
from statebackend.descriptors import ListStateDescriptor

_STATE = "transactions"


class TwoPhaseCommitSink(Sink):
    """Derive from this and fill in the five steps. A transaction is any plain value (JSON-like) that names the work.

    One sink object serves all subtasks: keep nothing in `self` that belongs to one of them, but in the transaction.
    """

    @abstractmethod
    def begin(self, ctx: OpenContext) -> Any:
        """A new transaction of this subtask; called before its first record."""

    @abstractmethod
    def write(self, transaction: Any, values: list[Any], timestamps: list[int | None] | None) -> None:
        """Add records to an open transaction."""

    @abstractmethod
    def pre_commit(self, transaction: Any) -> Any:
        """Make the records durable but invisible; returns what `commit` needs, which is kept in the checkpoint."""

    @abstractmethod
    def commit(self, transaction: Any) -> None:
        """Make them visible, atomically. Called again after a restore: a second time must change nothing."""

    @abstractmethod
    def abort(self, transaction: Any) -> None:
        """Undo an open transaction, or leave it to be cleaned up."""

    def opened(self, ctx: OpenContext, pending: list[Any]) -> None:
        """The restored transactions of this subtask were committed."""

    def completed(self, ctx: OpenContext, first: bool) -> None:
        """A checkpoint has completed and its transactions are committed; `first` in this run of the subtask."""

    def writer(self, ctx: OpenContext) -> SinkWriter:
        return TwoPhaseCommitWriter(self, ctx)


class TwoPhaseCommitWriter(SinkWriter):
    """Keeps the transactions of one subtask."""

    def __init__(self, sink: TwoPhaseCommitSink, ctx: OpenContext) -> None:
        self._sink, self._ctx = sink, ctx
        self._state = ctx.operator_state.list_state(ListStateDescriptor(_STATE, tuple[int, bytes]))
        self._open: Any = None
        self._is_open = False
        self._pending: list[tuple[int, Any]] = []
        self._first = True
        restored = [msgspec.json.decode(data) for _, data in self._state.get()]
        for transaction in restored:
            sink.commit(transaction)
        self._state.clear()
        sink.opened(ctx, restored)

    def write(self, values: list[Any], timestamps: list[int | None] | None) -> None:
        if not self._is_open:
            self._open, self._is_open = self._sink.begin(self._ctx), True
        self._sink.write(self._open, values, timestamps)

    def snapshot(self, checkpoint_id: int) -> None:
        if self._is_open:
            self._pending.append((checkpoint_id, self._sink.pre_commit(self._open)))
            self._open, self._is_open = None, False
        self._state.update((number, msgspec.json.encode(transaction)) for number, transaction in self._pending)

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        while self._pending and self._pending[0][0] <= checkpoint_id:
            self._sink.commit(self._pending[0][1])
            del self._pending[0]
        self._sink.completed(self._ctx, self._first)
        self._first = False

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._sink.abort(self._open)

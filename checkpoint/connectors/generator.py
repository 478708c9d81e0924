"""A source that makes its records: f(0), f(1), f(2), ...; replayable, at any parallelism, at a given rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from checkpoint.connectors.base import Source, SourceBatch, SourceReader
from checkpoint.dataflow.functions import OpenContext, ProcessContext
from checkpoint.runtime.contracts import SourceStatus
from statebackend.descriptors import ListStateDescriptor
from statebackend.errors import InvalidRequest

SPLITS = 32
"""Numbers are dealt to this many splits (more at a higher parallelism), which subtasks share: so that it can rescale."""
LARGEST_BLOCK = 1024
_STATE = ListStateDescriptor("splits", tuple[int, int, int, int])


class GeneratorSource(Source):
    """Records `f(0), f(1), ...`: `count` of them, or without end; `rate` a second over all subtasks, or at full speed.

    Numbers are cut into blocks and the blocks dealt to splits; one subtask alone makes them in order.
    """

    def __init__(self, f: Callable[[int], Any], *, rate: float | None = None, count: int | None = None,
                 record_type: Any = None) -> None:
        if not callable(f):
            raise InvalidRequest("GeneratorSource takes a function of a number", found=repr(f)[:100])
        if rate is not None and rate <= 0:
            raise InvalidRequest("rate must be above zero", found=rate)
        if count is not None and count < 0:
            raise InvalidRequest("count can't be negative", found=count)
        self.f, self.rate, self.count, self.record_type = f, rate, count, record_type
        self.bounded = count is not None

    def reader(self, ctx: OpenContext) -> SourceReader:
        return _GeneratorReader(self, ctx)


class CollectionSource(GeneratorSource):
    """The records of a list, in order, then the end."""

    def __init__(self, records: Sequence[Any], *, rate: float | None = None, record_type: Any = None) -> None:
        kept = list(records)
        super().__init__(kept.__getitem__, rate=rate, count=len(kept), record_type=record_type)


class _GeneratorReader(SourceReader):
    """State: (split, next number, number of splits, block size) of each owned split; every subtask restores all."""

    def __init__(self, source: GeneratorSource, ctx: OpenContext) -> None:
        self._f, self._count = source.f, source.count
        self._state = ctx.operator_state.union_list_state(_STATE)
        restored = sorted(self._state.get())
        if not restored:
            splits = max(SPLITS, ctx.parallelism)
            block = LARGEST_BLOCK if self._count is None else \
                max(1, min(LARGEST_BLOCK, math.ceil(self._count / (splits * 4))))
            restored = [(split, split * block, splits, block) for split in range(splits)]
        self._splits, self._block = restored[0][2], restored[0][3]
        self._next = {split: number for split, number, _, _ in restored
                      if split % ctx.parallelism == ctx.subtask_index}
        self._rate = source.rate * len(self._next) / self._splits if source.rate is not None else None
        self._clock = ctx.timer_service().current_processing_time if isinstance(ctx, ProcessContext) else None
        self._started: int | None = None
        self._made = 0
        self._wake: int | None = None

    def poll(self, limit: int) -> SourceBatch:
        allowed = self._allowed(limit)
        if allowed <= 0:
            return SourceBatch([], SourceStatus.IDLE)
        values: list[Any] = []
        while len(values) < allowed:
            split = min(self._next, key=self._next.__getitem__, default=None)
            if split is None or (self._count is not None and self._next[split] >= self._count):
                self._made += len(values)
                return SourceBatch(values, SourceStatus.ENDED)
            values.extend(map(self._f, self._take(split, allowed - len(values))))
        self._made += len(values)
        return SourceBatch(values, SourceStatus.MORE)

    def snapshot(self, checkpoint_id: int) -> None:
        self._state.update((split, number, self._splits, self._block) for split, number in self._next.items())

    def wake_at_ms(self) -> int | None:
        return self._wake

    def _take(self, split: int, limit: int) -> range:
        """The next numbers of a split, up to the end of its block."""
        begin = self._next[split]
        block_end = (begin // self._block + 1) * self._block
        end = min(begin + limit, block_end, self._count if self._count is not None else block_end)
        self._next[split] = end if end < block_end else end + (self._splits - 1) * self._block
        return range(begin, end)

    def _allowed(self, limit: int) -> int:
        if self._rate is None or self._clock is None:
            return limit
        now = self._clock()
        if self._started is None or now < self._started:
            self._started, self._made = now, 0
        due = int((now - self._started) * self._rate / 1000) + 1 - self._made
        self._wake = None if due > 0 else self._started + math.ceil(self._made * 1000 / self._rate)
        return min(limit, due)

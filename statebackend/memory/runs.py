"""Sorting entries by key group without holding the interpreter: runs of bounded size, merged group by group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from statebackend.entries import BATCH_ROWS, entry_batch

RUN_ROWS = 262_144
RUN_BYTES = 64 << 20
Groups = np.ndarray[Any, np.dtype[np.uint16]]
Ops = np.ndarray[Any, np.dtype[np.uint8]]


class Rows(NamedTuple):
    """Entries to be written; those of one key group stay in the order in which they were given."""

    groups: Groups
    keys: pa.BinaryArray
    values: pa.BinaryArray
    ops: Ops

    @property
    def nbytes(self) -> int:
        return int(self.keys.nbytes + self.values.nbytes)

    def slice(self, begin: int, end: int) -> Rows:
        return Rows(self.groups[begin:end], self.keys.slice(begin, end - begin), self.values.slice(begin, end - begin),
                    self.ops[begin:end])


def joined_rows(parts: list[Rows]) -> Rows:
    if len(parts) == 1:
        return parts[0]
    return Rows(np.concatenate([part.groups for part in parts]), pa.concat_arrays([part.keys for part in parts]),
                pa.concat_arrays([part.values for part in parts]), np.concatenate([part.ops for part in parts]))


def sorted_rows(rows: Rows) -> Rows:
    if len(rows.groups) < 2 or bool((rows.groups[:-1] <= rows.groups[1:]).all()):
        return rows
    order = np.argsort(rows.groups, kind="stable")
    index = pa.array(order)
    return Rows(rows.groups[order], rows.keys.take(index), rows.values.take(index), rows.ops[order])


class RunSorter:
    """Takes entries in any order of key groups and gives batches that are sorted by key group."""

    def __init__(self) -> None:
        self._waiting: list[Rows] = []
        self._rows = self._bytes = 0
        self._runs: list[Rows] = []
        self.rows = 0

    def add(self, rows: Rows) -> None:
        if len(rows.groups) == 0:
            return
        self._waiting.append(rows)
        self._rows += len(rows.groups)
        self._bytes += rows.nbytes
        self.rows += len(rows.groups)
        if self._rows >= RUN_ROWS or self._bytes >= RUN_BYTES:
            self._close_run()

    def _close_run(self) -> None:
        if self._waiting:
            self._runs.append(sorted_rows(joined_rows(self._waiting)))
        self._waiting, self._rows, self._bytes = [], 0, 0

    def batches(self) -> Iterator[pa.RecordBatch]:
        self._close_run()
        for rows in _merged(self._runs):
            for begin in range(0, len(rows.groups), BATCH_ROWS):
                part = rows.slice(begin, min(begin + BATCH_ROWS, len(rows.groups)))
                yield entry_batch(part.keys, part.values, part.ops)


def _merged(runs: list[Rows]) -> Iterator[Rows]:
    if len(runs) <= 1:
        yield from runs
        return
    last = max(int(run.groups[-1]) for run in runs)
    bounds = [np.searchsorted(run.groups, np.arange(last + 2)) for run in runs]
    totals = np.sum([np.diff(bound) for bound in bounds], axis=0)
    begin = 0
    while begin <= last:
        end, rows = begin + 1, int(totals[begin])
        while end <= last and rows + int(totals[end]) <= BATCH_ROWS:
            rows += int(totals[end])
            end += 1
        parts = [run.slice(int(bound[begin]), int(bound[end])) for run, bound in zip(runs, bounds)
                 if bound[end] > bound[begin]]
        if end - begin == 1 and rows > RUN_ROWS:
            yield from parts
        elif parts:
            yield sorted_rows(joined_rows(parts))
        begin = end

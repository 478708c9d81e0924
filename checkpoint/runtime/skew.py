"""How evenly the records of a keyed operator spread over its key groups, from a sample of its batches.

Windows of a few minutes, cut by the wall clock, so that what the subtasks of an operator counted can be added up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

WINDOW_MS = 300_000
EVERY = 16
"""One batch of so many is counted: hashing all keys once more would be felt."""
ENOUGH = 10
"""Records a key group on average below which the largest one would tell of chance only."""


class KeyGroupSample:
    """One subtask's count of records by key group, in this window and the one before."""

    def __init__(self, max_parallelism: int, groups_of: Callable[[list[Any]], npt.NDArray[Any]],
                 now_ms: Callable[[], int]) -> None:
        self._max_parallelism, self._groups_of, self._now_ms = max_parallelism, groups_of, now_ms
        self._batches = self._window = 0
        self._before, self._counts = self._nothing(), self._nothing()

    def see(self, keys: list[Any]) -> None:
        """A batch of keys was processed. On the subtask's thread."""
        self._batches += 1
        if self._batches % EVERY != 1 or not keys:
            return
        self._roll()
        self._counts += np.bincount(self._groups_of(keys), minlength=self._max_parallelism)

    def told(self) -> dict[str, int]:
        """What `skews` needs of it. Any thread may ask; the numbers may be a batch behind."""
        counts = self._counts + self._before
        largest = int(counts.argmax())
        return {"records": int(counts.sum()), "key_group": largest, "largest": int(counts[largest]),
                "key_groups": self._max_parallelism, "window": self._window}

    def _roll(self) -> None:
        window = self._now_ms() // WINDOW_MS
        if window != self._window:
            self._before = self._counts if window == self._window + 1 else self._nothing()
            self._counts, self._window = self._nothing(), window

    def _nothing(self) -> npt.NDArray[np.int64]:
        return np.zeros(self._max_parallelism, np.int64)


def skews(subtasks: Iterable[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, Any]]:
    """By operator: its busiest key group, and how many times the mean that one gets. A key group has one subtask.

    Operators that have seen too few records are left out.
    """
    told: dict[str, list[Mapping[str, int]]] = {}
    for subtask in subtasks:
        for uid, sample in subtask.items():
            told.setdefault(uid, []).append(sample)
    found: dict[str, dict[str, Any]] = {}
    for uid, samples in told.items():
        newest = max(sample["window"] for sample in samples)
        current = [sample for sample in samples if sample["window"] >= newest - 1]
        records, groups = sum(sample["records"] for sample in current), samples[0]["key_groups"]
        if records >= ENOUGH * groups:
            busiest = max(current, key=lambda sample: sample["largest"])
            found[uid] = {"key_group": busiest["key_group"], "skew": round(busiest["largest"] * groups / records, 3)}
    return found

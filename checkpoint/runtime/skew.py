"""How evenly the records of a keyed operator spread over its key groups, from a sample of its batches.

Windows of a few minutes, cut by the wall clock, so that what the subtasks of an operator counted can be added up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

WINDOW_MS = 300_000
PAUSE_MS, LONGEST = 100, 128
"""A look at so many keys at most, and then none for so long: hashing all keys once more would be felt."""
ENOUGH = 30
"""Keys looked at a key group on average below which the largest one would tell of chance only."""


class KeyGroupSample:
    """One subtask's records by key group, in this window and the one before: all are counted, some looked at."""

    def __init__(self, max_parallelism: int, groups_of: Callable[[list[Any]], npt.NDArray[Any]],
                 now_ms: Callable[[], int]) -> None:
        self._max_parallelism, self._groups_of, self._now_ms = max_parallelism, groups_of, now_ms
        self._window, self._last_ms = 0, -PAUSE_MS
        self._records_before = self._records = 0
        self._before, self._looked_at = self._nothing(), self._nothing()

    def see(self, keys: list[Any]) -> None:
        """A batch of keys was processed. On the subtask's thread."""
        now = self._now_ms()
        if now // WINDOW_MS != self._window:
            self._roll(now // WINDOW_MS)
        self._records += len(keys)
        if keys and not 0 <= now - self._last_ms < PAUSE_MS:
            self._last_ms = now
            self._looked_at += np.bincount(self._groups_of(keys[:LONGEST]), minlength=self._max_parallelism)

    def told(self) -> dict[str, int]:
        """What `skews` needs of it. Any thread may ask; the numbers may be a batch behind."""
        counts = self._looked_at + self._before
        largest = int(counts.argmax())
        return {"records": self._records + self._records_before, "looked_at": int(counts.sum()), "key_group": largest,
                "largest": int(counts[largest]), "key_groups": self._max_parallelism, "window": self._window}

    def _roll(self, window: int) -> None:
        follows = window == self._window + 1
        self._before = self._looked_at if follows else self._nothing()
        self._records_before = self._records if follows else 0
        self._looked_at, self._records, self._window = self._nothing(), 0, window

    def _nothing(self) -> npt.NDArray[np.int64]:
        return np.zeros(self._max_parallelism, np.int64)


def skews(subtasks: Iterable[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, Any]]:
    """By operator: its busiest key group, and how many times the mean that one gets. A key group has one subtask.

    Operators of whose keys too few were looked at are left out.
    """
    told: dict[str, list[Mapping[str, int]]] = {}
    for subtask in subtasks:
        for uid, sample in subtask.items():
            told.setdefault(uid, []).append(sample)
    found: dict[str, dict[str, Any]] = {}
    for uid, samples in told.items():
        newest = max(sample["window"] for sample in samples)
        current = [sample for sample in samples if sample["window"] >= newest - 1 and sample["looked_at"]]
        groups = samples[0]["key_groups"]
        if sum(sample["looked_at"] for sample in current) >= ENOUGH * groups:
            busiest = max(current, key=_records_of_largest)
            mean = sum(sample["records"] for sample in current) / groups
            found[uid] = {"key_group": busiest["key_group"], "skew": round(_records_of_largest(busiest) / mean, 3)}
    return found


def _records_of_largest(sample: Mapping[str, int]) -> float:
    """About how many records the busiest key group of a subtask got."""
    return sample["records"] * sample["largest"] / sample["looked_at"]

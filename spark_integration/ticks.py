"""A stream of clock ticks: Spark runs no micro-batch without input, and timers on silent input need one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

TICKS = "holdfast_ticks"


class TickSource(DataSource):  # type: ignore[misc]
    """`format("holdfast_ticks").option("interval_ms", n)`: one row for each interval that has passed."""

    @classmethod
    def name(cls) -> str:
        return TICKS

    def schema(self) -> str:
        return "tick bigint"

    def streamReader(self, schema: Any) -> TickReader:
        return TickReader(int(self.options["interval_ms"]))


class TickReader(DataSourceStreamReader):  # type: ignore[misc]
    """Offsets count intervals since the epoch, so that a replayed batch has the same ticks."""

    def __init__(self, interval_ms: int) -> None:
        self._interval_ms = interval_ms

    def initialOffset(self) -> dict[str, int]:
        return {"tick": self._now() - 1}

    def latestOffset(self) -> dict[str, int]:
        return {"tick": self._now()}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [InputPartition(end["tick"])] if end["tick"] > start["tick"] else []

    def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
        yield (int(partition.value),)

    def commit(self, end: dict[str, int]) -> None:
        """Nothing is kept."""

    def stop(self) -> None:
        """Nothing is open."""

    def _now(self) -> int:
        return time.time_ns() // 1_000_000 // self._interval_ms

"""One piece of work, running count and sum per key with a row out per row in, for each way that Python has on Spark."""

from __future__ import annotations

from typing import Any

from checkpoint import KeyedProcessFunction
from statebackend import ValueStateDescriptor

OUTPUT = "k long, n long, s long"


class CountAndSum(KeyedProcessFunction):
    """Ours: one value per key, read and written for each row."""

    def open(self, ctx: Any) -> None:
        self.totals = ctx.state(ValueStateDescriptor("totals", tuple[int, int], default=(0, 0)))

    def process(self, row: Any, ctx: Any) -> Any:
        count, total = self.totals.value()
        count, total = count + 1, total + row["v"]
        self.totals.update((count, total))
        yield {"k": ctx.key, "n": count, "s": total}


def processor() -> Any:
    """Spark's transformWithState: one value per key, read and written once per key and batch, as it is fastest."""
    from pyspark.sql import Row
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor

    class CountAndSumProcessor(StatefulProcessor):  # type: ignore[misc]
        def init(self, handle: Any) -> None:
            self.totals = handle.getValueState("totals", "n long, s long")

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
            held = self.totals.get()
            count, total = (held[0], held[1]) if held is not None else (0, 0)
            results = []
            for row in rows:
                count, total = count + 1, total + row.v
                results.append(Row(k=key[0], n=count, s=total))
            self.totals.update((count, total))
            return iter(results)

        def close(self) -> None:
            return None

    return CountAndSumProcessor()


def in_pandas(key: Any, frames: Any, state: Any) -> Any:
    """Spark's applyInPandasWithState."""
    import pandas as pd

    count, total = state.get if state.exists else (0, 0)
    for frame in frames:
        values = frame["v"].cumsum() + total
        counts = range(count + 1, count + 1 + len(frame))
        yield pd.DataFrame({"k": key[0], "n": counts, "s": values})
        count, total = count + len(frame), int(values.iloc[-1])
    state.update((count, total))

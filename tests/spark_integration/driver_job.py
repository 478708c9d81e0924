"""A streaming query in a process of its own, which kills itself at a point given on the command line."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from checkpoint.dataflow.functions import KeyedProcessFunction
from spark_integration import spark_session, stateful
from statebackend import ValueStateDescriptor


class Count(KeyedProcessFunction):
    def open(self, ctx: Any) -> None:
        self.count = ctx.state(ValueStateDescriptor("count", int, default=0))

    def process(self, record: Any, ctx: Any) -> Any:
        self.count.update(self.count.value() + 1)
        yield {"user": ctx.key, "n": self.count.value()}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(folder: str, parallelism: int, when: str, at: int, delay: float = 0.0) -> None:
    root = Path(folder)
    spark = spark_session("local[2]", spark__local__dir=root / "local", spark__sql__warehouse__dir=root / "wh",
                          spark__ui__showConsoleProgress=False)
    spark.sparkContext.setLogLevel("OFF")
    (root / "out").mkdir(exist_ok=True)

    def sink(df: Any, batch: int) -> None:
        if when == "before" and batch == at:
            die()  # before any task of the batch has run
        rows = [row.asDict() for row in df.collect()]
        temporary = root / "out" / f".{batch}.tmp"
        temporary.write_text(json.dumps(rows))
        os.replace(temporary, root / "out" / f"{batch}.json")
        if when == "between" and batch == at:
            die()  # our epoch is published, Spark's commit is not written

    stream = spark.readStream.schema("user string, amount bigint").option("maxFilesPerTrigger", "1").parquet(
        str(root / "in"))
    query = stateful(stream, key="user", function=Count(), output="user string, n bigint", uid="count",
                     checkpoint=str(root / "state"), parallelism=parallelism).writeStream.foreachBatch(
        sink).option("checkpointLocation", str(root / "ck")).trigger(availableNow=True).start()
    if when == "after":
        while not (root / "ck" / "commits" / str(at)).exists():
            pass
        die()  # Spark has committed the batch, the next one is under way
    query.awaitTermination()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))

"""A streaming query in a process of its own, on the master it is told, with a fault that it brings about once.

    python cluster_job.py '{"master": ..., "folder": ..., "fault": ..., "runs": [[files, parallelism], ...], "conf": {...},
                            "checkpoint": ...}'

Each run reads the input there is by then: so many files of `later/` are moved to `in/` before it. What Spark tells
about the query goes to `told.txt`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from checkpoint.dataflow.functions import KeyedProcessFunction
from spark_integration import stateful
from statebackend import ValueStateDescriptor
from statebackend.errors import InvalidRequest


def executor_pid() -> int:
    """The JVM above this worker: its parent is PySpark's daemon, whose parent is the executor."""
    return int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])


class Count(KeyedProcessFunction):
    """Counts per user; at the amount 77 the fault happens, once."""

    def __init__(self, fault: str, folder: str) -> None:
        self.fault, self.folder = fault, folder

    def open(self, ctx: Any) -> None:
        self.count = ctx.state(ValueStateDescriptor("count", int, default=0))
        self.attempt = ctx.attempt

    def process(self, record: Any, ctx: Any) -> Any:
        self.count.update(self.count.value() + 1)
        if record["amount"] == 77:
            getattr(self, self.fault)()
        yield {"user": ctx.key, "n": self.count.value()}

    def nothing(self) -> None:
        """No fault."""

    def lose_executor(self) -> None:
        marker = Path(self.folder, "executor-killed")
        if not marker.exists():
            marker.touch()
            os.kill(executor_pid(), signal.SIGKILL)

    def be_slow(self) -> None:
        """The first attempt waits until a copy of it has acknowledged, and then goes on to do the same work."""
        Path(self.folder, f"attempt-{self.attempt}").touch()
        deadline = time.monotonic() + 120
        while self.attempt == 0 and time.monotonic() < deadline:
            if Path(self.folder, "attempt-1").exists():
                time.sleep(0.2)
                return
            time.sleep(0.02)


def session_of(spec: dict[str, Any]) -> Any:
    from pyspark.sql import SparkSession

    if spec["master"] == "connect":
        return SparkSession.builder.remote("local[2]").getOrCreate()
    builder = SparkSession.builder.master(spec["master"]).appName("cluster job")
    settings = {"spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1",
                "spark.ui.showConsoleProgress": "false", "spark.sql.warehouse.dir": f"{spec['folder']}/warehouse",
                **spec.get("conf", {})}
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def run(spark: Any, spec: dict[str, Any], parallelism: int | None) -> None:
    folder = Path(spec["folder"])
    stream = spark.readStream.schema("user string, amount bigint").option("maxFilesPerTrigger", "1").parquet(
        str(folder / "in"))
    out = stateful(stream, key="user", function=Count(spec["fault"], str(folder)), output="user string, n bigint",
                   uid="count", checkpoint=spec.get("checkpoint", str(folder / "state")), parallelism=parallelism)
    query = out.writeStream.format("parquet").option("path", str(folder / "out")).option(
        "checkpointLocation", str(folder / "ck")).trigger(availableNow=True).start()
    query.awaitTermination()
    with open(folder / "told.txt", "a") as told, redirect_stdout(told):
        out.explain(True)
        query.explain(True)
        print(query.recentProgress)


def start_asynchronously(spark: Any, spec: dict[str, Any]) -> str:
    """What is said to a query with asynchronous progress tracking; it must not begin."""
    stream = spark.readStream.schema("user string, amount bigint").parquet(f"{spec['folder']}/in")
    out = stateful(stream, key="user", function=Count("nothing", ""), output="user string, n bigint", uid="asynchronous",
                   checkpoint=f"{spec['folder']}/state", parallelism=2)
    try:
        out.selectExpr("*").writeStream.format("noop").option("asyncProgressTrackingEnabled", True).option(
            "checkpointLocation", f"{spec['folder']}/ck-asynchronous").start()
    except InvalidRequest as error:
        return str(error)
    return f"started: {len(spark.streams.active)}"


def main(spec: dict[str, Any]) -> None:
    folder = Path(spec["folder"])
    spark = session_of(spec)
    for files, parallelism in spec["runs"]:
        for path in sorted((folder / "later").iterdir())[:files]:
            path.rename(folder / "in" / path.name)
        run(spark, spec, parallelism)
    if spec["master"] == "connect":
        from spark_integration import register, savepoint

        savepoint(str(folder / "state"), str(folder / "sp"), checkpoint_location=str(folder / "ck"))
        register(spark)
        stored = spark.read.format("holdfast").option("operator", "count").option("state", "count").load(
            str(folder / "sp"))
        (folder / "refused.txt").write_text(start_asynchronously(spark, spec))
        (folder / "stored.json").write_text(json.dumps({row.key: row.value for row in stored.collect()}))
    spark.stop()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

"""A worker process without a JVM, for tests that kill it: does the attempts that it is told, and says what it gave.

Reads lines of JSON: {"batch", "index", "parallelism", "rows", "run"}; answers each with one. Storage counts as remote,
so that copies on the host are used, and state is small, so that new bases are due all the time.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
import uuid
from typing import Any

import numpy as np
import pyarrow as pa

from checkpoint.dataflow.functions import KeyedProcessFunction
from spark_integration import bases, host_files
from spark_integration import task as tasks
from spark_integration.epochs import TaskRun
from spark_integration.operators import Columns, FunctionOperator, OutputSchema
from spark_integration.taskinfo import TaskInfo
from statebackend import ValueStateDescriptor
from statebackend.keygroups import key_groups_of
from statebackend.types import state_type

OUT = OutputSchema(pa.schema([("user", pa.string()), ("n", pa.int64())]))


class Count(KeyedProcessFunction):
    def open(self, ctx: Any) -> None:
        self.count = ctx.state(ValueStateDescriptor("count", int, default=0))

    def process(self, record: Any, ctx: Any) -> Any:
        self.count.update(self.count.value() + 1)
        yield {"user": ctx.key, "n": self.count.value()}


def plan(checkpoint: str, backend: str, parallelism: int) -> tasks.TaskPlan:
    columns = Columns(("user",), ("user",))
    return tasks.TaskPlan(
        uid="count", checkpoint=checkpoint, storage_options={}, unfenced=False, parallelism=parallelism,
        max_parallelism=128, key_type=state_type(str), columns=columns, output=OUT,
        operator=FunctionOperator(Count(), columns), function_name="Count", backend=backend,
        backend_options={"log_floor_bytes": 0} if backend == "rocksdb" else {}, delay_ms=0, retain=3,
        host_bytes=64 << 20)


def attempt(checkpoint: str, backend: str, told: dict[str, Any]) -> list[list[Any]]:
    parallelism = told["parallelism"]
    keys = pa.array(told["rows"], pa.string())
    groups = key_groups_of(keys, 128).astype(np.int64)
    table = pa.table({"user": keys, tasks.ROUTE: groups, tasks.BATCH_TIME: [str(told["batch"])] * len(keys)})
    mine = table.filter(pa.array(groups * parallelism // 128 == told["index"]))
    info = TaskInfo(TaskRun("query", told["run"], told["batch"]), told["index"], 0, uuid.uuid4().hex)
    tasks.task_info = lambda _run: info  # type: ignore[assignment]
    stream = tasks.StatefulTask(plan(checkpoint, backend, parallelism))(iter(mine.to_batches()))
    return [[row["user"], row["n"]] for output in stream for row in output.to_pylist()]


class _Slow:
    """A pending base that takes its time, so that a kill hits it."""

    def __init__(self, pending: Any, seconds: float) -> None:
        self._pending, self._seconds = pending, seconds

    def run(self) -> None:
        self._pending.run()  # its files are stored, and nobody names them yet
        time.sleep(self._seconds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pending, name)


def stalling(real: Any, at: int) -> Any:
    """A way to read a copy that never ends the `at`th time."""
    calls = itertools.count(1)

    def read(self: Any, *arguments: Any) -> Any:
        if next(calls) == at:
            print(json.dumps({"stalled": at}), flush=True)
            time.sleep(600)
        return real(self, *arguments)

    return read


def main() -> None:
    checkpoint, backend, slow, stall = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
    host_files.WarmFiles.fetch = stalling(host_files.WarmFiles.fetch, stall)  # type: ignore[method-assign]
    host_files.WarmFiles.open = stalling(host_files.WarmFiles.open, stall)  # type: ignore[method-assign]
    tasks.linkable = lambda _path, _folder: False  # type: ignore[attr-defined]
    making = bases.Making.__init__

    def slowly(self: Any, pending: Any, files: Any, epoch: int) -> None:
        making(self, _Slow(pending, slow) if slow else pending, files, epoch)
        print(json.dumps({"base": epoch}), flush=True)

    bases.Making.__init__ = slowly  # type: ignore[method-assign]
    for line in sys.stdin:
        print(json.dumps({"rows": attempt(checkpoint, backend, json.loads(line))}), flush=True)


if __name__ == "__main__":
    main()

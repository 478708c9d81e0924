"""What Spark tells a Python task about the query it serves. The property names are Spark's internals: a test pins them."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass

from spark_integration.epochs import TaskRun
from spark_integration.guard import REFUSED
from statebackend.errors import InvalidRequest

BATCH_ID = "streaming.sql.batchId"
QUERY_ID = "sql.streaming.queryId"
RUN_ID = "spark.jobGroup.id"
CONTINUOUS = "__is_continuous_processing"


@dataclass(frozen=True)
class TaskInfo:
    """The identity of one attempt of one task. `attempt` is unique over all attempts, runs and machines."""

    run: TaskRun
    partition: int
    attempt_number: int
    attempt: str
    cores: int = 1


def task_info(batch_run: TaskRun | None = None) -> TaskInfo:
    """The task that this thread runs; `batch_run` stands in for Spark's properties where a batch job names its epoch."""
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is None:
        raise InvalidRequest("this runs only inside a Spark task")
    run = batch_run or _streaming_run(context.getLocalProperty)
    return TaskInfo(run, context.partitionId(), context.attemptNumber(),
                    f"{context.taskAttemptId():08d}-{uuid.uuid4().hex[:12]}", max(1, os.cpu_count() or 1))


def _streaming_run(local_property: object) -> TaskRun:
    read = local_property
    assert callable(read)
    if read(CONTINUOUS) == "true":
        raise InvalidRequest("continuous processing has no micro-batches to commit with",
                             hint="use trigger(processingTime=...) or trigger(availableNow=True)")
    if read(REFUSED) is not None:
        raise InvalidRequest(str(read(REFUSED)))
    batch, query, run = read(BATCH_ID), read(QUERY_ID), read(RUN_ID)
    if batch is None or query is None or run is None:
        raise InvalidRequest("this task belongs to no streaming micro-batch",
                             hint="a batch DataFrame needs epoch=; inside foreachBatch, actions must run on the thread "
                                  "that called the function")
    return TaskRun(str(query), str(run), int(batch))

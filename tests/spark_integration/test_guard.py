"""Commands of a Spark Connect client: only a query of ours with asynchronous progress tracking is refused."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from spark_integration.guard import guarded
from statebackend.errors import InvalidRequest


def start_of(function: Any, **options: str) -> Any:
    """The command that starts a query with a Python function in its plan."""
    import pyspark.sql.connect.proto as proto
    from pyspark import cloudpickle

    command = proto.Command()
    start = command.write_stream_operation_start
    start.input.map_partitions.func.python_udf.command = cloudpickle.dumps(function)
    start.options.update(options)
    return command


def test_only_our_operator_with_asynchronous_progress_is_refused() -> None:
    pytest.importorskip("grpc")
    import pyspark.sql.connect.proto as proto
    from pyspark import cloudpickle

    from spark_integration.task import StatefulTask

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    task = StatefulTask(None)  # type: ignore[arg-type]
    sent: list[Any] = []
    execute = guarded(lambda command, observations=None: sent.append(command))
    others = [start_of(lambda batches: task(batches)), start_of(len, asyncProgressTrackingEnabled="true"), proto.Command(),
              start_of(lambda batches: task(batches), asyncProgressTrackingEnabled="false")]
    for command in others:
        execute(command, None)
    assert sent == others
    with pytest.raises(InvalidRequest, match="asynchronous progress tracking"):
        execute(start_of(lambda batches: task(batches), asyncprogresstrackingenabled="TRUE"), None)
    assert sent == others

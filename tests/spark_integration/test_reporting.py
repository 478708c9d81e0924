"""A Spark query is a job of the service: its epochs are checkpoints, and it takes commands; real query, real service."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import savepoint as toolkit
from checkpoint.dataflow.functions import KeyedProcessFunction
from spark_integration import stateful, watch
from spark_integration.reporting import ReportedQuery
from statebackend import ValueStateDescriptor
from statebackend.errors import InvalidRequest

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]


class Count(KeyedProcessFunction):
    def open(self, ctx: Any) -> None:
        self.count = ctx.state(ValueStateDescriptor("count", int, default=0))

    def process(self, record: Any, ctx: Any) -> Any:
        self.count.update(self.count.value() + 1)
        yield {"user": ctx.key, "n": self.count.value()}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Any]:
    place = Path(__file__).parents[1] / "api" / "service_process.py"
    spec = importlib.util.spec_from_file_location("service_process", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["service_process"] = module
    spec.loader.exec_module(module)
    folder = tmp_path / "service"
    folder.mkdir()
    started = module.ServiceProcess(folder).start()
    yield started
    started.stop()


def located(operation: dict[str, Any]) -> str:
    assert "location" in operation, operation
    return str(operation["location"])


def start(df: Any, tmp_path: Path, name: str) -> Any:
    return df.writeStream.queryName(name).foreachBatch(lambda rows, _batch: rows.collect()).option(
        "checkpointLocation", str(tmp_path / name)).trigger(processingTime="100 milliseconds").start()


def test_a_query_is_shown_saved_stopped_and_canceled_through_the_service(
        spark: Any, service: Any, feed: Callable[..., Any], tmp_path: Path) -> None:
    source, state = feed("user string"), str(tmp_path / "state")
    counts = stateful(source.stream(), key="user", function=Count(), output="user string, n bigint", uid="count",
                      checkpoint=state, parallelism=2)
    source.add(user=["a", "b", "a"])
    query = start(counts, tmp_path, "clicks")
    listener = watch(spark, state, query=query, service=service.url)
    try:
        job = str(query.id).replace("-", "")
        history = service.eventually(lambda: service.call("GET", f"/jobs/{job}/checkpoints")["history"], "an epoch is shown",
                                     seconds=180)
        assert history[0]["status"] == "COMPLETED"
        assert history[0]["state_size"] > 0
        assert history[0]["num_subtasks"] == 2
        details = service.call("GET", f"/jobs/{job}")
        assert (details["name"], details["state"], details["runtime"]) == ("clicks", "RUNNING", "spark")
        assert [vertex["uids"] for vertex in details["vertices"]] == [["count"]]

        trigger = service.call("POST", f"/jobs/{job}/checkpoints", {})["request-id"]
        refused = service.finished(f"/jobs/{job}/checkpoints/{trigger}")
        assert "does not take the command checkpoint" in refused["failure-cause"]["stack-trace"]

        trigger = service.call("POST", f"/jobs/{job}/savepoints", {"target-directory": "saved"})["request-id"]
        location = located(service.finished(f"/jobs/{job}/savepoints/{trigger}"))
        with toolkit.open(location) as opened:
            assert opened.lookup("count", "count", "a") == 2

        source.add(user=["a"])
        service.eventually(lambda: len(service.call("GET", f"/jobs/{job}/checkpoints")["history"]) > len(history),
                           "the next epoch is shown", seconds=180)
        trigger = service.call("POST", f"/jobs/{job}/stop", {"targetDirectory": "stopped"})["request-id"]
        location = located(service.finished(f"/jobs/{job}/savepoints/{trigger}"))
        with toolkit.open(location) as opened:
            assert opened.lookup("count", "count", "a") == 3
        assert not query.isActive
        service.eventually(lambda: service.call("GET", f"/jobs/{job}")["state"] == "FINISHED", "it has finished")

        spark.conf.set("spark.holdfast.service", service.url)
        again = start(counts, tmp_path, "clicks")
        other = watch(spark, state, query=again)
        spark.streams.removeListener(other)
        service.eventually(lambda: service.call("GET", f"/jobs/{job}")["state"] == "RUNNING", "it runs again")
        service.call("PATCH", f"/jobs/{job}?mode=cancel", {})
        service.eventually(lambda: service.call("GET", f"/jobs/{job}")["state"] == "CANCELED", "it is canceled")
        assert not again.isActive
    finally:
        spark.conf.unset("spark.holdfast.service")
        spark.streams.removeListener(listener)
        for active in spark.streams.active:
            active.stop()


class StoppedQuery:
    """A query that failed."""

    id, name, isActive, lastProgress = "00000000-0000-0000-0000-000000000001", None, False, None

    def exception(self) -> Exception:
        return ValueError("the sink is gone")


def test_a_failed_query_is_a_failed_job_and_tells_why_once(tmp_path: Path) -> None:
    query = ReportedQuery(StoppedQuery(), tmp_path / "state")
    first, second = query.report(), query.report()
    assert (first["state"], second["state"]) == ("FAILED", "FAILED")
    assert ["the sink is gone" in one["message"] for one in first["exceptions"]] == [True]
    assert second["exceptions"] == []


@pytest.mark.parametrize(("kind", "arguments", "named"), [
    ("stop", {"target": "x", "drain": True}, "drained"), ("savepoint", {}, "folder"), ("rescale", {}, "rescale")])
def test_what_a_query_can_not_do_is_refused_and_said(tmp_path: Path, kind: str, arguments: dict[str, Any],
                                                     named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        ReportedQuery(StoppedQuery(), tmp_path / "state").execute(kind, arguments)

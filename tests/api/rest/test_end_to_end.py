"""A real job, started, watched, saved, stopped and rescaled over HTTP."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.xdist_group("service")


def test_a_job_is_started_saved_queried_and_rescaled_over_http(live_service: Any) -> None:
    service = live_service
    job = service.start_job()
    details = service.call("GET", f"/jobs/{job}")
    assert (details["state"], details["name"]) == ("RUNNING", "clicks")
    assert {uid for vertex in details["vertices"] for uid in vertex["uids"]} == {"clicks", "count", "out"}

    trigger = service.call("POST", f"/v1/jobs/{job}/savepoints", {"target-directory": "savepoints"})["request-id"]
    location = service.finished(f"/v1/jobs/{job}/savepoints/{trigger}")["location"]
    snapshot = service.call("GET", f"/api/snapshot?path={location}")
    (count,) = [operator for operator in snapshot["operators"] if operator["uid"] == "count"]
    assert [state["entries"] for state in count["states"] if state["name"] == "total"] == [97]
    page = service.call("GET", f"/api/snapshot/entries?path={location}&operator=count&state=total&key=user-5")
    assert page["rows"][0]["key"] == "user-5"
    total = service.call("POST", "/api/query", {"path": location, "sql": "select count(*) from count.total"})["rows"]
    assert total == [[97]]
    assert service.call("GET", f"/api/jobs/{job}/state?operator=count&state=total&key=user-5")["value"] > 0

    trigger = service.call("PATCH", f"/jobs/{job}/rescaling?parallelism=3")["request-id"]
    grown = service.finished(f"/jobs/{job}/rescaling/{trigger}")
    service.eventually(lambda: service.call("GET", f"/jobs/{grown['jid']}")["state"] == "RUNNING", "the new job runs")
    assert service.call("GET", f"/jobs/{job}")["state"] == "FINISHED"
    vertices = service.eventually(lambda: service.call("GET", f"/jobs/{grown['jid']}")["vertices"], "it tells its graph")
    assert max(vertex["parallelism"] for vertex in vertices) == 3
    service.call("PATCH", f"/jobs/{grown['jid']}?mode=cancel", {})
    service.eventually(lambda: service.call("GET", f"/jobs/{grown['jid']}")["state"] == "CANCELED", "it is canceled")


def test_restore_is_checked_before_anything_starts(live_service: Any) -> None:
    service = live_service
    job = service.start_job()
    trigger = service.call("POST", f"/jobs/{job}/stop", {"targetDirectory": "stopped"})["request-id"]
    location = service.finished(f"/jobs/{job}/savepoints/{trigger}")["location"]
    report = service.call("POST", "/jobs/check", {"job": "clicks.py:flow", "restore": location, "parallelism": 4})
    assert report["ok"]
    assert {line["operator"] for line in report["lines"]} >= {"count", "clicks"}


A_TEST_RUN = """
import sys, time
from pathlib import Path
from service_process import ServiceProcess
folder = Path(sys.argv[1])
service = ServiceProcess(folder).start()
job = service.start_job()
print(service.process.pid, service.call("GET", f"/jobs/{job}")["pid"], flush=True)
time.sleep(600)
"""


def test_a_test_run_that_is_killed_leaves_neither_its_service_nor_its_jobs_behind(tmp_path: Path) -> None:
    folder = Path(__file__).resolve().parents[1]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    with subprocess.Popen([sys.executable, "-c", A_TEST_RUN, str(tmp_path)], stdout=subprocess.PIPE, env=environment) as run:
        assert run.stdout is not None
        service, job = map(int, run.stdout.readline().split())
        assert is_alive(service)
        assert is_alive(job)
        run.kill()
    deadline = time.monotonic() + 60
    while is_alive(service) or is_alive(job):
        assert time.monotonic() < deadline, "they go on"
        time.sleep(0.1)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be collected does not."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False

"""A service that is killed under load again and again: no job, trigger or operation is lost or done twice."""

from __future__ import annotations

import contextlib
import http.client
import random
import threading
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from api.rest.instance import InstanceLock
from api.rest.registry import new_id
from api.rest.reporter import Reporter
from statebackend.errors import Conflict

pytestmark = [pytest.mark.xdist_group("service"), pytest.mark.crash]
REPORTING, READERS = 10, 4


class CountingJob:
    """A job that reports a checkpoint with every beat, and counts how often it does what it is asked."""

    def __init__(self) -> None:
        self.job_id = new_id()
        self.state, self.reported = "RUNNING", 0
        self.done: Counter[str] = Counter()
        self.reporter: Reporter | None = None

    def registration(self) -> dict[str, Any]:
        return {"name": "counting"}

    def report(self) -> dict[str, Any]:
        self.reported += 1
        return {"state": self.state, "checkpoints": [{"id": self.reported, "status": "COMPLETED"}]}

    def execute(self, kind: str, arguments: dict[str, Any]) -> dict[str, Any]:
        self.done[arguments["target"]] += 1
        return {"location": arguments["target"]}


class Load:
    """Reads without end; that the service is not there now and then is the point."""

    def __init__(self, service: Any, jobs: list[CountingJob]) -> None:
        self._stop, self._url, self._jobs = threading.Event(), service.url, jobs
        self.answers: Counter[int] = Counter()
        self._threads = [threading.Thread(target=self._read, daemon=True) for _ in range(READERS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _read(self) -> None:
        while not self._stop.wait(0.01):
            job = random.choice(self._jobs).job_id
            path = random.choice(["/jobs/overview", f"/jobs/{job}/checkpoints", f"/jobs/{job}", "/api/operations"])
            with contextlib.suppress(OSError, http.client.HTTPException), \
                    urllib.request.urlopen(self._url + path, timeout=30) as answer:
                answer.read()
                self.answers[answer.status] += 1


def surely(service: Any, method: str, path: str, body: Any) -> Any:
    """Ask until there is an answer, as a client with a trigger id of its own does."""
    return service.eventually(lambda: service.call(method, path, body) or True, f"{method} {path} is answered")


def one_round(service: Any, number: int, job: str, counting: list[CountingJob], source: str) -> dict[str, Any]:
    """Ask for everything, kill the service somewhere in between, ask again, and wait until all of it is done."""
    savepoint, copy, launch = new_id(), new_id(), new_id()
    triggers = {new_id(): one for one in counting}
    asked = [("POST", f"/jobs/{job}/savepoints", {"target-directory": "kept", "triggerId": savepoint}),
             ("POST", "/api/operations", {"kind": "copy", "source": source, "destination": f"copies/{number}",
                                          "triggerId": copy}),
             *(("POST", f"/jobs/{one.job_id}/savepoints", {"target-directory": f"counted/{trigger}", "triggerId": trigger})
               for trigger, one in triggers.items())]
    if number % 5 == 0:  # a process takes long to start
        asked.append(("POST", "/jobs", {"job": "clicks.py:flow", "backend": "filesystem", "triggerId": launch}))
    random.shuffle(asked)
    moment = threading.Timer(random.uniform(0.0, 0.4), service.kill)
    moment.start()
    for request in asked:
        with contextlib.suppress(OSError, AssertionError, http.client.HTTPException):
            service.call(*request)
    moment.join()
    service.start()
    for request in asked:
        surely(service, *request)
    location = service.finished(f"/jobs/{job}/savepoints/{savepoint}")["location"]
    assert (Path(location) / "_metadata").exists()
    done = service.eventually(lambda: (found := service.call("GET", f"/api/operations/{copy}"))["ended"] and found,
                              "the copy ends")
    assert done["status"] == "COMPLETED", done
    for trigger, one in triggers.items():
        assert "location" in service.finished(f"/jobs/{one.job_id}/savepoints/{trigger}")
    return {"launched": [request[2]["triggerId"] for request in asked if request[1] == "/jobs"]}


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.soak)])
def test_a_killed_service_loses_nothing_and_does_nothing_twice(live_service: Any, kills: int) -> None:
    service = live_service
    job = service.start_job()
    trigger = service.call("POST", f"/jobs/{job}/savepoints", {"target-directory": "source"})["request-id"]
    source = service.finished(f"/jobs/{job}/savepoints/{trigger}")["location"]
    counting = [CountingJob() for _ in range(REPORTING)]
    for one in counting:
        one.reporter = Reporter(service.url, one, every_seconds=0.5).start()
        service.eventually(lambda one=one: service.call("GET", f"/jobs/{one.job_id}"), "the job registers")
    launched: list[str] = []
    with Load(service, counting) as load:
        for number in range(kills):
            launched += one_round(service, number, job, counting, source)["launched"]
    assert load.answers[200] > 0
    assert set(load.answers) == {200}
    assert len(list((service.root / "kept").iterdir())) == kills
    for one in counting:
        assert len(one.done) == kills
        assert set(one.done.values()) == {1}
        close(service, one)
    for started in [*launched, job]:
        service.eventually(lambda started=started: service.call("GET", f"/jobs/{started}")["state"] == "RUNNING",
                           "the job runs")
        assert (service.folder / f"started-{started}").read_text() == "once\n"
        service.call("PATCH", f"/jobs/{started}?mode=cancel", {})
        service.eventually(lambda started=started: service.call("GET", f"/jobs/{started}")["state"] == "CANCELED",
                           "it is canceled")


def close(service: Any, job: CountingJob) -> None:
    """End a job; all that it reported is in its history, and it is not shown as lost."""
    assert job.reporter is not None
    job.state = "FINISHED"
    job.reporter.close()
    history = service.call("GET", f"/jobs/{job.job_id}/checkpoints")["history"]
    assert [record["id"] for record in history] == list(range(job.reported, max(0, job.reported - 100), -1))
    assert service.call("GET", f"/jobs/{job.job_id}")["state"] == "FINISHED"


@pytest.mark.parametrize("point", [pytest.param("launch recorded", marks=pytest.mark.soak), "process started"])
def test_a_job_is_started_once_when_the_service_dies_while_it_starts_it(live_service: Any, point: str) -> None:
    service, job = live_service, new_id()
    service.kill()
    service.start(die_at=point)
    with pytest.raises((OSError, http.client.HTTPException)):
        service.call("POST", "/jobs", {"job": "clicks.py:flow", "backend": "filesystem", "triggerId": job})
    service.process.wait(30)
    service.start()
    service.eventually(lambda: service.call("GET", f"/jobs/{job}")["state"] == "RUNNING", "the job runs")
    assert (service.folder / f"started-{job}").read_text() == "once\n"
    service.call("PATCH", f"/jobs/{job}?mode=cancel", {})
    service.eventually(lambda: service.call("GET", f"/jobs/{job}")["state"] == "CANCELED", "it is canceled")


def test_a_second_service_on_the_same_database_is_refused(tmp_path: Path) -> None:
    first, second = (InstanceLock(tmp_path / "service.lock", patience=0.1) for _ in range(2))
    first.take()
    with pytest.raises(Conflict, match="another service"):
        second.take()
    first.release()
    second.take()
    second.release()

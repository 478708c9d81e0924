"""Jobs that the service starts: what is checked before, and a rescaling by its trigger id. No process is started here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from api.rest.app import create_app
from api.rest.launcher import Launcher
from api.rest.settings import ServiceSettings

JOB, TRIGGER = "a" * 32, "b" * 32
FLOW = """
from checkpoint import CollectionSource, CollectSink, Dataflow
flow = Dataflow("clicks")
flow.source(CollectionSource([1]), uid="clicks").sink(CollectSink(), uid="out")
"""


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """The jobs that would run as processes, with their commands."""
    found: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(Launcher, "_spawn", lambda _self, job_id, command, _folder: found.append((job_id, command)))
    return found


@pytest.fixture
def starting(settings: ServiceSettings, tmp_path: Path, spawned: list[Any]) -> Iterator[TestClient]:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "clicks.py").write_text(FLOW)
    app = create_app(replace(settings, jobs_dirs=(tmp_path / "jobs",)))
    with TestClient(app, base_url="http://127.0.0.1:8081") as client:
        yield client


@pytest.fixture
def started(starting: TestClient) -> TestClient:
    """A service whose job JOB runs."""
    assert starting.post("/jobs", json={"job": "clicks.py:flow", "triggerId": JOB}).json() == {"jid": JOB}
    assert starting.put(f"/jobs/{JOB}/registration", json={"name": "clicks"}).status_code == 200
    return starting


def commands(client: TestClient) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.post(f"/jobs/{JOB}/heartbeat", json={"state": "RUNNING"}).json()["commands"]
    return found


@pytest.mark.parametrize("restore", ["nothing", "checkpoints/chk-1"])
def test_a_check_against_a_savepoint_that_is_not_there_is_not_found_and_named(
        starting: TestClient, spawned: list[Any], restore: str) -> None:
    answer = starting.post("/jobs/check", json={"job": "clicks.py:flow", "restore": restore})
    assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json")
    assert restore in answer.json()["detail"]
    assert spawned == []
    assert starting.get("/jobs").json() == {"jobs": []}


@pytest.mark.parametrize("restore", [None, "latest"])
def test_a_check_needs_a_savepoint_that_is_named(starting: TestClient, restore: str | None) -> None:
    answer = starting.post("/jobs/check", json={"job": "clicks.py:flow", "restore": restore})
    assert (answer.status_code, "restore" in answer.text) == (400, True)


def test_a_rescaling_by_the_same_trigger_id_again_is_the_same_one(started: TestClient) -> None:
    for _ in range(2):
        answer = started.patch(f"/jobs/{JOB}/rescaling", params={"parallelism": 3, "triggerId": TRIGGER})
        assert (answer.status_code, answer.json()) == (202, {"request-id": TRIGGER})
        assert answer.headers["location"] == f"/jobs/{JOB}/rescaling/{TRIGGER}"
        assert int(answer.headers["retry-after"]) > 0
    assert [command["request-id"] for command in commands(started)] == [TRIGGER]
    other = started.patch(f"/jobs/{JOB}/rescaling", params={"parallelism": 4, "triggerId": TRIGGER})
    assert (other.status_code, TRIGGER in other.text) == (409, True)
    assert started.patch(f"/jobs/{JOB}/rescaling", params={"parallelism": 3, "triggerId": "no"}).status_code == 400
    assert started.get(f"/jobs/{JOB}/rescaling/{TRIGGER}").json() == {"status": {"id": "IN_PROGRESS"}, "operation": None}
    assert started.get(f"/jobs/{JOB}/rescaling/{'c' * 32}").status_code == 404


def test_the_job_that_goes_on_after_a_rescaling_has_the_trigger_id_and_starts_once(
        started: TestClient, spawned: list[tuple[str, list[str]]]) -> None:
    started.patch(f"/jobs/{JOB}/rescaling", params={"parallelism": 3, "triggerId": TRIGGER})
    for _ in range(2):
        answer = started.post(f"/jobs/{JOB}/commands/{TRIGGER}/result", json={"location": "savepoints/sp"})
        assert answer.status_code == 200
    assert [job_id for job_id, _ in spawned] == [JOB, TRIGGER]
    command = spawned[1][1]
    assert command[command.index("--parallelism") + 1] == "3"
    assert command[command.index("--restore") + 1].endswith("/root/savepoints/sp")
    found = started.get(f"/jobs/{JOB}/rescaling/{TRIGGER}").json()
    assert (found["status"]["id"], found["operation"]["jid"]) == ("COMPLETED", TRIGGER)


def test_a_job_that_the_service_did_not_start_is_not_rescaled(client: TestClient, job: str) -> None:
    answer = client.patch(f"/jobs/{job}/rescaling", params={"parallelism": 3, "triggerId": TRIGGER})
    assert (answer.status_code, "--parallelism" in answer.text) == (409, True)
    assert client.get(f"/jobs/{job}/rescaling/{TRIGGER}").status_code == 404

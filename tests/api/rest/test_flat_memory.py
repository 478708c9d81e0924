"""What a service holds does not grow with how long it runs: rows, objects in memory, caches, waiting reports."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

from api.rest.app import create_app
from api.rest.records import new_id
from api.rest.settings import ServiceSettings

JOBS, HISTORY, KEPT, ROUNDS = 3, 10, 20, 105
TABLES = ("jobs", "checkpoints", "commands", "operations", "exceptions", "launches")


@pytest.fixture
def client(settings: ServiceSettings) -> Iterator[TestClient]:
    bounded = replace(settings, history=HISTORY, kept_jobs=KEPT, kept_records=KEPT)
    with TestClient(create_app(bounded), base_url="http://127.0.0.1:8081") as opened:
        yield opened


def load(client: Any, jobs: list[str], rounds: int, first: int) -> None:
    """Reports, triggers, operations and jobs that come and go; every kind of read."""
    for number in range(first, first + rounds):
        for job in jobs:
            body = {"state": "RUNNING", "checkpoints": [{"id": number, "status": "COMPLETED"}],
                    "exceptions": [{"timestamp": number, "message": f"failure {number}"}], "metrics": {"uptime": number},
                    "operators": {"count": {"state_bytes": number}}}
            for command in client.post(f"/jobs/{job}/heartbeat", json=body).json()["commands"]:
                client.post(f"/jobs/{job}/commands/{command['request-id']}/result", json={"checkpoint_id": number})
            client.post(f"/jobs/{job}/checkpoints", json={})
            for path in (f"/jobs/{job}", f"/jobs/{job}/checkpoints", f"/jobs/{job}/checkpoints/details/{number}"):
                assert client.get(path).status_code == 200
        passing = new_id()
        client.put(f"/jobs/{passing}/registration", json={"name": f"passing-{number}"})
        client.post(f"/jobs/{passing}/heartbeat", json={"state": "RUNNING"})
        client.get(f"/jobs/{passing}/checkpoints")
        client.post(f"/jobs/{passing}/heartbeat", json={"state": "FINISHED"})
        client.app.state.service.registry.add_operation("verify", {"source": str(number)}, passing)
        client.app.state.service.registry.update_operation(passing, "COMPLETED", 1.0, {})
        for path in ("/jobs/overview", "/api/operations", "/metrics", f"/nothing/{passing}", f"/jobs/{new_id()}"):
            client.get(path)


def held(client: Any) -> dict[str, int]:
    """Rows by table, and what is in memory, after the house was kept."""
    service = client.app.state.service
    service._pruned = 0.0
    service.keep_house()
    registry = service.registry
    rows = {table: registry.database.rows(f"select count(*) from {table}")[0][0] for table in TABLES}
    series = sum(len(metric.samples) for metric in client.app.state.metrics._collectors.collect()
                 if metric.name.startswith("holdfast"))
    return {**rows, "jobs in memory": len(registry._jobs), "versions": len(registry._versions),
            "asked": len(registry._asked), "cached": len(service._cache), "waiting": len(service.beats._waiting),
            "series": series,
            "canceled": len(service.operations._canceled), "processes": len(service.launcher._processes)}


def test_rows_and_objects_stop_growing(client: Any) -> None:
    jobs = [new_id() for _ in range(JOBS)]
    for job in jobs:
        client.put(f"/jobs/{job}/registration", json={"name": "staying"})
    load(client, jobs, ROUNDS, first=1)
    before = held(client)
    gc.collect()
    objects = Counter(type(one).__name__ for one in gc.get_objects())
    load(client, jobs, ROUNDS, first=ROUNDS + 1)
    after = held(client)
    assert after == before
    assert (after["checkpoints"], after["jobs"]) == (JOBS * HISTORY, JOBS + KEPT)
    assert after["exceptions"] == JOBS * 100
    gc.collect()
    more = Counter(type(one).__name__ for one in gc.get_objects()) - objects
    del more["ReferenceType"]  # sqlite3 keeps up to 200 weak references to cursors for each connection
    grown = {name: count for name, count in more.items() if count > ROUNDS // 2}
    assert not grown, "objects of these kinds are kept, one or more a round"

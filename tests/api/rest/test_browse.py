"""Our own endpoints on a savepoint: entity tags, what is refused before it begins, SQL that looks elsewhere, links."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from starlette.testclient import TestClient

import savepoint
from api.rest.app import create_app
from api.rest.settings import ServiceSettings
from statebackend import ValueStateDescriptor

JOB = "0123456789abcdef0123456789abcdef"
TRIGGER = "a" * 32


@pytest.fixture
def saved(client: Any, tmp_path: Path) -> str:
    """A savepoint below the root of the client's service."""
    with savepoint.SavepointWriter(tmp_path / "root" / "sp") as writer:
        rows = pa.table({"key": list(range(250)), "value": [number * 2 for number in range(250)]})
        writer.keyed("count", ValueStateDescriptor("total", int), rows, key_type=int)
    return "sp"


@pytest.mark.parametrize("named", ["{}", "W/{}", '"other", {}', "*"])
def test_a_snapshot_that_is_known_is_not_sent_again(client: Any, saved: str, named: str) -> None:
    tag = client.get("/api/snapshot", params={"path": saved}).headers["etag"]
    answer = client.get("/api/snapshot", params={"path": saved}, headers={"if-none-match": named.format(tag)})
    assert (answer.status_code, answer.content, answer.headers["etag"]) == (304, b"", tag)
    assert client.get("/api/snapshot", params={"path": saved}, headers={"if-none-match": '"other"'}).status_code == 200


def test_pages_hold_every_entry_once(client: Any, saved: str) -> None:
    seen: list[int] = []
    cursor: str | None = None
    while True:
        page = client.get("/api/snapshot/entries", params={"path": saved, "operator": "count", "state": "total", "limit": 7}
                          | ({"cursor": cursor} if cursor else {})).json()
        seen += [row["key"] for row in page["rows"]]
        if (cursor := page["next"]) is None:
            break
    assert sorted(seen) == list(range(250))


@pytest.mark.parametrize(("body", "status", "named"), [
    ({"kind": "copy", "source": "nothing", "destination": "new"}, 404, "checkpoint or savepoint"),
    ({"kind": "copy", "source": "sp", "destination": "sp"}, 409, "already"),
    ({"kind": "edit", "source": "sp", "destination": "new"}, 400, "changes"),
    ({"kind": "dispose", "source": "."}, 404, "checkpoint or savepoint"),
    ({"kind": "verify", "source": "/etc"}, 404, "roots"),
])
def test_what_can_not_succeed_is_refused_before_it_begins(client: Any, saved: str, body: dict[str, Any], status: int,
                                                          named: str) -> None:
    answer = client.post("/api/operations", json=body)
    assert (answer.status_code, named in answer.json()["detail"]) == (status, True), answer.text
    assert client.get("/api/operations").json()["items"] == []


def test_a_preview_tells_that_the_destination_is_taken(client: Any, saved: str) -> None:
    change = {"operator": "count", "state": "total", "key": 7, "value": 5}
    body = {"source": saved, "destination": saved, "changes": [change]}
    assert client.post("/api/edit/preview", json=body).status_code == 409
    (changed,) = client.post("/api/edit/preview", json={**body, "destination": "new"}).json()["changes"]
    assert (changed["before"], changed["after"]) == (14, 5)


@pytest.mark.parametrize("sql", [
    "select * from read_csv('/etc/passwd')", "select * from '/etc/passwd'", "select * from read_text('/etc/passwd')",
    "select * from glob('/etc/*')", "with x as (select * from parquet_scan('/etc/passwd')) select * from x",
    "copy (select 1) to '{}'", "attach '{}'", "export database '{}'", "install httpfs", "load httpfs", "set threads = 1",
    "pragma version", "create table x as select 1", "call pragma_version()", "select 1; select 2", "select getenv('HOME')"])
def test_sql_sees_the_savepoint_and_nothing_else(client: Any, saved: str, tmp_path: Path, sql: str) -> None:
    outside = tmp_path / "outside"
    answer = client.post("/api/query", json={"path": saved, "sql": sql.format(outside)})
    assert answer.status_code == 400, answer.text
    assert "root:" not in answer.text
    assert not outside.exists()


@pytest.mark.parametrize("where", ["exists(select * from read_text('/etc/passwd'))",
                                   "1=1) union select * from read_csv('/etc/passwd') --"])
def test_a_condition_sees_the_state_and_nothing_else(client: Any, saved: str, where: str) -> None:
    asked = {"path": saved, "operator": "count", "state": "total", "where": where}
    answer = client.get("/api/snapshot/entries", params=asked)
    assert (answer.status_code, "root:" in answer.text) == (400, False)


def test_links_and_folders_out_of_the_root_are_not_found(client: Any, saved: str, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path / "outside")
    for path in ("link/sp", "/etc", "file:///etc"):
        assert client.get("/api/snapshot", params={"path": path}).status_code == 404
        answer = client.post("/api/operations", json={"kind": "copy", "source": saved, "destination": path})
        assert answer.status_code == 404
    assert client.get("/api/snapshot", params={"path": "../outside"}).status_code == 400
    assert list((tmp_path / "outside").iterdir()) == []


def test_a_trigger_is_found_only_where_it_belongs(client: Any, job: str, saved: str) -> None:
    savepoint_trigger = client.post(f"/jobs/{job}/savepoints", json={}).json()["request-id"]
    assert client.get(f"/jobs/{job}/savepoints/{savepoint_trigger}").status_code == 200
    assert client.get(f"/jobs/{job}/checkpoints/{savepoint_trigger}").status_code == 404
    assert client.get(f"/jobs/{job}/rescaling/{savepoint_trigger}").status_code == 404
    client.post("/api/operations", json={"kind": "verify", "source": saved, "triggerId": TRIGGER})
    assert client.get(f"/api/operations/{TRIGGER}").status_code == 200
    assert client.get(f"/savepoint-disposal/{TRIGGER}").status_code == 404


def test_a_metric_without_a_value_is_left_out(client: Any, job: str) -> None:
    client.post(f"/jobs/{job}/heartbeat", json={"state": "RUNNING", "metrics": {"lastRestoreDuration": None, "uptime": 3}})
    assert client.get(f"/jobs/{job}/metrics").json() == [{"id": "uptime"}]
    assert client.get(f"/jobs/{job}/metrics?get=uptime,lastRestoreDuration").json() == [{"id": "uptime", "value": "3"}]


@pytest.mark.parametrize("path", ["/web/__init__.py", "/web/../rest/app.py", "/web/%2e%2e/rest/app.py", "/web/nothing.js"])
def test_of_the_page_only_its_own_files_are_served(client: Any, path: str) -> None:
    assert client.get(path).status_code == 404
    assert client.get("/web/app.js").status_code == 200


@pytest.mark.parametrize(("body", "status", "named"), [
    ({"job": "clicks.py:flow", "restore": "nothing"}, 404, "checkpoint or savepoint"),
    ({"job": "clicks.py:flow", "restore": "/etc"}, 404, "roots"),
    ({"job": "clicks.py:flow", "checkpoint_interval": "--evil"}, 400, "checkpoint_interval"),
    ({"job": "../clicks.py:flow"}, 404, "no such job file"),
    ({"job": "nothing.py:flow"}, 404, "no such job file"),
    ({"job": "clicks.py:import os"}, 400, "file.py:flow"),
])
def test_a_job_that_can_not_start_is_refused_and_not_shown(settings: ServiceSettings, tmp_path: Path, body: dict[str, Any],
                                                           status: int, named: str) -> None:
    (tmp_path / "jobs").mkdir()
    for folder in (tmp_path / "jobs", tmp_path):
        (folder / "clicks.py").write_text("flow = None\n")
    app = create_app(replace(settings, jobs_dirs=(tmp_path / "jobs",)))
    with TestClient(app, base_url="http://127.0.0.1:8081") as client:
        answer = client.post("/jobs", json=body)
        assert (answer.status_code, named in answer.json()["detail"]) == (status, True), answer.text
        assert client.get("/jobs").json() == {"jobs": []}

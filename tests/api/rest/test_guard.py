"""Who may call what: hosts, origins, tokens, roles, sizes, and problem documents."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from api.rest.app import create_app
from api.rest.document import document
from api.rest.security import SCOPES, Role, new_token, pattern_of
from api.rest.settings import ServiceSettings
from statebackend.errors import InvalidRequest

JOB = "0123456789abcdef0123456789abcdef"


def test_every_route_is_in_the_table_of_roles() -> None:
    routes = {(method.upper(), pattern_of(re.sub(r"\{[^}]+\}", "{}", path)))
              for path, methods in document()["paths"].items() for method in methods}
    assert routes - SCOPES.keys() == set()
    assert SCOPES.keys() - routes == {("GET", "/openapi.json")}


@pytest.mark.parametrize(("header", "value", "status"), [
    ("host", "evil.example", 421), ("origin", "http://evil.example", 403), ("origin", "http://127.0.0.1:8081", 200),
    ("content-length", "99999999", 413)])
def test_foreign_hosts_origins_and_sizes_are_refused(client: Any, header: str, value: str, status: int) -> None:
    assert client.get("/jobs/overview", headers={header: value}).status_code == status


def test_answers_carry_safe_headers_and_a_request_id(client: Any) -> None:
    answer = client.get("/overview", headers={"x-request-id": "abc"})
    assert answer.headers["x-request-id"] == "abc"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_tokens_have_roles(settings: ServiceSettings, tmp_path: Path) -> None:
    made = {role: new_token(role) for role in Role}
    tokens = tmp_path / "tokens"
    tokens.write_text("# comment\n" + "\n".join(line for _, line in made.values()) + "\n")
    assert made[Role.ADMIN][0] not in tokens.read_text()
    app = create_app(replace(settings, token_file=tokens))
    with TestClient(app, base_url="http://127.0.0.1:8081") as client:
        def status(method: str, path: str, role: Role | None) -> int:
            headers = {"authorization": f"Bearer {made[role][0]}"} if role else {}
            return int(client.request(method, path, headers=headers, json={}).status_code)
        assert status("GET", "/overview", None) == 401
        assert status("GET", "/health", None) == 200
        assert status("GET", "/overview", Role.VIEWER) == 200
        assert status("POST", f"/jobs/{JOB}/savepoints", Role.VIEWER) == 403
        assert status("POST", f"/v1/jobs/{JOB}/savepoints", Role.VIEWER) == 403
        assert status("POST", f"/jobs/{JOB}/savepoints", Role.OPERATOR) == 404
        assert status("POST", "/jobs", Role.OPERATOR) == 403
        assert status("POST", "/jobs", Role.ADMIN) == 400
        assert client.get("/overview", headers={"authorization": "Bearer wrong"}).status_code == 401


def test_it_refuses_to_listen_elsewhere_without_tokens_or_tls(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="without tokens"):
        ServiceSettings(roots=("x",), database=tmp_path / "db", host="0.0.0.0")
    with pytest.raises(InvalidRequest, match="without TLS"):
        ServiceSettings(roots=("x",), database=tmp_path / "db", host="0.0.0.0", token_file=tmp_path / "tokens")


@pytest.mark.parametrize(("method", "path", "body", "status", "named"), [
    ("POST", f"/jobs/{JOB}/savepoints", {"cancel-job": "maybe"}, 400, "cancel-job"),
    ("POST", f"/jobs/{JOB}/savepoints", {"triggerId": "zz"}, 400, "triggerId"),
    ("GET", f"/jobs/{JOB}", None, 404, "no such job"),
    ("GET", "/jobs/not-an-id", None, 400, "job_id"),
    ("PUT", f"/jobs/{JOB}/registration", {}, 400, "name"),
    ("POST", "/savepoint-disposal", {"savepoint-path": "/etc"}, 404, "roots"),
    ("POST", "/jobs", {"job": "x.py:flow"}, 400, "starts no jobs"),
    ("GET", "/api/snapshot?path=nothing", None, 404, "nothing"),
    ("GET", "/api/operations?cursor=%25%25", None, 400, "cursor"),
    ("POST", "/api/operations", {"kind": "rescale", "source": "sp"}, 400, "destination"),
])
def test_bad_input_gets_a_problem_that_names_it(client: Any, method: str, path: str, body: Any, status: int,
                                                named: str) -> None:
    answer = client.request(method, path, json=body) if body is not None else client.request(method, path)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert named in answer.json()["detail"]


def test_malformed_json_is_a_bad_request(client: Any) -> None:
    answer = client.put(f"/jobs/{JOB}/registration", content=b"{not json", headers={"content-type": "application/json"})
    assert answer.status_code == 400


def test_the_committed_openapi_document_is_what_the_app_serves() -> None:
    import json

    docs = Path(__file__).resolve().parents[3] / "docs"
    assert json.loads((docs / "openapi.json").read_text()) == json.loads(json.dumps(document())), \
        "run `python -m api.rest.document`"


def test_a_query_that_takes_too_long_is_interrupted(tmp_path: Path) -> None:
    import pyarrow as pa

    import savepoint
    from api.rest import library
    from statebackend import ValueStateDescriptor
    from statebackend.errors import Unavailable

    with savepoint.SavepointWriter(tmp_path / "sp") as writer:
        table = pa.table({"key": [1, 2], "value": [3, 4]})
        writer.keyed("count", ValueStateDescriptor("total", int), table, key_type=int)
    endless = "select sum(hash(a.range * b.range * c.range)) from range(100000) a, range(100000) b, range(1000) c"
    with pytest.raises(Unavailable, match="did not end"):
        library.query(str(tmp_path / "sp"), endless, 10, 0.5)
    assert library.query(str(tmp_path / "sp"), "select sum(value) from count.total", 10, 30)["rows"] == [["7"]]

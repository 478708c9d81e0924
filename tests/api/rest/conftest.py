"""A service in this process, and one in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from api.rest.app import create_app
from api.rest.settings import ServiceSettings

JOB = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def settings(tmp_path: Path) -> ServiceSettings:
    (tmp_path / "root").mkdir()
    return ServiceSettings(roots=(str(tmp_path / "root"),), database=tmp_path / "service.db")


@pytest.fixture
def client(settings: ServiceSettings) -> Iterator[TestClient]:
    with TestClient(create_app(settings), base_url="http://127.0.0.1:8081") as opened:
        yield opened


@pytest.fixture
def job(client: Any) -> str:
    """A job that has registered and reported once."""
    registration = {"name": "clicks", "vertices": [{"id": "source", "name": "Source: clicks", "parallelism": 2}],
                    "backend": "rocksdb", "checkpoint_config": {"interval": 1000}}
    assert client.put(f"/jobs/{JOB}/registration", json=registration).status_code == 200
    subtask = {"index": 0, "ack_timestamp": 5, "end_to_end_duration": 7, "checkpoint": {"sync": 1, "async": 2},
               "alignment": {"duration": 3}}
    record = {"id": 1, "status": "COMPLETED", "trigger_timestamp": 1000, "end_to_end_duration": 7, "state_size": 100,
              "tasks": {"source": {"num_subtasks": 2, "num_acknowledged_subtasks": 2, "subtasks": [subtask]}}}
    failed = {"id": 2, "status": "FAILED", "failure_message": "source [1] did not acknowledge"}
    body = {"state": "RUNNING", "checkpoints": [record, failed], "metrics": {"numRecordsIn": 12}}
    assert client.post(f"/jobs/{JOB}/heartbeat", json=body).json() == {"commands": []}
    return JOB

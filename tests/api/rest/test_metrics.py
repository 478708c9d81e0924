"""What `/metrics` tells of a real job, and how many series a job may have."""

from __future__ import annotations

import urllib.request
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from api.rest.app import create_app
from api.rest.metrics import SHOWN_OPERATORS
from api.rest.settings import ServiceSettings
from statebackend import key_group_of

USERS, GROUPS = 97, 128


def series(text: str, job: str) -> dict[tuple[str, str | None], float]:
    """The values of a job by name and operator or metric."""
    return {(sample.name, sample.labels.get("operator", sample.labels.get("metric"))): sample.value
            for family in text_string_to_metric_families(text) for sample in family.samples
            if sample.labels.get("job") == job}


def scrape(service: Any, job: str) -> dict[tuple[str, str | None], float]:
    with urllib.request.urlopen(f"{service.url}/metrics", timeout=30) as answer:
        return series(answer.read().decode(), job)


@pytest.mark.xdist_group("service")
def test_a_real_job_tells_its_checkpoints_its_state_by_operator_its_skew_and_its_restore(live_service: Any) -> None:
    service = live_service
    job = service.start_job()
    found = service.eventually(lambda: ("holdfast_key_group_skew", "count") in (all_ := scrape(service, job)) and all_,
                               "enough records were seen")
    last = service.call("GET", f"/jobs/{job}/checkpoints")["latest"]["completed"]
    assert 0 < found["holdfast_checkpoint_duration_seconds", None] < 60
    assert 0 < found["holdfast_checkpoint_bytes", None] <= found["holdfast_state_bytes", None]
    assert found["holdfast_checkpoint_alignment_seconds", None] >= 0
    assert 0 < found["holdfast_checkpoints_completed", None] <= last["id"]
    assert found["holdfast_checkpoints_failed", None] == 0
    assert found["holdfast_operator_state_bytes", "count"] > found["holdfast_operator_state_bytes", "clicks"] > 0
    assert ("holdfast_restore_seconds", None) not in found
    # Every user clicks equally often: the busiest key group is the one with the most users.
    users = Counter(key_group_of(f"user-{number}", GROUPS) for number in range(USERS))
    expected = max(users.values()) * GROUPS / USERS
    assert found["holdfast_key_group_skew", "count"] == pytest.approx(expected, rel=0.25)

    trigger = service.call("POST", f"/jobs/{job}/stop", {"targetDirectory": "measured"})["request-id"]
    location = service.finished(f"/jobs/{job}/savepoints/{trigger}")["location"]
    service.eventually(lambda: scrape(service, job) == {}, "an ended job has no figures of now")
    restored = service.start_job(restore=location)
    found = service.eventually(lambda: ("holdfast_restore_seconds", None) in (all_ := scrape(service, restored)) and all_,
                               "the restore is told")
    assert 0 < found["holdfast_restore_seconds", None] < 60
    assert found["holdfast_restore_seconds", None] == found["holdfast_job_metric", "lastRestoreDuration"] / 1000
    service.call("PATCH", f"/jobs/{restored}?mode=cancel", {})


def test_latency_of_requests_is_told_by_route_and_unknown_ones_share_a_series(client: Any, job: str) -> None:
    for path in (f"/jobs/{job}", "/nothing/at/all", "/nothing/else"):
        client.get(path)
    counts = {(sample.labels["method"], sample.labels["route"]): sample.value
              for family in text_string_to_metric_families(client.get("/metrics").text) for sample in family.samples
              if sample.name == "holdfast_request_seconds_count"}
    assert counts["GET", "/jobs/{}"] == 1
    assert counts["other", "other"] == 2
    assert not [route for _, route in counts if "nothing" in route]


def test_a_job_has_a_bounded_number_of_series(client: Any, job: str) -> None:
    operators = {f"operator-{number}": {"state_bytes": number, "key_group_skew": 1.5} for number in range(1000)}
    assert client.post(f"/jobs/{job}/heartbeat", json={"state": "RUNNING", "operators": operators}).status_code == 200
    found = series(client.get("/metrics").text, job)
    shown = [label for name, label in found if name == "holdfast_operator_state_bytes"]
    assert len(shown) == SHOWN_OPERATORS
    assert "operator-999" in shown, "those with the most state"
    too_many = {f"metric-{number}": 1 for number in range(201)}
    answer = client.post(f"/jobs/{job}/heartbeat", json={"state": "RUNNING", "metrics": too_many})
    assert (answer.status_code, "metrics" in answer.json()["detail"]) == (400, True)


def test_a_job_that_fell_silent_is_counted_and_its_last_figures_are_not_shown_as_those_of_now(
        settings: ServiceSettings) -> None:
    app = create_app(replace(settings, lost_after_ms=0))
    with TestClient(app, base_url="http://127.0.0.1:8081") as client:
        lost = "f" * 32
        client.put(f"/jobs/{lost}/registration", json={"name": "silent"})
        client.post(f"/jobs/{lost}/heartbeat", json={"state": "RUNNING", "metrics": {"numRecordsIn": 12}})
        service = app.state.service
        service.registry._started -= 1000
        service.registry._jobs[lost] = replace(service.registry._jobs[lost], last_seen=1)
        text = client.get("/metrics").text
    assert 'holdfast_jobs{state="LOST"} 1.0' in text
    assert series(text, lost) == {}

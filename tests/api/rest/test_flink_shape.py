"""The routes that Flink has answer in Flink's shape: the same fields as real responses of Flink 2.3."""

from __future__ import annotations

from typing import Any

import pytest

COUNTS = {"restored", "total", "in_progress", "completed", "failed"}
CHECKPOINT = {"className", "id", "status", "is_savepoint", "savepointFormat", "trigger_timestamp", "latest_ack_timestamp",
              "checkpointed_size", "state_size", "end_to_end_duration", "alignment_buffered", "processed_data",
              "persisted_data", "num_subtasks", "num_acknowledged_subtasks", "checkpoint_type", "tasks", "external_path",
              "discarded"}
JOB_LINE = {"jid", "name", "jobType", "schedulerType", "start-time", "end-time", "duration", "state", "last-modification",
            "tasks", "pending-operators"}


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_jobs_are_listed_with_and_without_the_version(client: Any, job: str, prefix: str) -> None:
    (line,) = client.get(f"{prefix}/jobs/overview").json()["jobs"]
    assert line.keys() >= JOB_LINE
    assert line["state"] == "RUNNING"
    assert line["tasks"]["total"] == 2
    assert client.get(f"{prefix}/jobs").json() == {"jobs": [{"id": job, "status": "RUNNING"}]}
    assert client.get(f"{prefix}/overview").json()["jobs-running"] == 1


def test_a_job_has_vertices_and_a_plan(client: Any, job: str) -> None:
    details = client.get(f"/jobs/{job}").json()
    (vertex,) = details["vertices"]
    assert (vertex["name"], vertex["parallelism"], vertex["tasks"]["RUNNING"]) == ("Source: clicks", 2, 2)
    assert details["plan"]["jid"] == job


def test_checkpoints_have_counts_summary_latest_and_history(client: Any, job: str) -> None:
    found = client.get(f"/jobs/{job}/checkpoints").json()
    assert found["counts"].keys() == COUNTS
    assert found["counts"]["completed"] == 1
    assert found["latest"]["completed"].keys() >= CHECKPOINT
    assert found["latest"]["completed"]["alignment_duration"] == 3
    assert found["latest"]["failed"]["failure_message"] == "source [1] did not acknowledge"
    assert [item["id"] for item in found["history"]] == [2, 1]
    assert found["summary"]["end_to_end_duration"]["p99"] == 7.0


def test_details_go_down_to_subtasks(client: Any, job: str) -> None:
    assert client.get(f"/jobs/{job}/checkpoints/details/1").json()["tasks"]["source"]["num_subtasks"] == 2
    found = client.get(f"/jobs/{job}/checkpoints/details/1/subtasks/source").json()
    assert found["subtasks"][0]["checkpoint"] == {"sync": 1, "async": 2}
    assert found["summary"]["alignment"]["duration"]["max"] == 3
    assert client.get(f"/jobs/{job}/checkpoints/details/1/subtasks/nothing").status_code == 404
    assert client.get(f"/jobs/{job}/checkpoints/details/99").status_code == 404


def test_a_savepoint_is_triggered_polled_and_found(client: Any, job: str) -> None:
    answer = client.post(f"/v1/jobs/{job}/savepoints", json={"target-directory": "sp", "formatType": "CANONICAL",
                                                             "cancel-job": False, "triggerId": None})
    assert answer.status_code == 202
    trigger = answer.json()["request-id"]
    assert answer.headers["location"] == f"/v1/jobs/{job}/savepoints/{trigger}"
    assert client.get(answer.headers["location"]).json() == {"status": {"id": "IN_PROGRESS"}, "operation": None}
    (command,) = client.post(f"/jobs/{job}/heartbeat", json={"state": "RUNNING"}).json()["commands"]
    assert command["kind"] == "savepoint"
    assert command["arguments"]["target"].endswith("/root/sp")
    client.post(f"/jobs/{job}/commands/{trigger}/result", json={"location": "/root/sp/savepoint-1"})
    assert client.get(answer.headers["location"]).json() == {
        "status": {"id": "COMPLETED"}, "operation": {"location": "/root/sp/savepoint-1"}}


def test_a_failed_savepoint_tells_the_cause(client: Any, job: str) -> None:
    trigger = client.post(f"/jobs/{job}/savepoints", json={}).json()["request-id"]
    client.post(f"/jobs/{job}/commands/{trigger}/result", json={"failure": "the disk is full"})
    operation = client.get(f"/jobs/{job}/savepoints/{trigger}").json()["operation"]
    assert operation["failure-cause"]["stack-trace"] == "the disk is full"


def test_stop_and_cancel_reach_the_job(client: Any, job: str) -> None:
    trigger = client.post(f"/jobs/{job}/stop", json={"targetDirectory": None, "drain": True}).json()["request-id"]
    assert client.patch(f"/jobs/{job}?mode=cancel", json={}).status_code == 202
    commands = client.post(f"/jobs/{job}/heartbeat", json={"state": "RUNNING"}).json()["commands"]
    assert [command["kind"] for command in commands] == ["stop", "cancel"]
    assert commands[0]["arguments"]["drain"] is True
    client.post(f"/jobs/{job}/heartbeat", json={"state": "CANCELED"})
    assert client.get(f"/jobs/{job}/savepoints/{trigger}").json()["operation"]["failure-cause"]
    assert client.post(f"/jobs/{job}/checkpoints", json={}).status_code == 409


def test_configuration_exceptions_and_metrics_have_flinks_fields(client: Any, job: str) -> None:
    config = client.get(f"/jobs/{job}/checkpoints/config").json()
    assert (config["interval"], config["mode"], config["state_backend"]) == (1000, "exactly_once", "rocksdb")
    client.post(f"/jobs/{job}/heartbeat", json={"state": "RUNNING", "exceptions": [{"message": "Boom: x", "timestamp": 3}]})
    assert client.get(f"/jobs/{job}/exceptions").json()["root-exception"] == "Boom: x"
    client.post(f"/jobs/{job}/heartbeat", json={"state": "RUNNING", "metrics": {"numRecordsIn": 12}})
    assert client.get(f"/jobs/{job}/metrics?get=numRecordsIn").json() == [{"id": "numRecordsIn", "value": "12"}]


def test_counts_are_those_of_the_job_where_it_tells_them(client: Any, job: str) -> None:
    body = {"state": "RUNNING", "metrics": {"numberOfCompletedCheckpoints": 7000, "totalNumberOfCheckpoints": 7001,
                                            "lastCompletedCheckpointId": 7001}}
    assert client.post(f"/jobs/{job}/heartbeat", json=body).status_code == 200
    counts = client.get(f"/jobs/{job}/checkpoints").json()["counts"]
    assert (counts["completed"], counts["total"], counts["failed"]) == (7000, 7001, 1)
    assert client.get("/jobs/overview").json()["jobs"][0]["last-checkpoint"] == 7001

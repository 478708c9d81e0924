"""The service's records: what was said once stays, retries are safe, silence is noticed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from api.rest.records import Beat
from api.rest.registry import Registry, new_id
from statebackend.errors import Conflict, IncompatibleState, InvalidRequest, NotFound


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    opened = Registry(tmp_path / "service.db", lost_after_ms=60_000, history=5)
    yield opened
    opened.close()


def running(registry: Registry) -> str:
    job = new_id()
    registry.register_job(job, "clicks", {"runtime": "threads"})
    registry.heartbeat(job, "RUNNING", {}, [])
    return job


def test_records_survive_a_restart_of_the_service(tmp_path: Path) -> None:
    first = Registry(tmp_path / "service.db")
    job = running(first)
    first.heartbeat(job, "RUNNING", {"metrics": {"a": 1}}, [{"id": 1, "status": "COMPLETED"}])
    trigger = first.add_command(job, "savepoint", {"target": "x"}, None).request_id
    operation, _ = first.add_operation("copy", {"source": "a"}, None)
    # No close: this is what a SIGKILL leaves behind.
    second = Registry(tmp_path / "service.db")
    assert second.job(job).live == {"metrics": {"a": 1}}
    assert second.checkpoints(job) == [{"id": 1, "status": "COMPLETED"}]
    assert second.command(trigger).status == "IN_PROGRESS"
    assert [found.id for found in second.unfinished_operations()] == [operation.id]
    first.close()
    second.close()


def test_the_same_trigger_id_again_gives_the_same_command(registry: Registry) -> None:
    job, trigger = running(registry), new_id()
    first = registry.add_command(job, "checkpoint", {"full": False}, trigger)
    assert registry.add_command(job, "checkpoint", {"full": False}, trigger) == first
    with pytest.raises(Conflict, match="something else"):
        registry.add_command(job, "checkpoint", {"full": True}, trigger)


def test_a_command_is_sent_until_the_job_has_reported_on_it(registry: Registry) -> None:
    job = running(registry)
    trigger = registry.add_command(job, "savepoint", {}, None).request_id
    for _ in range(2):
        assert [command.request_id for command in registry.heartbeat(job, "RUNNING", {}, [])] == [trigger]
    registry.finish_command(job, trigger, {"location": "/sp"})
    registry.finish_command(job, trigger, {"failure": "a late second report"})
    assert registry.heartbeat(job, "RUNNING", {}, []) == []
    assert registry.command(trigger).result == {"location": "/sp"}


def test_a_job_that_ends_without_doing_a_command_fails_it(registry: Registry) -> None:
    job = running(registry)
    trigger = registry.add_command(job, "savepoint", {}, None).request_id
    registry.heartbeat(job, "FAILED", {}, [], [{"message": "boom", "timestamp": 5}])
    assert registry.command(trigger).status == "FAILED"
    assert registry.exceptions(job, 10) == [{"timestamp": 5, "message": "boom"}]
    with pytest.raises(Conflict, match="FAILED"):
        registry.add_command(job, "checkpoint", {}, None)


def test_two_conflicting_commands_are_refused(registry: Registry) -> None:
    job = running(registry)
    registry.add_command(job, "stop", {"drain": False}, None)
    with pytest.raises(Conflict, match="already"):
        registry.add_command(job, "savepoint", {}, None)
    assert registry.add_command(job, "cancel", {}, None).status == "IN_PROGRESS"


def test_a_job_that_stops_reporting_is_lost_not_running(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "service.db", lost_after_ms=1)
    job = running(registry)
    deadline = time.monotonic() + 5
    while not registry.job(job).lost and time.monotonic() < deadline:
        time.sleep(0.005)
    assert registry.job(job).lost
    with pytest.raises(Conflict, match="stopped reporting"):
        registry.add_command(job, "checkpoint", {}, None)
    registry.close()


def test_the_history_of_checkpoints_is_bounded(registry: Registry) -> None:
    job = running(registry)
    registry.heartbeat(job, "RUNNING", {}, [{"id": number, "status": "COMPLETED"} for number in range(1, 10)])
    assert [record["id"] for record in registry.checkpoints(job)] == [9, 8, 7, 6, 5]


def test_unknown_things_are_named(registry: Registry) -> None:
    with pytest.raises(NotFound, match="no such job"):
        registry.heartbeat(new_id(), "RUNNING", {}, [])
    with pytest.raises(NotFound, match="trigger"):
        registry.command(new_id())
    with pytest.raises(InvalidRequest, match="32"):
        registry.add_command(running(registry), "checkpoint", {}, "not-hex")


def test_a_database_of_another_version_is_refused(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "service.db")
    with registry.database.transaction() as database:
        database.execute("pragma user_version = 99")
    registry.close()
    with pytest.raises(IncompatibleState, match="another version"):
        Registry(tmp_path / "service.db")


def test_a_job_that_was_started_again_is_not_asked_again_for_what_the_run_before_was_asked(registry: Registry) -> None:
    job = new_id()
    first = {"pid": 1, "host": "h", "start_time": 1}
    registry.register_job(job, "clicks", first)
    trigger = registry.add_command(job, "savepoint", {}, None).request_id
    registry.register_job(job, "clicks", first)  # the same run, after a restart of the service
    assert registry.command(trigger).status == "IN_PROGRESS"
    registry.register_job(job, "clicks", {**first, "pid": 2})
    assert registry.command(trigger).status == "FAILED"
    assert registry.heartbeat(job, "RUNNING", {}, []) == []


def test_of_reports_written_together_one_that_is_refused_spoils_no_other(registry: Registry) -> None:
    job = running(registry)
    unknown, known = (Beat.of(one, "RUNNING", {}, [{"id": 7}], []) for one in (new_id(), job))
    refused, commands = registry.heartbeats([unknown, known])
    assert isinstance(refused, NotFound)
    assert commands == []
    assert [record["id"] for record in registry.checkpoints(job)] == [7]

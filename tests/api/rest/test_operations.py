"""Background operations that a killed service left behind: finished, begun, or not yet begun."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from api.rest import savepoint_operations as work
from api.rest.operations import Operations
from api.rest.records import Operation
from api.rest.registry import Registry


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    opened = Registry(tmp_path / "service.db")
    yield opened
    opened.close()


def left_behind(registry: Registry, destination: Path, result: dict[str, Any]) -> str:
    """A copy that was running when the service died."""
    arguments = {"source": str(destination.parent / "source"), "destination": str(destination)}
    operation, _ = registry.add_operation("copy", arguments, None)
    registry.update_operation(operation.id, "RUNNING", 0.5, result)
    return operation.id


def resumed(registry: Registry, operation_id: str) -> Operation:
    operations = Operations(registry, workers=1)
    operations.resume()
    deadline = time.monotonic() + 60
    while registry.operation(operation_id).ended is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    operations.close()
    return registry.operation(operation_id)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What was copied; a copy is refused, as in the library, where something is."""
    ran: list[dict[str, Any]] = []

    def run(_kind: str, arguments: dict[str, Any], _progress: Any) -> dict[str, Any]:
        assert not Path(arguments["destination"]).exists()
        ran.append(arguments)
        return {"path": arguments["destination"]}
    monkeypatch.setattr(work, "run", run)
    return ran


def test_what_is_left_of_a_begun_copy_is_removed_and_it_runs_again(registry: Registry, tmp_path: Path,
                                                                    copies: list[dict[str, Any]]) -> None:
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "part.parquet").write_text("half")
    assert resumed(registry, left_behind(registry, tmp_path / "half", {"began": True})).status == "COMPLETED"
    assert len(copies) == 1


def test_a_published_destination_of_a_begun_copy_means_that_it_had_ended(registry: Registry, tmp_path: Path,
                                                                         copies: list[dict[str, Any]]) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "_metadata").write_text("{}")
    operation = resumed(registry, left_behind(registry, tmp_path / "whole", {"began": True}))
    assert (operation.status, operation.result) == ("COMPLETED", {"path": str(tmp_path / "whole")})
    assert copies == []
    assert (tmp_path / "whole" / "_metadata").exists()


def test_a_folder_that_was_there_before_the_copy_is_never_removed_nor_taken_for_its_work(registry: Registry,
                                                                                         tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "precious").write_text("kept")
    operation = resumed(registry, left_behind(registry, theirs, {}))
    assert operation.status == "FAILED"
    assert (theirs / "precious").read_text() == "kept"
    (theirs / "_metadata").write_text("{}")
    assert resumed(registry, left_behind(registry, theirs, {})).status == "FAILED"


def test_an_operation_that_can_not_be_taken_up_is_failed_and_the_service_starts(
        registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_arguments: dict[str, Any]) -> None:
        raise OSError("the disk is gone")
    monkeypatch.setattr(work, "remove_partial", broken)
    operation = resumed(registry, left_behind(registry, tmp_path / "half", {"began": True}))
    assert operation.status == "FAILED"
    assert "the disk is gone" in operation.result["failure"]


def test_finished_records_beyond_the_newest_are_forgotten_and_open_ones_stay(registry: Registry) -> None:
    ids = []
    for number in range(5):
        operation, _ = registry.add_operation("verify", {"source": str(number)}, None)
        ids.append(operation.id)
    for finished in ids[1:]:
        registry.update_operation(finished, "COMPLETED", 1.0, {})
    registry.register_job("a" * 32, "ended", {})
    registry.register_job("b" * 32, "running", {})
    registry.heartbeat("a" * 32, "FINISHED", {}, [{"id": 1}])
    registry.heartbeat("b" * 32, "RUNNING", {}, [{"id": 1}])
    command = registry.add_command("b" * 32, "checkpoint", {}, None)
    assert registry.prune(0, 1) == ["a" * 32]
    assert ids[0] in {operation.id for operation in registry.operations(10)}
    assert len(registry.operations(10)) == 2
    assert [job.id for job in registry.jobs()] == ["b" * 32]
    assert registry.checkpoints("a" * 32) == []
    assert registry.command(command.request_id).status == "IN_PROGRESS"


def test_pages_hold_every_operation_once_though_they_began_in_the_same_moment(registry: Registry) -> None:
    made = {registry.add_operation("verify", {"source": str(number)}, None)[0].id for number in range(7)}
    with registry.database.transaction() as database:
        database.execute("update operations set created = 1000")
    seen: list[str] = []
    after = (2**62, "")
    while page := registry.operations(2, after):
        seen += [operation.id for operation in page]
        after = (page[-1].created, page[-1].id)
    assert sorted(seen) == sorted(made)

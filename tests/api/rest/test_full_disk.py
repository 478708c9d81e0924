"""A disk that is full, for real: a small tmpfs. Nothing half-made stays, the answer says why, and room is all it needs."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from starlette.testclient import TestClient

import savepoint
from api.rest import savepoint_operations as work
from api.rest.app import create_app
from api.rest.settings import ServiceSettings
from statebackend import ValueStateDescriptor
from statebackend.errors import Unavailable

JOB = "0123456789abcdef0123456789abcdef"
MIB = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with 8 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = shutil.which("mount")
    if mount is None or subprocess.run([mount, "-t", "tmpfs", "-o", "size=8m", "tmpfs", place], check=False,
                                       capture_output=True).returncode:
        pytest.skip("this user can't mount a tmpfs")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def fill(place: Path, leave: int = 0) -> Path:
    """Take all room but so many bytes."""
    filler = place / "filler"
    with open(filler, "wb", buffering=0) as out, contextlib.suppress(OSError):
        while out.write(b"x" * 4096):
            pass
    os.truncate(filler, max(0, filler.stat().st_size - leave))
    return filler


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def ended(client: Any, operation_id: str) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while not (found := client.get(f"/api/operations/{operation_id}").json())["ended"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return dict(found)


@pytest.mark.parametrize("kind", ["convert", "rescale", "copy", "edit"])
def test_an_operation_that_finds_the_disk_full_fails_leaves_nothing_and_succeeds_with_room(
        settings: ServiceSettings, small_disk: Path, kind: str) -> None:
    root = small_disk / "root"
    root.mkdir()
    noise = np.random.default_rng(7).integers(0, 2**60, 60_000)
    with savepoint.SavepointWriter(root / "sp") as writer:
        writer.keyed("count", ValueStateDescriptor("total", int), pa.table({"key": noise, "value": noise}), key_type=int)
    filler = fill(small_disk, leave=MIB // 4)
    before = files(small_disk)
    body = {"kind": kind, "source": "sp", "destination": "new"}
    if kind == "convert":
        body["format"] = "native"
    if kind == "rescale":
        body["max_parallelism"] = 256  # type: ignore[assignment]
    if kind == "edit":
        body["changes"] = [{"operator": "count", "state": "total", "key": int(noise[0]), "value": 1}]  # type: ignore[assignment]
    with TestClient(create_app(replace(settings, roots=(str(root),))), base_url="http://127.0.0.1:8081") as client:
        failed = ended(client, client.post("/api/operations", json=body).json()["request-id"])
        assert (failed["status"], failed["result"]["kind"]) == ("FAILED", "unavailable"), failed
        assert "the store is full" in failed["result"]["failure"]
        assert files(small_disk) == before, "nothing half-made stays"
        assert client.get("/api/snapshot?path=new").status_code == 404
        filler.unlink()
        done = ended(client, client.post("/api/operations", json=body).json()["request-id"])
        assert done["status"] == "COMPLETED", done
        assert client.post("/api/verify", json={"path": "new"}).json()["ok"]


def test_an_operation_whose_end_can_not_be_recorded_for_lack_of_room_is_recorded_with_room(
        settings: ServiceSettings, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = small_disk / "root"
    with savepoint.SavepointWriter(root / "sp") as writer:
        writer.keyed("count", ValueStateDescriptor("total", int), pa.table({"key": [1], "value": [2]}), key_type=int)
    filled = threading.Event()

    def run_and_fill(kind: str, arguments: dict[str, Any], progress: Any) -> dict[str, Any]:
        try:
            return really(kind, arguments, progress)
        finally:
            if not filled.is_set():
                fill(small_disk)
                filled.set()
    really = work.run
    monkeypatch.setattr(work, "run", run_and_fill)
    changed = replace(settings, roots=(str(root),), database=small_disk / "service.db", max_operations=1)
    with TestClient(create_app(changed), base_url="http://127.0.0.1:8081") as client:
        for number, destination in enumerate(("new", "other")):
            sent = client.post("/api/operations", json={"kind": "copy", "source": "sp", "destination": destination}).json()
            if number == 0:
                assert filled.wait(60)
                time.sleep(0.5)
                assert client.get(f"/api/operations/{sent['id']}").json()["ended"] is None
                (small_disk / "filler").unlink()
            assert ended(client, sent["id"])["status"] == "COMPLETED"


def test_a_service_whose_records_have_no_room_says_so_changes_nothing_and_goes_on_with_room(
        settings: ServiceSettings, small_disk: Path) -> None:
    heartbeat = {"state": "RUNNING", "metrics": {"numRecordsIn": 1}}
    checkpoints = [{"id": number, "status": "COMPLETED", "external_path": "x" * 4000} for number in range(200)]
    changed = replace(settings, database=small_disk / "service.db")
    with TestClient(create_app(changed), base_url="http://127.0.0.1:8081") as client:
        assert client.put(f"/jobs/{JOB}/registration", json={"name": "clicks"}).status_code == 200
        assert client.post(f"/jobs/{JOB}/heartbeat", json=heartbeat).status_code == 200
        filler = fill(small_disk)
        refused = client.post(f"/jobs/{JOB}/heartbeat", json={**heartbeat, "metrics": {"numRecordsIn": 2},
                                                              "checkpoints": checkpoints})
        assert (refused.status_code, refused.json()["kind"]) == (503, "unavailable"), refused.text
        assert "full" in refused.json()["detail"]
        other = client.post(f"/jobs/{JOB}/savepoints", json={"triggerId": "a" * 32})
        assert other.status_code == 503
        # What was there is there, reads are answered, and nothing of what was refused is shown.
        assert client.get("/ready").status_code == 200
        assert client.get(f"/jobs/{JOB}/metrics?get=numRecordsIn").json() == [{"id": "numRecordsIn", "value": "1"}]
        assert client.get(f"/jobs/{JOB}/checkpoints").json()["history"] == []
        assert client.get(f"/jobs/{JOB}/savepoints/{'a' * 32}").status_code == 404
        with pytest.raises(Unavailable, match="full"):
            client.app.state.service.keep_house()  # type: ignore[attr-defined]
        filler.unlink()
        assert client.post(f"/jobs/{JOB}/heartbeat", json={**heartbeat, "checkpoints": checkpoints}).status_code == 200
        assert client.post(f"/jobs/{JOB}/savepoints", json={"triggerId": "a" * 32}).status_code == 202
        assert len(client.get(f"/jobs/{JOB}/checkpoints").json()["history"]) == changed.history
    with TestClient(create_app(changed), base_url="http://127.0.0.1:8081") as again:
        assert len(again.get(f"/jobs/{JOB}/checkpoints").json()["history"]) == changed.history

"""The command line of Apache Flink does its work against our service, unchanged."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.flink, pytest.mark.xdist_group("service"), pytest.mark.timeout(600)]
PEERS = Path(os.environ.get("HOLDFAST_PEERS", Path(__file__).resolve().parents[3] / ".venv-peers"))


def flink(service: Any, *arguments: str) -> str:
    found = list((PEERS / "pyflink").glob("lib/python*/site-packages/pyflink/bin/flink"))
    if not found:
        pytest.fail("apache-flink is not installed here; `make flink` does it")
    command = [str(found[0]), arguments[0], "-m", f"127.0.0.1:{service.port}", *arguments[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_flinks_commands_list_save_checkpoint_stop_dispose_and_cancel(live_service: Any) -> None:
    service = live_service
    job = service.start_job()
    assert f"{job} : clicks (RUNNING)" in flink(service, "list")
    saved = flink(service, "savepoint", job, str(service.root / "by-flink"))
    path = saved.split("Savepoint completed. Path: ")[1].split()[0]
    assert (Path(path.removeprefix("file:")) / "_metadata").exists()
    assert "completed" in flink(service, "checkpoint", job)
    flink(service, "savepoint", "-d", path)
    assert not (Path(path.removeprefix("file:")) / "_metadata").exists()
    stopped = flink(service, "stop", "-p", str(service.root / "stopped"), job)
    assert "Savepoint completed. Path: " in stopped
    service.eventually(lambda: service.call("GET", f"/jobs/{job}")["state"] == "FINISHED", "the job has stopped")
    other = service.start_job()
    flink(service, "cancel", other)
    service.eventually(lambda: service.call("GET", f"/jobs/{other}")["state"] == "CANCELED", "the job is canceled")

"""The command as users run it: its own process, in a pipe or on a pseudo-terminal."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

HOLDFAST = Path(sys.executable).with_name("holdfast")


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items()
            if not name.startswith("HOLDFAST_") and name not in ("NO_COLOR", "PYTHONWARNINGS")} | {"COLUMNS": "120"}


@pytest.fixture
def holdfast(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[Any]]:
    """Run the command with its output in a pipe."""

    def run(*arguments: Any, stdin: str | None = None, binary: bool = False,
            env: dict[str, str] | None = None) -> subprocess.CompletedProcess[Any]:
        return subprocess.run([str(HOLDFAST), *map(str, arguments)], capture_output=True, text=not binary, input=stdin,
                              cwd=tmp_path, env=clean_environment() | (env or {}), timeout=120, check=False)

    return run


@pytest.fixture
def on_terminal(tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Run the command with stdout and stderr on a pseudo-terminal; exit code and everything that it showed."""

    def run(*arguments: Any, env: dict[str, str] | None = None) -> tuple[int, str]:
        parent, child = pty.openpty()
        process = subprocess.Popen([str(HOLDFAST), *map(str, arguments)], stdin=child, stdout=child, stderr=child,
                                   cwd=tmp_path, env=clean_environment() | {"TERM": "xterm-256color"} | (env or {}))
        os.close(child)
        shown = b""
        while True:
            ready, _, _ = select.select([parent], [], [], 0.1)
            if ready:
                try:
                    data = os.read(parent, 65536)
                except OSError:
                    break
                if not data:
                    break
                shown += data
            elif process.poll() is not None:
                break
        os.close(parent)
        return process.wait(timeout=60), shown.decode()

    return run


@pytest.fixture
def sp(tmp_path: Path) -> Path:
    """An open savepoint: count.total with a hundred users, rules as broadcast state."""
    import savepoint
    from statebackend import MapStateDescriptor, ValueStateDescriptor

    table = pa.table({"key": [f"user-{n}" for n in range(100)], "value": range(100)})
    with savepoint.SavepointWriter(tmp_path / "sp", job_name="clicks", parallelism=2) as writer:
        writer.keyed("count", ValueStateDescriptor("total", int), table, key_type=str)
        writer.broadcast("count", MapStateDescriptor("rules", str, int), {"a": 1})
    return tmp_path / "sp"

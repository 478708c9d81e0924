"""Peers in environments of their own: created on demand, asked through a subprocess, never dependencies of ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

from benchmarks.measure import CannotRun, WrongAnswer

PACKAGES = {
    "bytewax": ["bytewax==0.21.1"],
    "quixstreams": ["quixstreams==3.28.*"],
    "pathway": ["pathway==0.33.*"],
    "pyflink": ["apache-flink==2.3.*"],
}
_HOSTED = {"flink": "pyflink"}
"""Peers that run from another one's environment: Flink in Java takes the jars that come with PyFlink, and a JDK."""
_SCRIPTS = Path(__file__).resolve().parent


def folder_of(peer: str) -> Path:
    """Where a peer's environment is: below HOLDFAST_PEERS, or .venv-peers in the working folder."""
    return Path(os.environ.get("HOLDFAST_PEERS", ".venv-peers")).resolve() / peer


def install(peer: str) -> Path:
    """Create a peer's environment if it is not there; the peer's Python."""
    folder = folder_of(peer)
    python = folder / "bin" / "python"
    if not (folder / ".installed").exists():
        venv.create(folder, with_pip=True)
        done = subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PACKAGES[peer]], capture_output=True,
                              text=True)
        if done.returncode != 0:
            raise CannotRun(f"{peer} can't be installed: {done.stderr.strip().splitlines()[-1:]}")
        (folder / ".installed").touch()
    return python


def ask(peer: str, *arguments: object, expected_sum: int | None = None, timeout: float = 600) -> float:
    """Run a peer's script; its events per second, after its own result was checked."""
    home = _HOSTED.get(peer, peer)
    python = folder_of(home) / "bin" / "python"
    if not python.exists():
        raise CannotRun(f"{peer} is not installed; `holdfast bench peers {home}` installs it")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PYSPARK"))}
    try:
        done = subprocess.run([str(python), str(_SCRIPTS / f"{peer}_count.py"), *map(str, arguments)], capture_output=True,
                              text=True, timeout=timeout, env=environment)
    except subprocess.TimeoutExpired:
        raise CannotRun(f"{peer} did not end within {timeout:.0f} s") from None
    if done.returncode != 0:
        raise CannotRun(f"{peer} failed: {reason(done.stderr)}")
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    if expected_sum is not None and answer["sum"] != expected_sum:
        raise WrongAnswer(f"{peer} counted {answer['sum']} instead of {expected_sum}")
    return float(answer["events_per_second"])


def reason(stderr: str) -> str:
    """The last line that says what was wrong; the frames of a Java stack trace come after theirs."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    told = [line for line in lines if not line.startswith(("at ", "... "))]
    return (told or lines or ["no message"])[-1][:300]


if __name__ == "__main__":
    for name in sys.argv[1:] or PACKAGES:
        print(name, install(name))

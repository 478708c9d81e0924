"""Processes of the demo: each in a group of its own, its words in a log file, and none left when the demo ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from statebackend.errors import HoldfastError

GRACE_SECONDS = 10
QUICK_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""A JVM that lives for seconds spends most of them compiling: this halves the CPU time of the part on Spark."""
Child = subprocess.Popen[str]


class StepFailed(HoldfastError):
    """A command of the demo did not do what the demo is about to claim."""


def holdfast(*arguments: str) -> list[str]:
    """The installed command, as a person runs it."""
    script = Path(sys.executable).parent / "holdfast"
    return [str(script), *arguments] if script.exists() else [sys.executable, "-m", "api.cli.main", *arguments]


@contextmanager
def started(command: Sequence[str], folder: Path, log: Path) -> Iterator[Child]:
    """Run a command in the background, its stdout in a pipe; whatever happens, its process group is gone at the end."""
    with log.open("ab") as words:
        words.write(f"$ {shown(command)}\n".encode())
        words.flush()
        child = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=words, stdin=subprocess.DEVNULL,
                                 start_new_session=True, env=environment(), text=True)
    try:
        yield child
    finally:
        end(child)


def finish(command: Sequence[str], folder: Path, log: Path) -> str:
    """Run a command to its end and give its stdout; any exit code but 0 ends the demo with the last lines of the log."""
    with started(command, folder, log) as child:
        out, _ = child.communicate()
    if child.returncode != 0:
        last = " | ".join(log.read_text(errors="replace").strip().splitlines()[-3:])
        raise StepFailed(f"`{shown(command)}` ended with code {child.returncode}: {last}", path=str(log))
    return out


def end(child: Child) -> None:
    """Ask the group of a child to end, then make it."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_SECONDS)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)  # the child itself if it did not listen, and what it had started, such as a JVM
    child.wait()
    if child.stdout is not None:
        child.stdout.close()


def shown(command: Sequence[str]) -> str:
    """A command as a person would type it."""
    words = [Path(command[0]).name, *command[1:]]
    return " ".join(f"'{word}'" if " " in word else word for word in words)


def environment() -> dict[str, str]:
    """What children see: Spark's workers and its driver on this very Python, settings of this shell's jobs left out."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    return {"JDK_JAVA_OPTIONS": QUICK_JVM, **kept, "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable}

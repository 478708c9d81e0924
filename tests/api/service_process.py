"""A real service in a process of its own, with a jobs folder, for end-to-end tests."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

JOB_FILE = '''
import os

from checkpoint import Dataflow, FileSink, GeneratorSource, KeyedProcessFunction
from statebackend import ValueStateDescriptor


class Count(KeyedProcessFunction):
    def open(self, ctx):
        self.total = ctx.state(ValueStateDescriptor("total", int, default=0))

    def process(self, record, ctx):
        self.total.update(self.total.value() + 1)
        yield {"user": ctx.key, "n": self.total.value()}


with open(f"FOLDER/started-{os.environ.get('HOLDFAST_JOB_ID')}", "a") as started:
    started.write("once\\n")
flow = Dataflow("clicks")
clicks = flow.source(GeneratorSource(lambda n: {"user": f"user-{n % 97}"}, rate=2000), uid="clicks")
counts = clicks.key_by(lambda click: click["user"], key_type=str).process(Count(), uid="count", parallelism=2)
counts.sink(FileSink("OUT"), uid="out")
'''

DYING = """
import os, signal, sys
from api.cli.main import main
from api.rest import launcher
point = sys.argv.pop(1)
launcher.reached = lambda found: os.kill(os.getpid(), signal.SIGKILL) if found == point else None
main()
"""


REAPER = """
import os, signal, sys, time
from pathlib import Path
mark = sys.argv[1].encode()
sys.stdin.read()
def marked():
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if int(process.name) != os.getpid() and mark in (process / "environ").read_bytes().split(b"\\0"):
                yield int(process.name)
        except OSError:
            continue
while found := list(marked()):
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    time.sleep(0.05)
"""
"""Ends what bears the mark once its standard input ends: jobs outlive their service, and must not outlive the test."""


class Reaper:
    """Ends every process that was started with its environment, at the latest when this process is gone."""

    def __init__(self) -> None:
        mark = f"HOLDFAST_TEST_MARK={uuid.uuid4().hex}"
        self.environment = os.environ | dict([mark.split("=")])
        self._process = subprocess.Popen([sys.executable, "-c", REAPER, mark], stdin=subprocess.PIPE, start_new_session=True)

    def reap(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


class ServiceProcess:
    """Starts, kills and restarts a service on one port and database."""

    def __init__(self, folder: Path, *options: str, token: str | None = None) -> None:
        self._options, self._token = options, token
        self.folder, self.root, self.jobs = folder, folder / "root", folder / "jobs"
        self.root.mkdir()
        self.jobs.mkdir()
        (self.jobs / "clicks.py").write_text(JOB_FILE.replace("OUT", str(folder / "out")).replace("FOLDER", str(folder)))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None
        self._reaper = Reaper()

    def start(self, *, die_at: str | None = None) -> ServiceProcess:
        """Start it and wait until it answers; `die_at` names a moment of a launch in which it kills itself."""
        program = ["-m", "api.cli.main"] if die_at is None else ["-c", DYING, die_at]
        command = [sys.executable, *program, "serve", "--port", str(self.port), "--root", str(self.root),
                   "--database", "service.db", "--jobs-dir", str(self.jobs), "--lost-after", "5s",
                   *self._options]
        with open(self.folder / "service.log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder, env=self._reaper.environment)
        self.eventually(lambda: self.call("GET", "/ready"), "the service is ready")
        return self

    def kill(self) -> None:
        """SIGKILL: nothing is flushed, nobody says goodbye."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def stop(self) -> None:
        """End the service and every job that it started."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(15)
        self._reaper.reap()

    def call(self, method: str, path: str, body: Any = None) -> Any:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._token}"} if self._token else {})
        request = urllib.request.Request(self.url + path, method=method, headers=headers,
                                         data=None if body is None else json.dumps(body).encode())
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return json.loads(response.read() or b"{}")
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{method} {path}: {error.code} {error.read().decode()}") from None

    def eventually(self, look: Callable[[], Any], what: str, seconds: float = 60) -> Any:
        """What `look` gives as soon as it gives something; failures to answer are tried again."""
        deadline, last = time.monotonic() + seconds, None
        while time.monotonic() < deadline:
            try:
                found = look()
                if found:
                    return found
            except (OSError, AssertionError) as error:
                last = error
            time.sleep(0.1)
        raise AssertionError(f"it never came true that {what}: {last}\n{self.logs()}")

    def start_job(self, **more: Any) -> str:
        """Start the job and wait until it has completed a checkpoint."""
        body = {"job": "clicks.py:flow", "backend": "filesystem", "checkpoint_interval": "500ms", **more}
        job = str(self.call("POST", "/jobs", body)["jid"])
        self.eventually(lambda: self.call("GET", f"/jobs/{job}/checkpoints")["latest"]["completed"],
                        "the job completes a checkpoint")
        return job

    def finished(self, path: str) -> dict[str, Any]:
        """The operation of a trigger when it has ended."""
        answer = self.eventually(lambda: (found := self.call("GET", path))["status"]["id"] == "COMPLETED" and found,
                                 f"{path} ends")
        return dict(answer["operation"])

    def logs(self) -> str:
        files = [self.folder / "service.log", *(self.folder / "logs").glob("*.log")]
        return "\n".join(path.read_text()[-2000:] for path in files if path.exists())

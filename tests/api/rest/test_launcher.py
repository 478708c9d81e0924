"""Starting jobs as processes: once, whenever the service dies; and what is told of processes that end early."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from api.rest import launcher as launching
from api.rest.launcher import Launcher
from api.rest.registry import Registry, new_id
from api.rest.roots import Roots
from api.rest.settings import ServiceSettings

CLAIM_AND_RUN = """
import sys, time
from pathlib import Path
from api.rest.claiming import claim_launch
folder = Path(sys.argv[1])
while not (folder / "go").exists():
    time.sleep(0.01)
claim_launch()
with open(folder / "ran", "a") as out:
    out.write("x")
"""


class ServiceKilled(BaseException):
    """Stands for SIGKILL: nothing of the service runs after it."""


class World:
    """One database; services on it come and go."""

    def __init__(self, folder: Path, program: str) -> None:
        self.folder, self._program = folder, program
        (folder / "root").mkdir()
        (folder / "clicks.py").write_text("flow = None\n")
        self._settings = ServiceSettings(roots=(str(folder / "root"),), database=folder / "service.db", jobs_dirs=(folder,))
        self._registries: list[Registry] = []

    def service(self) -> Launcher:
        """A service that has just started."""
        self.registry = Registry(self._settings.database)
        self._registries.append(self.registry)
        launcher = Launcher(self._settings, self.registry, Roots(self._settings.roots))
        launcher._command = (  # type: ignore[method-assign]
            lambda _path, _attribute, _arguments: [sys.executable, "-c", self._program, str(self.folder)])
        return launcher

    def ran(self) -> str:
        path = self.folder / "ran"
        return path.read_text() if path.exists() else ""

    def close(self) -> None:
        for registry in self._registries:
            registry.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, CLAIM_AND_RUN)
    yield made
    made.close()


def all_ended(*services: Launcher) -> None:
    for service in services:
        for process in service._processes.values():
            process.wait(60)


def die_at(monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    def reached(found: str) -> None:
        if found == point:
            raise ServiceKilled
    monkeypatch.setattr(launching, "reached", reached)


@pytest.mark.parametrize("point", ["launch recorded", "process started"])
@pytest.mark.parametrize("early", [True, False], ids=["it runs at once", "it is slow to start"])
def test_a_launch_runs_once_wherever_the_service_is_killed(world: World, monkeypatch: pytest.MonkeyPatch, point: str,
                                                           early: bool) -> None:
    first, job = world.service(), new_id()
    if early:
        (world.folder / "go").touch()
    with monkeypatch.context() as patched, pytest.raises(ServiceKilled):
        die_at(patched, point)
        first.start({"job": "clicks.py:flow"}, job)
    if early:
        all_ended(first)
    second = world.service()
    second.resume()
    second.start({"job": "clicks.py:flow"}, job)  # a client that got no answer asks again
    third = world.service()
    third.resume()
    (world.folder / "go").touch()
    all_ended(first, second, third)
    assert world.ran() == "x"


def test_there_is_one_token_whatever_was_left_or_comes_in_between(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    service = world.service()
    (world.folder / f"service.token.{os.getpid()}").touch()  # a service of this very pid was killed while it made one
    made = launching.secrets.token_urlsafe

    def overtaken(size: int) -> str:
        (world.folder / "service.token").write_text("of another thread")
        return made(size)

    monkeypatch.setattr(launching.secrets, "token_urlsafe", overtaken)
    assert service.token() == service.token() == "of another thread"


def test_a_process_that_comes_second_is_not_taken_for_a_failure(world: World) -> None:
    first = world.service()
    job = first.start({"job": "clicks.py:flow"})
    second = world.service()
    second.resume()
    (world.folder / "go").touch()
    all_ended(first, second)
    codes = sorted(next(iter(service._processes.values())).returncode for service in (first, second))
    assert codes == [0, launching.SECOND]
    loser = first if first._processes[job].returncode else second
    loser.look_after()
    assert world.ran() == "x"


def test_a_launch_that_was_heard_of_is_left_alone(world: World) -> None:
    first = world.service()
    (world.folder / "go").touch()
    job = first.start({"job": "clicks.py:flow"})
    all_ended(first)
    world.registry.register_job(job, "another name than that of its file", {"pid": 1, "host": "h", "start_time": 1})
    second = world.service()
    second.resume()
    assert second._processes == {}
    assert world.registry.job(job).name == "another name than that of its file"




def test_a_process_that_ends_before_it_reports_is_a_failed_job_and_its_log_tells_why(tmp_path: Path) -> None:
    world = World(tmp_path, "raise SystemExit('the job file is broken')")
    service = world.service()
    job = service.start({"job": "clicks.py:flow"})
    all_ended(service)
    service.look_after()
    assert world.registry.job(job).state == "FAILED"
    assert "the job file is broken" in world.registry.exceptions(job, 1)[0]["message"]
    world.close()


def test_after_a_restart_too_a_claimed_process_that_is_gone_is_a_failed_job(world: World) -> None:
    first = world.service()
    (world.folder / "go").touch()
    job = first.start({"job": "clicks.py:flow"})
    all_ended(first)
    second = world.service()
    second.resume()
    second.look_after()
    assert world.registry.job(job).state == "FAILED"
    second.forget([job])
    assert not list(world.folder.glob("service.launches/*"))
    assert not list((world.folder / "logs").iterdir())

"""The built wheel works in an empty environment, also beside folders that share our short package names."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment that has the wheel and, by link, our locked dependencies."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(source)], check=True, timeout=120)
    built = run([sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(source)], folder)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "env", with_pip=True, symlinks=True)
    bin_folder = folder / "env" / "bin"
    site = next((folder / "env" / "lib").glob("python*/site-packages"))
    dependencies = next(path for path in map(Path, sys.path) if path.name == "site-packages" and path.is_dir())
    # Dependencies are read from the test environment, our own editable install is not: its finder is a .pth file,
    # and .pth files of added folders are not run.
    (site / "dependencies.pth").write_text(str(dependencies) + "\n")
    install = [str(bin_folder / "python"), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    done = run(install, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return bin_folder


def test_tests_are_not_installed(installed: Path) -> None:
    listed = run([str(installed / "python"), "-m", "pip", "show", "-f", "holdfast"], installed)
    assert "statebackend/py.typed" in listed.stdout
    assert "tests/" not in listed.stdout


def test_the_command_works_in_a_folder_that_shares_our_names(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "api").mkdir()
    (tmp_path / "api" / "__init__.py").write_text("raise RuntimeError('the wrong api')")
    (tmp_path / "checkpoint.py").write_text("raise RuntimeError('the wrong checkpoint')")
    helped = run([str(installed / "holdfast"), "--help"], tmp_path)
    assert helped.returncode == 0, helped.stderr
    assert "savepoint" in helped.stdout


def test_a_job_whose_folder_shares_our_names_is_told_so_or_just_runs(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoint.py").write_text("raise RuntimeError('the wrong checkpoint')")
    (tmp_path / "job.py").write_text(
        "from checkpoint import Dataflow, GeneratorSource, CollectSink\n"
        "flow = Dataflow('numbers')\n"
        "flow.source(GeneratorSource(lambda n: n, count=10), uid='numbers').sink(CollectSink(), uid='out')\n")
    ran = run([str(installed / "holdfast"), "run", "job.py:flow", "--checkpoint-dir", str(tmp_path / "chk")], tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "module 'checkpoint'" in ran.stderr, "the user is told that checkpoint.py is hidden by ours"

"""The archive for executors holds our packages and the libraries they need."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from spark_integration import packing
from statebackend.errors import Conflict


def test_the_archive_is_importable_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "LIBRARIES", ("msgspec",))
    result = packing.pack(tmp_path / "holdfast.tar.gz")
    assert set(result["libraries"]) == {"msgspec"}
    with tarfile.open(result["archive"]) as archive:
        archive.extractall(tmp_path / "holdfast", filter="data")
    code = "import spark_integration.epochs as e, msgspec; print(e.__file__, msgspec.__file__)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path,
                         env={"PYTHONPATH": str(tmp_path / "holdfast")}).stdout
    assert out.count(str(tmp_path / "holdfast")) == 2
    with pytest.raises(Conflict):
        packing.pack(tmp_path / "holdfast.tar.gz")

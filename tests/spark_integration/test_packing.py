"""The archive for executors holds our packages and the libraries they need."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from spark_integration import packing
from statebackend.errors import Conflict, NotFound


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


def test_further_packages_bring_what_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "LIBRARIES", ())
    monkeypatch.setattr(packing, "OURS", ())
    result = packing.pack(tmp_path / "holdfast.tar.gz", ["s3fs"])
    assert {"s3fs", "fsspec", "aiobotocore", "botocore", "aiohttp", "multidict"} <= set(result["libraries"])
    with pytest.raises(NotFound, match="nothing-like-it is not installed here"):
        packing.pack(tmp_path / "other.tar.gz", ["nothing-like-it"])
    assert [path.name for path in tmp_path.iterdir()] == ["holdfast.tar.gz"]

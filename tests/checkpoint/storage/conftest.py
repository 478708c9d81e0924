"""The stores that every storage test runs on."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoint.storage import FileStore, RetryPolicy

QUICK = RetryPolicy(attempts=4, first_pause=0.001, longest_pause=0.002)


@pytest.fixture(params=["file", "memory", "s3"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A fresh folder in each kind of store."""
    if request.param == "file":
        return str(tmp_path / "store")
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}/store"
    return f"{request.getfixturevalue('s3_root')}/store"


@pytest.fixture
def store(store_url: str) -> Iterator[FileStore]:
    with FileStore.at(store_url, retry=QUICK) as opened:
        yield opened

"""Fixtures that the tests of the service and of the page share."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def live_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A running service with a jobs folder."""
    spec = importlib.util.spec_from_file_location("service_process", Path(__file__).with_name("service_process.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["service_process"] = module
    spec.loader.exec_module(module)
    service = module.ServiceProcess(tmp_path_factory.mktemp("service"))
    service.start()
    yield service
    service.stop()

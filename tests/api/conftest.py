"""Fixtures that the tests of the service and of the page share."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def _service_process() -> Any:
    spec = importlib.util.spec_from_file_location("service_process", Path(__file__).with_name("service_process.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["service_process"] = module
    spec.loader.exec_module(module)
    return module.ServiceProcess


@pytest.fixture(scope="session")
def new_service() -> Any:
    """The class of service processes."""
    return _service_process()


@pytest.fixture(scope="module")
def live_service(new_service: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A running service with a jobs folder."""
    service = new_service(tmp_path_factory.mktemp("service"))
    try:
        service.start()
        yield service
    finally:
        service.stop()

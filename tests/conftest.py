"""What several packages' tests use: groups that stay on one worker, an S3 protocol server on loopback."""

from __future__ import annotations

import logging
import os
import sys
import threading
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

# Spark's JVM takes python3 from the path for some of its workers, unless it is told, and it outlives the first session.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Make `xdist_group` work: pytest-xdist 3.8 writes the group into an attribute that pytest 9.2 no longer reads."""
    if not getattr(config.option, "loadgroup", False):
        return
    for item in items:
        groups = sorted({str(mark.args[0]) for mark in item.iter_markers("xdist_group")})
        if groups and "@" not in item.nodeid.rpartition("]")[2].rpartition("::")[2] and hasattr(item, "_id"):
            item._id = type(item._id).parse(f"{item.nodeid}@{'_'.join(groups)}")


def _one_conditional_put_at_a_time(app: Callable[..., Any]) -> Callable[..., Any]:
    """moto honours If-None-Match, but looks and writes in two steps; S3 does it in one."""
    lock = threading.Lock()

    def call(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        if "HTTP_IF_NONE_MATCH" not in environ:
            return app(environ, start_response)
        with lock:
            return app(environ, start_response)

    return call


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The endpoint URL of an S3 server that lives as long as the test run."""
    moto_server = pytest.importorskip("moto.server")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    server._server.app = _one_conditional_put_at_a_time(server._server.app)
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()
    server._server.server_close()


@pytest.fixture
def s3_root(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """`s3://<fresh bucket>`, with endpoint and credentials in the environment, where s3fs and child processes look."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test-key-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret-key")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    request = urllib.request.Request(f"{s3_server}/{bucket}", method="PUT")
    with urllib.request.urlopen(request):
        return f"s3://{bucket}"

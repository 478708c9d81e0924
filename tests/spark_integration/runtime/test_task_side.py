"""What a task starts from: a flow that arrives by value, and a checkpoint folder that must be the driver's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from checkpoint.runtime.deployment import BackendChoice, JobSpec
from checkpoint.storage.layout import JobId
from spark_integration.runtime.shipping import folder_of, pack_flow, unpack_flow
from spark_integration.runtime.task import BarrierTask, require_storage
from statebackend import Conflict, IncompatibleState, InvalidRequest


def spec_of(root: Path, generation: int = 0) -> JobSpec:
    return JobSpec(JobId("ab" * 16), "job", "run", str(root), BackendChoice(), generation=generation)


def test_a_flow_arrives_where_neither_its_file_nor_its_modules_are(job: Any, tmp_path: Path) -> None:
    flow = job.flow()
    (tmp_path / "flow").write_bytes(pack_flow(flow))
    assert folder_of(flow) == str(job.folder)
    for name in ("job.py", "beside.py"):
        (job.folder / name).unlink()
    code = ("from pathlib import Path\nfrom spark_integration.runtime.shipping import unpack_flow\n"
            f"flow = unpack_flow(Path({str(tmp_path / 'flow')!r}).read_bytes())\n"
            "print(flow.name, [node.uid for node in flow.nodes], flow.nodes[1].body.process.__globals__['count_field']())")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "count-users ['files', 'count', 'out'] n\n"


def test_a_module_that_an_executor_lacks_is_named(job: Any) -> None:
    data = pack_flow(job.flow()).replace(b"checkpoint.connectors.file_sink", b"checkpoint.connectors.gone_sink")
    with pytest.raises(IncompatibleState, match="gone_sink"):
        unpack_flow(data)


def test_a_task_that_sees_another_checkpoint_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="does not see the checkpoint folder"):
        require_storage(spec_of(tmp_path / "another", generation=1))
    with spec_of(tmp_path / "chk").storage() as storage:
        storage.claim_generation()
    require_storage(spec_of(tmp_path / "chk", generation=1))


def test_a_task_of_a_run_that_has_lost_its_job_does_not_begin(tmp_path: Path) -> None:
    with spec_of(tmp_path / "chk").storage() as storage:
        storage.claim_generation()
        storage.claim_generation()
    with pytest.raises(Conflict):
        require_storage(spec_of(tmp_path / "chk", generation=1))


def test_a_task_shows_neither_token_nor_credentials() -> None:
    spec = JobSpec(JobId("ab" * 16), "job", "run", "s3://bucket", BackendChoice(), storage_options={"secret": "hidden"})
    task = BarrierTask("127.0.0.1:1", b"token-bytes", b"flow-bytes", spec)
    assert [word for word in ("token-bytes", "flow-bytes", "hidden") if word in repr(task)] == []

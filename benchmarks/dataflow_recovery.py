"""Recovery of a whole job: from the restore of a checkpoint, local or in S3, to the first record that is processed."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.dataflow_latency import OneWriter
from benchmarks.measure import Asked, Benchmark, CannotRun, Growth, WrongAnswer
from checkpoint import CheckpointSettings, Dataflow, GeneratorSource, KeyedProcessFunction, start
from checkpoint.storage.s3 import end_idle_sessions
from statebackend import ValueStateDescriptor

NOISE = random.Random(7).randbytes(1 << 20)
"""Where values are cut from: bytes that no compression makes smaller."""


class KeepBytes(KeyedProcessFunction):
    """A hundred bytes a key; says whether the key was there before."""

    def open(self, ctx: Any) -> None:
        self.kept = ctx.state(ValueStateDescriptor("kept", bytes))

    def process(self, record: Any, ctx: Any) -> Any:
        known = self.kept.value() is not None
        begin = record * 977 % (len(NOISE) - 92)
        self.kept.update(record.to_bytes(8, "big") + NOISE[begin:begin + 92])
        yield known


class RestoreLocal(Benchmark):
    """A job with a million keys of 100 bytes on RocksDB is started from its last checkpoint, whose files are local:
    seconds from the call to the first record processed with its old state, against the limit of 1 s."""

    name = "recovery-local"
    unit = "s"
    higher_is_better = False
    baseline = "limit of 1 s"
    asked = {"rocksdb": Asked(1.0)}
    rounds = (3, 5)
    entries = 1_000_000
    growth: Growth | None = Growth("entries", (10_000, 100_000, 1_000_000))
    memory_gib, disk_gib = 2.0, 3.0

    def setup(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
        if self.quick:
            self.entries = min(self.entries, 50_000)
        self.root = self.storage()
        self.number = 0
        self.path = self._prepare()

    def storage(self) -> str:
        return str(self.folder / "checkpoints")

    def teardown(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def contenders(self) -> dict[str, Callable[[int], float]]:
        return {"limit of 1 s": lambda _seed: 1.0, "rocksdb": lambda _seed: self.to_first_record()}

    def _flow(self, take: Callable[[list[Any]], None]) -> Dataflow:
        flow, entries = Dataflow("recovery"), self.entries
        flow.source(GeneratorSource(lambda number: number % entries), uid="numbers") \
            .key_by(lambda number: number, key_type=int).process(KeepBytes(), uid="keep").sink(OneWriter(take), uid="out")
        return flow

    def _options(self, name: str) -> dict[str, Any]:
        return {"backend": {"name": "rocksdb"}, "work_dir": str(self.folder / name), "checkpoint_dir": self.root,
                "settings": CheckpointSettings()}

    def _prepare(self) -> str:
        """Fill every key once, take a checkpoint, and end the job there."""
        seen, full = 0, threading.Event()

        def take(values: list[Any]) -> None:
            nonlocal seen
            seen += len(values)
            if seen > self.entries:
                full.set()
        handle = start(self._flow(take), **self._options("fill"))
        if not full.wait(300):
            raise WrongAnswer(f"only {seen} of {self.entries} keys were filled in five minutes")
        path = handle.trigger_checkpoint(timeout=300)
        handle.cancel(timeout=120)
        return path

    def to_first_record(self) -> float:
        self.number += 1
        first, answers, moment = threading.Event(), list[bool](), list[float]()

        def take(values: list[Any]) -> None:
            if values and not first.is_set():
                moment.append(time.perf_counter())
                answers.append(values[0])
                first.set()
        began = time.perf_counter()
        handle = start(self._flow(take), restore=self.path, **self._options(f"again-{self.number}"))
        arrived = first.wait(120)
        handle.cancel(timeout=120)
        shutil.rmtree(self.folder / f"again-{self.number}", ignore_errors=True)
        if not arrived or not answers[0]:
            raise WrongAnswer("the first record did not find the state of its key")
        return moment[0] - began


class RestoreS3(RestoreLocal):
    """The same job started from its checkpoint on an S3 server of this machine (moto): seconds to the first record,
    against s3fs alone copying the files of the checkpoint to a local folder."""

    name = "recovery-s3"
    baseline = "s3fs copy"
    asked = {"rocksdb": Asked(0.7)}
    growth = None
    rounds = (3, 4)

    def contenders(self) -> dict[str, Callable[[int], float]]:
        return {"s3fs copy": lambda _seed: self._copy(), "rocksdb": lambda _seed: self._from_the_cold()}

    def _from_the_cold(self) -> float:
        """As in the process that follows a crash: there is no session with the server yet, as there is none for s3fs."""
        end_idle_sessions()
        return self.to_first_record()

    def storage(self) -> str:
        if find_spec("moto") is None or find_spec("s3fs") is None:
            raise CannotRun("moto and s3fs are needed: install the extras s3 and dev")
        with socket.socket() as chosen:
            chosen.bind(("127.0.0.1", 0))
            port = chosen.getsockname()[1]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        self.before = dict(os.environ)
        self.server = subprocess.Popen([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
                                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
        os.environ.update(AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}", AWS_ACCESS_KEY_ID="bench",
                          AWS_SECRET_ACCESS_KEY="bench", AWS_DEFAULT_REGION="us-east-1", AWS_EC2_METADATA_DISABLED="true")
        _until_it_answers(urllib.request.Request(f"http://127.0.0.1:{port}/bench", method="PUT"))
        return "s3://bench/jobs"

    def teardown(self) -> None:
        server = getattr(self, "server", None)
        if server is not None:
            server.terminate()
            server.wait(30)
            os.environ.clear()
            os.environ.update(self.before)
        super().teardown()

    def _copy(self) -> float:
        import s3fs

        self.number += 1
        target = self.folder / f"copy-{self.number}"
        job = self.path.removeprefix("s3://").rsplit("/", 1)[0]
        began = time.perf_counter()
        s3fs.S3FileSystem(skip_instance_cache=True).get(job, str(target), recursive=True)
        seconds = time.perf_counter() - began
        if not any(one.name == "_metadata" for one in target.rglob("*")):
            raise WrongAnswer("the copy has no metadata")
        shutil.rmtree(target)
        return seconds


def _until_it_answers(request: urllib.request.Request) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(request, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            if time.monotonic() > deadline:
                raise CannotRun("the S3 server did not start within a minute") from None
            time.sleep(0.1)

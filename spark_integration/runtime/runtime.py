"""`SparkRuntime`: starts a dataflow on Spark and gives the handle that every runtime gives."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from statebackend.errors import InvalidRequest

if TYPE_CHECKING:
    from checkpoint.dataflow.graph import Dataflow
    from checkpoint.runtime.deployment import Builder
    from checkpoint.runtime.executor import Executor, ExecutorListener
    from checkpoint.runtime.job import JobHandle, JobResult


class SparkRuntime:
    """Runs flows as barrier tasks of a Spark application, the coordinator on the driver.

    session  a classic Spark session, which stays the caller's; without one the active session, or a new one that is
             stopped with the job
    master   of the new session: local[4], local-cluster[2,1,1024], spark://host:7077, ...
    workers  barrier tasks, hence slots, that subtasks are spread over; as many as the widest operator unless given
    config   Spark settings of a new session, by their full names
    """

    name = "spark"
    region_restart = False

    def __init__(self, session: Any = None, *, master: str | None = None, workers: int | None = None,
                 config: Mapping[str, str] | None = None) -> None:
        self._given, self._master, self._workers, self._config = session, master, workers, dict(config or {})
        self._session: Any = None
        self._owned = False

    def run(self, flow: Dataflow, **options: Any) -> JobResult:
        """Run a flow to its end; `checkpoint.run` tells the options."""
        handle = self.start(flow, **options)
        try:
            return handle.wait()
        except KeyboardInterrupt:
            handle.cancel(timeout=60)
            raise

    def start(self, flow: Dataflow, **options: Any) -> JobHandle:
        """Start a flow in the background; `checkpoint.run` tells the options."""
        from checkpoint.runtime.job import start
        from spark_integration.session import storage_options

        try:
            root = options.get("checkpoint_dir")
            if root is not None:
                known = storage_options(self.session, str(root))
                options["storage_options"] = known | dict(options.get("storage_options") or {})
            self._require_slots(flow, options)
            return start(flow, runtime=self, **options)
        except BaseException:
            self.close()
            raise

    @property
    def session(self) -> Any:
        """The session that jobs run in; made when first asked for."""
        if self._session is None:
            self._session = self._given if self._given is not None else self._find_session()
        if not hasattr(self._session, "_jsc"):
            raise InvalidRequest("Spark Connect has no barrier tasks: flows run in a classic session",
                                 found=type(self._session).__module__)
        return self._session

    def close(self) -> None:
        """Stop the session, if this made it."""
        if self._owned and self._session is not None:
            self._session.stop()
        self._session, self._owned = None, False

    # -- Runtime -----------------------------------------------------------------------------------------------------------

    def checkpoint_root(self, given: str | None, run_id: str) -> str:
        if given is None:
            if not self.session.sparkContext.master.startswith("local"):
                raise InvalidRequest("on a cluster a flow needs a checkpoint folder that all machines reach",
                                     hint="give checkpoint_dir")
            return tempfile.mkdtemp(prefix="holdfast-")
        if given.startswith("memory:"):
            raise InvalidRequest("memory is not shared with executors: checkpoints need a folder that all of them reach",
                                 found=given)
        # Executors have working folders of their own.
        return given if "://" in given else os.path.abspath(os.path.expanduser(given))

    def executor(self, builder: Builder, listener: ExecutorListener, *, job: str | None,
                 workers: int | None) -> Executor:
        from spark_integration.runtime.executor import SparkExecutor

        try:
            return SparkExecutor(builder, listener, self.session.sparkContext, workers=workers or self._workers,
                                 closing=self.close)
        except BaseException:
            self.close()
            raise

    def _require_slots(self, flow: Dataflow, options: Mapping[str, Any]) -> None:
        """Before anything is written: a job that can't run must not fence off one that does."""
        from spark_integration.runtime.slots import require_slots

        widest = max(flow.parallelisms(options.get("parallelism")).values(), default=1)
        require_slots(self.session.sparkContext, min(options.get("workers") or self._workers or widest, widest))

    def _find_session(self) -> Any:
        from pyspark.sql import SparkSession

        from spark_integration.session import spark_session

        active = SparkSession.getActiveSession()
        if active is not None:
            running = active.sparkContext.master
            if self._master is not None and running != self._master:
                raise InvalidRequest("a session with another master is active in this process", expected=self._master,
                                     found=running, hint="stop it, or pass it as session")
            return active
        self._owned = True
        settings = {name.replace(".", "__"): value for name, value in self._config.items()}
        return spark_session(self._master or "local[*]", "holdfast run", **settings)

"""Free slots: whether Spark can run all barrier tasks of a job at once. Spark itself would wait for them without a word."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from statebackend.errors import InvalidRequest, Unavailable

WAIT_SECONDS = 60.0
"""How long executors may take to register, and the tasks of a run that ended to leave."""


@dataclass(frozen=True)
class Slots:
    """Tasks that can run at the same time, and those that do."""

    total: int
    busy: int

    @property
    def free(self) -> int:
        return self.total - self.busy


def slots_of(context: Any) -> Slots:
    """What Spark's own check for barrier stages counts, less what runs now."""
    spark = context._jsc.sc()
    total = spark.maxNumConcurrentTasks(spark.resourceProfileManager().defaultResourceProfile())
    # The scheduler's own count: what the status tracker tells can be seconds old.
    running, busy = spark.taskScheduler().runningTasksByExecutors().valuesIterator(), 0
    while running.hasNext():
        busy += int(running.next())
    return Slots(int(total), busy)


def require_slots(context: Any, needed: int, wait_seconds: float = WAIT_SECONDS) -> None:
    """Wait until so many slots are free; `Unavailable` with the numbers if they do not become so."""
    if context.getConf().get("spark.dynamicAllocation.enabled", "false").lower() == "true":
        raise InvalidRequest("Spark has no barrier tasks with dynamic allocation",
                             found="spark.dynamicAllocation.enabled=true",
                             hint="switch it off for this application, and ask for as many cores as the job has subtasks")
    deadline = time.monotonic() + wait_seconds
    while (slots := slots_of(context)).free < needed:
        if time.monotonic() >= deadline or (is_local(context) and slots.total < needed):
            raise Unavailable("Spark has too few free slots for this job: all its tasks must run at the same time",
                              needed=needed, free=slots.free, slots=slots.total, master=context.master,
                              hint="lower the parallelism, spread the subtasks over fewer tasks (workers), or give Spark "
                                   "more cores")
        time.sleep(0.1)


def is_local(context: Any) -> bool:
    """Whether tasks run inside the driver, so that no executor will ever join."""
    return bool(context.master == "local" or context.master.startswith("local["))

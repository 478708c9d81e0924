"""Run inside bytewax's environment: a keyed count; arguments: seed, keys, events, snapshot interval in seconds (0: none)."""

import json
import random
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import bytewax.operators as op
from bytewax.dataflow import Dataflow
from bytewax.outputs import DynamicSink, StatelessSinkPartition
from bytewax.recovery import RecoveryConfig, init_db_dir
from bytewax.testing import TestingSource, run_main

seed, keys, events, interval = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
draw = random.Random(seed)
names = [f"k{number:06d}" for number in range(keys)]
records = [(names[draw.randrange(keys)], 1) for _ in range(events)]
final: dict = {}


class Keep(StatelessSinkPartition):
    def write_batch(self, items):
        final.update(items)


class KeepSink(DynamicSink):
    def build(self, step_id, worker_index, worker_count):
        return Keep()


def count(state, value):
    total = (state or 0) + value
    return total, total


flow = Dataflow("count")
stream = op.stateful_map("count", op.input("in", flow, TestingSource(records, batch_size=1000)), count)
op.output("out", stream, KeepSink())
options = {}
if interval:
    folder = Path(tempfile.mkdtemp())
    init_db_dir(folder, 1)
    options = {"epoch_interval": timedelta(seconds=interval), "recovery_config": RecoveryConfig(folder, timedelta(0))}
started = time.perf_counter()
run_main(flow, **options)
seconds = time.perf_counter() - started
print(json.dumps({"events_per_second": events / seconds, "sum": sum(final.values())}))

"""Run inside pathway's environment: a keyed count; arguments: seed, keys, events, snapshot interval in seconds (0: none).

Its state is folded in Rust from whole input batches of a CSV file; no Python runs per event. With an interval it persists
its input, which is what it offers without a licence: operator state is refused.
"""

import json
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("PATHWAY_TELEMETRY_DISABLED", "1")
import pathway as pw

seed, keys, events, interval = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
draw = random.Random(seed)
folder = Path(tempfile.mkdtemp())
(folder / "in").mkdir()
with (folder / "in" / "events.csv").open("w") as stream:
    stream.write("key,value\n")
    stream.writelines(f"k{draw.randrange(keys):06d},1\n" for _ in range(events))


class Event(pw.Schema):
    key: str
    value: int


final: dict = {}


def keep(key, row, time, is_addition):
    if is_addition:
        final[row["key"]] = row["n"]


rows = pw.io.csv.read(str(folder / "in"), schema=Event, mode="static", name="events")
counts = rows.groupby(rows.key).reduce(rows.key, n=pw.reducers.sum(rows.value))
pw.io.subscribe(counts, on_change=keep)
options = {}
if interval:
    options["persistence_config"] = pw.persistence.Config(
        pw.persistence.Backend.filesystem(str(folder / "state")), snapshot_interval_ms=int(interval * 1000),
        persistence_mode=pw.PersistenceMode.PERSISTING)
started = time.perf_counter()
pw.run(monitoring_level=pw.MonitoringLevel.NONE, **options)
seconds = time.perf_counter() - started
print(json.dumps({"events_per_second": events / seconds, "sum": sum(final.values())}))
shutil.rmtree(folder, ignore_errors=True)

"""Run inside quixstreams' environment: counts in its RocksDB store; arguments: seed, keys, events, commit every, ttl."""

import json
import random
import shutil
import sys
import tempfile
import time
from datetime import timedelta

from quixstreams.state.rocksdb import RocksDBOptions, RocksDBStore

seed, keys, events, every = (int(text) for text in sys.argv[1:5])
ttl = timedelta(days=1) if sys.argv[5:] == ["ttl"] else None
draw = random.Random(seed)
sequence = [f"k{draw.randrange(keys):06d}".encode() for _ in range(events)]
folder = tempfile.mkdtemp()
store = RocksDBStore("default", "topic", folder, options=RocksDBOptions())
partition = store.assign_partition(0)
moment = 1_700_000_000_000
started = time.perf_counter()
transaction = partition.begin()
for number, key in enumerate(sequence, 1):
    state = transaction.as_state(prefix=key, timestamp=moment + number)
    value = state.get("count", 0) + 1
    if ttl:
        state.set("count", value, ttl=ttl)
    else:
        state.set("count", value)
    if number % every == 0:
        transaction.prepare()
        transaction.flush()
        transaction = partition.begin()
transaction.prepare()
transaction.flush()
seconds = time.perf_counter() - started
transaction = partition.begin()
total = sum(transaction.as_state(prefix=key, timestamp=moment + events).get("count", 0) for key in set(sequence))
print(json.dumps({"events_per_second": events / seconds, "sum": total}))
partition.close()
shutil.rmtree(folder)

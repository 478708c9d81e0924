"""Clicks per user, exactly once: `holdfast run examples/clicks.py:flow --checkpoint-dir checkpoints/`.

Reads `clicks/*.jsonl` and writes `counts/` in the folder where it is started. `CountPerUser` runs on Spark as it is:
see spark_clicks.py.
"""

from checkpoint import Dataflow, FileSink, FileSource, KeyedProcessFunction
from statebackend import ValueStateDescriptor


class CountPerUser(KeyedProcessFunction):
    def open(self, ctx):
        self.count = ctx.state(ValueStateDescriptor("count", int, default=0))

    def process(self, click, ctx):
        n = self.count.value() + 1
        self.count.update(n)
        yield {"user": ctx.key, "n": n}


flow = Dataflow("clicks", max_parallelism=128)
clicks = flow.source(FileSource("clicks/*.jsonl"), uid="clicks", parallelism=2)
counts = clicks.key_by(lambda click: click["user"], key_type=str).process(CountPerUser(), uid="count", parallelism=2)
counts.sink(FileSink("counts/"), uid="out")

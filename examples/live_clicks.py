"""A job without end, for trying things on: `holdfast run examples/live_clicks.py:flow --checkpoint-dir checkpoints/`.

Makes 10,000 clicks a second, remembers each user's count and last page, and forgets users after a day of silence.
"""

from checkpoint import Dataflow, FileSink, GeneratorSource, KeyedProcessFunction
from statebackend import TtlConfig, ValueStateDescriptor


class CountPerUser(KeyedProcessFunction):
    def open(self, ctx):
        self.count = ctx.state(ValueStateDescriptor("count", int, default=0))
        self.page = ctx.state(ValueStateDescriptor("page", str, ttl=TtlConfig("1d")))

    def process(self, click, ctx):
        self.count.update(self.count.value() + 1)
        self.page.update(click["page"])
        yield {"user": ctx.key, "n": self.count.value()}


def make_click(number):
    return {"user": f"user-{number * 7919 % 10007:05d}", "page": f"/page-{number % 50}"}


flow = Dataflow("live-clicks", max_parallelism=128)
clicks = flow.source(GeneratorSource(make_click, rate=10_000), uid="clicks")
counts = clicks.key_by(lambda click: click["user"], key_type=str).process(CountPerUser(), uid="count", parallelism=4)
counts.sink(FileSink("live-counts/"), uid="out")

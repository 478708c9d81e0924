"""The NEXMark queries 3, 4, 7, 8 and 11 twice: as functions over our state, and as SQL over the same events at rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.nexmark.events import SCHEMA
from checkpoint import KeyedProcessFunction
from statebackend import ListStateDescriptor, ValueStateDescriptor

WINDOW_MS = 10_000
"""Of the windows in queries 7 and 8, and the gap between sessions in query 11."""


class LocalItems(KeyedProcessFunction):
    """Query 3: who sells in category 10 in three states; a join that keeps both sides, by person."""

    def open(self, ctx: Any) -> None:
        self.person = ctx.state(ValueStateDescriptor("person", tuple[str, str, str]))
        self.waiting = ctx.state(ListStateDescriptor("waiting", int))

    def process(self, row: Any, ctx: Any) -> Any:
        if row["kind"] == "person":
            self.person.update((row["name"], row["city"], row["state"]))
            for auction in self.waiting.get():
                yield (row["name"], row["city"], row["state"], auction)
            self.waiting.clear()
        elif row["kind"] == "auction":
            person = self.person.value()
            if person is None:
                self.waiting.add(row["id"])
            else:
                yield (*person, row["id"])


class ClosingPrice(KeyedProcessFunction):
    """Query 4, first step: the highest bid of an auction, told when it has ended."""

    def open(self, ctx: Any) -> None:
        self.auction = ctx.state(ValueStateDescriptor("auction", tuple[int, int, int]))
        self.best = ctx.state(ValueStateDescriptor("best", int, default=0))

    def process(self, row: Any, ctx: Any) -> Any:
        if row["kind"] == "auction":
            self.auction.update((row["category"], row["ts"], row["expires"]))
            ctx.timers.register_event_time_timer(row["expires"] + 1)
        elif row["kind"] == "bid":
            auction = self.auction.value()
            if auction is not None and auction[1] <= row["ts"] <= auction[2] and row["price"] > self.best.value():
                self.best.update(row["price"])

    def on_timer(self, timestamp: int, ctx: Any) -> Any:
        auction, best = self.auction.value(), self.best.value()
        if auction is not None and best:
            yield {"category": auction[0], "price": best}
        self.auction.clear()
        self.best.clear()


class HighestBids(KeyedProcessFunction):
    """Query 7: the highest bids of each window, by window."""

    def open(self, ctx: Any) -> None:
        self.best = ctx.state(ValueStateDescriptor("best", int, default=0))
        self.bids = ctx.state(ListStateDescriptor("bids", tuple[int, int]))

    def process(self, row: Any, ctx: Any) -> None:
        if row["kind"] != "bid":
            return
        best = self.best.value()
        if not best:
            ctx.timers.register_event_time_timer(ctx.key + WINDOW_MS)
        if row["price"] > best:
            self.best.update(row["price"])
            self.bids.update([(row["auction"], row["bidder"])])
        elif row["price"] == best:
            self.bids.add((row["auction"], row["bidder"]))

    def on_timer(self, timestamp: int, ctx: Any) -> Any:
        for auction, bidder in self.bids.get():
            yield {"auction": auction, "price": self.best.value(), "bidder": bidder, "window": ctx.key}
        self.best.clear()
        self.bids.clear()


class NewSellers(KeyedProcessFunction):
    """Query 8: persons who opened an auction in the window in which they came, by person and window."""

    def open(self, ctx: Any) -> None:
        self.name = ctx.state(ValueStateDescriptor("name", str))
        self.sells = ctx.state(ValueStateDescriptor("sells", bool, default=False))

    def process(self, row: Any, ctx: Any) -> Any:
        name, sells = self.name.value(), self.sells.value()
        if row["kind"] == "person":
            self.name.update(row["name"])
            if sells:
                yield {"id": ctx.key[0], "name": row["name"], "window": ctx.key[1]}
        elif row["kind"] == "auction" and not sells:
            self.sells.update(True)
            if name is not None:
                yield {"id": ctx.key[0], "name": name, "window": ctx.key[1]}


class Sessions(KeyedProcessFunction):
    """Query 11: how many bids a person made in each session, by bidder."""

    def open(self, ctx: Any) -> None:
        self.session = ctx.state(ValueStateDescriptor("session", tuple[int, int, int]))

    def process(self, row: Any, ctx: Any) -> Any:
        if row["kind"] != "bid":
            return
        begin, last, count = self.session.value() or (row["ts"], None, 0)
        if last is not None:
            ctx.timers.delete_event_time_timer(last + WINDOW_MS)
            if row["ts"] >= last + WINDOW_MS:
                yield {"bidder": ctx.key, "bids": count, "begin": begin, "end": last + WINDOW_MS}
                begin, count = row["ts"], 0
        self.session.update((begin, row["ts"], count + 1))
        ctx.timers.register_event_time_timer(row["ts"] + WINDOW_MS)

    def on_timer(self, timestamp: int, ctx: Any) -> Any:
        session = self.session.value()
        if session is not None:
            yield {"bidder": ctx.key, "bids": session[2], "begin": session[0], "end": session[1] + WINDOW_MS}
            self.session.clear()


@dataclass(frozen=True)
class Query:
    """One query: the stream (made of the events, and a function that applies a stateful step), and the SQL."""

    stream: Callable[[Any, Callable[..., Any]], Any]
    sql: str


def _window(column: str) -> str:
    return f"{column} - {column} % {WINDOW_MS}"


def _q3(events: Any, step: Callable[..., Any]) -> Any:
    rows = events.where("(kind = 'person' and state in ('OR', 'ID', 'CA')) or (kind = 'auction' and category = 10)")
    return step(rows.selectExpr("kind", "seq", "ts", "id", "name", "city", "state",
                                "if(kind = 'person', id, seller) as person"),
                key="person", function=LocalItems(), output="name string, city string, state string, auction bigint",
                uid="q3")


def _q4(events: Any, step: Callable[..., Any]) -> Any:
    rows = events.where("kind <> 'person'").selectExpr(
        "kind", "seq", "ts", "category", "expires", "price", "coalesce(if(kind = 'bid', auction, id), -1) as item")
    closed = step(rows, key="item", function=ClosingPrice(), output="category bigint, price bigint", uid="q4-close")
    return step(closed, key="category", aggs={"mean": ("avg", "price")}, uid="q4-mean")


def _q7(events: Any, step: Callable[..., Any]) -> Any:
    rows = events.where("kind in ('bid', 'end')").selectExpr(
        "kind", "seq", "ts", "auction", "bidder", "price", f"{_window('ts')} as slot")
    return step(rows, key="slot", function=HighestBids(), uid="q7",
                output="auction bigint, price bigint, bidder bigint, window bigint")


def _q8(events: Any, step: Callable[..., Any]) -> Any:
    rows = events.where("kind in ('person', 'auction')").selectExpr(
        "kind", "seq", "ts", "name", "if(kind = 'person', id, seller) as person", f"{_window('ts')} as slot")
    return step(rows, key=["person", "slot"], function=NewSellers(), output="id bigint, name string, window bigint",
                uid="q8")


def _q11(events: Any, step: Callable[..., Any]) -> Any:
    rows = events.where("kind in ('bid', 'end')").selectExpr("kind", "seq", "ts", "coalesce(bidder, -1) as bidder")
    return step(rows, key="bidder", function=Sessions(), output="bidder bigint, bids bigint, begin bigint, end bigint",
                uid="q11")


_BIDS = "(select *, {window} as slot from events where kind = 'bid')".format(window=_window("ts"))
QUERIES = {
    "q3": Query(_q3, """
        select p.name, p.city, p.state, a.id as auction from events a join events p on a.seller = p.id
        where a.kind = 'auction' and p.kind = 'person' and a.category = 10 and p.state in ('OR', 'ID', 'CA')"""),
    "q4": Query(_q4, """
        select category, round(avg(final), 6) as mean from (
          select a.id, a.category, max(b.price) as final from events a join events b on a.id = b.auction
          where a.kind = 'auction' and b.kind = 'bid' and b.ts between a.ts and a.expires group by a.id, a.category)
        group by category"""),
    "q7": Query(_q7, f"""
        select b.auction, b.price, b.bidder, b.slot as window from {_BIDS} b
        join (select slot, max(price) as best from {_BIDS} group by slot) m on b.slot = m.slot and b.price = m.best"""),
    "q8": Query(_q8, f"""
        select distinct p.id, p.name, {_window("p.ts")} as window from events p join events a on a.seller = p.id
        where p.kind = 'person' and a.kind = 'auction' and {_window("p.ts")} = {_window("a.ts")}"""),
    "q11": Query(_q11, f"""
        select bidder, count(*) as bids, unix_millis(session_window.start) as begin,
               unix_millis(session_window.end) as end
        from events where kind = 'bid'
        group by bidder, session_window(timestamp_millis(ts), '{WINDOW_MS} milliseconds')"""),
}


def run_query(spark: Any, name: str, folder: Path, work: Path, *, backend: str = "rocksdb",
              parallelism: int = 2) -> tuple[Any, list[Any]]:
    """Run a query as a stream over all batches in a folder; its results as a DataFrame, and Spark's progress."""
    from spark_integration import aggregate, stateful

    def step(rows: Any, **arguments: Any) -> Any:
        common: dict[str, Any] = {"checkpoint": str(work / "state"), "backend": backend, "parallelism": parallelism}
        if "aggs" in arguments:
            return aggregate(rows, **arguments, **common)
        return stateful(rows, **arguments, **common, watermark=("ts", "0s"), order_by=("ts", "seq"))

    events = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(folder))
    results = work / "results"
    query = (QUERIES[name].stream(events, step).writeStream.foreachBatch(
        lambda df, batch: df.write.mode("overwrite").parquet(f"{results}/batch={batch}"))
        .option("checkpointLocation", str(work / "spark")).trigger(availableNow=True).start())
    query.awaitTermination()
    found = spark.read.option("basePath", str(results)).parquet(str(results))
    if name == "q4":  # running means: the last word on each category counts
        found = (found.selectExpr("category", "struct(batch, mean) as told").groupBy("category").agg({"told": "max"})
                 .selectExpr("category", "round(`max(told)`.mean, 6) as mean"))
    return found.drop("batch"), list(query.recentProgress)


def expected(spark: Any, name: str, folder: Path) -> Any:
    """What plain Spark SQL gives for the same events as a batch."""
    spark.read.schema(SCHEMA).parquet(str(folder)).createOrReplaceTempView("events")
    return spark.sql(QUERIES[name].sql)


def differences(found: Any, wanted: Any) -> tuple[int, int, int]:
    """Rows wanted, rows missing and rows too many."""
    found = found.select(*wanted.columns)
    return wanted.count(), wanted.exceptAll(found).count(), found.exceptAll(wanted).count()

"""Generated events of an auction house: persons, auctions and bids in the proportion 1 : 3 : 46, in order of time."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

SCHEMA = ("kind string, seq bigint, ts bigint, id bigint, name string, city string, state string, seller bigint, "
          "category bigint, expires bigint, auction bigint, bidder bigint, price bigint")
"""One row per event, in milliseconds; columns of the other kinds are null."""
CLOSING_BATCHES = 2
"""Batches of one row each, far in the future: the first moves the watermark, the second fires the timers."""
_STATES = ("AZ", "CA", "ID", "OR", "WA", "WY")
_CITIES = ("Phoenix", "Palo Alto", "San Mateo", "Boise", "Portland", "Bend", "Redmond", "Seattle", "Kent", "Cheyenne")
_BEGIN, _STEP, _END = 1_600_000_000_000, 20, 1_700_000_000_000
_CYCLE, _ACTIVE = 50, 60


def write_events(folder: Path, count: int, batches: int, seed: int) -> Path:
    """`count` events as one Parquet file per micro-batch, then the closing ones."""
    folder.mkdir(parents=True)
    table = events(count, seed)
    cuts = np.linspace(0, count, batches + 1).astype(int)
    parts = [table.slice(begin, end - begin) for begin, end in pairwise(cuts.tolist())]
    for number, part in enumerate([*parts, *[_closing(count + extra) for extra in range(CLOSING_BATCHES)]]):
        path = folder / f"{number:04d}.parquet"
        pq.write_table(part, path)
        os.utime(path, (1_600_000_000 + number,) * 2)  # file streams order by time of change
    return folder


def events(count: int, seed: int) -> pa.Table:
    """The events as one table: event n of each fifty is a person (n = 0), an auction (1 to 3) or a bid."""
    random, seq = np.random.default_rng(seed), np.arange(count)
    place, cycle = seq % _CYCLE, seq // _CYCLE
    person, auction = place == 0, (place > 0) & (place < 4)
    bid = ~person & ~auction
    ts = _BEGIN + seq * _STEP + random.integers(0, _STEP, count)
    persons, auctions = cycle + 1, np.where(auction, cycle * 3 + place, cycle * 3 + np.minimum(place, 4))
    recent_person = persons - random.integers(0, np.minimum(persons, _ACTIVE))
    known = np.maximum(np.where(bid, cycle * 3 + 3, auctions), 1)
    recent_auction = known - random.integers(0, np.minimum(known, _ACTIVE))
    return pa.table({
        "kind": np.where(person, "person", np.where(auction, "auction", "bid")), "seq": seq, "ts": ts,
        "id": _where(person | auction, np.where(person, persons - 1, auctions)),
        "name": _text([f"person-{number}" for number in (persons - 1).tolist()], person),
        "city": _text([_CITIES[index] for index in random.integers(0, len(_CITIES), count)], person),
        "state": _text([_STATES[index] for index in random.integers(0, len(_STATES), count)], person),
        "seller": _where(auction, recent_person - 1),
        "category": _where(auction, 10 + random.integers(0, 5, count)),
        "expires": _where(auction, ts + random.integers(200, 20_000, count)),
        "auction": _where(bid, recent_auction), "bidder": _where(bid, recent_person - 1),
        "price": _where(bid, np.exp(random.uniform(0, 14, count)).astype(np.int64) + 100)})


def _closing(seq: int) -> pa.Table:
    row: dict[str, Any] = dict.fromkeys([part.split()[0] for part in SCHEMA.split(", ")])
    row.update(kind="end", seq=seq, ts=_END)
    columns = {name: pa.array([value], pa.string() if name in ("kind", "name", "city", "state") else pa.int64())
               for name, value in row.items()}
    return pa.table(columns)


def _where(chosen: Any, values: Any) -> pa.Array:
    return pa.array(values, pa.int64(), mask=~chosen)


def _text(values: list[str], chosen: Any) -> pa.Array:
    return pa.array(values, pa.string(), mask=~chosen)

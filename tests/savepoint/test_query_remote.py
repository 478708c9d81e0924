"""SQL over a savepoint in a remote store fetches what it needs, not whole files."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

import savepoint
from checkpoint.storage.store import FileStore
from statebackend import ValueStateDescriptor

ROWS = 400_000


def test_a_query_fetches_only_the_columns_and_row_groups_that_it_needs(s3_root, monkeypatch) -> None:
    random = np.random.default_rng(1)
    table = pa.table({"key": np.arange(ROWS), "value": random.integers(0, 2**62, ROWS)})
    with savepoint.SavepointWriter(f"{s3_root}/sp", max_parallelism=128) as writer:
        writer.keyed("count", ValueStateDescriptor("total", int), table, key_type=int)
    fetched = []
    read_range = FileStore.read_range

    def counted(self: FileStore, path: str, start: int, end: int) -> bytes:
        fetched.append(end - start)
        return read_range(self, path, start, end)

    monkeypatch.setattr(FileStore, "read_range", counted)
    with savepoint.open(f"{s3_root}/sp") as opened:
        size = opened.metadata.full_size
        assert opened.query("select count(*) n, max(key) m from count.total").read_all().to_pylist() == [
            {"n": ROWS, "m": ROWS - 1}]
        keys_only = sum(fetched)
        assert opened.query("select sum(value) s from count.total").read_all().column("s").to_pylist() == [
            int(table.column("value").to_numpy().astype(object).sum())]
    assert size > 2_500_000
    assert keys_only < size / 2

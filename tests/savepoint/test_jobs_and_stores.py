"""Savepoints of running jobs, restores at other parallelism, records in flight, S3 and back, and damage that is found."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

import savepoint
from checkpoint import CheckpointSettings, CollectSink, Dataflow, GeneratorSource, KeyedProcessFunction, start
from statebackend import ValueStateDescriptor, key_group_of


class Count(KeyedProcessFunction):
    def open(self, ctx: Any) -> None:
        self.count = ctx.state(ValueStateDescriptor("count", int, default=0))

    def process(self, value: Any, ctx: Any) -> Any:
        self.count.update(self.count.value() + 1)
        yield (ctx.key, self.count.value())


def counting(*, count: int | None, rate: float | None = None, parallelism: int = 2) -> Dataflow:
    flow = Dataflow("counting", max_parallelism=64)
    numbers = flow.source(GeneratorSource(lambda n: n, rate=rate, count=count), uid="numbers", parallelism=1)
    keyed = numbers.key_by(lambda n: f"k{n % 40}", key_type=str).process(Count(), uid="count", parallelism=parallelism)
    keyed.sink(CollectSink(), uid="out")
    return flow


def totals(path: Any) -> dict[str, int]:
    with savepoint.open(path) as opened:
        frame = opened.to_pandas("count", "count")
    return dict(zip(frame["key"], frame["value"]))


@pytest.mark.parametrize("backend", ["filesystem", "rocksdb"])
def test_a_running_job_writes_an_open_savepoint_and_restores_from_it_at_another_parallelism(tmp_path, backend) -> None:
    settings = CheckpointSettings(interval=None)
    handle = start(counting(count=None, rate=4000.0), checkpoint_dir=str(tmp_path / "chk"), backend=backend,
                   settings=settings)
    time.sleep(0.5)
    path = handle.stop_with_savepoint(str(tmp_path / "savepoints"), format="open", timeout=60)
    handle.wait()
    assert savepoint.verify_savepoint(path)
    before = totals(path)
    with savepoint.open(path) as opened:
        assert opened.metadata.format == "open"
    seen = sum(before.values())
    edited = tmp_path / "edited"
    with savepoint.Edit(path, [{"op": "set", "operator": "count", "state": "count", "key": "k1", "value": 10**6}]) as edit:
        edit.write(edited)
    done = start(counting(count=seen + 400, parallelism=3), checkpoint_dir=str(tmp_path / "chk2"), backend=backend,
                 settings=settings, restore=str(edited)).wait()
    after = totals(done.checkpoint)
    before["k1"] = 10**6
    assert after == {key: before.get(key, 0) + 10 for key in (f"k{number}" for number in range(40))}


def test_a_savepoint_goes_to_s3_and_back(open_savepoint_path, s3_root, tmp_path, rows_of) -> None:
    savepoint.copy_savepoint(open_savepoint_path, f"{s3_root}/sp")
    with savepoint.open(f"{s3_root}/sp") as remote:
        assert remote.lookup("count", "total", "user-17") == 17
        assert remote.read("count", "total", key_groups=key_group_of("user-17", 128)).read_all().num_rows > 0
        assert remote.query("select sum(value) s from count.total").read_all().to_pylist() == [{"s": sum(range(200))}]
        assert remote.read("count", "offsets").read_all().num_rows == 4
    savepoint.rescale_savepoint(f"{s3_root}/sp", f"{s3_root}/wide", max_parallelism=256)
    assert savepoint.verify_savepoint(f"{s3_root}/wide")
    assert not savepoint.compare(open_savepoint_path, f"{s3_root}/sp")
    savepoint.convert_savepoint(f"{s3_root}/wide", tmp_path / "back")
    assert rows_of(tmp_path / "back", "count", "total") == rows_of(open_savepoint_path, "count", "total")
    assert [item.path.rpartition("/")[2] for item in savepoint.list_savepoints(s3_root)] == ["sp", "wide"]
    savepoint.plan_disposal(f"{s3_root}/wide").apply()
    assert [item.path.rpartition("/")[2] for item in savepoint.list_savepoints(s3_root)] == ["sp"]


def test_a_write_that_fails_half_way_leaves_nothing_in_s3(open_savepoint_path, s3_root) -> None:
    def stop(done: int, total: int) -> None:
        if done > 100:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        savepoint.rescale_savepoint(open_savepoint_path, f"{s3_root}/new", max_parallelism=64, progress=stop)
    from checkpoint.storage.store import FileStore

    with FileStore.at(s3_root) as store:
        assert store.list("", temporary=True) == []


def damaged(path: Path, change: Any) -> list[str]:
    change(path)
    return [problem.message for problem in savepoint.verify_savepoint(path).problems]


def flip(path: Path) -> None:
    part = next((path / "count/keyed/total").iterdir())
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 0xFF
    part.write_bytes(data)


def forge(path: Path, change: Any) -> None:
    import xxhash

    data = json.loads((path / "_metadata").read_bytes())
    data.pop("checksum")
    change(data["operators"][0]["subtasks"][0]["keyed"][0])
    body = json.dumps(data, separators=(",", ":")).encode()[:-1]
    (path / "_metadata").write_bytes(body + b',"checksum":"' + xxhash.xxh3_128_hexdigest(body).encode() + b'"}')


@pytest.mark.parametrize(("change", "message"), [
    (flip, "checksum"),
    (lambda path: next((path / "count/keyed/total").iterdir()).unlink(), "is not there|missing|no such|not found"),
    (lambda path: forge(path, lambda handle: handle["meta"]["states"]["total"]["counts"].__setitem__(0, 9)), "by key group"),
    (lambda path: forge(path, lambda handle: handle.__setitem__("key_groups", [0, 50])), "gap|outside|range"),
    (lambda path: forge(path, lambda handle: handle.__setitem__("max_parallelism", 64)), "wrong key group|different")])
def test_verify_finds_damage(open_savepoint_path, change, message) -> None:
    import re

    found = damaged(open_savepoint_path, change)
    assert any(re.search(message, text, re.I) for text in found), found


def test_verify_finds_keys_in_wrong_groups_and_rows_out_of_order(tmp_path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with savepoint.SavepointWriter(tmp_path / "sp", max_parallelism=4) as writer:
        writer.keyed("u", ValueStateDescriptor("v", int), pa.table({"key": range(100), "value": range(100)}), key_type=int)
    part = tmp_path / "sp/u/keyed/v/part-0-3.parquet"
    table = pq.read_table(part)
    pq.write_table(table.take(list(range(99, -1, -1))).set_column(0, "key_group", table.column(0)), part)
    import xxhash

    data = json.loads((tmp_path / "sp/_metadata").read_bytes())
    data.pop("checksum")
    file = data["operators"][0]["subtasks"][0]["keyed"][0]["files"][0]
    file["size"], file["checksum"] = part.stat().st_size, xxhash.xxh3_128_hexdigest(part.read_bytes())
    body = json.dumps(data, separators=(",", ":")).encode()[:-1]
    (tmp_path / "sp/_metadata").write_bytes(body + b',"checksum":"' + xxhash.xxh3_128_hexdigest(body).encode() + b'"}')
    found = " ".join(problem.message for problem in savepoint.verify_savepoint(tmp_path / "sp").problems)
    assert "wrong key group" in found
    assert "not sorted" in found

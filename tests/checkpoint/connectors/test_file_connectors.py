"""File source and file sink: formats, positions, new files, hidden files, damage."""

from __future__ import annotations

import csv
import json
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from checkpoint import CheckpointSettings, CollectionSource, CollectSink, Dataflow, FileSink, FileSource, run, start
from statebackend import CorruptData, InvalidRequest


def lines(path: Path, records, *, end: str = "\n") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(record) for record in records) + end)


def copy_flow(source: FileSource, sink, *, parallelism: int = 1) -> Dataflow:
    flow = Dataflow("copy")
    flow.source(source, uid="files", parallelism=parallelism).sink(sink, uid="out")
    return flow


def read_all(source: FileSource, **options) -> list:
    sink = CollectSink()
    run(copy_flow(source, sink), **options)
    return sink.results


def committed(folder: Path) -> list:
    visible = sorted(path for path in folder.glob("*.jsonl") if not path.name.startswith("."))
    return [json.loads(line) for path in visible for line in path.read_text().splitlines()]


@dataclass
class Click:
    user: str
    n: int


@pytest.mark.parametrize("parallelism", [1, 3])
def test_all_lines_of_all_files_are_read_once(tmp_path, parallelism):
    for number in range(5):
        lines(tmp_path / f"in/{number}.jsonl", [{"n": number * 1000 + index} for index in range(1000)])
    (tmp_path / "in/.hidden.jsonl").write_text("no json")
    sink = CollectSink()
    run(copy_flow(FileSource(str(tmp_path / "in/*.jsonl")), sink, parallelism=parallelism))
    assert sorted(record["n"] for record in sink.results) == list(range(5000))


def test_csv_and_parquet_give_rows_and_records(tmp_path):
    (tmp_path / "a.csv").write_text("user,n\nann,1\nbob,2\n")
    pq.write_table(pa.table({"user": ["eve"], "n": [3]}), tmp_path / "b.parquet")
    assert read_all(FileSource(tmp_path / "a.csv")) == [{"user": "ann", "n": "1"}, {"user": "bob", "n": "2"}]
    assert read_all(FileSource(tmp_path / "b.parquet")) == [{"user": "eve", "n": 3}]
    sink = CollectSink(record_type=Click)
    run(copy_flow(FileSource([tmp_path / "a.csv", tmp_path / "b.parquet"], record_type=Click), sink))
    assert sink.results == [Click("ann", 1), Click("bob", 2), Click("eve", 3)]


def test_blank_lines_and_a_last_line_without_an_end_are_no_trouble(tmp_path):
    (tmp_path / "a.jsonl").write_text('\n{"n": 1}\n\n\n{"n": 2}\n{"n": 3}')
    assert read_all(FileSource(tmp_path / "a.jsonl")) == [{"n": 1}, {"n": 2}, {"n": 3}]


def test_a_byte_order_mark_is_no_part_of_the_first_record(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n{"n": 2}\n', encoding="utf-8-sig")
    (tmp_path / "b.csv").write_text("n\n3\n", encoding="utf-8-sig")
    assert read_all(FileSource(tmp_path / "a.jsonl")) == [{"n": 1}, {"n": 2}]
    assert read_all(FileSource(tmp_path / "b.csv")) == [{"n": "3"}]


def test_a_line_that_is_no_json_is_named_with_its_place(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n{"n": \n')
    with pytest.raises(CorruptData, match=r"a\.jsonl.*position=9"):
        read_all(FileSource(tmp_path / "a.jsonl"))


def test_a_source_that_finds_no_file_says_so_and_ends(tmp_path, caplog):
    assert read_all(FileSource(tmp_path / "mistyped.jsonl")) == []
    assert "found no file" in caplog.text
    assert "mistyped.jsonl" in caplog.text


def test_a_name_that_tells_no_format_is_refused(tmp_path):
    (tmp_path / "a.log").write_text("{}\n")
    with pytest.raises(InvalidRequest, match="format="):
        read_all(FileSource(tmp_path / "a.log"))
    assert read_all(FileSource(tmp_path / "a.log", format="jsonl")) == [{}]
    with pytest.raises(InvalidRequest, match="xml"):
        FileSource("a.xml", format="xml")


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_a_restored_source_goes_on_in_the_middle_of_a_file_and_reads_what_has_come_since(tmp_path, suffix):
    def write(name: str, begin: int, end: int) -> None:
        path = tmp_path / f"in/{name}.{suffix}"
        path.parent.mkdir(exist_ok=True)
        rows = [{"n": number} for number in range(begin, end)]
        if suffix == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        elif suffix == "csv":
            path.write_text("n\n" + "".join(f"{row['n']}\n" for row in rows))
        else:
            lines(path, rows)

    write("a", 0, 30_000)
    gate = threading.Event()

    def slowly(record):
        if int(record["n"]) == 12_000:
            gate.wait(20)
        return {"n": int(record["n"])}

    def flow_of(sink) -> Dataflow:
        flow = Dataflow("middle")
        flow.source(FileSource(str(tmp_path / f"in/*.{suffix}")), uid="files").map(slowly, uid="slowly") \
            .sink(sink, uid="out")
        return flow

    handle = start(flow_of(FileSink(tmp_path / "out")), checkpoint_dir=str(tmp_path / "chk"),
                   settings=CheckpointSettings())
    time.sleep(0.3)
    threading.Timer(0.2, gate.set).start()
    handle.stop_with_checkpoint(timeout=30)
    first = len(committed(tmp_path / "out"))
    write("b", 30_000, 31_000)
    run(flow_of(FileSink(tmp_path / "out")), checkpoint_dir=str(tmp_path / "chk"), restore="latest", parallelism=2)
    assert 0 < first <= 31_000
    assert sorted(record["n"] for record in committed(tmp_path / "out")) == list(range(31_000))


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_a_file_that_was_cut_after_it_was_read_is_told(tmp_path, suffix, caplog):
    path = tmp_path / f"a.{suffix}"
    path.write_text("n\n1\n2\n3\n" if suffix == "csv" else "1\n2\n3\n")
    where = {"checkpoint_dir": str(tmp_path / "chk")}
    sink = CollectSink()
    run(copy_flow(FileSource(path), sink), **where)
    path.write_text("n\n4\n" if suffix == "csv" else "4\n")
    run(copy_flow(FileSource(path), sink), restore="latest", **where)
    assert len(sink.results) == 3
    assert f"a.{suffix} is shorter than what was read of it" in caplog.text


def test_a_file_that_was_cut_before_it_was_read_to_its_end_is_an_error(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"n": {n}}}\n' for n in range(200_000)))
    flow = Dataflow("copy")
    flow.source(FileSource(path), uid="files").filter(lambda record: time.sleep(0.0002) is None) \
        .sink(CollectSink(), uid="out")
    handle = start(flow, checkpoint_dir=str(tmp_path / "chk"), settings=CheckpointSettings())
    while not handle.records().get("out", {}).get("records_in"):
        time.sleep(0.01)
    handle.stop_with_checkpoint(timeout=60)
    path.write_text("")
    with pytest.raises(CorruptData, match=r"shorter than what was read of it.*a\.jsonl.*position="):
        run(copy_flow(FileSource(path), CollectSink()), checkpoint_dir=str(tmp_path / "chk"), restore="latest")


def test_a_watching_source_finds_new_files_and_new_lines(tmp_path):
    lines(tmp_path / "in/a.jsonl", [{"n": 0}])
    sink = CollectSink()
    handle = start(copy_flow(FileSource(str(tmp_path / "in/*.jsonl"), watch="30ms"), sink, parallelism=2),
                   settings=CheckpointSettings(interval="30ms"))

    def wait_for(count: int) -> None:
        deadline = time.monotonic() + 20
        while len(sink.results) < count and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(sink.results) == count

    wait_for(1)
    lines(tmp_path / "in/b.jsonl", [{"n": 1}, {"n": 2}])
    wait_for(3)
    with open(tmp_path / "in/a.jsonl", "a") as stream:
        stream.write('{"n": 3}\n{"n": 4')
        stream.flush()
        wait_for(4)
        stream.write("}\n")
    wait_for(5)
    handle.cancel(timeout=10)
    assert sorted(record["n"] for record in sink.results) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
def test_the_sink_writes_every_format(tmp_path, form):
    flow = Dataflow("write")
    flow.source(CollectionSource([{"user": "ann", "n": 1}, {"user": "bob", "n": 2}]), uid="s") \
        .sink(FileSink(tmp_path / "out", format=form), uid="out")
    run(flow)
    (path,) = (tmp_path / "out").iterdir()
    assert path.suffix == f".{form}"
    assert not path.name.startswith(".")
    if form == "jsonl":
        assert [json.loads(line)["n"] for line in path.read_text().splitlines()] == [1, 2]
    elif form == "csv":
        assert list(csv.DictReader(path.read_text().splitlines())) == [{"user": "ann", "n": "1"}, {"user": "bob", "n": "2"}]
    else:
        assert pq.read_table(path).to_pylist() == [{"user": "ann", "n": 1}, {"user": "bob", "n": 2}]


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_record_with_more_fields_than_the_first_is_refused_and_not_cut(tmp_path, form):
    flow = Dataflow("write")
    flow.source(CollectionSource([{"a": 1, "b": 2}, {"a": 3}, {"a": 4, "c": 5}]), uid="s") \
        .sink(FileSink(tmp_path, format=form), uid="out")
    with pytest.raises(InvalidRequest, match=r"other fields than the first.*'c'"):
        run(flow)


def test_a_field_that_a_record_lacks_is_null_in_parquet(tmp_path):
    flow = Dataflow("write")
    flow.source(CollectionSource([{"a": 1, "b": 2}, {"a": 3}]), uid="s") \
        .sink(FileSink(tmp_path, format="parquet"), uid="out")
    run(flow)
    (path,) = tmp_path.iterdir()
    assert pq.read_table(path).to_pylist() == [{"a": 1, "b": 2}, {"a": 3, "b": None}]


def test_what_is_not_committed_is_hidden_and_goes_after_the_next_checkpoint(tmp_path):
    from checkpoint import GeneratorSource

    out = tmp_path / "out"

    def flow_of(count, rate) -> Dataflow:
        flow = Dataflow("hidden")
        flow.source(GeneratorSource(lambda number: {"n": number}, count=count, rate=rate), uid="s") \
            .sink(FileSink(out), uid="out")
        return flow

    handle = start(flow_of(None, 20_000), checkpoint_dir=str(tmp_path / "chk"), settings=CheckpointSettings())
    while not list(out.glob(".part*")):
        time.sleep(0.01)
    assert not committed(out)
    handle.trigger_checkpoint(timeout=20)
    handle.cancel(timeout=20)
    (out / f".part-out-{handle.job_id[:12]}-dead0000.0-00000-aaaaaaaaaaaa.jsonl").write_text("left behind\n")
    (out / ".part-out-other-run.jsonl").write_text("not ours\n")
    done = len(committed(out))
    run(flow_of(done + 10, None), checkpoint_dir=str(tmp_path / "chk"), restore="latest")
    assert [record["n"] for record in sorted(committed(out), key=lambda r: r["n"])] == list(range(done + 10))
    assert [path.name for path in out.iterdir() if path.name.startswith(".")] == [".part-out-other-run.jsonl"]


def test_a_record_that_is_no_json_is_refused_with_advice(tmp_path):
    flow = Dataflow("bad")
    flow.source(CollectionSource([1]), uid="s").map(lambda n: object(), uid="m").sink(FileSink(tmp_path), uid="o")
    with pytest.raises(InvalidRequest, match="JSON"):
        run(flow)


def test_memory_urls_work_like_folders(tmp_path):
    import fsspec

    name = tmp_path.name
    with fsspec.open(f"memory://{name}/in/a.jsonl", "w") as stream:
        stream.write('{"n": 1}\n{"n": 2}\n')
    run(copy_flow(FileSource(f"memory://{name}/in/*.jsonl"), FileSink(f"memory://{name}/out")))
    (path,) = fsspec.filesystem("memory").glob(f"/{name}/out/*.jsonl")
    assert fsspec.filesystem("memory").cat_file(path) == b'{"n":1}\n{"n":2}\n'


def numbers_to(folder: Path, count: int | None, rate: float | None = None, **options: str) -> Dataflow:
    from checkpoint import GeneratorSource

    flow = Dataflow("numbers")
    flow.source(GeneratorSource(lambda number: {"n": number}, count=count, rate=rate), uid="s") \
        .sink(FileSink(folder, **options), uid="out")
    return flow


def test_output_that_is_lost_stops_a_sink_whose_files_nobody_takes_away(tmp_path):
    out = tmp_path / "out"
    handle = start(numbers_to(out, None, 2_000, lost="fail"), checkpoint_dir=str(tmp_path / "chk"),
                   settings=CheckpointSettings(savepoint_dir=str(tmp_path / "savepoints")))
    while not list(out.glob(".part*")):
        time.sleep(0.01)
    savepoint = handle.trigger_savepoint(timeout=60)
    handle.cancel(timeout=60)
    saved = {path: path.read_bytes() for path in out.iterdir()}
    for path in saved:
        path.unlink()
    with pytest.raises(CorruptData, match=r"neither pending nor committed.*part-out.*lost='warn'"):
        run(numbers_to(out, 30_000, lost="fail"), restore=savepoint)
    for path, content in saved.items():
        path.write_bytes(content)
    run(numbers_to(out, 30_000, lost="fail"), restore=savepoint)
    assert sorted(record["n"] for record in committed(out)) == list(range(30_000))


def test_a_sink_that_is_told_nonsense_about_lost_files_is_refused(tmp_path):
    with pytest.raises(InvalidRequest, match="warn or fail"):
        FileSink(tmp_path, lost="shrug")


def test_a_job_goes_on_where_its_readers_have_taken_the_committed_files_away(tmp_path, caplog):
    out = tmp_path / "out"
    run(numbers_to(out, 10), checkpoint_dir=str(tmp_path / "chk"))
    assert len(committed(out)) == 10
    for path in out.iterdir():
        path.unlink()
    run(numbers_to(out, 15), checkpoint_dir=str(tmp_path / "chk"), restore="latest")
    assert sorted(record["n"] for record in committed(out)) == list(range(10, 15))
    assert "neither pending nor committed" in caplog.text


def test_a_restored_job_with_another_folder_completes_the_files_of_the_old_one(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    handle = start(numbers_to(old, None, 2_000), checkpoint_dir=str(tmp_path / "chk"), settings=CheckpointSettings())
    while not list(old.glob(".part*")):
        time.sleep(0.01)
    savepoint = handle.trigger_savepoint(str(tmp_path / "savepoints"), timeout=20)
    handle.cancel(timeout=20)
    assert not committed(old)
    run(numbers_to(new, 30_000), checkpoint_dir=str(tmp_path / "other"), restore=savepoint)
    assert committed(old)
    assert sorted(record["n"] for record in committed(old) + committed(new)) == list(range(30_000))

"""How records lie in files: JSON lines, CSV and Parquet, read from a position and written in batches."""

from __future__ import annotations

import codecs
import csv
import io
from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import islice
from typing import Any, BinaryIO

import msgspec

from checkpoint.connectors.files import open_for_reading
from checkpoint.dataflow.records import record_fields
from statebackend.errors import CorruptData, InvalidRequest

READ_BYTES = 1 << 18
_BY_SUFFIX = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".parquet": "parquet"}
FORMATS = ("jsonl", "csv", "parquet")


def format_of(path: str, chosen: str | None) -> str:
    """The format of a file: as told, else by its suffix."""
    if chosen is not None:
        return chosen
    for suffix, name in _BY_SUFFIX.items():
        if path.endswith(suffix):
            return name
    raise InvalidRequest("the format of a file does not follow from its name", path=path,
                         hint=f"say format= one of {', '.join(FORMATS)}")


class FileReader(ABC):
    """Reads one file from a position. `position` is where the next record is: bytes for JSON lines, else records."""

    path: str
    is_short = False
    """Whether the file ended before the position was reached: it is not the file that was read up to there."""

    @abstractmethod
    def read(self, limit: int) -> list[Any]:
        """Up to `limit` records; empty at the end of what is there now."""

    @property
    @abstractmethod
    def position(self) -> int: ...

    @abstractmethod
    def close(self) -> None: ...


def open_reader(path: str, position: int, chosen: str | None, record_type: Any, *, growing: bool) -> FileReader:
    """`growing`: the file may still be written, so a last line without its end is not yet a record."""
    kind = format_of(path, chosen)
    if kind == "jsonl":
        return JsonLinesReader(path, position, record_type, growing=growing)
    rows = _csv_rows(path) if kind == "csv" else _parquet_rows(path)
    return RowReader(path, rows, position, record_type)


class JsonLinesReader(FileReader):
    """Reads blocks and decodes all their lines in one call."""

    def __init__(self, path: str, position: int, record_type: Any, *, growing: bool) -> None:
        self.path = path
        self._growing = growing
        self._decoder = msgspec.json.Decoder(record_type) if record_type is not None else msgspec.json.Decoder()
        self._stream = open_for_reading(path)
        self.is_short = self._stream.seek(0, io.SEEK_END) < position
        self._stream.seek(position)
        self._base = position
        self._values: list[Any] = []
        self._sizes: list[int] = []
        self._taken = 0

    @property
    def position(self) -> int:
        return self._base + sum(self._sizes[:self._taken])

    def read(self, limit: int) -> list[Any]:
        if self._taken >= len(self._values):
            self._fill()
        values = self._values[self._taken:self._taken + limit]
        self._taken += len(values)
        return values

    def close(self) -> None:
        self._stream.close()

    def _fill(self) -> None:
        self._base += sum(self._sizes)
        self._values, self._sizes, self._taken = [], [], 0
        lines = self._stream.readlines(READ_BYTES)
        if lines and not lines[-1].endswith(b"\n") and self._growing:
            self._stream.seek(-len(lines.pop()), io.SEEK_CUR)
        if not lines:
            return
        try:
            values = self._decoder.decode_lines(b"".join(lines))
        except (msgspec.DecodeError, UnicodeDecodeError):
            values = None
        if values is None or len(values) != len(lines):
            values, lines = self._one_by_one(lines)
        self._values, self._sizes = values, [len(line) for line in lines]

    def _one_by_one(self, lines: list[bytes]) -> tuple[list[Any], list[bytes]]:
        """With a BOM before or blank lines among them, which count for a record, or a line that is no JSON: it is named."""
        values, sizes, offset = list[Any](), list[bytes](), self._base
        for line in lines:
            if line.strip():
                try:
                    values.append(self._decoder.decode(line.removeprefix(codecs.BOM_UTF8) if offset == 0 else line))
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise CorruptData(f"a line is no JSON record: {error}", path=self.path, position=offset,
                                      found=line[:100].decode(errors="replace")) from error
                sizes.append(line)
            elif sizes:
                sizes[-1] += line
            else:
                self._base += len(line)
            offset += len(line)
        return values, sizes


class RowReader(FileReader):
    """Reads rows from an iterator; the position is the number of rows before."""

    def __init__(self, path: str, rows: Iterator[dict[str, Any]], position: int, record_type: Any) -> None:
        self.path, self._rows, self._record_type = path, rows, record_type
        self._position = position
        self.is_short = sum(1 for _ in islice(rows, position)) < position

    @property
    def position(self) -> int:
        return self._position

    def read(self, limit: int) -> list[Any]:
        rows: list[Any] = list(islice(self._rows, limit))
        self._position += len(rows)
        if self._record_type is None:
            return rows
        try:
            return [msgspec.convert(row, self._record_type, strict=False) for row in rows]
        except msgspec.ValidationError as error:
            raise CorruptData(f"a row is no {self._record_type.__name__}: {error}", path=self.path) from error

    def close(self) -> None:
        close = getattr(self._rows, "close", None)
        if close is not None:
            close()


def _csv_rows(path: str) -> Iterator[dict[str, Any]]:
    with io.TextIOWrapper(open_for_reading(path), encoding="utf-8-sig", newline="") as text:
        yield from csv.DictReader(text)


def _parquet_rows(path: str) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with open_for_reading(path) as stream:
        try:
            for batch in pq.ParquetFile(stream).iter_batches():
                yield from batch.to_pylist()
        except pa.ArrowException as error:
            raise CorruptData(f"this is no Parquet file: {error}", path=path) from error


class BatchWriter(ABC):
    """Writes batches of records to a stream."""

    @abstractmethod
    def write(self, values: list[Any]) -> None: ...

    def end(self) -> None:
        """Write what belongs at the end of the file."""


def open_writer(kind: str, stream: BinaryIO) -> BatchWriter:
    if kind == "jsonl":
        return _JsonLinesWriter(stream)
    return _CsvWriter(stream) if kind == "csv" else _ParquetWriter(stream)


class _JsonLinesWriter(BatchWriter):
    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._encode = msgspec.json.Encoder().encode_lines

    def write(self, values: list[Any]) -> None:
        try:
            self._stream.write(self._encode(values))
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidRequest(f"a record can't be written as JSON: {error}",
                                 hint="map it to plain values before the sink") from error


class _CsvWriter(BatchWriter):
    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._columns: list[str] | None = None

    def write(self, values: list[Any]) -> None:
        rows = [as_row(value) for value in values]
        text = io.StringIO()
        if self._columns is None:
            self._columns = list(rows[0])
            csv.DictWriter(text, self._columns).writeheader()
        try:
            csv.DictWriter(text, self._columns, lineterminator="\r\n").writerows(rows)
        except ValueError as error:
            raise InvalidRequest(f"a record has other fields than the first one: {error}",
                                 hint="give every record all fields, with None where there is no value") from error
        self._stream.write(text.getvalue().encode())


class _ParquetWriter(BatchWriter):
    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._columns: frozenset[str] | None = None
        self._rows: list[dict[str, Any]] = []
        self._writer: Any = None

    def write(self, values: list[Any]) -> None:
        rows = [as_row(value) for value in values]
        if self._columns is None:
            self._columns = frozenset(rows[0])
        more = next((row.keys() - self._columns for row in rows if not row.keys() <= self._columns), None)
        if more:  # Arrow would leave them out without a word
            raise InvalidRequest("a record has other fields than the first one", expected=sorted(self._columns),
                                 found=sorted(more), hint="give every record all fields, with None where there is no value")
        self._rows.extend(rows)
        if len(self._rows) >= 64 * 1024:
            self._flush()

    def end(self) -> None:
        self._flush()
        if self._writer is not None:
            self._writer.close()

    def _flush(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if not self._rows:
            return
        try:
            table = pa.Table.from_pylist(self._rows, self._writer.schema if self._writer is not None else None)
        except pa.ArrowException as error:
            raise InvalidRequest(f"records do not fit one Parquet schema: {error}") from error
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._stream, table.schema)
        self._writer.write_table(table)
        self._rows = []


def as_row(value: Any) -> dict[str, Any]:
    """A record as named columns; a plain value is the column `value`."""
    if isinstance(value, dict):
        return value
    if hasattr(value, "__dataclass_fields__") or hasattr(value, "_fields"):
        return {name: getattr(value, name) for name in record_fields(type(value))}
    return {"value": value}

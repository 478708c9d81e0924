"""How results reach the user: data to stdout in one of seven formats, everything else to stderr.

Inspection gives Arrow or plain rows; this module only renders. A table is for people (sizes and numbers are
rounded, long values cut), all other formats are exact.
"""

from __future__ import annotations

import csv
import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from api.cli import settings
from statebackend.errors import InvalidRequest

if TYPE_CHECKING:
    import pyarrow as pa
    from rich.console import Console


class Format(StrEnum):
    """The formats of `-o`."""

    TABLE = "table"
    JSON = "json"
    JSONL = "jsonl"
    CSV = "csv"
    PARQUET = "parquet"
    ARROW = "arrow"
    NAME = "name"


Output = Annotated[Format | None, typer.Option(
    "--output", "-o", envvar="HOLDFAST_OUTPUT", show_default=False,
    help="Format of the result; a table on a terminal and jsonl in a pipe unless given.")]
"""The type of a command's `output` parameter."""

Row = Mapping[str, Any]
Progress = Callable[[int, int], None]
"""Called by the library with rows (or bytes) done and the total, 0 where it is not known."""


def chosen(output: Format | None) -> Format:
    """The format in force: as asked, else by where stdout goes."""
    if output is not None:
        return output
    return Format.TABLE if sys.stdout.isatty() else Format.JSONL


def color(stream: Any = None) -> bool:
    """Colours are for terminals, and never under NO_COLOR."""
    return (stream or sys.stdout).isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def console(*, stderr: bool = False) -> Console:
    """A rich console on stdout or stderr."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else 200
    return Console(stderr=stderr, no_color=not color(stream), highlight=False, width=width, soft_wrap=False)


def note(message: str) -> None:
    """A line for people on stderr; nothing under --quiet."""
    if not settings.quiet():
        print(message, file=sys.stderr)


def error(message: str) -> None:
    """An error on stderr, on one line."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)


def warn(message: str) -> None:
    """A warning on stderr, also under --quiet."""
    print(f"warning: {message}", file=sys.stderr)


def emit_rows(rows: Iterable[Row], output: Format | None, *, name: str, title: str | None = None,
              columns: Sequence[str] | None = None, human: Mapping[str, Callable[[Any], str]] | None = None,
              empty: bool = True) -> int:
    """Print plain rows; how many there were. `name` is the column that `-o name` prints; `human` renders columns of the
    table; without `empty` nothing is printed where there are no rows. JSON lines and names are printed as rows come."""
    form = chosen(output)
    if form in (Format.JSONL, Format.NAME):
        count = 0
        for row in rows:
            count += 1
            _line(_dumps(row) if form is Format.JSONL else str(row.get(name, next(iter(row.values()), ""))))
        return count
    found = [dict(row) for row in rows]
    if not found and not empty:
        return 0
    names = list(columns or dict.fromkeys(key for row in found for key in row))
    if form is Format.TABLE:
        _table(found, names, human or {}, title)
    elif form is Format.JSON:
        _line(_dumps(found, indent=True))
    elif form is Format.CSV:
        _csv(found, names)
    else:
        import pyarrow as pa

        flat = [{key: row.get(key) if _is_plain(row.get(key)) else _dumps(row.get(key)) for key in names}
                for row in found]
        table = pa.Table.from_pylist(flat) if flat else pa.table({key: pa.array([], pa.null()) for key in names})
        _binary(table.to_reader(), form)
    return len(found)


def emit_object(value: Row, output: Format | None, *, name: str, show: Callable[[], None]) -> None:
    """Print one document: exact as JSON, or by `show` as something for people."""
    form = chosen(output)
    if form is Format.TABLE:
        show()
    elif form in (Format.JSON, Format.JSONL):
        _line(_dumps(value, indent=form is Format.JSON))
    elif form is Format.NAME:
        _line(str(value[name]))
    else:
        emit_rows([value], form, name=name)


def emit_batches(reader: pa.RecordBatchReader, output: Format | None, *, name: str = "key",
                 limit: int | None = None, human_limit: int = 1000, types: Mapping[str, Any] | None = None) -> int:
    """Stream Arrow batches to stdout; the number of rows printed. A table stops at `human_limit` and says so.

    `types` are the state types of columns, where known: text then shows UUIDs and tuples as what they are.
    """
    form = chosen(output)
    if form in (Format.PARQUET, Format.ARROW):
        return _binary(reader, form, limit)
    if form is Format.TABLE:
        return _batches_as_table(reader, limit, human_limit, types or {})
    return _batches_as_text(reader, form, name, limit, types or {})


def _batches_as_table(reader: pa.RecordBatchReader, limit: int | None, human_limit: int, types: Mapping[str, Any]) -> int:
    from savepoint.values import plain_rows

    rows: list[dict[str, Any]] = []
    wanted = human_limit if limit is None else limit
    more = False
    for batch in reader:
        if len(rows) >= wanted and batch.num_rows:
            more = limit is None
            break
        more = limit is None and batch.num_rows > wanted - len(rows)
        rows += plain_rows(batch.slice(0, wanted - len(rows)), types)
    _table(rows, reader.schema.names, {}, None)
    if more:
        note(f"first {wanted} rows; use -o jsonl, csv, parquet or arrow for all, or --limit")
    return len(rows)


def _batches_as_text(reader: pa.RecordBatchReader, form: Format, name: str, limit: int | None,
                     types: Mapping[str, Any]) -> int:
    from savepoint.values import plain_rows

    count, first = 0, True
    stream = sys.stdout
    writer = csv.writer(stream, lineterminator="\n") if form is Format.CSV else None
    if writer is not None:
        writer.writerow(reader.schema.names)
    for batch in reader:
        if limit is not None:
            batch = batch.slice(0, limit - count)
        lines = []
        for row in plain_rows(batch, types):
            if writer is not None:
                writer.writerow([_cell(value) for value in row.values()])
            elif form is Format.NAME:
                lines.append(_cell(row.get(name, next(iter(row.values()), None))))
            elif form is Format.JSON:
                lines.append(("[" if first else ",") + _dumps(row))
                first = False
            else:
                lines.append(_dumps(row))
        if lines:
            stream.write("\n".join(lines) + "\n")
        count += batch.num_rows
        if limit is not None and count >= limit:
            break
    if form is Format.JSON:
        stream.write("[]\n" if first else "]\n")
    stream.flush()
    return count


def _binary(reader: pa.RecordBatchReader, form: Format, limit: int | None = None) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if sys.stdout.isatty():
        raise InvalidRequest(f"{form.value} is binary and stdout is a terminal",
                             hint=f"redirect it: > result.{form.value}")
    sink, count = sys.stdout.buffer, 0
    writer = pq.ParquetWriter(sink, reader.schema, compression="zstd") if form is Format.PARQUET else \
        pa.ipc.new_stream(sink, reader.schema)
    with writer:
        for batch in reader:
            if limit is not None:
                batch = batch.slice(0, limit - count)
            writer.write_batch(batch)
            count += batch.num_rows
            if limit is not None and count >= limit:
                break
    sink.flush()
    return count


def _table(rows: Sequence[Row], names: Sequence[str], human: Mapping[str, Callable[[Any], str]],
           title: str | None) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for column in names:
        numeric = all(isinstance(row.get(column), (int, float, type(None))) for row in rows)
        table.add_column(column, justify="right" if numeric and rows else "left", overflow="fold")
    for row in rows:
        table.add_row(*[Text(human[key](row.get(key)) if key in human else _human_cell(row.get(key))) for key in names])
    console().print(table)


def _human_cell(value: Any) -> str:
    large = isinstance(value, int) and abs(value) >= 10_000
    text = f"{value:,}" if large else _cell(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    text = _dumps(value)
    return text[1:-1] if text.startswith('"') else text  # a decimal, date or UUID, which JSON has only as text


def _csv(rows: Sequence[Row], names: Sequence[str]) -> None:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        writer.writerow([_cell(row.get(name)) for name in names])
    sys.stdout.write(buffer.getvalue())


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float, bool, bytes))


def _dumps(value: Any, *, indent: bool = False) -> str:
    import msgspec

    from savepoint.values import to_plain

    encoded = msgspec.json.encode(to_plain(value))
    return (msgspec.json.format(encoded, indent=2) if indent else encoded).decode()


def _line(text: str) -> None:
    sys.stdout.write(text + "\n")


def size(value: Any) -> str:
    """A number of bytes for people."""
    if value is None:
        return ""
    number = float(value)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return ""


def when(value: Any) -> str:
    """A time in milliseconds for people, in UTC."""
    from datetime import UTC, datetime

    return "" if value is None else datetime.fromtimestamp(value / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")


@contextmanager
def quietly(quiet: bool) -> Iterator[None]:
    """--quiet said at the command itself means the same as before it."""
    if quiet:
        os.environ["HOLDFAST_QUIET"] = "1"
    yield


@contextmanager
def progress(label: str, unit: str = "rows") -> Iterator[Progress]:
    """A progress bar with rate and time left, on stderr, where that is a terminal and --quiet is not said."""
    if settings.quiet() or not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,.0f} " + unit),
               TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    with Bars(*columns, console=console(stderr=True), transient=True) as bars:
        task = bars.add_task(label, total=None, rate="")

        def update(done: int, total: int) -> None:
            speed = bars.tasks[0].speed
            bars.update(task, completed=done, total=total or None, rate=f"{speed:,.0f}/s" if speed else "")

        yield update

"""SQL over a savepoint's states as tables `operator.state` (DuckDB): one SELECT, read-only, confined to the savepoint.

The records in flight that an operator keeps are the table `operator.inflight`.
The connection is in memory; before the query runs, files, extensions, settings and Python variables are out of its
reach. Only states that the query names are opened.
"""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs as fs

from checkpoint.storage.streams import RangeReader
from savepoint.columns import StateLayout
from savepoint.format import IN_FLIGHT, KEY_GROUP
from savepoint.reader import parts_of
from savepoint.rewrite import as_open
from savepoint.scan import keep_keys
from statebackend.errors import HoldfastError, InvalidRequest, NotFound, Unavailable
from statebackend.keygroups import KeyGroupRange
from statebackend.types import OptionalType, StateType

if TYPE_CHECKING:
    from savepoint.opened import Savepoint

MEMORY_LIMIT = "512MB"
_BATCH = 65_536
_CONFINE = ("SET python_enable_replacements = false", "SET enable_external_access = false",
            "SET lock_configuration = true")


def query(savepoint: Savepoint, sql: str, *, seconds: float | None = None) -> pa.RecordBatchReader:
    """Run a SELECT. A mistake in it is `InvalidRequest` with DuckDB's message, a wrong table `NotFound` with near ones.

    One that has not given its last row after `seconds` is interrupted: `Unavailable`.
    """
    import duckdb

    stack = ExitStack()
    try:
        spill = stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-query-"))
        connection = stack.enter_context(duckdb.connect(
            ":memory:", config={"threads": 2, "memory_limit": MEMORY_LIMIT, "temp_directory": spill}))
        limit = stack.enter_context(_TimeLimit(connection, seconds))
        try:
            _register(connection, savepoint, _tables_in(connection, sql), stack)
            for statement in _CONFINE:
                connection.execute(statement)
            relation = connection.sql(sql)
            if relation is None:
                raise InvalidRequest("the query returns nothing", hint="write a SELECT")
            reader = _arrow_reader(relation)
        except duckdb.Error as error:
            limit.require_time()
            raise InvalidRequest(f"the query has an error: {_first_lines(error)}") from error
    except BaseException:
        stack.close()
        raise
    return pa.RecordBatchReader.from_batches(reader.schema, _drained(reader, stack, limit))


def filtered(savepoint: Savepoint, uid: str, state: str, where: str, *, keys: Iterable[Any] | None,
             key_groups: int | KeyGroupRange | Iterable[int] | None,
             columns: Sequence[str] | None) -> pa.RecordBatchReader:
    """The rows of one state that fulfil a condition in SQL."""
    wanted = None if keys is None else list(keys)
    types = savepoint.column_types(uid, state)
    names = savepoint.read(uid, state).schema.names if columns is None or wanted is not None else columns
    chosen = ", ".join(f"{_quoted(name)}::blob as {_quoted(name)}" if name in types and _is_uuid(types[name])
                       else _quoted(name) for name in names)
    conditions = [f"({where})"]
    if wanted is not None or key_groups is not None:
        ranges = savepoint.ranges(uid, wanted, key_groups)
        spans = [f"{KEY_GROUP} between {span.first} and {span.last}" for span in ranges]
        conditions.append(f"({' or '.join(spans) or 'false'})")
    reader = query(savepoint, f"select {chosen} from {_quoted(uid)}.{_quoted(state)} where {' and '.join(conditions)}")
    if wanted is None:
        return reader
    schema = reader.schema if columns is None else pa.schema([reader.schema.field(name) for name in columns])
    return pa.RecordBatchReader.from_batches(schema, keep_keys(reader, savepoint.key_type(uid), wanted, columns))


def _tables_in(connection: Any, sql: str) -> set[tuple[str, str]]:
    """The tables that a SELECT reads; anything but one SELECT is refused."""
    tree = json.loads(connection.execute("select json_serialize_sql(?)", [sql]).fetchall()[0][0])
    if tree.get("error_type") == "not implemented":
        raise InvalidRequest("a query is a SELECT: it changes nothing", hint="edit and transform write a changed savepoint")
    if tree.get("error"):
        raise InvalidRequest(f"the query has an error: {tree.get('error_message', 'it can not be parsed')}",
                             hint="one SELECT over operator.state")
    if len(tree["statements"]) != 1:
        raise InvalidRequest("one SELECT at a time", found=f"{len(tree['statements'])} statements")
    return set(_base_tables(tree["statements"][0]))


def _base_tables(node: Any) -> Iterator[tuple[str, str]]:
    if isinstance(node, dict):
        if node.get("type") == "BASE_TABLE" and not node.get("catalog_name"):
            yield str(node.get("schema_name", "")), str(node.get("table_name", ""))
        for child in node.values():
            yield from _base_tables(child)
    elif isinstance(node, list):
        for child in node:
            yield from _base_tables(child)


def _register(connection: Any, savepoint: Savepoint, tables: set[tuple[str, str]], stack: ExitStack) -> None:
    opened: Savepoint | None = None
    for number, (schema, table) in enumerate(sorted(tables)):
        if not schema:
            continue  # a name without an operator is a common table expression, or DuckDB's error to tell
        uid, state = _named(savepoint, schema, table)
        if state is None:
            relation, columns = savepoint.kept_in_flight(uid), "*"
        else:
            if opened is None:
                opened = stack.enter_context(as_open(savepoint))
            relation, columns = _relation(opened, uid, state, stack), _columns(opened, uid, state)
        connection.register(f"__state_{number}", relation)
        connection.execute(f"create schema if not exists {_quoted(schema)}")
        connection.execute(f"create view {_quoted(schema)}.{_quoted(table)} as select {columns} from __state_{number}")


def _columns(opened: Savepoint, uid: str, state: str) -> str:
    """All columns; UUIDs, which Arrow has as bytes, as what they are."""
    types = opened.column_types(uid, state)
    there = opened.read(uid, state).schema.names
    casts = [f"{_quoted(name)}::uuid as {_quoted(name)}" for name in there
             if name in types and _is_uuid(types[name])]
    return f"* replace ({', '.join(casts)})" if casts else "*"


def _is_uuid(kind: StateType) -> bool:
    return kind.tag == "uuid" or (isinstance(kind, OptionalType) and kind.item.tag == "uuid")


def _named(savepoint: Savepoint, schema: str, table: str) -> tuple[str, str | None]:
    """The operator and state that a table name means, None for its records in flight; SQL names ignore case."""
    known = [(info.uid, info.name) for info in savepoint.states()]
    state = _meant(known, schema, table)
    if state is not None:
        return state
    keeper = _meant([(entry.uid, IN_FLIGHT) for entry in savepoint.metadata.operators], schema, table)
    if keeper is not None:
        return keeper[0], None
    names = [f"{uid}.{state}" for uid, state in known]
    near = get_close_matches(f"{schema}.{table}", names, n=3, cutoff=0.4)
    raise NotFound(f"there is no state {schema}.{table}", path=savepoint.url,
                   hint=f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(names) or 'none'}")


def _meant(known: list[tuple[str, str]], schema: str, table: str) -> tuple[str, str] | None:
    """The pair of this name, or the only one whose name differs in case."""
    loose = [pair for pair in known if (pair[0].lower(), pair[1].lower()) == (schema.lower(), table.lower())]
    return (schema, table) if (schema, table) in loose else loose[0] if len(loose) == 1 else None


def _relation(opened: Savepoint, uid: str, state: str, stack: ExitStack) -> Any:
    """Something that DuckDB scans as often as it likes, with projection and filters pushed down."""
    try:
        schema = opened.schema(uid, state)
    except NotFound:
        return opened.read(uid, state).read_all()
    layout = StateLayout(schema, opened.key_type(uid))
    files = [part.file for handle in opened.handles(uid) for part in parts_of(handle, state)]
    if not files:
        return layout.arrow_schema.empty_table()
    form = ds.ParquetFileFormat(page_checksum_verification=True)
    if all(opened.source.store.local_path(file.path) is not None for file in files):
        places = [stack.enter_context(opened.open_file(file)) for file in files]
        return ds.dataset(places, schema=layout.arrow_schema, format=form)
    # In a remote store only the footers, row groups and columns that the query needs are fetched: no read ahead here.
    ranges = [RangeReader(partial(opened.source.store.read_range, file.path), file.size) for file in files]
    fragments = [form.make_fragment(pa.PythonFile(reader, mode="r")) for reader in ranges]
    return ds.FileSystemDataset(fragments, layout.arrow_schema, form, filesystem=fs.LocalFileSystem())


def _arrow_reader(relation: Any) -> pa.RecordBatchReader:
    if hasattr(relation, "to_arrow_reader"):
        return relation.to_arrow_reader(_BATCH)
    return relation.fetch_arrow_reader(_BATCH)


class _TimeLimit:
    """Interrupts a connection when the time is up."""

    def __init__(self, connection: Any, seconds: float | None) -> None:
        self._connection, self._seconds, self._passed = connection, seconds, False
        self._timer = threading.Timer(seconds, self._interrupt) if seconds is not None else None

    def __enter__(self) -> _TimeLimit:
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _interrupt(self) -> None:
        self._passed = True
        self._connection.interrupt()

    def require_time(self) -> None:
        if self._passed:
            raise Unavailable(f"the query did not end within {self._seconds:g} s", hint="narrow it")


def _drained(reader: pa.RecordBatchReader, stack: ExitStack, limit: _TimeLimit) -> Iterator[pa.RecordBatch]:
    """The batches; the connection and its files live until the last one is taken."""
    try:
        with stack:
            yield from reader
    except HoldfastError:
        raise
    except (pa.ArrowException, RuntimeError, OSError) as error:
        limit.require_time()
        raise InvalidRequest(f"the query failed: {_first_lines(error)}") from error


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _first_lines(error: BaseException) -> str:
    return " ".join(line.strip() for line in str(error).splitlines()[:3] if line.strip())

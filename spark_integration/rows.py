"""Arrow batches to Python rows and back, column by column, with errors that name the row, the column and the function."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from statebackend.errors import InvalidRequest

FLUSH_ROWS = 50_000
"""Output rows that are gathered before they become an Arrow batch."""


def column_values(column: pa.Array) -> list[Any]:
    """The values of a column as Python objects; numbers without nulls go through numpy, which is much faster."""
    kind = column.type
    if column.null_count == 0 and (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        values: list[Any] = column.to_numpy(zero_copy_only=False).tolist()
        return values
    listed: list[Any] = column.to_pylist()
    return listed


def rows_of(batch: pa.RecordBatch, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of a batch as dicts with the given columns."""
    columns = [column_values(batch.column(name)) for name in names]
    if len(names) == 1:
        only = names[0]
        return ({only: value} for value in columns[0])
    if len(names) == 2:
        first, second = names
        return ({first: left, second: right} for left, right in zip(*columns))
    if len(names) == 3:
        first, second, third = names
        return ({first: left, second: middle, third: right} for left, middle, right in zip(*columns))
    return (dict(zip(names, values)) for values in zip(*columns))


class OutputBuilder:
    """Turns output records (dicts, sequences, dataclasses) and side outputs into Arrow batches of one schema.

    The schema is the main columns, then one nullable struct per side output. A record of a side output leaves the
    main columns null, and a main record leaves the structs null.
    """

    def __init__(self, main: pa.Schema, side: Mapping[str, pa.DataType], function: str) -> None:
        self._main = pa.schema([field.with_nullable(True) for field in main]) if side else main
        self.schema = pa.schema([*self._main, *(pa.field(name, kind) for name, kind in side.items())])
        self._side = dict(side)
        self._function = function
        self.records: list[Any] = []
        self._side_records: dict[str, list[Any]] = {name: [] for name in side}
        self.rows_out = 0
        self._plain = all(not pa.types.is_nested(field.type) for field in main)

    @property
    def side_names(self) -> Sequence[str]:
        return list(self._side)

    def add_side(self, tag: str, value: Any) -> None:
        if tag not in self._side_records:
            raise InvalidRequest("a side output is not declared", output=tag, function=self._function,
                                 hint="name it in side_outputs={...} with its columns")
        self._side_records[tag].append(value)

    def add_table(self, table: pa.Table | pa.RecordBatch) -> list[pa.RecordBatch]:
        """A vectorised function's output, cast to the schema; side columns are filled with nulls."""
        if isinstance(table, pa.RecordBatch):
            table = pa.Table.from_batches([table])
        arrays = [self._column_of(table, field) for field in self._main]
        arrays += [pa.chunked_array([pa.nulls(table.num_rows, kind)]) for kind in self._side.values()]
        self.rows_out += table.num_rows
        return [batch for batch in pa.table(arrays, schema=self.schema).to_batches() if batch.num_rows]

    def flush(self, everything: bool = False) -> list[pa.RecordBatch]:
        """The batches that are ready: all gathered records if told, otherwise only when there are many."""
        gathered = len(self.records) + sum(map(len, self._side_records.values()))
        if not gathered or (not everything and gathered < FLUSH_ROWS):
            return []
        batches = []
        if self.records:
            batches.append(self._main_batch(self.records))
            self.records.clear()
        for tag, values in self._side_records.items():
            if values:
                batches.append(self._side_batch(tag, values))
                values.clear()
        self.rows_out += sum(batch.num_rows for batch in batches)
        return batches

    def _main_batch(self, records: list[Any]) -> pa.RecordBatch:
        arrays = self._arrays(records, list(self._main), "")
        arrays += [pa.nulls(len(records), kind) for kind in self._side.values()]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _side_batch(self, tag: str, values: list[Any]) -> pa.RecordBatch:
        kind = self._side[tag]
        fields = [kind.field(index) for index in range(kind.num_fields)]
        struct = pa.StructArray.from_arrays(self._arrays(values, fields, f" of side output {tag!r}"), fields=fields)
        arrays = [pa.nulls(len(values), field.type) for field in self._main]
        arrays += [struct if name == tag else pa.nulls(len(values), other) for name, other in self._side.items()]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _arrays(self, records: list[Any], fields: Sequence[pa.Field], where: str) -> list[pa.Array]:
        arrays = []
        for position, field in enumerate(fields):
            values = self._values(records, position, field, where)
            try:
                array = pa.array(values, field.type)
            except (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError):
                raise self._misfit(values, records, field, where) from None
            if array.null_count and not field.nullable:
                row = values.index(None)
                raise self._error(f"column {field.name!r}{where} must not be null", row, records[row], field)
            arrays.append(array)
        return arrays

    def _values(self, records: list[Any], position: int, field: pa.Field, where: str) -> list[Any]:
        name = field.name
        try:
            return [record[name] for record in records]
        except (KeyError, TypeError, IndexError):
            return [self._value(record, row, position, field, where) for row, record in enumerate(records)]

    def _value(self, record: Any, row: int, position: int, field: pa.Field, where: str) -> Any:
        if isinstance(record, Mapping):
            if field.name in record:
                return record[field.name]
            if field.nullable:
                return None
            raise self._error(f"an output row has no column {field.name!r}{where}", row, record, field)
        if dataclasses.is_dataclass(record) and not isinstance(record, type):
            return getattr(record, field.name)
        if isinstance(record, (tuple, list)) and position < len(record):
            return record[position]
        raise self._error(f"an output row{where} is no dict, sequence or dataclass with column {field.name!r}",
                          row, record, field)

    def _misfit(self, values: list[Any], records: list[Any], field: pa.Field, where: str) -> InvalidRequest:
        for row, value in enumerate(values):
            try:
                pa.array([value], field.type)
            except (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError) as error:
                return self._error(f"a value does not fit column {field.name!r}{where}: {error}", row, records[row],
                                   field)
        return self._error(f"values of column {field.name!r}{where} do not fit together", 0, records[0], field)

    def _error(self, message: str, row: int, record: Any, field: pa.Field) -> InvalidRequest:
        return InvalidRequest(message, function=self._function, row=row, column=field.name, expected=str(field.type),
                              record=shorten(record), hint="change the output= schema or what the function yields")

    def _column_of(self, table: pa.Table, field: pa.Field) -> pa.ChunkedArray:
        index = table.schema.get_field_index(field.name)
        if index < 0:
            raise InvalidRequest(f"process_batch gave no column {field.name!r}", function=self._function,
                                 found=table.schema.names, hint="return every column of output=")
        column = table.column(index)
        if column.type != field.type:
            try:
                column = column.cast(field.type)
            except pa.ArrowException as error:
                raise InvalidRequest(f"process_batch gave column {field.name!r} in another type: {error}",
                                     function=self._function, expected=str(field.type),
                                     found=str(column.type)) from None
        if column.null_count and not field.nullable:
            raise InvalidRequest(f"process_batch gave nulls in column {field.name!r}", function=self._function)
        return column


def shorten(value: Any, limit: int = 200) -> str:
    """A value as text that fits into an error message."""
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "..."

"""Small whole Parquet files of a savepoint, for operator state and records in flight: written and read in one piece."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import pyarrow as pa

from savepoint.format import COMPRESSION, COMPRESSION_LEVEL
from savepoint.parts import WritableFile
from savepoint.reader import reading
from statebackend.files import FileWriter, SnapshotSource, StateFile


def write_table(file: FileWriter, table: pa.Table, described: Mapping[str, str]) -> StateFile:
    """Write a table; `described` becomes the file's key-value metadata. After a failure nothing is left."""
    import pyarrow.parquet as pq  # inspection needs this module, and should not wait for Parquet

    try:
        with pq.ParquetWriter(pa.PythonFile(WritableFile(file), mode="w"), table.schema.with_metadata(dict(described)),
                              compression=COMPRESSION, compression_level=COMPRESSION_LEVEL,
                              use_dictionary=False) as writer:
            writer.write_table(table.replace_schema_metadata(dict(described)))
        return file.finish()
    except BaseException:
        file.abort()
        raise


def read_table(file: StateFile, source: SnapshotSource, columns: Sequence[str] | None = None) -> pa.Table:
    """All rows of a file, verified."""
    import pyarrow.parquet as pq

    with source.open(file) as stream, reading(file):
        return pq.read_table(io.BytesIO(stream.read()), columns=None if columns is None else list(columns))

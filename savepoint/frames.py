"""Data that users have at hand, as Arrow batches: Arrow, pandas, polars, Parquet, CSV and JSON lines files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds

from statebackend.errors import InvalidRequest, NotFound

_BATCH = 131_072
_FORMATS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".ndjson": "json", ".arrow": "ipc", ".feather": "ipc"}


def batches_of(data: Any) -> Iterator[pa.RecordBatch]:
    """Batches of a table, frame, reader, iterable of batches, or of the files at a path."""
    if isinstance(data, (str, os.PathLike)):
        yield from _files(os.fspath(data))
    elif isinstance(data, pa.RecordBatch):
        yield data
    elif isinstance(data, pa.Table):
        yield from data.to_batches(max_chunksize=_BATCH)
    elif type(data).__module__.startswith("pandas"):
        yield from pa.Table.from_pandas(data, preserve_index=False).to_batches(max_chunksize=_BATCH)
    elif hasattr(data, "to_arrow"):
        yield from data.to_arrow().to_batches(max_chunksize=_BATCH)
    elif hasattr(data, "to_batches"):
        yield from data.to_batches()
    elif isinstance(data, Iterable):
        for item in data:
            if not isinstance(item, pa.RecordBatch):
                raise InvalidRequest("state is built from Arrow batches, frames or files", found=type(item).__name__)
            yield item
    else:
        raise InvalidRequest("state is built from Arrow batches, frames or files", found=type(data).__name__)


def _files(path: str) -> Iterator[pa.RecordBatch]:
    kind = next((form for ending, form in _FORMATS.items() if path.lower().endswith(ending)), "parquet")
    try:
        yield from _dataset(path, kind).to_batches(batch_size=_BATCH, batch_readahead=2, fragment_readahead=1)
    except FileNotFoundError as error:
        raise NotFound("there is no such file", path=path) from error
    except pa.ArrowException as error:
        raise InvalidRequest(f"the data can't be read as {kind}: {str(error).splitlines()[0]}", path=path) from error


def _dataset(path: str, kind: str) -> ds.Dataset:
    if "://" not in path:
        return ds.dataset(path, format=kind)
    import fsspec

    filesystem, inner = fsspec.core.url_to_fs(path.replace("s3a://", "s3://", 1))
    return ds.dataset(inner, filesystem=filesystem, format=kind)

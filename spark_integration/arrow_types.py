"""Spark's types as Arrow's and back, the same with every Spark: timestamps with a zone are UTC, those without stay so.

The functions that PySpark has for it changed their arguments and defaults between 4.1 and 4.2.
"""

from __future__ import annotations

import inspect
from typing import Any

import pyarrow as pa


def arrow_schema(schema: Any) -> pa.Schema:
    """What a StructType is in Arrow."""
    from pyspark.sql.pandas.types import to_arrow_schema

    zone = {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_schema).parameters else {"timestamp_utc": True}
    return to_arrow_schema(schema, **zone)


def spark_schema(schema: pa.Schema) -> Any:
    """What an Arrow schema is as a StructType."""
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(schema, prefer_timestamp_ntz=True)


def spark_type(kind: pa.DataType) -> Any:
    """What an Arrow type is in Spark."""
    from pyspark.sql.pandas.types import from_arrow_type

    return from_arrow_type(kind, prefer_timestamp_ntz=True)

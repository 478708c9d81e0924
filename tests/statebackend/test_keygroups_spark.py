"""Our hash against the `xxhash64` of a real Spark SQL, for every type that can be a key."""

from __future__ import annotations

import enum
import math
import uuid
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any

import pyarrow as pa
import pytest

from statebackend.keygroups import key_group_of, key_groups_of, key_hasher
from statebackend.types import Digits, Zoned, state_type

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]


class Colour(enum.Enum):
    RED = 1
    GRÜN = 2


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    from pyspark.sql import SparkSession

    running = SparkSession.getActiveSession()
    session = running or (SparkSession.builder.master("local[1]").appName("keygroups").config("spark.ui.enabled", "false")
               .config("spark.sql.session.timeZone", "UTC").config("spark.sql.shuffle.partitions", "1").getOrCreate())
    yield session
    if running is None:
        session.stop()


LONG_TEXT = "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich, 20-mal. 漢字かな交じり文 😀"
UUIDS = [uuid.UUID(int=0), uuid.UUID("6ba7b810-9dad-11d1-80b4-00c04fd430c8"), uuid.UUID(int=2**128 - 1)]
BIG = Decimal("12345678901234567890.123456789012345678")
CASES: dict[str, tuple[Any, list[Any], str, str]] = {
    # name: (state type, keys, the column's Spark type, the Spark expression over the column k)
    "int": (int, [0, 1, -1, 42, 2**63 - 1, -2**63, 10**12], "bigint", "xxhash64(k)"),
    "int32": (pa.int32(), [0, 1, -1, 2**31 - 1, -2**31], "int", "xxhash64(cast(k as bigint))"),
    "int8": (pa.int8(), [0, 1, -1, 127, -128], "tinyint", "xxhash64(cast(k as bigint))"),
    "float": (float, [0.0, -0.0, 1.5, -1.5, math.nan, math.inf, -math.inf, 5e-324, 1.7976931348623157e308], "double",
              "xxhash64(k)"),
    "float32": (pa.float32(), [0.0, -0.0, 1.5, math.nan, math.inf], "float", "xxhash64(cast(k as double))"),
    "bool": (bool, [True, False], "boolean", "xxhash64(k)"),
    "str": (str, ["", "a", "abc", "abcd", "abcdefgh", "a\0b", "ü", "漢字", "😀", LONG_TEXT, "x" * 31, "x" * 32, "x" * 33,
                  LONG_TEXT * 20], "string", "xxhash64(k)"),
    "bytes": (bytes, [b"", b"\0", b"\xff\xfe", bytes(range(256)), b"x" * 32], "binary", "xxhash64(k)"),
    "date": (date, [date(1970, 1, 1), date(2024, 2, 29), date(1, 1, 1), date(9999, 12, 31)], "date", "xxhash64(k)"),
    "datetime": (datetime, [datetime(1970, 1, 1), datetime(2024, 2, 29, 1, 2, 3, 456789), datetime(1900, 1, 1)],
                 "timestamp_ntz", "xxhash64(k)"),
    "zoned": (Zoned, [datetime(2024, 2, 29, 1, 2, 3, 456789, UTC), datetime(1969, 12, 31, 23, tzinfo=UTC)], "timestamp",
              "xxhash64(k)"),
    "timedelta": (timedelta, [timedelta(0), timedelta(days=-3, microseconds=7), timedelta(days=10_000)],
                  "interval day to second", "xxhash64(k)"),
    "decimal(9, 2)": (Annotated[Decimal, Digits(9, 2)], [Decimal(0), Decimal("1.50"), Decimal("-9999999.99")],
                      "decimal(9,2)", "xxhash64(k)"),
    "decimal(18, 0)": (Annotated[Decimal, Digits(18, 0)], [Decimal(10**18 - 1), Decimal(-1)], "decimal(18,0)",
                       "xxhash64(k)"),
    "decimal(38, 18)": (Decimal, [Decimal(0), Decimal(1), Decimal("-1.5"), BIG, -BIG, Decimal("0.000000000000000128")],
                        "decimal(38,18)", "xxhash64(k)"),
    "uuid": (uuid.UUID, UUIDS, "binary", "xxhash64(k)"),
    "enum": (Colour, list(Colour), "string", "xxhash64(k)"),
    "tuple": (tuple[int, str], [(1, "a"), (-1, ""), (0, "ü")], "struct<f0:bigint,f1:string>", "xxhash64(k.f0, k.f1)"),
    "tuple as a struct": (tuple[int, str], [(1, "a"), (-1, ""), (0, "ü")], "struct<f0:bigint,f1:string>", "xxhash64(k)"),
    "tuple with nulls": (tuple[str | None, int | None], [("a", None), (None, 1), (None, None), ("a", 1)],
                         "struct<f0:string,f1:bigint>", "xxhash64(k.f0, k.f1)"),
    "nested tuple": (tuple[tuple[bool, date], bytes], [((True, date(2024, 1, 1)), b"\0"), ((False, date(1, 1, 1)), b"")],
                     "struct<f0:struct<f0:boolean,f1:date>,f1:binary>", "xxhash64(k)"),
}


@pytest.mark.parametrize("case", list(CASES))
def test_spark_gives_the_same_hash_and_the_same_key_group(spark: SparkSession, case: str) -> None:
    annotation, keys, spark_type, expression = CASES[case]
    kind = state_type(annotation)
    rows = [(spark_value(key),) for key in keys]
    frame = spark.createDataFrame(rows, f"k {spark_type}")
    found = frame.selectExpr(f"{expression} as h", f"pmod({expression}, 128) as g128", f"pmod({expression}, 100) as g100")
    expected = [tuple(row) for row in found.collect()]
    hasher = key_hasher(kind)
    ours = [(hasher(key), key_group_of(key, 128, kind), key_group_of(key, 100, kind)) for key in keys]
    assert ours == expected
    column = kind.to_arrow(keys)
    assert key_groups_of(column, 128).tolist() == [row[1] for row in expected]
    assert key_groups_of(column, 100).tolist() == [row[2] for row in expected]


def spark_value(key: Any) -> Any:
    """A key as Spark takes it."""
    if isinstance(key, uuid.UUID):
        return key.bytes
    if isinstance(key, enum.Enum):
        return key.name
    return key

"""Holdfast state inside PySpark: stateful transforms, savepoints as Spark data, import of Spark's own state.

Names are imported on first use, so that `holdfast --help` does not load Spark.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_integration.aggregation import aggregate
    from spark_integration.datasink import by_key_group
    from spark_integration.datasource import register
    from spark_integration.importing import import_state
    from spark_integration.query_savepoints import open_epoch, restore_query, rewind, savepoint
    from spark_integration.runtime import SparkRuntime
    from spark_integration.session import require_spark, spark_session
    from spark_integration.transform import stateful
    from spark_integration.watching import watch

__all__ = ["SparkRuntime", "aggregate", "by_key_group", "import_state", "open_epoch", "register", "require_spark",
           "restore_query", "rewind", "savepoint", "spark_session", "stateful", "watch"]

_HOME = {
    "aggregation": ["aggregate"],
    "datasink": ["by_key_group"],
    "datasource": ["register"],
    "importing": ["import_state"],
    "query_savepoints": ["open_epoch", "restore_query", "rewind", "savepoint"],
    "runtime": ["SparkRuntime"],
    "session": ["require_spark", "spark_session"],
    "transform": ["stateful"],
    "watching": ["watch"],
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'spark_integration' has no attribute {name!r}")
    value = getattr(import_module(f"spark_integration.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value

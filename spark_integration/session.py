"""The Spark side of the driver: which Spark we can run on, sessions for scripts and tests, storage credentials."""

from __future__ import annotations

import os
import sys
from typing import Any

from statebackend.errors import IncompatibleState

OLDEST = (4, 1)


def require_spark(session: Any = None) -> None:
    """Refuse a Spark that lacks what we build on, by looking for it; older ones are named with the reason."""
    import pyspark
    from pyspark.sql import DataFrame

    version = str(session.version) if session is not None else pyspark.__version__
    if not hasattr(DataFrame, "repartitionById") or _version(version) < OLDEST:
        raise IncompatibleState("this Spark is too old: DataFrame.repartitionById, which routes rows by key group, "
                                "came with 4.1", expected="Spark 4.1 to 4.3", found=version)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())


def spark_session(master: str = "local[2]", app_name: str = "holdfast", **config: Any) -> Any:
    """A session whose workers use this very Python. `config` names use `__` for dots: `spark__ui__enabled=False`."""
    from pyspark.sql import SparkSession

    require_spark()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    builder = SparkSession.builder.master(master).appName(app_name)
    settings = {"spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "2",
                "spark.sql.python.filterPushdown.enabled": "true"}
    if master.startswith("local"):  # executors of a cluster reach the driver by the address that Spark finds
        settings |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    settings.update({name.replace("__", "."): _text(value) for name, value in config.items()})
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


_S3A = {"fs.s3a.access.key": "key", "fs.s3a.secret.key": "secret", "fs.s3a.session.token": "token",
        "fs.s3a.endpoint": "endpoint_url"}


def storage_options(session: Any, url: str) -> dict[str, Any]:
    """What Spark's own configuration (`fs.s3a.*`) says about the store behind a URL, in fsspec's words."""
    if not url.startswith(("s3://", "s3a://")):
        return {}
    bucket = url.split("://", 1)[1].split("/", 1)[0]
    options: dict[str, Any] = {}
    for name, option in _S3A.items():
        special = name.replace("fs.s3a.", f"fs.s3a.bucket.{bucket}.")
        value = _hadoop(session, special) or _hadoop(session, name)
        if value:
            options[option] = value
    endpoint = options.get("endpoint_url")
    if endpoint and "://" not in endpoint:
        options["endpoint_url"] = f"https://{endpoint}"
    return options


def _hadoop(session: Any, name: str) -> str | None:
    value = session.conf.get(f"spark.hadoop.{name}", None)
    if value:
        return str(value)
    context = getattr(session, "_jsc", None)
    return context.hadoopConfiguration().get(name) if context is not None else None

"""Whole dataflows on Spark: long-lived barrier tasks, channels over sockets, the coordinator on the driver."""

from spark_integration.runtime.runtime import SparkRuntime

__all__ = ["SparkRuntime"]

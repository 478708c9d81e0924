"""Making a consistent cut of a running dataflow, and keeping it. What a job file needs is exported here.

Names are imported on first use, so that a command that only lists checkpoints does not load the dataflow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checkpoint.connectors.base import Sink, SinkWriter, Source, SourceBatch, SourceReader
    from checkpoint.connectors.collect import CollectSink
    from checkpoint.connectors.file_sink import FileSink
    from checkpoint.connectors.file_source import FileSource
    from checkpoint.connectors.generator import CollectionSource, GeneratorSource
    from checkpoint.connectors.two_phase import TwoPhaseCommitSink
    from checkpoint.dataflow.functions import (
        BroadcastProcessFunction,
        CheckpointedFunction,
        KeyedBroadcastProcessFunction,
        KeyedProcessFunction,
        OutputTag,
        ProcessContext,
        ProcessFunction,
    )
    from checkpoint.dataflow.graph import Dataflow, GeneratedUidWarning
    from checkpoint.dataflow.watermarks import WatermarkStrategy
    from checkpoint.protocol.restart import ExponentialDelay, FailureRate, FixedDelay, NoRestart, RestartStrategy
    from checkpoint.protocol.settings import CheckpointSettings
    from checkpoint.runtime.checking import RestoreReport, check_restore
    from checkpoint.runtime.contracts import SourceStatus
    from checkpoint.runtime.job import JobHandle, JobResult, run, start
    from checkpoint.runtime.loading import load_flow
    from checkpoint.runtime.restore_point import RestorePoint, resolve_restore

_HOME = {
    "connectors.base": ["Sink", "SinkWriter", "Source", "SourceBatch", "SourceReader"],
    "connectors.collect": ["CollectSink"],
    "connectors.file_sink": ["FileSink"],
    "connectors.file_source": ["FileSource"],
    "connectors.generator": ["CollectionSource", "GeneratorSource"],
    "connectors.two_phase": ["TwoPhaseCommitSink"],
    "dataflow.functions": ["BroadcastProcessFunction", "CheckpointedFunction", "KeyedBroadcastProcessFunction",
                           "KeyedProcessFunction", "OutputTag", "ProcessContext", "ProcessFunction"],
    "dataflow.graph": ["Dataflow", "GeneratedUidWarning"],
    "dataflow.watermarks": ["WatermarkStrategy"],
    "protocol.restart": ["ExponentialDelay", "FailureRate", "FixedDelay", "NoRestart", "RestartStrategy"],
    "protocol.settings": ["CheckpointSettings"],
    "runtime.checking": ["RestoreReport", "check_restore"],
    "runtime.contracts": ["SourceStatus"],
    "runtime.job": ["JobHandle", "JobResult", "run", "start"],
    "runtime.loading": ["load_flow"],
    "runtime.restore_point": ["RestorePoint", "resolve_restore"],
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "BroadcastProcessFunction", "CheckpointSettings", "CheckpointedFunction", "CollectSink", "CollectionSource",
    "Dataflow", "ExponentialDelay", "FailureRate", "FileSink", "FileSource", "FixedDelay", "GeneratedUidWarning",
    "GeneratorSource", "JobHandle", "JobResult", "KeyedBroadcastProcessFunction", "KeyedProcessFunction", "NoRestart",
    "OutputTag", "ProcessContext", "ProcessFunction", "RestartStrategy", "RestorePoint", "RestoreReport", "Sink",
    "SinkWriter", "Source", "SourceBatch", "SourceReader", "SourceStatus", "TwoPhaseCommitSink", "WatermarkStrategy",
    "check_restore", "load_flow", "resolve_restore", "run", "start",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'checkpoint' has no attribute {name!r}")
    value = getattr(import_module(f"checkpoint.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value

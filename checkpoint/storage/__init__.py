"""Storage of checkpoints and savepoints on any fsspec URL: files, layout, metadata, retention, garbage collection.

Names are imported on first use, so that a path or an error costs no Arrow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checkpoint.storage.drivers import FileInfo
    from checkpoint.storage.faults import FaultyDriver, disk_full
    from checkpoint.storage.files import CheckpointSource, CheckpointTarget
    from checkpoint.storage.gc import GcPlan, Orphan, apply_gc, plan_gc
    from checkpoint.storage.layout import CheckpointId, JobId
    from checkpoint.storage.metadata import (
        ChannelStateEntry,
        CheckpointMetadata,
        MetadataSummary,
        OperatorEntry,
        SubtaskEntry,
    )
    from checkpoint.storage.opening import check_files, locate, open_checkpoint
    from checkpoint.storage.probe import ProbeCheck, ProbeReport
    from checkpoint.storage.registry import Retention, SharedFileRegistry, retention
    from checkpoint.storage.retry import RetryPolicy
    from checkpoint.storage.storage import CheckpointInfo, JobStorage, dispose, find_jobs, find_latest
    from checkpoint.storage.store import FileStore
    from checkpoint.storage.streams import StoreWriter
    from checkpoint.storage.transfer import Progress, Transfer
    from checkpoint.storage.urls import redacted

_HOME = {
    "drivers": ["FileInfo"],
    "faults": ["FaultyDriver", "disk_full"],
    "files": ["CheckpointSource", "CheckpointTarget"],
    "gc": ["GcPlan", "Orphan", "apply_gc", "plan_gc"],
    "layout": ["CheckpointId", "JobId"],
    "metadata": ["ChannelStateEntry", "CheckpointMetadata", "MetadataSummary", "OperatorEntry", "SubtaskEntry"],
    "opening": ["check_files", "locate", "open_checkpoint"],
    "probe": ["ProbeCheck", "ProbeReport"],
    "registry": ["Retention", "SharedFileRegistry", "retention"],
    "retry": ["RetryPolicy"],
    "storage": ["CheckpointInfo", "JobStorage", "dispose", "find_jobs", "find_latest"],
    "store": ["FileStore"],
    "streams": ["StoreWriter"],
    "transfer": ["Progress", "Transfer"],
    "urls": ["redacted"],
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "ChannelStateEntry", "CheckpointId", "CheckpointInfo", "CheckpointMetadata", "CheckpointSource",
    "CheckpointTarget", "FaultyDriver", "FileInfo", "FileStore", "GcPlan", "JobId", "JobStorage", "MetadataSummary",
    "OperatorEntry", "Orphan", "ProbeCheck", "ProbeReport", "Progress", "Retention", "RetryPolicy",
    "SharedFileRegistry", "StoreWriter", "SubtaskEntry", "Transfer", "apply_gc", "check_files", "disk_full", "dispose",
    "find_jobs", "find_latest", "locate", "open_checkpoint", "plan_gc", "redacted", "retention",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'checkpoint.storage' has no attribute {name!r}")
    value = getattr(import_module(f"checkpoint.storage.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value

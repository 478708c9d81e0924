"""State in RocksDB: larger than memory, with incremental checkpoints and rescaling without rewriting."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from statebackend.rocksdb.backend import RocksDBBackend
    from statebackend.rocksdb.format import RocksDBFormat
    from statebackend.rocksdb.options import RocksDBOptions

_HOME = {"RocksDBBackend": "backend", "RocksDBFormat": "format", "RocksDBOptions": "options"}
__all__ = ["RocksDBBackend", "RocksDBFormat", "RocksDBOptions"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'statebackend.rocksdb' has no attribute {name!r}")
    return getattr(import_module(f"statebackend.rocksdb.{_HOME[name]}"), name)

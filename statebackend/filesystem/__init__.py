"""The filesystem backend: state in memory, incremental snapshots to files."""

from statebackend.filesystem.backend import FilesystemBackend

__all__ = ["FilesystemBackend"]

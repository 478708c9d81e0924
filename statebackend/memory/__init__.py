"""The memory backend, and the tables that the filesystem backend shares with it."""

from statebackend.memory.backend import MemoryBackend

__all__ = ["MemoryBackend"]

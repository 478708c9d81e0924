"""The filesystem backend: the tables of the memory backend, snapshots of any size, deltas over the last completed one."""

from __future__ import annotations

from pathlib import Path

from statebackend.memory.backend import TablesBackend


class FilesystemBackend(TablesBackend):
    """State in memory; a snapshot stores what changed since the last completed checkpoint, in files that are shared.

    A new base is written when the deltas have grown larger than it, so a restore never replays more than twice the state.
    `directory` is taken, so that one call serves every backend, and not used: files are where the checkpoints are.
    """

    name = "filesystem"
    incremental = True

    def __init__(self, directory: str | Path | None = None, *, max_value_bytes: int | str = "64MiB") -> None:
        super().__init__(max_state_size=None, max_value_bytes=max_value_bytes)

"""What every conformance test gets: a backend by name, and a stage on which state is written, snapshotted and restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from statebackend import KeyedBackend, KeyedHandle, KeyGroupRange, LocalFiles, ManualClock, create_backend, key_group_range

BACKENDS = ["memory", "filesystem", "rocksdb"]


class Stage:
    """Backends of one kind over one clock and one folder of snapshot files."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.clock = ManualClock(1_000_000)
        self.files = LocalFiles(folder / "snapshots")
        self._opened: list[Any] = []
        self._checkpoints = 0

    def backend(self, name: str | None = None, **options: Any) -> Any:
        name = name or self.name
        if name == "rocksdb":
            options.setdefault("directory", str(self.folder / f"state-{len(self._opened)}"))
        backend = create_backend(name, **options)
        self._opened.append(backend)
        return backend

    def keyed(self, key_type: Any = str, *, name: str | None = None, restore: Sequence[KeyedHandle] = (),
              key_groups: KeyGroupRange | None = None, max_parallelism: int = 128, uid: str = "operator",
              **options: Any) -> KeyedBackend:
        keyed: KeyedBackend = self.backend(name, **options).keyed(
            uid=uid, key_type=key_type, max_parallelism=max_parallelism, key_groups=key_groups, clock=self.clock,
            restore=[KeyedHandle.from_json(handle.to_json()) for handle in restore],
            source=self.files if restore else None)
        return keyed

    def checkpoint(self, keyed: KeyedBackend, *, full: bool = False) -> KeyedHandle:
        """A completed checkpoint."""
        self._checkpoints += 1
        handle = keyed.snapshot(self._checkpoints, self.files, full=full).run()
        keyed.checkpoint_completed(self._checkpoints)
        return handle

    def restored(self, handles: Sequence[KeyedHandle], key_type: Any = str, *, parallelism: int = 1,
                 name: str | None = None) -> list[KeyedBackend]:
        """Subtasks that together hold all key groups."""
        return [self.keyed(key_type, restore=handles, name=name, key_groups=key_group_range(index, parallelism, 128))
                for index in range(parallelism)]

    def close(self) -> None:
        for backend in self._opened:
            backend.close()


@pytest.fixture(params=BACKENDS)
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(request.param, tmp_path)
    yield stage
    stage.close()


@pytest.fixture
def at() -> Callable[[KeyedBackend, Any], KeyedBackend]:
    """Set the current key and go on."""
    def use(keyed: KeyedBackend, key: Any) -> KeyedBackend:
        keyed.set_current_key(key)
        return keyed
    return use

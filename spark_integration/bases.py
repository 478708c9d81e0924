"""New bases for the logs of changes, made beside the batches: by one thread of a worker, one at a time.

A batch stores what changed. When the log of changes has grown as long as the state, the worker stores the state anew
after the batch's acknowledgement, while later batches go on with the old base. A later epoch names the new base and
the changes since. Nothing is named before that, so a worker that dies on the way leaves only files that nobody names.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from dataclasses import dataclass

from spark_integration.epoch_store import EpochFiles
from statebackend.backend import KeyedBackend, PendingBase
from statebackend.errors import HoldfastError
from statebackend.files import SnapshotTarget

ADOPT_WITHIN = 100
"""Epochs after the one that a base holds in which a first epoch may name it: its files are kept for so long."""
ADOPT_AFTER = 4
"""Epochs that pass before one names a base: others that hold the state of these go on by the files they lack."""

_one = threading.Lock()


@dataclass(frozen=True)
class BaseTarget:
    """Where a new base goes: the store's own files, of which none is left if it is given up, and the way to them."""

    files: EpochFiles
    target: SnapshotTarget


class Making:
    """A base in the making, or made. `epoch` is the one whose state it holds."""

    def __init__(self, pending: PendingBase, files: EpochFiles, epoch: int) -> None:
        self._pending, self._files, self.epoch = pending, files, epoch
        self._lock = threading.Lock()
        self._given_up = self._ended = self._made = False
        self._thread = threading.Thread(target=self._run, name="holdfast-base", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._pending.run()
            self._made = True
        except HoldfastError as error:
            if not self._given_up:
                print(f"holdfast: a new base was not stored, the next batch tries again: {error}", file=sys.stderr)
        finally:
            with self._lock:
                self._ended = True
                unwanted = self._given_up or not self._made
            try:
                if unwanted:
                    self._discard()
            finally:
                _one.release()

    def is_over(self, epoch: int) -> bool:
        """Whether this is done with: the snapshots from `epoch` on build on the base, or it came to nothing."""
        if not self._ended or (self._made and epoch < self.epoch + ADOPT_AFTER):
            return False
        if self._made and (epoch > self.epoch + ADOPT_WITHIN or not self._pending.adopt()):
            self._discard()
        return True

    def give_up(self) -> None:
        """Nobody will name it: stop, and leave no files."""
        with self._lock:
            self._given_up, ended = True, self._ended
        self._pending.cancel()
        if ended and self._made:
            self._discard()

    def wait(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    def _discard(self) -> None:
        with contextlib.suppress(HoldfastError):
            self._files.discard()


def begin(keyed: KeyedBackend, where: BaseTarget, epoch: int) -> Making | None:
    """Start a base of the state that was just stored for `epoch`, if it is time and this worker makes no other."""
    if not _one.acquire(blocking=False):
        return None
    pending: PendingBase | None = None
    try:
        pending = keyed.new_base(where.target)
        if pending is not None:
            return Making(pending, where.files, epoch)
    except BaseException:
        if pending is not None:
            pending.cancel()
        _one.release()
        raise
    _one.release()
    return None

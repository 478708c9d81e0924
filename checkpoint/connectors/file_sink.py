"""An exactly-once sink of files: written under a hidden name, made visible by a rename once the checkpoint is complete."""

from __future__ import annotations

import logging
import os
import threading
import uuid
from typing import Any, BinaryIO

from checkpoint.connectors.file_formats import FORMATS, BatchWriter, open_writer
from checkpoint.connectors.files import (
    is_local,
    join,
    local_path,
    make_durable,
    names_in,
    open_for_writing,
    remove_quietly,
    rename_once,
)
from checkpoint.connectors.two_phase import TwoPhaseCommitSink
from checkpoint.dataflow.functions import OpenContext
from checkpoint.storage.layout import safe_name
from statebackend.errors import CorruptData, InvalidRequest

log = logging.getLogger("holdfast.connectors")

LOST = ("warn", "fail")


class FileSink(TwoPhaseCommitSink):
    """Records as files in a folder: JSON lines (`.jsonl`) by default, or CSV or Parquet.

    A file whose name starts with `.` is not committed and does not count. Each checkpoint makes at most one file a
    subtask visible; files of runs that failed are removed after the next checkpoint. A transaction is the path of its
    file, so that a restored job with another folder completes the old one where it is.

    `lost` says what to do when a restored checkpoint counts on a file that is there neither pending nor committed: `warn`,
    where readers take committed files away, or `fail`, where nobody does and a missing file is lost output.
    """

    def __init__(self, folder: str | os.PathLike[str], *, format: str = "jsonl", prefix: str = "part",
                 lost: str = "warn") -> None:
        if format not in FORMATS:
            raise InvalidRequest("FileSink does not know this format", expected=" or ".join(FORMATS), found=format)
        if lost not in LOST:
            raise InvalidRequest("FileSink does not know this answer to lost files", expected=" or ".join(LOST), found=lost)
        given = os.fspath(folder)
        self.folder = local_path(given) if is_local(given) else given
        self.format, self.prefix, self.lost = format, prefix, lost
        self._files: dict[str, tuple[BinaryIO, BatchWriter]] = {}
        self._lock = threading.Lock()

    def begin(self, ctx: OpenContext) -> Any:
        name = f"{self._mark(ctx)}{self._run(ctx)}-{ctx.subtask_index:05d}-{uuid.uuid4().hex[:12]}.{self.format}"
        stream = open_for_writing(join(self.folder, f".{name}"))
        transaction = join(self.folder, name)
        with self._lock:
            self._files[transaction] = stream, open_writer(self.format, stream)
        return transaction

    def write(self, transaction: Any, values: list[Any], timestamps: list[int | None] | None) -> None:
        self._files[transaction][1].write(values)

    def pre_commit(self, transaction: Any) -> Any:
        with self._lock:
            stream, writer = self._files.pop(transaction)
        writer.end()
        make_durable(stream, self.folder)
        return transaction

    def commit(self, transaction: Any) -> None:
        """The file is where it was written or, if folders were moved or copied, in the folder that is written now."""
        folder, name = _parts(transaction)
        for place in dict.fromkeys((folder or self.folder, self.folder)):
            if rename_once(join(place, f".{name}"), join(place, name)):
                return
        missing = "output that the restored checkpoint counts on is neither pending nor committed"
        hidden = join(folder or self.folder, f".{name}")
        if self.lost == "fail":
            raise CorruptData(missing, path=transaction, expected=f"{hidden} or {transaction}",
                              hint="put the file back, or restore an older checkpoint; if a reader has taken it away, go on "
                                   "with FileSink(..., lost='warn')")
        log.warning("%s: %s. If a reader has taken it away, all is well; if not, its records are lost: put back %s or "
                    "restore an older checkpoint", missing, transaction, hidden)

    def abort(self, transaction: Any) -> None:
        with self._lock:
            stream, _ = self._files.pop(transaction)
        if is_local(self.folder):  # closing would complete the upload to an object store
            stream.close()
            remove_quietly(join(self.folder, f".{_parts(transaction)[1]}"))

    def completed(self, ctx: OpenContext, first: bool) -> None:
        """Every subtask has committed what it restored before it could take part in this checkpoint."""
        if first and ctx.subtask_index == 0:
            mine, run = f".{self._mark(ctx)}", self._run(ctx)
            for name in names_in(self.folder):
                if name.startswith(mine) and not name.startswith(mine + run):
                    remove_quietly(join(self.folder, name))

    def _mark(self, ctx: OpenContext) -> str:
        """What all files of this sink in this job begin with."""
        return f"{self.prefix}-{safe_name(ctx.uid)}-{(ctx.job_id or 'local')[:12]}-"

    def _run(self, ctx: OpenContext) -> str:
        """The same for all subtasks of one attempt, so that none removes what another is writing."""
        return f"{ctx.run_id[:8] or 'run'}.{ctx.attempt}"


def _parts(transaction: str) -> tuple[str, str]:
    """Folder and file name; the first checkpoints kept the name alone."""
    folder, _, name = transaction.rpartition("/")
    return folder, name


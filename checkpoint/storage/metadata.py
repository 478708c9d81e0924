"""What `_metadata` says: the operators, subtasks, schemas and files of one checkpoint or savepoint.

The values here are what the program works with; metadata_v1.py is the frozen reader and writer of format version 1
(docs/formats/metadata.md). A checkpoint whose `_metadata` is absent does not exist.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from statebackend.backend import KeyedHandle
from statebackend.errors import CorruptData, IncompatibleState, InvalidRequest
from statebackend.files import StateFile

METADATA_VERSION = 1

_VERSION = re.compile(rb'^\s*\{\s*"version"\s*:\s*(-?[0-9]+)\s*[,}]')


@dataclass(frozen=True)
class ChannelStateEntry:
    """In-flight records of one channel of an unaligned checkpoint: which edge, between which subtasks, in which file."""

    edge: str
    sender: int
    receiver: int
    file: StateFile


@dataclass(frozen=True)
class SubtaskEntry:
    """The state of one operator in one subtask.

    operator   bytes of an `OperatorStateSnapshot`, or a note of where another format keeps it: in `operator_files`
    in_flight  all records that an unaligned barrier overtook at this subtask, as its runtime's codec wrote them; kept
               with the first operator of a chain. `input_channels` and `output_channels` hold them channel by channel
               where a writer stores them that way.
    """

    index: int
    finished: bool = False
    keyed: tuple[KeyedHandle, ...] = ()
    operator: StateFile | None = None
    input_channels: tuple[ChannelStateEntry, ...] = ()
    output_channels: tuple[ChannelStateEntry, ...] = ()
    in_flight: StateFile | None = None
    operator_files: tuple[StateFile, ...] = ()

    def files(self) -> Iterator[StateFile]:
        """Every file this subtask needs, inline ones included."""
        for handle in self.keyed:
            yield from handle.files
        yield from self.unkeyed_files()

    def unkeyed_files(self) -> Iterator[StateFile]:
        """The files of operator state and of records in flight."""
        if self.operator is not None:
            yield self.operator
        yield from self.operator_files
        if self.in_flight is not None:
            yield self.in_flight
        for channel in (*self.input_channels, *self.output_channels):
            yield channel.file


@dataclass(frozen=True)
class OperatorEntry:
    """One operator: its uid, how wide it ran, and the state of its subtasks (those without state may be left out)."""

    uid: str
    name: str
    parallelism: int
    max_parallelism: int
    subtasks: tuple[SubtaskEntry, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.parallelism <= self.max_parallelism:
            raise InvalidRequest("an operator's max parallelism is lower than its parallelism", operator=self.uid,
                                 parallelism=self.parallelism, max_parallelism=self.max_parallelism,
                                 hint="raise the max parallelism, or run it less wide")

    def files(self) -> Iterator[StateFile]:
        for subtask in self.subtasks:
            yield from subtask.files()


@dataclass(frozen=True)
class CheckpointMetadata:
    """One checkpoint or savepoint. Paths of files are relative: to the job's folder, or to the savepoint's.

    kind        "checkpoint" (owned by the system) or "savepoint" (owned by the user)
    format      "native": files as the backend wrote them; "open": the Parquet layout of a savepoint
    generation  of the writer that published it; a newer generation makes later ones of an older void
    parent      the checkpoint this one was built upon, None for a first or a full one
    properties  JSON values: statistics, user information, offsets of a Spark query
    """

    job_id: str
    job_name: str
    checkpoint_id: int
    generation: int = 0
    kind: str = "checkpoint"
    format: str = "native"
    trigger_timestamp: int = 0
    completed_timestamp: int = 0
    unaligned: bool = False
    parent: int | None = None
    operators: tuple[OperatorEntry, ...] = ()
    properties: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in ("checkpoint", "savepoint"):
            raise InvalidRequest("metadata is of a checkpoint or a savepoint", found=self.kind)
        uids = [operator.uid for operator in self.operators]
        if len(set(uids)) != len(uids):
            twice = next(uid for uid in uids if uids.count(uid) > 1)
            raise InvalidRequest("two operators have the same uid", operator=twice)

    @property
    def is_savepoint(self) -> bool:
        return self.kind == "savepoint"

    def operator(self, uid: str) -> OperatorEntry | None:
        return next((operator for operator in self.operators if operator.uid == uid), None)

    def files(self) -> Iterator[StateFile]:
        """Every file of every operator, inline ones included; a file that is referenced twice comes twice."""
        for operator in self.operators:
            yield from operator.files()

    def stored_files(self) -> dict[str, StateFile]:
        """The files that lie in the store, by path."""
        return {file.path: file for file in self.files() if file.inline is None}

    @property
    def full_size(self) -> int:
        """Bytes of all state, whoever stored them."""
        seen: dict[str, int] = {}
        for file in self.files():
            seen[file.path] = file.size
        return sum(seen.values())

    @property
    def new_size(self) -> int:
        """Bytes that this checkpoint stored anew."""
        keyed = sum(handle.new_bytes for operator in self.operators for subtask in operator.subtasks
                    for handle in subtask.keyed)
        others = sum(file.size for operator in self.operators for subtask in operator.subtasks
                     for file in subtask.unkeyed_files())
        return keyed + others

    def to_bytes(self) -> bytes:
        from checkpoint.storage import metadata_v1
        return metadata_v1.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes, *, path: str = "_metadata") -> CheckpointMetadata:
        """Read `_metadata` of any version that this release knows. `path` is for messages."""
        return _reader_for(data, path)(data, path)

    @staticmethod
    def summary(data: bytes, *, path: str = "_metadata") -> MetadataSummary:
        """Only what listings need; fast for any size. Checks that the file is whole."""
        from checkpoint.storage import metadata_v1
        _reader_for(data, path)
        return metadata_v1.summary(data, path)


@dataclass(frozen=True)
class MetadataSummary:
    """The head of a `_metadata` file."""

    job_id: str
    job_name: str
    checkpoint_id: int
    generation: int
    kind: str
    format: str
    trigger_timestamp: int
    completed_timestamp: int
    parent: int | None


def _reader_for(data: bytes, path: str) -> Callable[[bytes, str], CheckpointMetadata]:
    """The reader of the version that a file names; a file without one is not ours or was cut short."""
    from checkpoint.storage import metadata_v1
    version = _version_of(data, path)
    if version == METADATA_VERSION:
        return metadata_v1.decode
    if version > METADATA_VERSION:
        raise IncompatibleState("the checkpoint was written by a newer release", path=path,
                                expected=f"format version up to {METADATA_VERSION}", found=version,
                                hint="upgrade holdfast, or convert it to an open savepoint with the release that wrote it")
    raise CorruptData("the checkpoint names a format version that never was", path=path, found=version)


def _version_of(data: bytes, path: str) -> int:
    match = _VERSION.match(data[:4096])
    if match:
        return int(match[1])
    try:  # our writers put the version first; whoever reformats the file may not
        decoded = json.loads(data)
    except ValueError:
        if data[:1] == b"{" or not data:
            raise CorruptData("the checkpoint's metadata is cut short or damaged", path=path, size=len(data),
                              hint="use an older checkpoint") from None
        raise InvalidRequest("this is not the metadata of a checkpoint or savepoint of ours", path=path) from None
    if not isinstance(decoded, dict) or not isinstance(decoded.get("version"), int):
        raise InvalidRequest("this is not the metadata of a checkpoint or savepoint of ours", path=path)
    return int(decoded["version"])

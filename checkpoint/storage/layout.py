"""The one path builder: where everything of a job lies below a checkpoint root, and the ids that appear in paths.

    <root>/<job id>/shared/ taskowned/ chk-<n>/_metadata generations/<n> generations/<n>.base pins/<token> origin
    <folder>/savepoint-<first 6 of the job id>-<12 hex>/_metadata
"""

from __future__ import annotations

import re
import secrets
from typing import NewType

from statebackend.errors import InvalidRequest

METADATA = "_metadata"
SHARED = "shared"
TASK_OWNED = "taskowned"
GENERATIONS = "generations"
PINS = "pins"
ORIGIN = "origin"

CheckpointId = NewType("CheckpointId", int)

_JOB_ID = re.compile(r"[0-9a-f]{32}")
_CHECKPOINT_FOLDER = re.compile(r"chk-([1-9][0-9]*)")
_SAVEPOINT_FOLDER = re.compile(r"savepoint-[0-9a-f]{6}-[0-9a-f]{12}")
_GENERATION = re.compile(r"generations/([0-9]{10})")
_GENERATION_BASE = re.compile(r"generations/([0-9]{10})\.base")
_PRIVATE_FILE = re.compile(r"-g([0-9]+)-[0-9a-f]{32}$")
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")
_LONGEST_HINT = 80


class JobId(str):
    """The id of a job: 32 hex digits."""

    __slots__ = ()

    def __new__(cls, value: str) -> JobId:
        if not _JOB_ID.fullmatch(value):
            raise InvalidRequest("a job id is 32 hex digits", found=value)
        return super().__new__(cls, value)

    @classmethod
    def random(cls) -> JobId:
        return cls(secrets.token_hex(16))


def is_job_folder(name: str) -> bool:
    return _JOB_ID.fullmatch(name) is not None


def checkpoint_id(value: int) -> CheckpointId:
    """A checkpoint id: 1, 2, 3, ..."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidRequest("a checkpoint id is a whole number from 1", found=value)
    return CheckpointId(value)


def checkpoint_folder(checkpoint: int) -> str:
    return f"chk-{checkpoint_id(checkpoint)}"


def checkpoint_of_folder(name: str) -> CheckpointId | None:
    """The id in a folder name `chk-<n>`; None for any other name."""
    match = _CHECKPOINT_FOLDER.fullmatch(name)
    return CheckpointId(int(match[1])) if match else None


def checkpoint_metadata(checkpoint: int) -> str:
    return f"{checkpoint_folder(checkpoint)}/{METADATA}"


def new_savepoint_folder(job_id: JobId) -> str:
    """A fresh name for a savepoint of a job."""
    return f"savepoint-{job_id[:6]}-{secrets.token_hex(6)}"


def is_savepoint_folder(name: str) -> bool:
    return _SAVEPOINT_FOLDER.fullmatch(name) is not None


def generation_file(generation: int) -> str:
    return f"{GENERATIONS}/{generation:010d}"


def generation_base_file(generation: int) -> str:
    return f"{GENERATIONS}/{generation:010d}.base"


def generation_of(path: str) -> int | None:
    """The generation that a claim file stands for; None for any other file."""
    match = _GENERATION.fullmatch(path)
    return int(match[1]) if match else None


def base_generation_of(path: str) -> int | None:
    match = _GENERATION_BASE.fullmatch(path)
    return int(match[1]) if match else None


def new_pin_file() -> str:
    return f"{PINS}/{secrets.token_hex(8)}"


def safe_name(text: str) -> str:
    """A name made of letters, digits and `_.-` that does not start with a dot; for hints, not for identity."""
    return _UNSAFE.sub("-", text)[:_LONGEST_HINT].lstrip(".-_") or "x"


def shared_file(hint: str) -> str:
    """A fresh path for a file that several checkpoints may use."""
    return f"{SHARED}/{safe_name(hint)}-{secrets.token_hex(16)}"


def private_file(folder: str, uid: str, subtask: int, hint: str, generation: int = 0) -> str:
    """A fresh path for a file of one checkpoint; `folder` is its folder, or empty inside a savepoint.

    It names its writer's generation, so that a run gives up its own files only: one that has lost the job may have
    been writing the same checkpoint number as its successor.
    """
    name = f"{safe_name(uid)}-{subtask}-{safe_name(hint)}-g{generation}-{secrets.token_hex(16)}"
    return f"{folder}/{name}" if folder else name


def is_private_file_of(path: str, generation: int) -> bool:
    """Whether a file was written by a run of this generation."""
    match = _PRIVATE_FILE.search(path)
    return match is not None and int(match[1]) == generation

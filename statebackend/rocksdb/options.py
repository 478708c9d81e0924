"""What a user may set on the RocksDB backend, and the process-wide memory that all its databases share."""

from __future__ import annotations

from dataclasses import dataclass, fields

from statebackend.durations import size_bytes
from statebackend.errors import InvalidRequest

DEFAULT_MEMORY_LIMIT = 256 << 20


@dataclass(frozen=True)
class RocksDBOptions:
    """Settings of one backend. Sizes take text such as `64MiB`.

    memory_limit         block cache and write buffers of all databases of this process together; the value set last
                         holds for all. None leaves it as it is (256 MiB at first).
    write_back_entries   changed entries held in Python before the oldest are written to RocksDB
    write_back_bytes     the same, in bytes of keys and values
    l0_trigger           level-0 files that start a compaction: fewer make reads faster, more make uploads smaller
    max_value_bytes      the largest encoded value that is accepted
    log_floor_bytes      a log of changes below this is never replaced by a materialisation, however small the state
    log_max_files        the longest log of changes, in files, before the state is materialised again
    """

    memory_limit: int | str | None = None
    write_back_entries: int = 64_000
    write_back_bytes: int | str = "64MiB"
    l0_trigger: int = 8
    max_value_bytes: int | str = "64MiB"
    log_floor_bytes: int | str = "1MiB"
    log_max_files: int = 128

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.name == "memory_limit":
                continue
            number = size_bytes(value)
            least = 1 << 20 if field.name == "memory_limit" else 0 if field.name == "log_floor_bytes" else 1
            if number < least:
                raise InvalidRequest(f"{field.name} is too small", found=value, expected=f"at least {least}")
            object.__setattr__(self, field.name, number)

    def size(self, name: str) -> int:
        """A size option as the number it is after parsing."""
        return int(getattr(self, name))

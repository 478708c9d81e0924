"""Copies files from one savepoint or checkpoint to another, verified on the way, each only once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import xxhash

from checkpoint.storage.files import CheckpointSource
from checkpoint.storage.layout import private_file
from checkpoint.storage.metadata import ChannelStateEntry
from savepoint.destination import Destination
from savepoint.format import escape_name
from statebackend.errors import CorruptData
from statebackend.files import StateFile
from statebackend.formats import operator_state


class Copier:
    """Copies into one destination. A file that several references name is stored once."""

    def __init__(self, source: CheckpointSource, place: Destination,
                 advance: Callable[[int], None] | None = None) -> None:
        self._source, self._place, self._advance = source, place, advance
        self._copied: dict[str, StateFile] = {}

    @property
    def place(self) -> Destination:
        return self._place

    def copy(self, file: StateFile, path: str) -> StateFile:
        """The file at `path` in the destination; what was inline stays inline."""
        if file.inline is not None:
            file.inline_verified()
            return replace(file, shared=False)
        known = self._copied.get(file.path)
        if known is None:
            known = self._copied[file.path] = self._stream(file, path)
        return known

    def copy_fresh(self, file: StateFile, prefix: str) -> StateFile:
        """The file under a fresh name."""
        return self.copy(file, private_file("", prefix, 0, file.path.rpartition("/")[2]))

    def operator_state(self, file: StateFile | None) -> StateFile | None:
        """Operator state in its own bytes, wherever it lay; inline, as it is small."""
        if file is None:
            return None
        data = operator_state(file, self._source).to_bytes()
        return StateFile("operator-state", len(data), xxhash.xxh3_128_hexdigest(data), inline=data)

    def channels(self, channels: Sequence[ChannelStateEntry], uid: str) -> tuple[ChannelStateEntry, ...]:
        """In-flight records that are kept channel by channel."""
        return tuple(replace(channel, file=self.copy(
            channel.file, f"{escape_name(uid)}/inflight/{escape_name(channel.edge)}-{channel.sender}-{channel.receiver}"))
            for channel in channels)

    def _stream(self, file: StateFile, path: str) -> StateFile:
        writer = self._place.create(path)
        try:
            for chunk in self._source.store.chunks(file.path, file.size):
                writer.write(chunk)
                if self._advance is not None:
                    self._advance(len(chunk))
            copied = writer.finish()
        except BaseException:
            writer.abort()
            raise
        if (copied.size, copied.checksum) != (file.size, file.checksum):
            raise CorruptData("a state file is damaged: its size or checksum differs",
                              path=self._source.store.url_of(file.path), expected=file.checksum, found=copied.checksum,
                              hint="use an older checkpoint or another copy")
        return copied

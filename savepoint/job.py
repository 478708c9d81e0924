"""Lets a running job write its savepoints in the open format (entry point `holdfast.savepoint_writers`)."""

from __future__ import annotations

from checkpoint.storage.files import CheckpointSource
from checkpoint.storage.metadata import CheckpointMetadata
from savepoint.convert import to_open
from savepoint.destination import Destination
from savepoint.opened import Savepoint


class OpenSavepointWriter:
    """Writes the snapshot of a running job, native files and all, as an open savepoint in a new folder."""

    def write(self, metadata: CheckpointMetadata, source: CheckpointSource, folder: str) -> str:
        """Write it and tell its URL. Nothing is visible before it is whole, and nothing is left if it fails."""
        with Destination(folder) as place:
            place.publish(to_open(Savepoint(place.url, metadata, source), place))
            return place.url

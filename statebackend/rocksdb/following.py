"""Bringing an open backend forward along the chain of its own snapshots: what others stored is applied, not restored.

A process that keeps a backend open while another one works on the same key groups (a Spark worker that was passed
over for some batches) catches up by the log files it has not seen. Later snapshots build on the chain it then holds.
"""

from __future__ import annotations

from statebackend.backend import KeyedHandle
from statebackend.entries import read_entries
from statebackend.files import SnapshotSource, StateFile
from statebackend.keygroups import KeyGroupRange
from statebackend.rocksdb.handles import FORMAT, Chain, chain_of
from statebackend.rocksdb.parts import Parts
from statebackend.rocksdb.restore import write_batch


def chain_to_build_on(handle: KeyedHandle, key_groups: KeyGroupRange) -> Chain | None:
    """The chain of a handle that covers exactly this range; None where its files can't be built upon."""
    if handle.key_groups != key_groups:
        return None
    if handle.format == FORMAT:
        return chain_of(handle)
    if handle.format == "entries":
        return Chain(log=tuple(handle.files))
    return None


def stored_tables(chain: Chain) -> dict[tuple[int, str, int], StateFile]:
    """The table files of a chain by the number of their database, which follows the order of key groups."""
    ordered = sorted(chain.parts, key=lambda part: part.key_groups.first)
    return {(number, name, file.size): file for number, part in enumerate(ordered)
            for name, file in part.files.items() if name.endswith(".sst")}


def missing_log(held: Chain, wanted: Chain) -> tuple[StateFile, ...] | None:
    """The log files that lead from one chain to the other; None where they do not.

    A log file is one attempt's alone, and the state after it is the same on whatever base it lies: holding it, only those
    behind it are missing, also where the chain has been put on a new base meanwhile.
    """
    if held.log:
        return wanted.log[wanted.log.index(held.log[-1]) + 1:] if held.log[-1] in wanted.log else None
    return wanted.log if held.parts == wanted.parts else None


def apply_log(files: tuple[StateFile, ...], source: SnapshotSource, parts: Parts, key_groups: KeyGroupRange) -> None:
    for file in files:
        for batch in read_entries(source, file, key_groups):
            write_batch(parts, batch)

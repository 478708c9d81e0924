"""Epochs in storage: reads and writes the facts that `epochs` decides on. The grammar is in docs/formats/epochs.md.

    <checkpoint>/<uid>/generations/<number>
    <checkpoint>/<uid>/manifests/<epoch>-<generation>
    <checkpoint>/<uid>/acks/<epoch>-<generation>/<first>-<last>.<attempt>
    <checkpoint>/<uid>/state/<epoch>-<generation>-<attempt>-<name>

Generations and manifests are created conditionally: of several writers exactly one succeeds, and the others read what
it wrote. Everything else has a name of its own, so that no attempt ever overwrites another.
"""

from __future__ import annotations

import io
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

import msgspec
import xxhash

from checkpoint.storage.probe import probe_store
from checkpoint.storage.store import FileStore
from spark_integration.epochs import (
    Acknowledgement,
    EpochId,
    Generation,
    Manifest,
    OwnGeneration,
    TaskRun,
    WaitFor,
    chain_of,
    decide_generation,
    decide_publication,
    decide_retention,
    fenced,
    manifest_of,
    newest_below,
    require_whole,
)
from statebackend.errors import Conflict, CorruptData, NotFound
from statebackend.files import FileWriter, StateFile, relative_path

GRACE_MS = 600_000
"""Files younger than this are never cleaned up: an attempt may still be writing or about to name them."""
_GENERATION = re.compile(r"generations/(\d{10})")
_MANIFEST = re.compile(r"manifests/(\d{10})-(\d{10})")
_ACK = re.compile(r"acks/(\d{10})-(\d{10})/.+")
_STATE = re.compile(r"state/(\d{10})-(\d{10})-.+")
_READ_AT_ONCE = 32 << 20
_SAFE = re.compile(r"[^A-Za-z0-9_.-]+")


def operator_folder(uid: str) -> str:
    """The folder of an operator below the checkpoint: its uid, escaped where it is no file name."""
    escaped = quote(uid, safe=" ")
    return escaped.replace(".", "%2E") if escaped.startswith(".") else escaped


def _name(epoch: EpochId) -> str:
    return f"{epoch.epoch:010d}-{epoch.generation:010d}"


@dataclass(frozen=True)
class Start:
    """Where a task starts: its generation, the epoch before it, and whether its own epoch exists already."""

    generation: Generation
    base: Manifest | None
    published: bool = False


class EpochStore:
    """The epochs of one operator. Cheap to make; keeps what it has read, because those files never change."""

    def __init__(self, store: FileStore, uid: str, *, max_parallelism: int = 128, start_empty: bool = False,
                 unfenced: bool = False) -> None:
        self.uid, self.max_parallelism = uid, max_parallelism
        self.store = store.child(operator_folder(uid))
        self._start_empty, self._unfenced = start_empty, unfenced
        self._generations: dict[str, Generation] = {}
        self._manifests: OrderedDict[EpochId, Manifest] = OrderedDict()

    # reading

    def generations(self) -> list[Generation]:
        """All runs of the query so far, oldest first."""
        paths = [info.path for info in self.store.list("generations") if _GENERATION.fullmatch(info.path)]
        return [Generation.from_json(self._read_json(path)) for path in paths]

    def published(self) -> set[EpochId]:
        """Every manifest there is, on the chain or off it."""
        return {EpochId(int(match[1]), int(match[2])) for info in self.store.list("manifests")
                if (match := _MANIFEST.fullmatch(info.path))}

    def acknowledged(self) -> set[EpochId]:
        """Every epoch that some task has acknowledged, complete or not."""
        return {EpochId(int(match[1]), int(match[2])) for info in self.store.list("acks")
                if (match := _ACK.fullmatch(info.path))}

    def chain(self) -> list[EpochId]:
        """The epochs that exist, newest first."""
        known = self.generations()
        return chain_of(known[-1], known, self.published()) if known else []

    def latest(self) -> Manifest:
        """The newest epoch."""
        chain = self.chain()
        if not chain:
            raise NotFound("there is no completed epoch here", path=self.store.url, operator=self.uid)
        return self.manifest(chain[0])

    def manifest(self, epoch: EpochId) -> Manifest:
        known = self._manifests.get(epoch)
        if known is None:
            known = self._know(Manifest.from_json(self._read_json(f"manifests/{_name(epoch)}")))
        return known

    def _know(self, manifest: Manifest) -> Manifest:
        self._manifests[manifest.id] = manifest
        while len(self._manifests) > 4:
            self._manifests.popitem(last=False)
        return manifest

    def _manifest_if_any(self, epoch: EpochId) -> Manifest | None:
        try:
            return self.manifest(epoch)
        except NotFound:
            return None

    def _read_json(self, path: str) -> Any:
        try:
            return msgspec.json.decode(self.store.read(path))
        except msgspec.DecodeError as error:
            raise CorruptData(f"a record of an epoch can't be read: {error}", path=self.store.url_of(path)) from error

    # a task's way: start, files, acknowledge

    def start(self, run: TaskRun, parallelism: int) -> Start:
        """The generation of this run (opened here if it is the first task of it) and the epoch to start from."""
        generation = self._generations.get(run.run_id)
        if generation is None:
            self._manifests.clear()  # the folder may have been removed since the last run, and its epochs counted anew
            generation = self._generation_of(run, parallelism)
            self._generations[run.run_id] = generation
        published = self.store.exists(f"manifests/{_name(EpochId(run.batch, generation.number))}")
        return Start(generation, self._base(run, generation), published)

    def _base(self, run: TaskRun, generation: Generation) -> Manifest | None:
        previous = EpochId(run.batch - 1, generation.number)
        if run.batch > generation.first_batch:
            manifest = self._manifest_if_any(previous)
            if manifest is not None:
                return manifest
            known, published = self.generations(), self.published()
            base = newest_below(run.batch, generation, known, published)
            require_whole(run.batch, base, chain_of(generation, known, published, self.acknowledged()), published)
        else:
            base = generation.base
        return self.manifest(base) if base is not None else None

    def _generation_of(self, run: TaskRun, parallelism: int) -> Generation:
        while True:
            decision = decide_generation(run, self.generations(), self.published(), self.acknowledged(),
                                         self._start_empty)
            if isinstance(decision, OwnGeneration):
                return decision.generation
            if decision.number == 1:
                probe_store(self.store, quick=True).require(unfenced=self._unfenced)
            opened = Generation(decision.number, run.run_id, run.query_id, run.batch, parallelism, decision.base,
                                _now_ms())
            try:
                self.store.create(f"generations/{decision.number:010d}", msgspec.json.encode(opened.to_json()))
                return opened
            except Conflict:
                continue  # another task of this run, or another run, came first: look again

    def files(self, epoch: EpochId, attempt: str) -> EpochFiles:
        """Where an attempt's state files go, and where all state files come from.

        `epoch` is the last one that may be the first to name them: once that one is old, files nobody names go.
        """
        return EpochFiles(self.store, f"state/{_name(epoch)}-{attempt}")

    def acknowledge(self, run: TaskRun, start: Start, parallelism: int, ack: Acknowledgement) -> Manifest | None:
        """Store an acknowledgement; publish the epoch if it was the last one missing. The state is durable before."""
        epoch = EpochId(run.batch, start.generation.number)
        folder = f"acks/{_name(epoch)}"
        name = f"{ack.key_groups.first:05d}-{ack.key_groups.last:05d}.{ack.attempt}"
        self.store.write(f"{folder}/{name}", msgspec.json.encode(ack.to_json()))
        self._require_not_fenced(start.generation)
        others = [info.path for info in self.store.list(folder)]
        if len({path.rsplit("/", 1)[1].split(".")[0] for path in others}) < parallelism:
            return None
        decision = decide_publication(parallelism, self.max_parallelism, self._acknowledgements(others, name, ack))
        if isinstance(decision, WaitFor):
            return None
        manifest = manifest_of(run, start.generation, self.uid, self.max_parallelism, start.base, decision.parts,
                               _now_ms())
        try:
            self.store.create(f"manifests/{_name(epoch)}", msgspec.json.encode(manifest.to_json()))
        except Conflict:
            return None  # somebody saw it complete at the same moment
        return self._know(manifest)

    def _acknowledgements(self, paths: Iterable[str], own_name: str, own: Acknowledgement) -> list[Acknowledgement]:
        return [own if path.endswith(own_name) else Acknowledgement.from_json(self._read_json(path)) for path in paths]

    def _require_not_fenced(self, own: Generation) -> None:
        if self.store.exists(f"generations/{own.number + 1:010d}"):
            raise fenced(own, self.generations()[-1])

    # cleaning up

    def forget(self, newest: Manifest, retain: int, grace_ms: int = GRACE_MS) -> int:
        """Remove what no retained epoch needs; how many files. Only the newest generation calls this, after publishing.

        The files of the floor (the oldest epoch kept) and those that a later epoch may be the first to name stay: later
        epochs name no others.
        """
        known = self.generations()
        if known[-1].number != newest.id.generation:
            return 0
        plan = decide_retention(newest.id, retain, known[-1], known, self.published(), self.acknowledged())
        if plan is None:
            return 0
        floor, needed, before = plan.floor, self.manifest(plan.floor).files(), _now_ms() - grace_ms
        doomed = [info.path for folder in ("state", "manifests", "acks") for info in self.store.list(folder)
                  if info.modified_ms < before and self._is_old(info.path, floor, needed)]
        self.store.delete(doomed)
        return len(doomed)

    @staticmethod
    def _is_old(path: str, floor: EpochId, needed: set[str]) -> bool:
        match = _STATE.fullmatch(path)
        if match:
            return int(match[1]) <= floor.epoch and path not in needed
        match = _MANIFEST.fullmatch(path) or _ACK.fullmatch(path)
        return match is not None and int(match[1]) <= floor.epoch and \
            EpochId(int(match[1]), int(match[2])) != floor


class EpochFiles:
    """State files of one attempt (as target), and all state files of the operator (as source)."""

    def __init__(self, store: FileStore, prefix: str) -> None:
        self._store, self._prefix = store, prefix
        self._named: list[str] = []

    def create(self, hint: str, *, shared: bool) -> FileWriter:
        return self._store.writer(self._fresh(hint), shared=shared)

    def upload(self, local: Path, hint: str, *, shared: bool) -> StateFile:
        return self._store.upload(local, self._fresh(hint), shared=shared, link=True)

    def open(self, file: StateFile) -> BinaryIO:
        if file.inline is not None:
            return io.BytesIO(file.inline_verified())
        path = relative_path(file.path)
        if file.size > _READ_AT_ONCE:
            self._store.verify(path, file)
            return self._store.open(path)
        data = self._store.read(path)
        if len(data) != file.size or xxhash.xxh3_128_hexdigest(data) != file.checksum:
            raise CorruptData("a state file is damaged: size or checksum differ", path=self._store.url_of(path),
                              expected=file.checksum, hint="go back to an older epoch with `holdfast spark restore`")
        return io.BytesIO(data)

    def fetch(self, file: StateFile, local: Path) -> None:
        if file.inline is not None:
            local.write_bytes(file.inline_verified())
            return
        self._store.link_or_copy(relative_path(file.path), local, file)

    def discard(self) -> None:
        """Remove what was stored here, because no epoch will name it."""
        named, self._named = self._named, []
        self._store.delete(named)

    def _fresh(self, hint: str) -> str:
        path = f"{self._prefix}-{_SAFE.sub('-', hint)[:60]}-{secrets.token_hex(8)}"
        self._named.append(path)
        return path


def _now_ms() -> int:
    return time.time_ns() // 1_000_000

"""Reads RocksDB's table files without RocksDB, whose binding hands out two Python objects for every row.

Only what the options of this backend write is read: block-based tables of format version 5 with binary-search index, LZ4 or
no compression, XXH3 checksums, puts and deletions. Everything else is `Unreadable`, before the first row, and the caller
reads the database through RocksDB. Every block's checksum is verified, and the count of rows where a whole table was read.

    table   = block ... | footer
    block   = contents | compression (u8) | checksum (u32)
    footer  = checksum type (u8) | handle of metaindex, of index | zeros up to 41 bytes | version (u32) | magic (u64)
    handle  = offset (varint) | size without compression and checksum (varint)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from statebackend.entries import OP_DELETE, OP_PUT, cut_to_groups, entry_batch
from statebackend.errors import CorruptData, Unavailable
from statebackend.keygroups import KeyGroupRange
from statebackend.rocksdb.blocks import DELETION, PUT, decode_blocks, entries_of, varint

MAGIC = 0x88E241B785F4CFF7
FORMAT_VERSION = 5
_FOOTER = 53
_TRAILER = 5
_XXH3, _LAST_BYTE_PRIME = 4, 0x6B9083D9
_PLAIN, _LZ4 = 0, 4
_LZ4_EXPANDS = 255
"""So many bytes come of one at most: each byte that tells a length adds up to 255 to it."""
_INDEX_KEY = "rocksdb.block.based.table.index.type"
_EXPECTED = {_INDEX_KEY: b"\0\0\0\0", "rocksdb.comparator": b"leveldb.BytewiseComparator",
             "rocksdb.index.key.is.user.key": b"\1", "rocksdb.index.value.is.delta.encoded": b"\1",
             "rocksdb.column.family.id": b"\0", "rocksdb.merge.operands": b"\0", "rocksdb.num.range-deletions": b"\0"}
_LARGEST, _ENTRIES = "rocksdb.key.largest.seqno", "rocksdb.num.entries"
_COMPRESSIONS = (b"NoCompression", b"LZ4")
READ_BYTES = 1 << 20
"""Stored bytes that are read and decoded at once."""

class Unreadable(Exception):
    """A table that only RocksDB can read; the text says why."""


class TableFile:
    """One table file, open until `close`. `rows` may be called once at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO = open(path, "rb")  # noqa: SIM115
        try:
            self._size = path.stat().st_size
            metaindex, index = self._footer()
            self._require_known(self._properties(metaindex))
            self._separators, self._offsets, self._sizes = self._index(index)
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        self._file.close()

    def rows(self, key_groups: KeyGroupRange) -> Iterator[pa.RecordBatch]:
        """The entries of a range of key groups, puts and deletes, in the order of keys: of each the newest version."""
        first, after = key_groups.first.to_bytes(2, "big"), (key_groups.last + 1).to_bytes(2, "big")
        begin = bisect_left(self._separators, first)
        end = min(bisect_left(self._separators, after) + 1, len(self._offsets))
        rows, whole = 0, begin == 0 and end == len(self._offsets)
        last: bytes | None = None
        while begin < end:
            stop = max(begin + 1, int(np.searchsorted(self._offsets, self._offsets[begin] + READ_BYTES)))
            batch = self._decoded(begin, min(stop, end))
            rows += batch.num_rows
            unique = _unique(batch)
            if unique is None or (last is not None and last >= batch.column(0)[0].as_py()):
                raise self._damaged("its keys are not in order")
            last = batch.column(0)[-1].as_py()
            cut = cut_to_groups(unique, key_groups)
            if cut.num_rows:
                yield cut
            begin = stop
        if whole and rows != self._entries:
            raise self._damaged("it holds another number of entries than it says", expected=self._entries, found=rows)

    def _decoded(self, begin: int, end: int) -> pa.RecordBatch:
        first = int(self._offsets[begin])
        stored = self._read(first, int(self._offsets[end - 1] + self._sizes[end - 1]) + _TRAILER - first)
        contents = [self._contents(stored, offset - first, size)
                    for offset, size in zip(self._offsets[begin:end].tolist(), self._sizes[begin:end].tolist())]
        try:
            found = decode_blocks(contents)
        except CorruptData as error:
            raise self._damaged(error.message) from error
        if ((found.kinds != PUT) & (found.kinds != DELETION)).any():
            raise self._damaged("it holds entries that are neither puts nor deletions")
        ops = np.where(found.kinds == PUT, np.uint8(OP_PUT), np.uint8(OP_DELETE))
        return entry_batch(found.keys, found.values, ops)

    def _footer(self) -> tuple[bytes, bytes]:
        if self._size < _FOOTER:
            raise self._damaged("it is cut short")
        footer = bytes(self._read(self._size - _FOOTER, _FOOTER))
        if int.from_bytes(footer[-8:], "little") != MAGIC or int.from_bytes(footer[-12:-8], "little") != FORMAT_VERSION:
            raise Unreadable("another format")
        if footer[0] != _XXH3:
            raise Unreadable("another checksum")
        handles, position = [], 1
        for _ in range(2):
            offset, position = varint(footer, position)
            size, position = varint(footer, position)
            handles.append(self._block(offset, size))
        return handles[0], handles[1]

    def _properties(self, metaindex: bytes) -> Mapping[str, bytes]:
        for name, handle in entries_of(metaindex):
            if name == b"rocksdb.properties":
                offset, position = varint(handle, 0)
                properties = self._block(offset, varint(handle, position)[0])
                return {key.decode(errors="replace"): value for key, value in entries_of(properties)}
        raise Unreadable("no properties")

    def _require_known(self, properties: Mapping[str, bytes]) -> None:
        for name, expected in _EXPECTED.items():
            if properties.get(name) != expected:
                raise Unreadable(f"{name} is {properties.get(name)!r}")
        if properties.get("rocksdb.compression") not in _COMPRESSIONS:
            raise Unreadable("another compression")
        if any(name.startswith("rocksdb.external_sst_file") for name in properties):
            raise Unreadable("an ingested table, whose sequence numbers are elsewhere")
        if _LARGEST not in properties or _ENTRIES not in properties:
            raise Unreadable("an older table")
        self.newest = varint(properties[_LARGEST], 0)[0]
        """The number of the last write that is in it, or 0 where numbers no longer matter."""
        self._entries = varint(properties[_ENTRIES], 0)[0]

    def _index(self, block: bytes) -> tuple[list[bytes], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """For each data block: a key not below its last one, its offset, its size. An entry of an index has no value length,
        and every one is a restart."""
        restarts = int.from_bytes(block[-4:], "little")
        stop = len(block) - 4 - 4 * restarts
        if restarts >> 31 or stop < 0:
            raise Unreadable("another kind of index")
        separators, offsets, sizes, position = list[bytes](), list[int](), list[int](), 0
        while position < stop:
            shared, position = varint(block, position)
            length, position = varint(block, position)
            if shared:
                raise Unreadable("an index that shares keys")
            separators.append(block[position:position + length])
            offset, position = varint(block, position + length)
            size, position = varint(block, position)
            if offset + size > self._size:
                raise self._damaged("its index names a block outside of it", offset=offset)
            offsets.append(offset)
            sizes.append(size)
        if len(offsets) != restarts and not (restarts == 1 and not offsets):
            raise Unreadable("an index that shares keys")
        begins, lengths = np.array(offsets, np.int64), np.array(sizes, np.int64)
        if (begins[1:] != begins[:-1] + lengths[:-1] + _TRAILER).any():
            raise Unreadable("blocks with gaps between them")
        return separators, begins, lengths

    def _block(self, offset: int, size: int) -> bytes:
        return bytes(self._contents(self._read(offset, size + _TRAILER), 0, size))

    def _contents(self, stored: memoryview, offset: int, size: int) -> Any:
        """The uncompressed contents of a block, verified."""
        block, kind = stored[offset:offset + size], stored[offset + size]
        checksum = int.from_bytes(stored[offset + size + 1:offset + size + _TRAILER], "little")
        if (xxhash.xxh3_64_intdigest(block) ^ kind * _LAST_BYTE_PRIME) & 0xFFFFFFFF != checksum:
            raise self._damaged("the checksum of a block differs", offset=offset)
        if kind == _PLAIN:
            return block
        if kind != _LZ4:
            raise self._damaged("a block is compressed in another way than the table says", found=kind)
        length, begin = varint(block[:10], 0)
        if length > _LZ4_EXPANDS * size:
            raise self._damaged("a block says to be longer than it can be", expected=f"at most {_LZ4_EXPANDS * size}",
                                found=length, offset=offset)
        try:
            return _CODEC.decompress(block[begin:], length)
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(f"a block can't be decompressed: {error}") from error

    def _read(self, offset: int, length: int) -> memoryview:
        if offset + length > self._size:
            raise self._damaged("it is cut short")
        try:
            self._file.seek(offset)
            data = self._file.read(length)
        except OSError as error:
            raise Unavailable(f"a table file can't be read: {error}", path=str(self._path)) from error
        if len(data) != length:
            raise self._damaged("it is cut short")
        return memoryview(data)

    def _damaged(self, what: str, **context: Any) -> CorruptData:
        return CorruptData(f"a table file is damaged: {what}", path=str(self._path),
                           hint="restore from an older checkpoint", **context)


def open_tables(paths: Sequence[Path]) -> list[TableFile]:
    """All tables of a database; `Unreadable` where RocksDB has to read one of them."""
    opened: list[TableFile] = []
    try:
        for path in paths:
            opened.append(TableFile(path))
    except BaseException:
        for table in opened:
            table.close()
        raise
    return opened


def _unique(batch: pa.RecordBatch) -> pa.RecordBatch | None:
    """The first row of each key; None where keys are not in order."""
    keys = batch.column(0)
    before, after = keys.slice(0, len(keys) - 1), keys.slice(1)
    if pc.all(pc.less(before, after)).as_py() is not False:
        return batch
    if pc.any(pc.greater(before, after)).as_py():
        return None
    return batch.filter(pa.array(np.append(True, pc.not_equal(before, after).to_numpy(zero_copy_only=False))))


_CODEC = pa.Codec("lz4_raw")

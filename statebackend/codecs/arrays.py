"""Arrow columns to and from bytes without a Python object per row: the tools that codecs share."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from statebackend.errors import CorruptData, InvalidRequest

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
I64 = np.ndarray[Any, np.dtype[np.int64]]


class ByteColumn:
    """The values of a binary array without nulls as one stretch of bytes, with where each begins and ends."""

    def __init__(self, array: pa.BinaryArray) -> None:
        self.data, self.begins, lengths = byte_ranges(array)
        self.ends = self.begins + lengths

    def rows(self, positions: I64, width: int, ends: I64, what: str) -> Bytes:
        """The (n, width) bytes that start at the positions; damage where a value ends before."""
        if len(positions) and bool((positions + width > ends).any()):
            raise CorruptData(f"stored bytes are no {what}: they are cut short")
        if width == 8:
            return np.asarray(self.words[positions].view(np.uint8).reshape(len(positions), 8))
        return np.asarray(self.data[positions[:, None] + np.arange(width)])

    @cached_property
    def words(self) -> Any:
        """Every eight bytes of the data as a number, whatever their position."""
        return np.ndarray((len(self.data) - 7,), "<u8", self.data, strides=(1,))

    @cached_property
    def marks(self) -> I64:
        """Where a 00 is that does not begin an escape: the end of a text is the first at or after its begin."""
        return np.flatnonzero((self.data[:-1] == 0) & (self.data[1:] != 0xFF))

    def texts(self, positions: I64, ends: I64, what: str) -> tuple[pa.BinaryArray, I64]:
        """The escaped values that start at the positions, unescaped, and where they end."""
        found = np.searchsorted(self.marks, positions)
        if len(positions) and (int(found.max()) >= len(self.marks)):
            raise CorruptData(f"stored bytes are no {what}: the end mark is missing")
        stops = self.marks[found] if len(positions) else positions
        if len(positions) and bool(((stops + 2 > ends) | (self.data[stops + 1] != 0)).any()):
            raise CorruptData(f"stored bytes are no {what}: the end mark is missing")
        values = self.cut(positions, stops)
        if _has_zero(values):
            values = pc.replace_substring(values, pattern=b"\x00\xff", replacement=b"\x00")
        return values, stops + 2

    def cut(self, begins: I64, ends: I64) -> pa.BinaryArray:
        """The bytes from each begin to each end."""
        lengths = ends - begins
        offsets = np.zeros(len(begins) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        index = np.arange(offsets[-1], dtype=np.int64) + np.repeat(begins - offsets[:-1], lengths)
        data = self.data[index]
        return pa.Array.from_buffers(pa.binary(), len(begins), [
            None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(data)])


def byte_ranges(array: pa.Array) -> tuple[Bytes, I64, I64]:
    """The data of a string or binary array with eight bytes to spare, where each value begins, and its length."""
    if len(array) == 0:
        return np.zeros(8, np.uint8), np.zeros(0, np.int64), np.zeros(0, np.int64)
    if pt.is_fixed_size_binary(array.type):
        width, raw = array.type.byte_width, array.buffers()[1]
        begins = np.arange(array.offset, array.offset + len(array), dtype=np.int64) * width
        lengths = np.full(len(array), width, np.int64)
    else:
        large = pt.is_large_string(array.type) or pt.is_large_binary(array.type)
        kind = np.dtype(np.int64 if large else np.int32)
        _, positions, raw = array.buffers()
        offsets = np.frombuffer(positions, kind, len(array) + 1, array.offset * kind.itemsize)
        begins = offsets[:-1].astype(np.int64)
        lengths = np.diff(offsets).astype(np.int64)
    data = np.zeros(0, np.uint8) if raw is None else np.frombuffer(raw, np.uint8)
    end = int((begins + lengths).max())
    if len(data) < end + 8:
        data = np.concatenate([data[:end], np.zeros(8, np.uint8)])
    return data, begins, lengths


def pieces(buffer: pa.Buffer, begins: I64, ends: I64) -> pa.BinaryArray:
    """A binary array of `buffer[begins[i]:ends[i]]`; the pieces are in order and do not overlap."""
    rows = len(begins)
    if rows == 0:
        return pa.array([], pa.binary())
    bounds = np.empty(2 * rows + 1, np.int32)
    bounds[0:-1:2], bounds[1::2], bounds[-1] = begins, ends, ends[-1]
    both = pa.Array.from_buffers(pa.binary(), 2 * rows, [None, pa.py_buffer(bounds), buffer])
    return both.take(pa.array(np.arange(0, 2 * rows, 2)))


def spread(values: pa.Array, present: np.ndarray[Any, np.dtype[np.bool_]]) -> pa.Array:
    """The values on the rows where `present` holds, null on the others."""
    if present.all():
        return values
    return values.take(pa.array(np.cumsum(present) - 1, mask=~present))


def conform(array: Any, wanted: pa.DataType) -> pa.Array:
    """One array of the wanted type; only casts that keep the kind of value and lose nothing are made."""
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0) if array.num_chunks == 1 else array.combine_chunks()
        if isinstance(array, pa.ChunkedArray):
            array = pa.concat_arrays(array.chunks)
    if not isinstance(array, pa.Array):
        array = pa.array(array)
    if array.type == wanted:
        return array
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pt.is_dictionary(array.type):
        array = array.dictionary_decode()
    if array.type == wanted:
        return array
    if not _castable(array.type, wanted):
        raise InvalidRequest("a column has another type than declared", expected=str(wanted), found=str(array.type))
    try:
        return array.cast(wanted)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        raise InvalidRequest(f"a column does not fit the declared type: {error}", expected=str(wanted),
                             found=str(array.type)) from error


def _castable(found: pa.DataType, wanted: pa.DataType) -> bool:
    if pt.is_dictionary(found):
        found = found.value_type
    if pt.is_null(found):
        return True
    if pt.is_timestamp(found) and pt.is_timestamp(wanted):
        return (found.tz is None) == (wanted.tz is None)
    if pt.is_struct(found) and pt.is_struct(wanted):
        return [field.name for field in found] == [field.name for field in wanted] and all(
            _castable(left.type, right.type) for left, right in zip(found, wanted))
    if _is_list(found) and _is_list(wanted):
        return _castable(found.value_type, wanted.value_type)
    if pt.is_map(found) and pt.is_map(wanted):
        return _castable(found.key_type, wanted.key_type) and _castable(found.item_type, wanted.item_type)
    if pt.is_integer(found) and (pt.is_floating(wanted) or pt.is_decimal(wanted)):
        return True
    return found == wanted or any(test(found) and test(wanted) for test in _FAMILIES)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind))


def is_text(kind: pa.DataType) -> bool:
    return bool(pt.is_string(kind) or pt.is_large_string(kind) or pt.is_string_view(kind))


def is_bytes(kind: pa.DataType) -> bool:
    return bool(pt.is_binary(kind) or pt.is_large_binary(kind) or pt.is_fixed_size_binary(kind)
                or pt.is_binary_view(kind))


_FAMILIES = (pt.is_integer, pt.is_floating, is_text, is_bytes, pt.is_date, pt.is_time, pt.is_duration, pt.is_decimal)


def validity_of(array: pa.Array) -> pa.Buffer | None:
    """The validity bitmap of an array as if it had no offset."""
    return None if array.null_count == 0 else array.is_valid().buffers()[1]


def binary_rows(rows: Bytes, valid_from: pa.Array | None = None) -> pa.BinaryArray:
    """A binary array of the rows of an (n, width) byte matrix; null where `valid_from` is."""
    count, width = rows.shape
    offsets = np.arange(count + 1, dtype=np.int32) * np.int32(width)
    validity = None if valid_from is None else validity_of(valid_from)
    data = pa.py_buffer(np.ascontiguousarray(rows))
    return pa.Array.from_buffers(pa.binary(), count, [validity, pa.py_buffer(offsets), data])


def rows_of(array: pa.BinaryArray, width: int, what: str) -> Bytes:
    """The (n, width) byte matrix of a binary array; null rows are zeros, any other length is damage."""
    count = len(array)
    if array.null_count:
        array = array.fill_null(bytes(width))
    if count == 0:
        return np.zeros((0, width), np.uint8)
    offsets = np.frombuffer(array.buffers()[1], np.int32, count + 1, array.offset * 4)
    if not (np.diff(offsets) == width).all():
        wrong = int(np.flatnonzero(np.diff(offsets) != width)[0])
        raise CorruptData(f"stored bytes are no {what}: expected {width} bytes", row=wrong,
                          found=array[wrong].as_py()[:32].hex())
    data = array.buffers()[2]
    if data is None:
        return np.zeros((count, width), np.uint8)
    return np.frombuffer(data, np.uint8, count * width, int(offsets[0])).reshape(count, width)


def rows_of_one_width(array: pa.BinaryArray) -> Bytes | None:
    """The rows of a binary array as a matrix, where all have one length and none is null."""
    count = len(array)
    if count == 0 or array.null_count:
        return None
    offsets = np.frombuffer(array.buffers()[1], np.int32, count + 1, array.offset * 4)
    width = int(offsets[1] - offsets[0])
    data = array.buffers()[2]
    if data is None or int(offsets[-1] - offsets[0]) != count * width or not (np.diff(offsets) == width).all():
        return None
    return np.frombuffer(data, np.uint8, count * width, int(offsets[0])).reshape(count, width)


def numbers_of(array: pa.Array, dtype: Any) -> np.ndarray[Any, Any]:
    """The data of a fixed-width array as numpy numbers, without a copy; null rows hold anything."""
    width = np.dtype(dtype).itemsize
    data = array.buffers()[1]
    if data is None or len(array) == 0:
        return np.zeros(len(array), dtype)
    return np.frombuffer(data, dtype, len(array), array.offset * width)


def from_numbers(values: np.ndarray[Any, Any], kind: pa.DataType, valid_from: pa.Array | None = None) -> pa.Array:
    """A fixed-width array over numpy numbers; null where `valid_from` is."""
    validity = None if valid_from is None else validity_of(valid_from)
    return pa.Array.from_buffers(kind, len(values), [validity, pa.py_buffer(np.ascontiguousarray(values))])


def escape_text(array: pa.Array) -> pa.BinaryArray:
    """Ordered, self-delimiting form of each value: 00 becomes 00 FF, and 00 00 ends it."""
    array = array.cast(pa.binary())
    if _has_zero(array):
        array = pc.replace_substring(array, pattern=b"\x00", replacement=b"\x00\xff")
    end = pa.scalar(b"\x00\x00", pa.binary())
    return pc.binary_join_element_wise(array, end, pa.scalar(b"", pa.binary()))


def unescape_text(array: pa.BinaryArray, what: str) -> pa.BinaryArray:
    """What `escape_text` was given; damage where a value does not end in 00 00."""
    if len(array) == 0:
        return array.cast(pa.binary())
    ends = pc.ends_with(array, pattern=b"\x00\x00")
    if pc.all(ends).as_py() is False:
        raise CorruptData(f"stored bytes are no {what}: the end mark is missing")
    array = pc.binary_slice(array, 0, -2)
    if _has_zero(array):
        array = pc.replace_substring(array, pattern=b"\x00\xff", replacement=b"\x00")
    return array


def _has_zero(array: pa.BinaryArray) -> bool:
    data = array.buffers()[2] if len(array) else None
    if data is None:
        return False
    offsets = np.frombuffer(array.buffers()[1], np.int32, len(array) + 1, array.offset * 4)
    begin, end = int(offsets[0]), int(offsets[-1])
    return end > begin and not np.frombuffer(data, np.uint8, end - begin, begin).all()


def joined(columns: list[pa.BinaryArray], count: int) -> pa.BinaryArray:
    """Row by row concatenation of binary columns."""
    if not columns:
        return pa.array([b""] * count, pa.binary())
    if len(columns) == 1:
        return columns[0]
    return pc.binary_join_element_wise(*columns, pa.scalar(b"", pa.binary()))

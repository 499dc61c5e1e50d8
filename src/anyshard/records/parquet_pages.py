"""What a Parquet file would unfold to, found from its footer and page headers before any library opens it.

A page of a few bytes can unfold to gigabytes, the totals in the footer are not what a decoder goes by, and Arrow's own view of
a hostile footer can end the process. So both are walked here (Thrift, compact protocol) and all but a few integers passed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

MAX_NUM_COLUMNS = 1024

_MAGIC = b"PAR1"
_MAX_DEPTH = 16
# Numbers of the fields that matter, by struct.
_FILE_SCHEMA, _FILE_ROWS, _FILE_GROUPS = 2, 3, 4
_GROUP_COLUMNS, _GROUP_ROWS = 1, 3
_CHUNK_METADATA = 3
_METADATA_NBYTES, _METADATA_DATA, _METADATA_DICTIONARY = 7, 9, 11
_PAGE_UNFOLDED_NBYTES, _PAGE_STORED_NBYTES = 2, 3

_STOP, _TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(13)
_VARINTS = (_I16, _I32, _I64)


@dataclass(frozen=True, slots=True)
class ParquetSizes:
    """Rows of the file and of each row group, and the bytes of all pages when unfolded."""

    num_rows: int
    group_rows: tuple[int, ...]
    page_nbytes: int


def measure_parquet(data: bytes) -> ParquetSizes:
    """The sizes of a Parquet file; `ValueError` if it is none or its pages do not fill their column chunks."""
    end = len(data) - 8
    if end < 4 or data[:4] != _MAGIC or data[-4:] != _MAGIC:
        raise ValueError(f"a file of {len(data)} bytes that does not begin and end as Parquet does")
    start = end - int.from_bytes(data[end : end + 4], "little")
    if start < 4:
        raise ValueError("a footer that is longer than the file")
    num_rows, group_rows, page_nbytes = -1, [], 0
    footer = _Thrift(data, start, end)
    for number, kind in footer.fields():
        if (number, kind) == (_FILE_ROWS, _I64):
            num_rows = footer.integer()
        elif (number, kind) == (_FILE_GROUPS, _LIST):
            for _ in range(footer.list_size(_STRUCT)):
                rows, nbytes = _measure_group(footer)
                group_rows.append(rows)
                page_nbytes += nbytes
        elif (number, kind) == (_FILE_SCHEMA, _LIST):
            footer.skip_structs(maximum=2 * MAX_NUM_COLUMNS)
        else:
            footer.skip(kind)
    return ParquetSizes(num_rows, tuple(group_rows), page_nbytes)


def _measure_group(footer: _Thrift) -> tuple[int, int]:
    num_rows, nbytes = -1, 0
    for number, kind in footer.fields():
        if (number, kind) == (_GROUP_ROWS, _I64):
            num_rows = footer.integer()
        elif (number, kind) == (_GROUP_COLUMNS, _LIST):
            if (num_columns := footer.list_size(_STRUCT)) > MAX_NUM_COLUMNS:
                raise ValueError(f"{num_columns} columns")
            nbytes = sum(_measure_chunk(footer) for _ in range(num_columns))
        else:
            footer.skip(kind)
    return num_rows, nbytes


def _measure_chunk(footer: _Thrift) -> int:
    nbytes = 0
    for number, kind in footer.fields():
        if (number, kind) == (_CHUNK_METADATA, _STRUCT):
            nbytes = sum(_unfolded_pages(footer.data, footer.integers()))
        else:
            footer.skip(kind)
    return nbytes


def _unfolded_pages(data: bytes, metadata: dict[int, int]) -> Iterator[int]:
    """The unfolded length of each page of a column chunk."""
    start = metadata.get(_METADATA_DATA, -1)
    start = min(start, metadata.get(_METADATA_DICTIONARY, start))
    stop = start + metadata.get(_METADATA_NBYTES, -1)
    if not 4 <= start <= stop <= len(data):
        raise ValueError(f"a column chunk from {start} to {stop} in a file of {len(data)} bytes")
    while start < stop:
        header = _Thrift(data, start, stop)
        fields = header.integers()
        unfolded, stored = fields.get(_PAGE_UNFOLDED_NBYTES, -1), fields.get(_PAGE_STORED_NBYTES, -1)
        start = header.position + stored
        if min(unfolded, stored) < 0 or start > stop:
            raise ValueError(f"a page of {stored} bytes (unfolded {unfolded}) that does not fit its column chunk")
        yield unfolded


class _Thrift:
    """A cursor over Thrift compact bytes. After each item of `fields` its value has to be taken or skipped."""

    def __init__(self, data: bytes, position: int, stop: int) -> None:
        self.data = data
        self.position = position
        self._stop = stop
        self._depth = 0

    def fields(self) -> Iterator[tuple[int, int]]:
        """Number and kind of each field of one struct. A field that comes twice is refused: decoders differ on it."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ValueError("structs that are nested too deep")
        number, seen = 0, set()
        while (header := self._byte()) != _STOP:
            number = number + (header >> 4) if header >> 4 else self.integer()
            if number in seen:
                raise ValueError(f"field {number} twice")
            seen.add(number)
            yield number, header & 15
        self._depth -= 1

    def integers(self) -> dict[int, int]:
        """Number -> value of the integer fields of one struct."""
        found = {}
        for number, kind in self.fields():
            if kind in _VARINTS:
                found[number] = self.integer()
            else:
                self.skip(kind)
        return found

    def integer(self) -> int:
        """One integer (zigzag varint)."""
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def list_size(self, expected_kind: int) -> int:
        """Number of items of a list whose items are of one kind."""
        header = self._byte()
        if header & 15 != expected_kind:
            raise ValueError(f"a list of kind {header & 15}")
        return self._varint() if header >> 4 == 15 else header >> 4

    def skip_structs(self, *, maximum: int) -> None:
        """Pass over a list of structs."""
        if (size := self.list_size(_STRUCT)) > maximum:
            raise ValueError(f"a list of {size} structs, more than {maximum}")
        for _ in range(size):
            self.skip(_STRUCT)

    def skip(self, kind: int, *, in_list: bool = False) -> None:
        """Pass over one value."""
        if kind in _VARINTS:
            self._varint()
        elif kind in (_TRUE, _FALSE):
            self._advance(int(in_list))  # as a field, the kind is the value
        elif kind in (_BYTE, _DOUBLE):
            self._advance(8 if kind == _DOUBLE else 1)
        elif kind == _BINARY:
            self._advance(self._varint())
        elif kind in (_LIST, _SET):
            self._skip_list()
        elif kind == _STRUCT:
            for _, field_kind in self.fields():
                self.skip(field_kind)
        else:
            raise ValueError(f"a value of kind {kind}")

    def _skip_list(self) -> None:
        kind = self._byte()
        for _ in range(self._varint() if kind >> 4 == 15 else kind >> 4):
            if kind & 15 in (_LIST, _SET):
                raise ValueError("a list of lists")
            self.skip(kind & 15, in_list=True)

    def _varint(self) -> int:
        value = shift = 0
        while (byte := self._byte()) & 128:
            value |= (byte & 127) << shift
            shift += 7
            if shift > 63:
                raise ValueError("an integer of more than 64 bits")
        return value | byte << shift

    def _byte(self) -> int:
        self._advance(1)
        return self.data[self.position - 1]

    def _advance(self, nbytes: int) -> None:
        self.position += nbytes
        if self.position > self._stop:
            raise ValueError("a struct that is cut")

"""Checks the shape of MessagePack bytes before a single value is built from them.

Whatever the bytes claim, the scan takes time in proportion to them and memory in proportion to their map keys.
"""

from __future__ import annotations

from collections.abc import Container

from anyshard.records.values_types import ValueLimits

_NO_END = -1
_ARRAY, _MAP, _STR, _BIN, _EXT, _NUMBER = "array", "map", "str", "bin", "extension", "number"

# First byte -> (what it begins, bytes of the length that follows, the length where it is part of the first byte).
_HEADS: dict[int, tuple[str, int, int]] = {
    **{0x80 + n: (_MAP, 0, n) for n in range(16)},
    **{0x90 + n: (_ARRAY, 0, n) for n in range(16)},
    **{0xA0 + n: (_STR, 0, n) for n in range(32)},
    **{0xC4 + i: (_BIN, 1 << i, 0) for i in range(3)},
    **{0xC7 + i: (_EXT, 1 << i, 0) for i in range(3)},
    **{0xD4 + i: (_EXT, 0, 1 << i) for i in range(5)},
    **{0xD9 + i: (_STR, 1 << i, 0) for i in range(3)},
    **{0xDC + i: (_ARRAY, 2 << i, 0) for i in range(2)},
    **{0xDE + i: (_MAP, 2 << i, 0) for i in range(2)},
}
# First byte -> length of the number, bool, nil or short str that it begins. Not 0xCA: floats of 32 bits are never written.
_FLAT: dict[int, int] = {
    **dict.fromkeys(range(0x80), 1),
    **{0xA0 + n: 1 + n for n in range(32)},
    **dict.fromkeys((0xC0, 0xC2, 0xC3), 1),
    0xCB: 9,
    **{0xCC + i: 1 + (1 << i) for i in range(4)},
    **{0xD0 + i: 1 + (1 << i) for i in range(4)},
    **dict.fromkeys(range(0xE0, 0x100), 1),
}
_WIDTHS = bytes(_FLAT.get(first, 0) for first in range(256))


def scan(data: bytes, *, codes: Container[int], limits: ValueLimits) -> int:
    """Count the objects of one MessagePack object that is the whole of `data`; raises `ValueError` where it is not one.

    Holds afterwards: all lengths are true, nothing is nested deeper or more numerous than `limits` allow, map keys are
    strings and differ, the code of each extension is in `codes`, its payload is one object and no extension.
    """
    if len(data) > limits.max_nbytes:
        raise ValueError(f"expected at most {limits.max_nbytes} bytes, found {len(data)}")
    scanner = _Scanner(data, codes, limits)
    try:
        scanner.run()
    except IndexError:
        raise ValueError(f"expected more bytes at the end, found only {len(data)}") from None
    return scanner.num_nodes


class _Scanner:
    """Walks one object after another; `_frames` holds what is open around the present one, so that nothing recurses.

    The open frame is an array or map with `_left` objects to come (`_keys` is None or the keys of the map so far), or an
    extension with one, which has to stop at `_end`.
    """

    def __init__(self, data: bytes, codes: Container[int], limits: ValueLimits) -> None:
        self._data = data
        self._codes = codes
        self._limits = limits
        self._position = 0
        self._left = 1
        self._keys: set[bytes] | None = None
        self._end = _NO_END
        self._depth = 0
        self._frames: list[tuple[int, set[bytes] | None, int, int]] = []
        self.num_nodes = 0

    def run(self) -> None:
        while self._left or self._close():
            if self._keys is None:
                self._skip_flat()
            elif self._left % 2 == 0:
                self._skip_flat_pairs(self._keys)
            if self._left:
                self._read_next()

    def _skip_flat(self) -> None:
        # The one tight loop: long lists of numbers and names are what large values are made of.
        data, position, left = self._data, self._position, self._left
        while left and (width := _WIDTHS[data[position]]):
            position += width
            left -= 1
        self._count(self._left - left)
        self._position, self._left = position, left

    def _skip_flat_pairs(self, keys: set[bytes]) -> None:
        # The same for maps, as long as keys are short. It may stop between a key and its value.
        data, position, left = self._data, self._position, self._left
        while left and 0xA0 <= data[position] < 0xC0:
            end = position + _WIDTHS[data[position]]
            self._add_key(_STR, data[position + 1 : end])
            position, left = end, left - 1
            if not (width := _WIDTHS[data[position]]):
                break
            position, left = position + width, left - 1
        self._count(self._left - left)
        self._position, self._left = position, left

    def _read_next(self) -> None:
        self._count(1)
        is_key = self._keys is not None and self._left % 2 == 0
        self._left -= 1
        first = self._data[self._position]
        kind, start, length = self._read_head(first)
        if is_key:
            self._add_key(kind, self._data[start : start + length])
        self._position = start
        if kind is _ARRAY or kind is _MAP:
            self._open_container(kind, length)
        elif kind is _EXT:
            self._open_extension(start + length)
        else:
            self._position += length

    def _read_head(self, first: int) -> tuple[str, int, int]:
        if first not in _HEADS:
            if width := _WIDTHS[first]:
                return _NUMBER, self._position, width
            raise ValueError(f"expected the first byte of an object at byte {self._position}, found {first:#x}")
        kind, size, length = _HEADS[first]
        start = self._position + 1 + size
        if size:
            length = int.from_bytes(self._data[start - size : start], "big")
        if kind is _EXT:
            self._check_code(self._data[start])
            start += 1
        # An object takes one byte at least, so this bounds what an array or map may claim as well.
        if length * (2 if kind is _MAP else 1) > len(self._data) - start:
            raise ValueError(f"expected more bytes for the {kind} of length {length} at byte {self._position}")
        return kind, start, length

    def _check_code(self, code: int) -> None:
        if code not in self._codes:
            raise ValueError(f"expected a known extension at byte {self._position}, found code {code}")
        if self._end != _NO_END:
            raise ValueError(f"expected no extension right inside another, found one at byte {self._position}")

    def _add_key(self, kind: str, key: bytes) -> None:
        assert self._keys is not None
        if kind is not _STR or key in self._keys:
            raise ValueError(f"expected strings that differ as the keys of a map, found another at byte {self._position}")
        self._keys.add(key)

    def _open_container(self, kind: str, length: int) -> None:
        self._frames.append((self._left, self._keys, self._end, self._depth))
        self._left = length * 2 if kind is _MAP else length
        self._keys = set() if kind is _MAP else None
        self._end = _NO_END
        self._depth += 1
        if self._depth > self._limits.max_depth:
            raise ValueError(f"expected at most {self._limits.max_depth} nested containers, found more at byte {self._position}")

    def _open_extension(self, end: int) -> None:
        self._frames.append((self._left, self._keys, self._end, self._depth))
        self._left, self._keys, self._end = 1, None, end

    def _close(self) -> bool:
        end = self._end if self._frames else len(self._data)
        if end not in (_NO_END, self._position):
            raise ValueError(f"expected an object that ends at byte {end}, found one that ends at {self._position}")
        if not self._frames:
            return False
        self._left, self._keys, self._end, self._depth = self._frames.pop()
        return self._left > 0 or self._close()

    def _count(self, num: int) -> None:
        self.num_nodes += num
        if self.num_nodes > self._limits.max_nodes:
            raise ValueError(f"expected at most {self._limits.max_nodes} objects, found more")

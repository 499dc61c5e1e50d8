"""JSON as checkpoints hold it: one object, no duplicate members, no NaN, bounded in size, depth and number of nodes.

Written as ASCII, so that no byte of it depends on a locale or an encoding. Read from strangers: sizes are bounded before
anything is built, and every member is taken by its exact type.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

from anyshard.errors import CheckpointDamaged, LimitExceeded, UnsupportedValue

MAX_NBYTES = 64 << 20
MAX_DEPTH = 32
MAX_NODES = 1_000_000  # counted as bytes `[`, `{` and `,`: an upper bound that costs nothing to find
MAX_INT = 1 << 62
MAX_TEXT_LENGTH = 1 << 16

Json: TypeAlias = dict[str, Any]


def encode_object(members: Json) -> bytes:
    """The compact ASCII text of an object whose members were checked; too large is `LimitExceeded`."""
    data = json.dumps(members, allow_nan=False, separators=(",", ":")).encode("ascii")
    if problem := _find_excess(data):
        raise LimitExceeded(f"{problem}; store large values in the app state instead")
    return data


def check_value(value: object, *, address: str, depth: int = 1) -> None:
    """Raise `UnsupportedValue`, naming the address, unless `value` comes back from JSON exactly as it is."""
    if depth > MAX_DEPTH:
        raise UnsupportedValue(f"{address}: nested deeper than {MAX_DEPTH}", address=address)
    if type(value) is dict:
        for name, member in value.items():
            _check_scalar(name, (str,), f"{address}: member name")
            check_value(member, address=f"{address}/{name}", depth=depth + 1)
    elif type(value) is list:
        for i, item in enumerate(value):
            check_value(item, address=f"{address}/{i}", depth=depth + 1)
    else:
        _check_scalar(value, (type(None), bool, int, float, str), address)


def _check_scalar(value: object, types: tuple[type, ...], address: str) -> None:
    if type(value) not in types:
        expected = "a string" if types == (str,) else "None, bool, int, float, str, list or dict"
        raise UnsupportedValue(f"{address}: expected {expected}, found {type(value).__name__}", address=address)
    if isinstance(value, float) and not math.isfinite(value):
        raise UnsupportedValue(f"{address}: JSON has no {value}; write it as a string", address=address)
    if type(value) is int and not -(1 << 63) <= value < 1 << 64:
        raise UnsupportedValue(f"{address}: expected an integer of 64 bits; write larger ones as strings", address=address)
    if isinstance(value, str) and not is_unicode(value):
        raise UnsupportedValue(f"{address}: expected Unicode text, found a lone surrogate", address=address)


def is_unicode(text: str) -> bool:
    """Whether `text` can be written as UTF-8 (it holds no lone surrogate)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def decode_object(data: bytes, *, file: str) -> Members:
    """Parse one JSON object under the limits of the format; any other text is `CheckpointDamaged`."""
    if problem := _find_excess(data):
        raise CheckpointDamaged(f"{file}: {problem}", file=file)
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique, parse_float=_finite, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{file}: expected strict JSON, found {error}", file=file) from None
    if type(value) is not dict:
        raise CheckpointDamaged(f"{file}: expected a JSON object, found {type(value).__name__}", file=file)
    _check_depth(value, file)
    _check_text(data, value, file)
    return Members(value, file)


def _find_excess(data: bytes) -> str | None:
    if len(data) > MAX_NBYTES:
        return f"expected at most {MAX_NBYTES} bytes of JSON, found {len(data)}"
    if (nodes := data.count(b"[") + data.count(b"{") + data.count(b",")) > MAX_NODES:
        return f"expected at most {MAX_NODES} JSON nodes, found {nodes}"
    return None


def _unique(pairs: list[tuple[str, Any]]) -> Json:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a duplicate member")
    return members


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"a number beyond the range of float64: {text[:40]}")
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(text)


def _check_depth(value: Json, file: str) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child for node in level for child in (node.values() if type(node) is dict else node) if type(child) in (dict, list)
        ]
        if not level:
            return
    raise CheckpointDamaged(f"{file}: expected JSON nested at most {MAX_DEPTH} deep", file=file)


def _check_text(data: bytes, value: Json, file: str) -> None:
    # Only an escape can bring in a lone surrogate: most texts have none of those and need no second look.
    if (b"\\ud" in data or b"\\uD" in data) and not is_unicode(json.dumps(value, ensure_ascii=False)):
        raise CheckpointDamaged(f"{file}: expected Unicode text, found a lone surrogate", file=file)


@dataclass(frozen=True, slots=True)
class Members:
    """The members of one JSON object, taken by exact type; what is missing or of another type is `CheckpointDamaged`.

    Members that nobody takes are ignored. `where` is the path of this object within the file, for messages.
    """

    values: Mapping[str, Any]
    file: str
    where: str = ""

    def fail(self, name: str, expected: str) -> NoReturn:
        """Raise the error that member `name` is not what was expected."""
        found = reprlib.repr(self.values[name]) if name in self.values else "nothing"
        raise CheckpointDamaged(f"{self.file}: {self.where}{name}: expected {expected}, found {found}", file=self.file)

    def text(self, name: str, *, max_length: int = MAX_TEXT_LENGTH) -> str:
        """A string member."""
        value = self.values.get(name)
        if type(value) is not str or len(value) > max_length:
            self.fail(name, f"a string of at most {max_length} characters")
        return value

    def optional_text(self, name: str, *, max_length: int = MAX_TEXT_LENGTH) -> str | None:
        """A string member that may be null."""
        return None if self._is_null(name) else self.text(name, max_length=max_length)

    def integer(self, name: str, *, minimum: int = 0, maximum: int = MAX_INT - 1) -> int:
        """An integer member within bounds."""
        value = self.values.get(name)
        if type(value) is not int or not minimum <= value <= maximum:
            self.fail(name, f"an integer from {minimum} to {maximum}")
        return value

    def optional_integer(self, name: str, *, minimum: int = 0, maximum: int = MAX_INT - 1) -> int | None:
        """An integer member that may be null."""
        return None if self._is_null(name) else self.integer(name, minimum=minimum, maximum=maximum)

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings."""
        return tuple(self._list(name, str, "a list of strings"))

    def object(self, name: str) -> Members:
        """An object member."""
        value = self.values.get(name)
        if type(value) is not dict:
            self.fail(name, "an object")
        return Members(value, self.file, f"{self.where}{name}.")

    def optional_object(self, name: str) -> Members | None:
        """An object member that may be null."""
        return None if self._is_null(name) else self.object(name)

    def objects(self, name: str) -> list[Members]:
        """A list of objects."""
        items = self._list(name, dict, "a list of objects")
        return [Members(item, self.file, f"{self.where}{name}[{i}].") for i, item in enumerate(items)]

    def _list(self, name: str, kind: type, expected: str) -> list[Any]:
        value = self.values.get(name)
        if type(value) is not list or any(type(item) is not kind for item in value):
            self.fail(name, expected)
        return value

    def _is_null(self, name: str) -> bool:
        return name in self.values and self.values[name] is None

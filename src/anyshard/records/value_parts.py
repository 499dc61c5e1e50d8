"""Parts of value trees: what ranks compare and share out when their trees are not alike.

A tree is taken apart along plain dicts whose keys are all text, as far as marks lie below them or they are a module's or an
optimizer's own; whatever else is there is a part, a value that is stored and replaced whole. Its path are the keys that lead to
it; a tree that is no such dict is one part with the path (). Parts of several ranks can be merged into one tree.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias, TypeGuard

import msgspec
import xxhash

from anyshard.errors import CheckpointDamaged
from anyshard.records.addresses import component, join_address, show
from anyshard.records.packed import pack_message, read_record, refusal, unpack_message
from anyshard.records.values import ValueRegistry
from anyshard.records.values_encoder import Encoder
from anyshard.records.values_kinds import Code
from anyshard.records.values_types import PerRankMark, TensorMark, ValueLimits

Path: TypeAlias = tuple[str, ...]

DIGEST_NBYTES = 8
EMPTY_DICT_DIGEST = xxhash.xxh3_64_digest(b"\x80")  # of the one part that may stand where another rank has further parts

_LIMITS = ValueLimits()
_MARKS = frozenset({TensorMark, PerRankMark})
_PLAIN_TYPES = frozenset({type(None), bool, float})
_WHAT = "part list"


@dataclass(frozen=True, slots=True)
class PartList:
    """The parts of a rank's value trees: section -> path -> digest of the part, by order of sections and paths.

    Digests are equal where values are: sets and dicts in any order, an OrderedDict in its own; floats by their bits.
    """

    parts: Mapping[str, Mapping[Path, bytes]]

    @property
    def structure(self) -> str:
        """A hex digest of the sections and paths alone."""
        return _hex([(section, list(parts)) for section, parts in self.parts.items()])

    @property
    def digest(self) -> str:
        """A hex digest of everything."""
        return _hex([(section, list(parts), b"".join(parts.values())) for section, parts in self.parts.items()])


class _Columns(msgspec.Struct, array_like=True):
    paths: list[tuple[str, ...]]
    digests: bytes


class _Lists(msgspec.Struct, array_like=True):
    sections: dict[str, _Columns]


def _hex(facts: object) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(facts))


def list_parts(trees: Mapping[str, object], *, registry: ValueRegistry, branches: Collection[str] = ()) -> PartList:
    """The parts of all trees; raises as `encode_value` does for a part that cannot be stored.

    `branches` are addresses of dicts that are taken apart although no mark lies below them.
    """
    own = frozenset(branches)
    return PartList({name: _digest_parts(name, list(_cut(trees[name], (), name, own)), registry) for name in sorted(trees)})


def list_leaves(trees: Mapping[str, object], *, registry: ValueRegistry) -> PartList:
    """As `list_parts`, with every dict taken apart: to say which of the values within a part differ."""
    return PartList({name: _digest_parts(name, _walk(trees[name], ()), registry) for name in sorted(trees)})


def _digest_parts(section: str, parts: Iterable[tuple[Path, object]], registry: ValueRegistry) -> dict[Path, bytes]:
    digests: dict[Path, bytes] = {}
    for path, part in parts:
        if type(part) is TensorMark:  # nearly all parts are marks
            data = _encode_mark(part)
        elif type(part) in _PLAIN_TYPES:
            data = msgspec.msgpack.encode(part)
        else:
            data = canonical_bytes(part, registry=registry, address=part_address(section, path))
        digests[path] = xxhash.xxh3_64_digest(data)
    return digests


def _cut(tree: object, path: Path, section: str, branches: frozenset[str]) -> list[tuple[Path, object]]:
    if not is_branch(tree) or len(path) == _LIMITS.max_depth:
        return [(path, tree)]
    parts, has_mark = list[tuple[Path, object]](), False
    for key in sorted(tree):
        item = tree[key]
        if type(item) in _MARKS:
            parts.append(((*path, key), item))
            has_mark = True
        else:
            below = _cut(item, (*path, key), section, branches)
            has_mark |= len(below) > 1 or below[0][0] != (*path, key)  # it was taken apart, and so a mark or a branch is in it
            parts += below
    return parts if has_mark or part_address(section, path) in branches else [(path, tree)]


def _walk(tree: object, path: Path) -> Iterator[tuple[Path, object]]:
    # A tree too deep to be stored, one that contains itself too, ends as a part, so that its encoding says what is wrong.
    if not is_branch(tree) or len(path) == _LIMITS.max_depth:
        yield path, tree
        return
    for key in sorted(tree):
        item = tree[key]
        if type(item) is TensorMark:
            yield (*path, key), item
        else:
            yield from _walk(item, (*path, key))


def is_branch(tree: object) -> TypeGuard[dict[str, Any]]:
    """Whether a tree is taken apart further: a plain dict that is not empty and whose keys are all text."""
    return type(tree) is dict and len(tree) > 0 and set(map(type, tree)) == {str} and _is_utf8(tree)


def _is_utf8(keys: Collection[str]) -> bool:
    try:
        "".join(keys).encode()
    except UnicodeEncodeError:
        return False
    return True


def _encode_mark(mark: TensorMark) -> bytes:
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(int(Code.MARK), msgspec.msgpack.encode((mark.address, mark.kind))))


def canonical_bytes(value: object, *, registry: ValueRegistry, address: str = "value") -> bytes:
    """Bytes that are equal for two values exactly if these are equal for all that anyshard stores of them but order of dicts.

    Raises as `encode_value` does, naming `address`.
    """
    return Encoder(address, registry, _LIMITS, is_canonical=True).encode(value)


def part_address(section: str, path: Path) -> str:
    """The address of a part."""
    return join_address(component(section), *map(component, path))


def pick_parts(tree: object, paths: Collection[Path]) -> object:
    """The tree with only these of its parts, in its own order; the path () is the whole tree."""
    wanted = frozenset(paths)
    if () in wanted:
        return tree
    return _pick(tree, wanted, ()) if is_branch(tree) else {}


def _pick(tree: dict[str, Any], wanted: frozenset[Path], path: Path) -> dict[str, object]:
    picked: dict[str, object] = {}
    for key, item in tree.items():
        at = (*path, key)
        if at in wanted:
            picked[key] = item
        elif is_branch(item) and (below := _pick(item, wanted, at)):
            picked[key] = below
    return picked


def merge_trees(trees: Sequence[object], *, file: str) -> object:
    """One tree with the parts of all; of a part that several have, the first counts.

    Raises `CheckpointDamaged` where one tree has a part and another a dict with further parts.
    """
    merged = {"": _copy(trees[0])}
    for tree in trees[1:]:
        _merge(merged, {"": tree}, file)
    return merged[""]


def _copy(tree: object) -> object:
    return {key: _copy(item) for key, item in tree.items()} if is_branch(tree) else tree


def _merge(into: dict[str, Any], tree: dict[str, Any], file: str) -> None:
    for key, item in tree.items():
        if key not in into or (is_branch(item) and _is_empty(into[key])):
            into[key] = _copy(item)
        elif is_branch(item) and is_branch(into[key]):
            _merge(into[key], item, file)
        elif (is_branch(item) or is_branch(into[key])) and not _is_empty(item):
            raise CheckpointDamaged(
                f"{show(file)}: expected parts of value trees that fit together, found a value and a map with keys at "
                f"{show(key)!r}; load another checkpoint",
                file=file,
            )


def _is_empty(tree: object) -> bool:
    return type(tree) is dict and not tree


def encode_part_list(parts: PartList) -> bytes:
    """A part list as a message to other ranks; equal lists give equal bytes."""
    columns = {name: _Columns(list(parts), b"".join(parts.values())) for name, parts in parts.parts.items()}
    return pack_message(msgspec.msgpack.encode(_Lists(columns)))


def decode_part_list(data: bytes) -> PartList:
    """The part list in a message; raises `UnsupportedFormat` or `LimitExceeded` for what `encode_part_list` does not give."""
    sections = read_record(unpack_message(data, what=_WHAT), _Lists, what=_WHAT).sections
    return PartList({section: _read_columns(columns) for section, columns in sections.items()})


def _read_columns(columns: _Columns) -> dict[Path, bytes]:
    paths, digests = columns.paths, columns.digests
    if len(digests) != DIGEST_NBYTES * len(paths):
        raise refusal(_WHAT, f"digests of {len(paths)} parts", f"{len(digests)} bytes")
    # In this order a path that leads into another part stands right behind it.
    if any(one >= other or other[: len(one)] == one for one, other in pairwise(paths)):
        raise refusal(_WHAT, "paths in order, none of which leads into another part", "others")
    starts = range(0, len(digests), DIGEST_NBYTES)
    return {path: digests[start : start + DIGEST_NBYTES] for path, start in zip(paths, starts, strict=True)}

"""Parts of value trees: what ranks compare and share out when their trees are not alike.

A tree is taken apart along plain dicts whose keys are all text, as far as marks lie below them or they are a module's or an
optimizer's own; whatever else is there is a part, a value that is stored and replaced whole. Its path are the keys that lead to
it; a tree that is no such dict is one part with the path (). Parts of several ranks can be merged into one tree.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias, TypeGuard

import msgspec
import xxhash

from anyshard.errors import CheckpointDamaged
from anyshard.records.addresses import component, join_address, show, split_address, unescape
from anyshard.records.constant_trees import ConstantTrees
from anyshard.records.packed import pack_message, read_record, refusal, unpack_message
from anyshard.records.values import ValueRegistry
from anyshard.records.values_encoder import Encoder
from anyshard.records.values_kinds import Code
from anyshard.records.values_types import PerRankMark, TensorMark, ValueLimits

Path: TypeAlias = tuple[str, ...]
_Part: TypeAlias = tuple[Path, object]
_IsApart: TypeAlias = Callable[[Path, dict[str, Any]], bool]
_Digest: TypeAlias = Callable[[str, Path, object], bytes]

DIGEST_NBYTES = 8
OWN_PARTS = ""  # stands in a part list for the section of per-rank values, for no section is called so
EMPTY_DICT_DIGEST = xxhash.xxh3_64_digest(b"\x80")  # of the one part that may stand where another rank has further parts

_NOT_EMPTY = bytes(DIGEST_NBYTES)
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
        """A hex digest of the sections, the paths, and which parts are the empty dict: others may have keys where it is."""
        return _hex([(section, list(parts), _list_empty(parts)) for section, parts in self.parts.items()])

    @property
    def digest(self) -> str:
        """A hex digest of everything."""
        return _hex([(section, list(parts), b"".join(parts.values())) for section, parts in self.parts.items()])


class _Columns(msgspec.Struct, array_like=True):
    paths: list[tuple[str, ...]]
    digests: bytes


class _Lists(msgspec.Struct, array_like=True):
    sections: dict[str, _Columns]


def _list_empty(parts: Mapping[Path, bytes]) -> list[int]:
    return [place for place, digest in enumerate(parts.values()) if digest == EMPTY_DICT_DIGEST]


def _hex(facts: object) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(facts))


def list_parts(
    trees: Mapping[str, object],
    *,
    registry: ValueRegistry,
    branches: Collection[str] = (),
    constants: ConstantTrees | None = None,
) -> PartList:
    """The parts of all trees; raises as `encode_value` does for a part that cannot be stored.

    `branches` are addresses of dicts that are taken apart although no mark lies below them. What is found of `constants`, which
    have the same branches at every call, is kept with them.
    """
    return _list_trees(trees, branches, partial(_digest_part, registry), constants)


def list_paths(
    trees: Mapping[str, object], *, branches: Collection[str] = (), constants: ConstantTrees | None = None
) -> PartList:
    """The parts of all trees for a rank that compares with nobody: a digest says only whether the part is an empty dict."""
    return _list_trees(trees, branches, _say_if_empty, constants)


def list_own_parts(own: Mapping[str, tuple[bytes, bytes]]) -> PartList:
    """Per-rank values as parts of a list of their own: address -> key and digest. Equal addresses and keys are equal parts."""
    parts: dict[Path, bytes] = {(address, key.hex()): digest for address, (key, digest) in sorted(own.items())}
    return PartList({OWN_PARTS: parts} if parts else {})


def list_leaves(trees: Mapping[str, object], *, registry: ValueRegistry) -> PartList:
    """As `list_parts`, with every dict taken apart: to say which of the values within a part differ."""
    parts = {name: _cut(trees[name], lambda *_: True, ()) for name in sorted(trees)}
    return PartList({name: {path: _digest_part(registry, name, path, part) for path, part in parts[name]} for name in parts})


def _list_trees(
    trees: Mapping[str, object], branches: Collection[str], digest: _Digest, constants: ConstantTrees | None
) -> PartList:
    known: Container[object] = () if constants is None else constants
    listed: dict[str, dict[Path, bytes]] = {}
    origins: list[Hashable] = [digest is _say_if_empty]
    for name, is_apart in _open_all(trees, branches):
        listed[name] = found = dict[Path, bytes]()
        origins.append(name)
        for path, part in _cut(trees[name], is_apart, known):
            if constants is not None and type(part) not in _MARKS and part in constants:
                origins.append((path, id(part)))
                found.update(_list_constant(constants, part, (name, path), digest, is_apart))
            else:
                found[path] = digest(name, path, part)
                origins.append((path, found[path] == EMPTY_DICT_DIGEST))
    if constants is not None:
        constants.keep_origins(tuple(origins))
    return PartList(listed)


def _list_constant(
    constants: ConstantTrees, tree: object, where: tuple[str, Path], digest: _Digest, is_apart: _IsApart
) -> Mapping[Path, bytes]:
    section, start = where
    key = (digest is _say_if_empty, id(tree), section, start)
    if key not in constants.parts:
        constants.parts[key] = {path: digest(section, path, part) for path, part in _walk(tree, start, is_apart, ())}
    return constants.parts[key]


def _open_all(trees: Mapping[str, object], branches: Collection[str]) -> Iterator[tuple[str, _IsApart]]:
    """The name of each section, and which dicts of it are taken apart."""
    routes = [tuple(map(unescape, split_address(address))) for address in branches]
    for name in sorted(trees):
        ends = [path for section, *path in routes if section == name and _leads_to_dict(trees[name], path)]
        opened = {tuple(path[:length]) for path in ends for length in range(len(path) + 1)}
        yield name, partial(_is_opened, opened)


def _leads_to_dict(tree: object, path: Sequence[str]) -> bool:
    for key in path:
        tree = tree.get(key) if type(tree) is dict else None
    return type(tree) is dict


def _is_opened(opened: Collection[Path], path: Path, tree: dict[str, Any]) -> bool:
    return path in opened or _holds_mark(tree)


def _digest_part(registry: ValueRegistry, section: str, path: Path, part: object) -> bytes:
    if type(part) is TensorMark:  # nearly all parts are marks
        data = _encode_mark(part)
    elif type(part) in _PLAIN_TYPES:
        data = msgspec.msgpack.encode(part)
    else:
        data = canonical_bytes(part, registry=registry, address=part_address(section, path))
    return xxhash.xxh3_64_digest(data)


def _say_if_empty(section: str, path: Path, part: object) -> bytes:
    del section, path
    return EMPTY_DICT_DIGEST if _is_empty(part) else _NOT_EMPTY


def _cut(tree: object, is_apart: _IsApart, constants: Container[object]) -> Iterator[_Part]:
    """The parts of a tree, with each of the constants in it as if it were one."""
    # What no payload can hold is one part, so that its encoding says what is wrong; nothing else would end the walk in time.
    return iter([((), tree)]) if _is_oversized(tree, constants) else _walk(tree, (), is_apart, constants)


def _walk(tree: object, path: Path, is_apart: _IsApart, constants: Container[object]) -> Iterator[_Part]:
    if tree in constants or not is_branch(tree) or not is_apart(path, tree):
        yield path, tree
        return
    for key in sorted(tree):
        item = tree[key]
        if type(item) in _MARKS:
            yield (*path, key), item
        else:
            yield from _walk(item, (*path, key), is_apart, constants)


def _is_oversized(tree: object, constants: Container[object]) -> bool:
    """Whether a tree has more elements or levels than can be stored, as one that contains itself has.

    A dict that is met in many places is looked at once per level, and counted as often as it would be written. What is in
    constants does not count: it was looked at before it became one.
    """
    level, num_nodes = {id(tree): (tree, 1)}, 0
    for _ in range(_LIMITS.max_depth):
        below: dict[int, tuple[object, int]] = {}
        for item, times in level.values():
            if item not in constants and is_branch(item):
                num_nodes += times * len(item)
                for child in _list_dicts(item):
                    below[id(child)] = child, times + below.get(id(child), (child, 0))[1]
        level = below
    return num_nodes > _LIMITS.max_nodes or any(item not in constants and is_branch(item) for item, _ in level.values())


def _holds_mark(tree: object) -> bool:
    """Whether a mark lies below a dict, on a way through dicts that can be taken apart."""
    pending, seen = [tree], set[int]()
    while pending:
        item = pending.pop()
        if id(item) not in seen and is_branch(item):
            seen.add(id(item))
            if not _MARKS.isdisjoint(map(type, item.values())):
                return True
            pending += _list_dicts(item)
    return False


def _list_dicts(tree: dict[str, Any]) -> list[object]:
    return [item for item in tree.values() if type(item) is dict]


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
    if section == OWN_PARTS:
        return path[0]
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

    Raises `CheckpointDamaged` where one tree has a part and another a dict with further parts, and if there is no tree.
    """
    if not trees:
        raise CheckpointDamaged(f"{show(file)}: expected a value tree, found none; load another checkpoint", file=file)
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

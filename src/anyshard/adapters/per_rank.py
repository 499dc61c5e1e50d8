"""Values of which every rank has its own: the wrapper that says so, and the keys by which a load knows whose is whose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, final

import msgspec

from anyshard.adapters.random_state import RNGState
from anyshard.errors import InvalidAppState
from anyshard.records.addresses import escape, show
from anyshard.records.value_parts import canonical_bytes
from anyshard.records.values import ValueRegistry, decode_value, iterate_leaves

_GIVEN, _RANK = "key", "rank"
_PAIR = b"\x92" + msgspec.msgpack.encode(_GIVEN)  # the head of a list of two, and its first item
_SHOWN, _SHOWN_LENGTH = 4, 80


@final
class PerRank:
    """Stores what each rank has at this place of the app state as its own, and gives every rank back what has its key.

    `value` is anything but modules, optimizers and sharded tensors; after a load, what stands there then. `key` is any plain
    value, such as the data-parallel rank: ranks with equal keys have equal values. Without a key a value comes back only under
    the same number of ranks and the same mesh (if there is one in the app state that is loaded), on the same rank; `RNGState` by
    itself has a rule for others.

    Example: `{"model": model, "loader": anyshard.PerRank(loader, key=dp_rank)}`.
    """

    def __init__(self, value: object, key: object = None) -> None:
        self.value: Any = value
        self.key = key

    def __repr__(self) -> str:
        return f"PerRank({self.value!r}, key={self.key!r})"


def encode_key(wrapper: PerRank, *, rank: int, world_size: int, mesh: Mapping[str, int], registry: ValueRegistry) -> bytes:
    """The key of a per-rank value on this rank, the same in every process that gives it the same key."""
    given = find_given_key(wrapper)
    if given is not None:
        return _PAIR + canonical_bytes(given, registry=registry, address="key of anyshard.PerRank")
    axes = [list(axis) for axis in sorted(mesh.items())]
    return canonical_bytes([_RANK, rank, world_size, axes], registry=registry)


def find_given_key(wrapper: PerRank) -> object:
    """The key that the user gave a per-rank value, or a random state that is one by itself; None if he gave none."""
    keys = [leaf.key for leaf in iterate_leaves(wrapper.value) if isinstance(leaf, RNGState) and leaf.key is not None]
    if not keys or (wrapper.key is None and isinstance(wrapper.value, RNGState)):
        return keys[0] if keys else wrapper.key
    raise InvalidAppState(
        f"expected one key for a per-rank value, found the key {show(repr(keys[0]))} of an anyshard.RNGState within "
        f"anyshard.PerRank with key {show(repr(wrapper.key))}; give the key to anyshard.PerRank"
    )


def find_key(key: bytes, stored: Iterable[bytes], *, has_mesh: bool) -> bytes | None:
    """Which of the stored keys is that of this rank. Where there is no mesh, the only one of its number among as many ranks."""
    stored = list(stored)
    if key in stored or has_mesh or not is_of_rank(key):
        return key if key in stored else None
    start = key[:-1]  # all but the list of axes, which is empty
    found = [other for other in stored if other.startswith(start)]
    return found[0] if len(found) == 1 else None


def explain_missing_key(key: bytes, stored: Iterable[bytes], *, address: str, registry: ValueRegistry) -> tuple[str, str]:
    """What was expected and what was found, with advice, for a per-rank value that has not the key of this rank."""
    keys = sorted(stored)
    found = ", ".join(describe_key(other, registry) for other in keys[:_SHOWN])
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    if all(map(is_of_rank, (key, *keys))):
        advice = "it was saved by another number of ranks or on another mesh; save it with a key= that does not depend on these"
    else:
        advice = "give anyshard.PerRank the key= of one of these"
    leave_out = f"or leave it out with exclude=[{escape(address)!r}]"
    return f"that of {describe_key(key, registry)}", f"those of {found}{more}: {advice}, {leave_out}"


def is_of_rank(key: bytes) -> bool:
    """Whether a key is one that no user gave."""
    return not key.startswith(_PAIR)


def describe_key(key: bytes, registry: ValueRegistry) -> str:
    """A key in a message, whatever it is."""
    try:
        return show(_describe_facts(decode_value(key, registry=registry, file="key"))[:_SHOWN_LENGTH])
    except ValueError:  # of decoding or of a monstrous int: good enough to compare, but not to be shown
        return "a key that cannot be shown"


def _describe_facts(facts: object) -> str:
    match facts:
        case ["rank", int(rank), int(world_size), list(axes)]:
            on = ", ".join("=".join(map(str, axis)) for axis in axes if isinstance(axis, list))
            return f"rank {rank} of {world_size}" + (f" on a mesh of {on}" if on else "")
        case ["key", given]:
            return f"key {given!r}"
    raise ValueError("expected the facts of a key, found others")

"""The payload of a rank's values slot of a section: its part of the value tree that all ranks share, and what is its own.

A map; each member may be absent, and readers ignore members that they do not know.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from anyshard.errors import CheckpointDamaged
from anyshard.records.addresses import component, show
from anyshard.records.constant_trees import ConstantTrees
from anyshard.records.values import DEFAULT_LIMITS, ValueRegistry, decode_value
from anyshard.records.values_encoder import Encoder, Rooted

MAX_RANK = (1 << 31) - 1


class _Absent(enum.Enum):
    ABSENT = "absent"


ABSENT = _Absent.ABSENT  # a tree that is not there, for None is a tree


@dataclass(frozen=True, slots=True)
class SectionValues:
    """What one rank has of a section's values.

    `shared` is its part of the common tree, `per_rank` its own tree for each address at which the common tree has a
    `PerRankMark`. Only the coordinator has the others: `also` are the ranks with further parts of `shared`, `keys` says for each
    of those addresses under which key which rank has a tree.
    """

    shared: object = ABSENT
    per_rank: Mapping[str, object] = field(default_factory=dict)
    also: tuple[int, ...] = ()
    keys: Mapping[str, Mapping[bytes, int]] = field(default_factory=dict)


def encode_section(
    values: SectionValues, *, section: str, registry: ValueRegistry, constants: ConstantTrees | None = None
) -> bytes:
    """The payload of these values, the same in every process; errors name the address in the app state.

    `constants` are trees in the values whose encodings are kept. The payload is the same without them.
    """
    root = component(section)
    members: dict[str, object] = {}
    if values.shared is not ABSENT:
        members["shared"] = Rooted(root, values.shared)
    if values.also:
        members["also"] = list(values.also)
    if values.per_rank:
        members["per_rank"] = {address: Rooted(address, tree) for address, tree in values.per_rank.items()}
    if values.keys:
        members["keys"] = {address: [list(pair) for pair in ranks.items()] for address, ranks in values.keys.items()}
    return Encoder(root, registry, DEFAULT_LIMITS, constants=constants).encode(members)


def decode_section(data: bytes, *, registry: ValueRegistry, file: str) -> SectionValues:
    """The values in a payload; members of another form than `encode_section` gives them are `CheckpointDamaged`."""
    members = decode_value(data, registry=registry, file=file)
    try:
        found = _read_map(members)
        return SectionValues(
            shared=found.get("shared", ABSENT),
            per_rank=_read_map(found.get("per_rank", {})),
            also=_read_ranks(found.get("also", [])),
            keys={address: _read_keys(pairs) for address, pairs in _read_map(found.get("keys", {})).items()},
        )
    except (ValueError, TypeError) as error:
        raise CheckpointDamaged(f"{show(file)}: {error}; load another checkpoint", file=file) from None


def pick_own_tree(trees: Mapping[str, object], address: str, *, rank: int) -> object:
    """The tree of a rank that is named among the keys of a per-rank value; `CheckpointDamaged` if that rank has none."""
    if address not in trees:
        raise CheckpointDamaged(
            f"{show(address)}: expected a tree among the values of rank {rank}, found none; load another checkpoint"
        )
    return trees[address]


def _read_map(value: object) -> dict[str, Any]:
    if type(value) is not dict or set(map(type, value)) - {str}:
        raise ValueError(f"expected a map with string keys, found {type(value).__name__}")
    return value


def _read_ranks(value: object) -> tuple[int, ...]:
    if type(value) is not list:
        raise ValueError(f"expected a list of ranks, found {type(value).__name__}")
    ranks = tuple(map(_read_rank, value))
    if list(ranks) != sorted(set(ranks)):
        raise ValueError("expected ranks that rise, found another order")
    return ranks


def _read_rank(value: object) -> int:
    if type(value) is not int or not 0 <= value <= MAX_RANK:
        raise ValueError(f"expected a rank from 0 to {MAX_RANK}, found a {type(value).__name__} that is none")
    return value


def _read_keys(value: object) -> dict[bytes, int]:
    if type(value) is not list:
        raise ValueError(f"expected a list of keys and ranks, found {type(value).__name__}")
    keys = {}
    for pair in value:
        if type(pair) is not list or len(pair) != 2 or type(pair[0]) is not bytes or pair[0] in keys:
            raise ValueError("expected keys as bytes that differ, each with a rank, found another value")
        keys[pair[0]] = _read_rank(pair[1])
    return keys

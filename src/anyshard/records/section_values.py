"""The payload of a section's values slot: a map whose member `shared` is the value tree that all ranks have in common.

Later members will hold what is per rank, so readers ignore members that they do not know.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from anyshard.errors import CheckpointDamaged
from anyshard.records.addresses import component
from anyshard.records.values import ValueRegistry, decode_value, encode_value
from anyshard.records.values_types import ValueLimits

SHARED = "shared"

_HEADER = b"\x81" + msgspec.msgpack.encode(SHARED)  # a map of one member, and its name
_WHOLE = ValueLimits()
# What the map around it takes is taken off, so that nothing can be saved that would be refused at load.
_INNER = ValueLimits(_WHOLE.max_nbytes - len(_HEADER), _WHOLE.max_depth - 1, _WHOLE.max_nodes - 2)


def encode_section(tree: object, *, section: str, registry: ValueRegistry) -> bytes:
    """The payload that holds `tree`; errors name the address in the app state."""
    return _HEADER + encode_value(tree, address=component(section), registry=registry, limits=_INNER)


def decode_section(data: bytes, *, registry: ValueRegistry, file: str) -> object:
    """The tree in a payload; anything else than a map with a member `shared` is `CheckpointDamaged`."""
    members = decode_value(data, registry=registry, file=file)
    if not isinstance(members, Mapping) or SHARED not in members:
        raise CheckpointDamaged(f"{file}: expected a map with a member {SHARED!r}, found {type(members).__name__}", file=file)
    return members[SHARED]

"""The rule by which ranks go on with random numbers where the checkpoint has none of theirs. No torch, and nothing is drawn.

`docs/format.md` has it in full: other programs that read a checkpoint on other ranks give them the same numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

import msgspec
import xxhash

from anyshard.records.value_parts import canonical_bytes
from anyshard.records.values import ValueRegistry

_DOMAIN: Final = b"anyshard random state 1"
_SHOWN: Final = 8


def choose_saved_rank(rank: int, saved: Collection[int]) -> int:
    """The rank whose stored state a rank takes if it is its own, and else is seeded from; `saved` are those that have one."""
    ranks = sorted(saved)
    return rank if rank in ranks else ranks[rank % len(ranks)]


def describe_rank(rank: int) -> bytes:
    """What tells this rank from those that are seeded from the same state; of ranks with a key that is the key."""
    return msgspec.msgpack.encode(rank)


def find_seed(state: object, who: bytes, label: str, *, registry: ValueRegistry) -> int:
    """The number of 128 bits from which a generator is seeded; another one for each state, rank or key, and generator."""
    digest = xxhash.xxh3_128_digest(canonical_bytes(state, registry=registry, address="random state"))
    return xxhash.xxh3_128_intdigest(_DOMAIN + digest + who + label.encode())


def name_ranks(ranks: Iterable[int]) -> str:
    """A few ranks in a message."""
    listed = sorted(ranks)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return f"rank{'s' if len(listed) > 1 else ''} {', '.join(map(str, listed[:_SHOWN]))}{more}"

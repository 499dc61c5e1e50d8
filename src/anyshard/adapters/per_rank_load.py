"""Finds for a per-rank value of the app state which of the stored trees is this rank's, and fits random state to this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import TypeAlias, final

from anyshard.adapters.findings import Findings
from anyshard.adapters.nested import describe_node
from anyshard.adapters.per_rank import (
    PerRank,
    describe_key,
    encode_key,
    explain_missing_key,
    find_given_key,
    find_key,
    is_of_rank,
)
from anyshard.adapters.random_rule import choose_saved_rank, describe_rank, find_seed, name_ranks
from anyshard.adapters.random_state import RNGState, fit_state, make_state
from anyshard.adapters.recognise import holds, unwrap
from anyshard.errors import Mismatch
from anyshard.records.addresses import join_address, section_of, show
from anyshard.records.captured import Stored
from anyshard.records.section_values import ABSENT, pick_own_tree
from anyshard.records.values import (
    PerRankMark,
    ValueRegistry,
    is_container,
    list_components,
    list_items,
    rebuild_container,
)

# For each key of a per-rank value the rank that has a tree under it.
Holders: TypeAlias = Mapping[bytes, int]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a load runs: the rank in its group, the size of that, and the mesh of the app state."""

    rank: int
    world_size: int
    mesh: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _Saved:
    """The random states of a checkpoint from which a rank may go on: who has them, and how to read that of a rank."""

    holders: Holders
    read: Callable[[int], object]


@final
class OwnTrees:
    """The stored per-rank values as one rank sees them."""

    def __init__(self, stored: Stored, findings: Findings, *, place: Place, registry: ValueRegistry) -> None:
        self._keys = stored.per_rank
        self._read = cache(stored.read_rank)
        self._findings = findings
        self._place = place
        self._registry = registry

    def find(self, wrapper: PerRank, node: object, address: str) -> object:
        """The tree to load into a per-rank value; `ABSENT`, and recorded if it is selected, where there is none.

        Random state in it is that of exactly the generators that are here; what had to be made for that is in the report.
        """
        if type(node) is not PerRankMark:
            shared = f"{describe_node(node)} that all ranks share; load it without anyshard.PerRank"
            self._findings.refuse(address, expected="a per-rank value", found=shared)
            return ABSENT
        live = wrapper.value
        if isinstance(live, RNGState) and not self._findings.selection.takes_whole(address):
            return ABSENT  # not even read: what is left out cannot be in the way
        place, keys = self._place, self._keys.get(node.address, {})
        key = encode_key(wrapper, rank=place.rank, world_size=place.world_size, mesh=place.mesh, registry=self._registry)
        found = find_key(key, keys, has_mesh=bool(place.mesh))
        if found is not None:
            return self._fit(live, self._read_tree(keys[found], node.address), address, who=self._tell_apart(key))
        # Ranks that had a key are not told apart by their number.
        saved = {other: rank for other, rank in keys.items() if is_of_rank(other)} if is_of_rank(key) else keys
        if saved and isinstance(live, RNGState) and live.other_mesh == "derive":
            return self._go_on(live, _Saved(saved, partial(self._read_tree, address=node.address)), address, key=key)
        if self._findings.selection.takes_whole(address):
            self._miss(key, keys, address, is_given=find_given_key(wrapper) is not None)
        return ABSENT

    # Random state -------------------------------------------------------------------------------------------------------

    def _go_on(self, live: RNGState, saved: _Saved, address: str, *, key: bytes) -> object:
        """The random state of a rank whose key is not stored: that of the rank of its number, or one that is derived."""
        if not is_of_rank(key):
            self._findings.warn(
                f"{show(address)}: no random state is stored for {describe_key(key, self._registry)}, which rank "
                f"{self._place.rank} has: its random numbers are derived from that key and what is stored"
            )
            return self._derive(live, saved.read(saved.holders[min(saved.holders)]), who=key)
        rank, size, ranks = self._place.rank, self._place.world_size, frozenset(saved.holders.values())
        if new := set(range(size)) - ranks:
            self._findings.warn(
                f"{show(address)}: random state is stored for {len(ranks)} rank{'s' if len(ranks) > 1 else ''}, and for none of "
                f"{name_ranks(new)} of {size}, whose random numbers are derived from what is stored, unlike all others"
            )
        who, chosen = describe_rank(rank), choose_saved_rank(rank, ranks)
        tree = saved.read(chosen)
        return self._fit(live, tree, address, who=who) if chosen == rank else self._derive(live, tree, who=who)

    def _tell_apart(self, key: bytes) -> bytes:
        return describe_rank(self._place.rank) if is_of_rank(key) else key

    def _derive(self, live: RNGState, tree: object, *, who: bytes) -> object:
        seed_of = partial(find_seed, tree, who, registry=self._registry)
        try:
            fit_state(live, tree, seed_of)
        except ValueError:
            return tree  # it is refused as on the rank that saved it
        return make_state(live, seed_of)

    def _fit(self, live: object, tree: object, address: str, *, who: bytes) -> object:
        """The tree with each random state in it fitted to the generators that are here."""
        inner = unwrap(live)
        if isinstance(inner, RNGState):
            return self._fit_state(inner, tree, address, who=who)
        if not (is_container(inner) and is_container(tree) and holds(inner, _is_random)):
            return tree
        names = list_components(inner, address=address)
        lives = dict(zip(names, (item for _, item in list_items(inner)), strict=True))
        stored = zip(list_components(tree, address=address), list_items(tree), strict=True)
        items = [self._fit(lives.get(name), item, join_address(address, name), who=who) for name, (_, item) in stored]
        return rebuild_container(tree, items)

    def _fit_state(self, live: RNGState, tree: object, address: str, *, who: bytes) -> object:
        if not self._findings.selection.takes_whole(address):
            return tree
        try:
            fitted = fit_state(live, tree, partial(find_seed, tree, who, registry=self._registry))
        except ValueError:
            return tree  # the load refuses it, and says why
        if fitted.passed_over:
            names = ", ".join(fitted.passed_over)
            self._findings.warn(f"{show(address)}: passed over the random state of {show(names)}, which this process has not")
        if fitted.seeded:
            names = ", ".join(fitted.seeded)
            self._findings.warn(f"{show(address)}: nothing is stored for {show(names)}: derived from what is stored for others")
        return fitted.state

    # All else -----------------------------------------------------------------------------------------------------------

    def _miss(self, key: bytes, keys: Holders, address: str, *, is_given: bool) -> None:
        """A new key is left alone if the load is not strict; without one, the ranks of the checkpoint are other ranks."""
        if is_given and not self._findings.options.strict:
            self._findings.match(address)
            self._findings.miss(address)
            return
        expected, found = explain_missing_key(key, keys, address=address, registry=self._registry)
        self._findings.differ(Mismatch.RANK, address, expected=expected, found=found)

    def _read_tree(self, rank: int, address: str) -> object:
        return pick_own_tree(self._read(rank, section_of(address)), address, rank=rank)


def _is_random(value: object) -> bool:
    return isinstance(unwrap(value), RNGState)

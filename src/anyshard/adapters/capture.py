"""Takes an app state apart for a save: tables and sources for what becomes extents, value trees for the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, final

from anyshard.adapters.collect import Collector
from anyshard.adapters.modules import capture_modules
from anyshard.adapters.optimizers import capture_optimizers
from anyshard.adapters.per_rank import PerRank, encode_key
from anyshard.adapters.random_state import RNGState
from anyshard.adapters.recognise import Kind, holds, parts_of, recognise, unwrap
from anyshard.adapters.survey import Survey, survey
from anyshard.adapters.tensors import is_dtensor
from anyshard.errors import LimitExceeded, UnsupportedValue
from anyshard.records.addresses import component, join_address, show
from anyshard.records.captured import Captured, PerRankPart
from anyshard.records.values import PerRankMark, ValueRegistry, list_components, list_items, rebuild_container

# What the statefuls of an app state gave as their state, by address.
States: TypeAlias = dict[str, object]


def capture(app_state: Mapping[str, object], *, registry: ValueRegistry, rank: int = 0, world_size: int = 1) -> Captured:
    """Take an app state apart, copying and changing nothing; the result stays right until the app state changes.

    `rank` and `world_size` are those in the group that saves.

    Raises `UnsupportedValue` and `InvalidAppState`, which name the address, for what cannot be stored. Values are checked
    when the trees are encoded.
    """
    return take_apart(app_state, registry=registry, rank=rank, world_size=world_size).captured


@dataclass(frozen=True, slots=True)
class TakenApart:
    """What `capture` gives, and what a cache wants to know besides: the looks at the app state, and who took its leaves."""

    captured: Captured
    surveyed: Survey
    collector: Collector


def take_apart(
    app_state: Mapping[str, object], *, registry: ValueRegistry, rank: int, world_size: int, states: States | None = None
) -> TakenApart:
    """As `capture`. `states` are state dicts of statefuls by address that were asked for already, a moment ago."""
    try:
        surveyed = survey(app_state, registry)
        capturer = Capturer(surveyed, rank, {} if states is None else states)
        trees = {name: capturer.visit(value, component(name)) for name, value in app_state.items()}
        parts = capturer.take_own(world_size, surveyed.mesh)
    except RecursionError:
        raise LimitExceeded("the app state is nested deeper than Python can follow; flatten it") from None
    captured = replace(capturer.collector.finish(trees), per_rank=parts, mesh=surveyed.mesh)
    return TakenApart(captured, surveyed, capturer.collector)


@final
class Capturer:
    """Walks over an app state, or parts of it. Of statefuls whose state is in `states` by address that is taken."""

    def __init__(self, surveyed: Survey, rank: int, states: States) -> None:
        self._survey = surveyed
        self._rank = rank
        self._own: dict[str, PerRank] = {}
        self._states = states
        self.collector = Collector()

    def take_own(self, world_size: int, mesh: Mapping[str, int]) -> dict[str, PerRankPart]:
        """All that is per rank, by address. To be taken last, random state last of all, so that nothing draws after."""
        own = sorted(self._own.items(), key=lambda entry: holds(entry[1].value, _is_random_state))
        trees = [(address, wrapper, self.visit(wrapper.value, address, is_own=True)) for address, wrapper in own]
        encode = partial(encode_key, rank=self._rank, world_size=world_size, mesh=mesh, registry=self._survey.registry)
        return {address: PerRankPart(encode(wrapper), tree) for address, wrapper, tree in trees}

    def visit(self, wrapped: object, address: str, *, is_own: bool = False) -> object:
        """The tree of one node of the app state; `is_own`: it lies within a per-rank value."""
        value = unwrap(wrapped)
        match recognise(value, self._survey.registry, address):
            case Kind.MODULES:
                return capture_modules(self._survey.views[address], address, self.collector)
            case Kind.OPTIMIZERS:
                return capture_optimizers(parts_of(value), address, self._survey.names, self.collector)
            case Kind.PER_RANK | Kind.RANDOM_STATE if not is_own:
                self._own[address] = value if isinstance(value, PerRank) else PerRank(value)
                return PerRankMark(address)
            case Kind.STATEFUL | Kind.RANDOM_STATE:
                return self._take(self._read_state(value, address), address, is_own=is_own)
            case Kind.CONTAINER if self._survey.holds_objects(value):
                return self._visit_container(value, address, is_own=is_own)
            case _:
                return self._take(value, address, is_own=is_own)

    def _read_state(self, stateful: Any, address: str) -> object:
        if address not in self._states:
            self._states[address] = stateful.state_dict()
        return self._states[address]

    def _take(self, value: object, address: str, *, is_own: bool) -> object:
        if not is_own:
            return self.collector.take(value, address)
        if holds(value, is_dtensor):
            raise UnsupportedValue(
                f"{show(address)}: expected in anyshard.PerRank tensors of this rank alone, found a DTensor in a state dict; "
                "put what is sharded into the app state by itself",
                address=address,
            )
        return self.collector.take(value, address, rank=self._rank)

    def _visit_container(self, container: Any, address: str, *, is_own: bool) -> object:
        items = [item for _, item in list_items(container)]
        components = list_components(container, address=address)
        places = zip(items, components, strict=True)
        visited = [self.visit(item, join_address(address, name), is_own=is_own) for item, name in places]
        return rebuild_container(container, visited)


def _is_random_state(value: object) -> bool:
    return isinstance(value, RNGState)

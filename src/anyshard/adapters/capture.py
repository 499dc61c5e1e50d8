"""Takes an app state apart for a save: tables and sources for what becomes extents, value trees for the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, final

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


def capture(app_state: Mapping[str, object], *, registry: ValueRegistry, rank: int = 0, world_size: int = 1) -> Captured:
    """Take an app state apart, copying and changing nothing; the result stays right until the app state changes.

    `rank` and `world_size` are those in the group that saves.

    Raises `UnsupportedValue` and `InvalidAppState`, which name the address, for what cannot be stored. Values are checked
    when the trees are encoded.
    """
    try:
        surveyed = survey(app_state, registry)
        capturer = _Capturer(surveyed, rank)
        trees = {name: capturer.visit(value, component(name)) for name, value in app_state.items()}
        own = list(capturer.take_own())
    except RecursionError:
        raise LimitExceeded("the app state is nested deeper than Python can follow; flatten it") from None
    parts = {
        address: PerRankPart(encode_key(wrapper, rank=rank, world_size=world_size, mesh=surveyed.mesh, registry=registry), tree)
        for address, wrapper, tree in own
    }
    return replace(capturer.collector.finish(trees), per_rank=parts, mesh=surveyed.mesh)


@final
class _Capturer:
    """Walks over the app state. What is per rank is taken at the end, random state last of all, so that nothing draws after."""

    def __init__(self, surveyed: Survey, rank: int) -> None:
        self._survey = surveyed
        self._rank = rank
        self._own: dict[str, PerRank] = {}
        self.collector = Collector()

    def take_own(self) -> Iterator[tuple[str, PerRank, object]]:
        """Address, wrapper and tree of all that is per rank."""
        for address, wrapper in sorted(self._own.items(), key=lambda entry: holds(entry[1].value, _is_random_state)):
            yield address, wrapper, self.visit(wrapper.value, address, is_own=True)

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
                return self._take(value.state_dict(), address, is_own=is_own)
            case Kind.CONTAINER if self._survey.holds_objects(value):
                return self._visit_container(value, address, is_own=is_own)
            case _:
                return self._take(value, address, is_own=is_own)

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

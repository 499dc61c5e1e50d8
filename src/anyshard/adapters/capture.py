"""Takes an app state apart for a save: tables and sources for what becomes extents, value trees for the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from anyshard.adapters.collect import Collector
from anyshard.adapters.modules import capture_modules
from anyshard.adapters.optimizers import capture_optimizers
from anyshard.adapters.recognise import Kind, parts_of, recognise, unwrap
from anyshard.adapters.survey import Survey, survey
from anyshard.errors import LimitExceeded
from anyshard.records.addresses import component, join_address
from anyshard.records.captured import Captured
from anyshard.records.values import ValueRegistry, list_components, list_items, rebuild_container


def capture(app_state: Mapping[str, object], *, registry: ValueRegistry) -> Captured:
    """Take an app state apart, copying and changing nothing; the result stays right until the app state changes.

    Raises `UnsupportedValue` and `InvalidAppState`, which name the address, for what cannot be stored. Values are checked
    when the trees are encoded.
    """
    try:
        capturer = _Capturer(survey(app_state, registry))
        trees = {name: capturer.visit(value, component(name)) for name, value in app_state.items()}
    except RecursionError:
        raise LimitExceeded("the app state is nested deeper than Python can follow; flatten it") from None
    return capturer.collector.finish(trees)


@final
class _Capturer:
    def __init__(self, surveyed: Survey) -> None:
        self._survey = surveyed
        self.collector = Collector()

    def visit(self, wrapped: object, address: str) -> object:
        """The tree of one node of the app state."""
        value = unwrap(wrapped)
        match recognise(value, self._survey.registry, address):
            case Kind.MODULES:
                return capture_modules(self._survey.views[address], address, self.collector)
            case Kind.OPTIMIZERS:
                return capture_optimizers(parts_of(value), address, self._survey.names, self.collector)
            case Kind.STATEFUL:
                return self.collector.take(value.state_dict(), address)
            case Kind.CONTAINER:
                return self._visit_container(value, address)
            case _:
                return self.collector.take(value, address)

    def _visit_container(self, container: object, address: str) -> object:
        if not self._survey.holds_objects(container):
            return self.collector.take(container, address)
        items = [item for _, item in list_items(container)]
        components = list_components(container, address=address)
        visited = [self.visit(item, join_address(address, name)) for item, name in zip(items, components, strict=True)]
        return rebuild_container(container, visited)

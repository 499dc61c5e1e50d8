"""What the adapters of a load share: the stored state, the findings, the fills, and what is left to do after the fill."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, TypeAlias, final

from numpy.typing import NDArray

from anyshard.adapters.fills import Filler, Make
from anyshard.adapters.findings import Findings
from anyshard.options import LoadOptions
from anyshard.records.addresses import show
from anyshard.records.captured import Stored
from anyshard.records.values import PerRankMark, Unregistered, ValueRegistry, iterate_leaves

# Gives what stands at a place of the app state after the load: the live object itself, or what replaces it in its parent.
Settle: TypeAlias = Callable[[], Any]
Action: TypeAlias = Callable[[], None]


class Phase(enum.IntEnum):
    """The order of changes after the fill: schedulers may read optimizers, and random state comes last, so that nothing draws."""

    MODULES = 0
    OPTIMIZERS = 1
    VALUES = 2
    STATEFULS = 3
    RANDOM = 4


@final
class Intake:
    """One load being planned. Nothing of the app state changes before the actions are run."""

    def __init__(self, stored: Stored, options: LoadOptions, registry: ValueRegistry, *, world_size: int = 1) -> None:
        self.registry = registry
        self.findings = Findings(options, judge_surplus=world_size == 1)
        self.filler = Filler(stored, self.findings)
        self._actions: list[tuple[Phase, Action]] = []

    def take_whole(self, node: object, address: str, *, arrays: dict[str, NDArray[Any]] | None = None) -> Make:
        """What gives a selected stored node as one value; call it after the fill. `arrays` as in `Filler.make`."""
        self.findings.match(address)
        leaves = tuple(iterate_leaves(node))
        if not leaves:
            return lambda: node
        if any(type(leaf) is PerRankMark for leaf in leaves):
            found = "a per-rank value below it; have one in anyshard.PerRank there"
            self.findings.refuse(address, expected="values that all ranks share", found=found)
        if any(type(leaf) is Unregistered for leaf in leaves):
            self.findings.warn(
                f"{show(address)}: holds a value of a type that is not registered here, which comes as an Unregistered record; "
                "call anyshard.register_value before the load"
            )
        return self.filler.make(node, arrays=arrays)

    def later(self, phase: Phase, action: Action) -> None:
        """Run `action` after the fill, in the order of phases, then of calls."""
        self._actions.append((phase, action))

    def list_actions(self) -> tuple[Action, ...]:
        """All actions in the order in which they have to run."""
        return tuple(action for _, action in sorted(self._actions, key=lambda entry: entry[0]))


def keep(live: object) -> Settle:
    """A place whose object stays."""
    return lambda: live

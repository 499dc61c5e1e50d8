"""Plans a load: pairs the live app state with the stored trees, checks everything, and says what to fill and what to do then."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch

from anyshard.adapters.fills import Fills, Tie
from anyshard.adapters.findings import Findings
from anyshard.adapters.intake import Action, Intake, Phase, Settle, keep
from anyshard.adapters.module_load import load_modules
from anyshard.adapters.nested import describe_node, is_changed_in_place, is_tensor, load_container, load_value
from anyshard.adapters.optimizer_load import load_optimizers
from anyshard.adapters.per_rank import PerRank
from anyshard.adapters.per_rank_load import OwnTrees, Place
from anyshard.adapters.random_state import RNGState
from anyshard.adapters.recognise import Kind, holds, parts_of, recognise, unwrap
from anyshard.adapters.survey import Survey, survey
from anyshard.adapters.tensors import synchronise
from anyshard.errors import InvalidAppState, LimitExceeded, StateMismatch
from anyshard.options import LoadOptions
from anyshard.records.addresses import component, show
from anyshard.records.captured import Stored
from anyshard.records.handles import Destination
from anyshard.records.section_values import ABSENT
from anyshard.records.tables import ShardTable
from anyshard.records.values import PerRankMark, ValueRegistry

_HINT = (
    "strict=False leaves missing addresses alone and passes over unexpected ones; only= and exclude= choose addresses; shapes "
    "must agree, dtypes unless cast=True."
)


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """What a load wants, where it goes, and what is left to do after the fill.

    `wanted` has the regions that this rank wants, by stored address with aliases resolved; its rows may repeat a region.
    `destinations` and `names` (the live address) are parallel to its rows. `ties` are pairs of stored runs that feed the same
    memory: their bytes must be compared before the fill. `surplus` and `surplus_extra_state` (of modules) are addresses that only
    the checkpoint has, `unmatched` and `unmatched_exclude` globs that matched nothing: on several ranks these are errors only if
    they are so on all. The rest is for the report.
    """

    wanted: ShardTable
    destinations: tuple[Destination, ...]
    ties: tuple[Tie, ...]
    names: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    surplus: tuple[str, ...]
    surplus_extra_state: tuple[str, ...]
    unmatched: tuple[str, ...]
    unmatched_exclude: tuple[str, ...]
    not_asked_for: tuple[str, ...]
    replaced_values: tuple[str, ...]
    created: tuple[str, ...]
    warnings: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    actions: tuple[Action, ...]

    def apply(self) -> None:
        """Make all changes that are not fills: hooks, optimizer state, values, statefuls. Call it once, after the fill."""
        with torch.inference_mode(mode=False):
            _finish_copies(self.tensors)
            for action in self.actions:
                action()


def _finish_copies(tensors: tuple[torch.Tensor, ...]) -> None:
    synchronise(tensor.device for tensor in tensors)
    # Bytes that came in through NumPy have not been counted; autograd must see that saved tensors changed.
    torch.autograd.graph.increment_version(tensors)


def plan_load(  # noqa: PLR0913 - what is loaded, how, and who loads it
    app_state: Mapping[str, object],
    stored: Stored,
    *,
    options: LoadOptions,
    registry: ValueRegistry,
    checkpoint: str,
    rank: int = 0,
    world_size: int = 1,
) -> LoadTarget:
    """Plan how to load `stored` into `app_state`; nothing of the app state has changed when it returns or raises.

    `checkpoint` is what the checkpoint is called in messages; `rank` and `world_size` are those of the group that loads.
    Raises `StateMismatch` with all differences, and `InvalidAppState` for an app state that cannot be loaded into.
    """
    intake = Intake(stored, options, registry, world_size=world_size)
    # What is made here has to serve in training, whatever mode the caller is in.
    with torch.inference_mode(mode=False):
        _plan_sections(app_state, stored, intake, rank=rank, world_size=world_size)
        fills = intake.filler.finish()
    findings = intake.findings
    findings.check_matches(tuple(component(name) for name in app_state))
    if findings.differences:
        raise StateMismatch(checkpoint, tuple(findings.differences), _HINT)
    not_asked_for = tuple(name for name in stored.list_sections() if name not in app_state)
    return _make_target(fills, findings, not_asked_for, intake.list_actions())


def _plan_sections(app_state: Mapping[str, object], stored: Stored, intake: Intake, *, rank: int, world_size: int) -> None:
    try:
        surveyed = survey(app_state, intake.registry)
        place = Place(rank, world_size, surveyed.mesh)
        own = OwnTrees(stored, intake.findings, place=place, registry=intake.registry)
        loader = _Loader(app_state, surveyed, intake, own=own)
        for name, live in app_state.items():
            loader.load_section(name, live, stored)
    except RecursionError:
        raise LimitExceeded("the app state is nested deeper than Python can follow; flatten it") from None


def _make_target(fills: Fills, findings: Findings, not_asked_for: tuple[str, ...], actions: tuple[Action, ...]) -> LoadTarget:
    unmatched, unmatched_exclude = findings.list_unmatched()
    return LoadTarget(
        wanted=fills.wanted,
        destinations=fills.destinations,
        ties=fills.ties,
        names=fills.names,
        missing=tuple(findings.missing),
        unexpected=tuple(findings.unexpected),
        surplus=tuple(findings.surplus),
        surplus_extra_state=tuple(findings.surplus_extra_state),
        unmatched=unmatched,
        unmatched_exclude=unmatched_exclude,
        not_asked_for=not_asked_for,
        replaced_values=tuple(findings.replaced_values),
        created=tuple(findings.created),
        warnings=tuple(findings.warnings),
        tensors=fills.tensors,
        actions=actions,
    )


# What objects would refuse by themselves, but only when tensors have been filled already: type, check, expected, found.
_STATEFUL_REFUSALS: tuple[tuple[type, Callable[[Any, object], bool], str, str], ...] = (
    (
        torch.amp.GradScaler,
        lambda live, node: live.is_enabled() and node == {},
        "the state of an enabled GradScaler",
        "that of a disabled one",
    ),
)


@final
class _Loader:
    def __init__(self, app_state: Mapping[str, object], surveyed: Survey, intake: Intake, *, own: OwnTrees) -> None:
        self._app_state = app_state
        self._survey = surveyed
        self._own = own
        self.intake = intake

    def load_section(self, name: str, live: object, stored: Stored) -> None:
        """Plan one top-level name."""
        address = component(name)
        if name in stored.trees:
            self._check_replaceable(live, stored.trees[name], address)
            settle = self.visit(live, stored.trees[name], address)
            self.intake.later(Phase.VALUES, partial(self._settle_section, name, live, settle))
        elif self.intake.findings.selection.takes_whole(address):
            held = ", ".join(map(show, stored.list_sections())) or "nothing"
            found = f"{show(name)} not stored (stored: {held})"
            self.intake.findings.miss(address, expected="a section of this name", found=found)

    def visit(self, live: object, node: object, address: str, *, is_own: bool = False) -> Settle:
        """Plan one node of the app state; what it returns gives what stands there after the load.

        `is_own`: it lies within a per-rank value.
        """
        inner = unwrap(live)
        kind = recognise(inner, self._survey.registry, address)
        if kind is Kind.PER_RANK:
            return self._load_own(inner, node, address)
        if kind is Kind.RANDOM_STATE and not is_own:
            self._load_own(PerRank(inner), node, address)
        elif type(node) is PerRankMark:
            found = "a per-rank value; load it in anyshard.PerRank"
            self.intake.findings.refuse(address, expected="a value that all ranks share", found=found)
        else:
            return self._load(kind, live, node, address, is_own=is_own)
        return keep(live)

    def _load(self, kind: Kind, live: object, node: object, address: str, *, is_own: bool) -> Settle:
        inner = unwrap(live)
        match kind:
            case Kind.RANDOM_STATE:
                self._load_random_state(inner, node, address)
            case Kind.MODULES:
                load_modules(self._survey.views[address], node, address, self.intake)
            case Kind.OPTIMIZERS:
                load_optimizers(parts_of(inner), node, address, modules=self._survey.names, intake=self.intake)
            case Kind.STATEFUL:
                self._load_stateful(inner, node, address)
            case Kind.TENSOR:
                self.intake.filler.fill(node, inner, address)
            case Kind.GENERATOR:
                self._load_generator(inner, node, address)
            case Kind.CONTAINER if self._survey.holds_objects(inner) or holds(inner, _keeps_identity):
                return load_container(inner, node, address, visit=partial(self.visit, is_own=is_own), intake=self.intake)
            case _:
                return load_value(inner, node, address, self.intake)
        return keep(live)

    def _load_own(self, wrapper: PerRank, node: object, address: str) -> Settle:
        tree = self._own.find(wrapper, node, address)
        if tree is ABSENT:
            return keep(wrapper)
        settle = self.visit(wrapper.value, tree, address, is_own=True)

        def settle_own() -> PerRank:
            wrapper.value = settle()
            return wrapper

        return settle_own

    def _load_random_state(self, live: RNGState, node: Any, address: str) -> None:
        if not self.intake.findings.selection.takes_whole(address):
            return
        try:
            live.check(node)
        except ValueError as error:
            self.intake.findings.refuse(address, expected="a random state for the generators of this process", found=str(error))
            return
        self.intake.findings.match(address)
        self.intake.later(Phase.RANDOM, lambda: live.load_state_dict(node))

    def _load_stateful(self, live: Any, node: object, address: str) -> None:
        # Its state_dict() is never asked for: that may start workers or move random state.
        for kind, refuses, expected, found in _STATEFUL_REFUSALS:
            if isinstance(live, kind) and refuses(live, node):
                self.intake.findings.refuse(address, expected=expected, found=found)
                return
        if self.intake.findings.selection.takes_whole(address):
            make = self.intake.take_whole(node, address)
            self.intake.later(Phase.STATEFULS, lambda: live.load_state_dict(make()))

    def _load_generator(self, live: torch.Generator, node: object, address: str) -> None:
        if not self.intake.findings.selection.takes_whole(address):
            return
        if not isinstance(node, torch.Generator) or node.device.type != live.device.type:
            self.intake.findings.refuse(address, expected=f"a random generator of {live.device.type}", found=describe_node(node))
            return
        self.intake.findings.match(address)
        self.intake.later(Phase.RANDOM, lambda: _set_generator(live, node))

    def _check_replaceable(self, live: object, node: object, address: str) -> None:
        kind = recognise(unwrap(live), self._survey.registry, address)
        may_be_new = kind in (Kind.VALUE, Kind.CONTAINER) and not is_changed_in_place(live, node)
        if may_be_new and not isinstance(self._app_state, MutableMapping):
            raise InvalidAppState(
                f"{show(address)}: expected an app state in which values can be replaced (a dict), found "
                f"{type(self._app_state).__name__}; pass a dict"
            )

    def _settle_section(self, name: str, live: object, settle: Settle) -> None:
        new = settle()
        if new is not live and new is not unwrap(live) and isinstance(self._app_state, MutableMapping):
            self._app_state[name] = new


def _set_generator(live: torch.Generator, stored: torch.Generator) -> None:
    live.set_state(stored.get_state())


def _keeps_identity(value: object) -> bool:
    return is_tensor(value) or isinstance(value, torch.Generator)

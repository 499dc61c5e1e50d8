"""Loads modules: the tensors of the state dict are filled, then `load_state_dict` is called, so that hooks run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from anyshard.adapters.fills import Make
from anyshard.adapters.intake import Intake, Phase
from anyshard.adapters.modules import ModuleView, is_extra_state, unite_views
from anyshard.adapters.nested import describe_node
from anyshard.errors import Mismatch
from anyshard.records.addresses import component, join_address, show

PASSED_OVER = "the module takes no such extra state; it was passed over"


@dataclass(slots=True)
class _Handover:
    """What `load_state_dict` of one module gets beside the filled tensors, by key of its state dict; None drops the key."""

    view: ModuleView
    values: dict[str, Make | None] = field(default_factory=dict)
    is_touched: bool = False


def load_modules(views: Sequence[ModuleView], node: object, address: str, intake: Intake) -> None:
    """Plan the load of the modules under one name from their stored tree."""
    if not isinstance(node, dict):
        intake.findings.refuse(address, expected="the state of a module", found=describe_node(node))
        return
    stored = dict(node)
    handovers = {id(view): _Handover(view) for view in views}
    for fqn, view in unite_views(views, address).items():
        at = join_address(address, component(fqn))
        if fqn in stored:
            _load_entry(handovers[id(view)], fqn, stored.pop(fqn), at=at, intake=intake)
        else:
            _miss_entry(handovers[id(view)], fqn, at=at, intake=intake)
    for fqn in stored:
        _refuse_surplus(fqn, join_address(address, component(fqn)), intake)
    for handover in handovers.values():
        _warn_of_buffers(handover.view, address, intake)
        if handover.is_touched:
            intake.later(Phase.MODULES, _HandOver(handover))


def _load_entry(handover: _Handover, fqn: str, node: object, *, at: str, intake: Intake) -> None:
    key = handover.view.keys[fqn]
    live = handover.view.state[key]
    if isinstance(live, torch.Tensor) and not is_extra_state(fqn):
        handover.is_touched |= intake.findings.selection.takes(at)
        intake.filler.fill(node, live, at)
    elif intake.findings.selection.takes_whole(at):
        handover.is_touched = True
        handover.values[key] = intake.take_whole(node, at)
    else:
        handover.values[key] = None


def _miss_entry(handover: _Handover, fqn: str, *, at: str, intake: Intake) -> None:
    live = handover.view.state[handover.view.keys[fqn]]
    if isinstance(live, torch.Tensor) and not is_extra_state(fqn):
        intake.filler.miss(live, at)
        return
    handover.values[handover.view.keys[fqn]] = None
    if intake.findings.selection.takes_whole(at):
        if not is_extra_state(fqn):
            intake.findings.miss(at)
        else:
            _report_extra_state(Mismatch.MISSING, at, "the checkpoint has no such extra state; the module keeps its own", intake)


def _refuse_surplus(fqn: str, at: str, intake: Intake) -> None:
    findings = intake.findings
    if not findings.selection.takes_whole(at):
        return
    if not is_extra_state(fqn):
        findings.surprise(at)
    elif findings.judges_surplus:
        _report_extra_state(Mismatch.UNEXPECTED, at, PASSED_OVER, intake)
    else:
        findings.surplus_extra_state.append(at)


def _report_extra_state(kind: Mismatch, at: str, sentence: str, intake: Intake) -> None:
    if intake.findings.options.strict_extra_state:
        intake.findings.differ(kind, at, expected="extra state on both sides", found=sentence)
    else:
        intake.findings.warn(f"{show(at)}: {sentence}")


def _warn_of_buffers(view: ModuleView, address: str, intake: Intake) -> None:
    if unsaved := view.list_unsaved_buffers():
        intake.findings.warn(f"{show(address)}: non-persistent buffers are never stored or loaded: {', '.join(unsaved)}")


class _HandOver:
    """Calls `load_state_dict` with the state dict that was filled: free for its aliasing tensors, needed for hook-made ones."""

    def __init__(self, handover: _Handover) -> None:
        self._handover = handover

    def __call__(self) -> None:
        state = self._handover.view.state
        for key, make in self._handover.values.items():
            if make is None:
                del state[key]
            else:
                state[key] = make()
        tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
        # A module that was built in inference mode can be changed only there.
        with torch.inference_mode(any(tensor.is_inference() for tensor in tensors)):
            # Missing keys were judged already, by canonical name.
            self._handover.view.module.load_state_dict(state, strict=False)

"""Optimizers wait before they change what a lazy snapshot has yet to copy, whichever way they step."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_pre_hooks as global_hooks

from anyshard.adapters.capture import capture
from anyshard.adapters.stability import find_eligible
from anyshard.adapters.step_hooks import StepGuard
from anyshard.testing.training import take_step
from tests.adapters.fake_ranks import as_rank
from tests.adapters.roundtrip import REGISTRY
from tests.adapters.test_stability import DIM, make_model, make_state

State = dict[str, Any]
IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def guard_of(state: State, wait: Callable[[], None]) -> StepGuard:
    captured = capture(state, registry=REGISTRY)
    return StepGuard(find_eligible(state, captured, REGISTRY), wait)


def local_bytes(state: State) -> list[bytes]:
    """The bytes of the first parameter and its first moment, where they lie here."""
    param = next(iter(state["optimizer"].param_groups[0]["params"]))
    tensors = [param, *(value for value in state["optimizer"].state[param].values() if torch.is_tensor(value) and value.ndim)]
    return [bytes(getattr(tensor, "_local_tensor", tensor).detach().numpy().tobytes()) for tensor in tensors]


class Watch:
    """An open guard that notes what the optimizer's memory was whenever it was waited for."""

    def __init__(self, state: State, watched: State | None = None) -> None:
        self.state = watched or state
        self.before = local_bytes(self.state)
        self.seen: list[list[bytes]] = []
        self.guard = guard_of(state, lambda: self.seen.append(local_bytes(self.state)))
        self.guard.open()

    def assert_waited(self) -> None:
        """Every wait was before the first write, and there was a write after it."""
        assert self.seen
        assert [self.before] * len(self.seen) == self.seen
        assert self.before != local_bytes(self.state)


def make_adam(**options: Any) -> Callable[..., torch.optim.Optimizer]:
    return lambda params: torch.optim.AdamW(params, lr=0.1, **options)


def _shard(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model


WRAPPINGS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "ddp": DistributedDataParallel,
    "fsdp2": _shard,
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_a_step_waits_before_it_writes(wrapping: str, implementation: str) -> None:
    """In every implementation, whether or not version counters would tell of its writes (T1)."""
    with as_rank(0, 2):
        model = WRAPPINGS[wrapping](nn.Sequential(nn.Linear(2 * DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)))
        state = make_state(model, make_adam(**IMPLEMENTATIONS[implementation]))
        watch = Watch(state)
        take_step(state["model"], state["optimizer"])
        watch.assert_waited()


def _step_by_scheduler(state: State) -> Callable[[], object]:
    torch.optim.lr_scheduler.StepLR(state["optimizer"], step_size=1)
    return state["optimizer"].step  # type: ignore[no-any-return]


def _step_by_scaler(state: State) -> Callable[[], object]:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    return lambda: scaler.step(state["optimizer"])


def _step_by_closure(state: State) -> Callable[[], object]:
    return lambda: state["optimizer"].step(lambda: torch.zeros(()))


def _step_in_backward(state: State) -> Callable[[], object]:
    for param in state["model"].parameters():
        param.grad = None
        param.register_post_accumulate_grad_hook(lambda _: state["optimizer"].step())
    return lambda: state["model"](torch.ones(2, DIM)).sum().backward()


def _load(state: State) -> Callable[[], object]:
    other = make_state()["optimizer"].state_dict()
    return lambda: (state["optimizer"].load_state_dict(other), state["model"][0].weight.data.add_(1))


WAYS: dict[str, Callable[[State], Callable[[], object]]] = {
    "scheduler": _step_by_scheduler,
    "grad scaler": _step_by_scaler,
    "closure": _step_by_closure,
    "in backward": _step_in_backward,
    "load_state_dict": _load,
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_step_waits(way: str) -> None:
    """A step that is wrapped, scaled, given a closure, taken in the backward pass; a load of the optimizer's state."""
    state = make_state(make=make_adam())
    step = WAYS[way](state)
    for param in state["model"].parameters():
        param.grad = torch.ones_like(param) if way != "in backward" else None
    watch = Watch(state)
    step()
    watch.assert_waited()


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_step_waits(backend: str, when: str) -> None:
    """Whether it was compiled before or after the first guard was opened; later ones cost no compilation."""
    torch.compiler.reset()
    state = make_state(make=make_adam())
    step: Any = torch.compile(state["optimizer"].step, backend=backend)
    for number in range(3):
        if number or when == "before":
            _give_gradients(state)
            step()
        watch = Watch(state)
        with torch.compiler.set_stance("fail_on_recompile" if number > 1 else "default"):
            _give_gradients(state)
            step()
            watch.assert_waited()
            num_waits = len(watch.seen)
            watch.guard.close()
            step()
        assert num_waits == len(watch.seen)


def _give_gradients(state: State) -> None:
    for param in state["model"].parameters():
        param.grad = torch.ones_like(param)


def test_a_compiled_model_waits() -> None:
    """The wrapper around a compiled module hides nothing."""
    state = make_state(make=make_adam())
    state["model"] = torch.compile(state["model"], backend="eager")
    watch = Watch(state)
    state["model"](torch.ones(2, DIM)).sum().backward()
    state["optimizer"].step()
    watch.assert_waited()


def test_an_optimizer_outside_of_the_app_state_waits_too() -> None:
    """If it has a parameter in the same memory, be it through another object; else it goes its way."""
    state = make_state(make=make_adam())
    alias = nn.ParameterList([nn.Parameter(state["model"][0].weight.detach()[3:5])])
    for params, is_met in ((alias, True), (make_model(), False)):
        watch = Watch(state)
        take_step(params, torch.optim.SGD(params.parameters(), lr=1.0))
        assert is_met is bool(watch.seen)
        watch.guard.close()


def test_an_optimizer_that_says_nothing_of_its_memory_waits() -> None:
    """In doubt a step waits: here the parameters are in no groups."""
    state = make_state()
    other = torch.optim.SGD(make_model().parameters(), lr=1.0)
    watch = Watch(state)
    del other.param_groups
    with pytest.raises(AttributeError):
        other.step()
    assert [watch.before] == watch.seen


def test_a_guard_may_be_closed_while_a_step_waits() -> None:
    """The step that waits goes on; later ones do not wait."""
    state = make_state(make=make_adam())
    calls: list[int] = []

    def wait() -> None:
        calls.append(1)
        closer = threading.Thread(target=guard.close)
        closer.start()
        closer.join(timeout=60)

    guard = guard_of(state, wait)
    guard.open()
    before = local_bytes(state)
    for _ in range(2):
        take_step(state["model"], state["optimizer"])
    assert ([1], True) == (calls, before != local_bytes(state))


def test_guards_share_the_hooks_of_an_optimizer() -> None:
    """Several may be open; each is called until it is closed, and no save adds hooks to those of the first one."""
    state = make_state(make=make_adam())
    first, second = Watch(state), Watch(state)
    hooks = [state["optimizer"]._optimizer_step_pre_hooks, state["optimizer"]._optimizer_load_state_dict_pre_hooks, global_hooks]
    numbers = [len(each) for each in hooks]
    first.guard.close()
    take_step(state["model"], state["optimizer"])
    assert (0, True) == (len(first.seen), bool(second.seen))
    Watch(state).guard.close()
    assert [1, 1] == numbers[:2]
    assert numbers == [len(each) for each in hooks]
    second.guard.close()


def test_opening_twice_is_opening_once() -> None:
    """The guard is called as often as one that was opened once."""
    state = make_state(make=make_adam())
    once, twice = Watch(state), Watch(state)
    twice.guard.open()
    take_step(state["model"], state["optimizer"])
    assert len(once.seen) == len(twice.seen)
    once.guard.close()
    twice.guard.close()


def test_a_closed_guard_stays_closed() -> None:
    """Closed again, opened again, or closed before it was opened, it is not called any more."""
    state = make_state(make=make_adam())
    calls: list[int] = []
    guards = [guard_of(state, lambda: calls.append(1)) for _ in range(2)]
    guards[0].open()
    for guard in guards:
        guard.close()
        guard.close()
        guard.open()
    take_step(state["model"], state["optimizer"])
    assert [] == calls


def test_an_open_guard_keeps_nothing_alive() -> None:
    """Model and optimizer may go before the guard is closed, and the guard does not mind."""
    state = make_state(make=make_adam())
    guard = guard_of(state, lambda: None)
    guard.open()
    refs = [weakref.ref(state["model"][0].weight), weakref.ref(state["optimizer"])]
    state.clear()
    gc.collect()
    assert [None, None] == [ref() for ref in refs]
    guard.close()


def test_a_closed_guard_lets_go_of_what_it_waited_for() -> None:
    """What `wait` holds may be a whole snapshot."""

    class Snapshot:
        def wait(self) -> None:
            """Return."""

    snapshot = Snapshot()
    guard = guard_of(make_state(), snapshot.wait)
    guard.open()
    ref = weakref.ref(snapshot)
    del snapshot
    guard.close()
    gc.collect()
    assert ref() is None

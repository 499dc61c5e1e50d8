"""Makes optimizers wait before they change memory that a lazy snapshot has yet to copy.

A hook that was needed once stays with its optimizer, and does nothing while no guard is open. A step of torch walks over its
hooks while these run: to take one away when the snapshot is done, on another thread, would break the very step that waits.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, cast, final

import torch
from torch.optim import optimizer as torch_optimizer

from anyshard.adapters.memory_ranges import list_plain, locate
from anyshard.adapters.stability import Eligibility

_POST = "anyshard_post"  # the attribute of our hooks by which we know them


@final
class StepGuard:
    """While it is open, `wait` is called before anything that torch tells of changes a lazy row, on the thread that does so.

    That is a step or a `load_state_dict` of the optimizers of `eligibility`, compiled or not, and a step of any other optimizer
    with a parameter in the same memory. `wait` returns once all lazy rows are copied, at once if they are. It may be called at
    any time on any thread, and must not raise: a failed snapshot is no reason to break a step of training. In a forked child
    nothing waits, for what it does to its memory is seen by no snapshot of its parent, whose threads it does not have.

    Keeps neither tensors nor optimizers alive. Call `open` on the training thread, between steps, and `close` on any thread.
    """

    def __init__(self, eligibility: Eligibility, wait: Callable[[], None]) -> None:
        self._optimizers = {id(optimizer): weakref.ref(optimizer) for optimizer in eligibility.optimizers}
        self._memory = eligibility.memory
        self._wait = wait
        self._lock = threading.Lock()
        self._posts: list[_Post] | None = None
        self._is_over = False
        self._pid = os.getpid()

    def open(self) -> None:
        """Let optimizers wait from now on; no more than once, and not after `close`."""
        with self._lock:
            if self._is_over or self._posts is not None:
                return
            alive = [optimizer for ref in self._optimizers.values() if (optimizer := ref()) is not None]
            self._posts = [_find_global_post(), *map(_find_post, alive)]
            for post in self._posts:
                post.add(self)

    def close(self) -> None:
        """Let nobody wait any more but those that do already; a second time changes nothing."""
        with self._lock:
            posts, self._posts, self._is_over = self._posts, None, True
            self._wait = _go_on  # what it holds may hold tensors
        for post in posts or ():
            post.remove(self)

    def meet(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before a step of an optimizer, whichever it is: wait if it may change lazy rows."""
        if os.getpid() == self._pid and (self._knows(optimizer) or self._may_touch(optimizer)):
            self._wait()

    def _knows(self, optimizer: torch.optim.Optimizer) -> bool:
        ref = self._optimizers.get(id(optimizer))
        return ref is not None and ref() is optimizer  # else it is another one, at the place of one that died

    def _may_touch(self, optimizer: torch.optim.Optimizer) -> bool:
        try:
            params = list_plain([param for group in optimizer.param_groups for param in group["params"]])
            return bool(self._memory.touch(*locate(params)).any())
        except Exception:  # noqa: BLE001 - odd groups, or a tensor that does not say where it lies: better wait in vain
            return True


@final
class _Post:
    """The guards to be called by one hook. Steps read them while guards come and go on other threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._guards: tuple[StepGuard, ...] = ()

    def add(self, guard: StepGuard) -> None:
        with self._lock:
            self._guards = (*self._guards, guard)

    def remove(self, guard: StepGuard) -> None:
        with self._lock:
            self._guards = tuple(other for other in self._guards if other is not guard)

    def call(self, optimizer: torch.optim.Optimizer) -> None:
        for guard in self._guards:
            guard.meet(optimizer)


def _find_post(optimizer: torch.optim.Optimizer) -> _Post:
    """The post of our hooks on an optimizer, which are put there if they are not yet."""
    found = _look_for_post(optimizer._optimizer_step_pre_hooks.values())  # noqa: SLF001 - torch lists its hooks nowhere else
    if found is not None:
        return found
    post = _Post()
    hook = _make_hook(post)
    optimizer.register_step_pre_hook(hook)
    optimizer.register_load_state_dict_pre_hook(hook)
    return post


def _find_global_post() -> _Post:
    """The post of our hook on all optimizers. Were torch to rename its list, each guard would put a hook there for good."""
    found = _look_for_post(getattr(torch_optimizer, "_global_optimizer_pre_hooks", {}).values())
    if found is not None:
        return found
    post = _Post()
    torch_optimizer.register_optimizer_step_pre_hook(_make_hook(post))
    return post


def is_own_hook(hook: object) -> bool:
    """Whether a hook on an optimizer is one of ours, which does nothing while no guard is open."""
    return getattr(hook, _POST, None) is not None


def _look_for_post(hooks: Iterable[object]) -> _Post | None:
    return next((post for hook in list(hooks) if (post := getattr(hook, _POST, None)) is not None), None)


def _make_hook(post: _Post) -> Callable[..., None]:
    def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        post.call(optimizer)

    # Else a compiled step would have what it found at compile time in it, and never call us again.
    made: Any = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    setattr(made, _POST, post)
    return cast("Callable[..., None]", made)


def _go_on() -> None:
    return

"""The random state of a process as a value of the app state. Nothing here draws a number."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias, final

import numpy as np
import torch

from anyshard.errors import InvalidAppState

_NUMPY_KIND, _NUMPY_LENGTH = "MT19937", 624

Setter: TypeAlias = Callable[[Any], object]


@final
class RNGState:
    """Stands in the app state for this process's random generators; a load sets them after all else, exactly as they were.

    These are Python's `random`, NumPy's global one, and those of torch on the CPU and all devices of the accelerator. Every rank
    has its own: they come back under the same number of ranks and the same mesh, or in `PerRank(RNGState(), key=...)` by key.
    """

    def state_dict(self) -> dict[str, object]:
        """The state of each generator by name."""
        state: dict[str, object] = {"python": random.getstate(), "numpy": _take_numpy(), "cpu": _pack(torch.get_rng_state())}
        for name in _list_devices():
            state[name] = _pack(_device_module().get_rng_state(torch.device(name)))
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set each generator; raises `ValueError` and sets none if the state is not that of these generators."""
        self.check(state)
        setters: dict[str, Setter] = {"python": random.setstate, "numpy": np.random.set_state, "cpu": torch.set_rng_state}
        for name in _list_devices():
            setters[name] = partial(_device_module().set_rng_state, device=torch.device(name))
        _set_all(setters, state)

    def check(self, state: object) -> None:
        """Raise `ValueError` unless `load_state_dict` would set all generators by this state, which may come from anywhere."""
        scratch: dict[str, Setter] = {
            "python": random.Random().setstate,  # noqa: S311 - no number is drawn from it
            "numpy": np.random.RandomState().set_state,
        }
        for name in ("cpu", *_list_devices()):
            scratch[name] = torch.Generator(name).set_state
        if not isinstance(state, Mapping) or state.keys() != scratch.keys():
            found = ", ".join(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise ValueError(f"expected the random state of {', '.join(scratch)}, found {found}")
        try:
            _check_numpy(state["numpy"])
            _set_all(scratch, state)
        except (TypeError, ValueError, LookupError, RuntimeError, OverflowError) as error:
            raise ValueError(f"expected a whole random state, found damage: {error}") from error


def _set_all(setters: Mapping[str, Setter], state: Mapping[str, Any]) -> None:
    for name, setter in setters.items():
        setter(state[name] if name in ("python", "numpy") else _unpack(state[name]))


def _list_devices() -> list[str]:
    """The devices of the accelerator by name."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return [] if accelerator is None else [f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count())]


def _device_module() -> Any:
    return torch.get_device_module(torch.accelerator.current_accelerator())


def _pack(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()  # as bytes it stays in the value tree: the index need not grow with the number of ranks


def _unpack(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _take_numpy() -> Mapping[str, Any]:
    state = np.random.get_state(legacy=False)  # noqa: NPY002 - the global state is what this is about
    if state["bit_generator"] != _NUMPY_KIND:
        raise InvalidAppState(
            f"expected NumPy's global random state to be one of {_NUMPY_KIND}, found {state['bit_generator']}; keep a generator "
            "of your own, and put its bit_generator.state into the app state"
        )
    return state


def _check_numpy(state: Any) -> None:
    """NumPy itself takes any position, and then reads beyond its numbers."""
    numbers, position = state["state"]["key"], state["state"]["pos"]
    if np.shape(numbers) != (_NUMPY_LENGTH,) or type(position) is not int or not 0 <= position <= _NUMPY_LENGTH:
        raise ValueError(f"expected {_NUMPY_LENGTH} numbers and a position in them, found others")

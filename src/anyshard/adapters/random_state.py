"""The random state of a process as a value of the app state. Nothing here draws a number."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, Protocol, TypeAlias, final

import numpy as np
import torch

from anyshard.errors import InvalidAppState, InvalidOption
from anyshard.records.addresses import show

Generator: TypeAlias = torch.Generator | np.random.Generator | random.Random
# The number from which a generator is seeded for which nothing is stored, by the generator's label.
SeedOf: TypeAlias = Callable[[str], int]

_GLOBAL: Final = ("python", "numpy", "cpu")  # every process has these
_NAMED: Final = "generators"
_NUMPY_KIND: Final = "MT19937"
_NUM_WORDS: Final = 624
_TORCH_SEEDS: Final = 1 << 64
_OF_DAMAGE: Final = (TypeError, ValueError, LookupError, RuntimeError, OverflowError, AttributeError)


@final
class RNGState:
    """Stands in the app state for this process's random generators; a load sets them after all else, exactly as they were.

    These are Python's `random`, NumPy's global one, those of torch on the CPU and all devices of the accelerator, and those in
    `generators`, which are set in place. Every rank has its own: it comes back to the same rank of as many ranks on the same
    mesh. On other ranks each rank goes on with what the rank of its number saved; a rank that has none is seeded from what is
    stored, unlike all others and the same at each load (`other_mesh="refuse"`: that load is an error). Ranks with one `key` are
    alike, on their current devices: theirs comes back by key, whatever the ranks are, and a new key is seeded likewise.

    Example: `{"model": model, "rng": anyshard.RNGState(generators={"loader": loader.generator})}`.
    """

    def __init__(
        self,
        *,
        generators: Mapping[str, Generator] | None = None,
        key: object = None,
        other_mesh: Literal["derive", "refuse"] = "derive",
    ) -> None:
        if other_mesh not in ("derive", "refuse"):
            raise InvalidOption(f"other_mesh of anyshard.RNGState: expected 'derive' or 'refuse', found {other_mesh!r}")
        self.generators = dict(generators or {})
        self.key = key
        self.other_mesh = other_mesh
        for name, generator in self.generators.items():
            _check_generator(name, generator)

    def state_dict(self) -> dict[str, object]:
        """The state of each generator by name."""
        state: dict[str, object] = {}
        named: dict[str, object] = {}
        for label, source in _list_sources(self).items():
            name = _name_of(label)
            if name is None:
                state[label] = source.take()
            else:
                named[name] = source.take()
        return {**state, _NAMED: named} if named else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set each generator; raises `ValueError` and sets none if the state is not that of these generators."""
        self.check(state)
        labelled = _label(state)
        for label, source in _list_sources(self).items():
            source.put(labelled[label])

    def check(self, state: object) -> None:
        """Raise `ValueError` unless `load_state_dict` would set all generators by this state, which may come from anywhere."""
        sources, labelled = _list_sources(self), _label(state)
        if labelled.keys() != sources.keys():
            raise _refusal(sources, labelled)
        _check_all(sources, labelled)


@dataclass(frozen=True, slots=True)
class Fitted:
    """A random state for exactly the generators of this process.

    `passed_over` are those of the stored one that are not here, `seeded` those that it has nothing for.
    """

    state: Mapping[str, object]
    passed_over: tuple[str, ...]
    seeded: tuple[str, ...]


def fit_state(live: RNGState, state: object, seed_of: SeedOf) -> Fitted:
    """The stored state for the generators that are here: what it has is kept exactly, what it lacks is seeded.

    Raises `ValueError` for what is no whole random state of these generators, but for devices and named ones.
    """
    sources, labelled = _list_sources(live), _label(state)
    for label, device in _list_devices().items():
        if label not in labelled and device in labelled:  # as earlier releases called the current device
            labelled[label] = labelled.pop(device)
    if not labelled.keys() >= set(_GLOBAL):
        raise _refusal(sources, labelled)
    here = {label: source for label, source in sources.items() if label in labelled}
    _check_all(here, labelled)
    seeded = tuple(label for label in sources if label not in here)
    fitted = {label: labelled[label] if label in here else source.make(seed_of(label)) for label, source in sources.items()}
    return Fitted(_unlabel(fitted), tuple(label for label in labelled if label not in here), seeded)


def make_state(live: RNGState, seed_of: SeedOf) -> Mapping[str, object]:
    """A random state for the generators of this process in which each is seeded."""
    return _unlabel({label: source.make(seed_of(label)) for label, source in _list_sources(live).items()})


# Labels ----------------------------------------------------------------------------------------------------------------


def _label_named(name: str) -> str:
    return f"{_NAMED}/{name}"


def _name_of(label: str) -> str | None:
    """The name of a named generator by its label; None for the others, whose names have no slash."""
    return label.removeprefix(f"{_NAMED}/") if "/" in label else None


def _label(state: object) -> dict[str, Any]:
    """All states in a state by label."""
    named = state.get(_NAMED, {}) if isinstance(state, Mapping) else None
    if isinstance(state, Mapping) and isinstance(named, Mapping):
        own = {str(label): item for label, item in state.items() if label != _NAMED}
        return own | {_label_named(str(name)): item for name, item in named.items()}
    found = type(state).__name__ if named is None else f"{_NAMED} that are no map"
    raise ValueError(f"expected the random state of {', '.join(_GLOBAL)}, found {found}; exclude= leaves it out")


def _unlabel(labelled: Mapping[str, object]) -> dict[str, object]:
    named = {name: item for label, item in labelled.items() if (name := _name_of(label)) is not None}
    own = {label: item for label, item in labelled.items() if _name_of(label) is None}
    return {**own, _NAMED: named} if named else own


def _refusal(sources: Mapping[str, object], labelled: Mapping[str, object]) -> ValueError:
    found = show(", ".join(labelled)) or "none"
    return ValueError(f"expected the random state of {', '.join(sources)}, found {found}; exclude= leaves it out")


def _check_all(sources: Mapping[str, _Source], labelled: Mapping[str, Any]) -> None:
    for label, source in sources.items():
        try:
            source.check(labelled[label])
        except _OF_DAMAGE as error:
            text = f"expected a whole random state, found damage at {show(label)}: {show(str(error))}; exclude= leaves it out"
            raise ValueError(text) from error


# Generators ------------------------------------------------------------------------------------------------------------


class _Source(Protocol):
    """One generator. What `check` takes may come from anywhere; it raises anything that stands in _OF_DAMAGE."""

    def take(self) -> object: ...

    def put(self, state: Any) -> None: ...

    def check(self, state: Any) -> None: ...

    def make(self, seed: int) -> object: ...


@final
class _PythonSource:
    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def take(self) -> object:
        return self._generator.getstate()

    def put(self, state: Any) -> None:
        self._generator.setstate(state)

    def check(self, state: Any) -> None:
        random.Random().setstate(state)  # noqa: S311 - no number is drawn from it
        if not isinstance(state[2], float | None):
            raise TypeError("expected the next number of a pair, found another value")

    def make(self, seed: int) -> object:
        return random.Random(seed).getstate()  # noqa: S311 - numbers for training


@final
class _GlobalNumpySource:
    """NumPy's global generator, which is not one of those that can be made anew."""

    def take(self) -> object:
        state = np.random.get_state(legacy=False)  # noqa: NPY002 - the global state is what this is about
        if state["bit_generator"] != _NUMPY_KIND:
            raise InvalidAppState(
                f"expected NumPy's global random state to be one of {_NUMPY_KIND}, found {state['bit_generator']}; keep a "
                "generator of your own, and name it in the generators= of anyshard.RNGState"
            )
        return state

    def put(self, state: Any) -> None:
        np.random.set_state(state)  # noqa: NPY002 - the global state, again

    def check(self, state: Any) -> None:
        _check_position(state)
        np.random.RandomState().set_state(state)

    def make(self, seed: int) -> object:
        return np.random.RandomState(np.random.MT19937(seed)).get_state(legacy=False)


@final
class _NumpySource:
    def __init__(self, generator: np.random.Generator) -> None:
        self._bits: Any = generator.bit_generator

    def take(self) -> object:
        return self._bits.state

    def put(self, state: Any) -> None:
        self._bits.state = state

    def check(self, state: Any) -> None:
        kind = type(self._bits)
        if state["bit_generator"] != kind.__name__:
            raise ValueError(f"expected the state of a {kind.__name__}, found that of another generator")
        _check_position(state)
        kind(0).state = state

    def make(self, seed: int) -> object:
        return type(self._bits)(seed).state


@final
class _TorchSource:
    """A generator of torch on a device, as those who know it read and set it."""

    def __init__(self, device: str, get: Callable[[], torch.Tensor], put: Callable[[torch.Tensor], object]) -> None:
        self._device = device
        self._get = get
        self._put = put

    def take(self) -> object:
        return _pack(self._get())

    def put(self, state: Any) -> None:
        self._put(_unpack(state))

    def check(self, state: Any) -> None:
        torch.Generator(self._device).set_state(_unpack(state))

    def make(self, seed: int) -> object:
        return _pack(torch.Generator(self._device).manual_seed(seed % _TORCH_SEEDS).get_state())


def _list_sources(live: RNGState) -> dict[str, _Source]:
    """The generators of this process by label."""
    sources: dict[str, _Source] = {
        "python": _PythonSource(random),
        "numpy": _GlobalNumpySource(),
        "cpu": _TorchSource("cpu", torch.get_rng_state, torch.set_rng_state),
    }
    for label, name in _list_devices().items():
        if live.key is None or ":" not in label:  # ranks that are alike have drawn on a device each, not on each other's
            device, module = torch.device(name), _device_module()
            put = partial(module.set_rng_state, device=device)
            sources[label] = _TorchSource(name, partial(module.get_rng_state, device), put)
    return sources | {_label_named(name): _make_source(generator) for name, generator in live.generators.items()}


def _make_source(generator: Generator) -> _Source:
    match generator:
        case torch.Generator():
            return _TorchSource(str(generator.device), generator.get_state, generator.set_state)
        case np.random.Generator():
            return _NumpySource(generator)
    return _PythonSource(generator)


def _check_generator(name: object, generator: object) -> None:
    # One that asks the system for numbers has no state.
    known = isinstance(generator, (torch.Generator, np.random.Generator, random.Random))
    if not isinstance(name, str) or not known or isinstance(generator, random.SystemRandom):
        raise InvalidAppState(
            "generators of anyshard.RNGState: expected a torch.Generator, numpy.random.Generator or random.Random by each name, "
            f"found {type(generator).__name__} by {show(repr(name))}; put other state beside it, in anyshard.PerRank"
        )


def _list_devices() -> dict[str, str]:
    """The devices of the accelerator by label."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return {}
    return label_devices(accelerator.type, torch.accelerator.device_count(), current=torch.accelerator.current_device_index())


def label_devices(kind: str, num: int, *, current: int) -> dict[str, str]:
    """The current device has no number in its label: a rank finds its state again on whichever device it trains then."""
    others = [f"{kind}:{index}" for index in range(num) if index != current]
    return {kind: f"{kind}:{current}", **{name: name for name in others}}


def _device_module() -> Any:
    return torch.get_device_module(torch.accelerator.current_accelerator())


def _pack(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()  # as bytes it stays in the value tree: the index need not grow with the number of ranks


def _unpack(data: object) -> torch.Tensor:
    if type(data) is not bytes:
        raise TypeError(f"expected bytes, found {type(data).__name__}")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _check_position(state: Any) -> None:
    """NumPy itself takes any position, and then reads beyond its numbers."""
    match state["bit_generator"]:
        case "MT19937":
            _check_place(state["state"]["key"], state["state"]["pos"], length=_NUM_WORDS)
        case "Philox":
            _check_place(state["buffer"], state["buffer_pos"], length=4)


def _check_place(numbers: Any, position: Any, *, length: int) -> None:
    if np.shape(numbers) != (length,) or type(position) is not int or not 0 <= position <= length:
        raise ValueError(f"expected {length} numbers and a position in them, found others")

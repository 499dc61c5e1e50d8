"""Random state on other ranks and for other generators: exact where something is stored, else derived by a written rule."""

# ruff: noqa: NPY002 - NumPy's global generator is one of those that this is about

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import xxhash

from anyshard import PerRank, RNGState
from anyshard.adapters.random_rule import choose_saved_rank, name_ranks
from anyshard.adapters.random_state import label_devices
from anyshard.errors import InvalidAppState, InvalidOption, Mismatch, StateMismatch
from anyshard.records.value_parts import canonical_bytes
from tests.adapters.roundtrip import REGISTRY, Kept, give, keep, plan, take, unite

BIT_GENERATORS = (np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64)


@pytest.fixture(autouse=True)
def generators() -> Iterator[None]:
    """Other tests find the generators as they were."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)


def seed_all(seed: int) -> None:
    for set_seed in (random.seed, np.random.seed, torch.manual_seed):
        set_seed(seed)


def draw() -> tuple[Any, ...]:
    return random.random(), np.random.rand(), torch.rand(1).item()


# Named generators --------------------------------------------------------------------------------------------------------


def make_generators(seed: int) -> dict[str, Any]:
    """One of each kind."""
    numpy = {kind.__name__: np.random.Generator(kind(seed)) for kind in BIT_GENERATORS}
    return {"torch": torch.Generator().manual_seed(seed), "python": random.Random(seed), **numpy}


def draw_named(generators: dict[str, Any]) -> list[object]:
    """Some of each, of two kinds, so that a half of something is kept."""
    numpy = [(g.random(), g.integers(9, dtype=np.uint32), g.normal()) for g in generators.values() if hasattr(g, "bit_generator")]
    drawn = torch.randn(3, generator=generators["torch"]).tolist()
    return [*numpy, drawn, generators["python"].random(), generators["python"].gauss(0, 1)]


def test_named_generators_go_on_where_they_were() -> None:
    """Of any kind, in place, so that whoever holds one draws from it as before."""
    live = make_generators(3)
    draw_named(live)
    kept = keep({"rng": RNGState(generators=live)})
    expected = [draw_named(live) for _ in range(50)]
    target = give(kept, {"rng": RNGState(generators=live)})
    assert expected == [draw_named(live) for _ in range(50)]
    assert () == target.warnings


def test_a_loader_goes_on_shuffling() -> None:
    """The generator of a data loader is one with a name: the order of the next epochs is that of the undisturbed job."""
    loader = torch.utils.data.DataLoader(range(20), shuffle=True, generator=torch.Generator().manual_seed(5))
    list(loader)
    state = {"rng": RNGState(generators={"loader": loader.generator})}
    kept = keep(state)
    expected = [torch.cat(list(loader)).tolist() for _ in range(2)]
    give(kept, state)
    assert expected == [torch.cat(list(loader)).tolist() for _ in range(2)]


def test_a_state_without_named_generators_loads() -> None:
    """Older checkpoints have none: all others are exact, and what is new is derived, which the report says."""
    seed_all(1)
    kept = keep({"rng": RNGState()})
    expected, live = draw(), torch.Generator()
    target = give(kept, {"rng": RNGState(generators={"loader": live})})
    assert expected == draw()
    first = live.get_state()
    assert not torch.equal(torch.Generator().get_state(), first)
    give(kept, {"rng": RNGState(generators={"loader": live})})
    assert torch.equal(first, live.get_state())
    assert ("rng: nothing is stored for generators/loader: derived from what is stored for others",) == target.warnings


def test_generators_that_are_gone_are_passed_over() -> None:
    """The report names them, and the others are exact."""
    live = make_generators(1)
    kept = keep({"rng": RNGState(generators=live)})
    expected = live["python"].random()
    target = give(kept, {"rng": RNGState(generators={"python": live["python"]})})
    assert expected == live["python"].random()
    [warning] = target.warnings
    assert warning.startswith("rng: passed over the random state of generators/torch, generators/MT19937, ")


DAMAGED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "another kind": ("PCG64", lambda state: {**state, "bit_generator": "SFC64"}),
    "no map": ("SFC64", lambda state: b"abc"),
    "half": ("PCG64DXSM", lambda state: {"bit_generator": "PCG64DXSM"}),
    "beyond the buffer": ("Philox", lambda state: {**state, "buffer_pos": 5}),
    "before the buffer": ("Philox", lambda state: {**state, "buffer_pos": -1}),
    "beyond the words": ("MT19937", lambda state: {**state, "state": {**state["state"], "pos": 625}}),
    "short": ("torch", lambda state: state[:-1]),
    "of python": ("torch", lambda state: random.getstate()),
    "of torch": ("python", lambda state: b"0"),
}


@pytest.mark.parametrize(("name", "damage"), DAMAGED.values(), ids=DAMAGED)
def test_a_named_generator_that_is_damaged_is_refused(name: str, damage: Callable[[Any], Any]) -> None:
    """By its name, before anything changes; left out, it is in nobody's way."""
    generators = make_generators(1)
    state: Any = RNGState(generators=generators).state_dict()
    state["generators"][name] = damage(state["generators"][name])
    kept, live = keep({"rng": PerRank(state), "w": torch.ones(2)}), {"rng": RNGState(generators=generators), "w": torch.zeros(2)}
    with pytest.raises(StateMismatch, match=f"rng: kind .*damage at generators/{name}: .*; exclude= leaves it out"):
        plan(kept, live)
    expected = keep({"rng": RNGState(generators=generators)}).own
    give(kept, live, exclude=["rng"])
    assert expected == keep({"rng": RNGState(generators=generators)}).own
    assert [1.0, 1.0] == live["w"].tolist()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "generator", [5, random.SystemRandom(), random, np.random.RandomState(1)], ids=lambda g: type(g).__name__
)
def test_what_is_no_generator_is_refused_at_once(generator: Any) -> None:
    """Where it is written, not at the first save."""
    with pytest.raises(InvalidAppState, match=f"found {type(generator).__name__} by 'x'"):
        RNGState(generators={"x": generator})


def test_a_misspelt_choice_is_refused() -> None:
    """It would be taken for another one."""
    with pytest.raises(InvalidOption, match="expected 'derive' or 'refuse', found 'deny'"):
        RNGState(other_mesh="deny")  # type: ignore[arg-type]


# Other ranks -----------------------------------------------------------------------------------------------------------


def keep_on_ranks(make: Callable[[int], object], world_size: int) -> Kept:
    """A checkpoint in which rank r has the generators of seed r."""
    parts = []
    for rank in range(world_size):
        seed_all(rank)
        parts.append(take({"rng": make(rank)}, rank=rank, world_size=world_size))
    return unite(parts)


def load_on_ranks(kept: Kept, make: Callable[[int], object], world_size: int) -> tuple[list[list[Any]], list[tuple[str, ...]]]:
    """The numbers that each rank draws behind a load, and its warnings."""
    numbers, warnings = [], []
    for rank in range(world_size):
        warnings.append(give(kept, {"rng": make(rank)}, rank=rank, world_size=world_size).warnings)
        numbers.append([draw() for _ in range(64)])
    return numbers, warnings


def drawn_by_seed(seed: int) -> list[Any]:
    seed_all(seed)
    return [draw() for _ in range(64)]


def count_differing(streams: Sequence[Sequence[tuple[Any, ...]]]) -> list[int]:
    """How many streams there are of each generator, those that are alike counted once."""
    return [len({tuple(numbers[place] for numbers in stream) for stream in streams}) for place in range(3)]


def make_plain(rank: int) -> RNGState:
    return RNGState()


def test_more_ranks_go_on_with_streams_of_their_own() -> None:
    """Old ranks exactly, new ones unlike all others, the same at each load; every rank's report names those that are new."""
    kept = keep_on_ranks(make_plain, 2)
    streams, warnings = load_on_ranks(kept, make_plain, 7)
    assert [drawn_by_seed(0), drawn_by_seed(1)] == streams[:2]
    assert [7] * 3 == count_differing(streams)
    assert streams == load_on_ranks(kept, make_plain, 7)[0]
    sentence = (
        "rng: random state is stored for 2 ranks, and for none of ranks 2, 3, 4, 5, 6 of 7, whose random numbers are derived "
        "from what is stored, unlike all others"
    )
    assert [(sentence,)] * 7 == warnings


def test_another_step_gives_other_streams() -> None:
    """What is derived comes from the very state that is stored: a job that grows twice does not draw the same again."""
    earlier, later = keep_on_ranks(make_plain, 2), keep_on_ranks(lambda rank: (draw(), RNGState())[1], 2)
    streams = [load_on_ranks(kept, make_plain, 4)[0][2] for kept in (earlier, later)]
    assert [2] * 3 == count_differing(streams)


def test_fewer_ranks_go_on_with_their_own() -> None:
    """The first ones have what they had, and nothing is derived."""
    streams, warnings = load_on_ranks(keep_on_ranks(make_plain, 3), make_plain, 2)
    assert [drawn_by_seed(0), drawn_by_seed(1)] == streams
    assert [(), ()] == warnings


def test_the_rule_is_the_written_one() -> None:
    """Done by hand as docs/format.md says it, for rank 3, which follows rank 1 of two."""
    kept = keep_on_ranks(make_plain, 2)
    generator = np.random.Generator(np.random.PCG64())
    give(kept, {"rng": RNGState(generators={"g": generator})}, rank=3, world_size=4)
    digest = xxhash.xxh3_128_digest(canonical_bytes(kept.read_rank(1, "rng")["rng"], registry=REGISTRY))
    labels = ("python", "numpy", "cpu", "generators/g")
    first = b"anyshard random state 1" + digest + msgspec.msgpack.encode(3)
    python, numpy, cpu, named = (int.from_bytes(xxhash.xxh3_128_digest(first + label.encode()), "big") for label in labels)
    found = [random.random(), np.random.rand(), torch.rand(1).item(), generator.random()]
    expected = [random.Random(python).random(), np.random.RandomState(np.random.MT19937(numpy)).rand()]
    expected += [torch.rand(1, generator=torch.Generator().manual_seed(cpu % 2**64)).item()]
    expected += [np.random.Generator(np.random.PCG64(named)).random()]
    assert expected == found


def test_damage_is_no_source_of_random_numbers() -> None:
    """A rank that would be seeded from a damaged state is refused as the one that saved it."""
    kept = unite([take({"rng": PerRank({"python": 5})}, rank=rank, world_size=2) for rank in range(2)])
    for rank in range(4):
        with pytest.raises(StateMismatch, match="rng: kind .*found python; exclude="):
            plan(kept, {"rng": RNGState()}, rank=rank, world_size=4)


def test_which_saved_rank_is_followed() -> None:
    """One's own if it has a state, else those that have one in turn; messages name only some of many."""
    assert [2, 5, 2, 5, 2, 5, 2] == [choose_saved_rank(rank, {5, 2}) for rank in range(7)]
    assert ("rank 3", "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more") == (name_ranks([3]), name_ranks(range(12)))


# Keys ------------------------------------------------------------------------------------------------------------------


def make_by_key(rank: int) -> RNGState:
    """Two ranks each that are alike, as those that share one replica of the model."""
    return RNGState(key=["dp", rank // 2])


def test_ranks_that_were_saved_alike_come_out_alike() -> None:
    """By key on any number of ranks: stored keys exactly, new ones derived and alike as well, which those ranks are told."""
    parts = []
    for rank in range(4):
        seed_all(rank // 2)
        parts.append(take({"rng": make_by_key(rank)}, rank=rank, world_size=4))
    streams, warnings = load_on_ranks(unite(parts), make_by_key, 8)
    assert [drawn_by_seed(0)] * 2 + [drawn_by_seed(1)] * 2 == streams[:4]
    assert streams[4:] == [streams[4]] * 2 + [streams[6]] * 2
    assert [4] * 3 == count_differing(streams)
    assert [()] * 4 == warnings[:4]
    assert "rng: no random state is stored for key ['dp', 3], which rank 7 has: its random numbers are derived" in warnings[7][0]


def test_a_key_may_stand_on_either() -> None:
    """On the random state or on the wrapper around it: one key."""
    kept = keep_on_ranks(lambda rank: RNGState(key=rank), 2)
    assert [drawn_by_seed(1)] == load_on_ranks(kept, lambda rank: PerRank(RNGState(), key=1), 1)[0]


@pytest.mark.parametrize(
    "value", [PerRank(RNGState(key=1), key=2), PerRank({"rng": RNGState(key=1)}), PerRank([RNGState(key=1)], key=1)], ids=repr
)
def test_two_keys_are_refused(value: PerRank) -> None:
    """Within a wrapper only the wrapper's counts."""
    with pytest.raises(
        InvalidAppState, match=r"found the key 1 of an anyshard.RNGState within .*; give the key to anyshard.PerRank"
    ):
        keep({"x": value})


def test_a_new_key_can_be_refused() -> None:
    """As ranks can."""
    kept = keep_on_ranks(lambda rank: RNGState(key=rank), 2)
    with pytest.raises(StateMismatch, match="that of key 2, found those of key 0, key 1"):
        plan(kept, {"rng": RNGState(key=2, other_mesh="refuse")})


def test_keys_are_not_mistaken_for_ranks() -> None:
    """Whoever gives no key any more hears of those that are stored; whoever gives one now goes on with what is derived."""
    kept = keep_on_ranks(lambda rank: RNGState(key=rank), 2)
    with pytest.raises(
        StateMismatch, match="that of rank 0 of 2, found those of key 0, key 1: give anyshard.PerRank the key="
    ) as e:
        plan(kept, {"rng": RNGState()}, world_size=2)
    assert [Mismatch.RANK] == [difference.kind for difference in e.value.differences]
    streams = load_on_ranks(keep_on_ranks(make_plain, 2), lambda rank: RNGState(key=rank), 2)[0]
    assert [2] * 3 == count_differing(streams)


# Devices ---------------------------------------------------------------------------------------------------------------


class Accelerator:
    """A made-up accelerator, whose devices a test gives and takes away."""

    def __init__(self) -> None:
        self.devices: dict[str, torch.Generator] = {}
        self.current = 0

    def seed(self, num: int, *, current: int = 0, seed: int = 0) -> None:
        """Have so many devices, device r with the seed `seed` + r."""
        self.devices = {f"cpu:{index}": torch.Generator().manual_seed(seed + index) for index in range(num)}
        self.current = current

    def list_devices(self) -> dict[str, str]:
        """By label; torch's generator on the CPU has the label that the current one would have here."""
        labels = label_devices("cpu", len(self.devices), current=self.current)
        return {"gpu": labels.pop("cpu"), **labels}

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        return self.devices[str(device)].get_state()

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        self.devices[str(device)].set_state(state)

    def draw(self) -> list[float]:
        """A number of each device."""
        return [torch.rand(1, generator=generator).item() for generator in self.devices.values()]


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    """The only one that this process has."""
    made = Accelerator()
    monkeypatch.setattr("anyshard.adapters.random_state._list_devices", made.list_devices)
    monkeypatch.setattr("anyshard.adapters.random_state._device_module", lambda: made)
    return made


WRAPS = pytest.mark.parametrize("wrap", [lambda rng: rng, lambda rng: PerRank({"x": [rng], "n": 1})], ids=["itself", "within"])


@WRAPS
def test_fewer_devices(accelerator: Accelerator, wrap: Callable[[RNGState], object]) -> None:
    """Those that are there are exact, and the report names those that are not (B121)."""
    accelerator.seed(4)
    kept, expected = keep({"rng": wrap(RNGState())}), accelerator.draw()
    accelerator.seed(2, seed=50)
    [warning] = give(kept, {"rng": wrap(RNGState())}).warnings
    assert expected[:2] == accelerator.draw()
    assert "passed over the random state of cpu:2, cpu:3, which this process has not" == warning.partition(": ")[2]


@WRAPS
def test_more_devices(accelerator: Accelerator, wrap: Callable[[RNGState], object]) -> None:
    """New ones are derived, each unlike all others and alike at each load, and the report names them."""
    accelerator.seed(1)
    kept, [expected] = keep({"rng": wrap(RNGState())}), accelerator.draw()
    found = []
    for seed in (50, 60):
        accelerator.seed(3, seed=seed)
        [warning] = give(kept, {"rng": wrap(RNGState())}).warnings
        assert "nothing is stored for cpu:1, cpu:2: derived from what is stored for others" == warning.partition(": ")[2]
        found.append(accelerator.draw())
    assert [found[0]] == found[1:]
    assert (expected, 3) == (found[0][0], len(set(found[0])))


def test_a_rank_that_trains_on_another_device(accelerator: Accelerator) -> None:
    """As where hosts have more devices than before: it goes on with the numbers of the device on which it trained."""
    accelerator.seed(2, current=1)
    kept, expected = keep({"rng": RNGState()}), accelerator.draw()
    accelerator.seed(6, current=5, seed=50)
    give(kept, {"rng": RNGState()})
    drawn = accelerator.draw()
    assert expected == [drawn[0], drawn[5]]


def test_ranks_that_are_alike_on_devices_of_their_own(accelerator: Accelerator) -> None:
    """With one key the devices on which other ranks train do not count: values are equal, and so are derived numbers."""
    found = []
    for current in range(2):
        accelerator.seed(2, seed=current * 10, current=current)
        accelerator.devices[f"cpu:{current}"].manual_seed(7)
        seed_all(1)
        found.append(keep({"rng": RNGState(key="dp0")}))
    assert found[0].own == found[1].own
    drawn = []
    for current in range(2):
        accelerator.seed(2, seed=50, current=current)
        give(found[0], {"rng": RNGState(key="dp1")})
        drawn.append(accelerator.draw()[current])
    assert drawn[:1] == drawn[1:]


def test_an_earlier_release_named_the_current_device_by_its_number(accelerator: Accelerator) -> None:
    """Its checkpoints load all the same, without a warning."""
    accelerator.seed(3, current=1)
    state = RNGState().state_dict()
    state["cpu:1"] = state.pop("gpu")
    kept, expected = keep({"rng": PerRank(state)}), accelerator.draw()
    accelerator.seed(3, current=1, seed=50)
    assert () == give(kept, {"rng": RNGState()}).warnings
    assert expected == accelerator.draw()


def test_a_device_that_is_damaged_is_refused(accelerator: Accelerator) -> None:
    """One of another length is no state that torch can take; all else loads without it."""
    accelerator.seed(1)
    kept = keep({"rng": PerRank({**RNGState().state_dict(), "gpu": bytes(816)})})
    with pytest.raises(StateMismatch, match="damage at gpu: .*; exclude= leaves it out"):
        plan(kept, {"rng": RNGState()})
    assert () == give(kept, {"rng": RNGState()}, exclude=["rng"]).warnings

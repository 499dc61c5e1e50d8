"""The resharding matrix: every layout is saved once and loaded under every other one; what is compared are bytes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

import anyshard
from anyshard.testing.fill import Fill, assert_same_bytes, fill, full_bytes
from anyshard.testing.layouts import LAYOUTS, OddModel, Training
from anyshard.testing.training import Moment, fill_training, take_step, training_state
from anyshard.testing.world import Worlds

pytestmark = pytest.mark.slow

TIMEOUT_S = 200  # of a case with a load from every layout, on two cores

each_layout = pytest.mark.parametrize("layout", LAYOUTS)


def app_state(training: Training) -> dict[str, object]:
    model, optimizer = training
    return {"model": model, "optimizer": optimizer}


def build_trained(layout: str) -> Training:
    training = LAYOUTS[layout].build()
    fill_training(*training)
    return training


def build_fresh(layout: str) -> Training:
    """A model with other bits than any checkpoint, and an optimizer that has other options and has not taken a step."""
    model, optimizer = LAYOUTS[layout].build()
    for address, tensor in training_state(model, optimizer).items():
        fill(tensor, "fresh " + address, kind=Fill.FINITE)
    for group in optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 0.5
    return model, optimizer


def save(layout: str, place: str) -> None:
    anyshard.save(place, app_state(build_trained(layout)))


def load_all(layout: str, places: dict[str, str], again: str) -> dict[str, tuple[list[str], list[str]]]:
    """What differs, by layout of the save, after a load under this layout and after the step that follows it.

    It is compared with training that was never interrupted. The last load is saved again, before the step.
    """
    trained = build_trained(layout)
    expected = Moment.of(*trained)
    take_step(*trained, seed="next ")
    expected_next = Moment.of(*trained)
    differences = {}
    for saved, place in places.items():
        live = build_fresh(layout)
        anyshard.load(place, app_state(live))
        loaded = Moment.of(*live)
        if saved == list(places)[-1]:
            anyshard.save(again, app_state(live))
        take_step(*live, seed="next ")
        differences[saved] = expected.differences(loaded), expected_next.differences(Moment.of(*live))
    return differences


def load_without_moments(layout: str, place: str) -> tuple[list[str], list[str]]:
    """What differs after a load whose moments are set to zero, and at the parameters after the next step."""
    expected, live = build_trained(layout), build_fresh(layout)
    anyshard.load(place, app_state(live))
    for state in live[1].state.values():
        state["exp_avg"].zero_()
        state["exp_avg_sq"].zero_()
    differences = Moment.of(*expected).differences(Moment.of(*live))
    for training in (expected, live):
        take_step(*training, seed="next ")
    after = Moment.of(*expected).differences(Moment.of(*live))
    return differences, [address for address in after if address.startswith("model/")]


@pytest.fixture(scope="module")
def whole() -> dict[str, bytes]:
    """The logical tensors of training that is not laid out."""
    return full_bytes(training_state(*build_trained("plain")))


@pytest.fixture(scope="module")
def places(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A checkpoint of every layout."""
    made = {layout: str(tmp_path_factory.mktemp("matrix") / "step_7") for layout in LAYOUTS}
    for layout, place in made.items():
        worlds(LAYOUTS[layout].size).run(save, layout, place)
    return made


def assert_holds(place: str | Path, whole: Mapping[str, bytes]) -> None:
    """Fail unless the checkpoint has exactly these tensors, and the two groups of the optimizer with their parameters."""
    with anyshard.open(place) as checkpoint:
        assert_same_bytes(whole, {address: checkpoint[address].bits().tobytes() for address in checkpoint})
        groups = checkpoint["optimizer/param_groups"].items()
        expected = {"down.weight": (0.1, 1e-2, 8), "down.bias": (0.0, 3e-3, 7)}
        assert expected == {
            name: (group["options"]["weight_decay"], group["options"]["lr"], len(group["params"])) for name, group in groups
        }


@each_layout
def test_a_checkpoint_does_not_know_its_layout(places: dict[str, str], whole: dict[str, bytes], layout: str) -> None:
    """Whatever saved it, a checkpoint holds the same logical tensors and groups."""
    assert_holds(places[layout], whole)


@each_layout
def test_any_layout_loads_into_any(
    worlds: Worlds, places: dict[str, str], whole: dict[str, bytes], layout: str, tmp_path: Path
) -> None:
    """Parameters, buffers, moments, steps and groups are those of uninterrupted training, after the next step too."""
    again = tmp_path / "step_7"
    results = worlds(LAYOUTS[layout].size).run(load_all, layout, places, str(again), timeout_s=TIMEOUT_S)
    assert [{saved: ([], []) for saved in LAYOUTS}] * LAYOUTS[layout].size == results
    assert_holds(again, whole)


@pytest.mark.parametrize("layout", ["plain", "fsdp3"])
def test_zeroed_moments_show(worlds: Worlds, places: dict[str, str], layout: str) -> None:
    """The control: without its moments a loaded optimizer differs from the trained one, and takes another step."""
    results = worlds(LAYOUTS[layout].size).run(load_without_moments, layout, places["tp2"])
    differing = {address.rsplit("/", 1)[1] for before, _ in results for address in before}
    changed = {address for _, after in results for address in after}
    trained = {f"model/{fqn}" for fqn, param in OddModel().named_parameters() if param.numel()}
    assert ({"exp_avg", "exp_avg_sq"}, trained) == (differing, changed)

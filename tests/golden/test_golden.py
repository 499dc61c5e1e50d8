"""Golden checkpoints of every past format version load for ever."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import anyshard
from anyshard.records.values import TensorMark
from anyshard.testing.world import Worlds
from tests.golden import two_ranks
from tests.golden.contents import ROLES, fill, make_role, make_state, make_values
from tests.golden.cut import ADDRESS, whole

HERE = Path(__file__).parent / "v1"
WHOLE = ("plain", "two_blobs", "overwritten")


def blank(state: object) -> object:
    """The same structure with zeroed tensors and other values; ties stay ties."""
    zeroed: dict[int, torch.Tensor] = {}

    def visit(node: object) -> object:
        if isinstance(node, torch.Tensor):
            return zeroed.setdefault(id(node), torch.zeros_like(node))
        if isinstance(node, np.ndarray):
            return np.zeros_like(node)
        if isinstance(node, dict):
            return {key: visit(value) for key, value in node.items()}
        return [visit(value) for value in node] if isinstance(node, list) else None

    return visit(state)


def leaves(node: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Paths and leaves of a nested state; tensors as (dtype, shape, bytes)."""
    if isinstance(node, dict | list):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from leaves(value, f"{path}/{key!r}")
    elif isinstance(node, torch.Tensor):
        yield path, (str(node.dtype), tuple(node.shape), tensor_bytes(node))
    elif isinstance(node, np.ndarray):
        yield path, (str(node.dtype), node.shape, node.tobytes())
    else:
        yield path, (type(node), node)


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@pytest.mark.parametrize("name", WHOLE)
def test_golden_loads(name: str) -> None:
    """Every tensor and value of a golden comes back, bytes and types."""
    state = blank(make_state())
    report = anyshard.load(HERE / name, state)
    assert list(leaves(make_state())) == list(leaves(state))
    assert (8 if name == "overwritten" else 7) == report.step


@pytest.mark.parametrize("name", WHOLE)
def test_golden_opens(name: str) -> None:
    """Offline, tensors and values read the same."""
    with anyshard.open(HERE / name) as checkpoint:
        assert np.array_equal(
            fill((300, 257), "float32", 6).numpy()[7:9, ::50], checkpoint["tensors/large"][7:9, ::50], equal_nan=True
        )
        assert list(leaves(make_values())) == list(leaves(checkpoint.values("values")))
        assert "tensors/aa_tied" == checkpoint["tensors/weight"].tied_to


def test_thinned_golden_loads_and_says_what_is_gone() -> None:
    """What was kept comes back, and what was dropped is named."""
    state = {name: blank(part) for name, part in make_state().items() if name in ("tensors", "step")}
    report = anyshard.load(HERE / "thinned", state)
    expected = {name: part for name, part in make_state().items() if name in state}
    assert (list(leaves(expected)), 2) == (list(leaves(state)), report.generation)
    with anyshard.open(HERE / "thinned") as checkpoint, pytest.raises(KeyError, match="values is gone since"):
        checkpoint.values("values")


def test_parts_golden_loads_part_by_part() -> None:
    """Each part is a checkpoint; the step itself says which there are."""
    for role, seed in ROLES.items():
        state = blank(make_role(seed))
        anyshard.load(HERE / "parts" / "parts" / role, state)
        assert list(leaves(make_role(seed))) == list(leaves(state))
    with pytest.raises(anyshard.CheckpointNotFound, match=r"actor, critic"):
        anyshard.open(HERE / "parts")


def test_cut_golden_opens() -> None:
    """A tensor cut into boxes over two ranks reads as one."""
    checkpoint = anyshard.open(HERE / "cut")
    assert np.array_equal(whole(), checkpoint[ADDRESS].numpy())
    assert np.array_equal(whole()[2:8, 2:5], checkpoint[ADDRESS][2:8, 2:5])
    assert {"weight": TensorMark(ADDRESS, "tensor")} == checkpoint.values("model")


@pytest.mark.slow
@pytest.mark.parametrize(
    "load",
    [
        two_ranks.load,
        pytest.param(
            two_ranks.load_random_state,
            marks=pytest.mark.skipif(torch.accelerator.is_available(), reason="it is the random state of ranks without one"),
        ),
    ],
)
def test_two_ranks_golden_loads_on_two_ranks(worlds: Worlds, load: Callable[[str], object]) -> None:
    """Each rank gets its shards, what only it had, and what it has of its own by key."""
    for expected, found in worlds(2).run(load, str(HERE / "two_ranks")):
        assert expected == found


def test_two_ranks_golden_loads_in_one_process() -> None:
    """What two ranks had laid out fills whole tensors."""
    addresses = ("model/weight", "model/bias", "stages/layers.0", "stages/layers.1")
    expected: dict[str, dict[str, object]] = {"model": {}, "stages": {}}
    for section, name in (address.split("/") for address in addresses):
        expected[section][name] = two_ranks.whole(f"{section}/{name}")
    expected["stages"] |= {"both": {"layers.2": two_ranks.whole("stages/both/layers.2")}, "of_0": None, "of_1": None}
    state = blank(expected)
    anyshard.load(HERE / "two_ranks", state)
    expected["stages"] |= {"of_0": two_ranks.OWN_VALUES[0], "of_1": two_ranks.OWN_VALUES[1]}
    assert list(leaves(expected)) == list(leaves(state))


def test_two_ranks_golden_opens() -> None:
    """Offline, tensors are whole, value trees united, and per-rank values listed by rank."""
    with anyshard.open(HERE / "two_ranks") as checkpoint:
        found = {address: checkpoint[address][...].tobytes() for address in checkpoint}
        orders = {rank: loader["order"].address for rank, loader in checkpoint["loader"].items()}
        assert {address: tensor_bytes(two_ranks.whole(address)) for address in two_ranks.TENSORS} == found
        assert {0: "loader/order/~r0", 1: "loader/order/~r1"} == orders
        assert two_ranks.OWN_VALUES == (checkpoint["stages/of_0"], checkpoint["stages/of_1"])
        assert ({"epoch": 3}, "of rank 1") == (checkpoint.values("values"), checkpoint["last"])
        assert ({0: {"rank": 0}, 1: {"rank": 1}}, {0: [1.5]}) == (checkpoint["mine"], checkpoint["alike"])


def test_deleted_golden_is_not_found() -> None:
    """A deleted step is reported as such."""
    with pytest.raises(anyshard.CheckpointNotFound, match="deleted"):
        anyshard.open(HERE / "deleted")


def test_higher_version_is_refused(tmp_path: Path) -> None:
    """B139: a checkpoint that claims version 99 says which release is needed."""
    shutil.copytree(HERE / "cut", tmp_path / "cut")
    manifest = tmp_path / "cut" / "manifest-1.json"
    body = manifest.read_bytes().rsplit(b"\n", 2)[0].replace(b'"version":1', b'"version":99') + b"\n"
    from anyshard.records.digests import digest_bytes

    manifest.write_bytes(body + digest_bytes(body).encode() + b"\n")
    with pytest.raises(anyshard.UnsupportedFormat, match="99"):
        anyshard.open(tmp_path / "cut")

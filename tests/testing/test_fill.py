from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from anyshard.testing.fill import Fill, assert_same_bytes, fill, full_bytes
from anyshard.testing.ranks import CaseFailed
from anyshard.testing.training import fill_training, take_step, training_state
from anyshard.testing.world import Worlds
from tests.adapters.fake_ranks import on_each_rank
from tests.testing import layout_cases

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
OTHERS = [torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint64]
COMPLEX = [torch.complex64, torch.complex128]


def make(shape: tuple[int, ...], dtype: torch.dtype, name: str = "w", kind: Fill = Fill.BITS) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    fill(tensor, name, kind=kind)
    return tensor


def to_bytes(tensor: torch.Tensor) -> bytes:
    return full_bytes({"w": tensor})["w"]


def test_near_elements_differ() -> None:
    """No two of 2,000 bfloat16 elements are equal, as those of a range would be."""
    assert 2000 == len(np.unique(make((40, 50), torch.bfloat16).view(torch.int16).numpy()))
    assert 635 == len(np.unique(np.arange(2000).astype(ml_dtypes.bfloat16).view(np.int16)))


@pytest.mark.parametrize("dtype", [*FLOATS, *OTHERS, *COMPLEX], ids=str)
def test_bits_say_where_they_belong(dtype: torch.dtype) -> None:
    """In every dtype the fill depends on the name, and is the same for strided memory."""
    whole = make((7, 5), dtype)
    transposed = torch.empty(5, 7, dtype=dtype).t()
    fill(transposed, "w")
    assert to_bytes(whole) == to_bytes(transposed)
    assert to_bytes(whole) != to_bytes(make((7, 5), dtype, "v"))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_finite_numbers_are_of_middle_size(dtype: torch.dtype) -> None:
    """Finite fills have both signs and no number that a step could not change; positive ones have one sign."""
    finite = make((1000,), dtype, kind=Fill.FINITE).double()
    assert (True, True) == (bool((finite.abs() >= 1 / 16).all()), bool((finite.abs() < 16).all()))
    assert 0 < int((finite < 0).sum()) < 1000
    assert torch.equal(finite.abs(), make((1000,), dtype, kind=Fill.POSITIVE).double())


def test_scalars_and_empty_tensors_are_filled() -> None:
    """A 0-d tensor has the bits of position 0; a tensor without elements stays as it is."""
    assert to_bytes(make((), torch.float32)) == to_bytes(make((3,), torch.float32))[:4]
    assert b"" == to_bytes(make((0, 3), torch.float32))


@pytest.mark.parametrize("placements", [(Shard(0), Shard(1)), (Shard(1), Replicate()), (Shard(0), Shard(0))], ids=str)
def test_parts_are_filled_like_the_whole(placements: tuple[Shard | Replicate, ...]) -> None:
    """Each rank's part of a DTensor gets the bits that its elements have in the whole."""
    whole = make((7, 5), torch.complex64)

    def look() -> bool:
        mesh = init_device_mesh("cpu", (2, 2))
        part = distribute_tensor(torch.zeros(7, 5, dtype=torch.complex64), mesh, placements, src_data_rank=None)
        fill(part, "w")
        expected = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
        return torch.equal(torch.view_as_real(expected).view(torch.int32), torch.view_as_real(part.to_local()).view(torch.int32))

    assert [True] * 4 == on_each_rank(4, look)


def test_differences_are_listed() -> None:
    """Missing, unexpected and different addresses are all named, with where a difference begins."""
    with pytest.raises(AssertionError) as caught:
        assert_same_bytes({"a": b"1234", "b": b"", "c": b"12"}, {"a": b"1034", "c": b"123", "d": b""})
    expected = ["b: missing", "d: unexpected", "a: 1 of 4 bytes differ, the first at 1", "c: 3 bytes instead of 2"]
    assert expected == str(caught.value).splitlines()[1:]


def test_training_state_is_filled_and_stepped() -> None:
    """Filling makes the optimizer's state, under the addresses of a checkpoint, and a step moves on from it."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    fill_training(model, optimizer)
    state = training_state(model, optimizer)
    names = ("exp_avg", "exp_avg_sq", "step")
    addresses = [f"optimizer/state/{fqn}/{name}" for fqn in ("bias", "weight") for name in names]
    assert ["model/bias", "model/weight", *addresses] == sorted(state)
    assert 7.0 == state["optimizer/state/weight/step"].item()
    before = full_bytes(state)
    take_step(model, optimizer)
    after = full_bytes(training_state(model, optimizer))
    assert [] == [address for address in before if before[address] == after[address]]


def test_a_tensor_that_nobody_holds_whole_is_found() -> None:
    """A DTensor of which no rank gives some part has no whole."""

    def look() -> str:
        mesh = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)
        with pytest.raises(AssertionError) as caught:
            full_bytes({"w": tensor})  # the fake group gathers nothing, as if no rank held anything
        return str(caught.value)

    assert ["w: no rank holds 2 of 4 elements"] * 2 == on_each_rank(2, look)


@pytest.mark.slow
def test_differing_replicas_are_found(worlds: Worlds) -> None:
    """Ranks that hold one tensor with different elements, or as different kinds of tensor, do not go unseen."""
    with pytest.raises(CaseFailed, match="w: ranks hold different elements"):
        worlds(2).run(layout_cases.gather_differing_elements)
    with pytest.raises(CaseFailed, match="w: ranks disagree about dtype and shape"):
        worlds(2).run(layout_cases.gather_differing_shapes)

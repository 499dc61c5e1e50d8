"""What the ranks of each layout do in the tests of layouts and fills."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from anyshard.adapters.placements import regions_of
from anyshard.testing.fill import fill, full_bytes
from anyshard.testing.layouts import LAYOUTS, make_mesh
from anyshard.testing.training import fill_training, take_step, training_state


def train(name: str) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Whole tensors of a filled state, and of the same after one more step."""
    model, optimizer = LAYOUTS[name].build()
    fill_training(model, optimizer)
    before = full_bytes(training_state(model, optimizer))
    take_step(model, optimizer, seed="next ")
    return before, full_bytes(training_state(model, optimizer))


def compare_with_torch(name: str) -> list[str]:
    """Addresses at which torch's own full tensor is not what the fill makes of a whole tensor."""
    model, optimizer = LAYOUTS[name].build()
    fill_training(model, optimizer)
    wrong = []
    for address, tensor in training_state(model, optimizer).items():
        if isinstance(tensor, DTensor) and not address.endswith("exp_avg_sq"):
            fill(tensor, address)
            whole = torch.empty(tensor.shape, dtype=tensor.dtype)
            fill(whole, address)
            same = whole.view(torch.uint8), tensor.full_tensor().contiguous().view(torch.uint8)
            if not torch.equal(*same):
                wrong.append(address)
    return wrong


def gather_differing_elements() -> None:
    full_bytes({"w": torch.full((2,), dist.get_rank())})


def gather_differing_shapes() -> None:
    full_bytes({"w": torch.zeros(2 + dist.get_rank())})


def list_fsdp_over_tp(num_data: int, num_tensor: int, size: int) -> tuple[list[int], list[tuple[int, int]]]:
    """This rank's rows of a range that torch has really scattered, and the offset and length of each of its regions."""
    mesh = make_mesh(("dp", num_data), ("tp", num_tensor))
    module = nn.Module()
    module.w = nn.Parameter(distribute_tensor(torch.arange(float(size)), mesh["tp"], [Shard(0)]))
    fully_shard(module, mesh=mesh["dp"])
    tensor = module.state_dict()["w"]
    regions = regions_of(tensor, "w")
    runs = zip(regions.offsets[:, 0].tolist(), regions.lengths[:, 0].tolist(), strict=True)
    return [int(row) for row in tensor.to_local().tolist()], list(runs)

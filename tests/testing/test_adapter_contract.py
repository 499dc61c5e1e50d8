from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from anyshard.testing.adapter_contract import AdapterContract, MakeTraining
from anyshard.testing.layouts import LAYOUTS, Training, make_mesh
from tests.adapters.fake_ranks import as_rank


def make_tied() -> Training:
    """Two names for one parameter, a frozen one, one whose memory is not contiguous, and an optimizer with one moment."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    model.columns = nn.Parameter(torch.zeros(5, 2).t())
    params = [param for param in model.parameters() if param.requires_grad]
    return model, torch.optim.SGD(params, lr=0.1, momentum=0.9)


class TestPlain(AdapterContract):
    @pytest.fixture(params=[LAYOUTS["plain"].build, make_tied], ids=["odd", "tied"])
    def make_training(self, request: pytest.FixtureRequest) -> MakeTraining:
        return request.param  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp2", "fsdp3", "fsdp2 x tp2"])
class TestSpread(AdapterContract):
    """The last rank, whose shards are the odd ones: in DDP, FSDP2, and FSDP2 over TP."""

    @pytest.fixture
    def make_training(self, layout: str) -> Iterator[MakeTraining]:
        make_mesh.cache_clear()  # a mesh of another rank would tell this one the wrong coordinate
        with as_rank(LAYOUTS[layout].size - 1, LAYOUTS[layout].size):
            yield LAYOUTS[layout].build

"""How many processes take part: asked before anything else, since a job of many ranks cannot save as one process."""

from __future__ import annotations

import torch.distributed as dist

from anyshard.errors import InvalidAppState


def check_single_process() -> None:
    """Return if this process is a job of its own, or raise `InvalidAppState`."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise InvalidAppState(
            f"expected one process, found a torch.distributed job of {dist.get_world_size()} ranks: this release saves and loads "
            "the state of one process; saving on many ranks comes with the next one"
        )

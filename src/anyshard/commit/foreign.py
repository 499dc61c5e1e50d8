"""What a directory that anyshard did not write looks like, for messages. Knows other programs' file names, nothing else."""

from __future__ import annotations

import re
from collections.abc import Sequence

SHOWN = 5

# What the names look like, and what the user can do. The first match wins, so the surer signs come first.
_SIGNS = (
    (
        r"\.metadata|.*\.distcp",
        "it looks like a PyTorch DCP checkpoint: load it with torch.distributed.checkpoint and save it again with anyshard",
    ),
    (
        r"zero_to_fp32\.py|global_step\d+/|zero_pp_rank_.*|.*_optim_states\.pt",
        "it looks like a DeepSpeed checkpoint: load it with DeepSpeed and save it again with anyshard",
    ),
    (
        r"latest_checkpointed_iteration\.txt|iter_\d+/|mp_rank_\d+.*/",
        "it looks like a Megatron checkpoint: load it with Megatron and save it again with anyshard",
    ),
    (
        r"_CHECKPOINT_METADATA|_METADATA|ocdbt\.process_\d+/",
        "it looks like an Orbax checkpoint: load it with Orbax and save it again with anyshard",
    ),
    (
        r".*\.safetensors(\.index\.json)?|pytorch_model.*\.bin|config\.json",
        "it looks like a safetensors or Hugging Face model: load it with its own library and save it again with anyshard",
    ),
    (r".*\.(pt|pth|ckpt|bin)", "it looks like torch.save output: load it with torch.load and save it again with anyshard"),
    (r".*\d+/", "it looks like a directory of steps: give the path of one step, not of the run"),
)


def show_names(names: Sequence[str]) -> str:
    """A few of `names`, safe to print, with the number of those left out."""
    shown = ", ".join(ascii(name) for name in names[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"


def advise(names: Sequence[str]) -> str:
    """One clause on what foreign `names` are and what to do about them."""
    for pattern, advice in _SIGNS:
        if any(re.fullmatch(pattern, name) for name in names):
            return advice
    return "give the path of a directory that anyshard.save made, or of a new one"

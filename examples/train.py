"""A training job that can be killed at any moment: a small Llama on the sources of Python's standard library.

This is how a job uses anyshard: one app state, `anyshard.save` every few steps, and at the start `anyshard.load` from the newest
step that loads. `demo.py` runs it several times and compares; by itself:

    .venv/bin/python examples/train.py runs/a
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sysconfig
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import anyshard

SEQUENCE, BATCH, TEXT_NBYTES = 64, 8, 4_000_000
PROBE = "model.embed_tokens.weight"


class KillInMiddle:
    """An event sink that kills this process by SIGKILL when the first block of the optimizer is written."""

    def emit(self, event: anyshard.Event) -> None:
        """Take one event."""
        if event.name == "storage.blob.written" and str(event.file).startswith("data/optimizer/"):
            os.kill(os.getpid(), signal.SIGKILL)


def read_text() -> torch.Tensor:
    """Bytes of the standard library's own source files, always in the same order."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(source.read_bytes() for source in sources)[:TEXT_NBYTES]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def make_batch(text: torch.Tensor, step: int) -> torch.Tensor:
    """The batch of a step; a function of the step alone, so that a resumed job sees what the first would have seen."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(text) - SEQUENCE, (BATCH, 1), generator=generator)
    return text[starts + torch.arange(SEQUENCE)].long()


def make_app_state(num_steps: int) -> dict[str, Any]:
    """A fresh job: model, optimizer, learning rate schedule, and how far it has come."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(mode=True)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=SEQUENCE,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=num_steps)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "progress": {"step": 0, "losses": []}}


def load_newest(run: Path, app_state: dict[str, Any], *, exclude: tuple[str, ...]) -> int | None:
    """Load the newest step that loads and return its number, or None if there is none.

    `verify="first"` finds damage before anything is filled, so a damaged step leaves nothing behind in the one before.
    """
    for path in sorted(run.glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")), reverse=True):
        try:
            report = anyshard.load(path, app_state, exclude=exclude, verify="first")
        except (anyshard.CheckpointNotFound, anyshard.CheckpointDamaged) as error:
            print(f"  {path.name} is passed over: {error}")
            continue
        print(f"  {path.name} is loaded: {report.num_tensors} tensors, {report.nbytes / 1e6:.1f} MB in {report.duration_s:.2f} s")
        return report.step
    return None


def train_step(app_state: dict[str, Any], text: torch.Tensor) -> None:
    """One step of the optimizer; the progress notes the loss."""
    progress = app_state["progress"]
    batch = make_batch(text, progress["step"])
    loss = app_state["model"](input_ids=batch, labels=batch).loss
    app_state["optimizer"].zero_grad()
    loss.backward()
    app_state["optimizer"].step()
    app_state["scheduler"].step()
    progress["step"] += 1
    progress["losses"].append(loss.item())


def digest_state(app_state: dict[str, Any]) -> str:
    """SHA-256 over the bytes of all weights and moments: equal means equal bit for bit."""
    digest = hashlib.sha256()
    tensors = list(app_state["model"].state_dict().values())
    tensors += [value for moments in app_state["optimizer"].state.values() for value in moments.values()]
    for tensor in tensors:
        digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()


def run_job(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train from the newest good step to the last one, saving on the way; returns what `demo.py` compares."""
    small_blocks = anyshard.SaveOptions(block_nbytes=1 << 20)  # so that this small model too takes many writes
    app_state = make_app_state(arguments.steps)
    exclude = ("optimizer/state/**",) if arguments.fresh_moments else ()
    resumed_from = load_newest(arguments.run, app_state, exclude=exclude)
    text = read_text()
    while app_state["progress"]["step"] < arguments.steps:
        train_step(app_state, text)
        step = app_state["progress"]["step"]
        if arguments.save_every and step % arguments.save_every == 0:
            sinks = [KillInMiddle()] if step == arguments.kill_in_save_of else []
            anyshard.save(arguments.run / f"step_{step}", app_state, options=small_blocks, sinks=sinks)
    return {
        "resumed_from": resumed_from,
        "losses": app_state["progress"]["losses"],
        "digest": digest_state(app_state),
        "probe": app_state["model"].state_dict()[PROBE].flatten()[:4].tolist(),
    }


def main() -> None:
    """Read the arguments, run the job and write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="directory of the run's checkpoints")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--save-every", type=int, default=6, help="0: never")
    parser.add_argument("--kill-in-save-of", type=int, help="die by SIGKILL in the middle of this step's save")
    parser.add_argument("--fresh-moments", action="store_true", help="load everything but the optimizer's moments")
    parser.add_argument("--result", type=Path, help="file for losses and digests, as JSON")
    arguments = parser.parse_args()
    result = run_job(arguments)
    print(f"  step {arguments.steps}: loss {result['losses'][-1]:.4f}")
    if arguments.result is not None:
        arguments.result.write_text(json.dumps(result))


if __name__ == "__main__":
    main()

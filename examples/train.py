"""A training job that can be killed at any moment and resumed on other ranks: a small Llama on the sources of Python's library.

This is how a job uses anyshard: one app state and one `anyshard.Run`, which loads the newest good step at the start, saves every
few steps while training goes on, and deletes what is not to be kept. Nothing says how the model is laid out. `demo.py` runs it
several times and compares; `plain.py` and `fsdp2.py` are shorter. Stop it when you like and start it again on other ranks:

    .venv/bin/torchrun --standalone --nproc-per-node 4 examples/train.py runs/a --steps 2000 --parallelism fsdp2
    .venv/bin/torchrun --standalone --nproc-per-node 2 examples/train.py runs/a --steps 2000 --parallelism tp
    .venv/bin/python examples/train.py runs/a --steps 2000
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import logging
import sysconfig
import textwrap
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

import anyshard

SEQUENCE, BATCH, TEXT_NBYTES = 64, 8, 4_000_000
TP_PLAN = {
    "self_attn.q_proj": ColwiseParallel(),
    "self_attn.k_proj": ColwiseParallel(),
    "self_attn.v_proj": ColwiseParallel(),
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}


class HoldInMiddle:
    """An event sink that, when told to, holds a save at the first block of the optimizer, so that `demo.py` can kill it there."""

    def __init__(self) -> None:
        self.is_on = False

    def emit(self, event: anyshard.Event) -> None:
        """Take one event."""
        if self.is_on and event.name == "save.block.written" and str(event.file).startswith("data/optimizer/"):
            threading.Event().wait(timeout=60)


def tell(text: str) -> None:
    """Print it, once for all ranks."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(textwrap.indent(text, "  "), flush=True)


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


def make_model() -> LlamaForCausalLM:
    """The same fresh model on every rank."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
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


def lay_out(model: LlamaForCausalLM, parallelism: str) -> None:
    """Spread the model over all ranks; with FSDP2 each also takes its part of every batch, with TP all take the whole."""
    if parallelism == "none":
        return
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(parallelism,))
    for layer in model.model.layers:
        if parallelism == "tp":
            parallelize_module(layer, mesh, TP_PLAN)
        else:
            fully_shard(layer, mesh=mesh)
    if parallelism == "fsdp2":
        fully_shard(model, mesh=mesh)


def make_app_state(parallelism: str, num_steps: int) -> dict[str, Any]:
    """A fresh job: model, optimizer, learning rate schedule, and how far it has come. Nothing here is random once it runs."""
    model = make_model()
    lay_out(model, parallelism)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)  # foreach takes no mixture of tensors and DTensors
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=num_steps)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "progress": {"step": 0, "losses": []}}


def open_run(arguments: argparse.Namespace, hold: HoldInMiddle) -> anyshard.Run:
    """The run of this job: when it saves, what it keeps, and that SIGTERM means one last save."""
    weights = anyshard.WeightsOnly(anyshard.KeepEvery(arguments.keep_weights_every))
    return anyshard.Run(
        arguments.run,
        keep=anyshard.KeepLast(2) | weights,
        every=anyshard.EverySteps(arguments.save_every) if arguments.save_every else None,
        preemption=anyshard.Preemption(deadline_s=25),
        # Small blocks, so that this small model too takes many writes.
        options=anyshard.SaveOptions(staging=arguments.staging, block_nbytes=1 << 20),
        load_options=anyshard.LoadOptions(exclude=("optimizer/state/**",) if arguments.fresh_moments else ()),
        sinks=[hold],
    )


def train_step(app_state: dict[str, Any], text: torch.Tensor, parallelism: str) -> None:
    """One step of the optimizer; the progress notes the loss of the whole batch."""
    progress = app_state["progress"]
    batch = make_batch(text, progress["step"])
    if parallelism == "fsdp2":
        batch = batch.chunk(dist.get_world_size())[dist.get_rank()]
    loss = app_state["model"](input_ids=batch, labels=batch).loss
    app_state["optimizer"].zero_grad()
    loss.backward()
    app_state["optimizer"].step()
    app_state["scheduler"].step()
    progress["step"] += 1
    progress["losses"].append(average(loss.detach()))


def average(loss: torch.Tensor) -> float:
    """The mean over all ranks, the same on all of them."""
    if not dist.is_initialized():
        return loss.item()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def digest_state(app_state: dict[str, Any]) -> str:
    """SHA-256 over all weights and moments, each as a whole and by address: the same for the same state on any layout."""
    model, optimizer = app_state["model"], app_state["optimizer"]
    tensors = {f"model/{fqn}": tensor for fqn, tensor in model.state_dict().items()}
    for fqn, param in model.named_parameters():
        tensors |= {f"optimizer/state/{fqn}/{name}": tensor for name, tensor in optimizer.state.get(param, {}).items()}
    digest = hashlib.sha256()
    for address in sorted(tensors):
        tensor = tensors[address]
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        digest.update(whole.detach().numpy().tobytes())
    return digest.hexdigest()


def tell_loaded(report: anyshard.LoadReport | None) -> None:
    """Say which step was loaded, and which newer ones were passed over and why."""
    if report is None:
        return
    for step, reason in report.skipped:
        tell(f"step_{step} is passed over: {reason}")
    rate = f"{report.nbytes / 1e6:.1f} MB in {report.duration_s:.2f} s"
    tell(f"step_{report.step} is loaded: {report.num_tensors} tensors, {rate}")


def tell_cost(pending: anyshard.PendingSave | None) -> None:
    """Wait for a save, if there is one, until it is committed (or raise its failure), and say what it has cost."""
    if pending is None:
        return
    report = pending.result()
    rate = report.nbytes / report.duration_s
    tell(
        f"step_{report.step} is saved: {report.nbytes / 1e6:.1f} MB in {report.duration_s:.2f} s, {rate / 1e6:.0f} MB/s; "
        f"training was held for {report.stall_s:.3f} s of it"
    )


def run_job(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train from the newest good step to the last one, saving on the way; returns what `demo.py` compares."""
    app_state = make_app_state(arguments.parallelism, arguments.steps)
    text, hold = read_text(), HoldInMiddle()
    with open_run(arguments, hold) as run:
        report = run.restore_or_init(app_state)
        tell_loaded(report)
        digest, progress, last = digest_state(app_state), app_state["progress"], None
        while progress["step"] < arguments.steps and not run.should_stop:
            train_step(app_state, text, arguments.parallelism)
            if progress["step"] == arguments.hold_in_save_of:
                tell_cost(last)  # or it might be held instead
                last, hold.is_on = None, True
            pending = run.end_step(progress["step"], app_state, metrics={"loss": progress["losses"][-1]})
            if pending is not None:
                tell_cost(last)  # the save before, which is over by now: one at a time is under way
                last = pending
        tell_cost(last)
    return {"resumed_from": report and report.step, "digest": digest, "losses": progress["losses"]}


def main() -> None:
    """Read the arguments, run the job and write what came of it beside the run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="directory of the run's checkpoints")
    parser.add_argument("--parallelism", choices=("fsdp2", "tp", "none"), default="none", help="none: one process")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=5, help="0: never")
    parser.add_argument("--keep-weights-every", type=int, default=100, help="keep at least the weights of these steps")
    parser.add_argument(
        "--staging", choices=("lazy", "eager"), default="lazy", help="when a save copies the state; see docs/async.md"
    )
    parser.add_argument("--hold-in-save-of", type=int, help="stay in the middle of this step's save, to be killed there")
    parser.add_argument("--fresh-moments", action="store_true", help="load everything but the optimizer's moments")
    arguments = parser.parse_args()
    logging.getLogger("anyshard").setLevel(
        logging.ERROR
    )  # else it warns that non-persistent buffers, as Llama has, are not stored
    if arguments.parallelism != "none":
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    result = run_job(arguments)
    tell(f"step {len(result['losses'])}: loss {result['losses'][-1]:.4f}")
    if not dist.is_initialized() or dist.get_rank() == 0:
        arguments.run.with_suffix(".json").write_text(json.dumps(result))
    if dist.is_initialized():
        gc.collect()  # what a cycle still holds of the process group would end with the interpreter, which may abort then
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""The show behind `make demo`: a job is killed in the middle of a save, resumes, and ends as if nothing had happened.

Runs `train.py` four times: undisturbed; killed by SIGKILL while it saves; resumed; resumed with fresh optimizer moments, to show
that the moments matter. Then reads the last checkpoint without torch. Exit code 1 if one of the claims is false.
"""

from __future__ import annotations

import io
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyshard

STEPS, SAVE_EVERY, KILLED_AT = 30, 6, 18
LAST_GOOD = KILLED_AT - SAVE_EVERY
SHOWN = (
    "model/model.embed_tokens.weight",
    "model/model.layers.0.self_attn.q_proj.weight",
    "optimizer/state/model.layers.3.mlp.down_proj.weight/exp_avg_sq",
)


@dataclass(frozen=True, slots=True)
class Claim:
    """Something that the demo shows, and whether it was true."""

    text: str
    holds: bool


def start(run: Path, *options: str) -> int:
    """Run the job in a process of its own to its end; its return code (minus the signal, if it was killed)."""
    command = [sys.executable, str(Path(__file__).with_name("train.py")), str(run), "--steps", str(STEPS)]
    return subprocess.run([*command, *options], check=False).returncode


def train(run: Path, *options: str) -> dict[str, Any]:
    """Run the job to its end and return its result."""
    result = run.parent / f"{run.name}.json"
    code = start(run, "--result", str(result), *options)
    if code != 0:
        sys.exit(f"FAILED  train.py was expected to finish, and ended with {code}; its error is above")
    outcome: dict[str, Any] = json.loads(result.read_text())
    return outcome


def list_files(step: Path) -> list[str]:
    """Names of all files of a step's directory."""
    return sorted(str(path.relative_to(step)) for path in step.rglob("*") if path.is_file())


def print_curves(straight: list[float], resumed: list[float], fresh: list[float]) -> None:
    """All three loss curves side by side."""
    print("\n  step  uninterrupted  killed, resumed  fresh moments")
    for step, losses in enumerate(zip(straight, resumed, fresh, strict=True), start=1):
        saved = "  saved" if step % SAVE_EVERY == 0 else ""
        note = {LAST_GOOD: "  saved; resumed from here", KILLED_AT: "  killed in the middle of this save"}.get(step, saved)
        print("  {:4d}  {:13.6f}  {:15.6f}  {:13.6f}".format(step, *losses) + note)


def kill_and_resume(work: Path) -> list[Claim]:
    """The story of one job that dies and comes back, beside one that does not."""
    save_every = ("--save-every", str(SAVE_EVERY))
    print(f"1. {STEPS} steps undisturbed")
    straight = train(work / "straight", "--save-every", "0")
    print(f"2. the same job, killed while it saves step {KILLED_AT}")
    code = start(work / "run", *save_every, "--kill-in-save-of", str(KILLED_AT))
    left = list_files(work / "run" / f"step_{KILLED_AT}")
    print("  left behind:", *left)
    shutil.copytree(work / "run", work / "fresh")
    print("3. started again")
    resumed = train(work / "run", *save_every)
    print("4. started again, but with fresh optimizer moments")
    fresh = train(work / "fresh", "--save-every", "0", "--fresh-moments")
    print_curves(straight["losses"], resumed["losses"], fresh["losses"])
    same = LAST_GOOD + 1  # the first loss after resuming is computed before the moments are used
    return [
        Claim("the job was killed by SIGKILL in the middle of a save", code == -signal.SIGKILL and has_blobs_only(left)),
        Claim(
            f"it resumed from step {LAST_GOOD}, the last good one",
            (resumed["resumed_from"], fresh["resumed_from"]) == (LAST_GOOD,) * 2,
        ),
        Claim("interrupted and uninterrupted losses are equal bit for bit", straight["losses"] == resumed["losses"]),
        Claim("so are all weights and moments at the end", straight["digest"] == resumed["digest"]),
        Claim(
            "with fresh moments it is another run: the losses differ from the second step on",
            straight["losses"][:same] == fresh["losses"][:same] and straight["losses"][same:] != fresh["losses"][same:],
        ),
        show_offline(work / "run" / f"step_{STEPS}", resumed["probe"]),
    ]


def has_blobs_only(files: list[str]) -> bool:
    """Whether a step has data and no manifest: it was begun, and does not exist."""
    return any(file.startswith("data/") for file in files) and not any(file.startswith("manifest-") for file in files)


def show_offline(step: Path, probe: list[float]) -> Claim:
    """Read three tensors of a checkpoint without torch, and compare one with what the job had."""
    checkpoint = anyshard.open(step)
    print(f"\n5. {step.name} read offline: {len(list(checkpoint.addresses()))} addresses, step {checkpoint.step}")
    for address in SHOWN:
        stored = checkpoint[address]
        print(f"  {address}  {stored.dtype}  {tuple(stored.shape)}  {stored[0:1].flatten()[:4].tolist()}")
    same = checkpoint[SHOWN[0]][0:1].flatten()[:4].tolist() == probe
    return Claim("the checkpoint was read without torch, and holds what the job had", same and "torch" not in sys.modules)


def main() -> int:
    """Tell the story in a directory that goes away; 0 if all claims hold."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # so that our lines and those of the children come in order
    with tempfile.TemporaryDirectory(prefix="anyshard-demo-") as work:
        claims = kill_and_resume(Path(work))
    print()
    for claim in claims:
        print(f"  {'ok    ' if claim.holds else 'FAILED'}  {claim.text}")
    return int(not all(claim.holds for claim in claims))


if __name__ == "__main__":
    sys.exit(main())

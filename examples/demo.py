"""The show behind `make demo`: a job on 4 processes is killed in the middle of a save and goes on on 2, laid out in another way.

Runs `train.py` four times under torchrun: on 4 processes with FSDP2, undisturbed; the same, saving while it trains, killed by
SIGKILL in the middle of a save; resumed on 2 processes with tensor parallelism; and once more with fresh optimizer moments, to
show what a wrong state would look like. Then reads the checkpoint that crossed over without torch, and shows what the run has
kept of its steps. Exit code 1 if one of the claims is false.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import anyshard

STEPS, SAVE_EVERY, KILLED_AT = 20, 5, 15
LAST_GOOD = KILLED_AT - SAVE_EVERY
SAVING = ("--save-every", str(SAVE_EVERY), "--keep-weights-every", str(2 * SAVE_EVERY))
NUM_PROCESSES = {"fsdp2": 4, "tp": 2}
TOLERANCE = 1e-3  # relative; layouts add floats in another order, which shows at about 1e-7
TIMEOUT_S = 120
SHOWN = (
    "model/model.embed_tokens.weight",
    "model/model.layers.0.self_attn.q_proj.weight",
    "optimizer/state/model.layers.3.mlp.down_proj.weight/exp_avg_sq",
)

Job: TypeAlias = subprocess.Popen[bytes]


@dataclass(frozen=True, slots=True)
class Claim:
    """Something that the demo shows, and whether it was true."""

    text: str
    holds: bool


# Jobs ------------------------------------------------------------------------------------------------------------------


@contextmanager
def launch(run: Path, parallelism: str, *options: str) -> Iterator[Job]:
    """Start train.py on its processes; none of them outlives the `with` block."""
    size = ("--nproc-per-node", str(NUM_PROCESSES[parallelism]))
    arguments = ("--parallelism", parallelism, "--steps", str(STEPS), *options)
    print("  $ torchrun", *size, "train.py", run.name, *arguments)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", *size)
    script = str(Path(__file__).with_name("train.py"))
    job = subprocess.Popen([*torchrun, script, str(run), *arguments], env={"OMP_NUM_THREADS": "1", **os.environ})
    try:
        yield job
    finally:
        kill(job)


def kill(job: Job) -> None:
    """Kill torchrun and all its ranks by SIGKILL, and return when they are gone."""
    if job.poll() is not None:
        return
    job.send_signal(signal.SIGSTOP)  # it reaps nobody now, so the ids below stay those of its ranks
    ranks = map(int, Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split())
    processes = [os.pidfd_open(pid) for pid in (job.pid, *ranks)]
    for process in processes:
        signal.pidfd_send_signal(process, signal.SIGKILL)
    for process in processes:
        select.select([process], [], [], TIMEOUT_S)
        os.close(process)


def train(run: Path, parallelism: str, *options: str) -> dict[str, Any]:
    """Run the job to its end and return its result."""
    with launch(run, parallelism, *options) as job:
        code = job.wait(TIMEOUT_S)
    if code != 0:
        sys.exit(f"FAILED  train.py was expected to finish, and ended with {code}; its error is above")
    outcome: dict[str, Any] = json.loads(run.with_suffix(".json").read_text())
    return outcome


def kill_in_save(run: Path) -> int:
    """Run the job on FSDP2 and kill all its processes in the middle of a save; the return code of torchrun."""
    with launch(run, "fsdp2", *SAVING, "--hold-in-save-of", str(KILLED_AT)) as job:
        deadline = time.monotonic() + TIMEOUT_S
        while len(list(run.glob(f"step_{KILLED_AT}/data/optimizer/*"))) < NUM_PROCESSES["fsdp2"]:
            if time.monotonic() > deadline or has_ended(job):
                sys.exit(f"FAILED  every rank was expected to begin its file of step {KILLED_AT}, but not all did; see above")
        kill(job)
        return job.wait(TIMEOUT_S)


def has_ended(job: Job) -> bool:
    """Whether the job has ended; looks for a twentieth of a second."""
    try:
        job.wait(0.05)
    except subprocess.TimeoutExpired:
        return False
    return True


# The show --------------------------------------------------------------------------------------------------------------


def kill_and_resume(work: Path) -> list[Claim]:
    """The story of one job that dies and comes back smaller, beside one that does not."""
    print(f"1. {STEPS} steps on 4 processes with FSDP2, undisturbed")
    straight = train(work / "straight", "fsdp2", "--save-every", "0")
    print(f"\n2. the same job, which saves while it trains; all its processes are killed in the save of step {KILLED_AT}")
    code = kill_in_save(work / "run")
    left = list_files(work / "run" / f"step_{KILLED_AT}")
    print(f"  killed. Left behind: {len(left)} files like {left[-1]}, and no manifest: step_{KILLED_AT} does not exist")
    shutil.copytree(work / "run", work / "fresh")
    print("\n3. resumed on 2 processes with tensor parallelism")
    resumed = train(work / "run", "tp", *SAVING)
    print("\n4. the same, but with fresh optimizer moments")
    fresh = train(work / "fresh", "tp", "--save-every", "0", "--fresh-moments")
    origins = (resumed["resumed_from"], fresh["resumed_from"])
    return [
        Claim("all processes were killed in the middle of a save", code == -signal.SIGKILL and has_blobs_only(left)),
        Claim(f"the job resumed from step {LAST_GOOD}, the last good one", origins == (LAST_GOOD, LAST_GOOD)),
        compare_state(work / "fresh", resumed["digest"]),
        look_at_kept(work / "run"),
        *compare_curves(straight["losses"], resumed["losses"], fresh["losses"]),
    ]


def list_files(step: Path) -> list[str]:
    """Names of all files of a step's directory."""
    return sorted(str(path.relative_to(step)) for path in step.rglob("*") if path.is_file())


def has_blobs_only(files: list[str]) -> bool:
    """Whether a step has data and no manifest: it was begun, and does not exist."""
    return any(file.startswith("data/") for file in files) and not any(file.startswith("manifest-") for file in files)


def compare_state(copy: Path, digest_of_ranks: str) -> Claim:
    """Read the checkpoint that was resumed from, without torch, in the copy of the run, and compare it with what ranks got."""
    checkpoint = anyshard.open(copy / f"step_{LAST_GOOD}")
    print(f"\n5. step_{LAST_GOOD} read offline, in this process, without torch: ", end="")
    print(f"{len(checkpoint)} tensors, saved by {checkpoint.manifest.world_size} processes")
    for address in SHOWN:
        stored = checkpoint[address]
        print(f"    {address}  {stored.dtype}  {stored.shape}  {stored[0, :3]}")
    digest = hashlib.sha256()
    for address in checkpoint.addresses():
        digest.update(checkpoint[address].numpy().tobytes())
    return Claim(
        "what 2 processes loaded is what 4 had saved, bit for bit, as this process reads it without torch",
        digest.hexdigest() == digest_of_ranks and "torch" not in sys.modules,
    )


def look_at_kept(run: Path) -> Claim:
    """Print the steps that are left of the run, and compare them with what it was told to keep."""
    steps = anyshard.Run(run).steps()
    print("\n6. what the run has kept: the last two steps, and the weights of every tenth")
    for step in steps:
        print(f"  step_{step.step}: {sum(step.section_nbytes.values()) / 1e6:.1f} MB of {', '.join(step.sections)}")
    kept = {step.step: set(step.sections) == {"model"} for step in steps}
    return Claim(
        f"retention has deleted step {SAVE_EVERY} and left only the weights of step {LAST_GOOD}; newer ones are whole",
        kept == {LAST_GOOD: True, KILLED_AT: False, STEPS: False},
    )


def compare_curves(straight: list[float], resumed: list[float], fresh: list[float]) -> list[Claim]:
    """Print all three loss curves side by side, and compare the resumed ones with the undisturbed one."""
    print("\n  step  undisturbed  killed, resumed  difference  fresh moments  difference")
    for step, losses in enumerate(zip(straight, resumed, fresh, strict=True), start=1):
        one, two, three = losses
        saved = "  saved" if step % SAVE_EVERY == 0 else ""
        note = {LAST_GOOD: "  saved; resumed from here", KILLED_AT: "  killed in the middle of its save"}.get(step, saved)
        print(f"  {step:4d}  {one:11.6f}  {two:15.6f}  {differ(one, two):10.1e}  {three:13.6f}  {differ(one, three):10.1e}{note}")
    after = slice(LAST_GOOD, STEPS)
    same = list(map(differ, straight[after], resumed[after]))
    other = list(map(differ, straight[after], fresh[after]))
    return [
        Claim(
            f"its {len(same)} losses differ by at most {max(same):.1e} from the undisturbed ones; {TOLERANCE} is allowed",
            all(difference <= TOLERANCE for difference in same),
        ),
        Claim(f"with fresh moments it is another run: they differ by up to {max(other):.1e}", max(other) > TOLERANCE),
    ]


def differ(expected: float, actual: float) -> float:
    """The relative difference of two losses."""
    return abs(actual - expected) / expected


def main() -> int:
    """Tell the story in a directory that goes away; 0 if all claims hold."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that on the way out children are killed, as after Ctrl-C
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

"""Hostile records against the decoders: `python tests/hostile/fuzz.py --rounds 100000 --seed 1`.

Damages manifests, tails, indexes, heads and values, signs them again and decodes them in a child process with limited
memory. Nothing but an error of anyshard (or success) may come out: no other exception, no crash, no hang, no big memory.
Every round can be repeated from its seed and number.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_RSS_MIB = 300
MAX_ROUND_MS = 20_000
WRITE_BOMBS = "import sys, pathlib; from tests.hostile.cases import write_bombs; write_bombs(pathlib.Path(sys.argv[1]))"


def fuzz(rounds: int, seed: int, *, timeout_s: float) -> dict[str, object]:
    """Run the child and return its report; `passed` says whether every line of it is as it should be."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "progress").write_bytes(bytes(8))
        _run_python(["-c", WRITE_BOMBS, str(folder / "bombs")], timeout_s=120).check_returncode()
        try:
            child = _run_python(["-m", "tests.hostile.child", str(rounds), str(seed), name], timeout_s=timeout_s)
            code, output, errors = child.returncode, child.stdout, child.stderr
        except subprocess.TimeoutExpired:
            code, output, errors = -1, "", f"not done after {timeout_s} s"
        last = int.from_bytes((folder / "progress").read_bytes(), "little")
    if code != 0:
        return {"passed": False, "exit_code": code, "last_round": last, "errors": errors[-3000:]}
    report = json.loads(output)
    passed = not report["failures"] and report["max_rss_mib"] < MAX_RSS_MIB and report["slowest_ms"] < MAX_ROUND_MS
    passed = passed and report["refused"] + report["accepted"] == rounds
    return {"passed": passed, "rounds": rounds, "seed": seed} | report


def _run_python(arguments: list[str], *, timeout_s: float) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "ARROW_DEFAULT_MEMORY_POOL": "system",
    }
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def main() -> int:
    """Parse the command line, fuzz, print the report; 0 if all is well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout-s", type=float, default=3600.0)
    options = parser.parse_args()
    report = fuzz(options.rounds, options.seed, timeout_s=options.timeout_s)
    print(json.dumps(report, indent=2))
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())

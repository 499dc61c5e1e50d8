"""The process that decodes hostile records under limited memory, and says on one line of JSON how it went."""

from __future__ import annotations

import faulthandler
import json
import mmap
import resource
import sys
import time
import traceback
from pathlib import Path

from anyshard.errors import AnyshardError
from tests.hostile.cases import Samples, decode, make_case, make_samples

MAX_ADDRESS_SPACE = 1 << 30
HANG_S = 60.0
MAX_FAILURES = 5


def run(rounds: int, seed: int, samples: Samples, progress: mmap.mmap) -> dict[str, object]:
    """Decode `rounds` records; only success and errors of anyshard count as right."""
    refused, accepted, slowest, failures = 0, 0, (0.0, 0, ""), []
    for number in range(rounds):
        progress[:8] = number.to_bytes(8, "little")
        case = make_case(samples, seed, number)
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        started = time.perf_counter()
        try:
            decode(case)
            accepted += 1
        except AnyshardError:
            refused += 1
        except BaseException:  # noqa: BLE001 - whatever else comes out is what this test looks for
            failures.append({"round": number, "kind": case[0], "error": traceback.format_exc()[-1500:]})
        slowest = max(slowest, (round((time.perf_counter() - started) * 1000, 1), number, case[0]))
        if len(failures) >= MAX_FAILURES:
            break
    faulthandler.cancel_dump_traceback_later()
    names = ("slowest_ms", "slowest_round", "slowest_kind")
    return {"refused": refused, "accepted": accepted, "failures": failures} | dict(zip(names, slowest, strict=True))


def main(rounds: int, seed: int, folder: Path) -> None:
    """Limit the memory, run, and print the report."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_SPACE, MAX_ADDRESS_SPACE))
    samples = make_samples(folder / "bombs")
    with (folder / "progress").open("r+b") as file, mmap.mmap(file.fileno(), 8) as progress:
        started = time.perf_counter()
        report = run(rounds, seed, samples, progress)
        report["ms_per_round"] = round((time.perf_counter() - started) * 1000 / rounds, 3)
    report["max_rss_mib"] = peak_rss_mib()
    print(json.dumps(report))


def peak_rss_mib() -> int:
    """Peak resident memory of this process; unlike ru_maxrss it does not begin with that of the parent."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) // 1024


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))

"""Measure how long `import anyshard` takes in fresh interpreters; fails at 0.2 s (design.md, acceptance of issue 1).

The figure is the time that the import adds to an interpreter that is already up. One JSON line.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

LIMIT_S = 0.2
REPEATS = 11
CHILD = "import time; started = time.perf_counter(); import anyshard; print(time.perf_counter() - started)"


def measure_once() -> float:
    """Seconds of one import in an interpreter of its own."""
    return float(subprocess.run([sys.executable, "-c", CHILD], check=True, capture_output=True, text=True).stdout)


def main() -> int:
    """Print the figures; exit 1 when the median is at or above the limit."""
    seconds = [measure_once() for _ in range(REPEATS)][1:]  # the first may write byte code
    median = statistics.median(seconds)
    figures = {"bench": "import anyshard", "median_s": round(median, 4), "max_s": round(max(seconds), 4), "limit_s": LIMIT_S}
    print(json.dumps(figures))
    return int(median >= LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())

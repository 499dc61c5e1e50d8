"""Starting and ending the Python processes of tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection

_END_TIMEOUT_S = 20.0


def start_python(module: str, *arguments: str, output: int, keep: Collection[int] = ()) -> subprocess.Popen[bytes]:
    """Start `python -m module` with this process's import path and one OpenMP thread; it inherits the descriptors in `keep`."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    # `env`, so that the environment, which may hold what a test wants to be there, is passed on without being read here.
    command = ["env", "OMP_NUM_THREADS=1", f"PYTHONPATH={path}", sys.executable, "-m", module, *arguments]
    return subprocess.Popen(  # noqa: S603 - our own interpreter and modules
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=tuple(keep), start_new_session=True
    )


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process that is about to end, and kill it if that takes long."""
    try:
        process.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

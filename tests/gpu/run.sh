#!/usr/bin/env bash
# Checks on one GPU what no other machine can show: copies beside the training, pinned memory, streams, captured graphs. Takes a
# minute or two. Ends with 0 and "no GPU: nothing checked" where there is none.
#
# With a GPU in this machine: a torch built for CUDA, then `PYTHON=that/python tests/gpu/run.sh` (.venv has a torch for CPUs).
#
# On a borrowed machine that has torch, pytest, hypothesis, numpy, pyarrow, xxhash and ml_dtypes, but no network, bring the rest
# along (here for Python 3.12 on x86-64) in a folder `wheels` at the root of the checkout, which run.sh installs out of reach of
# all else:
#     pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux2014_x86_64 -d wheels \
#         msgspec zstandard pytest-timeout
#     tests/gpu/run.sh
# Arguments are given to pytest: `tests/gpu/run.sh -k torn`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python="${PYTHON:-.venv/bin/python}"
if [[ -z "${PYTHON:-}" && ! -x "$python" ]]; then python=python3; fi

found="$("$python" -c 'import torch; print(torch.__version__, torch.cuda.is_available())')"
if [[ "$found" != *" True" ]]; then
    echo "no GPU: nothing checked (torch ${found% *} of $python)"
    exit 0
fi

packages="$(mktemp -d)"
trap 'rm -rf "$packages"' EXIT
if compgen -G "wheels/*.whl" >/dev/null; then
    "$python" -m pip install --quiet --no-index --no-deps --target "$packages" wheels/*.whl
fi

# Warnings of a torch that nobody here has chosen are shown, not failed on.
export PYTHONPATH="src:$packages${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"
"$python" -m pytest -W default -p no:cacheprovider --durations=5 tests/gpu \
    tests/engine/test_stage.py::test_tensors_on_cuda_arrive "$@"

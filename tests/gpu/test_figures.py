"""What copies from a GPU and saves of its state cost there: figures are shown, only what must hold is asserted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
import torch

import anyshard
from anyshard.engine.arena import ArenaPool
from anyshard.engine.stage import register_pages
from anyshard.storage.memory import MemoryStore
from tests.background.scenes import EAGER, LAZY, SOON_S
from tests.gpu import scenes
from tests.gpu.scenes import DEVICE, make_state, train

if not torch.cuda.is_available():
    pytest.skip("needs a GPU: tests/gpu/run.sh says how to check on one", allow_module_level=True)

NBYTES = 1 << 30


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield from scenes.finish_all()


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Prints a line that is seen though the test succeeds."""

    def print_line(text: str) -> None:
        with capsys.disabled():
            print(f"\n  {text}", end="")

    return print_line


def measure_copy(pool: ArenaPool, source: torch.Tensor) -> tuple[bool, float]:
    """Whether memory of the pool is pinned, and bytes per second of the best of three copies into it."""
    target = torch.frombuffer(pool.take(source.nbytes).memory, dtype=torch.uint8)[: source.nbytes]
    durations = []
    for _ in range(3):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        durations.append(time.perf_counter() - began_s)
    assert torch.equal(target[::4096], source[::4096].cpu())
    return target.is_pinned(), source.nbytes / min(durations)


def test_the_rate_of_copies_into_pinned_memory(show: Callable[[str], None]) -> None:
    """Arenas of a process that uses CUDA are pinned; the same copy into memory that is not is shown beside."""
    source = torch.randint(0, 255, (NBYTES,), dtype=torch.uint8, device=DEVICE)
    with closing(ArenaPool(register=register_pages)) as pinned, closing(ArenaPool()) as pageable:
        (is_pinned, rate), (is_other_pinned, other_rate) = (measure_copy(pool, source) for pool in (pinned, pageable))
    show(f"device to arena: {rate / 1e9:.1f} GB/s; to memory that is not pinned: {other_rate / 1e9:.1f} GB/s")
    assert (True, False) == (is_pinned, is_other_pinned)


@pytest.mark.parametrize("options", [LAZY, EAGER], ids=["lazy", "eager"])
def test_the_stall_of_saves(options: anyshard.SaveOptions, show: Callable[[str], None]) -> None:
    """The second and later saves of a state of 1.2 GB hold the training no longer than they take."""
    state, stalls = make_state(width=7168), []
    for number in range(4):
        torch.cuda.synchronize()
        pending = anyshard.async_save(MemoryStore(url=f"memory:{number}/step_1"), state, options=options)
        call_s = pending.stall_s
        train(state)
        report = pending.committed(SOON_S)
        stalls.append((call_s, report.stall_s, report.duration_s))
    call_s, stall_s, duration_s = min(stalls[1:])
    show(f"{options.staging}, {report.nbytes / 1e9:.1f} GB: call {call_s:.4f} s, stall {stall_s:.4f} s of {duration_s:.2f} s")
    assert 0 < call_s <= stall_s <= duration_s

"""Every flipped bit and every cut of every file of a checkpoint is found at load."""

from __future__ import annotations

import pytest
import torch

from tests.damage.tiny import cut, flipped, is_detected, load_files, save_tiny


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return save_tiny()


def test_whole_files_load(files: dict[str, bytes]) -> None:
    """The control: the undamaged files load, so that what follows can fail."""
    state = load_files(files)
    assert 7 == state["extra"]["tokens"]
    assert torch.equal(torch.full((3, 5), 7.0), state["model"]["weight"])


@pytest.mark.slow
def test_flipped_bits_are_found(files: dict[str, bytes]) -> None:
    """In each file, flipping one bit (every 19th: each place in a byte in turn) makes the load fail."""
    undetected = [(name, bit) for name in files for bit, damaged in flipped(files, name, step=19) if not is_detected(damaged)]
    assert [] == undetected


@pytest.mark.slow
def test_cut_files_are_found(files: dict[str, bytes]) -> None:
    """In each file, cutting the end off (every 7th length) makes the load fail."""
    undetected = [(name, length) for name in files for length, damaged in cut(files, name, step=7) if not is_detected(damaged)]
    assert [] == undetected


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_flipped_bit_and_every_cut_is_found(files: dict[str, bytes]) -> None:
    """In each file, every single bit and every single length makes the load fail."""
    undetected = [
        (name, where)
        for name in files
        for make in (flipped, cut)
        for where, damaged in make(files, name)
        if not is_detected(damaged)
    ]
    assert [] == undetected


def test_missing_files_are_found(files: dict[str, bytes]) -> None:
    """A file that is not there makes the load fail."""
    for name in files:
        assert is_detected({key: data for key, data in files.items() if key != name}), name

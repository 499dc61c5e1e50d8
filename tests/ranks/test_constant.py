"""What a hundred saves leave behind in the job."""

from __future__ import annotations

from pathlib import Path

import pytest

from anyshard.testing.world import Worlds
from tests.ranks import agreement_cases

pytestmark = pytest.mark.slow


def test_a_hundred_saves(worlds: Worlds, tmp_path: Path) -> None:
    """Keys in the store, threads, descriptors and process groups are as many after 100 as after 10."""
    for early, late in worlds(4).run(agreement_cases.save_often, str(tmp_path / "step_1"), [10, 100]):
        assert early == late

"""Pytest fixtures to import into a conftest: `worlds` and `launch`, whose processes end with the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from anyshard.testing.launch import Launcher
from anyshard.testing.world import Worlds


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """Long-lived ranks by world size: `worlds(4).run(case, *args)`."""
    made = Worlds()
    yield made
    made.close()


@pytest.fixture(scope="session")
def launch() -> Iterator[Launcher]:
    """Processes for one test that it may kill and stop: use what this gives in a `with` block."""
    launcher = Launcher()
    yield launcher
    launcher.close()

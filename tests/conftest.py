"""What all tests share: hypothesis profiles and a clean environment."""

from __future__ import annotations

import logging
import os

import pytest
from hypothesis import HealthCheck, settings

from anyshard.options import ENVIRONMENT
from anyshard.testing.fixtures import launch, worlds
from tests.servers import azurite, moto_s3, seaweedfs

__all__ = ["azurite", "launch", "moto_s3", "seaweedfs", "worlds"]

# Failed asserts of the shipped contract are explained as those of any test module.
pytest.register_assert_rewrite("anyshard.testing.store_blobs", "anyshard.testing.store_names")

# Two shared cores: the time of one example says nothing, so there is no deadline. CI runs the same examples every time.
settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("ci", settings.get_profile("here"), derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "here")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)


def pytest_unconfigure() -> None:
    """What is freed only now may still log; pytest's closing line shall be the last one all the same."""
    logging.lastResort = logging.NullHandler()

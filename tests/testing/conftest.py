"""The processes that these tests share."""

from __future__ import annotations

from anyshard.testing.fixtures import launch, worlds

__all__ = ["launch", "worlds"]

"""Fixtures of the tests of operations."""

from __future__ import annotations

from tests.storage.conftest import quick_path

__all__ = ["quick_path"]

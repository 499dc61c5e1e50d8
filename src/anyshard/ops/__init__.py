"""Offline operations as functions: `clean`, `delete`, later copy, verify, diff and more. Faces (CLI, web) call these."""

from __future__ import annotations

from anyshard.ops.clean import CleanReport, clean
from anyshard.ops.delete import delete

__all__ = ["CleanReport", "clean", "delete"]

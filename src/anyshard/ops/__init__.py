"""Offline operations as functions: `clean`, `copy`, `delete`, later verify, diff and more. Faces (CLI, web) call these."""

from __future__ import annotations

from anyshard.ops.clean import CleanReport, clean
from anyshard.ops.copy import CopyReport, copy
from anyshard.ops.delete import delete

__all__ = ["CleanReport", "CopyReport", "clean", "copy", "delete"]

"""Metrics of a step: where a record holds them, how they get there, and how they are read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from anyshard.errors import InvalidOption
from anyshard.options import SaveOptions

_MEMBER: Final = "metrics"  # of the user's metadata
_ODD_VALUES: Final = frozenset({"nan", "inf", "-inf"})  # JSON has no such numbers


def with_metrics(options: SaveOptions, metrics: Mapping[str, float]) -> SaveOptions:
    """The options of a save that stores these metrics with the step, for `KeepBest` and for people."""
    return replace(options, user={**options.user, _MEMBER: check_metrics(metrics)}) if metrics else options


def check_metrics(metrics: Mapping[str, object]) -> dict[str, Any]:
    """Metrics as a record can hold them. Raises `InvalidOption` for what is no number."""
    if not isinstance(metrics, Mapping):
        raise InvalidOption(f"metrics: expected a mapping of names to numbers, found {type(metrics).__name__}")
    return {name: _store_number(name, value) for name, value in metrics.items()}


def read_metrics(user: Mapping[str, object]) -> dict[str, float]:
    """The metrics in the user's metadata of a record; what is no number is passed over."""
    metrics = user.get(_MEMBER)
    found = metrics.items() if isinstance(metrics, dict) else ()
    return {name: float(value) for name, value in found if _is_number(value)}


def _store_number(name: object, value: object) -> int | float | str:
    """A metric as a record can hold it; a loss that is not finite must not end the training."""
    if type(value) is int:
        return value
    try:
        number = float(value)  # type: ignore[arg-type]  # whatever has a number: a tensor of one element, a NumPy scalar
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidOption(f"metrics: {name!r}: expected a number, found {type(value).__name__} ({error})") from error
    return number if math.isfinite(number) else str(number)


def _is_number(value: object) -> bool:
    return value in _ODD_VALUES if isinstance(value, str) else isinstance(value, (int, float)) and not isinstance(value, bool)

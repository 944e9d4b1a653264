"""Recorded JSON read with care: a value of the wrong shape counts as absent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def mapping(value: Any) -> Mapping[str, Any]:
    """The value when it is an object, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def items(value: Any) -> list[Any]:
    """The value when it is a list, else an empty one."""
    return list(value) if isinstance(value, list | tuple) else []


def records(value: Any) -> list[Mapping[str, Any]]:
    """The objects in a list; everything else in it is left out."""
    return [entry for entry in items(value) if isinstance(entry, Mapping)]


def number(value: Any) -> float | None:
    """The value as a float when it is a number (bool is none), else None."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

"""Recorded runs -> statistics, figures, tables, report. Reads files only, never a live run.

`from analysis import load, stats, figures` is enough for a notebook: `load("results/clip_ablation")` gives
the tables, `stats` the numbers, `figures` the drawings. Matplotlib is imported with `figures`, not before.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from analysis.load import Results, load

if TYPE_CHECKING:
    from analysis import figures, stats, tables

__all__ = ["Results", "figures", "load", "stats", "tables"]


def __getattr__(name: str) -> Any:
    if name in ("figures", "stats", "tables"):
        return importlib.import_module(f"analysis.{name}")
    raise AttributeError(f"module 'analysis' has no attribute {name!r}")

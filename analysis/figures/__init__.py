"""Figures, one function each: `function(results, figure) -> DataFrame of the plotted numbers`.

`FIGURES[name].draw(results, "double")` gives a finished matplotlib Figure and its numbers, and
`analysis.style.save` writes it. Nothing here touches pyplot.
"""

from __future__ import annotations

from analysis.figures.comparisons import (
    accuracy_entropy,
    clip_fraction,
    dynamic_sampling,
    overlong,
    reward_parts,
)
from analysis.figures.curves import curve_figure, metric_panel
from analysis.figures.ladder import dapo_ladder
from analysis.figures.mechanism import entropy_prediction
from analysis.figures.objective import clip_objective
from analysis.figures.registry import FIGURES, FigureSpec
from analysis.figures.run_panels import dashboard
from analysis.figures.searches import search
from analysis.figures.stops import stop_map

__all__ = [
    "FIGURES",
    "FigureSpec",
    "accuracy_entropy",
    "clip_fraction",
    "clip_objective",
    "curve_figure",
    "dapo_ladder",
    "dashboard",
    "dynamic_sampling",
    "entropy_prediction",
    "metric_panel",
    "overlong",
    "reward_parts",
    "search",
    "stop_map",
]

"""Which figures there are, what each needs, and for which sweeps it is drawn by default."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from analysis.load import Results
from analysis.style import drawing, new_figure

Draw = Callable[..., pd.DataFrame]


@dataclass(frozen=True)
class FigureSpec:
    """One figure: `function(results, figure, **options)` draws it and returns the plotted numbers.

    `needs` are the metrics it is about, `default_for(results)` says whether a sweep's report shows it unasked,
    `heights` are inches per column width.
    """

    name: str
    function: Draw
    title: str
    caption: str
    needs: tuple[str, ...] = ()
    default_for: Callable[[Results], bool] = lambda results: False
    heights: Mapping[str, float] = field(default_factory=lambda: {"single": 3.9, "double": 2.5})

    def draw(self, results: Results, size: str = "double", **options: Any) -> tuple[Figure, pd.DataFrame]:
        """A finished figure of the column width `size` and the numbers in it; files and pyplot stay untouched."""
        with drawing():
            figure = new_figure(size, self.heights[size])
            numbers = self.function(results, figure, **options)
            figure.draw_without_rendering()
        return figure, numbers

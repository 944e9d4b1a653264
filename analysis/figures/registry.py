"""Which figures there are, what each needs, and for which sweeps it is drawn by default."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from analysis.figures import comparisons, ladder, mechanism, objective, run_panels, searches, stops
from analysis.figures.common import settle
from analysis.figures.trials import axes_of
from analysis.load import Results
from analysis.records import is_searched
from analysis.style import drawing, new_figure

Draw = Callable[..., pd.DataFrame]
Heights = Mapping[str, float]
TWO_PANELS: Heights = {"single": 3.9, "double": 2.5}
THREE_PANELS: Heights = {"single": 5.5, "double": 2.3}


@dataclass(frozen=True)
class FigureSpec:
    """One figure: `function(results, figure, **options)` draws it and returns the plotted numbers.

    `needs` are the metrics it is about, `default_for(results)` says whether a sweep's report shows it
    unasked, `heights` are inches per column width, or a function of the results that gives them.
    """

    name: str
    function: Draw
    title: str
    caption: str
    needs: tuple[str, ...] = ()
    default_for: Callable[[Results], bool] = lambda results: False
    heights: Heights | Callable[[Results], Heights] = field(default_factory=lambda: TWO_PANELS)

    def draw(self, results: Results, size: str = "double", **options: Any) -> tuple[Figure, pd.DataFrame]:
        """A finished figure of the column width `size` and its numbers; no file and no pyplot state."""
        heights = self.heights(results) if callable(self.heights) else self.heights
        with drawing():
            figure = new_figure(size, heights[size])
            numbers = self.function(results, figure, **options)
            settle(figure)
            figure.set_layout_engine("none")  # placed once: saving in three formats need not do it again
        return figure, numbers


def _differs(*keys: str) -> Callable[[Results], bool]:
    """Default for comparisons whose arms differ in one of these config keys; a search has no arms to compare."""

    def differs(results: Results) -> bool:
        if is_searched(results.plan):
            return False
        columns = [f"config.{key}" for key in keys if f"config.{key}" in results.runs]
        return any(results.runs[column].astype(str).nunique() > 1 for column in columns)

    return differs


_CURVES = (
    "Mean over seeds (thick), 95 % t interval of that mean (band), every run (thin). A cross marks where a run "
    "was stopped, with the code of its alert; from there on the arm's mean covers the remaining runs only and is "
    "drawn faint."
)

FIGURES: dict[str, FigureSpec] = {
    spec.name: spec
    for spec in (
        FigureSpec(
            "search",
            searches.search,
            "What the search found",
            "Importance: PED-ANOVA over complete configurations only, red the level chance alone reaches (95 % of "
            "shuffled scores); configurations that were stopped have no final score, are left out and counted. "
            "Lines: one per configuration, darker is better, dashed the best. Below: circles complete, crosses "
            "stopped (at their last score), star the best; a best value at the edge of its range is marked.",
            (),
            lambda results: bool(axes_of(results)),
            searches.heights,
        ),
        FigureSpec(
            "accuracy_entropy",
            comparisons.accuracy_entropy,
            "Held-out accuracy and policy entropy",
            _CURVES,
            ("eval/accuracy", "entropy/mean"),
            lambda results: True,
        ),
        FigureSpec(
            "overlong",
            comparisons.overlong,
            "Accuracy, entropy and truncation, by treatment of overlong answers",
            _CURVES + " Right: share of training responses cut at the length limit.",
            ("eval/accuracy", "entropy/mean", "length/truncated"),
            _differs("overlong.kind"),
            THREE_PANELS,
        ),
        FigureSpec(
            "dynamic_sampling",
            comparisons.dynamic_sampling,
            "Accuracy against steps and against generated tokens, dynamic sampling on and off",
            "Dotted: the best mean accuracy of the baseline. Written below: steps (left) and tokens (right) each "
            "arm needs to get there first, over those of the baseline with the same seed (geometric mean, 95 % t "
            "interval; none when a run never got there). " + _CURVES,
            ("eval/accuracy", "data/generated_tokens"),
            _differs("data.kind"),
            {"single": 4.5, "double": 2.8},
        ),
        FigureSpec(
            "clip_fraction",
            comparisons.clip_fraction,
            "Clipped tokens and training reward",
            "Left, logarithmic: tokens whose clipped branch is active. " + _CURVES,
            ("clip/fraction", "reward/total"),
            _differs("loss.kind"),
        ),
        FigureSpec(
            "reward_parts",
            comparisons.reward_parts,
            "Reward parts apart, and held-out accuracy",
            _CURVES,
            ("reward/correctness", "eval/accuracy"),
            _differs("advantage.kind"),
            THREE_PANELS,
        ),
        FigureSpec(
            "clip_objective",
            objective.clip_objective,
            "The clip objective and how far it lets a token rise",
            "Left: objective per token for a good and a bad answer (A = +1, -1); dotted without clip; beyond the "
            "mark a token has no gradient of its own. Bounds are written low/high. Right: the largest probability a "
            "rare (0.01) and a common (0.6) token reach before that. Shared weights can carry a token further.",
            (),
            _differs("loss.low", "loss.high"),
            {"single": 5.6, "double": 2.3},
        ),
        FigureSpec(
            "stop_map",
            stops.stop_map,
            "All runs: how far they came, what was raised, why they ended",
            "Bars are rollout steps done, hatched the steps a stop saved, open those not done for another reason. "
            "Marks are alerts (line: note, triangle: flag, cross: stop).",
            (),
            lambda results: bool(results.runs["outcome"].isin(["stopped", "failed", "ended", "lost"]).any()),
            stops.heights,
        ),
        FigureSpec(
            "entropy_prediction",
            mechanism.entropy_prediction,
            "Entropy change predicted from cov(log π, A), and measured",
            "Left: one point per step; dotted: equality; ρ is Spearman's rank correlation over all steps of an arm "
            "(steps of one run are not independent, so it carries no interval). Adam rescales the update, so the "
            "prediction -lr·cov gives the sign and the order, not the size. Right: the covariance itself.",
            (mechanism.PREDICTED, mechanism.MEASURED, mechanism.COV),
            lambda results: mechanism.COV in results.rows and _differs("loss.low", "loss.high")(results),
        ),
        FigureSpec(
            "dashboard",
            run_panels.dashboard,
            "One run, all metric families",
            "The first stopped run, else the one with most alerts. Shaded: the window an alert looked at (grey note, "
            "red flag and stop), dashed its end, with the code in the first row. Empty panels were not recorded.",
            (),
            lambda results: bool(len(results.alerts)) or len(results.runs) == 1,
            {"single": 8.2, "double": 6.6},
        ),
        FigureSpec(
            "dapo_ladder",
            ladder.dapo_ladder,
            "The DAPO ladder: published, built up here, taken away here",
            "Left: the paper's rungs, one run each, with 2.1 points of evaluation noise; most rungs are inside it. "
            "Middle: final held-out accuracy as pieces are added; rings are seeds, the mark their mean with its 95 % "
            "t interval. Right: the whole with one piece taken away minus the whole, paired by seed. A stopped run "
            "counts as its last score. Other model, other task: compare the order, not the size.",
            ("eval/accuracy",),
            ladder.is_ladder,
            {"single": 5.6, "double": 2.4},
        ),
    )
}

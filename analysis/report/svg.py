"""Matplotlib's SVG made fit for a page: colours follow the page's theme, ids do not clash, hover data beside it."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.style import ON_DARK, arm_styles, render
from analysis.verdict import label

_COLOURS = re.compile("|".join(map(re.escape, ON_DARK)))
_NUMBER = re.compile(r"-?\d+\.\d{3,}")


def variable(colour: str) -> str:
    """The CSS variable that stands for a colour of the figures."""
    return f"--f{colour.lstrip('#')}"


def themed_svg(figure: Figure, ident: str, title: str) -> str:
    """The figure as an inline SVG element whose colours are CSS variables (light values as fall-back).

    `ident` makes its ids unique on the page; `title` is what a screen reader says.
    """
    text = render(figure, "svg").decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', text))
    text = re.sub(r'\sid="([^"]+)"', lambda m: f' id="{ident}-{m[1]}"' if m[1] in used else "", text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{ident}-\1)", text)
    text = re.sub(r'xlink:href="#([^"]+)"', rf'href="#{ident}-\1"', text)
    text = _COLOURS.sub(lambda match: f"var({variable(match[0])},{match[0]})", text)
    text = re.sub(r' d="([^"]*)"', lambda match: f' d="{_shorter(match[1])}"', text)
    head, body = text.split(">", 1)
    box = re.search(r'viewBox="[^"]+"', head)
    if box is None:
        raise ValueError("the figure's SVG has no viewBox")
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box[0]} role="img" aria-label="{_attribute(title)}"'
    return f"{head}>{body}".rstrip()


def _shorter(path: str) -> str:
    return " ".join(_NUMBER.sub(lambda match: f"{float(match[0]):.2f}", path).split())


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")


def hover_data(figure: Figure, numbers: pd.DataFrame, arms: list[str]) -> dict[str, Any]:
    """What the page needs to show values under the pointer: per panel its box, ranges and the arms' means.

    Boxes are in the SVG's units (points, y downwards); empty when no panel holds curves over steps.
    """
    width, height = figure.get_size_inches() * 72
    styles = arm_styles(arms)
    panels = []
    for ax in figure.axes:
        gid = str(ax.get_gid() or "")
        if not gid.startswith("panel:") or "kind" not in numbers:
            continue
        metric = gid.removeprefix("panel:")
        mean = numbers[(numbers["metric"] == metric) & (numbers["kind"] == "mean")]
        if mean.empty:
            continue
        box = ax.get_position()
        panels.append(
            {
                "box": _round([box.x0 * width, (1 - box.y1) * height, box.x1 * width, (1 - box.y0) * height]),
                "x": _round(ax.get_xlim()),
                "y": _round(ax.get_ylim(), 6),
                "log": ax.get_yscale() == "log",
                "label": ax.get_ylabel(),
                "unit": _unit(mean),
                "series": [
                    {"name": label(arm), "colour": f"var({variable(styles[arm].colour)})"}
                    | _series(mean[mean["arm"] == arm])
                    for arm in arms
                    if (mean["arm"] == arm).any()
                ],
            }
        )
    return {"panels": panels} if panels else {}


def _unit(mean: pd.DataFrame) -> float | None:
    """Gradient steps per rollout step, when it is one number for all arms."""
    late = mean[mean["step"] > 0]
    ratio = (late["gradient_step"] / late["step"]).round(6).unique()
    return float(ratio[0]) if len(ratio) == 1 and math.isfinite(ratio[0]) else None


def _series(mean: pd.DataFrame) -> dict[str, list[Any]]:
    out: dict[str, list[Any]] = {"step": [float(step) for step in mean["step"]]}
    for name in ("value", "low", "high"):
        out[name] = [float(f"{value:.5g}") if math.isfinite(value) else None for value in mean[name].astype(float)]
    out["n"] = [int(n) for n in mean["n"]]
    return out


def _round(values: Any, digits: int = 2) -> list[float]:
    return [round(float(value), digits) for value in np.asarray(values, float)]


def is_curve(ax: Axes) -> bool:
    """True for a panel drawn by `curves.metric_panel`."""
    return str(ax.get_gid() or "").startswith("panel:")

"""How every figure looks, and how it is saved so that the same numbers give the same bytes."""

from __future__ import annotations

import io
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from cycler import cycler
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

WIDTHS = {"single": 3.3, "double": 6.8}  # inches: one and two columns of a paper
FORMATS = ("png", "pdf", "svg")
DPI = 200

INK = "#1a1a1a"
MUTED = "#6b6b6b"
GRID = "#e3e3e3"
PAPER = "#ffffff"
ALERT = "#b3261e"
BAR = "#b9c3cf"  # of the stop map


@dataclass(frozen=True)
class ArmStyle:
    """The look of one arm: colour of the line, darker colour for its words, dash pattern and marker.

    Three independent signs, so that it survives a grey print and a colour-blind reader.
    """

    colour: str
    text: str
    dash: Any
    marker: str


# Paul Tol's "high contrast" three first (distinct in grey too), then further ones told apart by dash and marker.
PALETTE: tuple[ArmStyle, ...] = (
    ArmStyle("#004488", "#004488", "solid", "o"),
    ArmStyle("#bb5566", "#a03a4c", (0, (5, 1.6)), "s"),
    ArmStyle("#ddaa33", "#8a6500", (0, (5, 1.4, 1.2, 1.4)), "^"),
    ArmStyle("#228833", "#1b6b28", (0, (1.4, 1.2)), "D"),
    ArmStyle("#33a5c4", "#16708a", (0, (8, 1.6, 2, 1.6)), "v"),
    ArmStyle("#aa3377", "#8f2a64", (0, (3, 1.2, 1, 1.2, 1, 1.2)), "P"),
    ArmStyle("#777777", "#5a5a5a", (0, (2.6, 1.2)), "X"),
    ArmStyle("#cc6611", "#9c4c08", (0, (9, 2)), "<"),
)
# The same colours on a dark page (report.py swaps them in by CSS).
ON_DARK = {
    "#004488": "#6ea8fe",
    "#bb5566": "#ff8fa0",
    "#a03a4c": "#ff8fa0",
    "#ddaa33": "#e9c46a",
    "#8a6500": "#e9c46a",
    "#228833": "#63c774",
    "#1b6b28": "#63c774",
    "#33a5c4": "#6fd3ee",
    "#16708a": "#6fd3ee",
    "#aa3377": "#e58cc0",
    "#8f2a64": "#e58cc0",
    "#777777": "#a8a8a8",
    "#5a5a5a": "#bdbdbd",
    "#cc6611": "#f0a060",
    "#9c4c08": "#f0a060",
    INK: "#e8e6e3",
    MUTED: "#a5a29c",
    GRID: "#3a3a3d",
    PAPER: "#1b1b1e",
    ALERT: "#ff8a80",
    BAR: "#46515e",
}

RC: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 7.5,
    "axes.titlesize": 8,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 7.5,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.linewidth": 0.6,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.prop_cycle": cycler(color=[style.colour for style in PALETTE]),
    "grid.color": GRID,
    "grid.linewidth": 0.5,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "xtick.minor.size": 1.5,
    "ytick.minor.size": 1.5,
    "lines.linewidth": 1.4,
    "lines.markersize": 3.6,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "figure.dpi": DPI,
    "savefig.dpi": DPI,
    "figure.constrained_layout.use": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "reasonrl",
    "pdf.fonttype": 42,
    "text.usetex": False,
    "path.simplify": True,
    "axes.unicode_minus": True,
}
# Dates and program names would make two equal figures differ.
_METADATA: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "ModDate": None, "Creator": None, "Producer": None},
    "svg": {"Date": None, "Creator": None},
}
# matplotlib's rcParams belong to the process: one thread draws or saves at a time.
_lock = threading.RLock()


@contextmanager
def drawing() -> Iterator[None]:
    """Hold the project's look for the block; other threads that draw through here wait, the caller's own
    settings come back afterwards."""
    with _lock, matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # drawn as a box, which says it all
        look: Any = {**matplotlib.rcParamsDefault, "backend": matplotlib.rcParams["backend"], **RC}
        matplotlib.rcParams.update(look)
        yield


def new_figure(size: str = "double", height: float = 2.6) -> Figure:
    """An empty figure of a column width ("single" 3.3 in or "double" 6.8 in) and `height` inches, without pyplot.

    ValueError when `size` is neither.
    """
    if size not in WIDTHS:
        raise ValueError(f"size={size!r}: choose {' or '.join(WIDTHS)}")
    layout = ConstrainedLayoutEngine(w_pad=0.03, h_pad=0.03, wspace=0.04, hspace=0.05)
    figure = Figure(figsize=(WIDTHS[size], height), dpi=DPI, layout=layout)
    FigureCanvasAgg(figure)
    return figure


def render(figure: Figure, format: str) -> bytes:
    """The figure as bytes of `format` (png, pdf or svg); equal figures give equal bytes."""
    if format not in FORMATS:
        raise ValueError(f"format={format!r}: choose {', '.join(FORMATS)}")
    buffer = io.BytesIO()
    with drawing():
        figure.savefig(buffer, format=format, metadata=_METADATA[format])
    return buffer.getvalue()


def save(figure: Figure, stem: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write `stem.png`, `stem.pdf`, ... and return the paths."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = []
    for format in formats:
        path = stem.with_name(f"{stem.name}.{format}")
        path.write_bytes(render(figure, format))
        paths.append(path)
    return paths


def arm_styles(arms: Sequence[str]) -> dict[str, ArmStyle]:
    """The style of every arm, by its place in the plan; past eight arms a colour returns with other dash and marker."""
    styles, count = {}, len(PALETTE)
    for index, arm in enumerate(dict.fromkeys(arms)):
        lap, place = divmod(index, count)
        base = PALETTE[place]
        dash, marker = PALETTE[(place + lap) % count].dash, PALETTE[(place + 2 * lap) % count].marker
        styles[arm] = ArmStyle(base.colour, base.text, dash, marker)
    return styles

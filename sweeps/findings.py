"""What only the sweep as a whole can see: how the arms stand at a rung, and a best value at the edge of its range."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from sweeps.configuration import Configuration
from sweeps.schedule import Queue
from sweeps.types import Plan, SpaceEntry

EDGE = 0.02  # of the range, measured on its own scale (log where it is searched so)


class Rungs:
    """Compares the arms whenever all of them have reached a rung (schedule=breadth)."""

    def __init__(self, plan: Plan, queue: Queue) -> None:
        self._baseline, self._queue = plan.baseline, queue
        self._reported = 0

    def reached(self, configurations: Sequence[Configuration], metric: str) -> str | None:
        """One line on the highest rung that every run has reached and that was not reported yet, else None."""
        runs = [run for configuration in configurations for run in configuration.runs]
        if not self._queue.breadth or not runs:
            return None
        steps = self._queue.boundaries(runs[0])
        rung = min((self._queue.rung_of(run) if run.open else len(steps) for run in runs), default=0)
        if rung <= self._reported or rung >= len(steps):
            return None
        self._reported = rung
        parts = [
            _standing(configuration, self._base(configurations), steps[rung - 1]) for configuration in configurations
        ]
        return f"rung {rung} of {len(steps)} (step {steps[rung - 1]}), {metric}: {', '.join(parts)}"

    def _base(self, configurations: Sequence[Configuration]) -> Configuration | None:
        return next((c for c in configurations if c.arm == self._baseline), None)


def _standing(configuration: Configuration, base: Configuration | None, step: int) -> str:
    mean = configuration.mean_at(step)
    text = f"{configuration.arm} {mean:.4g}" if mean is not None else f"{configuration.arm} without a value"
    if base is None or base is configuration:
        return text
    theirs = {run.spec.seed: run.value_at(step) for run in base.runs}
    pairs = [
        mine - other
        for run in configuration.runs
        if (mine := run.value_at(step)) is not None and (other := theirs.get(run.spec.seed)) is not None
    ]
    return f"{text} ({fmean(pairs):+.4g} against {base.arm}, {len(pairs)} seeds)" if pairs else text


def edge_findings(
    configurations: Iterable[Configuration], space: Sequence[SpaceEntry], maximize: bool
) -> list[dict[str, Any]]:
    """A18 for every searched key whose best value lies at the edge of its range: code, title, message, intervention."""
    ended = [c for c in configurations if c.searched and c.mean() is not None and not c.stopped() and not c.failed()]
    if len(ended) < 3:
        return []
    best = (max if maximize else min)(ended, key=lambda c: c.mean() or 0.0)
    found = []
    for entry in space:
        side = _edge(entry, best.params.get(entry.key))
        if side:
            found.append(
                {
                    "code": "A18",
                    "title": "best value at the edge of its search range",
                    "severity": "flag",
                    "message": f"the best {entry.key}={best.params[entry.key]} is at the {side} end of its range",
                    "evidence": {"key": entry.key, "value": best.params[entry.key], "range": _range(entry)},
                    "intervention": [f"widen the range of {entry.key} {'down' if side == 'low' else 'up'}wards"],
                }
            )
    return found


def _range(entry: SpaceEntry) -> list[Any]:
    return list(entry.choices) if entry.kind == "choice" else [entry.low, entry.high]


def _edge(entry: SpaceEntry, value: Any) -> str | None:
    """`low` or `high` when the value lies there, None inside, for words, and for fewer than three numbers."""
    if value is None or isinstance(value, bool | str):
        return None
    if entry.kind == "choice":
        numbers = sorted(c for c in entry.choices if isinstance(c, int | float) and not isinstance(c, bool))
        if len(numbers) < max(3, len(entry.choices)):
            return None
        return "low" if value == numbers[0] else "high" if value == numbers[-1] else None
    low, high, at = float(entry.low or 0), float(entry.high or 0), float(value)
    if entry.log:
        low, high, at = math.log(low), math.log(high), math.log(at)
    place = (at - low) / (high - low) if high > low else 0.5
    return "low" if place <= EDGE else "high" if place >= 1 - EDGE else None

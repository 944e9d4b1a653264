"""What a sweep may spend, what it has spent, and what the rest will take."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from sweeps.state import RunState


class Budget:
    """Limits from `sweep.budget`: runs, steps (rollout steps over all runs), minutes and gpu_hours.

    Runs, steps and GPU-hours count everything in the results folder, also of earlier commands; minutes count this
    command.
    """

    def __init__(self, limits: Mapping[str, Any], gpus_per_slot: int) -> None:
        self.limits = {name: float(value) for name, value in limits.items() if value is not None}
        self._gpus = gpus_per_slot
        self._began = time.monotonic()
        self._counted: set[str] = set()
        self.steps = 0
        self.busy_s = 0.0

    def count_past(self, runs: Iterable[RunState]) -> None:
        """Add what earlier commands, or other coordinators, spent."""
        for run in runs:
            if run.status != "waiting":
                self.count_run(run)
                self.steps += run.step
                self.busy_s += run.seconds

    @property
    def runs(self) -> int:
        """Runs that were started."""
        return len(self._counted)

    def count_run(self, run: RunState) -> None:
        """A run starts; however often it does, it counts once."""
        self._counted.add(run.key)

    def spent(self) -> dict[str, float]:
        """What was spent so far, in the units of the limits."""
        return {
            "runs": float(self.runs),
            "steps": float(self.steps),
            "minutes": (time.monotonic() - self._began) / 60,
            "gpu_hours": self.busy_s * self._gpus / 3600,
        }

    def exhausted(self) -> str | None:
        """Why running runs have to pause, None while there is budget left (the limit on runs only bars new ones)."""
        spent = self.spent()
        for name in ("steps", "minutes", "gpu_hours"):
            if name in self.limits and spent[name] >= self.limits[name]:
                return f"budget spent: {spent[name]:.4g} of {self.limits[name]:.4g} {name} (sweep.budget.{name})"
        return None

    def bars(self, run: RunState) -> str | None:
        """Why this run may not start, None when it may."""
        why = self.exhausted()
        if why is None and run.status == "waiting" and self.runs >= self.limits.get("runs", float("inf")):
            why = f"budget spent: {self.runs} of {self.limits['runs']:.4g} runs (sweep.budget.runs)"
        return why

    def fitting(self, runs: Iterable[RunState]) -> list[RunState]:
        """Those of `runs`, in order, that may all still start."""
        if self.exhausted() is not None:
            return []
        left, found = self.limits.get("runs", float("inf")) - self.runs, []
        for run in runs:
            left -= run.status == "waiting"
            if left >= 0 or run.status != "waiting":
                found.append(run)
        return found


def forecast_seconds(runs: Iterable[RunState], num_slots: int) -> float | None:
    """Seconds until the runs known now are done, from the speed seen so far; None before the first speed."""
    left, speeds, unknown = 0.0, [], []
    for run in runs:
        if run.seconds_per_step:
            speeds.append(run.seconds_per_step)
        if run.open:
            steps = max(0, run.spec.steps - run.step)
            if run.seconds_per_step:
                left += steps * run.seconds_per_step
            else:
                unknown.append(steps)
    if not speeds:
        return None
    return (left + sum(unknown) * median(speeds)) / max(1, num_slots)

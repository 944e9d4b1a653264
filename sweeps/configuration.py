"""One configuration of a sweep: what one Optuna trial stands for, with its seeds as replicates below it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from sweeps.state import RunState


@dataclass(eq=False)
class Configuration:
    """An arm or a point of a search, with one run per seed.

    `searched` is False for the arms of an ablation, which are never compared by metric while they run.
    `trial` is the id of its Optuna trial, `abandoned` says why the seeds not yet started will not be, `pruned` why
    the metric stopped it.
    """

    stage: str
    arm: str
    params: dict[str, Any]
    runs: list[RunState]
    searched: bool = False
    trial: int | None = None
    told: bool = False
    abandoned: dict[str, Any] | None = None
    pruned: dict[str, Any] | None = None
    pending_seeds: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Its identity inside the sweep: stage and arm, or stage and searched values."""
        return identity(self.stage, self.arm, self.params if self.searched else {})

    @property
    def done(self) -> bool:
        """True when no run of it is open and no seed is still to come."""
        return not self.pending_seeds and not any(run.open for run in self.counted())

    def counted(self) -> list[RunState]:
        """The runs that belong to it: all, less those that were given up before they started."""
        return [run for run in self.runs if not run.given_up]

    def values(self) -> dict[int, float]:
        """The last value of the metric per seed, of the runs that finished."""
        return {run.spec.seed: run.value for run in self.runs if run.status == "finished" and run.value is not None}

    def mean(self) -> float | None:
        """The mean of `values`, None without any."""
        values = self.values()
        return fmean(values.values()) if values else None

    def mean_at(self, step: int) -> float | None:
        """The mean at one step over the seeds that recorded a value there."""
        values = [value for run in self.runs if (value := run.value_at(step)) is not None]
        return fmean(values) if values else None

    def give_up(self, why: dict[str, Any]) -> None:
        """Start no further seed, for this reason."""
        self.abandoned, self.pending_seeds = why, []
        for run in self.runs:
            run.given_up = run.status == "waiting"

    def recall(self) -> None:
        """Take over decisions of earlier commands, which stand in the event logs of its runs."""
        self.recall_pruning()
        for run in self.runs:
            if run.abandons is not None:
                self.abandoned = dict(run.abandons)

    def recall_pruning(self) -> None:
        """Take over that an earlier leader's metric pruner stopped it."""
        for run in self.runs:
            if isinstance(run.decision, Mapping) and run.decision.get("code") == "PRUNED":
                self.pruned = dict(run.decision)

    def stopped(self) -> list[RunState]:
        """The runs an alert, or a person, stopped."""
        return [run for run in self.runs if run.status == "stopped"]

    def failed(self) -> list[RunState]:
        """The runs that failed for good."""
        return [run for run in self.runs if run.status == "failed"]


def identity(stage: str, arm: str, params: Mapping[str, Any]) -> str:
    """A configuration's name: equal for equal values, whatever their order."""
    if params:
        return f"{stage}/{json.dumps(dict(params), sort_keys=True, default=str)}"
    return f"{stage}/{arm}"


def group(runs: Iterable[RunState], searched: bool) -> list[Configuration]:
    """Configurations from runs, in order of first appearance; runs of one name are its replicates."""
    found: dict[str, Configuration] = {}
    for run in runs:
        spec = run.spec
        name = identity(spec.stage, spec.arm, spec.params if searched else {})
        if name not in found:
            found[name] = Configuration(spec.stage, spec.arm, dict(spec.params), [], searched)
        found[name].runs.append(run)
    for configuration in found.values():
        configuration.recall()
    return list(found.values())

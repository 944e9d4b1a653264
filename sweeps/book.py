"""All runs and configurations of a sweep, as their event logs tell them, and the only way to write about them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from reasonrl.events import EventLog
from sweeps.configuration import Configuration, group
from sweeps.failures import may_retry
from sweeps.ledger import read_specs, save_spec
from sweeps.state import RunState, read_state
from sweeps.types import Plan, RunSpec


class Book:
    """The runs of a plan by key, their configurations, and forks by parent.

    `met` is called with each run met for the first time. `names` are keys of runs that others began. `writing` tells
    whether the log of a run that ended may be written to now, and keeps others away meanwhile.
    """

    def __init__(self, plan: Plan, met: Callable[[RunState], None] = lambda run: None) -> None:
        self.plan, self._met = plan, met
        self.writing: Callable[[RunState], AbstractContextManager[bool]] = lambda run: nullcontext(True)
        self.metric = str(plan.study.get("metric", "eval/accuracy"))
        self._max_retries = int(plan.engine.get("max_retries", 2))
        self.names: frozenset[str] = frozenset()
        self.runs: dict[str, RunState] = {}
        self.configurations: list[Configuration] = []
        self._of_run: dict[str, list[Configuration]] = {}

    def run_dir(self, key: str) -> Path:
        """The folder of one run."""
        return self.plan.directory / "runs" / key

    def add_run(self, spec: RunSpec) -> RunState:
        """The run's state, read from its event log the first time its key is met."""
        if spec.key not in self.runs:
            self.runs[spec.key] = self._read(spec)
            self._met(self.runs[spec.key])
        return self.runs[spec.key]

    def refresh(self, run: RunState) -> None:
        """Read a run's log again, which another coordinator has written to."""
        held, given_up = run.held, run.given_up
        vars(run).update(vars(self._read(run.spec)))
        run.held, run.given_up = held, given_up

    def _read(self, spec: RunSpec) -> RunState:
        run = read_state(spec, self.run_dir(spec.key), self.metric)
        # The coordinator may have ended before it could try again, or say what kind of failure it was.
        if run.status == "failed" and (not run.failure_is_known or may_retry(run.failures, self._max_retries)):
            run.status = "partial"
        return run

    def add_configuration(self, configuration: Configuration) -> Configuration:
        """Take a configuration in."""
        self.configurations.append(configuration)
        for run in configuration.runs:
            self._of_run.setdefault(run.key, []).append(configuration)
        return configuration

    def specs(self) -> list[RunSpec]:
        """The specs of all runs in the folder."""
        return list(read_specs(self.plan.directory, self.names).values())

    def forget_configurations(self) -> None:
        """Keep the runs; what they are replicates of is for another coordinator to know now."""
        self.configurations, self._of_run = [], {}

    def forget_waiting(self) -> None:
        """Keep the runs that began, and forks."""
        self.runs = {key: run for key, run in self.runs.items() if run.status != "waiting" or run.spec.parent}

    def add_replicate(self, configuration: Configuration, spec: RunSpec) -> RunState:
        """Add one seed's run to a configuration."""
        run = self.add_run(spec)
        configuration.runs.append(run)
        self._of_run.setdefault(run.key, []).append(configuration)
        return run

    def add_planned(self, searched: bool) -> list[Configuration]:
        """Take in every run the plan names, as configurations in the plan's order."""
        runs = [self.add_run(spec) for spec in self.plan.runs]
        return [self.add_configuration(configuration) for configuration in group(runs, searched)]

    def configurations_of(self, run: RunState) -> list[Configuration]:
        """The configurations a run is a replicate of: one, or one per stage that shares it; none for a fork."""
        return self._of_run.get(run.key, [])

    def children_of(self, key: str) -> list[RunState]:
        """The forks of a run."""
        return [run for run in self.runs.values() if run.spec.parent == key]

    def add_forks(self) -> list[RunState]:
        """Take in the forks that earlier commands made of known runs, and forks of those."""
        specs = [spec for spec in self.specs() if spec.parent]
        found: list[RunState] = []
        while fresh := [spec for spec in specs if spec.parent in self.runs and spec.key not in self.runs]:
            found += [self.add_run(spec) for spec in fresh]
        return found

    def record(self, run: RunState, event: dict[str, Any]) -> None:
        """Append an event to a run's log on behalf of a worker that is gone or idle, and fold it in."""
        event = {"time": time.time(), **event}
        folder = self.run_dir(run.key)
        save_spec(folder, run.spec)
        log = EventLog(folder / "events.jsonl")
        try:
            log.append(event)
        finally:
            log.close()
        run.apply(event)

    def abandon(self, configuration: Configuration, run: RunState, why: Mapping[str, Any]) -> dict[str, Any] | None:
        """Give up the seeds still missing, for a reason that stands in the log of `run`; returns the whole reason.

        None, and nothing is given up, while the log of `run` cannot be written to.
        """
        whole = {**why, "seeds": list(configuration.pending_seeds)}
        if not self.decide(run, action="abandon", reason=whole):
            return None
        configuration.give_up(whole)
        return whole

    def decide(self, run: RunState, **decision: Any) -> bool:
        """Write a decision into the log of a run that ended; False while that is not possible."""
        with self.writing(run) as mine:
            if mine:
                self.record(run, {"type": "decision", **decision})
            return mine

    def open_runs(self) -> Iterable[RunState]:
        """Runs that have not ended for good."""
        return (run for run in self.runs.values() if run.open)

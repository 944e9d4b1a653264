"""From a value of the study's metric to the stop of a configuration that lies behind the others (searches only)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sweeps.configuration import Configuration
from sweeps.control import send, stop
from sweeps.state import RunState

if TYPE_CHECKING:
    from sweeps.coordinator import Coordinator


def report(sweep: Coordinator, run: RunState, step: int) -> None:
    """Tell the study the new mean at `step`; let the metric pruner stop a searched configuration."""
    for configuration in sweep.book.configurations_of(run):
        behind = sweep.study.report(configuration, step)
        if behind and configuration.pruned is None and step < run.spec.steps:
            _prune(sweep, configuration, step)


def _prune(sweep: Coordinator, configuration: Configuration, step: int) -> None:
    kind, value, metric = sweep.plan.study.get("pruner"), configuration.mean_at(step), sweep.book.metric
    configuration.pruned = {
        "code": "PRUNED",
        "title": f"pruned by {kind}",
        "step": step,
        "evidence": {"step": step, "value": value, "metric": metric},
        "message": f"{metric} {value:.4g} at step {step} is behind the others",
        "intervention": [],
    }
    configuration.give_up({"why": configuration.pruned["title"]})
    enforce(sweep, configuration)


def enforce(sweep: Coordinator, configuration: Configuration) -> bool:
    """Stop every open run of a pruned configuration, for the reason that stands in their logs; False: none is left.

    A run that another coordinator has is stopped by a command to all of them.
    """
    reason = configuration.pruned
    due = [run for run in configuration.runs if run.open and not run.given_up] if reason else []
    for run in due:
        if run.status == "elsewhere":
            send(sweep.plan.directory, "stop", run.key, reason)
        elif reason:
            stop(sweep, run, reason)
    return bool(due)

"""Pruners: one that stops a trial for a stated reason (alerts), Optuna's by metric, and both together.

`AlertPruner` needs nothing else of this project:

    import optuna
    from sweeps.pruner import AlertPruner

    pruner = AlertPruner()
    study = optuna.create_study(direction="maximize", pruner=pruner)

    def objective(trial):
        for step in range(1, 201):
            metrics = train_one_step(trial)          # {"reward/total": .., "entropy/mean": .., "length/mean": ..}
            pruner.record(trial, step, metrics)      # names as in reasonrl.metrics
            if trial.should_prune():
                raise optuna.TrialPruned()           # trial.user_attrs["code"], ["evidence"], ["intervention"]
        return metrics["reward/total"]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from optuna.pruners import (
    BasePruner,
    HyperbandPruner,
    MedianPruner,
    NopPruner,
    SuccessiveHalvingPruner,
    WilcoxonPruner,
)

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial

    from reasonrl.alerts import AlertMonitor, AlertsConfig

ALERTS = "alerts"


def stop_attributes(alert: Mapping[str, Any]) -> dict[str, Any]:
    """The user attributes by which a trial says why it was stopped: code, title, message, step, evidence, cure."""
    names = ("code", "title", "message", "step", "evidence", "intervention")
    return {name: alert.get(name) for name in names}


class AlertPruner(BasePruner):
    """Prunes a trial as soon as an alert of severity `stop` stands in its record.

    The record is the trial's user attribute `alerts` (a list of dicts). `record` fills it from metrics by the
    rules of reasonrl.alerts, with the same code that runs inside a training run. The alert that decided is
    stored in the trial, as code, evidence and intervention, before Optuna is told.
    """

    def __init__(self, config: AlertsConfig | None = None, unit: str = "rollout") -> None:
        self._config = config
        self._unit = unit
        self._monitors: dict[int, AlertMonitor] = {}

    def record(self, trial: Trial, step: int, metrics: Mapping[str, float]) -> list[dict[str, Any]]:
        """Look at one row of a running trial; returns the alerts it raised (as dicts), stored in the trial too."""
        monitor = self._monitors.get(trial.number)
        if monitor is None:
            monitor = self._monitors[trial.number] = self._new_monitor()
        raised = [alert.to_event() for alert in monitor.update(step, metrics)]
        if raised:
            trial.set_user_attr(ALERTS, [*trial.user_attrs.get(ALERTS, []), *raised])
            stops = [alert for alert in raised if alert["severity"] == "stop"]
            if stops and "code" not in trial.user_attrs:
                for name, value in stop_attributes(stops[0]).items():
                    trial.set_user_attr(name, value)
                trial.set_constraint("stopped", 1.0)
        return raised

    def _new_monitor(self) -> AlertMonitor:
        from reasonrl.alerts import AlertMonitor, AlertsConfig

        return AlertMonitor(self._config or AlertsConfig(), unit=self._unit)

    def prune(self, study: Study, trial: FrozenTrial) -> bool:
        """True when a stop alert is on record."""
        return any(alert.get("severity") == "stop" for alert in trial.user_attrs.get(ALERTS, []))


class AnyPruner(BasePruner):
    """Prunes when one of `pruners` does."""

    def __init__(self, pruners: Sequence[BasePruner]) -> None:
        self._pruners = list(pruners)

    def prune(self, study: Study, trial: FrozenTrial) -> bool:
        """True at the first that says so."""
        return any(pruner.prune(study, trial) for pruner in self._pruners)


def metric_pruner(kind: str, startup_trials: int, max_step: int, first_step: int) -> BasePruner:
    """Optuna's pruner of that name, for values recorded at rollout steps `first_step` .. `max_step`.

    wilcoxon compares seeds, not steps, and is asked once per finished seed: p < 0.1 one-sided cannot be reached
    with fewer than four (one in sixteen).
    """
    low = max(1, first_step)
    if kind == "median":
        return MedianPruner(n_startup_trials=startup_trials, n_warmup_steps=max_step // 3)
    if kind == "halving":
        return SuccessiveHalvingPruner(min_resource=low, reduction_factor=3)
    if kind == "hyperband":
        return HyperbandPruner(min_resource=low, max_resource=max(low + 1, max_step), reduction_factor=3)
    if kind == "wilcoxon":
        return WilcoxonPruner(p_threshold=0.1, n_startup_steps=2)
    # Optuna's own default is MedianPruner: without this, arms would be compared by metric unasked.
    return NopPruner()

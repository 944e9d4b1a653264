"""`AlertCallback`: the alert rules inside any transformers Trainer, TRL's GRPOTrainer first of all.

    from reasonrl.callbacks import AlertCallback
    alerts = AlertCallback()
    trainer = GRPOTrainer(..., callbacks=[alerts])
    trainer.train()

It translates the trainer's metric names, raises the same alerts as our own runs, writes them to
`<output_dir>/alerts.jsonl`, and on a stop asks the trainer to save and end. A run resumed from a checkpoint goes on
with the rules' memory, so it raises exactly what it would have raised.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from reasonrl.alerts import Alert, AlertMonitor, AlertsConfig
from reasonrl.alerts.names import translate_row, unknown
from reasonrl.alerts.types import SEVERITIES

if TYPE_CHECKING:
    from optuna import Trial
    from transformers import TrainerControl, TrainerState, TrainingArguments

STATE_FILE = "alerts_state.json"


class AlertCallback(TrainerCallback):
    """Watches a Trainer's logs with the alert rules.

    config: which rules, how patient, and whether a stop ends the training (`on_stop`).
    updates_per_rollout: optimizer updates per round of generation; None works it out from TRL's arguments
    (`num_iterations` times `steps_per_generation` over `gradient_accumulation_steps`).
    on_alert: called with every alert; the default prints it to stderr on the main process.
    trial: an Optuna trial; `metric` (our name, e.g. reward/total or eval/accuracy) is reported to it at every log, its
    alerts are stored in its user attributes, and `raise_if_pruned` after training turns a stop into TrialPruned.
    """

    def __init__(
        self,
        config: AlertsConfig | None = None,
        *,
        updates_per_rollout: float | None = None,
        on_alert: Callable[[Alert], None] | None = None,
        trial: Trial | None = None,
        metric: str = "reward/total",
    ) -> None:
        self.config = config or AlertsConfig()
        self.updates_per_rollout = updates_per_rollout
        self.on_alert = on_alert
        self.trial, self.metric = trial, metric
        self.monitor = AlertMonitor(self.config, updates_per_rollout or 1)  # a wrong config fails here, before training
        self.alerts: list[Alert] = []
        self.stopped_by: Alert | None = None
        self.pruned = False
        self.unknown: set[str] = set()

    # ---- the trainer's calls
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Set the step unit, and take back the memory of the checkpoint training resumes from."""
        unit = self.updates_per_rollout or updates_per_rollout(args)
        settings = {"optim.lr": args.learning_rate, "optim.max_grad_norm": args.max_grad_norm}
        names = {"kl.coef": "beta", "sampling.max_new_tokens": "max_completion_length", "loss.high": "epsilon_high"}
        settings |= {ours: value for ours, name in names.items() if (value := getattr(args, name, None)) is not None}
        self.monitor = AlertMonitor(
            self.config, unit, settings=settings, group_size=getattr(args, "num_generations", None) or 0
        )
        saved = Path(args.output_dir or ".", f"checkpoint-{state.global_step}", STATE_FILE)
        if state.global_step and saved.exists():
            self.monitor.load_state(json.loads(saved.read_text()))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Judge one row; evaluation logs of the same step are merged with it."""
        numbers = {
            n: float(v) for n, v in (logs or {}).items() if isinstance(v, int | float) and not isinstance(v, bool)
        }
        if not numbers or "train_runtime" in numbers:
            return
        self.unknown.update(unknown(numbers))
        row = translate_row(numbers)
        raised = self.monitor.update(state.global_step, row)
        for alert in raised:
            self._take(alert, args, state, control)
        if self.trial is not None and state.is_world_process_zero:
            self._report(state.global_step, row, control)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Keep the rules' memory beside the checkpoint."""
        folder = Path(args.output_dir or ".", f"checkpoint-{state.global_step}")
        if state.is_world_process_zero and folder.is_dir():
            (folder / STATE_FILE).write_text(json.dumps(self.monitor.state(), allow_nan=False))

    # ---- what follows from an alert
    def _take(self, alert: Alert, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        self.alerts.append(alert)
        if state.is_world_process_zero:
            if self.on_alert is not None:
                self.on_alert(alert)
            else:
                print(alert, file=sys.stderr, flush=True)
            folder = Path(args.output_dir or ".")
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "alerts.jsonl").open("a") as file:
                file.write(json.dumps(alert.to_event(), allow_nan=False) + "\n")
        if alert.severity == "stop" and self.config.on_stop == "stop":
            self.stopped_by = self.stopped_by or alert
            control.should_save = True
            control.should_training_stop = True

    def _report(self, step: int, row: Mapping[str, float], control: TrainerControl) -> None:
        assert self.trial is not None
        value = row.get(self.metric)
        if value is not None and value == value:
            self.trial.report(value, step)
        if self.alerts:
            self.trial.set_user_attr("alerts", [alert.to_event() for alert in self.alerts])
        if self.stopped_by is not None:
            for name in ("code", "title", "message", "step", "evidence", "intervention"):
                self.trial.set_user_attr(name, getattr(self.stopped_by, name))
        elif value is not None and self.trial.should_prune():
            self.pruned = True
            control.should_training_stop = True

    def raise_if_pruned(self) -> None:
        """Raise optuna.TrialPruned when an alert or the trial's pruner ended the training; call it after `train`."""
        if self.stopped_by is not None or self.pruned:
            from optuna import TrialPruned

            raise TrialPruned(str(self.stopped_by) if self.stopped_by else "pruned by the study's pruner")

    @property
    def worst(self) -> str | None:
        """The highest severity raised so far."""
        ranks = [SEVERITIES.index(alert.severity) for alert in self.alerts]
        return SEVERITIES[max(ranks)] if ranks else None


def updates_per_rollout(args: Any) -> float:
    """Optimizer updates per round of generation, from TRL's GRPO arguments; 1 for other trainers."""
    iterations = getattr(args, "num_iterations", None) or 1
    generation = getattr(args, "steps_per_generation", None) or 1
    accumulation = getattr(args, "gradient_accumulation_steps", None) or 1
    return max(1.0, iterations * generation / accumulation)

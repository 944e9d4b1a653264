"""`AlertCallback` with the objects a transformers Trainer hands it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import optuna
import pytest
from transformers import TrainerControl, TrainerState

from reasonrl.alerts import AlertsConfig
from reasonrl.callbacks import AlertCallback, updates_per_rollout
from reasonrl.errors import ConfigError

optuna.logging.set_verbosity(optuna.logging.ERROR)


def arguments(folder, **more):
    values = {
        "output_dir": str(folder), "learning_rate": 4e-5, "max_grad_norm": 1.0, "beta": 0.0, "num_iterations": 1,
        "max_completion_length": 256, "epsilon_high": 0.28, "num_generations": 8, "steps_per_generation": 1,
        "gradient_accumulation_steps": 1,
    }  # fmt: skip
    return SimpleNamespace(**(values | more))


class FakeTrainer:
    """Calls the callback as Trainer does: begin, then one log per step until it is asked to stop."""

    def __init__(self, callback, folder, **more):
        self.callback, self.args = callback, arguments(folder, **more)
        self.state, self.control = TrainerState(), TrainerControl()
        self.state.is_world_process_zero = True

    def train(self, logs, start=0):
        self.state.global_step = start
        self.callback.on_train_begin(self.args, self.state, self.control)
        for row in logs:
            self.state.global_step += 1
            self.callback.on_log(self.args, self.state, self.control, logs=row)
            if self.control.should_training_stop:
                break
        return self

    def save(self, folder):
        (folder / f"checkpoint-{self.state.global_step}").mkdir()
        self.callback.on_save(self.args, self.state, self.control)


def cut_off():
    return [{"reward": 0.0, "reward_std": 0.0, "completions/clipped_ratio": 1.0, "frac_reward_zero_std": 1.0}] * 20


def test_a_stop_ends_and_saves_the_training_and_says_what_to_try(tmp_path):
    said = []
    alerts = AlertCallback(on_alert=said.append)
    trainer = FakeTrainer(alerts, tmp_path).train(cut_off())
    assert trainer.control.should_training_stop and trainer.control.should_save
    assert trainer.state.global_step == 3
    assert alerts.stopped_by.code == "A08"
    assert alerts.stopped_by.intervention == ["sampling.max_new_tokens=1024"]
    assert said == alerts.alerts
    written = [json.loads(line) for line in (tmp_path / "alerts.jsonl").read_text().splitlines()]
    assert [event["code"] for event in written] == [alert.code for alert in alerts.alerts]


def test_on_stop_continue_only_reports(tmp_path, capsys):
    alerts = AlertCallback(AlertsConfig(on_stop="continue"))
    trainer = FakeTrainer(alerts, tmp_path).train(cut_off())
    assert not trainer.control.should_training_stop
    assert alerts.worst == "stop" and alerts.stopped_by is None
    assert "A08 all truncated at step 3" in capsys.readouterr().err


def test_resumed_training_goes_on_with_the_memory_of_its_checkpoint(tmp_path):
    rows = [{"entropy": 0.5 if s < 25 else 0.1, "reward": 0.4, "loss": 0.0} for s in range(1, 90)]
    whole = AlertCallback(on_alert=lambda alert: None)
    FakeTrainer(whole, tmp_path / "whole").train(rows)
    first = AlertCallback(on_alert=lambda alert: None)
    FakeTrainer(first, tmp_path).train(rows[:30]).save(tmp_path)
    second = AlertCallback(on_alert=lambda alert: None)
    FakeTrainer(second, tmp_path).train(rows[30:], start=30)
    assert first.alerts + second.alerts == whole.alerts != []


def test_evaluation_logs_of_a_step_are_merged_with_its_train_logs(tmp_path):
    alerts = AlertCallback(on_alert=lambda alert: None)
    trainer = FakeTrainer(alerts, tmp_path).train([{"reward": 0.5}] * 5)
    alerts.on_log(trainer.args, trainer.state, trainer.control, logs={"eval_reward": 0.4, "epoch": 0.1})
    assert alerts.monitor.history.held_out["eval/reward"].last == 0.4
    assert alerts.monitor.history.late_rows == 0


def test_only_the_main_process_writes_but_all_stop(tmp_path, capsys):
    alerts = AlertCallback()
    trainer = FakeTrainer(alerts, tmp_path / "out")
    trainer.state.is_world_process_zero = False
    trainer.train(cut_off())
    assert trainer.control.should_training_stop
    assert not (tmp_path / "out").exists() and capsys.readouterr().err == ""


def test_optuna_trial_is_reported_to_and_learns_why_it_was_stopped(tmp_path):
    study = optuna.create_study(pruner=optuna.pruners.NopPruner())

    def objective(trial):
        alerts = AlertCallback(on_alert=lambda alert: None, trial=trial)
        FakeTrainer(alerts, tmp_path).train(cut_off())
        alerts.raise_if_pruned()
        return 1.0

    study.optimize(objective, n_trials=1)
    (trial,) = study.trials
    assert trial.state == optuna.trial.TrialState.PRUNED
    assert trial.user_attrs["code"] == "A08" and trial.user_attrs["intervention"]
    assert trial.intermediate_values == {1: 0.0, 2: 0.0, 3: 0.0}


def test_the_pruner_of_the_study_can_end_the_training_too(tmp_path):
    study = optuna.create_study(direction="maximize", pruner=optuna.pruners.ThresholdPruner(lower=0.5))
    alerts = AlertCallback(trial=study.ask())
    trainer = FakeTrainer(alerts, tmp_path).train([{"reward": 0.9}, {"reward": 0.1}, {"reward": 0.9}])
    assert trainer.state.global_step == 2
    with pytest.raises(optuna.TrialPruned, match="pruner"):
        alerts.raise_if_pruned()


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"num_iterations": 4, "steps_per_generation": 8, "gradient_accumulation_steps": 2}, 16),
        ({"num_iterations": 1, "steps_per_generation": 4, "gradient_accumulation_steps": 4}, 1),
        ({}, 1),
    ],
)
def test_the_step_unit_comes_from_the_trainers_arguments(tmp_path, args, expected):
    assert updates_per_rollout(SimpleNamespace(**args)) == expected
    alerts = AlertCallback()
    FakeTrainer(alerts, tmp_path, **args).train([])
    assert alerts.monitor.history.unit == expected


def test_a_wrong_configuration_fails_before_training():
    with pytest.raises(ConfigError, match="profile"):
        AlertCallback(AlertsConfig(profile="strict"))

"""The study as Optuna sees it, and the alert pruner on its own in an ordinary Optuna script."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from sweeps.book import Book
from sweeps.configuration import Configuration
from sweeps.pruner import AlertPruner, metric_pruner
from sweeps.samplers import distribution, make_sampler
from sweeps.study import Study
from sweeps.types import SpaceEntry
from tests.fakes import make_plan

ROOT = Path(__file__).resolve().parent.parent


def opened(directory: Path, arms: Any = ("a", "b"), **settings: Any) -> tuple[Study, list[Configuration], list[str]]:
    said: list[str] = []
    plan = make_plan(directory, {arm: {} for arm in arms}, seeds=(0, 1), **settings)
    configurations = Book(plan).add_planned(searched=False)
    study = Study(plan, said.append)
    study.open(configurations)
    return study, configurations, said


def load(directory: Path) -> optuna.Study:
    return optuna.load_study(study_name=directory.name, storage=f"sqlite:///{directory}/study.db")


def measure(configuration: Configuration, seed: int, values: list[tuple[int, float]], status: str = "running") -> None:
    run = configuration.runs[seed]
    run.values, run.status = values, status


def test_the_database_is_in_wal_mode_so_that_a_dashboard_can_read_while_it_is_written(tmp_path: Path) -> None:
    study, configurations, _ = opened(tmp_path / "s")
    study.begin(configurations[0])
    study.work()
    connection = sqlite3.connect(tmp_path / "s" / "study.db")
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()
    study.close()


def test_intermediate_values_are_the_mean_of_the_seeds_that_got_there(tmp_path: Path) -> None:
    study, (first, _), _ = opened(tmp_path / "s")
    study.begin(first)
    study.work()
    measure(first, 0, [(5, 0.2), (10, 0.4)])
    study.report(first, 5)
    study.report(first, 10)
    study.work()
    measure(first, 1, [(5, 0.4)])
    study.report(first, 5)
    study.work()
    (trial,) = load(tmp_path / "s").trials
    assert trial.intermediate_values == pytest.approx({5: 0.3, 10: 0.4})
    study.close()


def test_a_trial_left_running_is_taken_up_again_not_doubled(tmp_path: Path) -> None:
    study, (first, _), _ = opened(tmp_path / "s")
    study.begin(first)
    study.work()
    study.close()
    again, (first, _), _ = opened(tmp_path / "s")
    assert first.trial == load(tmp_path / "s").trials[0]._trial_id
    measure(first, 0, [(10, 0.5)], "finished")
    measure(first, 1, [(10, 0.7)], "finished")
    again.tell(first)
    again.work()
    assert [(trial.state.name, trial.value) for trial in load(tmp_path / "s").trials] == [("COMPLETE", 0.6)]
    again.close()


def test_a_running_trial_nobody_knows_is_closed_and_says_so(tmp_path: Path) -> None:
    study, _, _ = opened(tmp_path / "s")
    study.close()
    load(tmp_path / "s").ask()
    again, _, _ = opened(tmp_path / "s")
    (trial,) = load(tmp_path / "s").trials
    assert trial.state.name == "FAIL" and "coordinator ended" in trial.user_attrs["orphan"]
    again.close()


def test_a_failed_seed_fails_the_trial_and_names_the_seed(tmp_path: Path) -> None:
    study, (first, _), _ = opened(tmp_path / "s")
    study.begin(first)
    study.work()
    measure(first, 0, [(10, 0.5)], "finished")
    measure(first, 1, [(5, 0.2)], "failed")
    first.runs[1].error_class, first.runs[1].reason = "non_finite", "loss is nan"
    study.tell(first)
    study.work()
    (trial,) = load(tmp_path / "s").trials
    assert trial.state.name == "FAIL"
    assert trial.user_attrs["failures"][0]["seed"] == 1
    assert trial.user_attrs["failures"][0]["error_class"] == "non_finite"
    study.close()


def test_a_configuration_without_the_metric_fails_instead_of_inventing_a_value(tmp_path: Path) -> None:
    study, (first, _), _ = opened(tmp_path / "s")
    study.begin(first)
    study.work()
    for seed in (0, 1):
        measure(first, seed, [], "finished")
    study.tell(first)
    study.work()
    assert [trial.state.name for trial in load(tmp_path / "s").trials] == ["FAIL"]
    study.close()


def test_a_database_that_cannot_be_reached_is_said_once_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file where a folder should be")
    study, (first, _), said = opened(tmp_path / "s", study={"storage": f"sqlite:///{tmp_path}/file/study.db"})
    assert not study.available and len(said) == 1
    study.begin(first)
    study.work()
    assert study.report(first, 5) is False and study.ask("", [], {}, "random") is None
    study.tell(first)
    assert len(said) == 1


def test_the_same_seed_and_count_draw_the_same_values() -> None:
    entry = SpaceEntry("x", "float", low=0.0, high=1.0)

    def draw(seed: int) -> float:
        study = optuna.create_study(sampler=make_sampler("random", seed, {}))
        return float(study.ask({"x": distribution(entry)}).params["x"])

    assert draw(3) == draw(3) != draw(4)


def test_draws_one_after_the_other_are_spread_over_the_space(tmp_path: Path) -> None:
    # the first values of numpy's generators with the seeds 0 to 3 are .55, .42, .44 and .55
    study, _, _ = opened(tmp_path / "s", study={"sampler": "random"})
    entry = SpaceEntry("x", "float", low=0.0, high=1.0)
    drawn = []
    for _ in range(12):
        asked = study.ask("", [entry], {}, "random")
        assert asked is not None
        drawn.append(asked[1]["x"])
    quarters = {int(4 * value) for value in drawn}
    assert quarters == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (SpaceEntry("x", "float", low=1e-5, high=1e-3, log=True), FloatDistribution(1e-5, 1e-3, log=True)),
        (SpaceEntry("x", "int", low=2, high=8, step=2), IntDistribution(2, 8, step=2)),
        (SpaceEntry("x", "choice", choices=("a", None)), CategoricalDistribution(["a", None])),
    ],
)  # fmt: skip
def test_space_entries_become_optuna_distributions(entry: SpaceEntry, expected: Any) -> None:
    assert distribution(entry) == expected


def test_without_a_metric_pruner_optunas_default_median_pruner_is_not_used() -> None:
    assert isinstance(metric_pruner("none", 5, 100, 5), optuna.pruners.NopPruner)


def test_a_metric_pruner_knows_how_long_the_runs_of_a_search_are(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "s", seeds=(0,), steps=90, study={"sampler": "random", "pruner": "hyperband"})
    study = Study(plan, print)
    study.open([])
    pruner = load_pruner(study)
    assert (pruner._min_resource, pruner._max_resource) == (5, 90)
    study.close()


def load_pruner(study: Study) -> Any:
    return study._database.need().pruner._pruners[1]  # type: ignore[attr-defined]


def test_the_alert_pruner_alone_stops_a_trial_with_its_reason(tmp_path: Path) -> None:
    pruner = AlertPruner()
    study = optuna.create_study(direction="maximize", pruner=pruner)

    def objective(trial: optuna.Trial) -> float:
        reward = 0.0
        for step in range(1, 101):
            reward = min(0.8, step / 50)
            metrics = {"reward/total": reward, "entropy/mean": 0.5, "optim/grad_norm": 1.0}
            if trial.number == 1 and step > 40:
                metrics["optim/grad_norm"] = float("nan")
            pruner.record(trial, step, metrics)
            trial.report(reward, step)
            if trial.should_prune():
                raise optuna.TrialPruned
        return reward

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study.optimize(objective, n_trials=2)
    healthy, sick = study.trials
    assert healthy.state.name == "COMPLETE" and "code" not in healthy.user_attrs
    assert sick.state.name == "PRUNED" and sick.user_attrs["code"] == "A01"
    assert 41 <= sick.user_attrs["step"] <= 43
    assert sick.user_attrs["evidence"] and sick.user_attrs["intervention"]
    assert sick.constraints == {"stopped": 1.0}


def test_the_pruner_module_imports_no_torch() -> None:
    code = "import sys, sweeps.pruner; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_the_command_line_answers_without_optuna_and_torch() -> None:
    code = "import sys, sweeps.__main__; raise SystemExit(any(m in sys.modules for m in ('optuna', 'torch', 'pandas')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_a_coordinator_that_does_not_hold_the_study_asks_for_nothing(tmp_path: Path) -> None:
    entry, holds = SpaceEntry("optim.lr", "float", low=1e-6, high=1e-2, log=True), [True]
    plan = make_plan(tmp_path / "s", study={"sampler": "random", "trials": 3}, space=[entry])
    study = Study(plan, print, lambda: holds[-1])
    study.open([])
    assert study.ask("", [entry], {}, "random") is not None
    holds.append(False)
    assert study.ask("", [entry], {}, "random") is None
    assert len(load(tmp_path / "s").trials) == 1
    study.close()

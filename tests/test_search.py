"""Searches: what is asked for is run, seeds are replicates, the clearly worse is given up, nothing is repeated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest

from sweeps.configuration import Configuration
from sweeps.ledger import read_ledger
from sweeps.runner import run
from sweeps.search import clearly_behind
from sweeps.stages import judge
from sweeps.state import RunState
from sweeps.story import read_runs
from sweeps.types import Plan, SpaceEntry, Stage
from tests.fakes import make_plan, make_spec

pytestmark = pytest.mark.usefixtures("no_report")

LR = SpaceEntry("optim.lr", "float", low=1e-6, high=1e-2, log=True)


def search_plan(directory: Path, seeds: Any = (0,), **study: Any) -> Plan:
    settings = {"sampler": "tpe", "trials": 6, "startup_trials": 3, **study}
    return make_plan(directory, seeds=seeds, study=settings, space=[LR])


def load(directory: Path) -> optuna.Study:
    return optuna.load_study(study_name=directory.name, storage=f"sqlite:///{directory}/study.db")


def entries(directory: Path, kind: str) -> list[dict[str, Any]]:
    return [entry for entry in read_ledger(directory) if entry["type"] == kind]


@pytest.mark.parametrize("sampler", ["random", "tpe", "cmaes", "gp"])
def test_a_search_runs_what_it_asks_for_and_tells_the_value(tmp_path: Path, sampler: str) -> None:
    if sampler == "cmaes":
        pytest.importorskip("cmaes")
    plan = search_plan(tmp_path / "s", sampler=sampler)
    assert run(plan) == 0
    study = load(plan.directory)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 6
    rates = {state.spec.config["optim"]["lr"] for state in read_runs(plan.directory).values()}
    assert rates == {trial.params["optim.lr"] for trial in study.trials}
    assert all(0.3 < trial.value < 0.9 for trial in study.trials)


def test_a_sampler_whose_package_is_missing_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sweeps.search._PACKAGES", {"cmaes": "no_such_package"})
    assert run(search_plan(tmp_path / "s", sampler="cmaes")) == 2
    assert "study.sampler=cmaes: needs the package no_such_package" in capsys.readouterr().err
    assert not (tmp_path / "s").exists()


def test_a_configuration_has_one_trial_and_the_mean_of_its_seeds(tmp_path: Path) -> None:
    plan = search_plan(tmp_path / "s", seeds=(0, 1, 2), trials=3, abandon=False)
    assert run(plan) == 0
    trials = load(plan.directory).trials
    assert len(trials) == 3 and len(read_runs(plan.directory)) == 9
    for trial in trials:
        assert sorted(trial.user_attrs["values"]) == ["0", "1", "2"]
        assert trial.value == pytest.approx(sum(trial.user_attrs["values"].values()) / 3)


def test_a_search_resumed_after_an_early_end_does_not_repeat_its_draws(tmp_path: Path) -> None:
    first = search_plan(tmp_path / "s", sampler="random", trials=3)
    assert run(first) == 0
    assert run(search_plan(tmp_path / "s", sampler="random", trials=6)) == 0
    straight = search_plan(tmp_path / "t", sampler="random", trials=6)
    assert run(straight) == 0
    drawn = [trial.params["optim.lr"] for trial in load(tmp_path / "s").trials]
    assert len(set(drawn)) == 6
    assert sorted(drawn) == sorted(trial.params["optim.lr"] for trial in load(tmp_path / "t").trials)


def test_a_search_learns_nothing_from_trials_that_other_code_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = search_plan(tmp_path / "s", sampler="random", trials=3)
    assert run(first) == 0
    second = search_plan(tmp_path / "s", sampler="random", trials=4)
    second.composer.base["fake"] = {"sleep": 0.01}  # type: ignore[union-attr]  # other keys, as other code makes them
    assert run(second) == 0
    assert "3 of its trials were made by other code" in capsys.readouterr().out
    assert len(load(second.directory).trials) == 4
    assert len(entries(second.directory, "start")) == 3 + 4


def test_a_search_in_a_narrower_space_keeps_what_lies_in_it(tmp_path: Path) -> None:
    assert run(search_plan(tmp_path / "s", sampler="random", trials=6)) == 0
    inside = {trial.params["optim.lr"] for trial in load(tmp_path / "s").trials if trial.params["optim.lr"] >= 1e-4}
    narrow = SpaceEntry("optim.lr", "float", low=1e-4, high=1e-2, log=True)
    study = {"sampler": "random", "trials": 6, "startup_trials": 3}
    assert 0 < len(inside) < 6
    assert run(make_plan(tmp_path / "s", seeds=(0,), study=study, space=[narrow])) == 0
    rates = {trial.params["optim.lr"] for trial in load(tmp_path / "s").trials}
    assert len(rates) == 6 and min(rates) >= 1e-4 and inside < rates


def test_a_deleted_study_of_a_search_is_rebuilt_with_its_parameters(tmp_path: Path) -> None:
    run(search_plan(tmp_path / "s", seeds=(0, 1)))
    before = {(trial.params["optim.lr"], trial.value) for trial in load(tmp_path / "s").trials}
    for path in (tmp_path / "s").glob("study.db*"):
        path.unlink()
    started = len(entries(tmp_path / "s", "start"))
    assert run(search_plan(tmp_path / "s", seeds=(0, 1))) == 0
    assert {(trial.params["optim.lr"], trial.value) for trial in load(tmp_path / "s").trials} == before
    assert len(entries(tmp_path / "s", "start")) == started


def test_a_median_pruner_stops_a_searched_configuration_and_says_so(tmp_path: Path) -> None:
    grid = SpaceEntry("fake.accuracy", "choice", choices=(0.9, 0.8, 0.85, 0.82, 0.1, 0.05))
    plan = make_plan(
        tmp_path / "s", seeds=(0,), steps=60, engine={"slots": 1}, space=[grid],
        study={"sampler": "random", "trials": 12, "startup_trials": 2, "pruner": "median", "seed": 3},
    )  # fmt: skip
    plan.composer.base["fake"] = {"sleep": 0.02}  # type: ignore[union-attr]
    assert run(plan) == 0
    pruned = [trial for trial in load(plan.directory).trials if trial.state.name == "PRUNED"]
    assert pruned
    for trial in pruned:
        assert trial.user_attrs["pruned"]["title"] == "pruned by median"
        assert trial.user_attrs["pruned"]["evidence"]["metric"] == "eval/accuracy"
        assert trial.constraints == {"stopped": 0.0}
    steps = [state.step for state in read_runs(plan.directory).values() if state.status == "stopped"]
    assert steps and all(step < 60 for step in steps)


def test_arms_of_an_ablation_are_never_pruned_by_metric(tmp_path: Path) -> None:
    arms = {"good": {"accuracy": 0.9}, "fine": {"accuracy": 0.8}, "poor": {"accuracy": 0.1, "sleep": 0.01}}
    plan = make_plan(tmp_path / "s", arms, seeds=(0, 1), steps=30, study={"pruner": "median", "startup_trials": 0})
    assert run(plan) == 0
    assert [trial.state.name for trial in load(plan.directory).trials] == ["COMPLETE"] * 3


def configuration(name: str, values: list[float], status: str = "finished") -> Configuration:
    runs = []
    for seed, value in enumerate(values):
        state = RunState(make_spec(name, seed, {"steps": 1, "name": name}), status=status)
        state.values = [(1, value)]
        runs.append(state)
    return Configuration("", name, {"x": name}, runs, searched=True)


def test_giving_up_needs_two_standard_errors_of_the_paired_difference() -> None:
    # Two configurations of three seeds, both with variance 0.0001 between seeds: pooled 0.0001, so one shared seed
    # has a standard error of sqrt(2 * 0.0001) = 0.01414, and 0.0283 behind is the limit.
    done = [configuration("a", [0.80, 0.81, 0.82]), configuration("b", [0.70, 0.71, 0.72])]
    assert clearly_behind(configuration("c", [0.775]), done, maximize=True) is None
    why = clearly_behind(configuration("c", [0.770]), done, maximize=True)
    assert why is not None and why["best"] == "a" and why["on_seeds"] == [0]
    assert clearly_behind(configuration("c", [0.60]), done, maximize=False) is None


def test_nothing_is_given_up_while_the_spread_between_seeds_is_unknown() -> None:
    done = [configuration("a", [0.8]), configuration("b", [0.7])]
    assert clearly_behind(configuration("c", [0.1]), done, maximize=True) is None


def test_seeds_of_a_clearly_worse_configuration_are_not_run(tmp_path: Path) -> None:
    quality = SpaceEntry("fake.accuracy", "float", low=0.1, high=0.9)
    plan = make_plan(
        tmp_path / "s", seeds=(0, 1, 2), engine={"slots": 1}, space=[quality],
        study={"sampler": "random", "trials": 8, "seed": 1},
    )  # fmt: skip
    assert run(plan) == 0
    trials = load(plan.directory).trials
    given_up = [trial for trial in trials if "abandoned" in trial.user_attrs]
    assert given_up and len(given_up) == len(entries(plan.directory, "abandon"))
    best = max(trial.params["fake.accuracy"] for trial in trials)
    for trial in given_up:
        assert trial.params["fake.accuracy"] < best
        assert trial.state.name == "COMPLETE" and len(trial.user_attrs["values"]) < 3


def test_a_parameter_is_asked_for_only_under_its_condition(tmp_path: Path) -> None:
    kind = SpaceEntry("kl.kind", "choice", choices=("off", "k3"))
    coef = SpaceEntry("kl.coef", "float", low=1e-4, high=1e-1, log=True, when={"kl.kind": ("k3",)})
    plan = make_plan(tmp_path / "s", seeds=(0,), study={"sampler": "tpe", "trials": 8}, space=[kind, coef])
    assert run(plan) == 0
    for trial in load(plan.directory).trials:
        assert ("kl.coef" in trial.params) == (trial.params["kl.kind"] == "k3")


def stage_plan(directory: Path, better: float, **settings: Any) -> Plan:
    stages = [
        Stage("data", arms={"plain": [], "other": [f"fake.accuracy={better}"]}, share=0.5),
        Stage("rate", space=(SpaceEntry("optim.lr", "choice", choices=(1e-4, 1e-3)),), share=0.5),
    ]
    plan = make_plan(directory, seeds=(0, 1, 2), stages=stages, **settings)
    plan.composer.base["fake"] = {"accuracy": 0.5}  # type: ignore[union-attr]
    return plan


def test_a_proven_winner_is_carried_into_the_next_stage(tmp_path: Path) -> None:
    plan = stage_plan(tmp_path / "s", better=0.9)
    assert run(plan) == 0
    verdicts = entries(plan.directory, "winner")
    assert [(v["stage"], v["best"], v["carried"]) for v in verdicts[:1]] == [("data", "other", True)]
    assert verdicts[0]["difference"] == pytest.approx(0.4, abs=0.01) and verdicts[0]["low"] > 0.3
    second = [state for state in read_runs(plan.directory).values() if state.spec.stage == "rate"]
    assert second and all(state.spec.config["fake"]["accuracy"] == 0.9 for state in second)


def test_a_winner_that_cannot_be_told_from_the_default_is_not_carried(tmp_path: Path, capsys: Any) -> None:
    plan = stage_plan(tmp_path / "s", better=0.5)
    plan.stages[0].arms["other"].append("optim.lr=1.001e-4")
    assert run(plan) == 0
    verdict = entries(plan.directory, "winner")[0]
    assert not verdict["carried"]
    assert "not distinguishable, the default stays" in capsys.readouterr().out
    second = [state for state in read_runs(plan.directory).values() if state.spec.stage == "rate"]
    assert all(state.spec.config["fake"]["accuracy"] == 0.5 for state in second)


def test_a_staged_sweep_resumes_without_repeating_a_run(tmp_path: Path) -> None:
    assert run(stage_plan(tmp_path / "s", better=0.9)) == 0
    assert not entries(tmp_path / "s", "warning")
    started = len(entries(tmp_path / "s", "start"))
    keys = set(read_runs(tmp_path / "s"))
    told = [(trial.state, trial.value, trial.user_attrs) for trial in load(tmp_path / "s").trials]
    assert run(stage_plan(tmp_path / "s", better=0.9)) == 0
    assert len(entries(tmp_path / "s", "start")) == started
    assert set(read_runs(tmp_path / "s")) == keys
    assert [(trial.state, trial.value, trial.user_attrs) for trial in load(tmp_path / "s").trials] == told
    assert {trial.state.name for trial in load(tmp_path / "s").trials} == {"COMPLETE"}
    assert not entries(tmp_path / "s", "warning")


def test_a_resumed_stage_with_a_sampler_asks_for_no_more_than_its_trials(tmp_path: Path) -> None:
    for _ in range(2):
        stage = Stage("rate", space=(LR,), sampler="random", trials=4, share=1.0)
        plan = make_plan(tmp_path / "s", seeds=(0, 1), stages=[stage], study={"abandon": False})
        assert run(plan) == 0
        names = [trial.user_attrs.get("configuration", "the default") for trial in load(plan.directory).trials]
        assert len(names) == len(set(names)) == 5
        assert len(read_runs(plan.directory)) == 10


def test_a_configuration_drawn_again_shares_its_runs_and_counts_as_asked_for(tmp_path: Path) -> None:
    coin = SpaceEntry("optim.lr", "choice", choices=(1e-4, 1e-3))
    for trials, states in ((5, ["COMPLETE"] * 5), (5, ["COMPLETE"] * 5), (7, ["COMPLETE"] * 7)):
        study = {"sampler": "random", "trials": trials}
        assert run(make_plan(tmp_path / "s", seeds=(0,), space=[coin], study=study, engine={"slots": 1})) == 0
        assert [trial.state.name for trial in load(tmp_path / "s").trials] == states
    assert len(read_runs(tmp_path / "s")) == 2


def test_a_stage_starts_nothing_more_once_its_share_is_spent(tmp_path: Path) -> None:
    # Half of a budget of 60 steps lets the first stage start 3 runs of 10 steps: default-s0, other-s0, default-s1.
    plan = stage_plan(tmp_path / "s", better=0.9, engine={"slots": 1}, sweep={"budget": {"steps": 60}})
    assert run(plan) == 0
    ran = [(entry["arm"], entry["seed"]) for entry in entries(plan.directory, "start")]
    assert ran[:3] == [("default", 0), ("other", 0), ("default", 1)]
    assert ("other", 1) not in ran and ("other", 2) not in ran
    assert len(ran) == 6 and entries(plan.directory, "share_spent")
    verdict = entries(plan.directory, "winner")[0]
    assert (verdict["best"], verdict["num_seeds"], verdict["carried"]) == ("other", 1, False)


def test_a_stage_closed_with_its_share_spent_stays_closed_on_resume(tmp_path: Path) -> None:
    # Half of 100 steps lets the first stage start five of six runs. The second one, whose default is the winner of the
    # first, makes the sixth; the verdict on the first must not change by that.
    for times in (1, 2):
        plan = stage_plan(tmp_path / "s", better=0.9, engine={"slots": 1}, sweep={"budget": {"steps": 100}})
        assert run(plan) == 0
        assert len(entries(plan.directory, "start")) == 9
        found = [(v["best"], v["num_seeds"], v["carried"]) for v in entries(plan.directory, "winner")]
        assert found[::2] == [("other", 2, True)] * times
    assert len(entries(plan.directory, "share_spent")) == 1
    larger = stage_plan(tmp_path / "s", better=0.9, engine={"slots": 1}, sweep={"budget": {"steps": 400}})
    assert run(larger) == 0
    assert entries(plan.directory, "winner")[4]["num_seeds"] == 3


def test_a_candidate_with_a_stopped_seed_cannot_win() -> None:
    from sweeps.stages import _Candidate

    default = configuration("default", [0.5, 0.51, 0.52])
    sick = configuration("sick", [0.9, 0.91, 0.92])
    sick.runs[2].status = "stopped"
    well = configuration("well", [0.6, 0.61, 0.625])
    verdict, winner = judge("x", default, [_Candidate(sick), _Candidate(well)], sign=1.0)
    assert winner is not None and winner.configuration is well
    assert verdict.num_candidates == 1 and verdict.carried
    # Differences 0.1, 0.1, 0.105: mean 0.101667, sd 0.0028868, t(2, 97.5 %) = 4.3027, half width 0.0071712.
    assert verdict.low == pytest.approx(0.101667 - 0.007171, abs=1e-5)


def test_the_level_is_shared_among_the_candidates() -> None:
    from sweeps.stages import _Candidate

    default = configuration("default", [0.5, 0.5, 0.5])
    rivals = [_Candidate(configuration(name, [0.6, 0.61, 0.625])) for name in "abcde"]
    verdict, _ = judge("x", default, rivals, sign=1.0)
    assert verdict.level == pytest.approx(0.99)

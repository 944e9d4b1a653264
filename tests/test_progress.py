"""What a person sees: the table's cells, plain lines without a terminal, and what the sweep as a whole noticed."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reasonrl.models import ModelConfig
from reasonrl.models.tiny import base_folder, base_recipe
from sweeps import summary
from sweeps.budget import Budget, forecast_seconds
from sweeps.configuration import Configuration
from sweeps.findings import edge_findings
from sweeps.ledger import read_ledger
from sweeps.progress import COLUMNS, Progress, alert_codes, describe_end, duration, pick_rows, row_of, unbuilt_models
from sweeps.runner import run
from sweeps.schedule import Queue
from sweeps.state import RunState
from sweeps.types import SpaceEntry
from tests.fakes import base_config, make_plan, make_spec


def state(arm: str = "a", seed: int = 0, steps: int = 100, **fields: Any) -> RunState:
    made = RunState(make_spec(arm, seed, {**base_config(steps), "arm": arm}))
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_a_row_shows_step_reward_entropy_speed_eta_and_alerts() -> None:
    run = state(status="running", step=40, seconds_per_step=2.0)
    run.shown = {"reward/total": 0.51234, "entropy/mean": 0.3, "speed/tokens_per_s": 1234.5}
    run.alerts = [
        {"code": "A03", "severity": "note"}, {"code": "A03", "severity": "flag"}, {"code": "A05", "severity": "note"},
    ]  # fmt: skip
    cells = dict(zip(COLUMNS, row_of(run), strict=True))
    assert cells["step"] == "40/100" and cells["reward"] == "0.512" and cells["entropy"] == "0.300"
    assert cells["tok/s"] in ("1234", "1235") and cells["ETA"] == "2 min 00 s"
    assert cells["alerts"] == alert_codes(run) == "A03 flag, A05 note"


def test_a_stopped_run_is_described_with_reason_and_cure() -> None:
    run = state(status="stopped", step=30)
    run.reason = {
        "code": "A03",
        "title": "entropy collapse",
        "message": "0.02 nats",
        "intervention": ["loss=clip_higher"],
    }
    text = describe_end(run)
    assert "stopped at step 30/100: A03 entropy collapse: 0.02 nats. Try loss=clip_higher" in text


def test_a_full_screen_keeps_what_runs_and_what_went_wrong() -> None:
    runs = [state(seed=seed, status="finished") for seed in range(30)]
    runs[3].status, runs[20].status, runs[25].status = "running", "failed", "stopped"
    kept = pick_rows(runs, 5)
    assert {run.spec.seed for run in kept} >= {3, 20, 25} and len(kept) == 5


@pytest.mark.parametrize(
    ("seconds", "text"), [(42, "42 s"), (200, "3 min 20 s"), (7500, "2 h 05 min"), (59.6, "1 min 00 s")]
)
def test_durations_read_like_a_person_says_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_live_table_is_drawn_on_a_terminal_and_plain_lines_elsewhere(tmp_path: Path) -> None:
    from rich.console import Console

    plan = make_plan(tmp_path / "s", {"a": {}}, seeds=(0,))
    screen = io.StringIO()
    progress = Progress(plan)
    progress.console = Console(file=screen, force_terminal=True, width=120, height=30)
    running = state(status="running", step=7)
    running.shown = {"reward/total": 0.777}
    sweep: Any = SimpleNamespace(
        book=SimpleNamespace(runs={running.key: running}), seats=[], running=[], resumed=0,
    )  # fmt: skip
    progress.begin(sweep)
    progress.refresh(sweep)
    progress.line("a line above the table")
    progress.close()
    drawn = screen.getvalue()
    assert "0.777" in drawn and "7/100" in drawn and "a line above the table" in drawn

    plain = io.StringIO()
    progress = Progress(plan, plain)
    progress.begin(sweep)
    progress.ended(state(status="finished", step=100))
    progress.close()
    assert "\x1b" not in plain.getvalue() and "a-s0" in plain.getvalue()


def test_the_forecast_divides_what_is_left_by_the_slots() -> None:
    runs = [state(seed=0, status="running", step=50, seconds_per_step=2.0), state(seed=1)]
    # 50 steps x 2 s left of the first, 100 x 2 s of the second (its speed unknown: the median), over 2 slots.
    assert forecast_seconds(runs, 2) == pytest.approx(150.0)
    assert forecast_seconds([state()], 2) is None


def test_a_budget_of_runs_lets_as_many_new_ones_be_offered_as_are_left() -> None:
    budget = Budget({"runs": 3}, gpus_per_slot=1)
    budget.count_past([state(step=60, status="finished"), state(seed=1, step=30, status="partial")])
    begun, *fresh = state(seed=1, step=30, status="partial"), state(seed=2), state(seed=3)
    assert budget.fitting([fresh[0], fresh[1], begun]) == [fresh[0], begun]


def test_a_budget_counts_earlier_commands_and_names_the_limit() -> None:
    budget = Budget({"steps": 100, "runs": None, "gpu_hours": None, "minutes": None}, gpus_per_slot=2)
    budget.count_past([state(step=60, status="finished"), state(seed=1, step=30, status="paused"), state(seed=2)])
    assert (budget.runs, budget.steps) == (2, 90)
    assert budget.exhausted() is None
    budget.steps += 10
    assert budget.exhausted() == "budget spent: 100 of 100 steps (sweep.budget.steps)"
    budget.busy_s = 1800
    assert budget.spent()["gpu_hours"] == pytest.approx(1.0)


def test_rungs_are_moved_up_to_the_next_evaluation() -> None:
    queue = Queue({"schedule": "breadth", "rungs": 4})
    # A quarter of 50 is 12.5 steps: 13, evaluations every 5, hence 15; then 25, 38 -> 40, 50.
    run = state(steps=50)
    assert queue.boundaries(run) == [15, 25, 40, 50]
    run.step = 15
    assert queue.rung_of(run) == 1 and queue.pause_step(run) == 25
    run.step = 40
    assert queue.pause_step(run) is None


def searched(value: float, mean: float) -> Configuration:
    run = state(arm=str(value), status="finished")
    run.values = [(100, mean)]
    return Configuration("", str(value), {"optim.lr": value}, [run], searched=True)


def test_a_best_value_at_the_edge_of_its_range_is_found() -> None:
    entry = SpaceEntry("optim.lr", "float", low=1e-6, high=1e-2, log=True)
    inside = [searched(1e-5, 0.2), searched(1e-4, 0.6), searched(1e-3, 0.5)]
    assert edge_findings(inside, [entry], maximize=True) == []
    # log10 from -6 to -2: 9e-3 lies at 98.9 % of the range.
    (finding,) = edge_findings([*inside, searched(9e-3, 0.9)], [entry], maximize=True)
    assert finding["code"] == "A18" and "high end" in finding["message"] and "upwards" in finding["intervention"][0]
    choice = SpaceEntry("optim.lr", "choice", choices=(1e-5, 1e-4, 1e-3))
    assert edge_findings(inside, [choice], maximize=True) == []
    assert edge_findings(inside, [choice], maximize=False)[0]["evidence"]["value"] == 1e-5


def test_arms_are_compared_when_all_have_reached_a_rung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(summary, "make_report", lambda sweep: None)
    arms = {"a": {"accuracy": 0.5}, "b": {"accuracy": 0.8}}
    plan = make_plan(tmp_path / "s", arms, seeds=(0, 1), steps=20, sweep={"schedule": "breadth", "rungs": 2})
    assert run(plan) == 0
    lines = [entry["message"] for entry in read_ledger(plan.directory) if entry["type"] == "rung"]
    assert len(lines) == 1 and lines[0].startswith("rung 1 of 2 (step 10), eval/accuracy: a 0.26")
    assert "against a, 2 seeds" in lines[0] and lines[0] in capsys.readouterr().out


def test_the_pruner_example_runs_and_explains_its_stops(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).resolve().parent.parent / "examples" / "alert_pruner.py"
    spec = importlib.util.spec_from_file_location("alert_pruner", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    study = module.main()
    outcome = {trial.params["lr"] > 3e-4: trial.state.name for trial in study.trials}
    assert outcome == {True: "PRUNED", False: "COMPLETE"}
    pruned = [trial for trial in study.trials if trial.state.name == "PRUNED"]
    assert all(trial.user_attrs["code"].startswith("A") and trial.user_attrs["evidence"] for trial in pruned)
    assert "Try " in capsys.readouterr().out


def test_built_in_models_that_are_still_to_be_made_are_counted_once_each(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("REASONRL_CACHE", str(tmp_path))
    task = {"operands": [4, 5]}
    tiny, hf = {"model": {"kind": "tiny"}, "task": task}, {"model": {"kind": "hf", "path": "x"}, "task": task}
    other = {"model": {"kind": "tiny", "noise": 0.5}, "task": task}
    assert unbuilt_models([tiny, tiny, hf, {}]) == 1 and unbuilt_models([tiny, other]) == 2
    base_folder(base_recipe(ModelConfig(), [4, 5])).mkdir()
    assert unbuilt_models([tiny, other]) == 1

"""The coordinator's loop over fake runs: everything gets done, stops carry reasons, failures are treated by class."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import optuna
import pytest

from reasonrl import tracking
from reasonrl.events import read_events
from sweeps import summary
from sweeps.engines.base import Slot
from sweeps.jobs import Jobs
from sweeps.ledger import read_ledger
from sweeps.runner import run
from sweeps.seats import Seat
from sweeps.state import RunState
from sweeps.storage import Database
from sweeps.story import read_runs, status_lines, why_lines
from tests.fakes import group_members, make_plan, make_spec, rows_of

pytestmark = pytest.mark.usefixtures("no_report")


def by_name(directory: Path) -> dict[str, RunState]:
    return {state.spec.name: state for state in read_runs(directory).values()}


def entries(directory: Path, kind: str) -> list[dict[str, Any]]:
    return [entry for entry in read_ledger(directory) if entry["type"] == kind]


def trials(directory: Path) -> dict[str, optuna.trial.FrozenTrial]:
    study = optuna.load_study(study_name=directory.name, storage=f"sqlite:///{directory}/study.db")
    return {trial.user_attrs["arm"]: trial for trial in study.trials}


def test_every_arm_and_seed_is_run_once_and_told(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "s", {"a": {}, "b": {}}, seeds=(0, 1))
    assert run(plan) == 0
    rows = rows_of(plan.directory)
    assert {key: sorted(steps) for key, steps in rows.items()} == {run.key: list(range(1, 11)) for run in plan.runs}
    for trial in trials(plan.directory).values():
        assert trial.state.name == "COMPLETE"
        assert trial.value == pytest.approx(sum(trial.user_attrs["values"].values()) / 2)
        assert sorted(trial.intermediate_values) == [0, 5, 10]


def test_the_same_command_again_repeats_nothing(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "s", {"a": {}}, seeds=(0, 1))
    run(plan)
    before = {path: path.read_bytes() for path in plan.directory.glob("runs/*/events.jsonl")}
    assert run(make_plan(tmp_path / "s", {"a": {}}, seeds=(0, 1))) == 0
    assert {path: path.read_bytes() for path in plan.directory.glob("runs/*/events.jsonl")} == before
    assert not (plan.directory / "coordinator.lock").exists()


def test_a_larger_plan_adds_only_what_is_new(tmp_path: Path) -> None:
    run(make_plan(tmp_path / "s", {"a": {}}, seeds=(0,)))
    run(make_plan(tmp_path / "s", {"a": {}, "b": {}}, seeds=(0, 1)))
    starts = [entry["key"] for entry in entries(tmp_path / "s", "start")]
    assert len(starts) == len(set(starts)) == 4
    assert {name: trial.state.name for name, trial in trials(tmp_path / "s").items()} == {
        "a": "COMPLETE",
        "b": "COMPLETE",
    }


def test_a_stopped_run_is_pruned_with_code_evidence_and_cure_in_the_study(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "s", {"good": {}, "bad": {"collapse_at": 3}}, seeds=(0, 1), steps=20)
    assert run(plan) == 0
    bad, good = trials(plan.directory)["bad"], trials(plan.directory)["good"]
    assert bad.state.name == "PRUNED" and good.state.name == "COMPLETE"
    assert bad.user_attrs["code"] == "A03"
    assert bad.user_attrs["evidence"] == {"window": [3, 8], "mean": 0.02}
    assert bad.user_attrs["intervention"] == ["optim.lr=1e-5"]
    assert [stop["seed"] for stop in bad.user_attrs["stops"]] == [0, 1]
    assert bad.constraints == {"stopped": 1.0} and good.constraints == {}
    ended = [entry for entry in entries(plan.directory, "stopped")]
    assert [entry["reason"]["code"] for entry in ended] == ["A03", "A03"]
    assert {name: state.step for name, state in by_name(plan.directory).items() if "bad" in name} == {
        "bad-s0": 8,
        "bad-s1": 8,
    }


def test_one_stopped_seed_prunes_its_arm_and_is_named(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "s", {"a": {}}, seeds=(0, 1), seed_scripts={("a", 1): {"alert_at": 4}})
    run(plan)
    trial = trials(plan.directory)["a"]
    assert trial.state.name == "PRUNED"
    assert [(stop["seed"], stop["at_step"]) for stop in trial.user_attrs["stops"]] == [(1, 4)]
    assert list(trial.user_attrs["values"]) == ["0"]
    assert trial.constraints == {"stopped": 0.5}


def test_on_alert_continue_lets_the_run_go_on(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "s", {"a": {"alert_at": 4}}, seeds=(0,), sweep={"on_alert": "continue"})
    run(plan)
    state = by_name(plan.directory)["a-s0"]
    assert (state.status, state.step) == ("finished", 10)
    assert [alert["code"] for alert in state.alerts] == ["A03"]


def test_a_bug_is_not_retried_and_shows_its_traceback_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = {"raise_at": 3, "times": 9}
    plan = make_plan(tmp_path / "s", {"a": {}, "bug": script}, seeds=(0, 1))
    assert run(plan) == 1
    said = capsys.readouterr().out
    assert said.count("Traceback (most recent call last)") == 1
    assert "a bug at step 3" in said and "2 failed" in said
    assert not entries(plan.directory, "retry")
    assert {name: state.status for name, state in by_name(plan.directory).items()} == {
        "a-s0": "finished", "a-s1": "finished", "bug-s0": "failed", "bug-s1": "failed",
    }  # fmt: skip
    trial = trials(plan.directory)["bug"]
    assert trial.state.name == "FAIL"
    assert [failure["error_class"] for failure in trial.user_attrs["failures"]] == ["user_code", "user_code"]


def test_out_of_memory_is_retried_once_with_half_the_micro_batch(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "s", {"fits": {"oom_above": 32}, "never": {"oom_above": 1}}, seeds=(0,))
    assert run(plan) == 1
    states = by_name(plan.directory)
    assert states["fits-s0"].status == "finished" and states["fits-s0"].micro_batch == 32
    assert states["never-s0"].status == "failed" and states["never-s0"].error_class == "oom"
    # 32 prompts x 8 rollouts in 4 minibatches are 64 rows: half of them is 32.
    assert [entry["micro_batch_size"] for entry in entries(plan.directory, "retry")] == [32, 32]


def test_a_killed_worker_is_replaced_and_its_run_continues_from_its_checkpoint(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "s", {"a": {}}, seeds=(0,), seed_scripts={("a", 0): {"die_at": 6, "times": 2}})
    assert run(plan) == 0
    undisturbed = make_plan(tmp_path / "t", {"a": {}}, seeds=(0,))
    assert run(undisturbed) == 0
    (rows,), (expected,) = rows_of(plan.directory).values(), rows_of(undisturbed.directory).values()
    assert rows == expected
    assert [entry["error_class"] for entry in entries(plan.directory, "retry")] == ["killed", "killed"]
    starts = [e for e in read_events(next(plan.directory.glob("runs/*/events.jsonl"))) if e["type"] == "start"]
    assert [event["resumed_from"] for event in starts] == [None, 4, 4]
    assert [(entry["step"], entry["attempt"]) for entry in entries(plan.directory, "start")] == [(0, 1), (4, 2), (4, 3)]


def test_a_run_killed_again_and_again_without_progress_is_given_up(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "s", {"a": {"die_at": 1, "times": 99}}, seeds=(0,), engine={"max_retries": 2})
    assert run(plan) == 1
    assert len(entries(plan.directory, "start")) == 3
    state = by_name(plan.directory)["a-s0"]
    assert (state.status, state.error_class) == ("failed", "killed")


def test_a_slot_where_run_after_run_fails_is_not_used_any_more(tmp_path: Path) -> None:
    # Whatever runs on the second device is killed; the first device is well.
    engine = {"devices": ["fake:0", "fake:1"], "slots": None, "max_retries": 9}
    plan = make_plan(tmp_path / "s", {"a": {"sleep": 0.05, "bad_device": "fake:1"}}, seeds=range(6), engine=engine)
    assert run(plan) == 0
    (warning,) = entries(plan.directory, "warning")
    assert "slot gpu fake:1 is not used any more: 4 failures in a row (killed)" in warning["message"]
    assert {state.status for state in read_runs(plan.directory).values()} == {"finished"}


def test_a_hung_run_is_ended_by_the_step_timeout_and_tried_again(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "s", {"a": {"hang_at": 5}, "b": {}}, seeds=(0,), engine={"hang_timeout_s": 2.0})
    assert run(plan) == 0
    assert [entry["error_class"] for entry in entries(plan.directory, "retry")] == ["hung"]
    assert by_name(plan.directory)["a-s0"].status == "finished"


def test_a_run_has_three_times_the_patience_until_its_first_event() -> None:
    seat = Seat(Slot(0, "cpu 0"))
    seat.take(RunState(make_spec("a", 0, {"steps": 4})))
    seat.last_progress -= 25.0
    assert not seat.hung(10.0) and seat.hung(8.0)
    seat.moved()
    seat.last_progress -= 11.0
    assert seat.hung(10.0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_making_the_report_can_be_interrupted_and_says_how_to_make_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    monkeypatch.setattr(summary, "make_report", lambda sweep: os.kill(os.getpid(), number))
    plan = make_plan(tmp_path / "s", {"a": {}}, seeds=(0,))
    before = signal.getsignal(number)
    assert run(plan) == 130
    assert "python -m analysis export s" in capsys.readouterr().out
    assert entries(plan.directory, "concluded")[-1]["exit_code"] == 130
    assert signal.getsignal(number) is before and not (plan.directory / "coordinator.lock").exists()


def test_a_worker_that_exits_by_itself_counts_as_infrastructure(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "s", {"a": {"exit_at": 3}}, seeds=(0,))
    assert run(plan) == 0
    (entry,) = entries(plan.directory, "retry")
    assert entry["error_class"] == "infrastructure" and "code 3" in entry["reason"]


def test_a_full_disk_ends_the_sweep_with_a_message_and_the_same_command_finishes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan(tmp_path / "s", {"a": {"disk_at": 4}, "b": {"sleep": 0.02}}, seeds=(0,), steps=30)
    assert run(plan) == 1
    assert "the disk is full" in capsys.readouterr().out
    assert run(make_plan(tmp_path / "s", {"a": {"disk_at": 4}, "b": {"sleep": 0.02}}, seeds=(0,), steps=30)) == 0
    assert {state.status for state in read_runs(plan.directory).values()} == {"finished"}


def test_a_training_function_that_cannot_be_loaded_ends_the_sweep_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan(tmp_path / "s", {"a": {}}, seeds=(0,), engine={"train": "tests.fakes:nothing"})
    assert run(plan) == 1
    assert "the worker cannot start" in capsys.readouterr().out
    assert read_runs(plan.directory)[plan.runs[0].key].status == "waiting"


def test_a_free_slot_takes_the_next_run_at_once(tmp_path: Path) -> None:
    # One long run beside many short ones: batches would wait for the long one every time.
    scripts = {("a", 0): {"sleep": 0.2}}
    plan = make_plan(tmp_path / "s", {"a": {}}, seeds=range(8), seed_scripts=scripts)
    run(plan)
    order = [(entry["type"], entry["seed"]) for entry in read_ledger(plan.directory) if "seed" in entry]
    assert order[-1] == ("finished", 0)
    assert order.index(("start", 7)) < order.index(("finished", 0))


def test_all_arms_get_a_seed_before_any_arm_gets_the_next(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "s", {"a": {}, "b": {}, "c": {}}, seeds=(0, 1), engine={"slots": 1})
    run(plan)
    assert [(e["arm"], e["seed"]) for e in entries(plan.directory, "start")] == [
        ("a", 0), ("b", 0), ("c", 0), ("a", 1), ("b", 1), ("c", 1),
    ]  # fmt: skip


def test_breadth_first_pauses_at_rungs_and_ends_with_the_same_rows(tmp_path: Path) -> None:
    breadth = {"schedule": "breadth", "rungs": 2}
    plan = make_plan(tmp_path / "s", {"a": {}, "b": {}}, seeds=(0,), engine={"slots": 1}, sweep=breadth)
    assert run(plan) == 0
    assert [(e["arm"], e["step"]) for e in entries(plan.directory, "start")] == [("a", 0), ("b", 0), ("a", 5), ("b", 5)]
    straight = make_plan(tmp_path / "t", {"a": {}, "b": {}}, seeds=(0,))
    run(straight)
    assert rows_of(plan.directory) == rows_of(straight.directory)


def test_a_step_budget_pauses_the_sweep_and_a_larger_one_finishes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = {"a": {"sleep": 0.05}, "b": {"sleep": 0.05}}
    plan = make_plan(tmp_path / "s", slow, seeds=(0,), steps=60, sweep={"budget": {"steps": 40}})
    assert run(plan) == 0
    assert "sweep.budget.steps" in capsys.readouterr().out
    states = by_name(plan.directory)
    assert {state.status for state in states.values()} == {"paused"}
    assert 40 <= sum(state.step for state in states.values()) < 120
    assert run(make_plan(tmp_path / "s", slow, seeds=(0,), steps=60)) == 0
    assert {state.status for state in read_runs(plan.directory).values()} == {"finished"}


def test_a_run_budget_does_not_interrupt_the_runs_within_it(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "s", {"a": {"sleep": 0.15}, "b": {}}, seeds=(0,), sweep={"budget": {"runs": 1}})
    assert run(plan) == 0
    assert [state.status for state in read_runs(plan.directory).values()] == ["finished", "waiting"]


def test_a_run_budget_bars_new_runs(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "s", {"a": {}, "b": {}}, seeds=(0, 1), sweep={"budget": {"runs": 3}})
    run(plan)
    counts = [state.status for state in read_runs(plan.directory).values()]
    assert sorted(counts) == ["finished", "finished", "finished", "waiting"]


def test_intervene_forks_from_the_last_healthy_checkpoint_with_the_cure(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "s", {"a": {"alert_at": 9}}, seeds=(0,), steps=12, sweep={"on_alert": "intervene"})
    run(plan)
    runs = read_runs(plan.directory)
    (parent,) = [state for state in runs.values() if not state.spec.parent]
    (child,) = [state for state in runs.values() if state.spec.parent]
    # The evidence's window is 4..9 and checkpoints are even: the last healthy one is that of step 2.
    assert (child.spec.parent, child.spec.parent_step) == (parent.key, 2)
    assert child.spec.config["optim"]["lr"] == 1e-5
    first = next(e for e in read_events(plan.directory / "runs" / child.key / "events.jsonl") if e["type"] == "start")
    assert first["resumed_from"] == 2
    # The child is stopped by the same script, and sweep.max_children=1 leaves it at that.
    assert child.status == "stopped" and len(runs) == 2
    trial = trials(plan.directory)["a"]
    assert list(trial.user_attrs["runs"].values()) == [parent.key]


def test_status_and_why_tell_the_story_from_files(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "s", {"good": {}, "bad": {"collapse_at": 3}}, seeds=(0,), steps=20)
    run(plan)
    status = "\n".join(status_lines(plan.directory))
    assert "1 finished, 1 stopped" in status and "A03 stop" in status and "no coordinator" in status
    key = next(key for key, state in read_runs(plan.directory).items() if state.status == "stopped")
    story = "\n".join(why_lines(plan.directory, key))
    assert "A03 entropy collapse" in story and '"mean": 0.02' in story and "try: optim.lr=1e-5" in story


def test_nothing_but_own_lines_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan = make_plan(tmp_path / "s", {"a": {}}, seeds=(0,))
    run(plan)
    said = capfd.readouterr()
    assert said.err == ""
    assert "[I " not in said.out and "Warning" not in said.out


def test_the_reason_is_in_the_trial_before_it_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    finish = Database.finish

    def spy(self: Database, trial_id: int, *args: Any) -> None:
        (trial,) = [trial for trial in self.need().trials if trial._trial_id == trial_id]
        seen.append(dict(trial.user_attrs))
        finish(self, trial_id, *args)

    monkeypatch.setattr(Database, "finish", spy)
    run(make_plan(tmp_path / "s", {"a": {"alert_at": 4}}, seeds=(0,)))
    assert [attributes["code"] for attributes in seen] == ["A03"]


def test_workers_of_a_finished_sweep_are_gone(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "s", {"a": {"child": 60}}, seeds=(0,))
    run(plan)
    start = next(e for e in read_events(next(plan.directory.glob("runs/*/events.jsonl"))) if e["type"] == "start")
    deadline = time.monotonic() + 10
    while group_members(start["pid"]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert group_members(start["pid"]) == []


def test_plan_is_stored_and_can_be_read_back(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "s", {"a": {}}, seeds=(0,))
    run(plan)
    body = json.loads((plan.directory / "plan.json").read_text())
    assert [entry["key"] for entry in body["runs"]] == [plan.runs[0].key]
    assert os.listdir(plan.directory / "runs") == [plan.runs[0].key]


def test_missing_wandb_login_is_said_once_in_a_sweep_and_every_run_is_told_offline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "logged_in", lambda: False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(summary, "_track", lambda sweep, runs: None)
    plan = make_plan(tmp_path / "s", {"a": {}, "b": {}}, seeds=(0, 1))
    for spec in plan.runs:
        spec.config["tracking"] = asdict(tracking.TrackingConfig(kind="wandb"))
    told = []
    config = Jobs.config
    monkeypatch.setattr(Jobs, "config", lambda self, run: told.append(config(self, run)) or told[-1])
    assert run(plan) == 0
    assert capsys.readouterr().out.count("not logged in") == 1
    assert [config["tracking"]["mode"] for config in told] == ["offline"] * 4
    assert plan.runs[0].config["tracking"]["mode"] == "online"

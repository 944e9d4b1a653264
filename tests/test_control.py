"""`python -m sweeps` beside a running coordinator, and after it."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import pytest

from reasonrl.events import EventLog
from sweeps.__main__ import main
from sweeps.ledger import Ledger
from sweeps.lock import FolderLock
from sweeps.runner import run
from sweeps.state import RunState
from sweeps.story import read_runs
from tests.fakes import make_plan
from tests.test_crash_safety import coordinator, num_rows, wait_for

pytestmark = pytest.mark.usefixtures("no_report")

LONG: dict[str, Any] = {"arms": {"a": {"sleep": 0.05}, "b": {"sleep": 0.05}}, "seeds": [0], "steps": 4000}
SHORT: dict[str, Any] = {"arms": {"a": {"sleep": 0.02}, "b": {"sleep": 0.02}}, "seeds": [0], "steps": 100}


def states(directory: Path) -> dict[str, RunState]:
    return {state.spec.arm: state for state in read_runs(directory).values()}


def command(tmp_path: Path, *words: str) -> int:
    return main([*words, "--results", str(tmp_path)])


def test_pause_and_resume_a_whole_sweep(tmp_path: Path) -> None:
    directory = tmp_path / "s"
    with coordinator(directory, SHORT) as process:
        wait_for(lambda: num_rows(directory) >= 4)
        assert command(tmp_path, "pause", "s") == 0
        wait_for(lambda: {state.status for state in states(directory).values()} == {"paused"})
        held = num_rows(directory)
        time.sleep(1.0)
        assert num_rows(directory) == held and process.poll() is None
        assert command(tmp_path, "resume", "s") == 0
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "paused by command" in said and "resumed by command" in said
    assert {state.status for state in states(directory).values()} == {"finished"}


def test_a_run_that_is_tried_again_counts_as_running_before_its_worker_writes(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "s", {"a": {}}, seeds=(0,))
    (spec,) = plan.runs
    with FolderLock(plan.directory), contextlib.closing(Ledger(plan.directory)) as ledger:
        plan.directory.joinpath("plan.json").write_text(plan.to_json())
        ledger.note("start", spec, step=0)
        assert states(plan.directory)["a"].status == "running"
        log = EventLog(plan.directory / "runs" / spec.key / "events.jsonl")
        log.append({"type": "end", "time": time.time(), "status": "failed", "step": 0, "error_class": "killed"})
        assert states(plan.directory)["a"].status == "failed"
        ledger.note("retry", spec, step=0)
        assert states(plan.directory)["a"].status == "partial"
        ledger.note("start", spec, step=0)
        assert states(plan.directory)["a"].status == "running"
        log.append({"type": "end", "time": time.time(), "status": "finished", "step": 12})
        assert states(plan.directory)["a"].status == "finished"
        log.close()


def test_a_run_put_in_line_again_before_its_coordinator_died_is_interrupted_not_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan(tmp_path / "s", {"a": {}}, seeds=(0,))
    (spec,) = plan.runs
    with contextlib.closing(Ledger(plan.directory)) as ledger:
        plan.directory.joinpath("plan.json").write_text(plan.to_json())
        ledger.note("start", spec, step=0)
        log = EventLog(plan.directory / "runs" / spec.key / "events.jsonl")
        log.append({"type": "checkpoint", "time": time.time(), "step": 4})
        log.append({"type": "end", "time": time.time(), "status": "failed", "step": 5, "error_class": "killed"})
        log.close()
        assert states(plan.directory)["a"].status == "failed"
        for action in ("retry", "start"):
            ledger.note(action, spec, step=4)
            assert states(plan.directory)["a"].status == "partial"
        assert command(tmp_path, "why", spec.key) == 0
        text = capsys.readouterr().out
        assert "the same command continues it from step 4" in text and "failed (killed). Try" not in text
        ledger.note("failed", spec, step=5)
        assert states(plan.directory)["a"].status == "failed"


def test_why_tells_the_story_of_a_single_run_and_the_other_verbs_say_what_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = EventLog(tmp_path / "single" / "abc123" / "events.jsonl")
    log.append({"type": "start", "time": 100.0, "seed": 3, "steps": 9, "config": {"steps": 9}})
    log.append({"type": "step", "time": 150.0, "step": 4, "metrics": {}})
    log.append({"type": "end", "time": 160.0, "status": "failed", "step": 4, "error_class": "oom"})
    log.close()
    assert command(tmp_path, "why", "abc") == 0
    story = capsys.readouterr().out
    assert "single run [abc123] with seed 3: failed at step 4/9" in story
    assert "failed (oom) after 1 min 00 s" in story and "Again: the same command" in story
    assert command(tmp_path, "stop", "abc") == 2
    assert "abc is a single run" in capsys.readouterr().err


def test_every_verb_has_a_help_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    for verb, part in (("status", "States: waiting, running"), ("retry", "Also after the sweep has ended")):
        with pytest.raises(SystemExit):
            main([verb, "--help"])
        said = capsys.readouterr().out
        assert f"usage: python -m sweeps {verb}" in said and part in " ".join(said.split())


def test_pause_and_resume_one_run_while_the_other_goes_on(tmp_path: Path) -> None:
    directory = tmp_path / "s"
    with coordinator(directory, SHORT) as process:
        wait_for(lambda: num_rows(directory) >= 4)
        key = states(directory)["a"].key
        assert command(tmp_path, "pause", key[:6]) == 0
        wait_for(lambda: states(directory)["b"].status == "finished")
        assert states(directory)["a"].status == "paused" and process.poll() is None
        assert command(tmp_path, "resume", key[:6]) == 0
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert states(directory)["a"].status == "finished"


def test_stopping_one_run_is_a_reason_of_its_own_and_stopping_the_sweep_leaves_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "s"
    with coordinator(directory, LONG) as process:
        wait_for(lambda: num_rows(directory) >= 4)
        assert command(tmp_path, "stop", states(directory)["a"].key) == 0
        wait_for(lambda: states(directory)["a"].status == "stopped")
        assert command(tmp_path, "status", "s") == 0
        assert f"held by pid {process.pid}" in capsys.readouterr().out
        assert command(tmp_path, "stop", "s") == 0
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert (states(directory)["a"].stop_reason() or {})["code"] == "USER"
    paused = states(directory)["b"]
    assert paused.status == "paused" and paused.checkpoints[-1] == paused.step
    assert "the same command continues" in capsys.readouterr().out


def test_a_failed_run_is_tried_again_on_request_and_told_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan(tmp_path / "s", {"a": {"raise_at": 3}}, seeds=(0,))
    assert run(plan) == 1
    # The same command leaves a bug alone.
    assert run(plan) == 1
    assert command(tmp_path, "retry", "s") == 0
    assert run(plan) == 0
    assert states(plan.directory)["a"].status == "finished"
    assert command(tmp_path, "why", plan.runs[0].key) == 0
    story = capsys.readouterr().out
    assert "ValueError: a bug at step 3" in story and "put in line again by hand" in story and "error.txt" in story


def test_a_run_is_found_by_its_name_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = make_plan(tmp_path / "s", {"a": {}}, seeds=(0,))
    run(plan)
    capsys.readouterr()
    assert command(tmp_path, "why", "a-s0") == command(tmp_path, "why", "s", "a-s0") == 0
    assert plan.runs[0].key in capsys.readouterr().out


def test_runs_of_another_plan_in_the_same_folder_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(make_plan(tmp_path / "s", {"a": {}}, seeds=(0,), steps=2))
    assert "other settings" not in capsys.readouterr().out
    run(make_plan(tmp_path / "s", {"a": {}}, seeds=(0,), steps=3))
    said = " ".join(capsys.readouterr().out.split())
    assert "holds 1 run of this name with other settings or code" in said
    assert command(tmp_path, "status", "s") == 0
    shown = capsys.readouterr().out
    assert [("(earlier plan)" in line) for line in shown.splitlines() if "a-s0" in line] == [False, True]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["status", "nothing"], "neither a sweep nor the name or key of a run"),
        (["why", "s"], "Name a run"),
        (["why"], "Name a run"),
        (["stop", "s"], "No coordinator works on s"),
        (["retry", "s"], "no failed run"),
        (["why", "s", "zzz"], "zzz is no run of s"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line_with_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    run(make_plan(tmp_path / "s", {"a": {}}, seeds=(0,)))
    capsys.readouterr()
    assert command(tmp_path, *words) == 2
    said = capsys.readouterr().err
    assert expected in said and "Traceback" not in said

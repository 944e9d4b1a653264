"""Several coordinators on one sweep: each run is made once, whoever dies, freezes or loses the database."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest

from reasonrl.events import read_events
from sweeps.claims import without_password
from sweeps.ledger import read_ledger
from sweeps.lock import live_holders
from sweeps.runner import run
from sweeps.story import read_runs, status_lines
from tests.database import Server, programs
from tests.fakes import make_plan, rows_of
from tests.test_crash_safety import assert_each_finished_once, coordinator, num_rows, wait_for, worker_pids

psycopg = pytest.importorskip("psycopg", reason="the extra [postgres] is not installed")
pytestmark = [
    pytest.mark.usefixtures("no_report"),
    pytest.mark.skipif(programs() is None, reason="PostgreSQL's server programs are not installed"),
]

ARMS = {"a": {"sleep": 0.05}, "b": {"sleep": 0.05}, "c": {"sleep": 0.05}}


def settings_for(server: Server, lease_s: float = 4.0, **more: Any) -> dict[str, Any]:
    study = {"storage": server.url(), "lease_s": lease_s}
    return {"arms": ARMS, "seeds": [0, 1, 2], "steps": 30, "engine": {"slots": 1}, "study": study, **more}


def starts(directory: Path) -> list[dict[str, Any]]:
    return [event for path in directory.glob("runs/*/events.jsonl") for event in read_events(path)
            if event["type"] == "start"]  # fmt: skip


def newest_start(ledger: Path) -> str:
    keys = [entry["key"] for entry in read_events(ledger) if entry["type"] == "start"]
    return str(keys[-1]) if keys else ""


def undisturbed(directory: Path, settings: dict[str, Any]) -> dict[str, dict[int, dict[str, float]]]:
    run(make_plan(directory, **{**settings, "study": {}, "engine": {"slots": 2}}))
    return rows_of(directory)


def trials(server: Server, name: str) -> list[optuna.trial.FrozenTrial]:
    storage = optuna.storages.RDBStorage(server.url().replace("postgresql:", "postgresql+psycopg:"))
    try:
        return optuna.load_study(study_name=name, storage=storage).trials
    finally:
        storage.remove_session()
        storage.engine.dispose()


def told(server: Server, name: str) -> dict[str, tuple[str, int, list[int]]]:
    """{arm: (state, seeds with a value, steps with an intermediate value)}"""
    return {
        trial.user_attrs["arm"]: (trial.state.name, len(trial.user_attrs["values"]), sorted(trial.intermediate_values))
        for trial in trials(server, name)
    }


def test_three_coordinators_share_a_sweep_and_the_runs_of_one_that_is_killed(server: Server, tmp_path: Path) -> None:
    directory, settings = tmp_path / "three", settings_for(server)
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(coordinator(directory, settings)) for _ in range(3)]
        wait_for(lambda: len(list(directory.glob("ledger-*.jsonl"))) == 3 and len(starts(directory)) >= 3)
        victim = processes[1]
        theirs = directory / f"ledger-{socket.gethostname()}-{victim.pid}.jsonl"
        wait_for(lambda: 6 <= len(rows_of(directory).get(newest_start(theirs), {})) <= 20)
        key = newest_start(theirs)
        assert len(live_holders(directory)) == 3
        assert sum("held by" in line for line in status_lines(directory)) == 3
        victim.kill()
        said = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, -signal.SIGKILL, 0], said
    assert rows_of(directory) == undisturbed(tmp_path / "u", settings)
    assert_each_finished_once(directory)
    again = [event for event in starts(directory) if event["key"] == key]
    assert len(again) == 2 and again[1]["resumed_from"] >= 4  # from its checkpoint, not from the start
    everyone = {arm: ("COMPLETE", 3, list(range(0, 31, 5))) for arm in ARMS}
    assert told(server, "three") == everyone
    assert any("works on this sweep too" in text for text in said)


def test_the_same_command_later_finds_everything_done(server: Server, tmp_path: Path) -> None:
    settings = settings_for(server, seeds=[0], steps=6)
    plan = make_plan(tmp_path / "later", **settings)
    assert run(plan) == 0
    before = {path: path.read_bytes() for path in plan.directory.glob("runs/*/events.jsonl")}
    assert run(make_plan(tmp_path / "later", **settings)) == 0
    assert {path: path.read_bytes() for path in plan.directory.glob("runs/*/events.jsonl")} == before
    assert not list(plan.directory.glob("*.lock"))
    assert server.run_sql("SELECT count(*) FROM reasonrl_coordinators WHERE study = 'later'") == [(0,)]


def test_a_changed_list_of_arms_makes_the_study_anew_and_keeps_the_old_one(server: Server, tmp_path: Path) -> None:
    small: dict[str, Any] = {"seeds": [0], "steps": 5, "study": {"storage": server.url()}}
    assert run(make_plan(tmp_path / "changed", {"a": {}, "b": {}}, **small)) == 0
    assert run(make_plan(tmp_path / "changed", {"a": {}, "c": {}}, **small)) == 0
    assert sorted(told(server, "changed")) == ["a", "c"]
    kept = server.run_sql("SELECT study_name FROM studies WHERE study_name LIKE 'changed.set-aside-%'")
    assert len(kept) == 1 and sorted(told(server, str(kept[0][0]))) == ["a", "b"]


def test_a_database_away_for_half_a_minute_costs_nothing(server: Server, tmp_path: Path) -> None:
    directory = tmp_path / "away"
    slow = {"a": {"sleep": 1.0}, "b": {"sleep": 1.0}}
    settings = settings_for(server, lease_s=60.0, arms=slow, seeds=[0], steps=36)
    with coordinator(directory, settings) as first, coordinator(directory, settings) as second:
        wait_for(lambda: len(starts(directory)) == 2)
        server.stop()
        time.sleep(30)
        server.start()
        said = [process.communicate(timeout=120)[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], said
    assert len(starts(directory)) == 2  # nothing was begun twice
    assert {state.status for state in read_runs(directory).values()} == {"finished"}
    assert told(server, "away") == {arm: ("COMPLETE", 1, [*range(0, 36, 5), 36]) for arm in slow}


def test_a_database_away_for_longer_than_the_lease_sends_runs_back_to_their_checkpoint(
    server: Server, tmp_path: Path
) -> None:
    directory, settings = tmp_path / "long", settings_for(server, lease_s=3.0, seeds=[0], steps=50)
    with coordinator(directory, settings) as first, coordinator(directory, settings) as second:
        wait_for(lambda: len(starts(directory)) >= 2 and num_rows(directory) >= 8)
        server.stop()
        time.sleep(6)
        rows = num_rows(directory)
        time.sleep(1)
        assert num_rows(directory) == rows  # whoever cannot know that a run is still its own leaves it alone
        server.start()
        said = [process.communicate(timeout=120)[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], said
    assert "away for too long" in said[0]
    assert rows_of(directory) == undisturbed(tmp_path / "u", settings)
    assert_each_finished_once(directory)
    assert told(server, "long").keys() == ARMS.keys()
    assert not any(entry["type"] == "retry" for entry in read_ledger(directory))  # nobody blames the runs


def test_workers_of_a_frozen_coordinator_end_before_another_takes_their_run(server: Server, tmp_path: Path) -> None:
    directory, settings = tmp_path / "frozen", settings_for(server, lease_s=3.0, seeds=[0], steps=60)
    with coordinator(directory, settings) as first:
        wait_for(lambda: num_rows(directory) >= 6)
        with coordinator(directory, settings) as second:
            workers = worker_pids(directory / "runs")
            os.kill(first.pid, signal.SIGSTOP)  # not its workers
            wait_for(lambda: len(starts(directory)) >= 2)
            wait_for(lambda: any(count == 2 for count in Counter(e["key"] for e in starts(directory)).values()))
            assert not set(workers) & set(worker_pids(directory / "runs"))
            os.kill(first.pid, signal.SIGCONT)
            said = [process.communicate(timeout=120)[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], said
    assert rows_of(directory) == undisturbed(tmp_path / "u", settings)
    assert_each_finished_once(directory)


# -- refusals: one message, nothing started ---------------------------------------------------------------------------


def refused(plan: Any, capsys: pytest.CaptureFixture[str]) -> str:
    assert run(plan) == 2
    said = capsys.readouterr()
    assert said.out == "" and "Traceback" not in said.err
    assert not (plan.directory / "runs").exists() and not list(plan.directory.glob("*.lock"))
    return said.err


def plan_at(directory: Path, url: str, **more: Any) -> Any:
    return make_plan(directory, {"a": {}}, seeds=(0,), study={"storage": url}, **more)


def test_a_server_that_is_not_there_is_named(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = server.url(port=nobody.getsockname()[1])
        said = refused(plan_at(tmp_path / "s", url), capsys)
    assert said.startswith(f"study.storage={url}: ") and "refused" in said and "Nothing was started" in said


def test_a_database_that_does_not_exist_comes_with_its_cure(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(plan_at(tmp_path / "s", server.url("elsewhere")), capsys)
    assert 'database "elsewhere" does not exist' in said and "createdb" in said


def test_a_user_without_the_right_to_make_tables_is_told_whom_to_ask(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.run_sql("CREATE DATABASE closed")
    server.run_sql("CREATE ROLE guest LOGIN")
    said = refused(plan_at(tmp_path / "s", server.url("closed", user="guest")), capsys)
    assert "permission denied for schema public" in said and "GRANT CREATE ON SCHEMA public" in said


@pytest.fixture
def working(server: Server, tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder in which a coordinator is at work, and the database it uses."""
    directory = tmp_path / "one" / f"busy{time.time_ns()}"
    settings = settings_for(server, arms={"a": {"sleep": 0.1}}, seeds=[0], steps=3000)
    with coordinator(directory, settings):
        wait_for(lambda: num_rows(directory) >= 1)
        yield directory, server.url()


def test_a_results_folder_that_is_not_shared_is_refused(
    working: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sweeps.postgres.MARK_S", 1.0)
    directory, url = working
    settings = {"study": {"storage": url}, "steps": 3000}
    elsewhere = make_plan(tmp_path / "two" / directory.name, {"a": {"sleep": 0.1}}, seeds=(0,), **settings)
    said = refused(elsewhere, capsys)
    assert str(directory) in said and "Mount the same shared folder" in said


def test_another_plan_or_other_versions_are_refused_by_name(
    working: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, url = working
    monkeypatch.setattr("sweeps.versions.platform.python_version_tuple", lambda: ("3", "99", "0"))
    assert run(make_plan(directory, {"b": {}}, seeds=(0, 1), study={"storage": url})) == 2
    said = capsys.readouterr().err
    assert "python: " in said and "there, 3.99 here" in said
    assert "runs: 1 (" in said and "2 (" in said


def test_a_coordinator_that_does_not_share_is_kept_out_and_keeps_others_out(
    working: tuple[Path, str], server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, url = working
    assert run(make_plan(directory, {"a": {}}, seeds=(0,))) == 2
    assert "is held by pid" in capsys.readouterr().err
    alone = tmp_path / "alone"
    with coordinator(alone, {"arms": {"a": {"sleep": 0.1}}, "seeds": [0], "steps": 3000}):
        wait_for(lambda: num_rows(alone) >= 1)
        assert run(plan_at(alone, url)) == 2
        assert "does not share it" in capsys.readouterr().err


def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sweeps.postgres.psycopg", None)
    said = refused(plan_at(tmp_path / "s", "postgresql://me@db.example/sweeps"), capsys)
    assert "pip install 'reasonrl[postgres]'" in said


def test_a_password_is_shown_and_stored_nowhere(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = server.url().replace("sweeper@", "sweeper:s3cret@")
    plan = plan_at(tmp_path / "hush", url)
    assert run(plan) == 0
    capsys.readouterr()
    assert refused(plan_at(tmp_path / "t", url.replace("/postgres", "/nope")), capsys).count(":***@") == 1
    for path in plan.directory.rglob("*"):
        assert not path.is_file() or b"s3cret" not in path.read_bytes(), path
    assert json.loads((plan.directory / "plan.json").read_text())["study"]["storage"] == without_password(url)

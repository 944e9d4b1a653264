"""Searches and stages under several coordinators: what is asked for is run once, whoever leads and whoever dies."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from reasonrl.events import read_events
from sweeps import summary
from sweeps.leading import LINE
from sweeps.ledger import read_ledger, read_specs
from sweeps.runner import run
from sweeps.story import read_runs
from sweeps.study import Study
from sweeps.types import SpaceEntry, Stage
from tests.database import Server, programs
from tests.fakes import base_config, make_plan, rows_of
from tests.test_crash_safety import assert_each_finished_once, coordinator, wait_for
from tests.test_shared_sweep import starts, trials

psycopg = pytest.importorskip("psycopg", reason="the extra [postgres] is not installed")
pytestmark = [
    pytest.mark.usefixtures("no_report"),
    pytest.mark.skipif(programs() is None, reason="PostgreSQL's server programs are not installed"),
]

NUM_TRIALS = 24
LR = SpaceEntry("optim.lr", "float", low=1e-6, high=1e-2, log=True)


def ledger_of(directory: Path, process: subprocess.Popen[str]) -> Path:
    return directory / f"ledger-{socket.gethostname()}-{process.pid}.jsonl"


def entries(path: Path, kind: str) -> list[dict[str, Any]]:
    return [entry for entry in read_events(path) if entry["type"] == kind] if path.exists() else []


def leader(directory: Path, processes: list[subprocess.Popen[str]]) -> subprocess.Popen[str]:
    found: list[subprocess.Popen[str]] = []
    wait_for(lambda: found.extend(p for p in processes if entries(ledger_of(directory, p), "lead")) or found)
    return found[0]


def num_ended(directory: Path) -> int:
    return len([state for state in read_runs(directory).values() if not state.open])


def search_settings(server: Server, **study: Any) -> dict[str, Any]:
    asked = {"sampler": "tpe", "trials": NUM_TRIALS, "startup_trials": 6, "abandon": False}
    return {
        "seeds": [0, 1], "steps": 10, "engine": {"slots": 1}, "space": [asdict(LR)], "base": base_config(sleep=0.03),
        "study": {"storage": server.url(), "lease_s": 6.0, **asked, **study},
    }  # fmt: skip


def assert_all_asked_and_complete(server: Server, directory: Path) -> None:
    asked = [trial for trial in trials(server, directory.name) if "orphan" not in trial.user_attrs]
    assert Counter(trial.state.name for trial in asked) == {"COMPLETE": NUM_TRIALS}
    assert len({trial.params["optim.lr"] for trial in asked}) == NUM_TRIALS
    assert all(sorted(trial.user_attrs["values"]) == ["0", "1"] for trial in asked)
    runs = {key for trial in asked for key in trial.user_attrs["runs"].values()}
    assert len(runs) == 2 * NUM_TRIALS and runs == set(read_specs(directory))
    assert_each_finished_once(directory)


def test_three_coordinators_divide_a_search_and_two_go_on_when_its_leader_is_killed(
    server: Server, tmp_path: Path
) -> None:
    directory, settings = tmp_path / "divided", search_settings(server)
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(coordinator(directory, settings)) for _ in range(3)]
        victim = leader(directory, processes)
        wait_for(lambda: all(len(entries(ledger_of(directory, process), "finished")) >= 2 for process in processes))
        before = num_ended(directory)
        victim.kill()
        said = [process.communicate(timeout=120)[0] for process in processes]
    expected = [-signal.SIGKILL if process is victim else 0 for process in processes]
    assert [process.returncode for process in processes] == expected, said
    assert before < 40 and any("this coordinator leads the search from now on" in text for text in said)
    assert_all_asked_and_complete(server, directory)
    twice = {key for key, count in Counter(event["key"] for event in starts(directory)).items() if count > 1}
    assert twice <= {entry["key"] for entry in entries(ledger_of(directory, victim), "start")} and len(twice) <= 1


def staged_settings(server: Server | None) -> dict[str, Any]:
    stages = [
        Stage("data", arms={"plain": [], "other": ["fake.accuracy=0.9"]}, share=0.5),
        Stage("rate", space=(SpaceEntry("optim.lr", "choice", choices=(1e-4, 1e-3)),), share=0.5),
    ]
    study = {"storage": server.url(), "lease_s": 3.0} if server else {}
    base = base_config(sleep=0.03, accuracy=0.5)
    return {"seeds": [0, 1, 2], "engine": {"slots": 1}, "stages": stages, "base": base, "study": study}


def verdicts(directory: Path) -> dict[str, list[Any]]:
    """{stage: what was found}; coordinators that found something else would show here as two."""
    found: dict[str, list[Any]] = {}
    for entry in read_ledger(directory):
        if entry["type"] == "winner":
            what = {name: value for name, value in entry.items() if name != "time"}
            known = found.setdefault(entry["stage"], [])
            if what not in known:
                known.append(what)
    return found


def test_stages_come_to_the_same_verdicts_with_two_coordinators_and_a_change_of_leader(
    server: Server, tmp_path: Path
) -> None:
    alone, directory, settings = tmp_path / "alone", tmp_path / "staged", staged_settings(server)
    assert run(make_plan(alone, **{**staged_settings(None), "engine": {"slots": 2}})) == 0
    shared = {**settings, "stages": [asdict(stage) for stage in settings["stages"]]}
    with coordinator(directory, shared) as first, coordinator(directory, shared) as second:
        victim = leader(directory, [first, second])
        wait_for(lambda: any(state.spec.stage == "rate" and not state.open for state in read_runs(directory).values()))
        victim.kill()
        said = [process.communicate(timeout=120)[0] for process in (first, second)]
    assert sorted(process.returncode for process in (first, second)) == [-signal.SIGKILL, 0], said
    assert verdicts(directory) == verdicts(alone)
    assert [len(found) for found in verdicts(directory).values()] == [1, 1]
    assert set(read_specs(directory)) == set(read_specs(alone))
    assert rows_of(directory) == rows_of(alone)
    assert all(entries(ledger_of(directory, process), "finished") for process in (first, second))


def test_the_leaders_pruner_stops_a_run_elsewhere_and_the_run_says_why(server: Server, tmp_path: Path) -> None:
    # Seed 22 draws four good ones first, then ones that are worse and slow enough to be caught.
    bad = (0.1, 0.11, 0.12, 0.13, 0.14, 0.15, 0.16, 0.17)
    space = [
        SpaceEntry("fake.accuracy", "choice", choices=(0.9, 0.88, 0.86, 0.84, *bad)),
        SpaceEntry("fake.sleep", "choice", choices=(0.1,), when={"fake.accuracy": bad}),
    ]
    directory = tmp_path / "pruned"
    study = {"sampler": "random", "trials": 8, "startup_trials": 2, "pruner": "median", "seed": 22, "lease_s": 60.0}
    settings = {
        "seeds": [0], "steps": 80, "engine": {"slots": 1}, "space": [asdict(entry) for entry in space],
        "base": base_config(80, sleep=0.01), "study": {"storage": server.url(), **study},
    }  # fmt: skip
    with coordinator(directory, settings) as first, coordinator(directory, settings) as second:
        leads = leader(directory, [first, second])
        follows = second if leads is first else first
        said = [process.communicate(timeout=120)[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], said
    theirs = {entry["key"] for entry in entries(ledger_of(directory, follows), "start")}
    stopped = {key: state for key, state in read_runs(directory).items() if state.status == "stopped"}
    assert theirs & stopped.keys() and stopped.keys() - theirs  # both had runs to stop
    for key, state in stopped.items():
        decisions = [event for event in read_events(directory / "runs" / key / "events.jsonl")
                     if event["type"] == "decision"]  # fmt: skip
        assert [event["reason"]["title"] for event in decisions] == ["pruned by median"]
        assert state.spec.params["fake.accuracy"] in bad and 26 <= state.step < 80
    told = {trial.user_attrs["runs"]["0"]: trial for trial in trials(server, "pruned")}
    assert {key for key, trial in told.items() if trial.state.name == "PRUNED"} == set(stopped)
    assert all(told[key].user_attrs["pruned"]["code"] == "PRUNED" for key in stopped)


@pytest.mark.parametrize("searched", [False, True])
def test_a_database_that_is_gone_when_the_sweep_ends_costs_no_report_and_is_said(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], searched: bool
) -> None:
    directory, reports = tmp_path / f"end{searched}", []
    search: dict[str, Any] = {"sampler": "random", "trials": 1} if searched else {}
    settings: dict[str, Any] = {"seeds": [0], "study": {"storage": server.url(), "lease_s": 3.0, **search}}
    if searched:
        settings["space"] = [LR]
    else:
        settings["arms"] = {"a": {}}
    tell = Study.tell

    def lose(self: Study, configuration: Any) -> None:
        monkeypatch.setattr(Study, "tell", tell)
        server.stop()
        self.tell(configuration)

    monkeypatch.setattr(Study, "tell", lose)
    monkeypatch.setattr(summary, "make_report", reports.append)
    try:
        assert run(make_plan(directory, **settings)) == 0
    finally:
        server.start()
    said = capsys.readouterr().out
    assert len(reports) == 1 and "may lack what came last; the same command adds that" in said
    assert f"results in {directory} ({server.url()}, ledger-" in said and "study.db" not in said
    assert run(make_plan(directory, **settings)) == 0
    assert "may lack" not in capsys.readouterr().out
    assert [trial.state.name for trial in trials(server, directory.name)] == ["COMPLETE"]


def test_another_search_under_the_same_name_is_refused(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, settings = tmp_path / "other", search_settings(server, trials=200)
    with coordinator(directory, settings):
        wait_for(lambda: starts(directory))
        plan = make_plan(directory, **{**search_settings(server, trials=201), "space": [LR]})
        assert run(plan) == 2
        assert "search: " in capsys.readouterr().err


def test_a_line_left_by_another_plan_is_not_followed(server: Server, tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "left", seeds=[0], space=[LR], study={**search_settings(server)["study"], "trials": 2})
    (tmp_path / "left").mkdir()
    (tmp_path / "left" / LINE).write_text('["0123456789ab"]')
    assert run(plan) == 0
    assert (tmp_path / "left" / LINE).read_text() == "[]"
    assert len(read_specs(tmp_path / "left")) == 2

"""Whatever is killed, cut, deleted or filled: the same command ends with the same keys and the very same rows."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest

from reasonrl.events import read_events, read_from
from sweeps.ledger import read_ledger
from sweeps.lock import FolderHeldError, FolderLock, Holder, read_holder
from sweeps.runner import run
from sweeps.story import read_runs
from tests.fakes import make_plan, rows_of

pytestmark = pytest.mark.usefixtures("no_report")

ROOT = Path(__file__).resolve().parent.parent
ARMS = {"a": {"sleep": 0.02}, "b": {"sleep": 0.03}}
SETTINGS: dict[str, Any] = {"arms": ARMS, "seeds": [0, 1], "steps": 20}


@contextlib.contextmanager
def coordinator(directory: Path, settings: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """A sweep in a process of its own, ended at the end of the block if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fakes", str(directory), json.dumps(settings)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def finish(directory: Path, settings: dict[str, Any] = SETTINGS) -> str:
    """Give the command until the sweep is done; returns what the last one said."""
    with coordinator(directory, settings) as process:
        said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    return said


def wait_for(condition: Any, timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def num_rows(directory: Path) -> int:
    return sum(len(steps) for steps in rows_of(directory).values())


def worker_pids(directory: Path) -> list[int]:
    """Processes alive whose environment or command ties them to this folder's runs: found by their open log."""
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/1"):
        with contextlib.suppress(OSError):
            if str(directory) in os.readlink(link):
                found.append(int(link.parts[2]))
    return found


def undisturbed(tmp_path: Path) -> dict[str, dict[int, dict[str, float]]]:
    run(make_plan(tmp_path / "undisturbed", **SETTINGS))
    return rows_of(tmp_path / "undisturbed")


def assert_each_finished_once(directory: Path) -> None:
    for path in directory.glob("runs/*/events.jsonl"):
        events = list(read_events(path))
        ends = [event["status"] for event in events if event["type"] == "end"]
        assert ends.count("finished") == 1
        assert events[-1]["type"] == "end" and ends[-1] == "finished"


def test_killing_the_coordinator_loses_nothing_and_leaves_no_orphan(tmp_path: Path) -> None:
    directory = tmp_path / "s"
    for rows in (3, 20, 45):
        with coordinator(directory, SETTINGS) as process:
            wait_for(lambda wanted=rows: num_rows(directory) >= wanted)
            process.kill()
            process.wait()
        wait_for(lambda: not worker_pids(directory), timeout=10)
    finish(directory)
    assert rows_of(directory) == undisturbed(tmp_path)
    assert_each_finished_once(directory)


def test_killing_workers_at_random_ends_with_the_same_rows(tmp_path: Path) -> None:
    directory, dice = tmp_path / "s", random.Random(7)
    settings = {**SETTINGS, "engine": {"max_retries": 50}}
    kills = 0
    with coordinator(directory, settings) as process:
        while process.poll() is None:
            time.sleep(dice.uniform(0.1, 0.4))
            pids = worker_pids(directory / "runs")
            if pids and kills < 6 and num_rows(directory) > 0:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(dice.choice(pids), signal.SIGKILL)
                    kills += 1
        assert process.returncode == 0
    assert kills >= 3
    assert rows_of(directory) == undisturbed(tmp_path)
    assert_each_finished_once(directory)
    assert not worker_pids(directory)


def test_ctrl_c_writes_checkpoints_and_the_same_command_goes_on_from_there(tmp_path: Path) -> None:
    directory = tmp_path / "s"
    with coordinator(directory, SETTINGS) as process:
        wait_for(lambda: num_rows(directory) >= 5)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command continues" in said
    paused = [state for state in read_runs(directory).values() if state.status == "paused"]
    assert paused and all(state.checkpoints[-1] == state.step for state in paused)
    finish(directory)
    # Nothing was made twice: every step stands in its log exactly once.
    for path in directory.glob("runs/*/events.jsonl"):
        steps = Counter(event["step"] for event in read_events(path) if event["type"] == "step")
        assert set(steps.values()) == {1}
    assert rows_of(directory) == undisturbed(tmp_path)


def test_a_coordinator_that_was_stopped_for_a_while_blames_no_run_for_it(tmp_path: Path) -> None:
    directory = tmp_path / "s"
    settings = {**SETTINGS, "arms": {"a": {"sleep": 0.5}}, "steps": 60, "engine": {"hang_timeout_s": 11.0}}
    with coordinator(directory, settings) as process:
        wait_for(lambda: num_rows(directory) >= 2)
        frozen = [process.pid, *worker_pids(directory)]
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(13)
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
        rows = num_rows(directory)
        wait_for(lambda: num_rows(directory) >= rows + 4)
    assert not any(entry["type"] == "retry" for entry in read_ledger(directory))


def test_the_second_coordinator_says_who_holds_the_folder_and_exits(tmp_path: Path) -> None:
    directory = tmp_path / "s"
    long = {**SETTINGS, "arms": {"a": {"sleep": 0.1}}, "steps": 3000}
    with coordinator(directory, long) as first:
        wait_for(lambda: num_rows(directory) >= 1)
        holder = read_holder(directory / "coordinator.lock")
        assert holder is not None and holder.pid == first.pid
        with coordinator(directory, long) as second:
            said, _ = second.communicate(timeout=60)
        assert second.returncode == 2
        assert f"pid {first.pid} on host {holder.host} since" in said
        rows = num_rows(directory)
        wait_for(lambda: num_rows(directory) > rows)  # the first goes on undisturbed


def test_a_deleted_study_is_rebuilt_from_the_event_logs(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "s", {"good": {}, "bad": {"collapse_at": 3}}, seeds=(0, 1), steps=20)
    run(plan)

    def told() -> list[Any]:
        study = optuna.load_study(study_name="s", storage=f"sqlite:///{plan.directory}/study.db")
        return [(t.state, t.value, t.user_attrs, t.intermediate_values, t.constraints) for t in study.trials]

    before = told()
    for path in plan.directory.glob("study.db*"):
        path.unlink()
    (plan.directory / "ledger.jsonl").unlink()
    assert run(plan) == 0
    assert told() == before
    assert [state.name for state, *_ in before] == ["COMPLETE", "PRUNED"]
    assert not any(entry["type"] == "start" for entry in read_ledger(plan.directory))


def test_a_study_deleted_while_the_sweep_runs_is_rebuilt_and_complete_at_the_end(tmp_path: Path) -> None:
    directory = tmp_path / "s"
    settings = {**SETTINGS, "arms": {"a": {"sleep": 0.15}, "b": {"sleep": 0.15}}, "steps": 40}
    with coordinator(directory, settings) as process:
        wait_for(lambda: num_rows(directory) >= 10)
        for path in directory.glob("study.db*"):
            path.unlink()
        said, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and "rebuilt from the event logs" in said
    study = optuna.load_study(study_name="s", storage=f"sqlite:///{directory}/study.db")
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "COMPLETE"]
    assert all(len(trial.user_attrs["values"]) == 2 for trial in study.trials)


def test_a_study_file_that_is_no_database_is_set_aside(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "s", {"a": {}}, seeds=(0,))
    plan.directory.mkdir()
    (plan.directory / "study.db").write_bytes(b"this is not a database" * 100)
    assert run(plan) == 0
    study = optuna.load_study(study_name="s", storage=f"sqlite:///{plan.directory}/study.db")
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"]
    assert len(list(plan.directory.glob("study.db.set-aside-*"))) == 1


def test_a_torn_last_line_costs_at_most_the_step_it_tore(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "s", {"a": {}}, seeds=(0,), seed_scripts={("a", 0): {"die_at": 8, "times": 1}})
    plan.engine["max_retries"] = 0
    assert run(plan) == 1
    (log,) = plan.directory.glob("runs/*/events.jsonl")
    lines = log.read_bytes().splitlines(keepends=True)
    ends = [index for index, line in enumerate(lines) if b'"type":"end"' in line]
    log.write_bytes(b"".join(lines[: ends[0]]) + b'{"type":"step","time":1,"st')
    assert run(plan) == 0
    run(make_plan(tmp_path / "t", {"a": {}}, seeds=(0,)))
    assert list(rows_of(plan.directory).values()) == list(rows_of(tmp_path / "t").values())


def test_a_log_is_read_on_from_where_it_was_left_and_a_line_being_written_waits(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"type":"step","step":1}\nno json\n{"type":"step","st')
    events, offset = read_from(path, 0)
    assert [event["step"] for event in events] == [1]
    with path.open("a") as file:
        file.write('ep":2,"metrics":{"x":"nan"}}\n')
    events, end = read_from(path, offset)
    assert [event["step"] for event in events] == [2] and events[0]["metrics"]["x"] != events[0]["metrics"]["x"]
    assert read_from(path, end) == ([], end) and end == path.stat().st_size


def test_a_changed_list_of_arms_rebuilds_the_study_and_keeps_the_old_one_aside(tmp_path: Path) -> None:
    directory = tmp_path / "s"
    run(make_plan(directory, {"a": {}, "b": {}}, seeds=(0,)))
    run(make_plan(directory, {"a": {}, "c": {}}, seeds=(0,)))
    study = optuna.load_study(study_name="s", storage=f"sqlite:///{directory}/study.db")
    assert {trial.params["arm"]: trial.state.name for trial in study.trials} == {"a": "COMPLETE", "c": "COMPLETE"}
    (old,) = [path for path in directory.glob("study.db.set-aside-*")]
    aside = optuna.load_study(study_name="s", storage=f"sqlite:///{old}")
    assert {trial.params["arm"] for trial in aside.trials} == {"a", "b"}


def test_a_lock_of_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    lock = tmp_path / "coordinator.lock"
    gone = subprocess.Popen(["true"])
    gone.wait()
    lock.write_text(json.dumps({"pid": gone.pid, "host": os.uname().nodename, "since": 0.0, "token": "x", "born": 5}))
    with FolderLock(tmp_path) as mine:
        assert mine.still_mine()
    assert not lock.exists()


def test_a_lock_is_not_fooled_by_a_reused_pid(tmp_path: Path) -> None:
    # This very process is alive, but it was not born when the lock says its holder was.
    (tmp_path / "coordinator.lock").write_text(
        json.dumps({"pid": os.getpid(), "host": os.uname().nodename, "since": 0.0, "token": "x", "born": 1})
    )
    with FolderLock(tmp_path) as mine:
        assert mine.still_mine()


def test_a_lock_held_on_another_machine_counts_until_its_heartbeat_is_old(tmp_path: Path) -> None:
    lock = tmp_path / "coordinator.lock"
    lock.write_text(json.dumps({"pid": 1, "host": "elsewhere", "since": 0.0, "token": "x", "born": 1}))
    with pytest.raises(FolderHeldError, match="pid 1 on host elsewhere"), FolderLock(tmp_path):
        pass
    long_ago = time.time() - 3600
    os.utime(lock, (long_ago, long_ago))
    with FolderLock(tmp_path) as mine:
        assert mine.still_mine()


def test_a_coordinator_whose_lock_was_taken_over_notices(tmp_path: Path) -> None:
    with FolderLock(tmp_path) as mine:
        assert mine.beat()
        other = Holder(1, "elsewhere", 0.0, "other")
        mine.path.write_text(json.dumps(vars(other)))
        mine._last_beat = float("-inf")
        assert not mine.beat()
    # The other's lock is not removed by the one that lost it.
    assert read_holder(tmp_path / "coordinator.lock") == other


def test_the_database_away_for_a_while_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sqlalchemy.exc import OperationalError

    from sweeps import study as module

    monkeypatch.setattr(module, "RETRY_S", 0.5)
    began = time.monotonic()
    write = optuna.storages.RDBStorage.set_trial_intermediate_value
    away: list[float] = []

    def flaky(self: Any, *args: Any) -> None:
        if 0.0 < time.monotonic() - began < 4.0:
            away.append(time.monotonic())
            raise OperationalError("INSERT", {}, Exception("database is away"))
        write(self, *args)

    monkeypatch.setattr(optuna.storages.RDBStorage, "set_trial_intermediate_value", flaky)
    plan = make_plan(tmp_path / "s", {"a": {"sleep": 0.1}}, seeds=(0, 1), steps=60)
    assert run(plan) == 0
    assert away
    loaded = optuna.load_study(study_name="s", storage=f"sqlite:///{plan.directory}/study.db")
    (trial,) = loaded.trials
    assert trial.state.name == "COMPLETE" and sorted(trial.intermediate_values) == list(range(0, 61, 5))


def test_a_disk_that_really_fills_up_corrupts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(small)], capture_output=True
    ).returncode:
        pytest.skip("a small disk needs the right to mount one")
    try:
        monkeypatch.setattr("sweeps.coordinator.MIN_FREE_MB", 0.0)  # let it run into the wall
        arms = {"a": {}, "b": {}}
        assert run(make_plan(small / "s", arms, seeds=(0, 1), steps=800)) == 1
        said = capsys.readouterr()
        assert "disk is full" in (said.out + said.err).lower()
        subprocess.run(["mount", "-o", "remount,size=60m", str(small)], check=True)
        assert run(make_plan(small / "s", arms, seeds=(0, 1), steps=800)) == 0
        assert run(make_plan(small / "t", arms, seeds=(0, 1), steps=800)) == 0
        assert rows_of(small / "s") == rows_of(small / "t")
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_a_disk_that_is_nearly_full_ends_the_sweep_before_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sweeps.coordinator.MIN_FREE_MB", float("inf"))
    assert run(make_plan(tmp_path / "s", {"a": {"sleep": 0.1}}, seeds=(0,), steps=200)) == 1
    assert "the disk is full" in capsys.readouterr().out
    (state,) = read_runs(tmp_path / "s").values()
    assert state.status == "paused" and state.checkpoints[-1] == state.step

"""W&B: what a run shows there, read back from its offline files, and that W&B can fail without touching the run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reasonrl import tracking
from reasonrl.events import EventLog
from reasonrl.tracking import TrackingConfig, make_tracker, resolve_mode, sweep_summary

KEY = "0123456789ab"
Emit = Callable[..., None]


@pytest.fixture(autouse=True)
def nobody_logged_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine without a W&B login, and no helper left over from another test."""
    for name in list(os.environ):
        if name.startswith("WANDB"):
            monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("NETRC", str(home / "netrc"))
    monkeypatch.setattr(tracking, "_SAID", set())
    yield
    tracking.flush(250.0)


def sweep_folder(tmp_path: Path, key: str = KEY) -> Path:
    """Return the folder of a run inside a sweep that has a plan."""
    run_dir = tmp_path / "results" / "clip" / "runs" / key
    run_dir.mkdir(parents=True, exist_ok=True)
    runs = [{"key": KEY, "name": "symmetric-s0", "arm": "symmetric"}]
    (tmp_path / "results" / "clip" / "plan.json").write_text(json.dumps({"runs": runs}))
    return run_dir


@contextlib.contextmanager
def run(run_dir: Path, **settings: Any) -> Iterator[Emit]:
    """Yield a function that records an event the way the trainer does: log first, tracker second."""
    log = EventLog(run_dir / "events.jsonl")
    tracker = make_tracker(
        SimpleNamespace(tracking=TrackingConfig(kind="wandb", tags=["paper"], **settings)),  # type: ignore[arg-type]
        run_dir,
    )

    def emit(kind: str, **fields: Any) -> None:
        event = {"type": kind, "time": time.time(), **fields}
        log.append(event)
        tracker.log(event)

    yield emit
    tracker.finish()
    log.close()


def start(emit: Emit, resumed: int | None = None) -> None:
    config = {"loss": {"kind": "clip", "low": 0.2}, "seed": 0}
    emit("start", key=KEY, name=KEY, seed=0, steps=6, config=config, resumed_from=resumed)


def steps(emit: Emit, first: int, last: int) -> None:
    for step in range(first, last + 1):
        emit("step", step=step, metrics={"reward/total": step / 10, "kl/ref": float("nan") if step == 2 else 0.1})


def files(folder: Path) -> list[Path]:
    """Return the offline files below a run's or sweep's own wandb folder, oldest first."""
    return sorted((folder / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)


def records(file: Path) -> list[dict[str, Any]]:
    """Read an offline file with W&B's own inspector."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def rows(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [item["history"]["item"] for item in found if item["type"] == "history"]


def step_rows(found: list[dict[str, Any]]) -> list[int]:
    return [int(row["step"]) for row in rows(found) if "reward/total" in row]


def children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            if entry.name.isdigit() and int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]) == pid:
                found.append(int(entry.name))
    return found


def helper_pid() -> int:
    process = tracking._helper()._process
    assert process is not None
    return process.pid


def wait_for(condition: Callable[[], Any]) -> Any:
    for _ in range(4000):
        if value := condition():
            return value
        time.sleep(0.05)
    pytest.fail("waited in vain")


def test_offline_file_holds_the_whole_run(tmp_path: Path) -> None:
    run_dir = sweep_folder(tmp_path)
    alert = {
        "message": "0.02 nats",
        "evidence": {"entropy": 0.02, "window": [2, 4]},
        "intervention": ["loss=clip_higher"],
    }
    reason = {"code": "A03", "message": "0.02 nats"}
    with run(run_dir) as emit:
        start(emit)
        emit("eval", step=0, metrics={"eval/accuracy": 0.25}, problems=[1], samples=4)
        steps(emit, 1, 4)
        emit("alert", step=2, code="A06", title="a note", severity="note", **alert)
        emit("alert", step=3, code="A01", title="no signal", severity="flag", **alert)
        emit("alert", step=4, code="A03", title="entropy collapse", severity="stop", **alert)
        emit("samples", step=4, rows=[{"prompt": "p", "completion": "c", "reward": 1.0, "finish": "stop"}])
        emit("checkpoint", step=4, path="checkpoints/step_000004")
        emit("end", step=4, status="stopped", reason=reason, error_class=None)
    tracking.flush(250.0)
    (file,) = files(run_dir)
    found = records(file)
    described = next(item["run"] for item in found if item["type"] == "run")
    assert (described["run_id"], described["display_name"]) == (KEY, "symmetric-s0")
    assert (described["run_group"], described["job_type"]) == ("clip", "symmetric")
    assert described["project"] == "reasonrl" and described["tags"] == ["paper"]
    config = described["config"]["update"]
    assert config["loss"] == {"kind": "clip", "low": 0.2} and config["run_key"] == KEY and config["arm"] == "symmetric"
    metrics = [item["metric"] for item in found if item["type"] == "metric"]
    assert [m["step_metric"] for m in metrics if m.get("glob_name") == "*"] == ["step"]
    assert step_rows(found) == [1, 2, 3, 4]
    assert rows(found)[0]["step"] == 0 and rows(found)[0]["eval/accuracy"] == 0.25
    assert str(rows(found)[2]["kl/ref"]).lower() == "nan"
    alerts = [item["alert"] for item in found if item["type"] == "alert"]
    assert [(a["title"], a["level"]) for a in alerts] == [("A01 no signal", "WARN"), ("A03 entropy collapse", "ERROR")]
    assert "0.02 nats" in alerts[1]["text"] and "loss=clip_higher" in alerts[1]["text"]
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--summary", "--json", str(file)]
    summary = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert summary["state"] == "finished" and summary["summary"]["stop_code"] == "A03"
    assert summary["summary"]["status"] == "stopped" and summary["summary"]["alerts"] == ["A06@2", "A01@3", "A03@4"]
    assert summary["summary"]["samples"]["nrows"] == 1


def test_missing_login_is_said_once_and_wandb_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for key in (KEY, "ba9876543210"):
        with run(sweep_folder(tmp_path, key)) as emit:
            start(emit)
            steps(emit, 1, 1)
            emit("end", step=1, status="finished", reason=None)
    tracking.flush(250.0)
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1 and "not logged in" in printed.err and "offline" in printed.err
    assert len(files(sweep_folder(tmp_path, "ba9876543210"))) == 1


def test_modes_and_logins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    online = TrackingConfig(kind="wandb")
    assert resolve_mode(online)[0] == "offline"
    (tmp_path / "home" / "netrc").write_text("machine api.wandb.ai\n  login user\n  password secret\n")
    assert resolve_mode(online) == ("online", None)
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert resolve_mode(online)[0] == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert resolve_mode(online) == ("online", None)
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert resolve_mode(online) == ("offline", None)
    assert resolve_mode(TrackingConfig(kind="wandb", mode="disabled")) == ("disabled", None)


@pytest.mark.parametrize("settings", [{"kind": "none"}, {"kind": "wandb", "mode": "disabled"}])
def test_switched_off_starts_and_writes_nothing(tmp_path: Path, settings: dict[str, str]) -> None:
    tracker = make_tracker(SimpleNamespace(tracking=TrackingConfig(**settings)), tmp_path / "run")  # type: ignore[arg-type]
    tracker.start({"type": "start"})
    tracker.log({"type": "step"})
    tracker.alert({"type": "alert"})
    tracker.finish("finished")
    assert not (tmp_path / "run").exists() and tracking._HELPERS.get(os.getpid()) is None


def test_resumed_run_keeps_its_id_and_sends_only_what_is_new(tmp_path: Path) -> None:
    run_dir = sweep_folder(tmp_path)
    with run(run_dir) as emit:
        start(emit)
        steps(emit, 1, 2)
        emit("end", step=2, status="paused", reason=None)
    tracking.flush(250.0)
    with run(run_dir) as emit:
        start(emit, resumed=2)
        steps(emit, 3, 4)
        emit("end", step=4, status="finished", reason=None)
    tracking.flush(250.0)
    first, second = (records(file) for file in files(run_dir))
    assert [step_rows(found) for found in (first, second)] == [[1, 2], [3, 4]]
    ids = {item["run"]["run_id"] for found in (first, second) for item in found if item["type"] == "run"}
    assert ids == {KEY}


@pytest.mark.parametrize("victim", ["helper", "service"])
def test_killed_helper_or_service_costs_the_run_nothing_and_no_row(tmp_path: Path, victim: str) -> None:
    run_dir = sweep_folder(tmp_path)
    with run(run_dir) as emit:
        start(emit)
        steps(emit, 1, 2)
        wait_for(lambda: files(run_dir))
        pid = helper_pid()
        services = wait_for(lambda: children(pid))
        for target in [pid] if victim == "helper" else services:
            os.kill(target, signal.SIGKILL)
        if victim == "helper":
            wait_for(lambda: tracking._helper()._process.poll() is not None)  # type: ignore[union-attr]
        steps(emit, 3, 6)
        emit("end", step=6, status="finished", reason=None)
    wait_for(lambda: (tracking._helper().tick(), not tracking._helper()._orders)[1])
    tracking.flush(250.0)
    assert step_rows(records(files(run_dir)[-1])) == [1, 2, 3, 4, 5, 6]
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what the killed helper left behind


def broken_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Put a module named wandb in front of the real one."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "wandb.py").write_text(body)
    monkeypatch.setattr(tracking, "_python_path", lambda: f"{tmp_path / 'broken'}{os.pathsep}{Path.cwd()}")


def test_broken_library_is_said_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    broken_wandb(tmp_path, monkeypatch, "raise RuntimeError('installed halfway')")
    with run(sweep_folder(tmp_path), mode="offline") as emit:
        start(emit)
        steps(emit, 1, 6)
        emit("end", step=6, status="finished", reason=None)
    tracking.flush(250.0)
    printed = capfd.readouterr().err
    assert printed.count("W&B was given up (installed halfway)") == 1 and printed.count("\n") == 1


def test_hanging_library_keeps_nobody_waiting_and_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken_wandb(tmp_path, monkeypatch, "import time\ntime.sleep(3600)")
    with run(sweep_folder(tmp_path), mode="offline") as emit:
        start(emit)
        steps(emit, 1, 6)
    pid = helper_pid()
    tracking.flush(0.5)
    assert Path(f"/proc/{pid}").exists()  # left to itself, with a limit of its own
    os.killpg(pid, signal.SIGKILL)


def test_helper_that_dies_again_and_again_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    broken_wandb(tmp_path, monkeypatch, "import os\nos._exit(3)")
    with run(sweep_folder(tmp_path), mode="offline") as emit:
        start(emit)
        wait_for(lambda: (steps(emit, 1, 1), "given up" in capfd.readouterr().err)[1])
        steps(emit, 2, 6)


def test_run_whose_process_dies_is_marked_failed(tmp_path: Path) -> None:
    run_dir = sweep_folder(tmp_path)
    script = (
        "import os, signal, sys, time\nfrom pathlib import Path\nfrom types import SimpleNamespace\n"
        "from reasonrl.events import EventLog\nfrom reasonrl.tracking import TrackingConfig, make_tracker\n"
        f"folder = Path({str(run_dir)!r})\nlog = EventLog(folder / 'events.jsonl')\n"
        "tracker = make_tracker(SimpleNamespace(tracking=TrackingConfig(kind='wandb', mode='offline')), folder)\n"
        f"first = {{'type': 'start', 'key': {KEY!r}, 'config': {{}}}}\n"
        "for event in (first, {'type': 'step', 'step': 1, 'metrics': {'reward/total': 1}}):\n"
        "    log.append(event)\n    tracker.log(event)\n"
        "while not list(folder.glob('wandb/offline-run-*/*.wandb')): time.sleep(0.05)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=False)
    position = run_dir / "wandb" / "position.json"
    wait_for(lambda: position.exists() and json.loads(position.read_text())["sound"])
    (file,) = files(run_dir)
    found = records(file)
    assert step_rows(found) == [1]
    assert [item["exit"]["exit_code"] for item in found if item["type"] == "exit"] == [1]


def test_recorded_run_can_be_sent_again(tmp_path: Path) -> None:
    run_dir = sweep_folder(tmp_path)
    log = EventLog(run_dir / "events.jsonl")
    section = {"kind": "none", "mode": "offline", "project": "other"}
    log.append({"type": "start", "key": KEY, "name": KEY, "config": {"tracking": section}})
    for step in (1, 2, 3):
        log.append({"type": "step", "step": step, "metrics": {"reward/total": 0.5}})
    log.append({"type": "end", "step": 3, "status": "finished", "reason": None})
    log.close()
    command = [sys.executable, "-m", "reasonrl.tracking", str(run_dir)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    found = records(files(run_dir)[0])
    assert step_rows(found) == [1, 2, 3]
    assert next(item["run"]["project"] for item in found if item["type"] == "run") == "other"
    done = subprocess.run([*command[:-1], str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 2 and "events.jsonl does not exist" in done.stdout


def test_summary_run_has_a_table_of_trials(tmp_path: Path) -> None:
    folder = tmp_path / "results" / "clip"
    section = {"kind": "wandb", "mode": "offline", "tags": ["paper"]}
    plan = SimpleNamespace(
        name="clip", question="Which clip?", arms=["a", "b"], baseline="a", seeds=[0], command=["+sweep=clip"],
        directory=folder, runs=[SimpleNamespace(config={"tracking": section})],
    )  # fmt: skip
    folder.mkdir(parents=True)
    trials = [
        {"key": "k0", "arm": "a", "seed": 0, "status": "finished", "eval/accuracy": 0.5},
        {"key": "k1", "arm": "b", "seed": 0, "status": "stopped", "eval/accuracy": float("nan"), "code": "A03"},
    ]
    sweep_summary(plan, trials)
    (file,) = files(folder)
    described = next(item["run"] for item in records(file) if item["type"] == "run")
    assert (described["run_group"], described["job_type"]) == ("clip", "summary")
    assert described["config"]["update"]["question"] == "Which clip?"
    (table,) = (folder / "wandb").glob("offline-run-*/files/media/table/trials*.json")
    content = json.loads(table.read_text())
    assert content["columns"] == ["key", "arm", "seed", "status", "eval/accuracy", "code"]
    assert content["data"] == [["k0", "a", 0, "finished", 0.5, None], ["k1", "b", 0, "stopped", "nan", "A03"]]

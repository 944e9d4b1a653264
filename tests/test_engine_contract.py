"""What every engine must do, asked of each: worker processes of this machine, and a Ray cluster of two nodes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from reasonrl.errors import EngineError
from reasonrl.events import read_events
from sweeps import summary
from sweeps.engines import Engine, make_engine
from sweeps.engines.base import Message, Slot
from sweeps.runner import run
from tests.fakes import base_config, group_members, make_plan, rows_of
from tests.ray_cluster import Cluster, needs_ray, two_nodes

SETTINGS: dict[str, Any] = {"slots": 2, "train": "tests.fakes:train", "threads": 1}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with two_nodes() as made:
        yield made


@pytest.fixture(params=["local", pytest.param("ray", marks=needs_ray)])
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The `engine` section for each kind of engine."""
    if request.param == "local":
        return {**SETTINGS, "kind": "local", "devices": []}
    return {**SETTINGS, "kind": "ray", "address": request.getfixturevalue("cluster").address}


@pytest.fixture
def engine(settings: dict[str, Any], tmp_path: Path) -> Iterator[Engine]:
    made = make_engine(settings, tmp_path / "workers")
    yield made
    made.close()


def listen(engine: Engine, until: Callable[[Message], bool], timeout: float = 60.0) -> list[Message]:
    """Messages up to the first for which `until` holds."""
    heard: list[Message] = []
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        for _, message in engine.poll(0.1):
            heard.append(message)
            if until(message):
                return heard
    raise AssertionError(f"waited in vain; heard {heard}")


def job(run_dir: Path, steps: int = 6, **fake: Any) -> Message:
    config = {**base_config(steps, **fake), "seed": 0}
    return {"type": "run", "key": "k", "run_dir": str(run_dir), "config": config, "pause_at": None, "on_alert": "stop"}


def is_type(*kinds: str) -> Callable[[Message], bool]:
    return lambda message: message["type"] in kinds


def started(engine: Engine) -> tuple[Slot, int]:
    """(the first slot, the process id of its worker), once it is ready."""
    slot = engine.slots()[0]
    engine.start(slot)
    return slot, int(listen(engine, is_type("ready"))[-1]["pid"])


def wait_until_gone(group: int) -> None:
    deadline = time.monotonic() + 20
    while group_members(group):
        assert time.monotonic() < deadline, f"still there: {group_members(group)}"
        time.sleep(0.02)


def test_one_worker_trains_many_runs_and_prints_into_their_folders(engine: Engine, tmp_path: Path) -> None:
    slot, pid = started(engine)
    for name in ("one", "two"):
        engine.send(slot, job(tmp_path / name))
        heard = listen(engine, is_type("done", "failed"))
        assert heard[-1]["type"] == "done" and heard[-1]["rss_mb"] > 1
        assert {m["event"]["pid"] for m in heard if m.get("event", {}).get("type") == "start"} == {pid}
        assert (tmp_path / name / "worker.log").exists()
        logged = [event["type"] for event in read_events(tmp_path / name / "events.jsonl")]
        assert logged == [message["event"]["type"] for message in heard if message["type"] == "event"]


def test_a_stop_acts_within_the_step_and_a_command_for_another_run_is_ignored(engine: Engine, tmp_path: Path) -> None:
    slot, _ = started(engine)
    engine.send(slot, job(tmp_path / "r", steps=500, sleep=0.2))
    listen(engine, lambda message: message.get("event", {}).get("step") == 1)
    engine.send(slot, {"type": "stop", "key": "other", "reason": None})
    listen(engine, lambda message: message.get("event", {}).get("step") == 3)
    engine.send(slot, {"type": "stop", "key": "k", "reason": {"code": "USER"}})
    heard = listen(engine, is_type("done"))
    end = next(message["event"] for message in heard if message.get("event", {}).get("type") == "end")
    assert end["status"] == "stopped" and end["step"] <= 6
    decisions = [event for event in read_events(tmp_path / "r" / "events.jsonl") if event["type"] == "decision"]
    assert [decision["reason"] for decision in decisions] == [{"code": "USER"}]


def test_an_exception_comes_back_with_class_and_traceback_and_the_worker_lives_on(
    engine: Engine, tmp_path: Path
) -> None:
    slot, _ = started(engine)
    engine.send(slot, job(tmp_path / "r", raise_at=2))
    failed = listen(engine, is_type("failed"))[-1]
    assert failed["error_class"] == "user_code" and "ValueError: a bug at step 2" in failed["traceback"]
    engine.send(slot, job(tmp_path / "s"))
    assert listen(engine, is_type("done", "exit"))[-1]["type"] == "done"


def test_a_killed_worker_is_reported_after_everything_it_said(engine: Engine, tmp_path: Path) -> None:
    slot, _ = started(engine)
    engine.send(slot, job(tmp_path / "r", die_at=4))
    heard = listen(engine, is_type("exit"))
    assert heard[-1]["signal"] == signal.SIGKILL
    steps = [message["event"]["step"] for message in heard if message.get("event", {}).get("type") == "step"]
    assert steps == [1, 2, 3]
    with pytest.raises(EngineError):
        engine.send(slot, job(tmp_path / "r"))
    engine.start(slot)
    assert listen(engine, is_type("ready"))


@pytest.mark.parametrize("how", ["its worker dies", "the engine kills it", "the engine is closed"])
def test_the_processes_a_worker_started_go_with_it(engine: Engine, tmp_path: Path, how: str) -> None:
    slot, pid = started(engine)
    engine.send(slot, job(tmp_path / "r", steps=5000, sleep=0.05, child=600))
    listen(engine, lambda message: message.get("event", {}).get("step") == 1)
    assert len(group_members(pid)) >= 3  # the worker, its guard, its child
    if how == "its worker dies":
        os.kill(pid, signal.SIGKILL)
        listen(engine, is_type("exit"))
    elif how == "the engine kills it":
        engine.kill(slot)
    else:
        engine.close()
    wait_until_gone(pid)


def test_a_sweep_gives_the_same_rows_on_every_engine(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(summary, "make_report", lambda sweep: None)
    plan = make_plan(tmp_path / "s", {"a": {}, "b": {"die_at": 3}}, seeds=(0, 1), engine=settings)
    assert run(plan) == 0
    said = capfd.readouterr()
    assert not said.err and all(word not in said.out for word in ("INFO", "WARNING", "(raylet"))
    assert run(make_plan(tmp_path / "t", {"a": {}, "b": {"die_at": 3}}, seeds=(0, 1))) == 0
    assert rows_of(tmp_path / "s") == rows_of(tmp_path / "t")

"""Slots and worker processes: who gets which device, what a worker sees before torch loads, and how it dies."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from reasonrl.errors import EngineError
from reasonrl.events import read_events
from sweeps.engines.base import Slot, choose_devices, lay_out
from sweeps.engines.local import LocalEngine
from sweeps.failures import classify, halve_micro_batch, may_retry
from sweeps.runner import run
from sweeps.seats import Seat
from tests.fakes import group_members, make_plan
from tests.test_engine_contract import is_type, job, listen, wait_until_gone

pytestmark = pytest.mark.usefixtures("no_report")

ROOT = Path(__file__).resolve().parent.parent
SETTINGS: dict[str, Any] = {"slots": 1, "devices": [], "train": "tests.fakes:train", "threads": 1}


# -- laying out slots -------------------------------------------------------------------------------------------------


def test_one_slot_per_gpu_by_default() -> None:
    slots = lay_out({}, ["0", "1", "2"], cores=12).slots
    assert [slot.devices for slot in slots] == [("0",), ("1",), ("2",)]
    assert [slot.threads for slot in slots] == [4, 4, 4]


def test_runs_that_share_a_gpu_spread_over_all_gpus_first_and_share_its_memory() -> None:
    slots = lay_out({"trials_per_gpu": 2}, ["0", "1"], cores=8).slots
    assert [slot.devices for slot in slots] == [("0",), ("1",), ("0",), ("1",)]
    assert {slot.share for slot in slots} == {0.5}


def test_several_gpus_per_run_and_the_rest_is_named() -> None:
    layout = lay_out({"per_trial_gpus": 2}, ["GPU-a", "GPU-b", "GPU-c"], cores=4)
    assert [slot.devices for slot in layout.slots] == [("GPU-a", "GPU-b")]
    assert "GPU-c" in layout.notes[0]


def test_without_a_gpu_two_cpu_slots_share_the_cores() -> None:
    slots = lay_out({}, [], cores=6).slots
    assert [(slot.devices, slot.threads) for slot in slots] == [((), 3), ((), 3)]


@pytest.mark.parametrize(
    ("settings", "visible", "words"),
    [
        ({"slots": 3}, ["0"], "engine.trials_per_gpu=3"),
        ({"per_trial_gpus": 4}, ["0", "1"], "Choose at most 2"),
        ({"per_trial_gpus": 2}, [], "no GPU is visible"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_cure(settings: dict[str, Any], visible: list[str], words: str) -> None:
    with pytest.raises(EngineError, match=words):
        lay_out(settings, visible, cores=4)


def test_an_existing_cuda_visible_devices_is_respected() -> None:
    fence = {"CUDA_VISIBLE_DEVICES": "2,GPU-beef"}
    assert choose_devices(None, fence, ["0", "1", "2", "3"]) == ["2", "GPU-beef"]
    assert choose_devices(["GPU-beef"], fence, []) == ["GPU-beef"]
    with pytest.raises(EngineError, match="CUDA_VISIBLE_DEVICES=2,GPU-beef"):
        choose_devices(["0"], fence, ["0", "1", "2", "3"])
    assert choose_devices(None, {"CUDA_VISIBLE_DEVICES": ""}, ["0"]) == []


def test_a_device_named_twice_is_refused() -> None:
    with pytest.raises(EngineError, match="trials_per_gpu"):
        choose_devices(["0", "0"], {}, ["0", "1"])


def test_threads_of_a_slot_sleep_while_they_wait_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert Slot(0).environment()["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert Slot(0).environment()["OMP_WAIT_POLICY"] == "ACTIVE"


def test_a_slot_sets_devices_and_threads_before_anything_is_imported() -> None:
    env = Slot(0, ("1", "3"), threads=5).environment()
    assert env["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert env["OMP_NUM_THREADS"] == env["MKL_NUM_THREADS"] == "5"


# -- the worker process -----------------------------------------------------------------------------------------------


def test_a_worker_sees_its_devices_and_threads(tmp_path: Path) -> None:
    settings = {**SETTINGS, "devices": ["fake:0", "fake:1"], "slots": None, "threads": 3, "train": "tests.fakes:spy"}
    engine = LocalEngine(settings, tmp_path / "workers")
    try:
        assert [slot.devices for slot in engine.slots()] == [("fake:0",), ("fake:1",)]
        second = engine.slots()[1]
        engine.start(second)
        engine.send(second, job(tmp_path / "r"))
        heard = listen(engine, is_type("done", "failed"))
        seen = next(message["event"]["seen"] for message in heard if message["type"] == "event")
        assert seen == {"CUDA_VISIBLE_DEVICES": "fake:1", "OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3"}
    finally:
        engine.close()


def test_a_worker_and_its_children_die_with_their_coordinator(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from sweeps.engines.local import LocalEngine\n"
        "from tests.test_engine_local import SETTINGS\n"
        "from tests.test_engine_contract import job, listen\n"
        "engine = LocalEngine(SETTINGS, Path(sys.argv[1]) / 'workers'); slot = engine.slots()[0]; engine.start(slot)\n"
        "engine.send(slot, job(Path(sys.argv[1]) / 'r', steps=500, sleep=0.05, child=60))\n"
        "listen(engine, lambda m: m.get('event', {}).get('step') == 1)\n"
        "print(engine.pid(slot), flush=True); time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert group_members(pid)
    parent.kill()
    parent.communicate()
    wait_until_gone(pid)


@pytest.mark.parametrize("kind", [None, "FSDP"])
def test_several_gpus_per_run_are_launched_through_accelerate(tmp_path: Path, kind: str | None) -> None:
    file = tmp_path / "accelerate.yaml"
    file.write_text(f"{{distributed_type: {kind}, num_processes: 7, gpu_ids: '5,6', fsdp_config: {{fsdp_version: 2}}}}")
    engine = {
        "accelerate_config": str(file) if kind else None,
        "devices": ["fake:0", "fake:1"],
        "slots": None,
        "per_trial_gpus": 2,
        "train": "tests.fakes:train_on_ranks",
    }
    plan = make_plan(tmp_path / "s", {"a": {}}, seeds=(0,), steps=4, engine=engine)
    assert run(plan) == 0
    folder = plan.directory / "runs" / plan.runs[0].key
    assert sorted(path.name for path in folder.glob("rank_*")) == ["rank_0_of_2", "rank_1_of_2"]
    assert [path.read_text() for path in folder.glob("fsdp_*")] == (["fake:0,fake:1"] * 2 if kind else [])
    assert [event["step"] for event in read_events(folder / "events.jsonl") if event["type"] == "step"] == [1, 2, 3, 4]


def test_killing_a_worker_takes_the_ranks_of_its_run(tmp_path: Path) -> None:
    settings = {**SETTINGS, "devices": ["fake:0", "fake:1"], "slots": None, "per_trial_gpus": 2}
    engine = LocalEngine({**settings, "train": "tests.fakes:train_on_ranks"}, tmp_path / "workers")
    try:
        (slot,) = engine.slots()
        engine.start(slot)
        engine.send(slot, job(tmp_path / "r", steps=5000, sleep=0.05, rank_sleep=3600))
        listen(engine, lambda message: message.get("event", {}).get("step") == 1, timeout=60)
        deadline = time.monotonic() + 30
        while len(ranks := [path for path in (tmp_path / "r").glob("rank_*") if path.read_text()]) < 2:
            assert time.monotonic() < deadline, "the second rank never came"
            time.sleep(0.05)
        pids = [int(path.read_text()) for path in ranks]
        engine.kill(slot)
        while any(alive(pid) for pid in pids):
            assert time.monotonic() < deadline, "a rank is left"
            time.sleep(0.05)
    finally:
        engine.close()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# -- failures and their classes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), "oom"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "oom"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "oom"),
        (FloatingPointError("loss is nan"), "non_finite"),
        (OSError(28, "No space left on device"), "infrastructure"),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), "infrastructure"),
        (ConnectionResetError(), "infrastructure"),
        (FileNotFoundError(2, "no such file"), "user_code"),
        (KeyError("reward"), "user_code"),
    ],
)
def test_failures_are_classified(error: Exception, expected: str) -> None:
    assert classify(error) == expected


def test_retries_by_class() -> None:
    assert not may_retry([("user_code", 3)], 2)
    assert not may_retry([("non_finite", 3)], 2)
    assert may_retry([("oom", 3)], 2) and not may_retry([("oom", 3), ("oom", 3)], 2)
    assert may_retry([("killed", 3), ("killed", 3)], 2)
    assert not may_retry([("killed", 3), ("killed", 3), ("killed", 3)], 2)
    # A run that got further each time is only unlucky.
    assert may_retry([("killed", step) for step in range(1, 20)], 2)


def test_half_a_micro_batch() -> None:
    config = {"optim": {"micro_batch_size": None, "minibatches": 4}, "data": {"prompts_per_step": 32}}
    config["sampling"] = {"group_size": 8}
    assert halve_micro_batch(config) == 32
    assert halve_micro_batch({"optim": {"micro_batch_size": 6}}) == 3
    assert halve_micro_batch({"optim": {"micro_batch_size": 1}}) is None


def test_a_worker_that_keeps_memory_is_started_anew() -> None:
    seat = Seat(Slot(0))
    assert not seat.keeps_memory({"rss_mb": 800.0})
    assert not seat.keeps_memory({"rss_mb": 1700.0})
    assert seat.keeps_memory({"rss_mb": 1900.0})
    seat.restarted()
    assert not seat.keeps_memory({"rss_mb": 1900.0})
    assert seat.keeps_memory({"rss_mb": 1900.0, "gpu_mb": 2000.0})

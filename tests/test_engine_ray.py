"""Ray: slots laid out by node, refusals before anything starts, and nodes and actors that are lost on the way."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reasonrl.errors import EngineError
from sweeps.engines import ray as module
from sweeps.engines.ray import RayEngine, describe_loss, node_about
from sweeps.engines.ray_layout import Node, lay_out_cluster
from sweeps.failures import describe_exit
from sweeps.ledger import read_ledger
from sweeps.runner import run
from tests.fakes import group_members, make_plan, rows_of
from tests.ray_cluster import SMALL, Cluster, needs_ray, two_nodes
from tests.test_crash_safety import assert_each_finished_once, wait_for
from tests.test_engine_contract import is_type, job, listen

pytestmark = pytest.mark.usefixtures("no_report")

BIG, SMALLER = Node("big", 16, 8, 16, 8), Node("small", 8, 2, 8, 2)
CPUS = [Node("a", 4, 0, 4, 0), Node("b", 2, 0, 2, 0)]


# -- laying out, without Ray ------------------------------------------------------------------------------------------


def test_every_free_gpu_of_every_node_is_a_slot() -> None:
    slots = lay_out_cluster({}, [BIG, SMALLER]).slots
    assert len(slots) == 10 and slots[9].devices == ("small:1",)
    assert [slot.index for slot in slots] == list(range(10))


def test_a_slot_of_several_gpus_lies_on_one_node() -> None:
    slots = lay_out_cluster({"per_trial_gpus": 3}, [BIG, SMALLER]).slots
    assert [slot.devices for slot in slots] == [("big:0", "big:1", "big:2"), ("big:3", "big:4", "big:5")]


def test_shared_gpus_give_fractions() -> None:
    slots = lay_out_cluster({"trials_per_gpu": 2}, [SMALLER]).slots
    assert [(slot.devices, slot.share) for slot in slots] == [
        (("small:0",), 0.5), (("small:1",), 0.5), (("small:0",), 0.5), (("small:1",), 0.5),
    ]  # fmt: skip


def test_without_gpus_cpus_are_divided() -> None:
    assert [slot.threads for slot in lay_out_cluster({}, CPUS).slots] == [2, 2, 1, 1]
    assert [slot.threads for slot in lay_out_cluster({"slots": 3}, CPUS).slots] == [2, 2, 2]
    assert [slot.threads for slot in lay_out_cluster({"slots": 6}, CPUS).slots] == [1] * 6


def test_what_other_jobs_use_is_left_alone() -> None:
    busy = Node("big", 16, 8, 16, 3)
    assert len(lay_out_cluster({}, [busy]).slots) == 3
    layout = lay_out_cluster({"slots": 5}, [busy])
    assert len(layout.slots) == 3 and "3 of 5 slots are free" in layout.notes[0]
    with pytest.raises(EngineError, match="no free slot now"):
        lay_out_cluster({}, [Node("big", 16, 8, 16, 0)])


@pytest.mark.parametrize(
    ("settings", "nodes", "words"),
    [
        ({"per_trial_gpus": 9}, [BIG, SMALLER], "no node is so large .*Choose at most 8"),
        ({"per_trial_gpus": 2}, CPUS, "engine.per_trial_gpus=2: no node"),
        ({"threads": 5}, CPUS, "engine.threads=5: .*Choose at most 4"),
        ({"slots": 7}, CPUS, "room for 6"),
        ({"devices": ["0"]}, [BIG], "Ray assigns devices"),
    ],
)
def test_what_can_never_be_placed_is_refused_instead_of_waiting_for_ever(
    settings: dict[str, Any], nodes: list[Node], words: str
) -> None:
    with pytest.raises(EngineError, match=words):
        lay_out_cluster(settings, nodes)


def test_a_lost_node_or_actor_is_infrastructure_and_a_kill_for_memory_is_not() -> None:
    class ActorDiedError(Exception):
        pass

    class OutOfMemoryError(Exception):
        pass

    node = describe_exit(describe_loss(ActorDiedError("The actor died because its node has died.")))
    assert node["error_class"] == "infrastructure" and "its node went away" in node["message"]
    actor = describe_exit(describe_loss(ActorDiedError("The actor died unexpectedly before finishing this task.")))
    assert actor["error_class"] == "infrastructure" and "its actor went away" in actor["message"]
    assert describe_exit(describe_loss(OutOfMemoryError("...")))["error_class"] == "oom"


# -- on a cluster of two nodes ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with two_nodes(num_gpus=2) as made:
        yield made


def settings_for(cluster: Cluster, **more: Any) -> dict[str, Any]:
    return {
        "kind": "ray",
        "address": cluster.address,
        "devices": None,
        "train": "tests.fakes:train",
        "threads": 1,
    } | more


def refused(directory: Path, settings: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> str:
    plan = make_plan(directory, {"a": {}}, seeds=(0,), engine=settings)
    assert run(plan) == 2
    said = capfd.readouterr()
    assert said.out == "" and "Traceback" not in said.err and not (directory / "runs").exists()
    return said.err


@needs_ray
def test_two_gpus_of_one_node_are_given_to_one_worker(cluster: Cluster, tmp_path: Path) -> None:
    engine = RayEngine(settings_for(cluster, per_trial_gpus=2, train="tests.fakes:train_on_ranks"), tmp_path / "w")
    try:
        assert [len(slot.devices) for slot in engine.slots()] == [2, 2]
        slot = engine.slots()[0]
        engine.start(slot)
        engine.send(slot, job(tmp_path / "r", steps=3))
        assert listen(engine, is_type("done", "failed", "exit"), 120)[-1]["type"] == "done"
        assert sorted(path.name for path in (tmp_path / "r").glob("rank_*")) == ["rank_0_of_2", "rank_1_of_2"]
    finally:
        engine.close()


@needs_ray
def test_a_worker_sees_the_gpu_ray_gave_it(cluster: Cluster, tmp_path: Path) -> None:
    engine = RayEngine(settings_for(cluster, trials_per_gpu=2, train="tests.fakes:spy"), tmp_path / "w")
    try:
        slot = engine.slots()[0]
        engine.start(slot)
        engine.send(slot, job(tmp_path / "r"))
        heard = listen(engine, is_type("done", "failed", "exit"))
        seen = next(message["event"]["seen"] for message in heard if message["type"] == "event")
        assert seen["CUDA_VISIBLE_DEVICES"] in ("0", "1") and seen["OMP_NUM_THREADS"] == "1"
    finally:
        engine.close()


def test_an_address_where_no_cluster_is_gets_one_message(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray", reason="the extra [ray] is not installed")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        said = refused(tmp_path / "s", {"kind": "ray", "address": address}, capfd)
    assert said.startswith(f"engine.address={address}: no Ray cluster answers there")


def test_without_the_package_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    assert "pip install 'reasonrl[ray]'" in refused(tmp_path / "s", {"kind": "ray"}, capfd)


@needs_ray
def test_a_node_with_other_versions_or_without_the_folder_is_named(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    mine = node_about()
    monkeypatch.setattr(module, "node_about", lambda: {**mine, "torch": "99.0"})
    monkeypatch.setattr(module, "look_around", lambda mark: (mine, False))
    said = refused(tmp_path / "s", settings_for(cluster), capfd)
    assert f"torch: {mine['torch']} there, 99.0 here" in said
    assert "does not see" in said and "results=FOLDER" in said and "Nothing was started" in said


@needs_ray
def test_what_the_nodes_cannot_hold_is_refused(
    cluster: Cluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert "Choose at most 2" in refused(tmp_path / "s", settings_for(cluster, per_trial_gpus=3), capfd)


@needs_ray
def test_a_killed_actor_takes_its_worker_along_and_its_run_is_tried_again(
    cluster: Cluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan(tmp_path / "s", {"a": {"sleep": 0.1}}, seeds=(0,), steps=40, engine=settings_for(cluster))
    killed: list[int] = []

    def kill_actor() -> None:
        wait_for(lambda: any(len(rows) >= 5 for rows in rows_of(plan.directory).values()))
        worker = next(int(entry["pid"]) for entry in events(plan.directory) if entry["type"] == "start")
        killed.append(worker)
        os.kill(parent_of(worker), signal.SIGKILL)

    helper = threading.Thread(target=kill_actor)
    helper.start()
    assert run(plan) == 0
    helper.join()
    assert "raylet" not in capfd.readouterr().out
    assert killed and not group_members(killed[0])
    retries = [entry for entry in read_ledger(plan.directory) if entry["type"] == "retry"]
    assert [entry["error_class"] for entry in retries] == ["infrastructure"]
    assert_each_finished_once(plan.directory)


@needs_ray
def test_a_sweep_that_loses_a_node_ends_with_the_same_rows(
    cluster: Cluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arms = {"a": {"sleep": 0.1}, "b": {"sleep": 0.1}}
    plan = make_plan(tmp_path / "s", arms, seeds=(0, 1), steps=25, engine=settings_for(cluster, slots=2))
    victim = list(cluster.worker_nodes)[0]

    def lose_node() -> None:
        wait_for(lambda: sum(len(rows) >= 5 for rows in rows_of(plan.directory).values()) >= 2)
        cluster.remove_node(victim, allow_graceful=False)

    helper = threading.Thread(target=lose_node)
    helper.start()
    try:
        assert run(plan) == 0
    finally:
        helper.join()
        cluster.add_node(num_cpus=1, num_gpus=2, **SMALL)
    said = capfd.readouterr().out
    assert "the worker was lost" in said and "is not used any more" in said
    retries = [entry for entry in read_ledger(plan.directory) if entry["type"] == "retry"]
    assert [entry["error_class"] for entry in retries] == ["infrastructure"]
    assert run(make_plan(tmp_path / "t", arms, seeds=(0, 1), steps=25)) == 0
    assert rows_of(tmp_path / "s") == rows_of(tmp_path / "t")
    assert_each_finished_once(plan.directory)


def events(directory: Path) -> Iterator[dict[str, Any]]:
    from reasonrl.events import read_events

    for path in directory.glob("runs/*/events.jsonl"):
        yield from read_events(path)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

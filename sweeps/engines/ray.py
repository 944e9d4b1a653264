"""Slots of a Ray cluster (Ray core): one actor per slot, which keeps the slot's worker process on its node.

The actor is a small local engine: the worker is the same program with the same socket, and dies with its actor. An
actor that is lost, with its node or alone, is reported like the exit of a worker and started anew by the
coordinator, never by Ray.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reasonrl.errors import EngineError
from sweeps.engines.base import Layout, Message, Slot
from sweeps.engines.local import LocalEngine
from sweeps.engines.ray_layout import Node, capacity, lay_out_cluster
from sweeps.versions import differences, versions

POLL_S = 10.0  # how long an actor waits for something to report before it says "nothing"
LOOK_S = 0.02
CONNECT_S = 5.0
NODE_S = 120.0  # for a node's first process to come up and answer
END_S = 5.0
ROOM_S = 2.0
NO_ROOM = "its node has left the cluster, and no other has room"
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
}


class SlotActor:
    """What runs on a node for one slot: its worker process behind a local engine of one slot."""

    def __init__(self, settings: dict[str, Any], logs: str, slot: dict[str, Any], gpus: bool) -> None:
        import ray

        devices = tuple(str(device) for device in ray.get_gpu_ids()) if gpus else ()
        self._slot = Slot(**{**slot, "devices": devices})
        self._engine = LocalEngine(settings, Path(logs), Layout([self._slot]))
        self._lock = threading.Lock()
        self._engine.start(self._slot)

    def send(self, message: Message) -> str | None:
        """Hand a message to the worker; what went wrong, or None."""
        with self._lock:
            try:
                self._engine.send(self._slot, message)
            except EngineError as error:
                return str(error)
        return None

    def poll(self, timeout: float) -> list[Message]:
        """What the worker said, waiting up to `timeout` seconds for it."""
        deadline = time.monotonic() + timeout
        while True:
            with self._lock:
                heard = [message for _, message in self._engine.poll(0.0)]
            if heard or time.monotonic() > deadline:
                return heard
            time.sleep(LOOK_S)

    def end(self) -> None:
        """End the worker and everything it started."""
        with self._lock:
            self._engine.close()


@dataclass
class _Hand:
    """What the engine holds of a slot: its actor, the answer it waits for, what was sent, the reserved place."""

    actor: Any
    heard: Any
    sent: list[Any]
    place: Any = None
    placed: bool = False  # its worker has said something


class RayEngine:
    """One actor per slot; see `sweeps.engines.base.Engine` for the verbs."""

    def __init__(self, settings: Mapping[str, Any], logs: Path) -> None:
        self._ray = _import_ray()
        self._settings, self._logs = dict(settings), logs
        address = settings.get("address") or os.environ.get("RAY_ADDRESS")
        if self._ray.is_initialized():
            raise EngineError("Ray is in use by this very process already. Start the sweep in a process of its own.")
        self._hands: dict[int, _Hand] = {}
        self._gone: list[tuple[Slot, Message]] = []
        self._looked = 0.0
        _init(self._ray, address)
        try:
            nodes = self._nodes()
            layout = lay_out_cluster(settings, nodes)
            self._check_nodes()
        except BaseException:
            self._ray.shutdown()
            raise
        self._slots, self.notes = layout.slots, layout.notes

    def slots(self) -> Sequence[Slot]:
        """All slots, in order."""
        return self._slots

    def start(self, slot: Slot) -> None:
        """Start the slot's actor, which starts its worker; when its node has left for good, say so at once."""
        self.kill(slot)
        if len(self._hands) >= self._room(slot):
            self._gone.append((slot, _exit(NO_ROOM)))
            return
        options: dict[str, Any] = {"num_cpus": slot.threads, "max_restarts": 0, "max_concurrency": 3}
        place = None
        if slot.devices:
            options["num_cpus"] = 1 if not self._settings.get("threads") else slot.threads
            options["num_gpus"] = len(slot.devices) if slot.share == 1.0 else int(1e4 * slot.share) / 1e4
        if len(slot.devices) > 1:
            place = self._ray.util.placement_group(
                [{"GPU": options["num_gpus"], "CPU": options["num_cpus"]}], strategy="STRICT_PACK"
            )
            strategies = self._ray.util.scheduling_strategies
            options["scheduling_strategy"] = strategies.PlacementGroupSchedulingStrategy(place)
        fields = {"index": slot.index, "threads": slot.threads, "share": slot.share}
        file = self._settings.get("accelerate_config")
        file = file and str(Path(file).expanduser().resolve())
        settings = {"train": self._settings.get("train"), "accelerate_config": file}
        actor = (
            self._ray.remote(SlotActor)
            .options(**options)
            .remote(settings, str(self._logs.resolve()), fields, bool(slot.devices))
        )
        self._hands[slot.index] = _Hand(actor, actor.poll.remote(POLL_S), [], place)

    def send(self, slot: Slot, message: Message) -> None:
        """Hand one message to the worker; that it is gone may also be learned from its exit, a moment later."""
        hand = self._hands.get(slot.index)
        if hand is None:
            raise EngineError(f"Slot {slot.label} has no worker.")
        hand.sent.append(hand.actor.send.remote(message))
        ready, hand.sent = self._ray.wait(hand.sent, num_returns=len(hand.sent), timeout=0)
        for answer in ready:
            with contextlib.suppress(self._ray.exceptions.RayError):
                problem = self._ray.get(answer)
                if problem:
                    raise EngineError(problem)

    def poll(self, timeout: float) -> list[tuple[Slot, Message]]:
        """Messages that arrived; the exit of a worker, or the loss of its actor or node, comes last."""
        self._give_up_waiting()
        found, self._gone = self._gone, []
        waiting = {hand.heard: index for index, hand in self._hands.items()}
        if not waiting:
            time.sleep(0.0 if found else timeout)
            return found
        first, rest = self._ray.wait(list(waiting), num_returns=1, timeout=0 if found else timeout)
        more, _ = self._ray.wait(rest, num_returns=len(rest), timeout=0) if rest and first else ([], [])
        for ref in (*first, *more):
            slot = self._slots[waiting[ref]]
            found += [(slot, message) for message in self._hear(slot, ref)]
        return found

    def _hear(self, slot: Slot, ref: Any) -> list[Message]:
        try:
            heard: list[Message] = self._ray.get(ref)
        except self._ray.exceptions.RayError as error:
            self._drop(slot)
            return [describe_loss(error)]
        if heard and heard[-1]["type"] == "exit":
            self._drop(slot)
        else:
            hand = self._hands[slot.index]
            hand.placed = hand.placed or bool(heard)
            hand.heard = hand.actor.poll.remote(POLL_S)
        return heard

    def _give_up_waiting(self) -> None:
        """Give up an actor that can be placed nowhere: Ray learns late that a node has left."""
        now = time.monotonic()
        if now - self._looked < ROOM_S:
            return
        self._looked = now
        for slot in self._slots:
            hand = self._hands.get(slot.index)
            if hand is not None and not hand.placed and len(self._hands) > self._room(slot):
                self._drop(slot)
                self._gone.append((slot, _exit(NO_ROOM)))

    def kill(self, slot: Slot) -> None:
        """End the worker and every process it started, then its actor."""
        hand = self._hands.get(slot.index)
        if hand is not None:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.get(hand.actor.end.remote(), timeout=END_S)
            self._drop(slot)

    def _drop(self, slot: Slot) -> None:
        hand = self._hands.pop(slot.index)
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.kill(hand.actor, no_restart=True)
        if hand.place is not None:
            self._ray.util.remove_placement_group(hand.place)

    def close(self) -> None:
        """End all actors, and leave the cluster; one that was started here ends."""
        ending = [hand.actor.end.remote() for hand in self._hands.values()]
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.wait(ending, num_returns=len(ending), timeout=END_S) if ending else None
        for slot in self._slots:
            if slot.index in self._hands:
                self._drop(slot)
        self._ray.shutdown()

    # -- the cluster ------------------------------------------------------------------------------------------

    def _nodes(self) -> list[Node]:
        free = self._ray._private.state.available_resources_per_node()
        found = []
        for node in self._ray.nodes():
            if node["Alive"]:
                has, left = node["Resources"], free.get(node["NodeID"], {})
                found.append(
                    Node(
                        node["NodeManagerHostname"], has.get("CPU", 0.0), has.get("GPU", 0.0),
                        left.get("CPU", 0.0), left.get("GPU", 0.0),
                    )
                )  # fmt: skip
        return found

    def _room(self, slot: Slot) -> int:
        """Slots like this one that fit on the nodes alive now, whoever uses them."""
        threads = None if slot.devices and not self._settings.get("threads") else slot.threads
        per_trial, per_gpu, on_gpus = len(slot.devices) or 1, round(1 / slot.share), bool(slot.devices)
        return sum(capacity(node, per_trial, per_gpu, on_gpus, threads, free=False) for node in self._nodes())

    def _check_nodes(self) -> None:
        """EngineError names every node with another Python, other packages or other code, or without the folder."""
        self._logs.mkdir(parents=True, exist_ok=True)
        mark = self._logs / f".here-{secrets.token_hex(4)}"
        mark.touch()
        strategies = self._ray.util.scheduling_strategies
        answers = {}
        try:
            for node in self._ray.nodes():
                if node["Alive"]:
                    strategy = strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                    ask = self._ray.remote(look_around).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
                    answers[ask.remote(str(mark.resolve()))] = node["NodeManagerHostname"]
            problems = [line for ref, name in answers.items() for line in self._problems(ref, name)]
        finally:
            mark.unlink(missing_ok=True)
        if problems:
            listed = "\n".join(f"  - {line}" for line in dict.fromkeys(problems))
            raise EngineError(
                f"Not every node of the Ray cluster can work on this sweep:\n{listed}\nNothing was started."
            )

    def _problems(self, ref: Any, name: str) -> list[str]:
        try:
            theirs, sees_folder = self._ray.get(ref, timeout=NODE_S)
        except self._ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[-1]
            return [f"{name}: cannot run this code ({reason}). Install the same reasonrl there, or share its folder."]
        found = [f"{name}: {line}" for line in differences(theirs, node_about())]
        if not sees_folder:
            found.append(f"{name}: does not see {self._logs.parent.resolve()}; put results=FOLDER on a shared folder.")
        return found


def node_about() -> dict[str, str]:
    """What has to be the same on every node."""
    from reasonrl import config

    return {**versions(), "code": str(getattr(config, "code_version", lambda: "")())}


def look_around(mark: str) -> tuple[dict[str, str], bool]:
    """Runs on a node: its versions, and whether it sees the results folder."""
    deadline = time.monotonic() + 5.0
    while not os.path.exists(mark) and time.monotonic() < deadline:
        time.sleep(0.2)
    return node_about(), os.path.exists(mark)


def describe_loss(error: Exception) -> Message:
    """The exit message for an actor that went away with its node, was killed, or could not be made."""
    text = " ".join(str(error).split())
    oom = "OutOfMemory" in type(error).__name__ or "running low on memory" in text
    lost = "its node went away" if "node has died" in text or "node was terminated" in text else "its actor went away"
    return _exit(f"{lost} ({type(error).__name__})", oom)


def _exit(lost: str, oom: bool = False) -> Message:
    return {"type": "exit", "code": None, "signal": None, "oom": oom, "lost": lost}


def _import_ray() -> Any:
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import ray
            import ray.util.scheduling_strategies
    except ImportError as error:
        raise EngineError(f"engine.kind=ray needs the package ray ({error}): pip install 'reasonrl[ray]'.") from error
    # Ray writes what happens to workers and nodes to stdout past all its settings; here it arrives as an exception.
    with contextlib.suppress(AttributeError):
        ray._private.worker.print_to_stdstream = lambda *_, **__: None
    return ray


def _init(ray: Any, address: str | None) -> None:
    """Join the cluster at `address`, or start one on this machine; EngineError when it cannot be reached."""
    where = f"engine.address={address}"
    if address and ":" in address and "://" not in address:
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), CONNECT_S).close()
        except (OSError, ValueError) as error:
            raise EngineError(
                f"{where}: no Ray cluster answers there ({error}). Nothing was started. It is the address that"
                " `ray start --head` printed, or auto on a machine of the cluster."
            ) from error
    try:
        with _own_signals(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            more: dict[str, Any] = {} if address else {"include_dashboard": False}
            ray.init(
                address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=True,
                namespace="reasonrl", **more,
            )  # fmt: skip
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        cure = (
            "Start it with `ray start --head`, with the same Python and ray on every machine. If it said then that"
            " token authentication is enabled, set RAY_AUTH_MODE=token here too."
        )
        raise EngineError(
            f"{where if address else 'engine.kind=ray'}: {first.rstrip('.')}. Nothing was started. {cure}"
        ) from error


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Keep this process's signal handlers; Ray puts its own in their place."""
    before = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.getsignal(number)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # not in the main thread
            for number, handler in before.items():
                signal.signal(number, handler)

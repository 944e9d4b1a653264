"""Worker processes of this machine: one long-lived process per slot, spoken to over a private socket pair."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reasonrl.errors import EngineError
from sweeps.engines.base import Layout, Message, Slot, choose_devices, lay_out

SEND_TIMEOUT_S = 20.0  # a worker that does not even read its socket for so long is lost


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    socket: socket.socket
    oom_kills: int
    buffer: bytearray = field(default_factory=bytearray)
    open: bool = True


class LocalEngine:
    """One warm worker process per slot; see `sweeps.engines.base.Engine` for the verbs.

    A worker sits in a session of its own (Ctrl-C reaches the coordinator only), dies with its coordinator, and
    takes every process it started with it.
    """

    def __init__(self, settings: Mapping[str, Any], logs: Path, layout: Layout | None = None) -> None:
        layout = layout or _lay_out_here(settings)
        self._slots, self.notes = layout.slots, layout.notes
        self._train = str(settings.get("train") or "reasonrl.train:train")
        file = settings.get("accelerate_config")
        self._accelerate = str(Path(file).expanduser().resolve()) if file else ""
        self._logs = logs
        self._workers: dict[int, _Worker] = {}
        self._selector = selectors.DefaultSelector()

    def slots(self) -> Sequence[Slot]:
        """All slots, in order."""
        return self._slots

    def start(self, slot: Slot) -> None:
        """Start the slot's worker; it imports torch by itself, so all of them load at the same time."""
        self.kill(slot)
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "sweeps.engines.worker", "--fd", str(theirs.fileno())]
        command += ["--train", self._train, "--threads", str(slot.threads), "--share", str(slot.share)]
        command += ["--gpus", str(len(slot.devices)), "--coordinator", str(os.getpid())]
        command += ["--accelerate", self._accelerate] if self._accelerate else []
        self._logs.mkdir(parents=True, exist_ok=True)
        with (self._logs / f"slot-{slot.index}.log").open("ab") as log:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(theirs.fileno(),),
                    env={**os.environ, **slot.environment(), "PYTHONPATH": _python_path()},
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise EngineError(f"The worker of slot {slot.label} could not be started: {error}.") from error
            finally:
                theirs.close()
        ours.setblocking(False)
        self._workers[slot.index] = _Worker(process, ours, _oom_kills())
        self._selector.register(ours, selectors.EVENT_READ, slot)

    def send(self, slot: Slot, message: Message) -> None:
        """Hand one message to the worker."""
        worker = self._workers.get(slot.index)
        if worker is None or not worker.open:
            raise EngineError(f"Slot {slot.label} has no worker.")
        try:
            worker.socket.settimeout(SEND_TIMEOUT_S)
            worker.socket.sendall(json.dumps(message, separators=(",", ":")).encode() + b"\n")
            worker.socket.setblocking(False)
        except OSError as error:
            raise EngineError(f"The worker of slot {slot.label} does not answer: {error}.") from error

    def poll(self, timeout: float) -> list[tuple[Slot, Message]]:
        """Messages that arrived; the exit of a worker comes after everything it had sent."""
        found: list[tuple[Slot, Message]] = []
        if not self._workers:
            time.sleep(timeout)
            return found
        for key, _ in self._selector.select(timeout):
            slot: Slot = key.data
            found += [(slot, message) for message in self._receive(slot)]
        for slot in self._slots:
            worker = self._workers.get(slot.index)
            # A process the worker started may hold its socket open, so that no end of file ever comes.
            if worker is not None and (not worker.open or worker.process.poll() is not None):
                found += [(slot, message) for message in self._receive(slot)]
                found.append((slot, self._reap(slot)))
        return found

    def kill(self, slot: Slot) -> None:
        """End the worker's whole process group."""
        if slot.index in self._workers:
            self._reap(slot)

    def close(self) -> None:
        """Ask idle workers to leave, then end all of them."""
        for worker in self._workers.values():
            with contextlib.suppress(OSError):
                worker.socket.sendall(b'{"type":"quit"}\n')
        deadline = time.monotonic() + 2.0
        for worker in self._workers.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline - time.monotonic()))
        for slot in self._slots:
            self.kill(slot)
        self._selector.close()

    def pid(self, slot: Slot) -> int | None:
        """The process id of the slot's worker."""
        worker = self._workers.get(slot.index)
        return worker.process.pid if worker else None

    def _receive(self, slot: Slot) -> list[Message]:
        """Everything that can be read now, as whole messages."""
        worker = self._workers[slot.index]
        while worker.open:
            try:
                data = worker.socket.recv(1 << 18)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                data = b""
            if not data:
                worker.open = False
            worker.buffer += data
        *lines, rest = bytes(worker.buffer).split(b"\n")
        worker.buffer = bytearray(rest)
        return [json.loads(line) for line in lines if line]

    def _reap(self, slot: Slot) -> Message:
        """End the worker's process group, collect its exit code and forget it."""
        worker = self._workers.pop(slot.index)
        self._selector.unregister(worker.socket)
        if not worker.open:
            # It closed its end and is about to exit: its own exit code says more than our SIGKILL.
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(2.0)
        own = worker.process.poll()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.process.pid, signal.SIGKILL)
        code = worker.process.wait()
        worker.socket.close()
        killed_by = -code if code < 0 else None
        oom = own == -signal.SIGKILL and _oom_kills() > worker.oom_kills
        return {"type": "exit", "code": code, "signal": killed_by, "oom": oom}


def _lay_out_here(settings: Mapping[str, Any]) -> Layout:
    asked = settings.get("devices")
    fake = asked is not None and all(str(name).startswith("fake:") for name in asked)
    fenced = "CUDA_VISIBLE_DEVICES" in os.environ
    detected = [] if fake or (fenced and asked is None) else detect_gpus()
    return lay_out(settings, choose_devices(asked, os.environ, _both_names(detected, asked)))


def detect_gpus() -> list[tuple[str, str]]:
    """(index, UUID) of the NVIDIA GPUs of this machine, asked of nvidia-smi; empty without one."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=index,uuid", "--format=csv,noheader"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [tuple(part.strip() for part in line.split(",")) for line in text.splitlines() if "," in line]
    return [(row[0], row[1]) for row in rows]


def _both_names(detected: Sequence[tuple[str, str]], asked: Sequence[Any] | None) -> list[str]:
    """Indices, and UUIDs too when one is asked for by UUID."""
    by_uuid = any(str(name).startswith("GPU-") for name in asked or ())
    indices = [index for index, _ in detected]
    return indices + [uuid for _, uuid in detected] if by_uuid else indices


def _python_path() -> str:
    """The folders this process imports from, so that a worker finds the same code from anywhere."""
    root = str(Path(__file__).resolve().parents[2])
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != root]
    return os.pathsep.join([root, *others])


def _oom_kills() -> int:
    """How often the kernel killed a process of this control group (or machine) for memory."""
    for path in ("/sys/fs/cgroup/memory.events", "/proc/vmstat"):
        try:
            with open(path) as file:
                for line in file:
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
        except (OSError, ValueError):
            continue
    return 0

"""The worker process of a slot: loads torch once, then trains one run after another for its coordinator.

Started as `python -m sweeps.engines.worker --fd N --train module:function`. Messages are JSON lines on a private
socket; what a run prints goes to its `worker.log`. Nothing here opens the study or the ledger.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sweeps.failures import describe_exception

Message = dict[str, Any]
Decision = str | None

# Events that carry bulk nobody in the coordinator reads.
NOT_FORWARDED = frozenset({"samples"})
PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve the coordinator until it says quit or is gone."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--train", required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--accelerate", default="")
    parser.add_argument("--coordinator", type=int, required=True)
    args = parser.parse_args()
    die_with(args.coordinator)
    guard_group()
    link = Link(socket.socket(fileno=args.fd))
    began = time.monotonic()
    try:
        train = load_function(args.train)
        if args.gpus <= 1:
            prepare_torch(train, args.threads, args.share, args.gpus)
    except BaseException as error:  # whatever keeps a worker from starting has to be told
        link.tell({"type": "broken", **describe_exception(error)})
        raise SystemExit(1) from None
    link.tell({"type": "ready", "pid": os.getpid(), "seconds": round(time.monotonic() - began, 3)})
    while (message := link.next()) is not None and message["type"] != "quit":
        if message["type"] == "run":
            link.tell(run_one(link, train, message, args))


def die_with(coordinator: int) -> None:
    """Ask the kernel to kill this process when its coordinator dies (Linux; elsewhere the socket's end tells)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != coordinator:  # it died before the kernel was asked
        os._exit(1)


def guard_group() -> None:
    """Fork a tiny process that ends the whole group when this one dies, so that no child is left behind.

    The worker itself may die by SIGKILL and cannot clean up; its children (a tracking service, ranks of a run
    on several GPUs) would live on.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None, use_errno=True)
        worker = os.getpid()
        if os.fork():
            return
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        os.closerange(3, 256)
        if os.getppid() == worker:
            signal.sigwait({signal.SIGTERM})
        os.killpg(os.getpgrp(), signal.SIGKILL)
        os._exit(0)


def load_function(path: str) -> Callable[..., Any]:
    """The function named `module:function`."""
    module, _, name = path.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def prepare_torch(train: Callable[..., Any], threads: int, share: float, gpus: int) -> None:
    """Import torch now, while the coordinator still sets up; functions marked `no_torch` do without."""
    if getattr(train, "no_torch", False):
        return
    import torch

    torch.set_num_threads(threads)
    if gpus and share < 1.0 and torch.cuda.is_available():
        for device in range(torch.cuda.device_count()):
            torch.cuda.set_per_process_memory_fraction(share, device)


class Link:
    """The socket to the coordinator: sends messages, and collects commands in a thread of its own."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._commands: list[Message] = []
        self._until: float | None = None
        threading.Thread(target=self._read, daemon=True).start()

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send one message; a coordinator that is gone ends this process."""
        self._send(json.dumps(message, separators=(",", ":"), default=str))

    def tell_event(self, key: str, event: Mapping[str, Any]) -> None:
        """Send one event as it stands in the log (non-finite floats spelled as strings)."""
        from reasonrl.events import encode_line

        self._send(f'{{"type":"event","key":"{key}","event":{encode_line(event).rstrip()}}}')

    def _send(self, line: str) -> None:
        try:
            with self._lock:
                self._socket.sendall(line.encode() + b"\n")
        except OSError:
            self._leave()

    def next(self) -> Message | None:
        """The next job; waits for it."""
        return self._inbox.get()

    def command(self, key: str) -> Message | None:
        """A command ("stop", "pause") for the run `key` that arrived meanwhile, else None."""
        while self._commands:
            command = self._commands.pop(0)
            if command.get("key") == key:
                return command
        return None

    def put_back(self, command: Message) -> None:
        """Keep a command for later."""
        self._commands.insert(0, command)

    def forward(self, line: str) -> None:
        """Send a message that is a line of JSON already."""
        self._send(line)

    def _read(self) -> None:
        with contextlib.suppress(OSError), self._socket.makefile("rb") as lines:
            for line in lines:
                message = json.loads(line)
                if message["type"] in ("stop", "pause"):
                    self._commands.append(message)
                elif message["type"] == "lease":
                    self._extend(message["seconds"])
                else:
                    self._extend(message.get("lease_s"))
                    self._inbox.put(message)
                if message["type"] == "quit":
                    return
        self._leave()

    def _extend(self, seconds: float | None) -> None:
        """Go on for `seconds` without hearing of the coordinator; None: for as long as it is there."""
        if seconds is None:
            return
        watch, self._until = self._until is None, time.monotonic() + seconds
        if watch:
            threading.Thread(target=self._watch_lease, daemon=True).start()

    def _watch_lease(self) -> None:
        while self._until is not None and (left := self._until - time.monotonic()) > 0:
            time.sleep(min(left, 1.0))
        self._leave()

    @staticmethod
    def _leave() -> None:
        """The coordinator is gone: end this process and everything it started."""
        with contextlib.suppress(OSError):
            os.killpg(os.getpgrp(), signal.SIGKILL)
        os._exit(1)


class Reporter:
    """The `on_event` of one run: forwards events and answers with the decision that is due."""

    def __init__(self, link: Link, job: Message, log: Path) -> None:
        self._link, self._job, self._log = link, job, log
        self._decision: Decision = None

    def __call__(self, event: Mapping[str, Any]) -> Decision:
        kind = event.get("type")
        if kind not in NOT_FORWARDED:
            self._link.tell_event(self._job["key"], event)
        if kind == "end":
            return None
        self._decide(event)
        return self._decision

    def _decide(self, event: Mapping[str, Any]) -> None:
        """Once a decision stands it is repeated until the trainer acts on it; a stop outranks a pause."""
        command = self._link.command(self._job["key"])
        if event.get("type") == "alert" and event.get("severity") == "stop" and self._job["on_alert"] != "continue":
            self._decision = "stop"
        elif command is not None and self._decision != "stop":
            if command["type"] == "stop":
                self._record(event, "stop", command.get("reason"))
            self._decision = command["type"]
        elif self._decision is None and _reached(event, self._job.get("pause_at")):
            self._decision = "pause"

    def _record(self, event: Mapping[str, Any], action: str, reason: Any) -> None:
        """Write the coordinator's reason into the event log, which is the truth of the run."""
        from reasonrl.events import EventLog

        log = EventLog(self._log)
        now, step = time.time(), event.get("step")
        log.append({"type": "decision", "time": now, "step": step, "action": action, "reason": reason})
        log.close()


def _reached(event: Mapping[str, Any], step: int | None) -> bool:
    at = event.get("step")
    return step is not None and event.get("type") != "start" and isinstance(at, int) and at >= step


def run_one(link: Link, train: Callable[..., Any], job: Message, args: argparse.Namespace) -> Message:
    """Train one run here, or on several processes, and say how it ended: a message "done" or "failed"."""
    run_dir = Path(job["run_dir"])
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        redirect_output(run_dir / "worker.log")
        if args.gpus > 1:
            from sweeps.engines.ranks import launch

            return launch(link, args.train, job, run_dir, args.gpus, args.threads, args.accelerate)
    except OSError as error:  # a full disk, most likely
        return {"type": "failed", "key": job["key"], **describe_exception(error)}
    return {**train_one(link, train, job), **memory_left()}


def train_one(link: Link | None, train: Callable[..., Any], job: Message) -> Message:
    """Train one run in this process; without a link (a rank that is not the first) nothing is reported."""
    key, run_dir = job["key"], Path(job["run_dir"])
    report = Reporter(link, job, run_dir / "events.jsonl") if link is not None else _silent
    try:
        train(make_config(train, job["config"]), run_dir, report)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit from user code must not end a warm worker silently
        answer = {"type": "failed", "key": key, **describe_exception(error)}
        with contextlib.suppress(OSError):  # a full disk must not keep the answer back
            sys.stderr.write(answer.get("traceback") or answer["message"])
            sys.stderr.flush()
        return answer
    return {"type": "done", "key": key}


def _silent(event: Mapping[str, Any]) -> Decision:
    return None


def make_config(train: Callable[..., Any], config: dict[str, Any]) -> Any:
    """The config object `train` expects: the dataclass tree, or the plain dict for functions marked `takes_dict`."""
    if getattr(train, "takes_dict", False):
        return config
    from reasonrl.config import from_dict

    return from_dict(config)


def redirect_output(path: Path) -> None:
    """Send everything this process and its children print to `path`."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def memory_left() -> dict[str, float]:
    """What this process still holds after a run, in MB: resident memory, and GPU memory where torch is loaded."""
    gc.collect()
    left: dict[str, float] = {}
    with contextlib.suppress(OSError, ValueError), open("/proc/self/statm") as file:
        left["rss_mb"] = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        left["gpu_mb"] = torch.cuda.memory_allocated() / 2**20
    return left


if __name__ == "__main__":
    main()

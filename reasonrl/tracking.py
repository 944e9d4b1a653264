"""Show a run in Weights & Biases without ever depending on it.

The event log is the truth; a helper process of its own (`tracking_process.py`) follows that file and repeats it to
W&B. The trainer only starts the helper and looks whether it lives, so an unreachable server, a killed service or
an exception in the library costs the run nothing and loses nothing: the helper is started again from the file,
and `python -m reasonrl.tracking RUN_DIR` rebuilds the W&B run of any recorded run.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import netrc
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from reasonrl.events import Event

if TYPE_CHECKING:
    from reasonrl.config import Config

MAX_RESTARTS = 3
FLUSH_S = 15.0  # how long a finished process waits for the helper to write what is left
SUMMARY_S = 60.0


@dataclass
class TrackingConfig:
    """Where runs are shown besides the results folder."""

    kind: str = "none"  # none, wandb
    mode: str = "online"  # online, offline, disabled; online without a login becomes offline
    project: str | None = None  # null = reasonrl
    entity: str | None = None  # user or team; null = W&B's default
    tags: list[str] = field(default_factory=list)
    group: str | None = None  # null = the sweep the run belongs to
    job_type: str | None = None  # null = the run's arm


class Tracker:
    """What the trainer talks to; this one does nothing (kind=none)."""

    def log(self, event: Event) -> None:
        """Take notice of one event that has been written to the event log."""

    def start(self, event: Event) -> None:
        """Take notice of the start event."""
        self.log(event)

    def alert(self, event: Event) -> None:
        """Take notice of an alert event."""
        self.log(event)

    def finish(self, status: str = "finished") -> None:
        """Take notice that the run has ended, however it did; returns at once."""


class WandbTracker(Tracker):
    """Keeps the helper process following one run's event log."""

    def __init__(self, config: TrackingConfig, run_dir: Path) -> None:
        self.order = {"op": "follow", "run_dir": str(Path(run_dir).resolve()), "tracking": _effective(config)}
        self._ordered = False

    def log(self, event: Event) -> None:
        """Start the helper with the run's first event, and again if it died; never raises, never waits."""
        helper = _helper()
        if not self._ordered:
            self._ordered = True
            helper.order(self.order)
        helper.tick()

    def finish(self, status: str = "finished") -> None:
        """Tell the helper that nothing more comes; it writes the rest by itself."""
        _helper().order({"op": "close", "run_dir": self.order["run_dir"]})


class _Helper:
    """The helper process of this process, shared by all its runs one after the other."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: list[dict[str, Any]] = []  # not yet known to be done
        self._restarts = 0
        self._reason = "its process died"
        self._inbox = b""

    def order(self, order: dict[str, Any]) -> None:
        """Pass one order on, starting the process if need be."""
        if order["op"] != "close":
            self._orders = [*self._orders, order]
        if self._process is not None and self._process.poll() is None:
            self._send(order)
        else:
            self.tick()

    def tick(self) -> None:
        """Read what the process has to say; start it (again) when it should live and does not."""
        self._listen()
        if not self._orders or (self._process is not None and self._process.poll() is None):
            return
        if self._process is not None:
            self._restarts += 1
        if self._restarts > MAX_RESTARTS:
            _say(
                f"W&B was given up ({self._reason}); the event log has everything: python -m reasonrl.tracking RUN_DIR."
            )
            self._orders = []
            return
        self._start()

    def _start(self) -> None:
        self._close_pipes()
        command = [sys.executable, "-m", "reasonrl.tracking_process", str(os.getpid())]
        environment = {**os.environ, "PYTHONPATH": _python_path(), "WANDB_SILENT": "true"}
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # Ctrl-C and the end of a worker's group leave it time to write
            )
        except OSError as error:
            self._restarts = MAX_RESTARTS + 1
            _say(f"W&B could not be started ({error}); the event log has everything.")
            return
        assert self._process.stdin is not None and self._process.stdout is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        os.set_blocking(self._process.stdout.fileno(), False)
        for order in self._orders:
            self._send(order)

    def _send(self, order: Mapping[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(OSError):  # dead or stuck: the next tick sees to it
            os.write(self._process.stdin.fileno(), json.dumps(order, default=str).encode() + b"\n")

    def _listen(self) -> None:
        if self._process is None or self._process.stdout is None:
            return
        with contextlib.suppress(OSError):
            while data := os.read(self._process.stdout.fileno(), 65536):
                self._inbox += data
        *lines, self._inbox = self._inbox.split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):
                message = json.loads(line)
                if "note" in message:
                    _say(message["note"])
                self._reason = message.get("failed", self._reason)
                if "done" in message:
                    self._orders = [order for order in self._orders if order.get("run_dir") != message["done"]]

    def close(self, timeout_s: float) -> bool:
        """Let the process finish and wait for it, at most `timeout_s`; it ends by itself in any case."""
        if self._process is None:
            return True
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.tick()
            with contextlib.suppress(OSError):
                if self._process.stdin is not None:
                    self._process.stdin.close()
            if self._process.poll() is not None and not self._orders:
                break
            time.sleep(0.05)
        self._listen()
        ended = self._process.poll() is not None
        self._close_pipes()
        if not ended:
            self._process.returncode = 0  # it goes on by itself, and nobody will wait for it
        self._process, self._orders = None, []
        return ended

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout) if self._process is not None else ():
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


_HELPERS: dict[int, _Helper] = {}
_SAID: set[str] = set()


def _helper() -> _Helper:
    """Return the helper of this very process (a fork does not share its parent's)."""
    pid = os.getpid()
    if pid not in _HELPERS:
        _HELPERS.clear()
        _HELPERS[pid] = _Helper()
    return _HELPERS[pid]


@atexit.register
def flush(timeout_s: float = FLUSH_S) -> None:
    """Wait until the helper has written everything, at most `timeout_s`; called when the process ends."""
    helper = _HELPERS.pop(os.getpid(), None)
    if helper is not None and not helper.close(timeout_s):
        _say(f"W&B is still sending after {timeout_s:.0f} s and goes on by itself.")


def _say(note: str) -> None:
    """Print a note once per process."""
    if note not in _SAID:
        _SAID.add(note)
        print(note, file=sys.stderr, flush=True)


def _python_path() -> str:
    root = str(Path(__file__).resolve().parent.parent)
    return os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])


def logged_in() -> bool:
    """Whether a W&B key is known (environment or netrc), found out without importing wandb."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
    named = os.environ.get("NETRC")
    for path in [Path(named)] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]:
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            found = netrc.netrc(str(path)).authenticators(host)
            if found and found[2]:
                return True
    return False


def resolve_mode(config: TrackingConfig) -> tuple[str, str | None]:
    """Return (mode really used, note for the user or None); WANDB_MODE can lower online, never raise offline."""
    asked = os.environ.get("WANDB_MODE", "").lower()
    mode = asked if config.mode == "online" and asked in ("offline", "disabled") else config.mode
    if config.kind == "wandb" and mode == "online" and not logged_in():
        note = (
            "W&B: not logged in, so runs are recorded offline (wandb login; then wandb sync RUN_DIR/wandb/offline-*)."
        )
        return "offline", note
    return mode, None


def _effective(config: TrackingConfig) -> dict[str, Any]:
    mode, note = resolve_mode(config)
    if note:
        _say(note)
    return {**asdict(config), "mode": mode}


def make_tracker(config: Config, run_dir: Path) -> Tracker:
    """Return the tracker of `config.tracking` for the run recorded in `run_dir`."""
    mode, _ = resolve_mode(config.tracking)
    if config.tracking.kind != "wandb" or mode == "disabled":
        return Tracker()
    return WandbTracker(config.tracking, run_dir)


def sweep_summary(plan: Any, rows: Iterable[Mapping[str, Any]], tracking: Mapping[str, Any] | None = None) -> None:
    """Record a run of job type "summary" in the sweep's group, with one Table row per trial.

    `plan` is the sweep's plan (its name, question, arms, baseline, seeds and directory are used), `rows` are the trials
    (columns are the union of their keys), `tracking` the section of their configs (null = that of the plan's first
    run). Waits at most SUMMARY_S seconds; a failure is said, never raised.
    """
    section = tracking or next((run.config.get("tracking") for run in plan.runs), None) or {}
    config = TrackingConfig(**{name: section[name] for name in TrackingConfig.__dataclass_fields__ if name in section})
    mode, _ = resolve_mode(config)
    if config.kind != "wandb" or mode == "disabled":
        return
    about = {name: getattr(plan, name, None) for name in ("name", "question", "arms", "baseline", "seeds", "command")}
    _helper().order(
        {
            "op": "summary",
            "run_dir": str(Path(plan.directory).resolve()),
            "tracking": {**asdict(config), "mode": mode},
            "sweep": plan.name,
            "rows": [dict(row) for row in rows],
            "about": about,
        }
    )
    flush(SUMMARY_S)


def main(folders: list[str]) -> int:
    """Rebuild the W&B runs of recorded runs from their event logs."""
    if not folders or folders[0].startswith("-"):
        print("usage: python -m reasonrl.tracking RUN_DIR...   (send recorded runs to W&B again)")
        return 2
    for folder in folders:
        path = Path(folder) / "events.jsonl"
        if not path.is_file():
            print(f"{path} does not exist; give the folder of a run, such as results/NAME/runs/KEY.")
            return 2
    for folder in folders:
        with contextlib.suppress(OSError):
            (Path(folder) / "wandb" / "position.json").unlink()
        WandbTracker(_recorded(Path(folder)), Path(folder)).log({})
    flush(SUMMARY_S * len(folders))
    return 0


def _recorded(folder: Path) -> TrackingConfig:
    """Return the tracking section a recorded run started with, switched to W&B."""
    from reasonrl.events import read_events

    start = next((event for event in read_events(folder / "events.jsonl") if event["type"] == "start"), {})
    section = start.get("config", {}).get("tracking", {})
    known = {name: section[name] for name in TrackingConfig.__dataclass_fields__ if name in section}
    return TrackingConfig(**{**known, "kind": "wandb"})


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

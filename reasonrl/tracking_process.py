"""The helper process that repeats event logs to W&B: one run after the other, in the order they were asked for.

It reads orders (one JSON per line) from its standard input and ends when that closes, when its parent is gone, or
when W&B keeps it waiting for too long. Everything the library prints goes to RUN_DIR/wandb/tracker.log.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

POLL_S = 0.25
STUCK_S = 180.0  # one call to W&B that takes longer means that its service is gone
CLOSING_S = 60.0  # the same once nobody waits for us any more
LEVELS = {"note": "INFO", "flag": "WARN", "stop": "ERROR"}
PROJECT = "reasonrl"
REPLY = -1  # file descriptor of the parent's ear; set when this module runs as a process


class Orders:
    """Orders from the parent, read in a thread; knows when the parent is gone."""

    def __init__(self, parent: int) -> None:
        self.parent = parent
        self.closed: set[str] = set()
        self.ended = False
        self._waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin.buffer:
            with contextlib.suppress(ValueError):
                order = json.loads(line)
                if order["op"] == "close":
                    self.closed.add(order["run_dir"])
                else:
                    self.closed.discard(order["run_dir"])
                    self._waiting.put(order)
        self.ended = True

    @property
    def over(self) -> bool:
        """Whether no further order or event can come."""
        return self.ended or os.getppid() != self.parent

    def next(self) -> dict[str, Any] | None:
        """Return the next order, or None when there will be none."""
        while True:
            with contextlib.suppress(queue.Empty):
                return self._waiting.get(timeout=POLL_S)
            if self.over and self._waiting.empty():
                return None


class Watchdog:
    """Ends this process and W&B's service when one call takes too long: nobody may be kept waiting."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._since: float | None = None
        threading.Thread(target=self._watch, daemon=True).start()

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Time what runs inside."""
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._since = None

    def _watch(self) -> None:
        while True:
            time.sleep(1.0)
            since = self._since
            limit = CLOSING_S if self._orders.over else STUCK_S
            if since is not None and time.monotonic() - since > limit:
                os.killpg(os.getpgrp(), signal.SIGKILL)


def tell(message: Mapping[str, Any]) -> None:
    """Send one message to the parent, if it still listens."""
    with contextlib.suppress(OSError):
        os.write(REPLY, json.dumps(message).encode() + b"\n")


class Follower:
    """Reads whole new lines of an event log, from where the last helper stopped in good order."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "events.jsonl"
        self.mark = run_dir / "wandb" / "position.json"
        self.offset = self._saved()

    def _saved(self) -> int:
        """A helper that was killed may have lost rows in flight: then everything is sent again."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            mark = json.loads(self.mark.read_text())
            if mark["sound"] and mark["bytes"] <= self.path.stat().st_size:
                return int(mark["bytes"])
        return 0

    def save(self, sound: bool) -> None:
        """Record how far W&B has the log."""
        temporary = self.mark.with_suffix(".tmp")
        temporary.write_text(json.dumps({"bytes": self.offset, "sound": sound}))
        temporary.replace(self.mark)

    def read(self) -> list[dict[str, Any]]:
        """Return the events that were added since the last call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self.offset += len(whole)
        events = []
        for line in whole.splitlines():
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict) and "type" in event:
                    events.append(event)
        return events

    def first(self) -> dict[str, Any]:
        """Return the first start event of the log (a continued log is not read from its beginning)."""
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            for line in file:
                with contextlib.suppress(ValueError):
                    event = json.loads(line)
                    if isinstance(event, dict) and event.get("type") == "start":
                        return event
        return {}


def settings(wandb: Any) -> Any:
    """Settings that keep W&B quiet and let it only see what we send."""
    return wandb.Settings(
        silent=True, quiet=True, console="off", disable_git=True, save_code=False, show_errors=False,
        show_warnings=False, show_info=False, init_timeout=60, x_save_requirements=False,
    )  # fmt: skip


def open_run(tracking: Mapping[str, Any], watchdog: Watchdog, **fields: Any) -> Any:
    """Open a W&B run; a server that does not answer makes it an offline run, and the parent is told."""
    import wandb

    common = {"project": tracking["project"] or PROJECT, "entity": tracking["entity"], **fields}
    with watchdog.call():
        try:
            return wandb.init(mode=tracking["mode"], settings=settings(wandb), **common)
        except Exception as error:
            if tracking["mode"] != "online":
                raise
            reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
            tell({"note": f"W&B could not be reached ({reason}); this run is recorded offline."})
            return wandb.init(mode="offline", settings=settings(wandb), **common)


def place_in_sweep(run_dir: Path, key: str) -> tuple[str | None, dict[str, Any]]:
    """Return (sweep, this run's entry in its plan) for a run inside results/SWEEP/runs/KEY."""
    if run_dir.parent.name != "runs":
        return None, {}
    sweep = run_dir.parent.parent
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
        for run in json.loads((sweep / "plan.json").read_text()).get("runs", []):
            if run.get("key") == key:
                return sweep.name, run
    return sweep.name, {}


def follow(order: Mapping[str, Any], orders: Orders, watchdog: Watchdog) -> None:
    """Repeat one event log to W&B until its end, or until nothing more can come."""
    run_dir, tracking = Path(order["run_dir"]), order["tracking"]
    (run_dir / "wandb").mkdir(parents=True, exist_ok=True)
    quieten(run_dir / "wandb" / "tracker.log")
    follower = Follower(run_dir)
    start = follower.first()
    while not start and not (orders.over or order["run_dir"] in orders.closed):
        time.sleep(POLL_S)
        start = follower.first()
    if not start:
        return
    key = str(start.get("key") or run_dir.name)
    sweep, planned = place_in_sweep(run_dir, key)
    arm = start.get("arm") or planned.get("arm")
    run = open_run(
        tracking,
        watchdog,
        id=key,
        resume="allow" if tracking["mode"] == "online" else None,
        dir=str(run_dir),
        name=planned.get("name") or start.get("name") or key,
        group=tracking["group"] or sweep,
        job_type=tracking["job_type"] or arm or "train",
        tags=list(tracking["tags"]),
        config={**start.get("config", {}), "run_key": key, "arm": arm},
    )
    run.define_metric("step", hidden=True)
    run.define_metric("*", step_metric="step")
    follower.save(sound=False)
    status = None
    while status is None:
        last_look = orders.over or order["run_dir"] in orders.closed
        for event in follower.read():
            with watchdog.call():
                repeat(run, event)
            if event["type"] in ("start", "end"):  # a run that was paused goes on behind its end
                status = event.get("status", "failed") if event["type"] == "end" else None
        if status is None and last_look:
            break
        if status is None:
            time.sleep(POLL_S)
    with watchdog.call():
        run.finish(exit_code=0 if status in ("finished", "stopped", "paused") else 1)
    follower.save(sound=True)


def repeat(run: Any, event: Mapping[str, Any]) -> None:
    """Say one event in W&B's terms; kinds it has no word for are left to the event log."""
    kind = event["type"]
    if kind in ("step", "eval"):
        run.log({"step": event["step"], **numbers(event.get("metrics", {}))})
    elif kind == "alert":
        if event.get("severity") != "note":
            run.alert(
                title=f"{event['code']} {event['title']}", text=alert_text(event), level=LEVELS[event["severity"]]
            )
        run.summary["alerts"] = [*run.summary.get("alerts", []), f"{event['code']}@{event['step']}"]
    elif kind == "end":
        reason = event.get("reason")
        run.summary["status"] = event.get("status")
        run.summary["steps_done"] = event.get("step")
        run.summary["stop_code"] = reason.get("code") if isinstance(reason, dict) else None
        run.summary["stop_reason"] = reason.get("message") if isinstance(reason, dict) else reason
    elif kind == "samples":
        import wandb

        columns: list[str | int] = ["step", "prompt", "completion", "reward", "finish"]
        rows = [[event["step"], *(row.get(str(name)) for name in columns[1:])] for row in event.get("rows", [])]
        run.log({"step": event["step"], "samples": wandb.Table(columns=columns, data=rows, allow_mixed_types=True)})


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics as floats; "nan" and "inf" of the log become the numbers they mean."""
    found = {}
    for name, value in metrics.items():
        with contextlib.suppress(TypeError, ValueError):
            found[name] = float(value)
    return found


def alert_text(event: Mapping[str, Any]) -> str:
    """Return what happened, on which evidence, and what to try."""
    evidence = ", ".join(f"{name} {value}" for name, value in event.get("evidence", {}).items())
    advice = " ".join(event.get("intervention", []))
    lines = [f"Step {event['step']}: {event.get('message', '')}", f"Evidence: {evidence}" if evidence else ""]
    return "\n".join([*filter(None, lines), *([f"Try: {advice}"] if advice else [])])


def summary(order: Mapping[str, Any], watchdog: Watchdog) -> None:
    """Record the sweep itself: a run of job type "summary" with a Table of trials."""
    import wandb

    folder, tracking, sweep = Path(order["run_dir"]), order["tracking"], order["sweep"]
    (folder / "wandb").mkdir(parents=True, exist_ok=True)
    quieten(folder / "wandb" / "tracker.log")
    rows = order["rows"]
    run = open_run(
        tracking,
        watchdog,
        id="summary-" + hashlib.sha256(sweep.encode()).hexdigest()[:12],
        resume="allow" if tracking["mode"] == "online" else None,
        dir=str(folder),
        name=f"{sweep} summary",
        group=tracking["group"] or sweep,
        job_type="summary",
        tags=list(tracking["tags"]),
        config=order["about"],
    )
    columns = list(dict.fromkeys(name for row in rows for name in row))
    data = [[cell(row.get(name)) for name in columns] for row in rows]
    with watchdog.call():
        run.log({"trials": wandb.Table(columns=columns, data=data, allow_mixed_types=True)})
        statuses = [str(row.get("status")) for row in rows]
        for status in sorted(set(statuses)):
            run.summary[f"runs/{status}"] = statuses.count(status)
        run.summary["runs/total"] = len(rows)
        run.finish(exit_code=0)


def cell(value: Any) -> Any:
    """Return a value that fits a table cell."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if isinstance(value, (str, int, bool)) or value is None else json.dumps(value, default=str)


def quieten(path: Path) -> None:
    """Send everything this process and its children print from now on to `path`."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def main(parent: int) -> None:
    """Carry out orders until there are no more."""
    os.nice(5)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    orders = Orders(parent)
    watchdog = Watchdog(orders)
    while (order := orders.next()) is not None:
        try:
            if order["op"] == "follow":
                follow(order, orders, watchdog)
            else:
                summary(order, watchdog)
        except Exception as error:  # whatever the library raises: the parent starts another process, a few times
            tell({"failed": str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__})
            os.killpg(os.getpgrp(), signal.SIGKILL)
        tell({"done": order["run_dir"]})


if __name__ == "__main__":
    REPLY = os.dup(1)
    main(int(sys.argv[1]))

"""Commands from `python -m sweeps` to a running coordinator: lines in `control.jsonl`, read about once a second."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reasonrl.events import EventLog, read_events
from sweeps.state import RunState

if TYPE_CHECKING:
    from sweeps.coordinator import Coordinator

VERBS = ("stop", "pause", "resume", "retry")


class Control:
    """The commands that came after this coordinator started; older ones were meant for another."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "control.jsonl"
        self._seen = 0
        self._size = 0
        self.fresh()

    def fresh(self) -> list[dict[str, Any]]:
        """Commands not seen yet, oldest first."""
        if not self._path.exists() or self._path.stat().st_size == self._size:
            return []
        self._size = self._path.stat().st_size
        commands = list(read_events(self._path))
        fresh, self._seen = commands[self._seen :], len(commands)
        return [command for command in fresh if command.get("verb") in VERBS]


def send(directory: Path, verb: str, key: str | None = None, reason: Mapping[str, Any] | None = None) -> None:
    """Leave a command for the coordinators of this folder; `reason` is why a run is stopped, if not by a person."""
    log = EventLog(directory / "control.jsonl")
    because = {} if reason is None else {"reason": dict(reason)}
    log.append({"type": "command", "time": time.time(), "verb": verb, "key": key, **because}, sync=True)
    log.close()


def obey(sweep: Coordinator, command: Mapping[str, Any]) -> None:
    """Carry out one command: on the whole sweep, or on the run it names."""
    verb, key = command.get("verb"), command.get("key")
    sweep.ledger.note("command", verb=verb, of=key)
    if key:
        run = sweep.book.runs.get(str(key))
        if run is not None:
            _obey_for_run(sweep, str(verb), run, command.get("reason"))
    elif verb == "stop":
        sweep.leave("stopped by command", 0)
    elif verb in ("pause", "resume"):
        sweep.paused = verb == "pause"
        sweep.progress.line("paused by command" if sweep.paused else "resumed by command")
    elif verb == "retry":
        for run in list(sweep.book.runs.values()):
            _obey_for_run(sweep, "retry", run)


def _obey_for_run(sweep: Coordinator, verb: str, run: RunState, reason: Mapping[str, Any] | None = None) -> None:
    if verb == "stop":
        stop(sweep, run, reason or _by_hand(run))
    elif verb == "pause" and run.open:
        run.held = True
        sweep.command(run, "pause")
    elif verb == "resume":
        run.held = False
        sweep.queue.push(run, first=True)
    elif verb == "retry" and run.status == "failed" and sweep.sharing.claim_known(run):
        if run.status == "failed":
            sweep.book.record(run, {"type": "retry"})
        sweep.sharing.release(run)
        sweep.queue.push(run, first=True)
        for configuration in sweep.book.configurations_of(run):
            configuration.trial, configuration.told = None, False


def _by_hand(run: RunState) -> dict[str, Any]:
    return {
        "code": "USER", "title": "stopped by hand", "message": "python -m sweeps stop", "step": run.step,
        "evidence": {}, "intervention": [],
    }  # fmt: skip


def stop(sweep: Coordinator, run: RunState, reason: Mapping[str, Any]) -> None:
    """Stop one run for good, unless another coordinator has it; the reason goes into its log."""
    if run.status == "running":
        sweep.command(run, "stop", reason)
    elif run.open and sweep.sharing.claim_known(run):
        if run.open:
            sweep.book.record(run, {"type": "decision", "step": run.step, "action": "stop", "reason": reason})
            sweep.book.record(run, {"type": "end", "step": run.step, "status": "stopped", "reason": reason})
        sweep.endings.settle(run, {})
        sweep.sharing.release(run)

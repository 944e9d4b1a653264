"""What runs elsewhere write into their event logs, folded in as it comes: the leader of a search judges by it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reasonrl.events import read_from
from sweeps.pruning import report
from sweeps.state import RunState

if TYPE_CHECKING:
    from sweeps.coordinator import Coordinator


class Following:
    """Reads on in the logs of the runs that other coordinators have, and reports their values to the study."""

    def __init__(self, sweep: Coordinator) -> None:
        self._sweep = sweep
        self._read: dict[str, int] = {}

    def look(self) -> None:
        """Take in what was written since; a log that did not grow is not opened."""
        elsewhere = [run for run in self._sweep.book.runs.values() if run.status == "elsewhere"]
        self._read = {run.key: self._read[run.key] for run in elsewhere if run.key in self._read}
        for run in elsewhere:
            self._read_on(run)

    def _read_on(self, run: RunState) -> None:
        sweep, path = self._sweep, self._sweep.book.run_dir(run.key) / "events.jsonl"
        try:
            size, offset = path.stat().st_size, self._read.get(run.key)
            if size == offset:
                return
            fresh = RunState(run.spec, sweep.book.metric) if offset is None or size < offset else run
            events, self._read[run.key] = read_from(path, 0 if fresh is not run else offset or 0)
        except OSError:  # not begun, or not to be seen here yet
            return
        step, seconds = run.step, run.seconds
        for event in events:
            fresh.apply(event)
        vars(run).update(vars(fresh), status="elsewhere", held=run.held, given_up=run.given_up)
        sweep.budget.steps += max(0, run.step - step)
        sweep.budget.busy_s += max(0.0, run.seconds - seconds)
        if offset is None:
            for configuration in sweep.book.configurations_of(run):
                sweep.study.begin(configuration)
        measured = {int(event["step"]) for event in events if run.metric in (event.get("metrics") or {})}
        for at, _ in run.values:
            if at in measured:
                report(sweep, run, at)

"""What a person sees while a sweep runs: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from sweeps.budget import forecast_seconds
from sweeps.engines.base import Slot
from sweeps.ledger import warnings_of
from sweeps.state import RunState
from sweeps.types import Plan

if TYPE_CHECKING:
    from rich.table import Table

    from sweeps.coordinator import Coordinator

REFRESH_S = 0.5
PLAIN_S = 30.0
MAX_ROWS = 24
COLUMNS = ("run", "arm", "seed", "step", "reward", "entropy", "tok/s", "ETA", "alerts")
_STATUS = {"finished": "done", "stopped": "STOPPED", "failed": "FAILED", "paused": "paused", "partial": "partial"}


class Progress:
    """The live table; `line` prints above it."""

    def __init__(self, plan: Plan, stream: Any = None) -> None:
        from rich.console import Console

        self._plan = plan
        self.console = Console(file=stream or sys.stdout, highlight=False, soft_wrap=True)
        self.live: Any = None
        self._last = 0.0
        self._on_alert = plan.sweep.get("on_alert", "stop")

    def begin(self, sweep: Coordinator) -> None:
        """Say what there is to do and open the table."""
        from sweeps.show import num_runs

        total, done = len(sweep.book.runs), sweep.resumed
        slots = ", ".join(seat.slot.label for seat in sweep.seats)
        left = f", {done} of them done before" if done else ""
        planned = num_runs(self._plan)
        what = f"a search of at most {planned} runs" if self._plan.searched else f"{total} run{'s' * (total != 1)}"
        self.line(f"sweep {self._plan.name}: {what}{left}; slots: {slots}; results in {self._plan.directory}")
        for warning in warnings_of(self._plan):
            self.line(f"warning: {warning}")
        if missing := unbuilt_models(spec.config for spec in self._plan.runs or [self._plan.typical_run()]):
            self.line(
                f"first, once: the built-in base model is taught ({missing} to make, a minute or so each) and kept"
            )
        if self.console.is_terminal:
            from rich.live import Live

            self.live = Live(console=self.console, auto_refresh=False, transient=False, vertical_overflow="crop")
            self.live.start()

    def line(self, text: str) -> None:
        """Print one line (or a few) above the table."""
        self.console.print(text, markup=False)

    def started(self, run: RunState, slot: Slot) -> None:
        """A run was handed to a slot."""
        if self.live is None:
            since = f" from step {run.checkpoints[-1]}" if run.checkpoints else ""
            self.line(f"{run.spec.name} [{run.key}] starts{since} on {slot.label}")

    def ended(self, run: RunState) -> None:
        """A run finished, stopped, paused or failed."""
        self.line(describe_end(run))

    def retried(self, run: RunState, kind: str, details: Mapping[str, Any], now: bool) -> None:
        """A run failed and is tried again, by this command or by the next."""
        batch = details.get("micro_batch_size")
        how = f" with optim.micro_batch_size={batch}" if batch else ""
        when = "tried again" if now else "the next command tries again"
        self.line(f"{run.spec.name}: {kind} at step {run.step} ({run.reason}); {when}{how}")

    def alert(self, run: RunState, event: Mapping[str, Any]) -> None:
        """A run raised an alert; notes stay in its log, and a stop is said by the run's end."""
        if event.get("severity") == "flag" or (event.get("severity") == "stop" and self._on_alert == "continue"):
            what = f"{event['severity']} {event['code']} {event.get('title', '')}"
            self.line(f"{run.spec.name}: {what}: {event.get('message', '')}")

    def refresh(self, sweep: Coordinator) -> None:
        """Redraw the table, or now and then print where everything is."""
        now = time.monotonic()
        if now - self._last < (REFRESH_S if self.live else PLAIN_S):
            return
        first, self._last = self._last == 0.0, now
        if self.live is not None:
            self.live.update(self._table(sweep), refresh=True)
        elif not first:
            for seat in sweep.running:
                if seat.run is not None:
                    self.line("  " + describe_running(seat.run))
            self.line("  " + self._counts(sweep))

    def close(self) -> None:
        """Leave the last state of the table on the screen."""
        if self.live is not None:
            self.live.stop()
            self.live = None

    def _counts(self, sweep: Coordinator) -> str:
        counts: dict[str, int] = {}
        for run in sweep.book.runs.values():
            counts[run.status] = counts.get(run.status, 0) + 1
        text = ", ".join(f"{count} {status}" for status, count in counts.items())
        left = forecast_seconds(sweep.book.runs.values(), len(sweep.seats))
        return text + (f"; about {duration(left)} left" if left else "")

    def _table(self, sweep: Coordinator) -> Table:
        from rich.table import Table

        table = Table(title=f"{self._plan.name}: {self._counts(sweep)}", title_justify="left", expand=False)
        for column in COLUMNS:
            table.add_column(column, justify="left" if column in ("run", "arm", "alerts") else "right", no_wrap=True)
        for run in pick_rows(sweep.book.runs.values(), min(MAX_ROWS, max(4, self.console.height - 8))):
            style = {"stopped": "yellow", "failed": "red", "finished": "dim"}.get(run.status)
            table.add_row(*row_of(run), style=style)
        return table


def pick_rows(runs: Iterable[RunState], most: int) -> list[RunState]:
    """The runs worth a row: all that run, then those that ended badly, the last that ended, the next in line."""
    order = {"running": 0, "failed": 1, "stopped": 2, "paused": 3, "partial": 3, "finished": 4, "waiting": 5}
    everything = list(runs)
    places = {run.key: place for place, run in enumerate(everything)}
    chosen = sorted(everything, key=lambda run: (order.get(run.status, 5), places[run.key]))[:most]
    return sorted(chosen, key=lambda run: places[run.key])


def row_of(run: RunState) -> tuple[str, ...]:
    """The cells of one run, in the order of COLUMNS."""
    eta = "" if run.status == "waiting" else _STATUS.get(run.status, "")
    if run.status == "running":
        left = (run.spec.steps - run.step) * (run.seconds_per_step or math.nan)
        eta = duration(left) if math.isfinite(left) else "..."
    name = f"{run.key[:8]}{' fork' if run.spec.parent else ''}"
    return (
        name, run.spec.arm, str(run.spec.seed), f"{run.step}/{run.spec.steps}", number(run.shown.get("reward/total")),
        number(run.shown.get("entropy/mean")), number(run.shown.get("speed/tokens_per_s"), 0), eta, alert_codes(run),
    )  # fmt: skip


def alert_codes(run: RunState) -> str:
    """`A03 stop, A05 flag`: the worst severity of every code raised."""
    worst: dict[str, str] = {}
    ranks = ("note", "flag", "stop")
    for alert in run.alerts:
        code, severity = str(alert.get("code")), str(alert.get("severity"))
        if code not in worst or ranks.index(severity) > ranks.index(worst[code]):
            worst[code] = severity
    return ", ".join(f"{code} {severity}" for code, severity in worst.items())


def describe_running(run: RunState) -> str:
    """One plain line about a run in progress."""
    cells = dict(zip(COLUMNS, row_of(run), strict=True))
    shown = [f"{name} {cells[name]}" for name in ("reward", "entropy", "tok/s", "ETA", "alerts") if cells[name]]
    return f"{run.spec.name} [{run.key}] step {cells['step']}: {', '.join(shown)}"


def unbuilt_models(configs: Iterable[Mapping[str, Any]]) -> int:
    """How many built-in base models these configurations need that are not in the user's cache yet."""
    from reasonrl.models import ModelConfig
    from reasonrl.models.tiny import base_folder, base_recipe

    tiny = [config for config in configs if config.get("model", {}).get("kind") == "tiny" and "task" in config]
    recipes = [base_recipe(ModelConfig(**config["model"]), config["task"]["operands"]) for config in tiny]
    return sum(not folder.is_dir() for folder in {base_folder(recipe) for recipe in recipes})


def describe_end(run: RunState) -> str:
    """One plain line about how a run ended and why."""
    head = f"{run.spec.name} [{run.key}] {run.status} at step {run.step}/{run.spec.steps}"
    value = f", {run.metric} {run.value:.4g}" if run.value is not None else ""
    if run.status == "stopped":
        reason = run.stop_reason() or {}
        cure = " or ".join(reason.get("intervention") or [])
        advice = f". Try {cure}" if cure else ""
        message = str(reason.get("message")).rstrip(".")
        return f"{head}: {reason.get('code')} {reason.get('title')}: {message}{advice}"
    if run.status == "failed":
        return f"{head} ({run.error_class}): {run.reason}"
    return f"{head}{value}"


def duration(seconds: float) -> str:
    """`42 s`, `3 min 20 s`, `2 h 05 min`."""
    if not math.isfinite(seconds):
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def number(value: float | None, digits: int = 3) -> str:
    """A number for a cell; empty without one."""
    return "" if value is None else f"{value:.{digits}f}"

"""What is known of one run, folded from its event log; the same fold serves a live run, a resume and `status`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reasonrl.events import read_events
from sweeps.failures import CLASSES
from sweeps.types import RunSpec

Event = Mapping[str, Any]

# waiting: never started. partial: started, and neither ended nor running now. elsewhere: another coordinator has it.
OPEN = frozenset({"waiting", "partial", "running", "paused", "elsewhere"})
SHOWN = ("reward/total", "entropy/mean", "speed/tokens_per_s")
_SMOOTHING = 0.3


@dataclass
class RunState:
    """The state of one run: how far it is, what it measured, what was raised, how it ended.

    `values` are (step, value) of the study's metric, `failures` (class, step reached) since the last retry by hand,
    `abandons` why the seeds after this one were given up, `closes` the decisions to close a stage, by its name,
    `seconds_per_step` a running mean of the wall time between rows.
    """

    spec: RunSpec
    metric: str = "eval/accuracy"
    status: str = "waiting"
    step: int = 0
    shown: dict[str, float] = field(default_factory=dict)
    values: list[tuple[int, float]] = field(default_factory=list)
    alerts: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[int] = field(default_factory=list)
    reason: Any = None
    error_class: str | None = None
    decision: Any = None
    failures: list[tuple[str, int]] = field(default_factory=list)
    micro_batch: int | None = None
    abandons: Any = None
    closes: dict[str, Event] = field(default_factory=dict)
    seconds_per_step: float | None = None
    seconds: float = 0.0
    slot: int | None = None
    pause_at: int | None = None
    held: bool = False
    given_up: bool = False
    _last_time: float | None = None
    _unclassed: bool = False

    @property
    def key(self) -> str:
        """The run's key."""
        return self.spec.key

    @property
    def open(self) -> bool:
        """True while the run has not ended for good."""
        return self.status in OPEN

    @property
    def failure_is_known(self) -> bool:
        """True when the run failed and its class is on record."""
        return self.status == "failed" and not self._unclassed

    @property
    def last_time(self) -> float:
        """When its last timed event was written (s since 1970), 0 before the first."""
        return self._last_time or 0.0

    @property
    def resumes_from(self) -> int:
        """The step of its newest checkpoint, where its next worker goes on; 0 without one."""
        return self.checkpoints[-1] if self.checkpoints else 0

    @property
    def value(self) -> float | None:
        """The last value of the study's metric, None before the first."""
        return self.values[-1][1] if self.values else None

    def value_at(self, step: int) -> float | None:
        """The metric's value recorded at `step` (rollout steps), None without one."""
        return next((value for at, value in reversed(self.values) if at == step), None)

    def stop_reason(self) -> dict[str, Any] | None:
        """The alert, decision or text that stopped the run, as a record with code, title, message and evidence."""
        if self.status != "stopped":
            return None
        for source in (self.decision, self.reason):
            if isinstance(source, Mapping) and source.get("code"):
                return dict(source)
        stops = [alert for alert in self.alerts if alert.get("severity") == "stop"]
        if stops:
            return stops[-1]
        return {"code": "STOP", "title": "stopped", "message": str(self.reason or "stopped"), "evidence": {}}

    def apply(self, event: Event) -> None:
        """Fold one event in; events of unknown types change nothing."""
        handler = _HANDLERS.get(str(event.get("type")))
        if handler is not None:
            handler(self, event)

    def on_start(self, event: Event) -> None:
        self.status, self.reason, self.error_class, self.decision = "running", None, None, None
        resumed = event.get("resumed_from") or 0
        self.step, self._unclassed = resumed, False
        self.values = [pair for pair in self.values if pair[0] <= resumed]
        self.alerts = [alert for alert in self.alerts if alert.get("step", 0) <= resumed]
        self._last_time = event.get("time")

    def on_step(self, event: Event) -> None:
        self.step = int(event["step"])
        metrics = event.get("metrics", {})
        for name in SHOWN:
            if name in metrics:
                self.shown[name] = float(metrics[name])
        self._clock(event)
        self._measure(event)

    def on_eval(self, event: Event) -> None:
        self._measure(event)
        self._clock(event, row=False)

    def on_alert(self, event: Event) -> None:
        self.alerts.append({key: value for key, value in event.items() if key not in ("type", "time")})

    def on_checkpoint(self, event: Event) -> None:
        step = int(event["step"])
        self.checkpoints = [at for at in self.checkpoints if at < step] + [step]

    def on_end(self, event: Event) -> None:
        self.status = str(event.get("status", "failed"))
        self.reason, self.error_class = event.get("reason"), event.get("error_class")
        self._clock(event, row=False)
        if self.status == "failed":
            # A trainer does not class its own failure: the coordinator's end, right behind it, says what it was.
            if self._unclassed:
                self.failures.pop()
            self._unclassed = self.error_class not in CLASSES
            self.failures.append(("user_code" if self._unclassed else str(self.error_class), self.step))

    def on_decision(self, event: Event) -> None:
        if event.get("action") == "stop":
            self.decision = event.get("reason")
        elif event.get("action") == "halve_micro_batch":
            self.micro_batch = int(event["value"])
        elif event.get("action") == "abandon":
            self.abandons = event.get("reason")
        elif event.get("action") == "close_stage":
            self.closes = {**self.closes, str(event["stage"]): event}

    def on_retry(self, event: Event) -> None:
        self.status, self.reason, self.error_class = "partial", None, None
        self.failures, self._unclassed = [], False

    def _measure(self, event: Event) -> None:
        value = event.get("metrics", {}).get(self.metric)
        if value is None:
            return
        number, step = float(value), int(event["step"])
        self.values = [pair for pair in self.values if pair[0] < step]
        if math.isfinite(number):
            self.values.append((step, number))

    def _clock(self, event: Event, row: bool = True) -> None:
        now = event.get("time")
        if now is None:
            return
        if self._last_time is not None and now >= self._last_time:
            passed = now - self._last_time
            self.seconds += passed
            if row:
                before = self.seconds_per_step
                self.seconds_per_step = passed if before is None else before + _SMOOTHING * (passed - before)
        self._last_time = now


_HANDLERS = {
    "start": RunState.on_start,
    "step": RunState.on_step,
    "eval": RunState.on_eval,
    "alert": RunState.on_alert,
    "checkpoint": RunState.on_checkpoint,
    "end": RunState.on_end,
    "decision": RunState.on_decision,
    "retry": RunState.on_retry,
}


def read_state(spec: RunSpec, run_dir: Path, metric: str = "eval/accuracy") -> RunState:
    """The state of a run as its event log tells it; `waiting` without a log, `partial` without an end."""
    state = RunState(spec, metric)
    path = run_dir / "events.jsonl"
    if path.exists():
        for event in read_events(path):
            state.apply(event)
        if state.status == "running":
            state.status = "partial"
    return state

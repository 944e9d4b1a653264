"""What follows from the end of a run: another try, a fork, the verdict on its configuration, the record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sweeps.configuration import Configuration
from sweeps.failures import halve_micro_batch, may_retry
from sweeps.findings import Rungs
from sweeps.interventions import fork
from sweeps.state import RunState

if TYPE_CHECKING:
    from sweeps.coordinator import Coordinator


class Endings:
    """Settles runs for the coordinator `sweep`; shows each bug's traceback once."""

    def __init__(self, sweep: Coordinator) -> None:
        self._sweep = sweep
        self._tracebacks: set[str] = set()
        self._rungs = Rungs(sweep.plan, sweep.queue)

    def settle(self, run: RunState, message: Mapping[str, Any]) -> None:
        """Carry out everything that follows; `message` is what the worker, or its silence, said of the end."""
        sweep = self._sweep
        if run.status == "stopped":
            sweep.book.refresh(run)  # a decision stands in its log only
        if run.status == "failed":
            if message.get("disk_full"):
                sweep.disk_full(str(message.get("message")))
            if self._retry(run):
                sweep.queue.push(run, first=True)
                return
            self._show_traceback(run, message)
        sweep.ledger.note(
            run.status, run.spec, step=run.step, steps=run.spec.steps, value=run.value, seconds=round(run.seconds, 3),
            reason=run.stop_reason() or run.reason, error_class=run.error_class,
        )  # fmt: skip
        sweep.progress.ended(run)
        self._compare_at_rung()
        if run.status == "paused":
            if sweep.goes_on:
                sweep.queue.push(run)
            return
        if run.status == "stopped" and sweep.on_alert == "intervene":
            self._intervene(run)
        for configuration in sweep.book.configurations_of(run):
            self.settle_configuration(configuration, run)

    def _compare_at_rung(self) -> None:
        sweep = self._sweep
        if not sweep.queue.breadth:
            return
        line = self._rungs.reached([c for c in sweep.book.configurations if not c.searched], sweep.book.metric)
        if line:
            sweep.ledger.note("rung", message=line)
            sweep.progress.line(line)

    def settle_configuration(self, configuration: Configuration, run: RunState) -> None:
        """Judge a configuration now that a run of it ended."""
        sweep = self._sweep
        if configuration.pruned and configuration.done and not configuration.stopped():
            # Every run ended before the stop came to it: what counts is what the logs say, for the next command too.
            late, configuration.pruned = f"{configuration.pruned['title']}, too late to stop a run", None
            sweep.book.abandon(configuration, run, {"why": late})
        if sweep.study.report_seed(configuration, run.spec.seed) and configuration.abandoned is None:
            why = sweep.book.abandon(configuration, run, {"why": "pruned by wilcoxon over the seeds so far"})
            if why is not None:
                sweep.ledger.note("abandon", run.spec, **why)
        sweep.source.settled(configuration)
        if configuration.done:
            sweep.study.tell(configuration)

    def _retry(self, run: RunState) -> bool:
        """Put a failed run in line again when its kind of failure may pass."""
        sweep = self._sweep
        kind = run.failures[-1][0] if run.failures else "user_code"
        if not may_retry(run.failures, int(sweep.plan.engine.get("max_retries", 2))):
            return False
        details: dict[str, Any] = {"error_class": kind, "reason": str(run.reason)}
        if kind == "oom":
            half = halve_micro_batch(sweep.jobs.config(run))
            if half is None:
                return False
            sweep.book.record(run, {"type": "decision", "action": "halve_micro_batch", "value": half, "step": run.step})
            details["micro_batch_size"] = half
        sweep.ledger.note("retry", run.spec, step=run.step, **details)
        sweep.progress.retried(run, kind, details, now=sweep.goes_on)
        run.status = "partial"
        return True

    def _show_traceback(self, run: RunState, message: Mapping[str, Any]) -> None:
        text = message.get("traceback")
        if not text:
            return
        (self._sweep.book.run_dir(run.key) / "error.txt").write_text(text)
        if run.error_class == "user_code" and text not in self._tracebacks:
            self._tracebacks.add(text)
            self._sweep.progress.line(text.rstrip())

    def _intervene(self, run: RunState) -> None:
        sweep = self._sweep
        child, why = fork(sweep.plan, sweep.book, run, int(sweep.plan.sweep.get("max_children", 1)))
        if child is None:
            sweep.ledger.note("no_fork", run.spec, reason=why)
            sweep.progress.line(f"{run.spec.name}: no intervention: {why}")
            return
        sweep.ledger.note("fork", child.spec, overrides=child.spec.overrides, reason=why)
        sweep.progress.line(f"{run.spec.name}: continues from step {child.spec.parent_step} as {child.key} with {why}")
        sweep.queue.push(child, first=True)

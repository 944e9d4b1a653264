"""The moving parts of a sweep behind the loop: assign, handle, tend; and what follows when a run ends."""

from __future__ import annotations

import copy
import shutil
import time
from collections.abc import Mapping, Sequence
from typing import Any

from reasonrl.errors import EngineError
from sweeps.book import Book
from sweeps.budget import Budget
from sweeps.configuration import Configuration
from sweeps.control import Control
from sweeps.engines import Engine
from sweeps.engines.base import Message, Slot
from sweeps.failures import describe_exit, halve_micro_batch, may_retry
from sweeps.interventions import fork
from sweeps.ledger import Ledger, save_spec
from sweeps.progress import Progress
from sweeps.schedule import Queue
from sweeps.search import Planned, Search, Source
from sweeps.seats import MAX_BAD_STARTS, Seat
from sweeps.state import RunState
from sweeps.study import Study
from sweeps.types import Plan

TEND_S = 1.0
MIN_FREE_MB = 50.0
PROGRESS = frozenset({"start", "step", "eval", "checkpoint"})
ALL_CHECKPOINTS = 10_000  # an intervention goes back to the last healthy one, so none may be dropped


class Coordinator:
    """Everything the coordinator knows and does; see `sweeps.runner` for the loop that drives it."""

    def __init__(self, plan: Plan, engine: Engine, seats: Sequence[Seat], progress: Progress) -> None:
        self.plan, self.engine, self.seats, self.progress = plan, engine, seats, progress
        self._seat = {seat.slot.index: seat for seat in seats}
        self.ledger = Ledger(plan.directory)
        self.book = Book(plan)
        self.study = Study(plan, self.warn)
        self.queue = Queue(plan.sweep)
        self.control = Control(plan.directory)
        self.budget = Budget(plan.sweep.get("budget") or {}, max(1, len(seats[0].slot.devices)))
        self.source = self._make_source()
        self.leaving: str | None = None
        self.exit_code = 0
        self.barred: str | None = None
        self.paused = False
        self._tended = 0.0
        self._tracebacks: set[str] = set()
        self._on_alert = str(plan.sweep.get("on_alert", "stop"))
        self._began = time.monotonic()
        for child in self.book.add_forks():
            self.queue.push(child)
        self.study.open(self.book.configurations)
        self.source.refill(self.queue)
        self.budget.count_past(self.book.runs.values())
        self.resumed = sum(not run.open for run in self.book.runs.values())
        for note in getattr(engine, "notes", ()):
            self.warn(note)
        for configuration in self.book.configurations:
            self.source.settled(configuration)
        self.ledger.note("sweep", runs=len(self.book.runs), done=self.resumed, slots=len(seats))
        self.progress.begin(self)

    def _make_source(self) -> Source:
        sampler = str(self.plan.study.get("sampler", "none"))
        if self.plan.stages:
            from sweeps.stages import Stages

            return Stages(self.plan, self.book, self.study, self.ledger, self.warn)
        if self.plan.searched:
            search = Search(
                self.plan, self.book, self.study, self.ledger,
                space=self.plan.space, sampler=sampler, trials=int(self.plan.study.get("trials", 0)),
            )  # fmt: skip
            search.recover()
            return search
        return Planned(self.book, searched=sampler == "grid")

    # -- the three verbs of the loop --------------------------------------------------------------------------

    @property
    def running(self) -> list[Seat]:
        """The seats with a run."""
        return [seat for seat in self.seats if seat.run is not None]

    @property
    def finished(self) -> bool:
        """True when nothing runs and nothing more will."""
        if self.running:
            return False
        if self.leaving or self.barred:
            return True
        return not self.paused and len(self.queue) == 0 and self.source.exhausted and not self._held()

    @property
    def _may_assign(self) -> bool:
        return not (self.leaving or self.barred or self.paused)

    def _held(self) -> bool:
        return any(run.held and run.open for run in self.book.runs.values())

    def assign(self) -> None:
        """Give every free slot the best next run."""
        for seat in self.seats:
            while seat.free and self._may_assign:
                run = self._next_run()
                if run is None:
                    return
                self._start(seat, run)

    def _next_run(self) -> RunState | None:
        if len(self.queue) == 0:
            self.source.refill(self.queue)
        run = self.queue.pop()
        if run is None:
            return None
        why = self.budget.bars(run)
        if why is not None:
            self.barred = why
            self.queue.push(run)
            self.ledger.note("budget", reason=why)
            return None
        return run

    def handle(self, slot: Slot, message: Message) -> None:
        """Act on one message of a worker."""
        seat = self._seat[slot.index]
        kind = message["type"]
        if kind == "event":
            self._on_event(seat, message)
        elif kind == "ready":
            seat.ready, seat.bad_starts = True, 0
        elif kind in ("done", "failed"):
            self._on_done(seat, message)
        elif kind == "broken":
            self._on_broken(seat, message)
        elif kind == "exit":
            self._on_exit(seat, message)

    def tend(self) -> None:
        """Look after everything that does not announce itself; most of it once a second."""
        self.progress.refresh(self)
        if time.monotonic() - self._tended < TEND_S:
            return
        self._tended = time.monotonic()
        timeout = float(self.plan.engine.get("hang_timeout_s") or 600.0)
        for seat in self.running:
            if seat.hung(timeout):
                self._on_hang(seat, timeout)
        self.study.repair(self.book.configurations)
        for command in self.control.fresh():
            self._obey(command)
        free = shutil.disk_usage(self.plan.directory).free / 2**20
        if free < MIN_FREE_MB and not self.leaving:
            self._disk_full(f"{free:.0f} MB free")
        why = self.budget.exhausted()
        if why is not None and self.barred is None:
            self.barred = why
            self.ledger.note("budget", reason=why)
        if self.barred or self.leaving or self.paused:
            self._pause_running()

    # -- starting ---------------------------------------------------------------------------------------------

    def _start(self, seat: Seat, run: RunState) -> None:
        if run.status == "waiting":
            self.budget.runs += 1
        for configuration in self.book.configurations_of(run):
            self.study.begin(configuration)
        run.pause_at = self.queue.pause_step(run)
        folder = self.book.run_dir(run.key)
        save_spec(folder, run.spec)
        job = {
            "type": "run", "key": run.key, "run_dir": str(folder.resolve()), "config": self._job_config(run),
            "pause_at": run.pause_at, "on_alert": self._on_alert,
        }  # fmt: skip
        run.status, run.slot = "running", seat.slot.index
        seat.take(run)
        self.ledger.note("start", run.spec, slot=seat.slot.label, step=run.step, attempt=len(run.failures) + 1)
        try:
            self.engine.send(seat.slot, job)
        except EngineError as error:
            self._on_exit(seat, {"code": None, "signal": None, "why": str(error)})
        self.progress.started(run, seat.slot)

    def _job_config(self, run: RunState) -> dict[str, Any]:
        """The run's config with what the coordinator decides: none of it is part of the run's key."""
        config = copy.deepcopy(run.spec.config)
        if run.micro_batch is not None:
            config.setdefault("optim", {})["micro_batch_size"] = run.micro_batch
        config["name"] = run.spec.name
        tracking = config.get("tracking")
        if tracking is not None:
            tracking["group"] = tracking.get("group") or self.plan.name
            tracking["job_type"] = tracking.get("job_type") or run.spec.arm
        if "alerts" in config:
            config["alerts"]["on_stop"] = "continue" if self._on_alert == "continue" else "stop"
        if self._on_alert == "intervene" and "checkpoint" in config:
            config["checkpoint"]["keep"] = ALL_CHECKPOINTS
        return config

    # -- listening --------------------------------------------------------------------------------------------

    def _on_event(self, seat: Seat, message: Message) -> None:
        run, event = seat.run, message["event"]
        if run is None or run.key != message["key"]:
            return
        kind = event.get("type")
        if kind in PROGRESS:
            seat.last_progress = time.monotonic()
        step_before = run.step
        run.apply(event)
        if kind == "step":
            self.budget.steps += max(0, run.step - step_before)
        if kind == "alert":
            self.progress.alert(run, event)
        if self.book.metric in event.get("metrics", {}):
            self._report(run, int(event["step"]))

    def _report(self, run: RunState, step: int) -> None:
        """Tell the study the new mean; let the metric pruner stop a searched configuration."""
        for configuration in self.book.configurations_of(run):
            if self.study.report(configuration, step) and configuration.pruned is None:
                kind = self.plan.study.get("pruner")
                evidence = {"step": step, "value": configuration.mean_at(step), "metric": self.book.metric}
                reason = {
                    "code": "PRUNED", "title": f"pruned by {kind}", "step": step, "evidence": evidence,
                    "message": f"{self.book.metric} {evidence['value']:.4g} at step {step} is behind the others",
                    "intervention": [],
                }  # fmt: skip
                configuration.pruned = reason
                for other in configuration.runs:
                    self._command(other, "stop", reason)

    def _command(self, run: RunState, verb: str, reason: Any = None) -> None:
        seat = next((seat for seat in self.running if seat.run is run), None)
        if seat is not None:
            try:
                self.engine.send(seat.slot, {"type": verb, "key": run.key, "reason": reason})
            except EngineError:
                pass  # its worker is gone: the exit message follows

    def _on_done(self, seat: Seat, message: Message) -> None:
        run = seat.run
        if run is None or run.key != message["key"]:
            return
        self._free(seat)
        if message["type"] == "failed" or run.status in ("running", "failed"):
            self._note_failure(run, message)
        self._settle(run, message)
        if seat.keeps_memory(message):
            self.ledger.note("recycle", slot=seat.slot.label, rss_mb=message.get("rss_mb"), gpu_mb=message.get("gpu_mb"))
            self._restart(seat)

    def _note_failure(self, run: RunState, message: Mapping[str, Any]) -> None:
        """Make sure the failure stands in the run's log, with its class."""
        if run.failure_is_known:
            return
        error_class = message.get("error_class", "user_code")
        text = message.get("message", "training returned without an end event")
        event = {"type": "end", "step": run.step, "status": "failed", "reason": text, "error_class": error_class}
        try:
            self.book.record(run, event)
        except OSError as error:
            run.apply({**event, "time": time.time()})
            self._disk_full(str(error))

    def _on_exit(self, seat: Seat, message: Mapping[str, Any]) -> None:
        run = self._free(seat)
        if not seat.ready:
            seat.bad_starts += 1
        if run is not None:
            what = describe_exit(message)
            if run.status in ("running", "failed"):
                self._note_failure(run, what)
            self._settle(run, what)
        self._restart(seat)

    def _on_broken(self, seat: Seat, message: Mapping[str, Any]) -> None:
        """The worker could not load torch or the training function: no retry will change that."""
        run = self._free(seat)
        if run is not None:
            run.status = "partial" if run.step else "waiting"
            self.queue.push(run, first=True)
        seat.bad_starts = MAX_BAD_STARTS
        self.progress.line(f"slot {seat.slot.label}: the worker cannot start: {message['message']}")
        if not any(seat.bad_starts < MAX_BAD_STARTS for seat in self.seats):
            if message.get("traceback"):
                self.progress.line(message["traceback"])
            self.leave("no worker can be started", 1)

    def _on_hang(self, seat: Seat, timeout: float) -> None:
        run = self._free(seat)
        self.engine.kill(seat.slot)
        if run is not None:
            what = {"error_class": "hung", "message": f"no progress for {timeout:.0f} s (engine.hang_timeout_s)"}
            if run.status in ("running", "failed"):
                self._note_failure(run, what)
            self._settle(run, what)
        self._restart(seat)

    def _free(self, seat: Seat) -> RunState | None:
        run = seat.leave()
        if run is not None:
            self.budget.busy_s += time.monotonic() - seat.since
            run.slot = None
        return run

    def _restart(self, seat: Seat) -> None:
        if seat.bad_starts >= MAX_BAD_STARTS or self.leaving:
            self.engine.kill(seat.slot)
            if not any(other.bad_starts < MAX_BAD_STARTS for other in self.seats) and not self.leaving:
                log = self.plan.directory / "workers" / f"slot-{seat.slot.index}.log"
                self.leave(f"no worker can be started; see {log}", 1)
            return
        seat.restarted()
        self.engine.start(seat.slot)

    # -- what follows when a run ends -------------------------------------------------------------------------

    def _settle(self, run: RunState, message: Mapping[str, Any]) -> None:
        """Retry, continue later, fork, and tell: everything that follows from the end of a run."""
        if run.status == "failed":
            if message.get("disk_full"):
                self._disk_full(str(message.get("message")))
            if self._retry(run):
                self.queue.push(run, first=True)
                return
            self._show_traceback(run, message)
        self.ledger.note(
            run.status, run.spec, step=run.step, steps=run.spec.steps, value=run.value, seconds=round(run.seconds, 3),
            reason=run.stop_reason() or run.reason, error_class=run.error_class,
        )  # fmt: skip
        self.progress.ended(run)
        if run.status == "paused":
            if not self.leaving and not self.barred:
                self.queue.push(run)
            return
        if run.status == "stopped" and self._on_alert == "intervene":
            self._intervene(run)
        for configuration in self.book.configurations_of(run):
            self._settle_configuration(configuration, run)

    def _settle_configuration(self, configuration: Configuration, run: RunState) -> None:
        if self.study.report_seed(configuration, run.spec.seed) and configuration.abandoned is None:
            configuration.abandoned = {"why": "pruned by wilcoxon over the seeds so far"}
            configuration.pending_seeds = []
        self.source.settled(configuration)
        if configuration.done:
            self.study.tell(configuration)

    def _retry(self, run: RunState) -> bool:
        kind = run.failures[-1][0] if run.failures else "user_code"
        if not may_retry(run.failures, int(self.plan.engine.get("max_retries", 2))):
            return False
        details: dict[str, Any] = {"error_class": kind, "reason": str(run.reason)}
        if kind == "oom":
            half = halve_micro_batch(self._job_config(run))
            if half is None:
                return False
            self.book.record(run, {"type": "decision", "action": "halve_micro_batch", "value": half, "step": run.step})
            details["micro_batch_size"] = half
        self.ledger.note("retry", run.spec, step=run.step, **details)
        self.progress.retried(run, kind, details)
        run.status = "partial"
        return True

    def _show_traceback(self, run: RunState, message: Mapping[str, Any]) -> None:
        """Show a traceback once per bug; it is kept in every run's folder."""
        text = message.get("traceback")
        if not text:
            return
        (self.book.run_dir(run.key) / "error.txt").write_text(text)
        if run.error_class == "user_code" and text not in self._tracebacks:
            self._tracebacks.add(text)
            self.progress.line(text.rstrip())

    def _intervene(self, run: RunState) -> None:
        child, why = fork(self.plan, self.book, run, int(self.plan.sweep.get("max_children", 1)))
        if child is None:
            self.ledger.note("no_fork", run.spec, reason=why)
            self.progress.line(f"{run.spec.name}: no intervention: {why}")
            return
        self.ledger.note("fork", child.spec, overrides=child.spec.overrides, reason=why)
        self.progress.line(f"{run.spec.name}: continues from step {child.spec.parent_step} as {child.key} with {why}")
        self.queue.push(child, first=True)

    # -- leaving, pausing, commands ---------------------------------------------------------------------------

    def leave(self, why: str, code: int) -> None:
        """Start nothing more; every running run writes a checkpoint and pauses."""
        self.leaving, self.exit_code = why, code
        self.ledger.note("leave", reason=why)
        self.progress.line(f"{why}: running runs write a checkpoint and pause")
        self._pause_running()

    def _pause_running(self) -> None:
        for seat in self.running:
            if seat.run is not None and seat.run.pause_at != 0:
                self._command(seat.run, "pause")
                seat.run.pause_at = 0  # asked once

    def _disk_full(self, what: str) -> None:
        if not self.leaving:
            self.leave(f"the disk is full ({what}); free some space in {self.plan.directory}", 1)

    def _obey(self, command: Mapping[str, Any]) -> None:
        """Carry out `python -m sweeps stop|pause|resume|retry`."""
        verb, key = command.get("verb"), command.get("key")
        self.ledger.note("command", verb=verb, of=key)
        if not key:
            if verb == "stop":
                self.leave("stopped by command", 0)
            elif verb in ("pause", "resume"):
                self.paused = verb == "pause"
                self.progress.line("paused by command" if self.paused else "resumed by command")
            return
        run = self.book.runs.get(str(key))
        if run is None:
            return
        if verb == "stop":
            self._stop_run(run)
        elif verb == "pause" and run.open:
            run.held = True
            self._command(run, "pause")
        elif verb == "resume":
            run.held = False
            self.queue.push(run, first=True)
        elif verb == "retry" and run.status == "failed":
            self.book.record(run, {"type": "retry"})
            self.queue.push(run, first=True)
            for configuration in self.book.configurations_of(run):
                configuration.trial, configuration.told = None, False

    def _stop_run(self, run: RunState) -> None:
        reason = {
            "code": "USER", "title": "stopped by hand", "message": "python -m sweeps stop", "step": run.step,
            "evidence": {}, "intervention": [],
        }  # fmt: skip
        if run.status == "running":
            self._command(run, "stop", reason)
        elif run.open:
            self.book.record(run, {"type": "decision", "step": run.step, "action": "stop", "reason": reason})
            self.book.record(run, {"type": "end", "step": run.step, "status": "stopped", "reason": reason})
            self._settle(run, {})

    def warn(self, text: str) -> None:
        """Say something once, on the screen and in the ledger."""
        self.ledger.note("warning", message=text)
        self.progress.line(text)

    def close(self) -> None:
        """Give back what is held; runs still seated continue from their last checkpoint next time."""
        for seat in self.running:
            self.engine.kill(seat.slot)
            run = self._free(seat)
            if run is not None:
                run.status = "partial"
        self.study.close()

    def conclude(self) -> int:
        """Report, then the summary; returns the exit code."""
        from sweeps.summary import conclude

        return conclude(self, time.monotonic() - self._began)

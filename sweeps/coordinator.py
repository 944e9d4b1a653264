"""The moving parts of a sweep behind the loop: assign, handle, tend; and what follows when a run ends."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Mapping, Sequence
from typing import Any

from reasonrl.errors import EngineError
from sweeps.book import Book
from sweeps.budget import Budget
from sweeps.claims import Claims
from sweeps.control import Control, obey
from sweeps.endings import Endings
from sweeps.engines import Engine
from sweeps.engines.base import Message, Slot
from sweeps.failures import describe_exit
from sweeps.jobs import Jobs
from sweeps.leading import DUTY, Lead
from sweeps.ledger import Ledger, save_spec
from sweeps.progress import Progress
from sweeps.pruning import report
from sweeps.schedule import Queue
from sweeps.search import Source
from sweeps.seats import MAX_BAD_STARTS, MAX_TROUBLES, Seat
from sweeps.sharing import Sharing
from sweeps.sources import make_source
from sweeps.state import RunState
from sweeps.types import Plan

TEND_S = 1.0
ABSENCE_S = 10.0
MIN_FREE_MB = 50.0
PROGRESS = frozenset({"start", "step", "eval", "checkpoint"})


class Coordinator:
    """Everything the coordinator knows and does; see `sweeps.runner` for the loop that drives it."""

    def __init__(
        self, plan: Plan, engine: Engine, seats: Sequence[Seat], progress: Progress, ledger: Ledger, claims: Claims
    ) -> None:
        self.plan, self.engine, self.seats, self.progress = plan, engine, seats, progress
        self._seat = {seat.slot.index: seat for seat in seats}
        self._began, self._tended = time.monotonic(), 0.0
        self.on_alert = str(plan.sweep.get("on_alert", "stop"))
        self.leaving: str | None = None
        self.barred: str | None = None
        self.paused, self.exit_code = False, 0
        self.unwritten = False
        self.jobs = Jobs(plan, self.on_alert, progress.line)
        self.ledger, self.sharing = ledger, Sharing(self, claims)
        self.budget = Budget(plan.sweep.get("budget") or {}, max(1, len(seats[0].slot.devices)))
        self.book = Book(plan, lambda run: self.budget.count_past([run]))
        self.book.writing = self.sharing.writing
        self._start_workers()
        from sweeps.study import Study  # Optuna and SQLAlchemy load while the workers load torch

        self.lead = Lead(self) if plan.searched and claims.shared else None
        self.study = Study(plan, self.warn, self._writes_study)
        self.queue = Queue(plan.sweep)
        self.control = Control(plan.directory)
        self.endings = Endings(self)
        self.source: Source = self.lead or make_source(self)
        self._resume()

    def _start_workers(self) -> None:
        """Start as many workers as there will be work for."""
        runs = [self.book.add_run(spec) for spec in self.plan.runs]
        wanted = len(self.seats) if self.plan.searched else sum(run.open for run in runs)
        for seat in self.seats[:wanted]:
            self._start_worker(seat)

    def _start_worker(self, seat: Seat) -> None:
        seat.restarted()
        self.engine.start(seat.slot)

    def _resume(self) -> None:
        if self.lead is not None:
            self.lead.look()
        else:
            self.take_stock()
        self.resumed = sum(not run.open for run in self.book.runs.values())
        for note in getattr(self.engine, "notes", ()):
            self.warn(note)
        self.sharing.look()
        self.ledger.note("sweep", runs=len(self.book.runs), done=self.resumed, slots=len(self.seats))
        self.progress.begin(self)

    def take_stock(self) -> None:
        """Take up what earlier commands, or other coordinators, left: trials, decisions that are due, forks."""
        self._take_up_forks()
        self.study.open(self.book.configurations)
        self.queue.draw(self.source)
        self._take_up_forks()  # of runs that are known only now: those of later stages

    def _take_up_forks(self) -> None:
        for child in self.book.add_forks():
            self.queue.push(child)

    def _writes_study(self) -> bool:
        return (self.lead is None or self.lead.here) and bool(self.sharing.duty(DUTY))

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
        if self.paused or len(self.queue) or not self.source.exhausted or self._awaited():
            return False
        return self.sharing.study_is_written()

    @property
    def goes_on(self) -> bool:
        """True unless the sweep ends early (asked to leave, budget spent)."""
        return not (self.leaving or self.barred)

    def _awaited(self) -> bool:
        return any(run.open and (run.held or run.status == "elsewhere") for run in self.book.runs.values())

    def assign(self) -> None:
        """Give every free slot the best next run."""
        for seat in self.seats:
            while seat.free and self.goes_on and not self.paused:
                run = self._next_run()
                if run is None:
                    return
                self._start(seat, run)

    def _next_run(self) -> RunState | None:
        self.sharing.away = False
        while not self.sharing.away:
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
            if not self.sharing.claim(run):
                continue
            if self.lead is None or not self.lead.withdrawn(run):
                return run
            self.sharing.release(run)
        return None

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
        self.sharing.look()
        now = time.monotonic()
        if now - self._tended < TEND_S:
            return
        self._forgive_absence(now)
        self._tended = now
        timeout = float(self.plan.engine.get("hang_timeout_s") or 600.0)
        for seat in self.running:
            if seat.hung(timeout):
                self._on_hang(seat)
        self.study.repair(self.book.configurations)
        if self.lead is not None:
            self.lead.look()
        for command in self.control.fresh():
            obey(self, command)
        free = shutil.disk_usage(self.plan.directory).free / 2**20
        if free < MIN_FREE_MB and not self.leaving:
            self.disk_full(f"{free:.0f} MB free")
        why = self.budget.exhausted()
        if why is not None and self.barred is None:
            self.barred = why
            self.ledger.note("budget", reason=why)
        if why is not None or self.leaving or self.paused:  # a limit on runs bars new ones, and pauses none
            self._pause_running()

    def _forgive_absence(self, now: float) -> None:
        """A coordinator that was itself stopped for a while has not seen what its workers did meanwhile."""
        away = now - self._tended
        if self._tended and away > ABSENCE_S:
            for seat in self.running:
                seat.last_progress += away

    # -- starting ---------------------------------------------------------------------------------------------

    def _start(self, seat: Seat, run: RunState) -> None:
        self.budget.count_run(run)
        run.pause_at = self.queue.pause_step(run)
        save_spec(self.book.run_dir(run.key), run.spec)
        job = self.jobs.make(run, self.book.run_dir(run.key), self.sharing.lease())
        run.status, run.slot = "running", seat.slot.index
        seat.take(run)
        self.ledger.note("start", run.spec, slot=seat.slot.label, step=run.resumes_from, attempt=len(run.failures) + 1)
        if not seat.started:
            self._start_worker(seat)
        try:
            self.engine.send(seat.slot, job)
        except EngineError:
            seat.lost = True  # its last words, and its exit, are still to be read
            self._put_back(seat)
            return
        for configuration in self.book.configurations_of(run):
            self.study.begin(configuration)
        self.progress.started(run, seat.slot)

    def _put_back(self, seat: Seat) -> None:
        """Give the run of a worker that never began it to another."""
        run = self.free(seat)
        if run is not None:
            run.status = "partial" if run.step else "waiting"
            self.queue.push(run, first=True)
            self.sharing.release(run)

    # -- listening --------------------------------------------------------------------------------------------

    def _on_event(self, seat: Seat, message: Message) -> None:
        run, event = seat.run, message["event"]
        if run is None or run.key != message["key"]:
            return
        kind = event.get("type")
        if kind in PROGRESS:
            seat.moved()
        if kind == "end":
            seat.ending = event
            return
        step_before = run.step
        run.apply(event)
        if kind == "step":
            self.budget.steps += max(0, run.step - step_before)
        if kind == "alert":
            self.progress.alert(run, event)
        if self.book.metric in event.get("metrics", {}):
            report(self, run, int(event["step"]))

    def command(self, run: RunState, verb: str, reason: Any = None) -> None:
        """Send "stop" or "pause" to the worker of a running run; it acts within the step."""
        seat = next((seat for seat in self.running if seat.run is run), None)
        if seat is not None:
            with contextlib.suppress(EngineError):  # its worker is gone: the exit message follows
                self.engine.send(seat.slot, {"type": verb, "key": run.key, "reason": reason})

    def _on_done(self, seat: Seat, message: Message) -> None:
        run = seat.run
        if run is None or run.key != message["key"]:
            return
        self.free(seat)
        seat.troubles = 0 if message["type"] == "done" else seat.troubles
        if message["type"] == "failed" or run.status in ("running", "failed"):
            self._note_failure(run, message)
            self._suspect(seat, run)
        self._settle(run, message)
        if seat.keeps_memory(message):
            self.ledger.note(
                "recycle", slot=seat.slot.label, rss_mb=message.get("rss_mb"), gpu_mb=message.get("gpu_mb")
            )
            self.restart(seat)

    def _settle(self, run: RunState, message: Mapping[str, Any]) -> None:
        """Carry out what follows from a run's end; then, and not before, others may have it."""
        self.endings.settle(run, message)
        self.sharing.release(run)

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
            self.disk_full(str(error))

    def _on_exit(self, seat: Seat, message: Mapping[str, Any]) -> None:
        if not seat.ready:
            seat.bad_starts += 1
            if seat.bad_starts == MAX_BAD_STARTS:
                self.warn(f"slot {seat.slot.label} is not used any more: {describe_exit(message)['message']}")
            self._put_back(seat)
        run = self.free(seat)
        if run is not None:
            what = describe_exit(message)
            if run.status in ("running", "failed"):
                self._note_failure(run, what)
            self._suspect(seat, run)
            self._settle(run, what)
        self.restart(seat)

    def _suspect(self, seat: Seat, run: RunState) -> None:
        """Use a slot no more when run after run fails there for reasons outside the run, and others are well."""
        if run.error_class not in ("infrastructure", "killed"):
            return
        seat.troubles += 1
        others = [other for other in self.seats if other is not seat and other.troubles == 0 and other.usable]
        if seat.troubles >= MAX_TROUBLES and others:
            seat.bad_starts = MAX_BAD_STARTS
            what = f"slot {seat.slot.label} is not used any more: {seat.troubles} failures in a row ({run.error_class})"
            self.warn(what)

    def _on_broken(self, seat: Seat, message: Mapping[str, Any]) -> None:
        """The worker could not load torch or the training function: no retry will change that."""
        self._put_back(seat)
        seat.bad_starts = MAX_BAD_STARTS
        self.progress.line(f"slot {seat.slot.label}: the worker cannot start: {message['message']}")
        if not any(seat.usable for seat in self.seats):
            if message.get("traceback"):
                self.progress.line(message["traceback"])
            self.leave("no worker can be started", 1)

    def _on_hang(self, seat: Seat) -> None:
        run = self.free(seat)
        self.engine.kill(seat.slot)
        if run is not None:
            message = f"no progress for {time.monotonic() - seat.last_progress:.0f} s (engine.hang_timeout_s)"
            what = {"error_class": "hung", "message": message}
            if run.status in ("running", "failed"):
                self._note_failure(run, what)
            self._settle(run, what)
        self.restart(seat)

    def free(self, seat: Seat) -> RunState | None:
        """Take the run out of a seat; its end event counts from here on."""
        run = seat.leave()
        if run is not None:
            self.budget.busy_s += time.monotonic() - seat.since
            run.slot = None
        return run

    def restart(self, seat: Seat) -> None:
        """Start the seat's worker anew, unless the seat is of no use or the sweep is ending."""
        if seat.bad_starts >= MAX_BAD_STARTS or self.leaving:
            self.engine.kill(seat.slot)
            if not any(other.usable for other in self.seats) and not self.leaving:
                log = self.plan.directory / "workers" / f"slot-{seat.slot.index}.log"
                self.leave(f"no worker can be started; see {log}", 1)
            return
        self._start_worker(seat)

    # -- leaving ----------------------------------------------------------------------------------------------

    def leave(self, why: str, code: int) -> None:
        """Start nothing more; every running run writes a checkpoint and pauses."""
        self.leaving, self.exit_code = why, code
        self.ledger.note("leave", reason=why)
        self.progress.line(f"{why}: running runs write a checkpoint and pause")
        self._pause_running()

    def _pause_running(self) -> None:
        for seat in self.running:
            if seat.run is not None and seat.run.pause_at != 0:
                self.command(seat.run, "pause")
                seat.run.pause_at = 0  # asked once

    def disk_full(self, what: str) -> None:
        """End the sweep in good order before anything is lost."""
        if not self.leaving:
            self.leave(f"the disk is full ({what}); free some space in {self.plan.directory}", 1)

    def warn(self, text: str) -> None:
        """Say something once, on the screen and in the ledger."""
        self.ledger.note("warning", message=text)
        self.progress.line(text)

    def close(self) -> None:
        """Give back what is held; runs still seated continue from their last checkpoint next time."""
        for seat in self.running:
            self.engine.kill(seat.slot)
            run = self.free(seat)
            if run is not None:
                run.status = "partial"
        self.study.close()
        if (self.lead is None or self.lead.here) and (self.study.away or self.sharing.duty(DUTY) is None):
            self.unwritten = any(each.done and not each.told for each in self.book.configurations)
        self.sharing.quit(DUTY)  # the others need not wait for the report

    def conclude(self) -> int:
        """Report, then the summary; returns the exit code."""
        from sweeps.summary import conclude

        return conclude(self, time.monotonic() - self._began)

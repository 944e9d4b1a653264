"""The other coordinators of a sweep, as far as one of them must know: which runs they have, and what became of those.

Nothing here happens in a sweep with one coordinator.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from reasonrl.errors import EngineError
from sweeps.claims import Claims
from sweeps.progress import describe_end
from sweeps.state import RunState

if TYPE_CHECKING:
    from sweeps.coordinator import Coordinator

LOOK_S = 2.0
LAG_S = 90.0  # network folders show what another machine wrote within a minute, or never will


class Sharing:
    """Claims runs for the coordinator `sweep`, gives them back, and follows those that others have."""

    def __init__(self, sweep: Coordinator, claims: Claims) -> None:
        self._sweep, self._claims = sweep, claims
        self._looked = self._told = 0.0
        self._lagging: dict[str, float] = {}
        self._present: set[str] = set()
        self._held: frozenset[str] = frozenset()
        self.away = self._waits = False

    def lease(self) -> float | None:
        """Seconds a worker may go on without hearing of its coordinator; None: for ever."""
        return self._claims.worker_lease()

    def claim(self, run: RunState) -> bool:
        """Whether the run may start here now, its state brought up to what others left.

        A run somebody else has, or one whose log has not fully arrived here, is marked `elsewhere` and looked at
        later; a run that ended there is settled.
        """
        if not self._claims.shared:
            return True
        got = self._claims.take(run.key)
        self.away = got is None
        if got is None:
            self._sweep.queue.push(run)
            return False
        if got and self._log_lags(run):
            self._claims.give_back(run.key)
            got = False
        if not got:
            self._is_elsewhere(run)
            return False
        self.refresh(run)
        if run.open:
            _fence(self._log(run))
            return True
        self._claims.give_back(run.key)
        self._ended(run)
        return False

    def claim_known(self, run: RunState) -> bool:
        """Whether a run that is not running may be written about here; True leaves it claimed."""
        if not self._claims.shared:
            return True
        if run.status in ("running", "elsewhere") or not self._claims.take(run.key):
            return False
        self.refresh(run)
        return True

    @contextlib.contextmanager
    def writing(self, run: RunState) -> Iterator[bool]:
        """Whether the log of a run that ended may be written to here, and by nobody else meanwhile."""
        mine = self.claim_known(run)
        try:
            yield mine
        finally:
            if mine:
                self.release(run)

    def release(self, run: RunState) -> None:
        """Let others have a run that left its slot."""
        if self._claims.shared:
            self._claims.give_back(run.key, _size(self._log(run)))

    def duty(self, name: str) -> bool | None:
        """Whether this coordinator is the one that does something only one should; None: cannot be known now."""
        return self._claims.take(f"duty {name}")

    def begun(self) -> frozenset[str]:
        """The keys of runs that somebody, some time, had."""
        return self._claims.begun()

    def vacant(self, name: str) -> bool:
        """Whether nobody had a duty when last looked."""
        return f"duty {name}" not in self._held

    def study_is_written(self) -> bool:
        """False while another has the study, who may have died with what came last: its lease is waited for."""
        study = self._sweep.study
        if not self._claims.shared or study.available or study.away or self.duty("study") is None:
            return True
        if not self._waits:
            self._waits = True
            self._sweep.progress.line("everything is done; waiting for the coordinator that writes the study to leave")
        return False

    def quit(self, name: str) -> None:
        """Leave a duty to the others."""
        self._claims.give_back(f"duty {name}")

    @property
    def num_others(self) -> int:
        """How many other coordinators live, as last heard."""
        return len(self._claims.others())

    def look(self) -> None:
        """Now and then: see what others have, and take up what they left or lost."""
        now = time.monotonic()
        if not self._claims.shared:
            return
        self.tell_workers()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        if not self.mark():
            return
        self._say_who_is_there()
        for run in list(self._sweep.book.runs.values()):
            if run.status == "elsewhere" and run.key not in self._held and not self._log_lags(run):
                self._take_up(run)

    def mark(self) -> bool:
        """Mark the runs that others have; False when it cannot be known now."""
        held = self._claims.theirs()
        if held is None:
            return False
        self._held = held
        for run in self._sweep.book.runs.values():
            if run.key in held and run.open and run.status != "running":
                self._is_elsewhere(run)
        return True

    def notice_begun(self, runs: Iterable[RunState]) -> None:
        """Mark those of the waiting `runs` that another began, and maybe ended, since last looked."""
        for run in runs:
            if run.status == "waiting" and self._log(run).exists():
                self._is_elsewhere(run)

    def _is_elsewhere(self, run: RunState) -> None:
        self._sweep.budget.count_run(run)
        run.status, run.given_up = "elsewhere", False

    def _take_up(self, run: RunState) -> None:
        self.refresh(run)
        if run.open:
            self._sweep.queue.push(run)
        else:
            self._ended(run)

    def _ended(self, run: RunState) -> None:
        """Let the sweep know how a run ended that another coordinator had."""
        sweep = self._sweep
        sweep.progress.line(f"{describe_end(run)} (elsewhere)")
        for configuration in sweep.book.configurations_of(run):
            configuration.recall_pruning()
            for step, _ in run.values:
                sweep.study.report(configuration, step, judge=False)
            sweep.endings.settle_configuration(configuration, run)
        if run.status == "stopped" and sweep.on_alert == "intervene":
            for child in sweep.book.add_forks():
                sweep.queue.push(child)

    def let_go(self) -> None:
        """The lease is lost: end what runs here without a word in its log, which may be someone else's by now."""
        sweep = self._sweep
        sweep.warn(
            "the database was away for too long to be sure that no other coordinator took over: running runs go back"
            " to their last checkpoint"
        )
        for seat in sweep.running:
            sweep.engine.kill(seat.slot)
            seat.ending = None
            run = sweep.free(seat)
            if run is not None:
                run.status = "partial"
                self._claims.give_back(run.key)
                sweep.queue.push(run, first=True)
            sweep.restart(seat)
        if sweep.lead is not None:
            sweep.lead.resign()

    def tell_workers(self) -> None:
        """Pass a renewed lease on, so that workers whose coordinator is frozen or cut off end by themselves."""
        now, lease = time.monotonic(), self.lease() or 0.0
        if not lease or now + lease < self._told + 0.1:
            return
        self._told = now + lease
        for seat in self._sweep.seats:
            if seat.started and not seat.lost and seat.usable:
                with contextlib.suppress(EngineError):
                    self._sweep.engine.send(seat.slot, {"type": "lease", "seconds": lease})

    def _say_who_is_there(self) -> None:
        there = {f"{holder.host} {holder.pid}": holder for holder in self._claims.others()}
        for name in there.keys() - self._present:
            self._sweep.warn(f"{there[name].describe()} works on this sweep too")
        for _ in self._present - there.keys():
            self._sweep.warn(f"another coordinator has left; {len(there)} other(s) work on this sweep now")
        self._present = set(there)

    def _log(self, run: RunState) -> Path:
        return self._sweep.book.run_dir(run.key) / "events.jsonl"

    def _log_lags(self, run: RunState) -> bool:
        """True while the run's log is shorter here than where it was written last."""
        if _size(self._log(run)) >= self._claims.expected(run.key):
            self._lagging.pop(run.key, None)
            return False
        first = self._lagging.setdefault(run.key, time.monotonic())
        if time.monotonic() - first < LAG_S:
            return True
        self._sweep.warn(f"{run.spec.name} [{run.key}]: its log is shorter here than where it ran; what is here counts")
        self._lagging.pop(run.key)
        return False

    def refresh(self, run: RunState) -> None:
        """Read the run's log again; what others spent on it counts."""
        budget, step, seconds = self._sweep.budget, run.step, run.seconds
        self._sweep.book.refresh(run)
        budget.steps += max(0, run.step - step)
        budget.busy_s += max(0.0, run.seconds - seconds)
        if run.status != "waiting":
            budget.count_run(run)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _fence(log: Path) -> None:
    """Put a copy in the place of a log, so that a process that still has the old one open writes into the void."""
    if log.exists():
        draft = log.with_name(f".{log.name}.copy")
        shutil.copyfile(log, draft)
        os.replace(draft, log)

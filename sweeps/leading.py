"""One leads, the others follow: how several coordinators share a sweep whose runs are suggested while it goes on.

The leader holds the duty `study`, a claim like that on a run: it is free again when its lease ends or it leaves. It
alone asks, decides and writes the study. What others may start it puts in line: the specs beside the logs to come, the
keys into `line.json`. Its own slots draw anew, the others find one run in stock for each of them. Whoever gets the
duty next derives everything from specs and event logs, as the same command would.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from sweeps.configuration import Configuration
from sweeps.following import Following
from sweeps.ledger import drop_spec, read_spec, save_spec, write_atomic
from sweeps.pruning import enforce
from sweeps.schedule import Queue, may_start
from sweeps.search import Source
from sweeps.sources import make_source
from sweeps.state import RunState

if TYPE_CHECKING:
    from sweeps.coordinator import Coordinator

DUTY = "study"
LINE = "line.json"
LOOK_S = 1.0
REPEAT_S = 10.0  # between stops sent again: whoever had the run may have died before it obeyed


class Lead:
    """The source of runs of a shared search (see `sweeps.search.Source`): the real one while this coordinator leads."""

    def __init__(self, sweep: Coordinator) -> None:
        self._sweep = sweep
        self._path = sweep.plan.directory / LINE
        self._source: Source | None = None
        self._following = Following(sweep)
        self._looked = 0.0
        self._followed = False
        self._stock: list[RunState] = []
        self._offered: set[str] = set()
        self._due: dict[str, float] = {}

    @property
    def here(self) -> bool:
        """True while this coordinator leads, as far as it knows."""
        return self._source is not None

    # -- the source -------------------------------------------------------------------------------------------

    def refill(self, queue: Queue) -> None:
        """Ask and decide as the leader; else take up what the leader has put in line."""
        if self._source is not None:
            self._source.refill(queue)
            if len(queue) == 0 and self._stock:
                queue.push(self._stock.pop(0))
            return
        if time.monotonic() - self._looked < LOOK_S:
            return
        self._looked, book = time.monotonic(), self._sweep.book
        for key in self._line():
            if key not in book.runs and (spec := read_spec(book.run_dir(key))) is not None:
                book.add_run(spec)
            if key in book.runs:
                queue.push(book.runs[key])

    def settled(self, configuration: Configuration) -> None:
        """Pass on that a run ended; a follower decides nothing."""
        if self._source is not None:
            self._source.settled(configuration)

    @property
    def exhausted(self) -> bool:
        """True for a leader with nothing left; a follower cannot know, and waits to become the leader."""
        return self._source is not None and self._source.exhausted and not any(map(may_start, self._stock))

    def withdrawn(self, run: RunState) -> bool:
        """Whether a run that was just claimed, and never started, is not in line any more."""
        never_begun = run.status == "waiting" and not run.spec.parent
        return self._source is None and never_begun and run.key not in self._line()

    # -- leading ----------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Take the lead when nobody has it; as the leader, follow what runs elsewhere and keep runs in line."""
        sharing = self._sweep.sharing
        if self._source is None:
            if not sharing.vacant(DUTY) or not sharing.duty(DUTY):
                self._followed = True
                return
            self._take()
        elif sharing.duty(DUTY) is False:
            self.resign()
            return
        self._following.look()
        self._enforce()
        self._offer()

    def _take(self) -> None:
        """Become the leader: read again what others wrote, and derive what is to be done from it."""
        sweep, book = self._sweep, self._sweep.book
        book.names = sweep.sharing.begun().union(self._line())
        self._write([])  # what an earlier leader left there may be of another plan
        sweep.ledger.note("lead")
        if self._followed:
            sweep.progress.line("this coordinator leads the search from now on")
        for run in book.runs.values():
            run.given_up = False
            sweep.sharing.tell_workers()  # many long logs take a while to read
            if run.status != "running":
                sweep.sharing.refresh(run)
        book.forget_configurations()
        book.forget_waiting()
        sweep.queue.clear()
        for run in book.runs.values():
            sweep.queue.push(run)
        self._source = make_source(sweep)
        sweep.sharing.mark()
        sweep.take_stock()
        self._due = dict.fromkeys((each.name for each in book.configurations if each.pruned), 0.0)
        self._offered = {key for key, run in book.runs.items() if run.status == "waiting"}

    def resign(self) -> None:
        """Follow from now on: another coordinator leads, or may."""
        if self._source is not None:
            self._source, self._followed = None, True
            self._offered.clear()
            self._stock.clear()
            self._following = Following(self._sweep)
            self._sweep.book.forget_configurations()
            self._sweep.study.suspend()

    def _enforce(self) -> None:
        now = time.monotonic()
        for configuration in self._sweep.book.configurations:
            if not configuration.pruned:
                continue
            due = self._due.setdefault(configuration.name, now + REPEAT_S)  # the first was sent when it was pruned
            if now >= due:
                self._due[configuration.name] = now + REPEAT_S
                enforce(self._sweep, configuration)

    # -- the line ---------------------------------------------------------------------------------------------

    def _offer(self) -> None:
        """Put in line what waits, and one run more for each other coordinator."""
        sweep, others, line = self._sweep, self._sweep.sharing.num_others, []
        sweep.sharing.notice_begun([*sweep.queue.ready(), *self._stock])
        if others and not (sweep.paused or sweep.barred):
            self._fill(others)
            line = sweep.budget.fitting([*sweep.queue.ready(), *self._stock])
        for run in line:
            save_spec(sweep.book.run_dir(run.key), run.spec)
            self._offered.add(run.key)
        self._write(list(dict.fromkeys(run.key for run in line)))
        self._withdraw()

    def _fill(self, wanted: int) -> None:
        assert self._source is not None
        self._stock = [run for run in self._stock if run.status == "waiting" and may_start(run)]
        fresh = True
        while fresh and len(self._stock) < wanted:
            dry = Queue(self._sweep.plan.sweep)
            self._source.refill(dry)
            fresh, here = False, {run.key for run in self._stock}
            for run in dry.ready():
                if run.status == "waiting" and run.key not in here and len(self._stock) < wanted:
                    self._stock.append(run)
                    fresh = True
                else:
                    self._sweep.queue.push(run)

    def _withdraw(self) -> None:
        """Take back the specs of runs that were given up before anybody started them."""
        sweep = self._sweep
        for key in list(self._offered):
            run = sweep.book.runs[key]
            if run.status == "waiting" and not run.given_up:
                continue
            if run.status == "waiting":
                with sweep.sharing.writing(run) as mine:
                    if not mine:
                        continue
                    if run.status == "waiting":
                        drop_spec(sweep.book.run_dir(key))
            self._offered.discard(key)

    def _line(self) -> list[str]:
        try:
            return [str(key) for key in json.loads(self._path.read_text())]
        except (OSError, ValueError, TypeError):
            return []

    def _write(self, keys: list[str]) -> None:
        """Say what is in line; a leader that lost its lease without noticing may have written there meanwhile."""
        if self._line() != keys:
            write_atomic(self._path, json.dumps(keys), sync=False)

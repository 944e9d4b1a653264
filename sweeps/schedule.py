"""Which run comes next: depth-first or breadth-first, interrupted work first, arms in turn."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sweeps.state import RunState

if TYPE_CHECKING:
    from sweeps.search import Source


class Queue:
    """Runs waiting for a slot.

    depth: in the order they were planned (seeds outside, so that every arm gets seed 0 before any gets seed 1),
    after work that was interrupted. breadth: the run that is least far first, and each pauses at the next of
    `rungs` equal parts of its steps, so that the first comparison of all arms comes after 1/rungs of the time. A
    slot is never left idle for the sake of a rung.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self.breadth = settings.get("schedule", "depth") == "breadth"
        self.rungs = max(1, int(settings.get("rungs") or 1)) if self.breadth else 1
        self._heap: list[tuple[int, int, int, RunState]] = []
        self._orders: dict[str, int] = {}
        self._ties = itertools.count()
        self._queued: set[str] = set()

    def push(self, run: RunState, first: bool = False) -> None:
        """Put a run in line; `first` for work that was interrupted. A run already in line stays where it is."""
        if run.key in self._queued or not run.open:
            return
        order = self._orders.setdefault(run.key, len(self._orders))
        rung = self.rung_of(run) if self.breadth else 0
        interrupted = first or (not self.breadth and run.status != "waiting")
        heapq.heappush(self._heap, (2 * rung + (not interrupted), order, next(self._ties), run))
        self._queued.add(run.key)

    def draw(self, source: Source) -> None:
        """Put in line what `source` gives to a line that ran dry, whether this one did or not."""
        dry = Queue(self._settings)
        source.refill(dry)
        while (run := dry.pop()) is not None:
            self.push(run)

    def clear(self) -> None:
        """Send everybody away."""
        self._heap.clear()
        self._queued.clear()

    def pop(self) -> RunState | None:
        """The next run, None when nobody waits. Runs that ended or are held meanwhile are dropped from the line."""
        while self._heap:
            run = heapq.heappop(self._heap)[-1]
            self._queued.discard(run.key)
            if may_start(run):
                return run
        return None

    def ready(self) -> list[RunState]:
        """The runs that wait and may start, in order."""
        return [entry[-1] for entry in sorted(self._heap, key=lambda entry: entry[:3]) if may_start(entry[-1])]

    def __len__(self) -> int:
        return len(self._heap)

    def boundaries(self, run: RunState) -> list[int]:
        """The steps at which the run pauses, its last one included; moved up to the next evaluation."""
        every = int(run.spec.config.get("eval", {}).get("every") or 1)
        equal = [-(-run.spec.steps * part // self.rungs) for part in range(1, self.rungs + 1)]
        return sorted({min(run.spec.steps, -(-step // every) * every) for step in equal})

    def rung_of(self, run: RunState) -> int:
        """How many rungs the run has completed."""
        return sum(step <= run.step for step in self.boundaries(run))

    def pause_step(self, run: RunState) -> int | None:
        """The step at which a run that starts now is to pause, None for "run to the end"."""
        return next((step for step in self.boundaries(run)[:-1] if step > run.step), None)


def may_start(run: RunState) -> bool:
    """True when nothing speaks against starting the run here and now."""
    return run.open and run.status not in ("running", "elsewhere") and not run.held and not run.given_up

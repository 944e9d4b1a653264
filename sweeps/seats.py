"""A slot as the coordinator sees it: who sits there, since when, and whether its worker can be trusted."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sweeps.engines.base import Slot
from sweeps.state import RunState

MAX_BAD_STARTS = 3
MAX_TROUBLES = 4
LOADING = 3  # times the patience before a run's first event: models are loaded, the built-in one even made
_GROWTH_MB = 1024.0


@dataclass(eq=False)
class Seat:
    """One slot, its present run, and the memory its worker held after its first run (MB).

    `troubles` counts failures in a row that came from outside the runs. `ending` is the end event of the run, which
    counts once the worker is done with the run.
    """

    slot: Slot
    run: RunState | None = None
    started: bool = False
    ready: bool = False
    lost: bool = False
    bad_starts: int = 0
    troubles: int = 0
    ending: Mapping[str, Any] | None = None
    last_progress: float = 0.0
    begun: bool = False
    since: float = 0.0
    first_rss_mb: float | None = None

    @property
    def free(self) -> bool:
        """True when a run can be handed to it; its worker may still be loading."""
        return self.run is None and not self.lost and self.usable

    @property
    def usable(self) -> bool:
        """False once its worker could not be started, or run after run failed there."""
        return self.bad_starts < MAX_BAD_STARTS

    def take(self, run: RunState) -> None:
        """Seat a run."""
        self.run, self.begun = run, False
        self.since = self.last_progress = time.monotonic()

    def moved(self) -> None:
        """Its run made a start, step, evaluation or checkpoint."""
        self.last_progress, self.begun = time.monotonic(), True

    def leave(self) -> RunState | None:
        """Free the seat; returns who sat there, with its end folded in if it came to one."""
        run, self.run = self.run, None
        if run is not None and self.ending is not None:
            run.apply(self.ending)
        self.ending = None
        return run

    def hung(self, timeout_s: float) -> bool:
        """True when its run made no step, evaluation or checkpoint for `timeout_s` seconds, thrice that to load."""
        patience = timeout_s * (1 if self.begun else LOADING)
        return self.run is not None and time.monotonic() - self.last_progress > patience

    def keeps_memory(self, left: Mapping[str, Any]) -> bool:
        """True when the worker holds much more after a run than after its first: it is better started anew."""
        rss = left.get("rss_mb")
        if rss is None:
            return False
        if self.first_rss_mb is None:
            self.first_rss_mb = float(rss)
        return rss > max(2 * self.first_rss_mb, self.first_rss_mb + _GROWTH_MB) or left.get("gpu_mb", 0) > _GROWTH_MB

    def restarted(self) -> None:
        """Its worker was started (anew)."""
        self.started, self.ready, self.lost, self.first_rss_mb = True, False, False, None

"""Where configurations come from while a sweep runs: the sampler's suggestions, and their further seeds."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from statistics import fmean, variance
from typing import TYPE_CHECKING, Any, Protocol

from reasonrl.errors import ConfigError, Mistake
from sweeps.book import Book
from sweeps.configuration import Configuration, group
from sweeps.ledger import Ledger
from sweeps.schedule import Queue
from sweeps.types import Plan, RunSpec, SpaceEntry

if TYPE_CHECKING:
    from sweeps.study import Study

DEFAULT = "default"  # the arm of a stage that its search is compared with, and no part of it
CLEARLY_BEHIND = 2.0  # standard errors of the difference to the best configuration
_INVALID_IN_A_ROW = 50


# What Optuna imports for a sampler beyond its own requirements.
_PACKAGES = {"cmaes": "cmaes", "gp": "torch"}


def check_sampler(plan: Plan) -> None:
    """ConfigError when a sampler of the plan needs a package that is not installed."""
    wanted = [("study.sampler", str(plan.study.get("sampler", "none")))]
    wanted += [(f"sweep.stages.{stage.name}.sampler", stage.sampler) for stage in plan.stages]
    mistakes = [
        Mistake(
            key,
            kind,
            f"needs the package {_PACKAGES[kind]}",
            f"Install it (pip install {_PACKAGES[kind]}), or use tpe.",
        )
        for key, kind in wanted
        if kind in _PACKAGES and importlib.util.find_spec(_PACKAGES[kind]) is None
    ]
    if mistakes:
        raise ConfigError(mistakes)


class Source(Protocol):
    """Fills the queue when it runs dry."""

    def refill(self, queue: Queue) -> None:
        """Put further runs in line, if there are any to be had now."""
        ...

    def settled(self, configuration: Configuration) -> None:
        """A run of this configuration ended."""
        ...

    @property
    def exhausted(self) -> bool:
        """True when nothing will come any more."""
        ...


class Planned:
    """The runs the plan names: all in line from the start."""

    def __init__(self, book: Book, searched: bool) -> None:
        self._configurations = book.add_planned(searched)
        self._queued = False

    def refill(self, queue: Queue) -> None:
        """Put every planned run in line, once."""
        if not self._queued:
            self._queued = True
            by_seed = sorted(
                (run for configuration in self._configurations for run in enumerate(configuration.runs)),
                key=lambda pair: pair[0],
            )
            for _, run in by_seed:
                queue.push(run)

    def settled(self, configuration: Configuration) -> None:
        """Nothing follows from a run that ended."""

    @property
    def exhausted(self) -> bool:
        """True once all are in line."""
        return self._queued


class Search:
    """Asks the study for `trials` configurations; the first seed of each runs first, the others follow.

    With `study.abandon` the other seeds of a configuration wait for the first, and are given up when its mean
    over the seeds so far lies more than CLEARLY_BEHIND standard errors behind the best (standard errors from the
    spread between seeds, pooled over all configurations with two or more; no spread known, nothing given up).
    """

    def __init__(
        self,
        plan: Plan,
        book: Book,
        study: Study,
        ledger: Ledger,
        *,
        stage: str = "",
        space: Sequence[SpaceEntry] = (),
        fixed: Mapping[str, Any] | None = None,
        overrides: Sequence[str] = (),
        sampler: str = "tpe",
        trials: int = 0,
    ) -> None:
        self._plan, self._book, self._study, self._ledger = plan, book, study, ledger
        self._stage, self._space, self._sampler, self._trials = stage, list(space), sampler, trials
        self._fixed, self._overrides = dict(fixed or {}), list(overrides)
        self._maximize = plan.study.get("direction", "maximize") == "maximize"
        self._abandon = bool(plan.study.get("abandon", True))
        self._asked, self._invalid, self._recovered = 0, 0, False
        self.configurations: list[Configuration] = []
        self._by_name: dict[str, Configuration] = {}
        self._open: dict[int, Configuration] = {}
        self._fresh: list[Configuration] = []

    # -- resuming ---------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Take in the configurations earlier commands asked for, from the specs beside their event logs."""
        specs = [
            spec
            for spec in self._book.specs()
            if spec.parent is None and spec.stage == self._stage and spec.arm != DEFAULT and self._still_the_same(spec)
        ]
        runs = [self._book.add_run(spec) for spec in specs]
        for configuration in group(runs, searched=True):
            configuration.runs.sort(key=lambda run: self._plan.seeds.index(run.spec.seed))
            have = {run.spec.seed for run in configuration.runs}
            if not self._abandon and configuration.pruned is None:
                configuration.abandoned = None
            if configuration.abandoned is None and configuration.pruned is None:
                configuration.pending_seeds = [seed for seed in self._plan.seeds if seed not in have]
            else:
                configuration.give_up(configuration.abandoned or {"why": (configuration.pruned or {}).get("title")})
            self._take(configuration)
            self._fresh.append(configuration)
        self._asked, self._recovered = len(self.configurations), True

    def _still_the_same(self, spec: RunSpec) -> bool:
        """Whether the plan would make this very run today (same code, base and space, seed still wanted)."""
        outside = any(entry.key in spec.params and not entry.holds(spec.params[entry.key]) for entry in self._space)
        if spec.seed not in self._plan.seeds or outside:
            return False
        try:
            return self._make(spec.params, spec.seed).key == spec.key
        except ConfigError:
            return False

    # -- the source -------------------------------------------------------------------------------------------

    def refill(self, queue: Queue) -> None:
        """Interrupted runs first, then seeds of configurations worth it, then a new suggestion."""
        fresh, self._fresh = self._fresh, []
        for configuration in fresh:
            self.settled(configuration)  # what an earlier command, or another coordinator, did not come to
            for run in configuration.runs:
                queue.push(run)
        if self._recovered and self._study.available:
            keys = [run.key for configuration in self.configurations for run in configuration.runs]
            self._recovered, self._asked = False, max(self._asked, self._study.num_asked(self._stage, keys))
        self._promote(queue, eager=not self._abandon)
        if len(queue) == 0 and self._asked < self._trials:
            self._ask(queue)
        if len(queue) == 0 and self._asked >= self._trials:
            # Better a seed that may turn out superfluous than an idle slot.
            self._promote(queue, eager=True, most=1)

    def settled(self, configuration: Configuration) -> None:
        """Decide about the remaining seeds of a configuration, now that one of its runs ended."""
        if configuration.abandoned is None and configuration.pending_seeds:
            why = self._why_give_up(configuration)
            if why is not None:
                last = next(run for run in configuration.runs if not run.open)
                whole = self._book.abandon(configuration, last, why)
                if whole is None:
                    self._fresh.append(configuration)  # judged again as soon as it can be written down
                else:
                    self._ledger.note("abandon", last.spec, **whole)
        if configuration.done:
            self._open.pop(id(configuration), None)

    @property
    def exhausted(self) -> bool:
        """True when every configuration was asked for and has all its seeds in line."""
        return self._asked >= self._trials and not any(c.pending_seeds for c in self._open.values())

    def _promote(self, queue: Queue, eager: bool, most: int | None = None) -> None:
        count = 0
        for configuration in list(self._open.values()):
            while configuration.pending_seeds and (eager or not any(run.open for run in configuration.runs)):
                seed = configuration.pending_seeds.pop(0)
                queue.push(self._book.add_replicate(configuration, self._make(configuration.params, seed)))
                count += 1
                if most is not None and count >= most:
                    return

    def _ask(self, queue: Queue) -> None:
        answer = self._study.ask(self._stage, self._space, self._fixed, self._sampler)
        if answer is None:
            return
        number, suggested = answer
        self._asked += 1
        params = {**self._fixed, **suggested}
        try:
            specs = [self._make(params, seed) for seed in self._plan.seeds[:1]]
        except ConfigError as error:
            self._study.reject(number, str(error))
            self._invalid += 1
            if self._invalid >= _INVALID_IN_A_ROW:
                raise
            return
        self._invalid = 0
        runs = [self._book.add_run(spec) for spec in specs]
        configuration = Configuration(self._stage, specs[0].arm, params, runs, searched=True)
        configuration.pending_seeds = list(self._plan.seeds[1:])
        known = self._by_name.get(configuration.name)
        if known is not None:
            # Asked for before: its runs are shared, the new trial is told the same.
            configuration.runs, configuration.pending_seeds = known.runs, []
            configuration.pruned, configuration.abandoned = known.pruned, known.abandoned
        self._study.attach(configuration, number)
        self._take(configuration)
        if configuration.done:
            self._study.tell(configuration)
        for run in runs:
            queue.push(run)

    def _take(self, configuration: Configuration) -> None:
        self._book.add_configuration(configuration)
        self.configurations.append(configuration)
        self._by_name.setdefault(configuration.name, configuration)
        if not configuration.done:
            self._open[id(configuration)] = configuration

    def _make(self, params: Mapping[str, Any], seed: int) -> RunSpec:
        return self._plan.make_run(params, seed, self._stage, overrides=self._overrides)

    # -- giving up --------------------------------------------------------------------------------------------

    def _why_give_up(self, configuration: Configuration) -> dict[str, Any] | None:
        if configuration.pruned is not None:
            return {"why": "pruned by metric"}
        if configuration.failed():
            return {"why": f"seed {configuration.failed()[0].spec.seed} failed"}
        if configuration.stopped():
            # One collapse already makes the configuration PRUNED; more seeds would not undo it.
            return {"why": f"seed {configuration.stopped()[0].spec.seed} was stopped by an alert"}
        if not self._abandon or not configuration.values():
            return None
        return clearly_behind(configuration, self.configurations, self._maximize)


def clearly_behind(
    configuration: Configuration, others: Sequence[Configuration], maximize: bool
) -> dict[str, Any] | None:
    """The evidence that `configuration` lies clearly behind the best of `others` on the seeds both have run.

    Differences are paired by seed; their standard error is sqrt(2 v / n) with v the variance between seeds pooled
    over configurations with two or more seeds, and n the number of shared seeds. None when it is not, or not known.
    """
    spreads = [list(other.values().values()) for other in others if len(other.values()) >= 2]
    freedom = sum(len(values) - 1 for values in spreads)
    if freedom < 2:
        return None
    pooled = sum(variance(values) * (len(values) - 1) for values in spreads) / freedom
    complete = [o for o in others if o is not configuration and o.done and not o.stopped() and o.mean() is not None]
    if not complete:
        return None
    sign = 1.0 if maximize else -1.0
    best = max(complete, key=lambda other: sign * (other.mean() or 0.0))
    mine, theirs = configuration.values(), best.values()
    shared = sorted(mine.keys() & theirs.keys())
    if not shared:
        return None
    behind = fmean(sign * (theirs[seed] - mine[seed]) for seed in shared)
    error = math.sqrt(2 * pooled / len(shared))
    if behind <= CLEARLY_BEHIND * error or behind <= 0:
        return None
    return {
        "why": f"behind the best by {behind:.4g}, {CLEARLY_BEHIND:g} standard errors are {CLEARLY_BEHIND * error:.4g}",
        "best": best.arm,
        "on_seeds": shared,
    }

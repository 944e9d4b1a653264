"""Priority stages: each searches its axis with the earlier winners fixed, and carries on only what is proven.

A stage compares its candidates with the default, which is the base with the winners of the stages before. The
best candidate is carried on when the interval of its paired difference to the default (over the seeds both have
run, at 95 % shared out among the candidates, Bonferroni) lies on the better side of zero; else the default stays.
A candidate with a stopped or failed seed cannot win. `share` splits the limits of `sweep.budget`: a stage starts
nothing more once the shares up to its own are spent; what it leaves over goes to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

from analysis.intervals import mean_interval
from sweeps.book import Book
from sweeps.budget import Budget
from sweeps.configuration import Configuration
from sweeps.ledger import Ledger
from sweeps.schedule import Queue
from sweeps.search import DEFAULT, Search
from sweeps.space import stage_cells
from sweeps.state import RunState
from sweeps.types import Plan, Stage

if TYPE_CHECKING:
    from sweeps.study import Study

LEVEL = 0.95
SPENT = "the stage's share of the budget is spent"


@dataclass
class Verdict:
    """What a stage found: the best candidate's difference to the default, its interval, and whether it is carried.

    `low` and `high` are None when there are fewer than two shared seeds, or the differences do not vary.
    """

    stage: str
    best: str | None
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    level: float = LEVEL
    num_seeds: int = 0
    num_candidates: int = 0
    carried: bool = False

    def describe(self) -> str:
        """One line: the winner with its interval, or that the default stays and why."""
        if self.best is None:
            return f"stage {self.stage}: no candidate ran to its end beside the default; the default stays"
        text = f"{self.best} differs from the default by {self.difference:+.4g}"
        if self.low is not None and self.high is not None:
            text += f" ({100 * self.level:.3g} % {self.low:+.4g} to {self.high:+.4g}, {self.num_seeds} seeds)"
        else:
            text += f" ({self.num_seeds} seed(s), no interval)"
        if self.carried:
            return f"stage {self.stage}: {text}: carried on"
        return f"stage {self.stage}: {text}: not distinguishable, the default stays"


@dataclass
class _Candidate:
    configuration: Configuration
    params: dict[str, Any] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)


class Stages:
    """The source of runs of a staged sweep (see `sweeps.search.Source`)."""

    def __init__(
        self, plan: Plan, book: Book, study: Study, ledger: Ledger, budget: Budget, say: Callable[[str], None]
    ) -> None:
        self._plan, self._book, self._study, self._ledger = plan, book, study, ledger
        self._budget, self._say = budget, say
        self._sign = 1.0 if plan.study.get("direction", "maximize") == "maximize" else -1.0
        self._fixed: dict[str, Any] = {}
        self._overrides: list[str] = []
        self._index = -1
        self._line: list[RunState] = []
        self._closed = False
        self._search: Search | None = None
        self._default: Configuration | None = None
        self._candidates: list[_Candidate] = []
        self.verdicts: list[Verdict] = []
        self._next_stage()

    @property
    def exhausted(self) -> bool:
        """True when every stage has its verdict."""
        return self._index >= len(self._plan.stages)

    def refill(self, queue: Queue) -> None:
        """The next run of this stage; when all of them have ended, the verdict and the next stage."""
        while not self.exhausted and len(queue) == 0:
            if self._unfinished() and not self._closed and self._spent() and not self._close():
                return
            while self._line and len(queue) == 0:
                queue.push(self._line.pop(0))
            if len(queue) == 0 and self._search is not None and not self._closed:
                self._search.refill(queue)
            if len(queue) or not self._stage_is_over():
                return
            self._decide()
            self._next_stage()

    def settled(self, configuration: Configuration) -> None:
        """Pass on that a run ended."""
        if self._search is not None and configuration in self._search.configurations:
            self._search.settled(configuration)

    # -- a stage ----------------------------------------------------------------------------------------------

    @property
    def _stage(self) -> Stage:
        return self._plan.stages[self._index]

    def _next_stage(self) -> None:
        self._index += 1
        self._search, self._candidates, self._line, self._closed = None, [], [], False
        if self.exhausted:
            return
        stage = self._stage
        self._default = self._configuration(DEFAULT, {}, [], searched=False)
        found = stage_cells(stage)
        if found is None:
            self._search = Search(
                self._plan, self._book, self._study, self._ledger,
                stage=stage.name, space=stage.space, fixed=self._fixed, overrides=self._overrides,
                sampler=stage.sampler, trials=stage.trials,
            )  # fmt: skip
            self._search.recover()
        else:
            for arm, texts in (stage.arms or {"": []}).items():
                for cell in found or [{}]:
                    if arm or cell:
                        name = ",".join(part for part in (arm, _label(cell)) if part)
                        made = self._configuration(name, cell, texts, searched=False)
                        self._candidates.append(_Candidate(made, cell, list(texts)))
        self._recall()
        runs = [run for configuration in self._named() for run in configuration.runs]
        for seed in self._plan.seeds:
            self._line += [run for run in runs if run.spec.seed == seed]
        for configuration in self._named():
            if configuration.done and configuration.runs:
                self._study.tell(configuration)

    def _named(self) -> list[Configuration]:
        """The default and the candidates of this stage that are known beforehand."""
        assert self._default is not None
        return [self._default, *(candidate.configuration for candidate in self._candidates)]

    def _configuration(self, arm: str, cell: Mapping[str, Any], texts: list[str], searched: bool) -> Configuration:
        params = {**self._fixed, **cell}
        runs = [
            self._book.add_run(
                self._plan.make_run(params, seed, self._stage.name, arm, overrides=[*self._overrides, *texts])
            )
            for seed in self._plan.seeds
        ]
        return self._book.add_configuration(Configuration(self._stage.name, arm, params, runs, searched))

    def _stage_is_over(self) -> bool:
        if self._unfinished() and not self._closed:
            return False
        mine = [*self._named(), *(self._search.configurations if self._search is not None else [])]
        return not any(run.open for configuration in mine for run in configuration.counted())

    def _unfinished(self) -> bool:
        return bool(self._line) or (self._search is not None and not self._search.exhausted)

    def _spent(self) -> bool:
        """True when the shares of the budget up to this stage are used up."""
        share = sum(stage.share for stage in self._plan.stages[: self._index + 1])
        if self._index == len(self._plan.stages) - 1 or share <= 0:
            return False
        spent = self._budget.spent()
        return any(spent[name] >= share * limit for name, limit in self._budget.limits.items())

    def _close(self) -> bool:
        """Give up what was not started, now that the stage's share is spent; False while it cannot be written down.

        It stands in the log of a run of this stage, since a later stage may make the very runs that are given up: the
        verdict has to come out the same when it is derived again.
        """
        runs = [run for configuration in self._named() for run in configuration.runs]
        ended = next((run for run in runs if not run.open), None)
        given_up = [run.key for run in self._line if run.status == "waiting"]
        if ended is None and any(run.status != "waiting" for run in runs):
            return False
        decision = {"stage": self._stage.name, "runs": given_up, "limits": self._budget.limits, "reason": SPENT}
        if ended is not None and not self._book.decide(ended, action="close_stage", **decision):
            return False
        if given_up:
            self._ledger.note("share_spent", stage=self._stage.name, runs=given_up)
            many = f"{len(given_up)} run(s) are not started"
            self._say(f"stage {self._stage.name}: its share of the budget is spent, {many}")
        self._give_up(given_up)
        return True

    def _recall(self) -> None:
        """Keep a stage closed that was closed before, unless the budget was changed since."""
        runs = [run for configuration in self._named() for run in configuration.runs]
        for decision in (run.closes.get(self._stage.name) for run in runs):
            if decision is not None and decision.get("limits") == self._budget.limits:
                self._give_up(decision["runs"])

    def _give_up(self, keys: Collection[str]) -> None:
        self._closed = True
        self._line = [run for run in self._line if run.key not in keys]
        for configuration in self._named():
            kept = [run for run in configuration.runs if run.key not in keys]
            if len(kept) < len(configuration.runs):
                configuration.runs = kept
                configuration.abandoned = configuration.abandoned or {"why": SPENT}

    # -- the verdict ------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        assert self._default is not None
        candidates = list(self._candidates)
        if self._search is not None:
            for configuration in self._search.configurations:
                own = {key: value for key, value in configuration.params.items() if key not in self._fixed}
                candidates.append(_Candidate(configuration, own))
        verdict, winner = judge(self._stage.name, self._default, candidates, self._sign)
        if winner is not None and verdict.carried:
            self._fixed.update(winner.params)
            self._overrides += winner.overrides
        self.verdicts.append(verdict)
        self._ledger.note(
            "winner", **{**vars(verdict), "params": dict(self._fixed), "overrides": list(self._overrides)}
        )
        self._say(verdict.describe())


def judge(
    stage: str, default: Configuration, candidates: list[_Candidate], sign: float
) -> tuple[Verdict, _Candidate | None]:
    """The best candidate by its mean paired difference to the default, and whether it is proven better.

    `sign` is +1 when more is better and -1 when less is. Differences are candidate minus default, per seed.
    """
    base = default.values()
    found = []
    for candidate in candidates:
        configuration = candidate.configuration
        values = configuration.values()
        seeds = sorted(values.keys() & base.keys())
        sick = configuration.stopped() or configuration.failed() or configuration.pruned
        same = {run.key for run in configuration.runs} == {run.key for run in default.runs}
        if seeds and not sick and not same:
            found.append(([values[seed] - base[seed] for seed in seeds], candidate))
    if not found:
        return Verdict(stage, None), None
    differences, winner = max(found, key=lambda pair: sign * fmean(pair[0]))
    level = 1.0 - (1.0 - LEVEL) / len(found)
    interval = mean_interval(differences, level).interval if len(differences) > 1 else None
    verdict = Verdict(stage, winner.configuration.arm, fmean(differences), level=level, num_seeds=len(differences))
    verdict.num_candidates = len(found)
    if interval is not None:
        verdict.low, verdict.high = interval.low, interval.high
        verdict.carried = interval.low > 0 if sign > 0 else interval.high < 0
    return verdict, winner


def _label(cell: Mapping[str, Any]) -> str:
    return ",".join(f"{key.rsplit('.', 1)[-1]}={value}" for key, value in cell.items())

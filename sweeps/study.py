"""The Optuna study of a sweep: one trial per configuration, derived from the event logs and rebuilt when lost.

How a configuration is told:
- PRUNED when an alert (or a person) stopped any of its seeds: a mean over the surviving seeds would flatter it.
  Each stopped run stands in the attribute `stops` with seed, step, code, evidence and intervention; those of the
  first are repeated as `code`, `title`, `message`, `evidence`, `intervention`; constraint `stopped` > 0.
- PRUNED when the metric pruner stopped it (attribute `pruned`).
- FAIL when a seed failed, or no value of the metric was recorded (attribute `failures`).
- COMPLETE with the mean over its seeds otherwise, also when later seeds were abandoned (attribute `abandoned`).
Intermediate values are the mean over the seeds that have come so far; with pruner=wilcoxon they are one per seed.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, check_distribution_compatibility
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from reasonrl.randomness import stream
from sweeps.configuration import Configuration
from sweeps.pruner import AlertPruner, AnyPruner, metric_pruner
from sweeps.samplers import distribution, make_sampler, parameter_name, suggest
from sweeps.storage import LOST, Database
from sweeps.trials import describe, name_of, outcome_attributes
from sweeps.types import Plan, SpaceEntry

optuna.logging.set_verbosity(optuna.logging.ERROR)
warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)

RETRY_S = 5.0  # between attempts to reach a database that is away
MAX_DEFERRED = 500


class Study:
    """The study of one sweep; a database that is away is bridged, and caught up with from the run states.

    Methods never raise because of the database: they return a neutral answer (None, False) and `available` turns
    False until `repair` has brought it back. What nobody waits for is done by `work`, after free slots were served.
    Of several coordinators only the one for which `mine` holds writes; when it goes, another catches up. `away` is True
    while the database cannot be reached.
    """

    def __init__(self, plan: Plan, warn: Callable[[str], None], mine: Callable[[], bool] = lambda: True) -> None:
        self._plan, self._warn, self._mine = plan, warn, mine
        settings = plan.study
        url = settings.get("storage") or f"sqlite:///{(plan.directory / 'study.db').resolve()}"
        self._database = Database(url)
        self._maximize = settings.get("direction", "maximize") == "maximize"
        self._by_seed = settings.get("pruner") == "wilcoxon"
        self._known: dict[str, list[FrozenTrial]] = {}
        self._deferred: deque[Callable[[], None]] = deque()
        self._tried = 0.0
        self.available = False
        self.away = False

    # -- opening, losing and finding the database -------------------------------------------------------------

    def open(self, configurations: Sequence[Configuration]) -> None:
        """Open or create the study and make it agree with what the event logs say of `configurations`."""
        self._tried = time.monotonic()
        if not self._mine():
            return
        try:
            self._connect()
            self._adopt(configurations)
            self.available, self.away = True, False
        except ValueError as error:
            # Optuna refuses a parameter whose range changed; the study is derived, so it is made anew.
            self._start_anew(f"the plan or the code changed ({error})", configurations)
        except sqlite3.DatabaseError as error:
            self._start_anew(str(error), configurations)
        except SQLAlchemyError as error:
            if "not a database" in str(error) or "malformed" in str(error):
                self._start_anew("it is damaged", configurations)
            else:
                self._lose(error)
        except LOST as error:
            self._lose(error)

    def repair(self, configurations: Sequence[Configuration]) -> None:
        """Come back to a database that was away, and rebuild one that was deleted; cheap when all is well."""
        if time.monotonic() - self._tried < RETRY_S:
            return
        self._tried = time.monotonic()
        if self.available and self._database.was_removed():
            self._warn("the study's database was removed; it is rebuilt from the event logs")
            self.available = False
        if self.available and not self._mine():
            self.suspend()
        if not self.available:
            self._forget(configurations)
            self.open(configurations)

    def suspend(self) -> None:
        """Write nothing more until it is opened again: another coordinator does."""
        self.available = False
        self._deferred.clear()

    def close(self) -> None:
        """Write what was deferred and let go of the database."""
        while self._deferred:
            self.work(MAX_DEFERRED)
        if self.available:
            with self._bridged():
                self._close_orphans()  # of stages the sweep did not come to, or not in this way
        self._database.close()

    def work(self, most: int = 10) -> bool:
        """Do up to `most` pieces of deferred work; True when some is left."""
        if len(self._deferred) > MAX_DEFERRED:
            most = len(self._deferred)
        for _ in range(min(most, len(self._deferred))):
            task = self._deferred.popleft()
            if self.available:
                with self._bridged():
                    task()
        return bool(self._deferred)

    def _connect(self) -> None:
        plan, settings = self._plan, self._plan.study
        searching = settings.get("sampler", "none") != "none" or bool(plan.stages)
        kind = settings.get("pruner", "none") if searching else "none"
        by_metric: optuna.pruners.BasePruner = optuna.pruners.NopPruner()
        if kind != "none":
            typical = plan.typical_run()
            first = int(typical.config.get("eval", {}).get("every") or 1)
            by_metric = metric_pruner(kind, int(settings.get("startup_trials", 5)), typical.steps, first)
        direction: Literal["minimize", "maximize"] = "maximize" if self._maximize else "minimize"
        study = self._database.connect(plan.name, direction, AnyPruner([AlertPruner(), by_metric]))
        for name, value in (("question", plan.question), ("metric", settings.get("metric"))):
            study.set_user_attr(name, value)

    def _adopt(self, configurations: Sequence[Configuration]) -> None:
        """Tie trials to configurations by name; close orphans; add what is missing."""
        everything = self._database.need().get_trials(deepcopy=False)
        self._check_ranges(everything)
        self._known = {}
        for trial in everything:
            self._known.setdefault(name_of(trial.user_attrs), []).append(trial)
        for configuration in configurations:
            self._take_up(configuration)
        if not self._plan.stages:
            self._check_leftover()
            self._close_orphans()

    def _take_up(self, configuration: Configuration) -> None:
        """Go on with the trial an earlier command left, or make one when the configuration has begun."""
        trials = self._known.pop(configuration.name, [])
        running = [trial for trial in trials if trial.state == TrialState.RUNNING]
        ended = [trial for trial in trials if trial.state.is_finished()]
        if running:
            configuration.trial = running.pop(0)._trial_id
            for double in running:
                self._close_orphan(double._trial_id)
        elif ended and configuration.done:
            configuration.trial, configuration.told = ended[-1]._trial_id, True
        elif any(run.status != "waiting" for run in configuration.runs):
            self._begin(configuration, {"retry_of": ended[-1].number} if ended else {})
        if configuration.trial is not None and not configuration.told:
            self._catch_up(configuration)

    def _close_orphans(self) -> None:
        """Close running trials that belong to no configuration of the plan."""
        for trials in self._known.values():
            for trial in trials:
                if not trial.state.is_finished():
                    self._close_orphan(trial._trial_id)
        self._known = {}

    def _catch_up(self, configuration: Configuration) -> None:
        if not self._by_seed:
            for step in sorted({step for run in configuration.runs for step, _ in run.values}):
                self._report_step(configuration, step)
        else:
            for seed, value in configuration.values().items():
                self._database.set_value_at(configuration.trial or 0, seed, value)
        if configuration.done:
            self._tell(configuration)

    def _check_leftover(self) -> None:
        """ValueError when a search would learn from, or be pruned by, trials whose runs it would not make today."""
        trials = [trial for trials in self._known.values() for trial in trials]
        stale = [trial for trial in trials if trial.state.is_finished() and "orphan" not in trial.user_attrs]
        if stale and self._plan.searched:
            raise ValueError(f"{len(stale)} of its trials were made by other code, or from another base")

    def _check_ranges(self, trials: Sequence[FrozenTrial]) -> None:
        """ValueError when a parameter on record has another range than the plan gives it today."""
        today: dict[str, BaseDistribution] = {}
        if self._plan.arms:
            today["arm"] = CategoricalDistribution(list(self._plan.arms))
        for stage, space in [("", self._plan.space), *((stage.name, stage.space) for stage in self._plan.stages)]:
            today.update({parameter_name(stage, entry.key): distribution(entry) for entry in space})
        for trial in trials:
            for name, old in trial.distributions.items():
                if name in today:
                    check_distribution_compatibility(old, today[name])

    def _close_orphan(self, trial_id: int) -> None:
        why = "its coordinator ended before any run of it started, or the plan changed"
        self._database.set_attributes(trial_id, {"orphan": why})
        self._database.finish(trial_id, TrialState.FAIL, None)

    def _start_anew(self, why: str, configurations: Sequence[Configuration]) -> None:
        name = self._database.set_aside()
        self._warn(f"{name} was set aside: {why}; it is rebuilt from the event logs")
        self._forget(configurations)
        self._connect()
        self._adopt(configurations)
        self.available, self.away = True, False

    def _forget(self, configurations: Iterable[Configuration]) -> None:
        self._deferred.clear()
        for configuration in configurations:
            configuration.trial, configuration.told = None, False

    def _lose(self, error: Exception) -> None:
        if not self.away:
            first = str(error).splitlines()[0][:200]
            self._warn(f"the study's database is away ({first}); the sweep goes on and catches up later")
        self.available, self.away = False, True

    @contextlib.contextmanager
    def _bridged(self) -> Iterator[None]:
        """Run database work; when the database is away, note it and go on."""
        try:
            yield
        except LOST as error:
            self._lose(error)

    # -- ask, report, tell ------------------------------------------------------------------------------------

    def ask(
        self, stage: str, space: Sequence[SpaceEntry], fixed: Mapping[str, Any], sampler: str
    ) -> tuple[int, dict[str, Any]] | None:
        """(trial id, suggested values) for the active entries of `space`; None while the database is away.

        The sampler is made anew from (study.seed, number of trials): a resumed search does not repeat its draws.
        """
        if not self.available or not self._mine():
            return None
        with self._bridged():
            study = self._database.need()
            count = len(study.get_trials(deepcopy=False))
            # generators of seeds in a row begin with values close together
            seed = int(stream("sampler", int(self._plan.study.get("seed", 0)), count).integers(2**31))
            study.sampler = make_sampler(sampler, seed, self._plan.study)
            trial = study.ask()
            params: dict[str, Any] = {}
            for entry in space:
                if entry.active({**fixed, **params}):
                    params[entry.key] = suggest(trial, parameter_name(stage, entry.key), entry)
            return trial._trial_id, params
        return None

    def num_asked(self, stage: str, keys: Iterable[str]) -> int:
        """Trials of a search that have runs among `keys`; several may share one, orphans do not count."""
        if not self.available:
            return 0
        with self._bridged():
            known, found = set(keys), self._database.need().get_trials(deepcopy=False)
            asked = [trial.user_attrs for trial in found if not {"orphan", "retry_of"} & trial.user_attrs.keys()]
            mine = [its for its in asked if "configuration" in its and its.get("stage", "") == stage]
            return sum(not known.isdisjoint(its.get("runs", {}).values()) for its in mine)
        return 0

    def attach(self, configuration: Configuration, trial_id: int) -> None:
        """Tie an asked trial to its configuration."""
        configuration.trial = trial_id
        with self._bridged():
            self._database.set_attributes(trial_id, describe(configuration, {}))

    def reject(self, trial_id: int, why: str) -> None:
        """Close an asked trial whose values make no valid run."""
        with self._bridged():
            self._database.set_attributes(trial_id, {"orphan": f"not a valid run: {why}"})
            self._database.need().tell(self._database.trial(trial_id), state=TrialState.FAIL, skip_if_finished=True)

    def begin(self, configuration: Configuration) -> None:
        """Make sure the configuration has a running trial."""
        if self.available and configuration.trial is None:
            self._deferred.append(lambda: self._begin(configuration, {}))

    def report(self, configuration: Configuration, step: int, judge: bool = True) -> bool:
        """Record the mean at `step`; True when the metric pruner, asked to `judge`, wants to stop a searched one."""
        if self._by_seed or not self.available:
            return False
        if not configuration.searched:
            self._deferred.append(lambda: self._report_step(configuration, step))
            return False
        with self._bridged():
            self._report_step(configuration, step)
            return judge and self._should_prune(configuration)
        return False

    def report_seed(self, configuration: Configuration, seed: int) -> bool:
        """Record one seed's final value (pruner=wilcoxon); True when the remaining seeds are not worth running."""
        value = configuration.values().get(seed)
        if not self._by_seed or value is None or not self.available or configuration.trial is None:
            return False
        with self._bridged():
            self._database.set_value_at(configuration.trial, seed, value)
            return configuration.searched and self._should_prune(configuration)
        return False

    def tell(self, configuration: Configuration) -> None:
        """Close the configuration's trial with its reasons and values."""
        if not self.available or configuration.told:
            return
        if not configuration.searched:
            self._deferred.append(lambda: self._begin_and_tell(configuration))
            return
        with self._bridged():
            self._begin_and_tell(configuration)

    def _begin(self, configuration: Configuration, extra: Mapping[str, Any]) -> None:
        if configuration.trial is None and configuration.name in self._known:
            self._take_up(configuration)
        if configuration.trial is None:
            values, distributions = self._fixed(configuration)
            configuration.trial = self._database.create(values, distributions, describe(configuration, extra))
            configuration.told = False

    def _begin_and_tell(self, configuration: Configuration) -> None:
        if configuration.trial is None:
            self._begin(configuration, {})
            if not configuration.told:
                self._catch_up(configuration)
        else:
            self._tell(configuration)

    def _fixed(self, configuration: Configuration) -> tuple[dict[str, Any], dict[str, BaseDistribution]]:
        """Known values and their distributions: the searched keys, else the arm's name, else nothing."""
        stage = next((stage for stage in self._plan.stages if stage.name == configuration.stage), None)
        space = {entry.key: entry for entry in (stage.space if stage else self._plan.space)}
        params = {key: value for key, value in configuration.params.items() if key in space}
        if params:
            names = {key: parameter_name(configuration.stage, key) for key in params}
            values = {names[key]: value for key, value in params.items()}
            return values, {names[key]: distribution(space[key]) for key in params}
        if configuration.arm in self._plan.arms:
            return {"arm": configuration.arm}, {"arm": CategoricalDistribution(list(self._plan.arms))}
        return {}, {}

    def _should_prune(self, configuration: Configuration) -> bool:
        return configuration.trial is not None and self._database.trial(configuration.trial).should_prune()

    def _report_step(self, configuration: Configuration, step: int) -> None:
        mean = configuration.mean_at(step)
        if mean is not None and configuration.trial is not None and not configuration.told:
            self._database.set_value_at(configuration.trial, step, mean)

    def _tell(self, configuration: Configuration) -> None:
        if configuration.trial is None or configuration.told:
            return
        trial_id, mean = configuration.trial, configuration.mean()
        self._database.set_attributes(trial_id, outcome_attributes(configuration))
        stopped = len(configuration.stopped()) if configuration.pruned is None else 0
        if stopped or configuration.searched:
            self._database.set_constraint(trial_id, "stopped", stopped / max(1, len(configuration.runs)))
        if stopped or configuration.pruned is not None:
            state, mean = TrialState.PRUNED, None
        elif configuration.failed() or mean is None:
            state, mean = TrialState.FAIL, None
        else:
            state = TrialState.COMPLETE
        if configuration.searched:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # samplers that make no use of constraints say so every time
                self._database.need().tell(self._database.trial(trial_id), mean, state, skip_if_finished=True)
        else:
            value = self._last_mean(configuration) if state == TrialState.PRUNED else mean
            self._database.finish(trial_id, state, value)
        configuration.told = True

    def _last_mean(self, configuration: Configuration) -> float | None:
        """What Optuna gives a pruned trial as its value: its last intermediate value."""
        if self._by_seed:
            return None
        last = max((step for run in configuration.runs for step, _ in run.values), default=None)
        return None if last is None else configuration.mean_at(last)

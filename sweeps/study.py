"""The Optuna study of a sweep: one trial per configuration, derived from the event logs and rebuilt when lost.

Only the coordinator opens it. How a configuration is told:
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, check_distribution_compatibility
from optuna.exceptions import OptunaError
from optuna.trial import Trial, TrialState
from sqlalchemy import event as sql_event
from sqlalchemy.exc import SQLAlchemyError

from sweeps.configuration import Configuration
from sweeps.pruner import AlertPruner, AnyPruner, metric_pruner
from sweeps.samplers import distribution, make_sampler, parameter_name, suggest
from sweeps.trials import describe, outcome_attributes
from sweeps.types import Plan, SpaceEntry

optuna.logging.set_verbosity(optuna.logging.WARNING)
warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)

RETRY_S = 5.0  # between attempts to reach a database that is away
LOST = (SQLAlchemyError, sqlite3.Error, OptunaError, OSError, KeyError)


class Study:
    """The study of one sweep; a database that is away is bridged, and caught up with from the run states.

    Methods never raise because of the database: they return a neutral answer (None, False) and `available` turns
    False until `repair` has brought it back.
    """

    def __init__(self, plan: Plan, warn: Callable[[str], None]) -> None:
        self._plan, self._warn = plan, warn
        settings = plan.study
        self._url = settings.get("storage") or f"sqlite:///{(plan.directory / 'study.db').resolve()}"
        self._path = Path(self._url.removeprefix("sqlite:///")) if self._url.startswith("sqlite:///") else None
        self._maximize = settings.get("direction", "maximize") == "maximize"
        self._by_seed = settings.get("pruner") == "wilcoxon"
        self._inode: int | None = None
        self._tried = 0.0
        self._study: optuna.Study | None = None
        self.available = False
        self._away = False

    # -- opening, losing and finding the database -------------------------------------------------------------

    def open(self, configurations: Sequence[Configuration]) -> None:
        """Open or create the study and make it agree with what the event logs say of `configurations`."""
        self._tried = time.monotonic()
        try:
            self._connect()
            self._adopt(configurations)
            self.available, self._away = True, False
        except ValueError as error:
            # Optuna refuses a parameter whose range changed: the study is derived, so it is made anew.
            self._set_aside(f"the arms or the search space changed ({error})", configurations)
        except sqlite3.DatabaseError as error:
            self._set_aside(str(error), configurations)
        except SQLAlchemyError as error:
            if "not a database" in str(error) or "malformed" in str(error):
                self._set_aside("it is damaged", configurations)
            else:
                self._lose(error)
        except LOST as error:
            self._lose(error)

    def repair(self, configurations: Sequence[Configuration]) -> None:
        """Come back to a database that was away, and rebuild one that was deleted; cheap when all is well."""
        if time.monotonic() - self._tried < RETRY_S:
            return
        self._tried = time.monotonic()
        if self.available and self._path is not None and _inode(self._path) != self._inode:
            self._warn(f"{self._path.name} was removed; it is rebuilt from the event logs")
            self.available = False
        if not self.available:
            self._forget(configurations)
            self.open(configurations)

    def close(self) -> None:
        """Let go of the database."""
        if self._study is not None:
            with contextlib.suppress(*LOST):
                self._storage.remove_session()
                self._backend.engine.dispose()

    def _connect(self) -> None:
        settings = self._plan.study
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._backend = optuna.storages.RDBStorage(self._url, engine_kwargs={"connect_args": {"timeout": 10}})
            sql_event.listen(self._backend.engine, "connect", _set_pragmas)
            self._backend.engine.dispose()
        else:
            self._backend = optuna.storages.RDBStorage(self._url)
        self._storage = optuna.storages.get_storage(self._backend)
        last = max((run.steps for run in self._plan.runs), default=1)
        kind = settings.get("pruner", "none") if self._searching else "none"
        first = int(self._plan.runs[0].config.get("eval", {}).get("every", 1)) if self._plan.runs else 1
        by_metric = metric_pruner(kind, int(settings.get("startup_trials", 5)), last, first)
        self._study = optuna.create_study(
            study_name=self._plan.name,
            storage=self._storage,
            direction="maximize" if self._maximize else "minimize",
            pruner=AnyPruner([AlertPruner(), by_metric]),
            load_if_exists=True,
        )
        for name, value in (("question", self._plan.question), ("metric", settings.get("metric"))):
            self._study.set_user_attr(name, value)
        self._inode = _inode(self._path) if self._path else None

    @property
    def _searching(self) -> bool:
        return self._plan.study.get("sampler", "none") != "none" or bool(self._plan.stages)

    def _adopt(self, configurations: Sequence[Configuration]) -> None:
        """Tie trials to configurations by name; close orphans; add what is missing."""
        study = self._need()
        known: dict[str, list[optuna.trial.FrozenTrial]] = {}
        everything = study.get_trials(deepcopy=False)
        self._check_ranges(everything)
        for trial in everything:
            known.setdefault(trial.user_attrs.get("configuration", ""), []).append(trial)
        for configuration in configurations:
            trials = known.get(configuration.name, [])
            running = [trial for trial in trials if trial.state == TrialState.RUNNING]
            ended = [trial for trial in trials if trial.state.is_finished()]
            if running:
                configuration.trial = running.pop(0).number
                for double in running:
                    self._close_orphan(double.number)
            elif ended and configuration.done:
                configuration.trial, configuration.told = ended[-1].number, True
            elif any(run.status != "waiting" for run in configuration.runs):
                self._begin(configuration, {"retry_of": ended[-1].number} if ended else {})
            if configuration.trial is not None and not configuration.told:
                self._catch_up(configuration)
        names = {configuration.name for configuration in configurations}
        for name, trials in known.items():
            for trial in trials:
                if name not in names and not trial.state.is_finished():
                    self._close_orphan(trial.number)

    def _catch_up(self, configuration: Configuration) -> None:
        if not self._by_seed:
            for step in sorted({step for run in configuration.runs for step, _ in run.values}):
                self._report_step(configuration, step)
        else:
            for seed, value in configuration.values().items():
                self._set_intermediate(configuration, seed, value)
        if configuration.done:
            self._tell(configuration)

    def _close_orphan(self, number: int) -> None:
        study = self._need()
        trial = Trial(study, self._trial_id(number))
        trial.set_user_attr("orphan", "its coordinator ended before any run of it started, or the plan changed")
        study.tell(number, state=TrialState.FAIL, skip_if_finished=True)

    def _set_aside(self, why: str, configurations: Sequence[Configuration]) -> None:
        if self._path is None:
            raise optuna.exceptions.StorageInternalError(f"The study at {self._url} cannot be used: {why}.")
        self.close()
        for suffix in ("", "-wal", "-shm"):
            path = Path(f"{self._path}{suffix}")
            if path.exists():
                path.rename(path.with_name(f"{path.name}.set-aside-{int(time.time())}"))
        self._warn(f"{self._path.name} was set aside: {why}; it is rebuilt from the event logs")
        self._forget(configurations)
        self._connect()
        self._adopt(configurations)
        self.available = True

    def _forget(self, configurations: Iterable[Configuration]) -> None:
        for configuration in configurations:
            configuration.trial, configuration.told = None, False

    def _lose(self, error: Exception) -> None:
        if not self._away:
            first = str(error).splitlines()[0][:200]
            self._warn(f"the study's database is away ({first}); the sweep goes on and catches up later")
        self.available, self._away = False, True

    @contextlib.contextmanager
    def _bridged(self) -> Iterator[None]:
        """Run database work; when the database is away, note it and go on."""
        try:
            yield
        except LOST as error:
            self._lose(error)

    def _need(self) -> optuna.Study:
        if self._study is None:
            raise OSError("the study is not open")
        return self._study

    def _trial_id(self, number: int) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._need()._study_id, number)

    # -- ask, report, tell ------------------------------------------------------------------------------------

    def begin(self, configuration: Configuration) -> None:
        """Make sure the configuration has a running trial."""
        if self.available and configuration.trial is None:
            with self._bridged():
                self._begin(configuration, {})

    def ask(
        self, stage: str, space: Sequence[SpaceEntry], fixed: Mapping[str, Any], sampler: str
    ) -> tuple[int, dict[str, Any]] | None:
        """(trial number, suggested values) for the active entries of `space`; None while the database is away.

        The sampler is made anew from (study.seed, number of trials): a resumed search does not repeat its draws.
        """
        if not self.available:
            return None
        with self._bridged():
            study = self._need()
            count = len(study.get_trials(deepcopy=False))
            study.sampler = make_sampler(sampler, int(self._plan.study.get("seed", 0)) + count, self._plan.study)
            trial = study.ask()
            params: dict[str, Any] = {}
            for entry in space:
                if entry.active({**fixed, **params}):
                    params[entry.key] = suggest(trial, parameter_name(stage, entry.key), entry)
            return trial.number, params
        return None

    def attach(self, configuration: Configuration, number: int) -> None:
        """Tie an asked trial to its configuration."""
        configuration.trial = number
        with self._bridged():
            trial = Trial(self._need(), self._trial_id(number))
            for name, value in describe(configuration, {}).items():
                trial.set_user_attr(name, value)

    def reject(self, number: int, why: str) -> None:
        """Close an asked trial whose values make no valid run."""
        with self._bridged():
            study = self._need()
            trial = Trial(study, self._trial_id(number))
            trial.set_user_attr("orphan", f"not a valid run: {why}")
            study.tell(number, state=TrialState.FAIL, skip_if_finished=True)

    def report(self, configuration: Configuration, step: int) -> bool:
        """Record the mean at `step`; True when the metric pruner wants to stop this searched configuration."""
        if not self.available or configuration.trial is None or configuration.told:
            return False
        with self._bridged():
            if self._by_seed:
                return False
            self._report_step(configuration, step)
            return configuration.searched and self._should_prune(configuration)
        return False

    def report_seed(self, configuration: Configuration, seed: int) -> bool:
        """Record one seed's final value (pruner=wilcoxon); True when the remaining seeds are not worth running."""
        value = configuration.values().get(seed)
        if not self._by_seed or value is None or not self.available or configuration.trial is None:
            return False
        with self._bridged():
            self._set_intermediate(configuration, seed, value)
            return configuration.searched and self._should_prune(configuration)
        return False

    def tell(self, configuration: Configuration) -> None:
        """Close the configuration's trial with its reasons and values."""
        if self.available and not configuration.told:
            with self._bridged():
                if configuration.trial is None:
                    self._begin(configuration, {})
                    self._catch_up(configuration)
                else:
                    self._tell(configuration)

    def _should_prune(self, configuration: Configuration) -> bool:
        return Trial(self._need(), self._trial_id(configuration.trial or 0)).should_prune()

    def _begin(self, configuration: Configuration, extra: Mapping[str, Any]) -> None:
        study = self._need()
        values, distributions = self._fixed(configuration)
        study.enqueue_trial(values, user_attrs=describe(configuration, extra))
        trial = study.ask(fixed_distributions=distributions)
        configuration.trial, configuration.told = trial.number, False

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

    def _check_ranges(self, trials: Sequence[optuna.trial.FrozenTrial]) -> None:
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

    def _report_step(self, configuration: Configuration, step: int) -> None:
        mean = configuration.mean_at(step)
        if mean is not None:
            self._set_intermediate(configuration, step, mean)

    def _set_intermediate(self, configuration: Configuration, step: int, value: float) -> None:
        # Trial.report keeps the first value of a step; the mean changes as more seeds get there.
        number = self._trial_id(configuration.trial or 0)
        self._storage.set_trial_intermediate_value(number, step, value)

    def _tell(self, configuration: Configuration) -> None:
        study = self._need()
        trial = Trial(study, self._trial_id(configuration.trial or 0))
        for name, value in outcome_attributes(configuration).items():
            trial.set_user_attr(name, value)
        stopped = len(configuration.stopped()) if configuration.pruned is None else 0
        trial.set_constraint("stopped", stopped / max(1, len(configuration.runs)))
        number, mean = trial.number, configuration.mean()
        if stopped or configuration.pruned is not None:
            study.tell(number, state=TrialState.PRUNED, skip_if_finished=True)
        elif configuration.failed() or mean is None:
            study.tell(number, state=TrialState.FAIL, skip_if_finished=True)
        else:
            study.tell(number, mean, skip_if_finished=True)
        configuration.told = True

    def best(self) -> float | None:
        """The best value told so far."""
        with self._bridged():
            try:
                return self._need().best_value
            except ValueError:
                return None
        return None


def _set_pragmas(connection: Any, _: Any) -> None:
    """WAL lets a dashboard read while the coordinator writes; NORMAL is safe there, and the logs are the truth."""
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.close()


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None

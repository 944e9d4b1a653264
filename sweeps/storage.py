"""The study's database: opened by the coordinator alone, in WAL mode, and written with as few statements as can be.

Trials of an ablation are written through Optuna's storage interface: `Study.ask` and `Study.tell` read every trial
back from the database several times, which costs more than a short trial itself.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import OptunaError
from optuna.trial import TrialState
from sqlalchemy import event as sql_event
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

LOST = (SQLAlchemyError, sqlite3.Error, OptunaError, OSError, KeyError)
BUSY_S = 10  # how long SQLite waits for another writer


class Database:
    """One Optuna study behind a URL; `study` is there once `connect` has succeeded. Trials are named by their id."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.path = Path(url.removeprefix("sqlite:///")) if url.startswith("sqlite:///") else None
        self.study: optuna.Study | None = None
        self._inode: int | None = None

    def connect(
        self, name: str, direction: Literal["minimize", "maximize"], pruner: optuna.pruners.BasePruner
    ) -> optuna.Study:
        """Open the study, or create it."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._backend = optuna.storages.RDBStorage(self.url, engine_kwargs={"connect_args": {"timeout": BUSY_S}})
            sql_event.listen(self._backend.engine, "connect", _set_pragmas)
            self._backend.engine.dispose()  # connections made before the listener have other settings
        else:
            self._backend = optuna.storages.RDBStorage(_driver(self.url), engine_kwargs={"pool_pre_ping": True})
        self._storage = optuna.storages.get_storage(self._backend)
        self.study = optuna.create_study(
            study_name=name, storage=self._storage, direction=direction, pruner=pruner, load_if_exists=True
        )
        self._inode = _inode(self.path) if self.path else None
        return self.study

    def close(self) -> None:
        """Let go of the database."""
        if self.study is not None:
            with contextlib.suppress(*LOST):
                self._storage.remove_session()
                self._backend.engine.dispose()

    def was_removed(self) -> bool:
        """True when the file under our feet is not the one that was opened."""
        return self.path is not None and _inode(self.path) != self._inode

    def set_aside(self) -> str:
        """Rename the file, or the study where it shares a server, to make room for a new one; returns what it was."""
        if self.path is None:
            name = self.need().study_name
            rename = text("UPDATE studies SET study_name = :aside WHERE study_name = :name")
            with self._backend.engine.begin() as connection:
                connection.execute(rename, {"aside": f"{name}.set-aside-{int(time.time())}", "name": name})
            self.close()
            return f"study {name}"
        self.close()
        for suffix in ("", "-wal", "-shm"):
            path = Path(f"{self.path}{suffix}")
            if path.exists():
                path.rename(path.with_name(f"{path.name}.set-aside-{int(time.time())}"))
        return self.path.name

    def create(
        self, params: Mapping[str, Any], distributions: Mapping[str, BaseDistribution], attributes: Mapping[str, Any]
    ) -> int:
        """Add a running trial in one transaction; returns its id."""
        template = optuna.trial.FrozenTrial(
            number=-1,
            state=TrialState.RUNNING,
            value=None,
            datetime_start=datetime.now(),
            datetime_complete=None,
            params=dict(params),
            distributions=dict(distributions),
            user_attrs=dict(attributes),
            system_attrs={},
            intermediate_values={},
            trial_id=-1,
        )
        return int(self._storage.create_new_trial(self._study_id, template_trial=template))

    def set_attributes(self, trial_id: int, attributes: Mapping[str, Any]) -> None:
        """Write user attributes of a running trial."""
        for name, value in attributes.items():
            self._storage.set_trial_user_attr(trial_id, name, value)

    def set_constraint(self, trial_id: int, name: str, value: float) -> None:
        """Write a constraint of a running trial; above 0 means infeasible to the samplers."""
        self._storage.set_trial_system_attr(trial_id, f"constraints:{name}", value)

    def set_value_at(self, trial_id: int, step: int, value: float) -> None:
        """Write, or write again, an intermediate value (Trial.report would keep the first)."""
        self._storage.set_trial_intermediate_value(trial_id, step, value)

    def finish(self, trial_id: int, state: TrialState, value: float | None) -> None:
        """End a running trial without the sampler's after-work; a trial that has ended stays as it is."""
        values = None if value is None else [value]
        with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
            self._storage.set_trial_state_values(trial_id, state, values)

    def trial(self, trial_id: int) -> optuna.Trial:
        """A live trial by its id."""
        return optuna.Trial(self.need(), trial_id)

    def need(self) -> optuna.Study:
        """The study; OSError before it was opened."""
        if self.study is None:
            raise OSError("the study is not open")
        return self.study

    @property
    def _study_id(self) -> int:
        return self.need()._study_id


def _driver(url: str) -> str:
    """The URL with psycopg named as the driver, where none is."""
    scheme, _, rest = url.partition("://")
    return f"postgresql+psycopg://{rest}" if scheme in ("postgres", "postgresql") else url


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

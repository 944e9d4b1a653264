"""What the rules look at: series of train metrics, held-out scores, and the present row. Constant work per row."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from typing import Any

from reasonrl.alerts.series import Scores, Series, decode, encode
from reasonrl.alerts.vocabulary import is_score, is_vital, part_kind

BELOW_BEST = 0.07  # a held-out score this far (relative) under its best counts as fallen


class History:
    """Push one row at a time, then read series, scores and parts.

    window: rows and rollout steps of a window, whichever are more. unit: log steps per rollout step.
    tracked: train metrics to remember, besides every reward part. group_size: rollouts per problem, 0 if unknown.
    evaluation: problems and samples of each in one evaluation, 0 if unknown.
    """

    PLAIN = (
        "rows", "started", "late_rows", "bad_rows", "bad_fields", "bad_vital", "first_step", "estimated", "raised",
        "streaks", "since",
    )  # fmt: skip

    def __init__(
        self,
        window: int,
        unit: float,
        tracked: Iterable[str],
        group_size: int = 0,
        evaluation: tuple[int, int] = (0, 0),
    ) -> None:
        self.window, self.unit, self.group_size = window, unit, group_size
        self.problems, self.answers = evaluation[0], evaluation[0] * evaluation[1]
        self.tracked = frozenset(tracked)
        self.train: dict[str, Series] = {}
        self.held_out: dict[str, Scores] = {}
        self.row: dict[str, float] = {}
        self.cache: dict[str, Any] = {}  # readings of the present row, shared by the rules
        self.step, self.first_step = -math.inf, 0.0
        self.rows = 0
        self.started = False  # whether a train row has been seen
        self.late_rows = 0  # rows from before the last step, left out
        self.bad_rows = 0  # rows in a row with a non-finite vital field
        self.bad_fields: list[str] = []
        self.bad_vital = False
        self.estimated: list[str] = []  # metrics that are lower bounds, not logged values
        self.raised: dict[str, list[Any]] = {}  # per rule: severity and badness last raised
        self.streaks: dict[str, list[int]] = {}  # per rule: findings in a row of at least note, flag, stop
        self.since: dict[str, float] = {}  # per rule: step at which its present streak began
        self.seen: set[str] = set()
        self._kinds: dict[str, int] = {}  # per name: 0 unused, 1 train metric, 2 held-out score

    # ---- writing
    def push(self, step: float, metrics: Mapping[str, float]) -> set[str]:
        """Add a row and return the names that got a new finite value.

        Several rows of one step are merged. A row from before the last step is counted in `late_rows` and left
        out, unless it holds evaluations only (those may arrive late).
        """
        if step < self.step and not all(name.startswith("eval/") for name in metrics):
            self.late_rows += 1
            self.bad_fields, self.bad_vital = [], False
            return set()
        if not self.started and not all(name.startswith("eval/") for name in metrics):
            self.started, self.first_step = True, step  # an evaluation before training starts no clock
        self.rows += 1
        self.step = max(self.step, step)
        self.cache = {}
        row = {name: float(value) for name, value in metrics.items()}
        self._note_bad(row)
        self._derive(row)
        self.row = row
        fresh = set()
        kinds, train = self._kinds, self.train
        for name, value in row.items():
            kind = kinds.get(name)
            if kind is None:
                kind = kinds[name] = self._kind(name)
            if kind == 0 or value - value != 0:  # NaN or infinite; cheaper than math.isfinite
                continue
            fresh.add(name)
            if kind == 2:
                self._score(name, step, value)
            elif name in train:
                train[name].push(step, value)
            else:
                series = train[name] = self._new_series(name)
                series.push(step, value)
        if not fresh <= self.seen:
            self.seen |= fresh
        return fresh

    def _kind(self, name: str) -> int:
        if name in self.tracked or part_kind(name):
            return 1
        return 2 if is_score(name) else 0

    def _new_series(self, name: str) -> Series:
        return Series(self.window, self.unit, trend=name == "reward/total")

    def _new_scores(self, name: str) -> Scores:
        return Scores(self.problems if name == "eval/majority" else self.answers)  # one vote per problem

    def _note_bad(self, row: Mapping[str, float]) -> None:
        bad = [name for name, value in row.items() if value - value != 0]
        vital = any(is_vital(name) for name in bad)
        self.bad_fields, self.bad_vital = bad, vital
        if vital:
            self.bad_rows += 1
        elif self.bad_rows and any(is_vital(name) for name in row):  # an eval-only row breaks no streak
            self.bad_rows = 0

    def _derive(self, row: dict[str, float]) -> None:
        """Fill group shares the trainer did not log with what its other numbers prove (lower bounds)."""
        if "groups/flat" not in row:
            if "groups/all_right" in row and "groups/all_wrong" in row:
                row["groups/flat"] = row["groups/all_right"] + row["groups/all_wrong"]
            elif _finite(row, "reward/std"):
                self._estimate(row, "groups/flat", float(row["reward/std"] < 1e-8))
            elif _finite(row, "advantage/max", "advantage/min"):
                self._estimate(row, "groups/flat", float(row["advantage/max"] == row["advantage/min"]))
        if "groups/all_wrong" not in row and _finite(row, "groups/flat", "reward/total"):
            reward, seen = row["reward/total"], self.train.get("reward/total")
            top, low = (max(seen.highest, reward), min(seen.lowest, reward)) if seen else (reward, reward)
            if low >= 0:  # every all-right group lifts the mean by its share of the best reward
                share = reward / top if top > 0 else 0.0
                self._estimate(row, "groups/all_wrong", max(0.0, row["groups/flat"] - share))

    def _estimate(self, row: dict[str, float], name: str, value: float) -> None:
        row[name] = value
        if name not in self.estimated:
            self.estimated.append(name)

    def _score(self, name: str, step: float, value: float) -> None:
        scores = self.held_out.get(name)
        if scores is None:
            scores = self.held_out[name] = self._new_scores(name)
        reward = self.train.get("reward/total")
        scores.push(step, value, reward.mean() if reward else None, BELOW_BEST)

    # ---- reading
    def series(self, name: str) -> Series | None:
        """The series of a metric once one window is full, else None."""
        series = self.train.get(name)
        return series if series is not None and series.best is not None else None

    def ready(self, name: str) -> Series | None:
        """The series of a metric once its baseline is frozen, else None."""
        series = self.train.get(name)
        return series if series is not None and series.baseline is not None else None

    def parts(self, kind: str) -> list[tuple[str, Series]]:
        """Reward parts of one kind ('format', 'correct', 'other') that have a baseline."""
        names = [name for name in self.train if part_kind(name) == kind]
        return [(name, series) for name in names if (series := self.ready(name)) is not None]

    def rollouts(self) -> float:
        """Rollout steps since the first row."""
        return (self.step - self.first_step) / self.unit if self.started else 0.0

    def spacing(self) -> float:
        """Mean distance of two rows in log steps."""
        return (self.step - self.first_step) / max(1, self.rows - 1)

    def held(self, key: str) -> int:
        """How many evaluations in a row a rule has found something, this one included."""
        return self.streaks[key][0] + 1 if key in self.streaks else 1

    def held_steps(self, key: str) -> float:
        """For how many rollout steps a rule has found something without a break."""
        return (self.step - self.since.get(key, self.step)) / self.unit

    # ---- state
    def state(self) -> dict[str, Any]:
        """Return everything as JSON-able data."""
        data: dict[str, Any] = {name: copy.deepcopy(getattr(self, name)) for name in self.PLAIN}
        data["raised"] = {key: [severity, encode(badness)] for key, (severity, badness) in self.raised.items()}
        data["step"] = encode(self.step)
        data["row"] = {name: encode(value) for name, value in self.row.items()}
        data["seen"] = sorted(self.seen)
        data["train"] = {name: series.state() for name, series in self.train.items()}
        data["held_out"] = {name: scores.state() for name, scores in self.held_out.items()}
        return data

    def load_state(self, data: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        for name in self.PLAIN:
            setattr(self, name, copy.deepcopy(data[name]))
        self.raised = {key: [severity, decode(badness)] for key, (severity, badness) in data["raised"].items()}
        self.step = decode(data["step"])
        self.row = {name: decode(value) for name, value in data["row"].items()}
        self.seen = set(data["seen"])
        self.cache, self.train, self.held_out = {}, {}, {}
        for name, state in data["train"].items():
            self.train[name] = self._new_series(name)
            self.train[name].load_state(state)
        for name, state in data["held_out"].items():
            self.held_out[name] = self._new_scores(name)
            self.held_out[name].load_state(state)


def _finite(row: Mapping[str, float], *names: str) -> bool:
    """True when a row has a finite value for every name: NaN compares as false, which would read as "not flat"."""
    return all(name in row and row[name] - row[name] == 0 for name in names)

"""What the alert rules look at: per-metric windows, baselines, bests and held-out scores, all of fixed size.

Units: `step` is the log's own step; windows are asked for in rollout steps and rows, and the longer one counts.
Nothing here grows with the run: every series keeps a few ring buffers, so one step costs the same at 10 and at
100,000 rows. Everything can be written to JSON and read back, and a history read back continues identically.
"""

from __future__ import annotations

import copy
import functools
import math
import re
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

MAX_ROWS = 4096
EVAL_NOT_SCORES = frozenset(
    "loss length truncated entropy kl std runtime second clip epoch flat step steps token tokens clipped time min max "
    "ratio majority samples problems count lr error penalty perplexity ppl format".split()
)
CORRECT_WORDS = (
    "correct",
    "accura",
    "answer",
    "solv",
    "success",
    "succeed",
    "pass",
    "exact",
    "check_",
    "test",
    "/acc",
)
FORMAT_WORDS = (
    "format", "xml", "tag", "think", "compil", "struct", "json", "syntax", "style", "function_works", "proxy",
)  # fmt: skip
NOT_PARTS = ("reward/total", "reward/std")


class Level(NamedTuple):
    """A mean over a window, its sample std, the rows in it, and its first and last step."""

    mean: float
    std: float
    rows: int
    start: float
    end: float

    @property
    def window(self) -> list[float]:
        """First and last step of the window, as the evidence of an alert gives it."""
        return [self.start, self.end]


class Window:
    """The last `rows` rows or the last `span` log steps of one metric, whichever is longer."""

    __slots__ = ("rows", "span", "items")

    def __init__(self, rows: int, span: float) -> None:
        self.rows, self.span = rows, span
        self.items: deque[tuple[float, float]] = deque()

    def push(self, step: float, value: float) -> None:
        items = self.items
        items.append((step, value))
        while len(items) > self.rows and (step - items[1][0] + 1 >= self.span or len(items) > MAX_ROWS):
            items.popleft()

    @property
    def full(self) -> bool:
        items = self.items
        return len(items) >= self.rows and items[-1][0] - items[0][0] + 1 >= min(self.span, MAX_ROWS)

    def mean(self) -> float:
        items = self.items
        return sum([value for _, value in items]) / len(items)

    def level(self) -> Level:
        values = [value for _, value in self.items]
        mean = sum(values) / len(values)
        std = (
            math.sqrt(sum([(v - mean) ** 2 for v in values]) / (len(values) - 1)) if len(values) > 1 else 0.0
        )
        return Level(mean, std, len(values), self.items[0][0], self.items[-1][0])

    def low(self) -> float:
        return min(value for _, value in self.items)

    def high(self) -> float:
        return max(value for _, value in self.items)


class Series:
    """One train metric: two windows, a frozen baseline, the best window so far, and sums over the whole run."""

    FIELDS = (
        "count", "first", "first_step", "last", "last_step", "lowest", "highest", "baseline", "best", "worst",
        "rise_mean", "rise_row", "block_sum", "block_rows", "block_start", "sums", "early_sum", "early_rows",
        "opening",
    )  # fmt: skip
    __slots__ = (*FIELDS, "short", "long", "pool", "blocks", "unit")

    def __init__(self, window: int, unit: float) -> None:
        self.unit = unit
        self.short = Window(max(2, window // 2), window * unit / 2)
        self.long = Window(window, window * unit)
        self.pool = Window(window, window * unit)
        self.blocks: deque[tuple[float, float]] = deque(maxlen=8)
        self.count, self.rise_row, self.block_rows, self.early_rows = 0, 0, 0, 0
        self.first = self.last = self.first_step = self.last_step = 0.0
        self.lowest, self.highest = math.inf, -math.inf
        self.baseline: Level | None = None
        self.best: Level | None = None
        self.worst: Level | None = None
        self.rise_mean = -math.inf
        self.block_sum = self.block_start = self.early_sum = 0.0
        self.sums = [0.0] * 5
        self.opening = 0.0  # mean of the first full window, nothing left out

    def push(self, step: float, value: float) -> None:
        """Add one finite value; constant work."""
        if not self.count:
            self.first, self.first_step, self.block_start = value, step, step
        self.count += 1
        self.last, self.last_step = value, step
        self.lowest, self.highest = min(self.lowest, value), max(self.highest, value)
        self.short.push(step, value)
        self.long.push(step, value)
        if self.early_rows < 3:
            self.early_sum += value
            self.early_rows += 1
        # The first three rows are left out of the baseline, but never more than ten rollout steps of a sparse log.
        if self.baseline is None and (self.count > 3 or step - self.first_step >= 10 * self.unit):
            self.pool.push(step, value)
            if self.pool.full:
                self.baseline = self.pool.level()
        if self.long.full:
            self._track_extremes()
        self._track_blocks(step, value)
        self._track_trend(step, value)

    def _track_extremes(self) -> None:
        mean = self.long.mean()
        if self.best is None:
            self.opening = mean
        if self.best is None or mean > self.best.mean:
            self.best = self.long.level()
        if self.worst is None or mean < self.worst.mean:
            self.worst = self.long.level()
        if (
            mean > self.rise_mean + 0.02 * max(self.best.mean - min(0.0, self.lowest), 0.0)
            or self.rise_row == 0
        ):
            self.rise_mean, self.rise_row = mean, self.count

    def _track_blocks(self, step: float, value: float) -> None:
        self.block_sum += value
        self.block_rows += 1
        if self.block_rows >= self.long.rows and step - self.block_start + 1 >= self.long.span:
            self.blocks.append((step, self.block_sum / self.block_rows))
            self.block_sum, self.block_rows, self.block_start = 0.0, 0, step + 1

    def _track_trend(self, step: float, value: float) -> None:
        mean_x, mean_y, xx, xy, yy = self.sums
        dx, dy = step - mean_x, value - mean_y
        mean_x += dx / self.count
        mean_y += dy / self.count
        self.sums = [
            mean_x,
            mean_y,
            xx + dx * (step - mean_x),
            xy + dx * (value - mean_y),
            yy + dy * (value - mean_y),
        ]

    @property
    def early(self) -> float:
        """Mean of the first three rows."""
        return self.early_sum / self.early_rows

    def trend(self) -> tuple[float, float]:
        """Return (fitted change from the first to the last step, its t statistic) of a straight line."""
        _, _, xx, xy, yy = self.sums
        if self.count < 3 or xx <= 0:
            return 0.0, 0.0
        slope = xy / xx
        error = math.sqrt(max(yy - slope * xy, 0.0) / (self.count - 2) / xx)
        change = slope * (self.last_step - self.first_step)
        return change, slope / error if error else math.copysign(math.inf, slope) if slope else 0.0

    def floor(self) -> float:
        """The lowest level a fall is measured against: 0, or the lowest value seen when that is negative."""
        return min(0.0, self.lowest)

    def state(self) -> dict[str, Any]:
        """Return everything as JSON-able data."""
        data = {name: getattr(self, name) for name in self.FIELDS}
        for name in ("short", "long", "pool", "blocks"):
            holder = getattr(self, name)
            data[name] = [list(item) for item in (holder.items if isinstance(holder, Window) else holder)]
        for name in ("baseline", "best", "worst"):
            data[name] = list(data[name]) if data[name] else None
        data["sums"] = list(self.sums)
        return {name: _encode(value) for name, value in data.items()}

    def load_state(self, data: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        for name in self.FIELDS:
            setattr(self, name, _decode(data[name]))
        self.sums = list(data["sums"])
        for name in ("baseline", "best", "worst"):
            setattr(self, name, Level(*data[name]) if data[name] else None)
        for name in ("short", "long", "pool"):
            getattr(self, name).items = deque((step, value) for step, value in data[name])
        self.blocks = deque(((step, value) for step, value in data["blocks"]), maxlen=8)


class Scores:
    """One held-out score (higher is better): its best, the evaluations since, and its noise."""

    FIELDS = (
        "count", "first", "last", "last_step", "previous", "best", "best_step", "best_row", "best_reward",
        "jump_sum", "jump_max", "below",
    )  # fmt: skip
    __slots__ = FIELDS

    def __init__(self) -> None:
        self.count = self.best_row = self.below = 0
        self.first = self.last = self.last_step = self.previous = self.best = self.best_step = 0.0
        self.best_reward: float | None = None
        self.jump_sum = self.jump_max = 0.0

    def push(self, step: float, value: float, reward: float | None, drop: float) -> None:
        """Add one evaluation; `reward` is the train level now, `drop` the relative fall that counts as below best."""
        if not self.count:
            self.first = value
        else:
            jump = abs(value - self.last)
            self.jump_sum += jump
            self.jump_max = max(self.jump_max, jump)
        self.count += 1
        self.previous, self.last, self.last_step = self.last, value, step
        if self.count == 1 or value > self.best:
            self.best, self.best_step, self.best_row, self.best_reward = value, step, self.count, reward
        elif self.best_reward is None:
            self.best_reward = reward
        self.below = self.below + 1 if self.fallen(drop) else 0

    def noise(self) -> float:
        """Std of one evaluation, from the mean absolute jump without its largest (Gaussian: 1.128 std)."""
        assumed = math.sqrt(max(self.best * (1 - self.best), 0.0) / 800) if 0 <= self.best <= 1 else 0.0
        if self.count < 4:
            return assumed
        return max((self.jump_sum - self.jump_max) / (self.count - 2) / 1.128, assumed / 3)

    def fallen(self, drop: float, deviations: float = 3.0) -> bool:
        """True when the last evaluation is `drop` (relative) and three noise deviations under the best."""
        lost = self.best - self.last
        return self.count > 1 and lost > drop * abs(self.best) and lost > deviations * self.noise()

    def state(self) -> list[Any]:
        """Return everything as JSON-able data."""
        return [getattr(self, name) for name in self.FIELDS]

    def load_state(self, data: Iterable[Any]) -> None:
        """Continue from what `state` returned."""
        for name, value in zip(self.FIELDS, data, strict=True):
            setattr(self, name, value)


def _encode(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _decode(value: Any) -> Any:
    return float(value) if isinstance(value, str) else value


@functools.cache
def words(name: str) -> frozenset[str]:
    """The lower-case words of a metric name, split at slashes, underscores, dashes, dots and blanks."""
    return frozenset(re.split(r"[/_\-. ]+", name.lower()))


@functools.cache
def is_score(name: str) -> bool:
    """True for held-out scores (`eval/accuracy`, `eval/math`), false for eval/length and the like."""
    return name.startswith("eval/") and name != "eval/pass_at_k" and EVAL_NOT_SCORES.isdisjoint(words(name))


@functools.cache
def part_kind(name: str) -> str | None:
    """Return 'format', 'correct' or None for a reward part `reward/<name>`; format words win."""
    if not name.startswith("reward/") or name in NOT_PARTS or name.endswith("/std"):
        return None
    lower = name.lower()
    if any(word in lower for word in FORMAT_WORDS):
        return "format"
    return "correct" if any(word in lower for word in CORRECT_WORDS) else "other"


# Names whose NaN says nothing about the health of the weights: a reward function that abstained, an evaluation
# that did not run, a spread of one value.
HARMLESS_NAN = (
    "eval",
    "val",
    "time",
    "speed",
    "data",
    "reward",
    "std",
    "terminated",
    "test",
    "perf",
    "timing",
)


@functools.cache
def is_vital(name: str) -> bool:
    """True when a non-finite value of this metric says that the update itself is broken."""
    if name in ("reward/total", "reward", "score"):
        return True
    return not any(word in HARMLESS_NAN or word.startswith("reward") for word in words(name))


class History:
    """Everything the rules may look at; `push` one row at a time, then read series, scores and parts."""

    def __init__(
        self, window: int, unit: float, tracked: Iterable[str], drop: float = 0.07, group_size: int = 0
    ) -> None:
        self.window, self.unit, self.drop, self.group_size = window, unit, drop, group_size
        self.tracked = frozenset(tracked)
        self.train: dict[str, Series] = {}
        self.held_out: dict[str, Scores] = {}
        self.row: dict[str, float] = {}
        self.step = -math.inf
        self.first_step = 0.0
        self.rows = self.late_rows = self.bad_rows = 0
        self.bad_fields: list[str] = []
        self.bad_vital = False
        self.estimated: list[str] = []
        self.raised: dict[str, str] = {}  # per rule: the highest severity raised so far
        self.streaks: dict[str, list[int]] = {}  # per rule: findings in a row of at least note, flag, stop
        self.since: dict[str, float] = {}  # per rule: step at which its present streak began
        self.seen: set[str] = set()

    # ---- writing
    def push(self, step: float, metrics: Mapping[str, float]) -> set[str]:
        """Add a row; returns the names that got a new value. A row from before the last step is counted, not used."""
        if step < self.step and not all(name.startswith("eval/") for name in metrics):
            self.late_rows += 1
            return set()
        if not self.rows:
            self.first_step = step
        self.rows += 1
        self.step = max(self.step, step)
        row = {name: float(value) for name, value in metrics.items()}
        self._note_bad(row)
        self._derive(row)
        self.row = row
        fresh = set()
        for name, value in row.items():
            if value - value != 0:  # NaN and inf, quicker than math.isfinite over thousands of columns
                continue
            if name.startswith("eval/"):
                if is_score(name):
                    self._score(name, step, value)
                    fresh.add(name)
            elif name in self.tracked or name.startswith("reward/"):
                series = self.train.get(name)
                if series is None:
                    series = self.train[name] = Series(self.window, self.unit)
                series.push(step, value)
                fresh.add(name)
        self.seen |= fresh
        return fresh

    def _note_bad(self, row: Mapping[str, float]) -> None:
        bad = [name for name, value in row.items() if value - value != 0]
        vital = [name for name in bad if is_vital(name)]
        self.bad_fields, self.bad_vital = bad, bool(vital)
        if vital:
            self.bad_rows += 1
        elif any(is_vital(name) for name in list(row)[:64]):  # an eval-only row breaks no streak
            self.bad_rows = 0

    def _derive(self, row: dict[str, float]) -> None:
        """Fill group shares a trainer did not log with what its other numbers prove (lower bounds)."""
        if "groups/flat" not in row:
            if "groups/all_right" in row and "groups/all_wrong" in row:
                row["groups/flat"] = row["groups/all_right"] + row["groups/all_wrong"]
            elif "reward/std" in row and row["reward/std"] - row["reward/std"] == 0:
                row["groups/flat"] = float(abs(row["reward/std"]) < 1e-8)
                self._estimate("groups/flat")
        reward = self.train.get("reward/total")
        if "groups/all_wrong" not in row and "groups/flat" in row and "reward/total" in row:
            top = max(reward.highest if reward else 0.0, row["reward/total"])
            low = min(reward.lowest if reward else 0.0, row["reward/total"])
            if low >= 0:  # every all-right group lifts the mean by its share of the best reward
                share = row["reward/total"] / top if top > 0 else 0.0
                row["groups/all_wrong"] = max(0.0, row["groups/flat"] - share)
                self._estimate("groups/all_wrong")

    def _estimate(self, name: str) -> None:
        if name not in self.estimated:
            self.estimated.append(name)

    def _score(self, name: str, step: float, value: float) -> None:
        scores = self.held_out.get(name)
        if scores is None:
            scores = self.held_out[name] = Scores()
        reward = self.train.get("reward/total")
        level = reward.long.mean() if reward else None
        scores.push(step, value, level, self.drop)

    # ---- reading
    def series(self, name: str) -> Series | None:
        """The series of a metric once its long window is full, else None."""
        series = self.train.get(name)
        return series if series is not None and series.long.full else None

    def ready(self, name: str) -> Series | None:
        """The series of a metric once its window is full and its baseline frozen, else None."""
        series = self.series(name)
        return series if series is not None and series.baseline is not None else None

    def parts(self, kind: str) -> list[tuple[str, Series]]:
        """Reward parts of one kind ('format', 'correct', 'other') that have a baseline."""
        names = [name for name in self.train if part_kind(name) == kind]
        return [(name, series) for name in names if (series := self.ready(name)) is not None]

    def rollouts(self) -> float:
        """Rollout steps since the first row."""
        return (self.step - self.first_step) / self.unit

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
    PLAIN = (
        "rows", "late_rows", "bad_rows", "bad_fields", "bad_vital", "first_step", "estimated", "raised", "streaks",
        "since",
    )  # fmt: skip

    def state(self) -> dict[str, Any]:
        """Return everything as JSON-able data."""
        data: dict[str, Any] = {name: copy.deepcopy(getattr(self, name)) for name in self.PLAIN}
        data["step"] = _encode(self.step)
        data["row"] = {name: _encode(value) for name, value in self.row.items()}
        data["seen"] = sorted(self.seen)
        data["train"] = {name: series.state() for name, series in self.train.items()}
        data["held_out"] = {name: scores.state() for name, scores in self.held_out.items()}
        return data

    def load_state(self, data: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        for name in self.PLAIN:
            setattr(self, name, copy.deepcopy(data[name]))
        self.step = _decode(data["step"])
        self.row = {name: _decode(value) for name, value in data["row"].items()}
        self.seen = set(data["seen"])
        self.train, self.held_out = {}, {}
        for name, state in data["train"].items():
            self.train[name] = Series(self.window, self.unit)
            self.train[name].load_state(state)
        for name, state in data["held_out"].items():
            self.held_out[name] = Scores()
            self.held_out[name].load_state(state)

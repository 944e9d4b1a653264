"""One metric over a run, remembered in constant space: a window, a frozen baseline, the best window, block means.

Steps are the log's own; `unit` is how many of them make one rollout step. A window of 10 covers the last 10 rows or
the rows of the last 10 rollout steps, whichever are more.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, NamedTuple

MAX_ROWS = 4096  # bound of a window, for logs with thousands of rows per rollout step


class Level(NamedTuple):
    """A mean over a window, its sample std, the rows in it, and its first and last step."""

    mean: float
    std: float
    rows: int
    start: float
    end: float

    @property
    def error(self) -> float:
        """Squared standard error of the mean."""
        return self.std**2 / self.rows


class Window:
    """The last rows of one metric: `rows` of them or the last `span` log steps, whichever are more."""

    __slots__ = ("rows", "span", "steps", "values")

    def __init__(self, rows: int, span: float) -> None:
        self.rows, self.span = rows, span
        self.steps: deque[float] = deque()
        self.values: deque[float] = deque()

    def push(self, step: float, value: float) -> None:
        """Add one row and drop those the window no longer needs."""
        steps, values = self.steps, self.values
        steps.append(step)
        values.append(value)
        while len(steps) > self.rows and (step - steps[1] + 1 >= self.span or len(steps) > MAX_ROWS):
            steps.popleft()
            values.popleft()

    @property
    def full(self) -> bool:
        """True once the window holds enough rows and covers enough steps."""
        steps = self.steps
        if len(steps) < self.rows:
            return False
        return steps[-1] - steps[0] + 1 >= self.span or len(steps) >= MAX_ROWS

    def mean(self) -> float:
        """Mean of the rows held; the window must not be empty."""
        return sum(self.values) / len(self.values)

    def level(self) -> Level:
        """Mean, std, rows, first and last step."""
        values = self.values
        mean = sum(values) / len(values)
        std = math.sqrt(sum([(v - mean) ** 2 for v in values]) / (len(values) - 1)) if len(values) > 1 else 0.0
        return Level(mean, std, len(values), self.steps[0], self.steps[-1])

    def tail(self) -> list[float]:
        """The newer half of the rows."""
        values = self.values
        return list(islice(values, len(values) // 2, None))

    def state(self) -> list[list[float]]:
        """Return the rows held."""
        return [list(self.steps), list(self.values)]

    def load_state(self, data: Iterable[Iterable[float]]) -> None:
        """Take back what `state` returned."""
        steps, values = data
        self.steps, self.values = deque(steps), deque(values)


class Series:
    """One train metric; `push` is constant work. Only with `trend` are the sums of `std` and `trend` kept."""

    FIELDS = (
        "count", "first_step", "last", "last_step", "lowest", "highest", "early_sum", "early_rows", "opening",
        "rise_mean", "rise_row", "block_sum", "block_rows", "block_start",
        "mean_step", "mean_value", "step_step", "step_value", "value_value",
    )  # fmt: skip
    LEVELS = ("baseline", "best", "lowest_window")
    __slots__ = (*FIELDS, *LEVELS, "unit", "keeps_trend", "window", "pool", "blocks")

    def __init__(self, rows: int, unit: float, trend: bool = False) -> None:
        self.unit = unit
        self.keeps_trend = trend
        self.window = Window(rows, rows * unit)
        self.pool = Window(rows, rows * unit)  # fills up to the baseline, then stays
        self.blocks: deque[tuple[float, float]] = deque(maxlen=8)  # (last step, mean) of closed half windows
        self.count = self.early_rows = self.rise_row = self.block_rows = 0
        self.first_step = self.last = self.last_step = self.early_sum = 0.0
        self.lowest, self.highest = math.inf, -math.inf
        self.opening = 0.0  # mean of the first full window, nothing left out
        self.rise_mean = 0.0  # the window mean at the last clear rise, in row `rise_row`
        self.block_sum = self.block_start = 0.0
        self.mean_step = self.mean_value = self.step_step = self.step_value = self.value_value = 0.0
        self.baseline: Level | None = None
        self.best: Level | None = None
        self.lowest_window: Level | None = None

    def push(self, step: float, value: float) -> None:
        """Add one finite value. This runs for every metric of every row, so it is written out."""
        if not self.count:
            self.first_step = self.block_start = step
        self.count += 1
        self.last, self.last_step = value, step
        if value < self.lowest:
            self.lowest = value
        if value > self.highest:
            self.highest = value
        window = self.window
        steps, values, rows, span = window.steps, window.values, window.rows, window.span
        steps.append(step)
        values.append(value)
        while len(steps) > rows and (step - steps[1] + 1 >= span or len(steps) > MAX_ROWS):
            steps.popleft()
            values.popleft()
        if self.baseline is None:
            self._track_start(step, value)
        if self.best is not None or window.full:
            self._track_extremes(sum(values) / len(values))
        self.block_sum += value
        self.block_rows += 1
        if 2 * self.block_rows >= rows and 2 * (step - self.block_start + 1) >= span:
            self.blocks.append((step, self.block_sum / self.block_rows))
            self.block_sum, self.block_rows, self.block_start = 0.0, 0, step + 1
        if self.keeps_trend:
            self._track_trend(step, value)

    def _track_start(self, step: float, value: float) -> None:
        """The first three rows, and the baseline behind them (or behind ten rollout steps of a sparse log)."""
        if self.early_rows < 3:
            self.early_sum += value
            self.early_rows += 1
        if self.count > 3 or step - self.first_step >= 10 * self.unit:
            self.pool.push(step, value)
            if self.pool.full:
                self.baseline = self.pool.level()

    def _track_extremes(self, mean: float) -> None:
        if self.best is None or self.lowest_window is None:
            self.opening = self.rise_mean = mean
            self.rise_row = self.count
            self.best = self.lowest_window = self.window.level()
        elif mean > self.best.mean:
            self.best = self.window.level()
            if mean > self.rise_mean + 0.02 * (mean - self.floor()):
                self.rise_mean, self.rise_row = mean, self.count
        elif mean < self.lowest_window.mean:
            self.lowest_window = self.window.level()

    def _track_trend(self, step: float, value: float) -> None:
        """Update the sums of a straight line through all rows (Welford)."""
        count, dx, dy = self.count, step - self.mean_step, value - self.mean_value
        self.mean_step += dx / count
        self.mean_value += dy / count
        rest = value - self.mean_value
        self.step_step += dx * (step - self.mean_step)
        self.step_value += dx * rest
        self.value_value += dy * rest

    @property
    def full(self) -> bool:
        """True once one whole window has been seen."""
        return self.best is not None

    @property
    def early(self) -> float:
        """Mean of the first three rows."""
        return self.early_sum / self.early_rows

    def mean(self) -> float:
        """Mean of the window."""
        return self.window.mean()

    def level(self) -> Level:
        """Level of the window."""
        return self.window.level()

    def recent(self) -> float:
        """Mean of the newer half of the window."""
        values = self.window.tail()
        return sum(values) / len(values)

    def span(self) -> list[float]:
        """First and last step of the window."""
        return [self.window.steps[0], self.window.steps[-1]]

    def std(self) -> float:
        """Std over the whole run."""
        return math.sqrt(max(self.value_value, 0.0) / (self.count - 1)) if self.count > 1 else 0.0

    def trend(self) -> tuple[float, float]:
        """Return (fitted change from the first to the last step, its t statistic) of a straight line."""
        if self.count < 3 or self.step_step <= 0:
            return 0.0, 0.0
        slope = self.step_value / self.step_step
        left = max(self.value_value - slope * self.step_value, 0.0)
        error = math.sqrt(left / (self.count - 2) / self.step_step)
        change = slope * (self.last_step - self.first_step)
        if error == 0:
            return change, math.copysign(math.inf, slope) if slope else 0.0
        return change, slope / error

    def floor(self) -> float:
        """What a fall is measured against: 0, or the lowest value seen when that is negative."""
        return self.lowest if self.lowest < 0 else 0.0

    def state(self) -> dict[str, Any]:
        """Return everything as JSON-able data."""
        data = {name: encode(getattr(self, name)) for name in self.FIELDS}
        data |= {name: list(level) if (level := getattr(self, name)) else None for name in self.LEVELS}
        data["blocks"] = [list(block) for block in self.blocks]
        return data | {"window": self.window.state(), "pool": self.pool.state()}

    def load_state(self, data: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        for name in self.FIELDS:
            setattr(self, name, decode(data[name]))
        for name in self.LEVELS:
            setattr(self, name, Level(*data[name]) if data[name] else None)
        self.blocks = deque(((step, mean) for step, mean in data["blocks"]), maxlen=8)
        self.window.load_state(data["window"])
        self.pool.load_state(data["pool"])


USUAL_ANSWERS = 800


class Scores:
    """One held-out score (higher is better): its best, the evaluations since, and its noise.

    answers: sampled answers behind one evaluation, which bound its noise from below; 0 when nobody told.
    """

    FIELDS = (
        "count", "first", "last", "last_step", "best", "best_step", "best_row", "best_reward", "jump_sum",
        "jump_max", "below",
    )  # fmt: skip
    __slots__ = (*FIELDS, "answers")

    def __init__(self, answers: int = 0) -> None:
        self.answers = answers
        self.count = self.best_row = self.below = 0
        self.first = self.last = self.last_step = self.best = self.best_step = 0.0
        self.jump_sum = self.jump_max = 0.0
        self.best_reward: float | None = None  # train reward when the best was reached

    def push(self, step: float, value: float, reward: float | None, drop: float) -> None:
        """Add one evaluation; `reward` is the train level now, `drop` the relative fall that counts as below best."""
        if not self.count:
            self.first = value
        else:
            jump = abs(value - self.last)
            self.jump_sum += jump
            self.jump_max = max(self.jump_max, jump)
        self.count += 1
        self.last, self.last_step = value, step
        if self.count == 1 or value > self.best:
            self.best, self.best_step, self.best_row, self.best_reward = value, step, self.count, reward
        elif self.best_reward is None:
            self.best_reward = reward
        self.below = self.below + 1 if self.fallen(drop) else 0

    def noise(self) -> float:
        """Std of one evaluation: mean absolute jump without its largest (1.128 std of a Gaussian), not under the
        binomial std of its answers, which is what counts before the fourth evaluation.

        Where the number of answers is unknown, 800 are assumed, and later a third of their std is the bound.
        """
        least = self.binomial()
        if self.count < 4:
            return least
        jumps = (self.jump_sum - self.jump_max) / (self.count - 2) / 1.128
        return max(jumps, least if self.answers else least / 3)

    def binomial(self) -> float:
        """Std that drawing the answers alone gives a share; 0 for scores outside of 0 to 1.

        Best and last are pooled, with one right and one wrong answer more (Agresti and Coull 1998): the plain
        estimate is 0 at shares of 0 and 1, where a handful of answers decides.
        """
        if not (0 <= self.best <= 1 and 0 <= self.last <= 1):
            return 0.0
        answers = self.answers or USUAL_ANSWERS
        share = ((self.best + self.last) * answers + 1) / (2 * answers + 2)
        return math.sqrt(share * (1 - share) / answers)

    def fallen(self, drop: float) -> bool:
        """True when the last evaluation is `drop` (relative) under the best, and noise does not explain it.

        The best of n evaluations lies sqrt(2 ln n) deviations up by luck alone.
        """
        lost = self.best - self.last
        if self.count < 2 or lost <= drop * abs(self.best):
            return False
        return lost > (2.5 + math.sqrt(2 * math.log(self.count))) * self.noise()

    def state(self) -> list[Any]:
        """Return everything as JSON-able data."""
        return [getattr(self, name) for name in self.FIELDS]

    def load_state(self, data: Iterable[Any]) -> None:
        """Continue from what `state` returned."""
        for name, value in zip(self.FIELDS, data, strict=True):
            setattr(self, name, value)


def encode(value: Any) -> Any:
    """Spell a non-finite float as a string, since JSON has no word for it."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def decode(value: Any) -> Any:
    """Undo `encode`."""
    return float(value) if isinstance(value, str) else value

"""Readings of a history that several rules share: has the reward fallen, is it still rising, did a metric grow?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from reasonrl.alerts.history import History
from reasonrl.alerts.series import Level, Series


@dataclass(frozen=True)
class Fall:
    """How far the train reward is under its best window.

    share: part of the best window's height that is lost. z: that loss in standard errors. needed_z: what noise
    alone would reach over this many windows.
    """

    share: float
    z: float
    needed_z: float
    best: Level
    now: Level

    def beyond(self, share: float) -> bool:
        """True when at least `share` is lost and noise does not explain it."""
        return self.share >= share and self.z > self.needed_z


def luck(series: Series) -> float:
    """The largest of n independent window means lies sqrt(2 ln n) deviations up by luck alone."""
    return math.sqrt(2 * math.log(max(1.0, series.count / len(series.window.values))))


def reward_fall(h: History) -> Fall | None:
    """Compare the train reward's window with its best window; None while there is no full window."""
    if "fall" not in h.cache:
        h.cache["fall"] = _reward_fall(h)
    found: Fall | None = h.cache["fall"]
    return found


def _reward_fall(h: History) -> Fall | None:
    reward = h.series("reward/total")
    if reward is None or reward.best is None:
        return None
    best, height = reward.best, reward.best.mean - reward.floor()
    lost = best.mean - reward.mean()
    if height <= 0 or lost < 0.1 * height:
        return None
    now = reward.level()
    # Ten rows can agree by luck (all zero, say), so the larger of the two spreads stands for both.
    error = max(best.std, now.std) * math.sqrt(1 / best.rows + 1 / now.rows)
    return Fall(lost / height, lost / error if error > 0 else math.inf, 3 + luck(reward), best, now)


def fell(h: History, share: float) -> bool:
    """True when the train reward lost `share` of its best window, beyond noise."""
    fall = reward_fall(h)
    return fall is not None and fall.beyond(share)


def held_out_flat(h: History) -> bool | None:
    """True when no held-out score found a new best in its last three evaluations; None with fewer than four."""
    known = [scores for scores in h.held_out.values() if scores.count >= 4]
    return all(scores.count - scores.best_row >= 3 for scores in known) if known else None


def held_out_defends(h: History, key: str) -> bool:
    """True when a held-out score says that the policy is sound whatever the train reward did (harder data, say).

    It does so by an evaluation since the rule `key` began to complain, at its best or clearly above its first. Until
    there is one, for three windows at most, a score that was rising before speaks for the policy.
    """
    since = h.since.get(key, h.step)
    waiting = h.step - since < 3 * h.window * h.unit
    for scores in h.held_out.values():
        rising = scores.count >= 3 and scores.best > scores.first and scores.count - scores.best_row <= 1
        above = scores.count >= 3 and not scores.below and scores.last - scores.first > 2 * scores.noise()
        if rising and (waiting or scores.last_step >= since):
            return True
        if above and scores.last_step >= since:
            return True
    return False


def held_out_fell(h: History) -> bool:
    """True when some held-out score was clearly under its best at two evaluations in a row."""
    return any(scores.below >= 2 for scores in h.held_out.values())


def reward_flat(h: History) -> bool | None:
    """True when the train reward found no new height for two windows and a quarter of the run."""
    reward = h.series("reward/total")
    if reward is None:
        return None
    return reward.count - reward.rise_row >= max(2 * len(reward.window.values), reward.count / 4)


def not_rising(h: History) -> bool | None:
    """True when the held-out score (without one: the train reward) no longer rises; None when unknown."""
    flat = held_out_flat(h)
    if flat is not None:
        return flat
    return True if fell(h, 0.3) else reward_flat(h)


def stalled_for(h: History, share: float) -> bool:
    """True when every known held-out score (without one: the train reward) is without a new best for that share."""
    known = [scores for scores in h.held_out.values() if scores.count >= 4]
    if known:
        return all(scores.count - scores.best_row >= share * scores.count for scores in known)
    reward = h.series("reward/total")
    return reward is not None and reward.count - reward.rise_row >= share * reward.count


def nothing_gained(h: History) -> bool:
    """True when the train reward's window is not above its baseline at all."""
    reward = h.ready("reward/total")
    return reward is not None and reward.baseline is not None and reward.mean() <= reward.baseline.mean


def recent_fall(reward: Series) -> float:
    """Share of its best level that the newer half of the train reward's window has lost; 0 when noise explains it."""
    values = reward.window.tail()
    now = sum(values) / len(values)
    best = max(reward.early, reward.best.mean if reward.best else -math.inf)
    height, lost = best - reward.floor(), best - now
    if height <= 0 or lost <= 0:
        return 0.0
    spread = reward.best.std if reward.best else reward.level().std
    if lost < (3 + luck(reward)) * spread / math.sqrt(len(values)):
        return 0.0
    return lost / height


def apart(now: Level, base: Level) -> float:
    """Standard error of the difference of two levels."""
    return math.sqrt(now.error + base.error)


def once_gained(h: History) -> bool:
    """True when the train reward's best window stood clearly above its baseline, whatever came later."""
    reward = h.ready("reward/total")
    if reward is None or reward.baseline is None or reward.best is None:
        return False
    best, base = reward.best, reward.baseline
    return best.mean - base.mean > (2.5 + luck(reward)) * apart(best, base) + 0.05 * (reward.highest - reward.lowest)


def gained(h: History, name: str = "reward/total") -> bool:
    """True when a metric's window stands above its baseline by two errors and 5 % of its range."""
    series = h.ready(name)
    if series is None or series.baseline is None:
        return False
    now, base = series.level(), series.baseline
    return now.mean - base.mean > max(2 * apart(now, base), 0.05 * (series.highest - series.lowest))


def risen_by(series: Series | None, amount: float) -> bool:
    """True when a metric's window stands `amount` above its baseline and luck does not explain it."""
    if series is None or series.baseline is None or series.mean() - series.baseline.mean < amount:
        return False
    now, base = series.level(), series.baseline
    return now.mean - base.mean > (2 + luck(series)) * apart(now, base)


def stays_above(series: Series | None, level: float) -> bool:
    """True when the window and the last four closed half windows of a metric are all above a level."""
    if series is None or len(series.blocks) < 4 or series.mean() <= level:
        return False
    return all(series.blocks[-place][1] > level for place in (1, 2, 3, 4))


def saturated(h: History) -> bool:
    """True when the train reward is near its ceiling, so that a quiet policy is no wonder.

    Rewards from 0 to 1 have the ceiling 1; others are held against their own highest value once they rose.
    """
    reward = h.series("reward/total")
    if reward is None:
        return False
    level = reward.mean()
    if reward.lowest >= 0 and reward.highest <= 1 + 1e-9:
        return level >= 0.85
    return level - reward.floor() >= 0.85 * (reward.highest - reward.floor()) and gained(h)


def growth(series: Series) -> float:
    """Window mean over baseline mean (inf from a baseline of 0, 1 from nothing to nothing)."""
    base = series.baseline.mean if series.baseline else 0.0
    now = series.mean()
    return now / base if base > 0 else (math.inf if now > 0 else 1.0)


def numbers(**values: float | None) -> dict[str, Any]:
    """Evidence; unknown values are left out. The monitor rounds it when it is raised."""
    return {name: value for name, value in values.items() if value is not None}


def percent(share: float) -> str:
    """A share as text: 0.314 -> '31 %', 0.0004 -> 'under 1 %'."""
    return "under 1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"


def multiple(factor: float) -> str:
    """A growth as text: 3.14 -> '3.1 times'; from nothing there is no factor."""
    return f"{factor:.1f} times" if factor < 100 else "over 100 times"


def short(value: float) -> str:
    """A number to three digits and without an exponent where that can be read: 4690, 0.077, under 0.0001."""
    size = abs(value)
    if 0 < size < 1e-4:
        return "under 0.0001" if value > 0 else "over -0.0001"
    return f"{value:.0f}" if 1000 <= size < 1e7 else f"{value:.3g}"

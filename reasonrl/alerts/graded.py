"""The graded alert rules A01-A19: each is a pure function of the recorded history and its limits.

A rule returns None (nothing found) or a `Finding`. It declares what it needs, when it may speak first and how
often it must be true in a row; `reasonrl.alerts.AlertMonitor` does the waiting, so the rules keep no state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from reasonrl.alert_history import History, Level, Series

Limits = Mapping[str, float]
SEVERITIES = ("note", "flag", "stop")


@dataclass(frozen=True)
class Finding:
    """What a rule found: severity, one sentence, the numbers behind it, how bad (any growing number), overrides."""

    severity: str
    message: str
    evidence: dict[str, Any] = field(default_factory=dict)
    badness: float = 0.0
    intervention: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Rule:
    """A check with its code, title, needed inputs and limits.

    needs: metric names; a tuple inside means any one of them. `eval` stands for any held-out score, `any` for any
    row. helps: inputs without which it cannot reach its higher severities. warmup: rollout steps before it may
    speak (None: the configured one). confirm: evaluations in a row (None: the configured one).
    """

    code: str
    title: str
    check: Callable[[History, Limits], Finding | None]
    needs: tuple[str | tuple[str, ...], ...] = ()
    helps: tuple[str | tuple[str, ...], ...] = ()
    limits: Mapping[str, float] = field(default_factory=dict)
    warmup: int | None = None
    confirm: int | None = None
    intervention: tuple[str, ...] = ()
    name: str = ""

    @property
    def key(self) -> str:
        """Unique name of the rule within a profile (two rules may share a code)."""
        return self.name or self.code


# ---- readings shared by several rules
@dataclass(frozen=True)
class Fall:
    """How far the train reward is under its best window: share lost of its height, in deviations, and how many
    deviations pure noise would reach over this many windows."""

    share: float
    z: float
    needed_z: float
    best: Level
    now: Level

    def beyond(self, share: float) -> bool:
        """True when more than `share` is lost and noise does not explain it."""
        return self.share >= share and self.z > self.needed_z


def reward_fall(h: History, z: float = 4.0) -> Fall | None:
    """Compare the train reward's window with its best window; None without a full window.

    The best of n windows lies sqrt(2 ln n) deviations above the mean by luck alone, hence the growing demand.
    """
    reward = h.series("reward/total")
    if reward is None or reward.best is None:
        return None
    best, now = reward.best, reward.long.level()
    height = best.mean - reward.floor()
    if height <= 0:
        return None
    error = math.sqrt(best.std**2 / best.rows + now.std**2 / now.rows)
    lost = best.mean - now.mean
    deviations = lost / error if error > 0 else (math.inf if lost > 1e-9 else 0.0)
    windows = max(1.0, reward.count / now.rows)
    return Fall(lost / height, deviations, z + math.sqrt(2 * math.log(windows)), best, now)


def fell(h: History, share: float) -> bool:
    """True when the train reward lost `share` of its best window beyond noise."""
    fall = reward_fall(h)
    return fall is not None and fall.beyond(share)


def held_out_flat(h: History) -> bool | None:
    """True when no held-out score found a new best in its last three evaluations; None with fewer than four."""
    known = [scores for scores in h.held_out.values() if scores.count >= 4]
    return all(scores.count - scores.best_row >= 3 for scores in known) if known else None


def held_out_rising(h: History) -> bool:
    """True when some held-out score had its best within its last two evaluations (and has at least three)."""
    return any(s.count >= 3 and s.best > s.first and s.count - s.best_row <= 1 for s in h.held_out.values())


def held_out_fell(h: History) -> bool:
    """True when some held-out score was clearly under its best at two evaluations in a row."""
    return any(scores.below >= 2 for scores in h.held_out.values())


def reward_flat(h: History) -> bool | None:
    """True when the train reward's window found no new height for three windows and a quarter of the run."""
    reward = h.series("reward/total")
    if reward is None:
        return None
    return reward.count - reward.rise_row >= max(3 * len(reward.long.items), reward.count / 4)


def not_rising(h: History) -> bool | None:
    """True when the held-out score (or, without one, the train reward) no longer rises; None when unknown."""
    flat = held_out_flat(h)
    if flat is not None:
        return flat
    return True if fell(h, 0.3) else reward_flat(h)


def risen_by(series: Series | None, amount: float) -> bool:
    """True when a metric's window stands more than `amount` above its baseline, and noise does not explain it.

    The largest of n windows lies sqrt(2 ln n) deviations up by luck alone, hence the growing demand.
    """
    if series is None or series.baseline is None:
        return False
    base = series.baseline
    if series.long.mean() - base.mean < amount:
        return False
    now = series.long.level()
    error = math.sqrt(now.std**2 / now.rows + base.std**2 / base.rows)
    return now.mean - base.mean > (2 + math.sqrt(2 * math.log(max(1.0, series.count / now.rows)))) * error


def stays_above(series: Series | None, level: float) -> bool:
    """True when the window and the last two closed windows of a metric are all above a level."""
    if series is None or len(series.blocks) < 2 or series.long.mean() <= level:
        return False
    return series.blocks[-1][1] > level and series.blocks[-2][1] > level


def gained(h: History, name: str = "reward/total") -> bool:
    """True when a metric's window stands clearly above its own baseline."""
    series = h.ready(name)
    if series is None:
        return False
    now, base = series.long.level(), series.baseline
    assert base is not None
    error = math.sqrt(now.std**2 / now.rows + base.std**2 / base.rows)
    scale = max(series.highest - series.lowest, 1e-12)
    return now.mean - base.mean > max(2 * error, 0.05 * scale)


def saturated(h: History) -> bool:
    """True when the train reward is near its ceiling, so that a quiet policy is no wonder."""
    reward = h.series("reward/total")
    if reward is None:
        return False
    level = reward.long.mean()
    if reward.lowest >= 0 and reward.highest <= 1 + 1e-9 and level >= 0.85:
        return True
    return gained(h) and level - reward.floor() >= 0.85 * (reward.highest - reward.floor())


def growth(series: Series) -> float:
    """Window mean over baseline mean (inf from a baseline of 0)."""
    assert series.baseline is not None
    now, base = series.long.mean(), series.baseline.mean
    return now / base if base > 0 else (math.inf if now > 0 else 1.0)


def span(series: Series) -> list[float]:
    """First and last step of the long window."""
    return [series.long.items[0][0], series.long.items[-1][0]]


def numbers(**values: float | None) -> dict[str, Any]:
    """Evidence rounded to six digits; unknown values are left out."""
    return {name: float(f"{value:.6g}") for name, value in values.items() if value is not None}


# ---- the rules
def non_finite(h: History, t: Limits) -> Finding | None:
    """A01: a NaN or infinite field; twice in a row, or in the weights, is a stop."""
    if h.row.get("optim/weights_nonfinite", 0) > 0:
        return Finding("stop", "The weights hold NaN or infinite values.", {"window": [h.step, h.step]}, 9)
    if not h.bad_fields:
        return None
    names = sorted(h.bad_fields)
    shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    evidence = {"fields": names[:50], "rows_in_a_row": h.bad_rows, "window": [h.step, h.step]}
    if h.bad_vital and h.bad_rows >= t["rows"]:
        return Finding(
            "stop", f"NaN or infinite for {h.bad_rows} rows in a row: {shown}.", evidence, h.bad_rows
        )
    if h.bad_vital:
        return Finding("flag", f"NaN or infinite: {shown}.", evidence, 1)
    return Finding("note", f"NaN or infinite, but not in the update itself: {shown}.", evidence, 0)


def no_update(h: History, t: Limits) -> Finding | None:
    """A02: rewards differ, but gradient norm and every sign of a moving policy are exactly 0."""
    signs = [h.row[name] for name in ("shift/kl_old", "kl/ref", "clip/fraction") if name in h.row]
    spread, grad = h.row.get("reward/std"), h.row.get("optim/grad_norm")
    if spread is None or grad is None or not signs or spread <= 0 or grad != 0 or any(signs):
        return None
    if h.row.get("groups/flat", 0.0) > t["flat"] or h.row.get("optim/lr", 1.0) == 0:
        return None
    # A log of every tenth step shows the mean spread of ten steps beside the gradient norm of one of them, which
    # may have been empty; only KL to the reference, which never returns to exactly 0, settles that.
    if h.spacing() > 1 and "kl/ref" not in h.row:
        return None
    evidence = numbers(reward_spread=spread, grad_norm=grad) | {"window": [h.step, h.step]}
    held = h.held("A02")
    severity = "stop" if held >= t["rows"] else "flag" if held >= t["rows"] - 1 else "note"
    message = f"Rewards differ within groups (spread {spread:.3g}), yet gradient norm and policy shift are exactly 0."
    return Finding(severity, message, evidence | {"rows_in_a_row": held}, held)


def entropy_collapse(h: History, t: Limits) -> Finding | None:
    """A03: the entropy window is under half its baseline; what the reward does decides how bad that is."""
    entropy = h.ready("entropy/mean")
    if entropy is None or entropy.baseline is None:
        return None
    base = entropy.baseline.mean
    if entropy.early > 0.05 * base:  # a surge inside the baseline is no level to fall from
        base = min(base, 2 * entropy.early)
    if base <= 0 or entropy.long.mean() >= t["ratio"] * base:
        return None
    now = entropy.long.level()
    evidence = numbers(entropy=now.mean, baseline=base, ratio=now.mean / base) | {"window": now.window}
    text = f"Entropy {now.mean:.3g} nats is {100 * now.mean / base:.0f} % of its baseline {base:.3g}"
    stalled = not_rising(h)
    if not stalled:
        return Finding("note", text + ".", evidence, 1 - now.mean / base)
    what = "held-out score" if held_out_flat(h) is not None else "reward"
    reasons = []
    if held_out_fell(h):
        reasons.append("the held-out score fell")
    no_gain = h.ready("reward/total") is not None and not gained(h) and not saturated(h)
    if no_gain and risen_by(h.ready("groups/flat"), t["flat_growth"]):
        reasons.append("flat groups grew without any gain in reward")
    if fell(h, t["fall"]):
        reasons.append("the reward fell")
    if now.mean < t["stop_ratio"] * base and not saturated(h):
        reasons.append(f"it is under {100 * t['stop_ratio']:.0f} % of its baseline")
    if reasons:
        return Finding(
            "stop", f"{text}, the {what} no longer rises, and {' and '.join(reasons)}.", evidence, 3
        )
    return Finding("flag", f"{text} and the {what} no longer rises.", evidence, 1 - now.mean / base)


def entropy_surge(h: History, t: Limits) -> Finding | None:
    """A04: entropy far above its start and above one nat."""
    entropy = h.train.get("entropy/mean")
    if entropy is None or entropy.count < 5:
        return None
    base = min(entropy.early, entropy.baseline.mean if entropy.baseline else math.inf)
    now = entropy.short.level()
    if base <= 0 or min(now.mean, entropy.last) <= max(t["ratio"] * base, t["nats"]):
        return None
    evidence = numbers(entropy=now.mean, baseline=base, last=entropy.last) | {"window": now.window}
    text = f"Entropy {now.mean:.3g} nats is {now.mean / base:.1f} times its start ({base:.3g})"
    reward = h.train.get("reward/total")
    if reward is not None:
        best = reward.best.mean if reward.best else reward.early
        height = max(best, reward.early) - reward.floor()
        lost = (max(best, reward.early) - reward.short.mean()) / height if height > 0 else 0.0
        if lost >= t["fall"]:
            return Finding(
                "stop", f"{text} and the reward is {100 * lost:.0f} % down.", evidence, now.mean / base
            )
    if now.mean > t["garbage_nats"] and now.mean > t["garbage_ratio"] * base:
        return Finding("stop", f"{text}: close to random tokens.", evidence, now.mean / base)
    return Finding("flag", text + ".", evidence, now.mean / base)


def flat_groups(h: History, t: Limits) -> Finding | None:
    """A05: too many groups without spread; all-wrong and all-right call for opposite data."""
    flat = h.series("groups/flat")
    if flat is None:
        return None
    level = flat.long.mean()
    if level <= t["share"]:
        return None
    wrong, right = h.series("groups/all_wrong"), h.series("groups/all_right")
    wrong_level = wrong.long.mean() if wrong else None
    right_level = right.long.mean() if right else (level - wrong_level if wrong_level is not None else None)
    base = flat.baseline.mean if flat.baseline else None
    reward = h.series("reward/total")
    chance = None
    if h.group_size and reward and 0 <= reward.lowest and reward.highest <= 1:
        p = reward.long.mean()
        chance = p**h.group_size + (1 - p) ** h.group_size
    evidence = numbers(
        flat=level, all_wrong=wrong_level, all_right=right_level, baseline=base, by_chance=chance
    )
    evidence["window"] = span(flat)
    if h.estimated:
        evidence["estimated"] = list(h.estimated)
    advice = "harder" if (right_level or 0) > (wrong_level or 0) else "easier"
    text = f"{100 * level:.0f} % of groups have no reward spread"
    tail = f" Dynamic sampling or {advice} data would help." if right_level is not None else ""
    lost = h.rollouts() >= t["steps"] and stays_above(wrong, t["all_wrong"]) and not gained(h)
    if lost and wrong_level is not None:
        message = (
            f"{text}, {100 * wrong_level:.0f} % are all wrong, and the reward never rose above its start."
        )
        return Finding("stop", message + tail, evidence, wrong_level)
    if risen_by(flat, t["growth"]) and held_out_flat(h) and not saturated(h):
        message = f"{text} (at the start {100 * (base or 0):.0f} %) while the held-out score is flat."
        return Finding("flag", message + tail, evidence, level)
    if stays_above(flat, t["all_wrong"]):
        return Finding("flag", f"{text}: nearly every update is empty." + tail, evidence, level)
    return Finding("note", text + "." + tail, evidence, level)


def length_growth(h: History, t: Limits) -> Finding | None:
    """A06: answers grow (a note: often the sign of success) or run into the token budget."""
    length, cut = h.ready("length/mean"), h.ready("length/truncated")
    points = cut.long.mean() - cut.baseline.mean if cut is not None and cut.baseline is not None else 0.0
    if cut is not None and risen_by(cut, t["points"]):
        evidence = numbers(truncated=cut.long.mean(), growth=points) | {"window": span(cut)}
        text = f"Truncated answers grew by {100 * points:.0f} points to {100 * cut.long.mean():.0f} %"
        if fell(h, t["fall"]):
            return Finding(
                "stop", f"{text} and the reward fell by {100 * t['fall']:.0f} % or more.", evidence, points
            )
        return Finding("flag", text + ".", evidence, points)
    if length is not None and growth(length) > t["ratio"]:
        evidence = numbers(length=length.long.mean(), ratio=growth(length)) | {"window": span(length)}
        return Finding(
            "note",
            f"Answers are {growth(length):.1f} times as long as at the start.",
            evidence,
            growth(length),
        )
    return None


def length_collapse(h: History, t: Limits) -> Finding | None:
    """A07: answers shrink to a fraction of the start; with a fallen reward the reasoning is gone."""
    length = h.ready("length/mean")
    if length is None or growth(length) >= t["ratio"]:
        return None
    evidence = numbers(length=length.long.mean(), ratio=growth(length)) | {"window": span(length)}
    text = f"Answers are {100 * growth(length):.0f} % as long as at the start"
    if fell(h, t["fall"]):
        return Finding("stop", f"{text} and the reward fell by {100 * t['fall']:.0f} % or more.", evidence, 2)
    return Finding("note", text + ".", evidence, 1)


def all_truncated(h: History, t: Limits) -> Finding | None:
    """A08: in the first rows every answer is cut off and earns nothing: the token budget is too small."""
    cut, reward = h.train.get("length/truncated"), h.train.get("reward/total")
    if cut is None or reward is None or cut.count > t["first_rows"] or cut.count < t["rows"]:
        return None
    if cut.short.low() < t["share"] or reward.lowest != reward.highest:
        return None
    spread, flat = h.train.get("reward/std"), h.train.get("groups/flat")
    if (spread is not None and spread.highest > 0) or (flat is not None and flat.lowest < 1):
        return None
    if reward.highest > 0:
        return None
    evidence = numbers(truncated=cut.short.mean(), reward=reward.last) | {
        "window": [cut.first_step, cut.last_step]
    }
    message = f"Every answer of the first {cut.count} rows is cut off and none earns a reward."
    return Finding("stop", message, evidence, 1)


def kl_growth(h: History, t: Limits) -> Finding | None:
    """A09: KL to the reference rises window after window, or ever faster."""
    kl = h.series("kl/ref")
    if kl is None or len(kl.blocks) < 5:
        return None
    levels = [level for _, level in kl.blocks]
    rises = [b - a for a, b in zip(levels[-5:-1], levels[-4:], strict=True)]
    rising = all(rise > 0 for rise in rises)
    faster = len(levels) >= 5 and rises[-1] > rises[-2] > rises[-3] > 0 and rises[-1] > 2 * rises[-3]
    if not (rising or faster) or levels[-1] < t["level"]:
        return None
    evidence = numbers(kl=levels[-1], before=levels[-5]) | {"window": [kl.blocks[-5][0], kl.blocks[-1][0]]}
    text = f"KL to the reference rose {'ever faster' if faster else 'in four windows in a row'} to {levels[-1]:.3g}"
    if fell(h, t["fall"]) and not held_out_rising(h):
        return Finding("stop", f"{text} while the reward fell.", evidence, levels[-1])
    if held_out_flat(h) or held_out_fell(h):
        return Finding("flag", f"{text} while the held-out score is flat or down.", evidence, levels[-1])
    return Finding("note", text + ".", evidence, levels[-1])


def overfit(h: History, t: Limits) -> Finding | None:
    """A10: a held-out score is under its best while the train reward is not."""
    reward = h.series("reward/total")
    worst: Finding | None = None
    for name, scores in h.held_out.items():
        if not scores.below or scores.best <= 0:
            continue
        lost = 1 - scores.last / scores.best
        evidence = numbers(
            score=scores.last, best=scores.best, best_step=scores.best_step, noise=scores.noise()
        )
        evidence |= {"name": name, "window": [scores.best_step, scores.last_step]}
        text = f"{name} is {100 * lost:.0f} % under its best ({scores.last:.3g}, was {scores.best:.3g})"
        rising = (
            reward is not None and scores.best_reward is not None and reward.long.mean() > scores.best_reward
        )
        if rising and scores.below >= t["evals"]:
            return Finding(
                "stop",
                f"{text} at {scores.below} evaluations in a row while the train reward rises.",
                evidence,
                2 + lost,
            )
        worst = worst or Finding("flag", text + ".", evidence, lost)
    return worst


def reward_collapse(h: History, t: Limits) -> Finding | None:
    """A11: the train reward's window is far under its best window; other signs of damage lower the bar."""
    fall = reward_fall(h, t["z"])
    if fall is None:
        return None
    signs = damage(h, t)
    if not fall.beyond(t["fall"]) and not (signs and fall.beyond(t["fall_with_damage"])):
        return None
    evidence = numbers(reward=fall.now.mean, best=fall.best.mean, lost=fall.share, z=min(fall.z, 1e6))
    evidence |= {"best_window": fall.best.window, "window": fall.now.window, "damage": signs}
    also = f", with {' and '.join(signs)}" if signs else ""
    text = f"The train reward lost {100 * fall.share:.0f} % of its best window ({fall.best.mean:.3g} to {fall.now.mean:.3g}){also}"
    if h.held("A11") > t["windows"] * len(h.train["reward/total"].long.items) and not held_out_rising(h):
        return Finding("stop", text + ", for a second window.", evidence, 1 + fall.share)
    return Finding("flag", text + ".", evidence, fall.share)


def damage(h: History, t: Limits) -> list[str]:
    """Signs, apart from the reward, that the policy itself was damaged."""
    signs = []
    clip, grad, entropy = h.ready("clip/fraction"), h.ready("optim/grad_norm"), h.ready("entropy/mean")
    if clip is not None and growth(clip) > t["clip_growth"] and clip.long.mean() > 1e-3:
        signs.append("clipping up")
    if grad is not None and growth(grad) > t["grad_growth"]:
        signs.append("gradient norm up")
    if (
        entropy is not None
        and entropy.worst
        and entropy.long.mean() > t["entropy_growth"] * entropy.worst.mean
    ):
        signs.append("entropy up from its lowest window")
    return signs


def format_only(h: History, t: Limits) -> Finding | None:
    """A12: format reward rose while correctness stands at its floor."""
    risen = [(name, series) for name, series in h.parts("format") if risen_part(series)]
    correct = [(name, series) for name, series in h.parts("correct") if series.lowest != series.highest]
    if not risen or not correct:
        return None
    for _, series in correct:
        scale = max(1.0, series.highest)
        base = series.baseline
        assert base is not None
        now = series.long.level()
        error = math.sqrt(now.std**2 / now.rows + base.std**2 / base.rows)
        if (
            now.mean - base.mean > max(t["progress"] * scale, 2 * error)
            or now.mean > series.floor() + t["near_floor"] * scale
        ):
            return None
    # The rise is dated to the middle of the window it was found in.
    held = h.held_steps("A12") + h.window / 2
    name, series = risen[0]
    evidence = numbers(
        format=series.long.mean(), format_start=series.baseline.mean if series.baseline else None
    )
    evidence |= {"part": name, "stuck": {n: float(f"{s.long.mean():.4g}") for n, s in correct}, "steps": held}
    evidence["window"] = [max(h.first_step, h.step - held * h.unit), h.step]
    text = (
        f"{name} rose to {series.long.mean():.3g} while correctness stands at its floor for {held:.0f} steps"
    )
    lowest = all(s.long.mean() <= s.floor() + t["stop_floor"] * max(1.0, s.highest) for _, s in correct)
    if held >= t["stop_steps"] and lowest:
        return Finding("stop", text + ".", evidence, 2)
    return Finding("flag" if held >= t["flag_steps"] else "note", text + ".", evidence, 1)


def risen_part(series: Series) -> bool:
    """True when a reward part's window is clearly above its baseline (a constant part is dead, not risen)."""
    now, base = series.long.level(), series.baseline
    if base is None or series.lowest == series.highest:
        return False
    error = math.sqrt(now.std**2 / now.rows + base.std**2 / base.rows)
    return now.mean - base.mean > max(3 * error, 0.1 * (series.highest - series.lowest))


def no_learning(h: History, t: Limits) -> Finding | None:
    """A19: neither the train reward nor a held-out score moved over the whole run."""
    reward = h.ready("reward/total")
    if reward is None or reward.count < t["rows"] or h.rollouts() < t["steps"]:
        return None
    change, z = reward.trend()
    _, _, _, _, yy = reward.sums
    std = math.sqrt(yy / (reward.count - 1))
    if (change > t["change"] * std and z > t["z"]) or saturated(h) or gained(h):
        return None
    if any(
        s.count >= 2 and s.best - s.first > max(2 * s.noise(), 0.03 * abs(s.first))
        for s in h.held_out.values()
    ):
        return None
    evidence = numbers(change=change, std=std, z=z) | {"window": [reward.first_step, reward.last_step]}
    return Finding(
        "flag", f"Nothing was learned in {h.rollouts():.0f} rollout steps: the reward is flat.", evidence, 0
    )


def repetition(h: History, t: Limits) -> Finding | None:
    """A13: n-gram repetition grows together with truncation."""
    loops, cut = h.ready("text/repetition"), h.ready("length/truncated")
    if loops is None or cut is None or loops.baseline is None or cut.baseline is None:
        return None
    more, points = loops.long.mean() - loops.baseline.mean, cut.long.mean() - cut.baseline.mean
    if more < t["growth"] or points < t["points"]:
        return None
    evidence = numbers(repetition=loops.long.mean(), growth=more, truncated=points) | {"window": span(loops)}
    text = f"Repeated n-grams grew by {100 * more:.0f} points and truncated answers by {100 * points:.0f}"
    if fell(h, t["fall"]):
        return Finding("stop", f"{text}, and the reward fell.", evidence, more)
    return Finding("flag", text + ".", evidence, more)


def clip_fraction(h: History, t: Limits) -> Finding | None:
    """A14: far more clipping than at the start and still rising, or none at all where there used to be some."""
    clip = h.ready("clip/fraction")
    if clip is None or clip.baseline is None or clip.baseline.mean <= 0:
        return None
    base, now = clip.baseline.mean, clip.long.mean()
    evidence = numbers(clip=now, baseline=base) | {"window": span(clip)}
    if now > t["ratio"] * base and now > t["level"] and clip.short.mean() > now:
        message = f"The clip fraction {now:.3g} is {now / base:.1f} times its start and rising."
        return Finding("flag", message, evidence, now / base)
    lr = h.train.get("optim/lr")
    decayed = lr is not None and lr.last < 0.1 * lr.highest
    if clip.long.high() == 0 and base > clip.baseline.std and not decayed:
        return Finding(
            "flag",
            f"Nothing is clipped any more (at the start {base:.3g}): the policy stands still.",
            evidence,
            0,
        )
    return None


def off_policy(h: History, t: Limits) -> Finding | None:
    """A15: the policy moves too far from the one that sampled the data within one rollout step."""
    found: dict[str, float] = {}
    shift = h.series("shift/kl_old")
    if shift is not None and abs(shift.short.mean()) > t["kl"]:
        found["shift/kl_old"] = shift.short.mean()
    high, low = h.series("shift/ratio_q99"), h.series("shift/ratio_q01")
    if high is not None and high.short.mean() > t["ratio"]:
        found["shift/ratio_q99"] = high.short.mean()
    if low is not None and low.short.mean() < 1 / t["ratio"]:
        found["shift/ratio_q01"] = low.short.mean()
    mean = h.series("shift/ratio_mean")
    if mean is not None and abs(mean.short.mean() - 1) > t["mean"]:
        found["shift/ratio_mean"] = mean.short.mean()
    if not found:
        return None
    evidence = numbers(**found) | {"window": [h.step - h.window * h.unit + 1, h.step]}
    text = "The policy leaves the sampling policy: " + ", ".join(
        f"{name} {value:.3g}" for name, value in found.items()
    )
    if fell(h, t["fall"]):
        return Finding("stop", f"{text}, and the reward fell.", evidence, 2)
    return Finding("flag", text + ".", evidence, 1)


def low_entropy_tokens(h: History, t: Limits) -> Finding | None:
    """A16: nearly all tokens are decided; only a few still carry a choice."""
    share = h.series("entropy/low_share")
    if share is None or share.long.mean() <= t["share"]:
        return None
    evidence = numbers(low_share=share.long.mean()) | {"window": span(share)}
    severity = "flag" if h.raised.get("A03") in ("flag", "stop") else "note"
    return Finding(
        severity,
        f"{100 * share.long.mean():.0f} % of tokens have almost no entropy.",
        evidence,
        share.long.mean(),
    )


def sampler_mismatch(h: History, t: Limits) -> Finding | None:
    """A17: before any update the trainer's probabilities must equal the sampler's."""
    error = h.train.get("shift/first_ratio_error")
    if error is None or error.count > t["first_rows"] or error.short.low() <= t["tolerance"]:
        return None
    evidence = numbers(error=error.short.mean()) | {"window": [error.first_step, error.last_step]}
    message = (
        f"On fresh samples the ratio is off 1 by {error.short.mean():.3g}: sampler and trainer disagree."
    )
    return Finding("stop", message, evidence, error.short.mean())


REWARD_OR_EVAL = ("reward/total", "eval")
GRADED: tuple[Rule, ...] = (
    Rule("A01", "non-finite numbers", non_finite, ("any",), warmup=0, confirm=1, limits={"rows": 2},
         intervention=("optim.lr / 3", "optim.max_grad_norm=1.0")),
    Rule("A02", "no update", no_update, ("reward/std", "optim/grad_norm", ("shift/kl_old", "kl/ref", "clip/fraction")),
         warmup=0, confirm=1, limits={"rows": 3, "flat": 0.6}),
    Rule("A03", "entropy collapse", entropy_collapse, ("entropy/mean",), (REWARD_OR_EVAL, "groups/flat"),
         limits={"ratio": 0.5, "stop_ratio": 0.1, "flat_growth": 0.15, "fall": 0.3},
         intervention=("loss=clip_higher", "entropy=thermostat")),
    Rule("A04", "entropy surge", entropy_surge, ("entropy/mean",), ("reward/total",), warmup=0, confirm=2,
         limits={"ratio": 3.0, "nats": 1.0, "fall": 0.3, "garbage_nats": 2.0, "garbage_ratio": 10.0},
         intervention=("overlong=filter", "loss.high / 2", "optim.lr / 2")),
    Rule("A05", "flat groups", flat_groups, (("groups/flat", "groups/all_wrong", "reward/std"),),
         ("groups/all_wrong", "groups/all_right", "eval"),
         limits={"share": 0.3, "growth": 0.15, "all_wrong": 0.9, "steps": 30}, intervention=("data=dynamic_sampling",)),
    Rule("A06", "length growth", length_growth, (("length/mean", "length/truncated"),), ("length/truncated", "reward/total"),
         limits={"ratio": 3.0, "points": 0.5, "fall": 0.3}, intervention=("overlong=soft", "sampling.max_new_tokens * 2")),
    Rule("A07", "length collapse", length_collapse, ("length/mean",), ("reward/total",),
         limits={"ratio": 0.25, "fall": 0.3}, intervention=("reward.parts.format.weight / 2", "optim.lr / 2")),
    Rule("A08", "all truncated", all_truncated, ("length/truncated", "reward/total"), warmup=0, confirm=1,
         limits={"rows": 3, "first_rows": 10, "share": 0.98}, intervention=("sampling.max_new_tokens * 4",)),
    Rule("A09", "KL growth", kl_growth, ("kl/ref",), ("reward/total", "eval"), limits={"level": 0.001, "fall": 0.3},
         intervention=("kl=k3_unbiased", "kl.coef * 2")),
    Rule("A10", "held-out score falls", overfit, ("eval",), ("reward/total",), warmup=0, confirm=1, limits={"evals": 2},
         intervention=("kl=k3_unbiased",)),
    Rule("A11", "reward collapse", reward_collapse, ("reward/total",), (), limits={
         "fall": 0.4, "fall_with_damage": 0.3, "z": 4.0, "windows": 1.0, "clip_growth": 5.0, "grad_growth": 4.0,
         "entropy_growth": 2.5}, intervention=("optim.lr / 2",)),
    Rule("A12", "format only", format_only, ("reward parts",), (), warmup=0, limits={
         "flag_steps": 25, "stop_steps": 45, "progress": 0.05, "near_floor": 0.25, "stop_floor": 0.02},
         intervention=("advantage=gdpo", "reward.parts.format.weight / 2")),
    Rule("A13", "repetition", repetition, ("text/repetition", "length/truncated"), ("reward/total",),
         limits={"growth": 0.1, "points": 0.1, "fall": 0.3}, intervention=("overlong=soft", "reward.parts.repetition.weight=0.5")),
    Rule("A14", "clip fraction", clip_fraction, ("clip/fraction",), ("optim/lr",), limits={"ratio": 5.0, "level": 2e-3},
         intervention=("optim.inner_epochs / 2", "optim.lr / 2")),
    Rule("A15", "off-policy", off_policy, (("shift/kl_old", "shift/ratio_q99", "shift/ratio_mean"),), ("reward/total",),
         limits={"kl": 0.1, "ratio": 4.0, "mean": 0.5, "fall": 0.3}, intervention=("optim.inner_epochs / 2",)),
    Rule("A16", "low-entropy tokens", low_entropy_tokens, ("entropy/low_share",), (), limits={"share": 0.9},
         intervention=("entropy=top_mask",)),
    Rule("A17", "sampler and trainer disagree", sampler_mismatch, ("shift/first_ratio_error",), warmup=0, confirm=2,
         limits={"tolerance": 0.05, "first_rows": 10}),
    Rule("A19", "no learning", no_learning, ("reward/total",), ("eval",), confirm=1,
         limits={"rows": 100, "steps": 100, "change": 0.3, "z": 3.0}),
)  # fmt: skip

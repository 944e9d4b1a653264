"""Graded rules about rewards, groups and held-out scores; pure functions like those in `policy_rules`."""

from __future__ import annotations

from reasonrl.alerts.history import History
from reasonrl.alerts.readings import (
    apart,
    fell,
    gained,
    growth,
    held_out_defends,
    held_out_flat,
    numbers,
    once_gained,
    percent,
    reward_fall,
    risen_by,
    saturated,
    short,
    stays_above,
)
from reasonrl.alerts.series import Series
from reasonrl.alerts.types import Finding, Limits


def flat_groups(h: History, t: Limits) -> Finding | None:
    """A05: too many groups without reward spread; all-wrong and all-right call for opposite data."""
    flat = h.series("groups/flat")
    if flat is None or flat.mean() <= t["share"]:
        return None
    level = flat.mean()
    wrong, right = h.series("groups/all_wrong"), h.series("groups/all_right")
    wrong_level = wrong.mean() if wrong else None
    right_level = right.mean() if right else None if wrong_level is None else level - wrong_level
    base = flat.baseline.mean if flat.baseline else None
    evidence = numbers(flat=level, all_wrong=wrong_level, all_right=right_level, baseline=base, chance=by_chance(h))
    evidence |= {"window": flat.span()} | ({"estimated": list(h.estimated)} if h.estimated else {})
    text = f"{percent(level)} of groups have no reward spread"
    advice = ""
    if wrong_level is not None and right_level is not None:
        advice = f" Sample dynamically, or take {'harder' if right_level > wrong_level else 'easier'} problems."
    hopeless = wrong_level is not None and stays_above(wrong, t["all_wrong"]) and not gained(h)
    needed = t["steps"] if (wrong_level or 0.0) > t["surely"] else t["patience"]
    if hopeless and wrong_level is not None and h.rollouts() >= needed:
        message = f"{text}, {percent(wrong_level)} are all wrong, and the reward never rose above its start."
        return Finding("stop", message + advice, evidence, wrong_level)
    if risen_by(flat, t["growth"]) and held_out_flat(h) and not saturated(h):
        message = f"{text} (at the start {percent(base or 0.0)}) while the held-out score is flat."
        return Finding("flag", message + advice, evidence, level)
    if stays_above(flat, t["all_wrong"]):
        return Finding("flag", f"{text}: nearly every update is empty." + advice, evidence, level)
    return Finding("note", text + "." + advice, evidence, level)


def by_chance(h: History) -> float | None:
    """Flat share p^G + (1-p)^G expected when every problem were equally hard; None when G or p is unknown."""
    reward = h.series("reward/total")
    if not h.group_size or reward is None or reward.lowest < 0 or reward.highest > 1:
        return None
    p = reward.mean()
    return float(p**h.group_size + (1 - p) ** h.group_size)


def overfit(h: History, t: Limits) -> Finding | None:
    """A10: a held-out score is clearly under its best; a stop when it stays so while the train reward rises."""
    reward = h.series("reward/total")
    found: Finding | None = None
    for name, scores in h.held_out.items():
        if not scores.below or scores.best <= 0:
            continue
        lost = 1 - scores.last / scores.best
        evidence = {"name": name, "window": [scores.best_step, scores.last_step]}
        evidence |= numbers(score=scores.last, best=scores.best, noise=scores.noise())
        text = f"{name} is {percent(lost)} under its best ({short(scores.last)}, was {short(scores.best)})"
        rising = reward is not None and scores.best_reward is not None and reward.mean() > scores.best_reward
        undone = scores.best - scores.last >= t["gain_lost"] * (scores.best - scores.first)
        if rising and undone and scores.below >= t["evals"] and scores.count >= t["known"]:
            text += f" at {scores.below} evaluations in a row while the train reward rises."
            return Finding("stop", text, evidence, lost)
        found = found or Finding("flag", text + ".", evidence, lost)
    return found


def last(series: Series, rows: int) -> set[float]:
    """The distinct values of the newest rows."""
    return set(list(series.window.values)[-rows:])


def reward_collapse(h: History, t: Limits) -> Finding | None:
    """A11: the train reward's window is far under its best window; other signs of damage lower the bar."""
    fall = reward_fall(h)
    if fall is None or fall.z < (3 + fall.needed_z) / 2:
        return None
    signs = damage(h, t)
    lasting = fall.beyond(t["fall"]) or (bool(signs) and fall.beyond(t["fall_with_damage"]))
    if not lasting and not (len(signs) > 1 and fall.share >= t["flag_with_damage"]):
        return None
    evidence = numbers(reward=fall.now.mean, best=fall.best.mean, lost=fall.share, z=min(fall.z, 999.0)) | {
        "damage": signs
    }
    evidence |= {"best_window": [fall.best.start, fall.best.end], "window": [fall.now.start, fall.now.end]}
    levels = f"{short(fall.best.mean)} to {short(fall.now.mean)}"
    text = f"The train reward lost {percent(fall.share)} of its best window ({levels})"
    text += f", with {' and '.join(signs)}" if signs else ""
    if lasting and h.held("A11") > t["windows"] * fall.now.rows and not held_out_defends(h, "A11"):
        return Finding("stop", text + ", for a second window.", evidence, fall.share)
    return Finding("flag", text + ".", evidence, fall.share)


def destroyed(h: History, t: Limits) -> Finding | None:
    """A11, within the first rows: a policy that earned something earns nothing at all, and its text broke down.

    With every group flat there is no gradient, so no later step can bring it back; the usual warm-up would only wait.
    Later on A03, A06 and A11 judge against baselines, and a log of one group per row has such streaks in good runs.
    """
    rows = int(t["rows"])
    reward, flat = h.train.get("reward/total"), h.train.get("groups/flat")
    if reward is None or flat is None or not rows < reward.count <= t["first_rows"] or reward.highest <= 0:
        return None
    if last(reward, rows) != {0.0} or last(flat, rows) != {1.0}:
        return None
    entropy, cut = h.train.get("entropy/mean"), h.train.get("length/truncated")
    signs = []
    if cut is not None and min(last(cut, rows)) >= t["truncated"] and cut.lowest < 0.5:
        signs.append("every answer cut off")
    if entropy is not None and max(last(entropy, rows)) < t["entropy"] * entropy.highest:
        signs.append("next to no entropy left")
    # garbage can have any entropy, so low entropy decides only where truncation is not logged
    if cut is not None and signs[:1] != ["every answer cut off"]:
        signs = []
    jump = h.train.get("shift/kl_old")
    if jump is not None and jump.highest >= t["jump"]:
        signs.append(f"a step that moved the policy by {short(jump.highest)} nats a token")
    if not signs:
        return None
    start = reward.window.steps[-rows]
    evidence = numbers(reward=0.0, best=reward.highest, flat=1.0) | {
        "damage": signs,
        "window": [start, reward.last_step],
    }
    text = f"The reward was up to {short(reward.highest)} and is exactly 0 for {rows} rows, with {' and '.join(signs)}"
    return Finding("stop", text + "; every group is flat, so no update can mend it.", evidence, 1)


def damage(h: History, t: Limits) -> list[str]:
    """Signs, apart from the reward, that the policy itself was damaged."""
    signs = []
    clip, grad, entropy = h.ready("clip/fraction"), h.ready("optim/grad_norm"), h.ready("entropy/mean")
    if clip is not None and clip.mean() > 1e-3 and growth(clip) > t["clip_growth"]:
        signs.append("clipping up")
    if grad is not None and growth(grad) > t["grad_growth"]:
        signs.append("gradient norm up")
    lowest = entropy.lowest_window if entropy is not None else None
    if entropy is not None and lowest is not None and entropy.mean() > t["entropy_growth"] * lowest.mean:
        signs.append("entropy up from its lowest window")
    return signs


def format_only(h: History, t: Limits) -> Finding | None:
    """A12: a format part rose while every correctness part stands at its floor; parts that never moved are dead."""
    risen = [(name, part) for name, part in h.parts("format") if has_risen(part)]
    correct = [(name, part) for name, part in h.parts("correct") if part.lowest != part.highest]
    if not risen or not correct or not all(stuck(part, t) for _, part in correct):
        return None
    # The rise is dated to the middle of the window it was found in.
    held = h.held_steps("A12") + h.window / 2
    name, part = risen[0]
    evidence = numbers(format=part.mean(), start=part.baseline.mean if part.baseline else None, steps=held)
    evidence |= {"part": name, "stuck": numbers(**{key: value.mean() for key, value in correct})}
    evidence["window"] = [max(h.first_step, h.step - held * h.unit), h.step]
    text = f"{name} rose to {short(part.mean())} while correctness stood at its floor for {held:.0f} rollout steps."
    lowest = all(p.mean() - p.floor() <= t["stop_floor"] * max(1.0, p.highest) for _, p in correct)
    if held >= t["stop_steps"] and lowest:
        return Finding("stop", text, evidence, 1)
    return Finding("flag" if held >= t["flag_steps"] else "note", text, evidence, 1)


def has_risen(part: Series) -> bool:
    """True when a part is above its baseline, or leapt up so early that the baseline has the leap in it."""
    leap = part.mean() - part.early
    return risen_by(part, 0.1 * (part.highest - part.lowest)) or leap > 0.5 * part.highest


def stuck(part: Series, t: Limits) -> bool:
    """True when a correctness part made no progress from its baseline and is still near its floor."""
    base = part.baseline
    if base is None:
        return False
    now, scale = part.level(), max(1.0, part.highest)
    moved = now.mean - base.mean > max(t["progress"] * scale, 2 * apart(now, base))
    return not moved and now.mean - part.floor() <= t["near_floor"] * scale


def no_learning(h: History, t: Limits) -> Finding | None:
    """A19: neither the train reward nor a held-out score moved over the whole run."""
    reward = h.ready("reward/total")
    if reward is None or reward.count < t["rows"] or h.rollouts() < t["steps"]:
        return None
    (change, z), std = reward.trend(), reward.std()
    if change > t["change"] * std and z > t["z"]:
        return None
    if saturated(h) or gained(h) or once_gained(h) or fell(h, 0.2):
        return None
    for scores in h.held_out.values():
        if scores.count > 1 and scores.best - scores.first > max(2 * scores.noise(), 0.03 * abs(scores.first)):
            return None
    evidence = numbers(change=change, std=std, z=z) | {"window": [reward.first_step, reward.last_step]}
    message = f"Nothing was learned in {h.rollouts():.0f} rollout steps: the reward is as flat as its noise."
    return Finding("flag", message, evidence, 1)

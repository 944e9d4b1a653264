"""Graded rules about the length of answers; pure functions like those in `policy_rules`."""

from __future__ import annotations

from reasonrl.alerts.history import History
from reasonrl.alerts.readings import fell, gained, growth, multiple, numbers, percent, reward_flat, risen_by
from reasonrl.alerts.series import Series
from reasonrl.alerts.types import Finding, Limits


def length_growth(h: History, t: Limits) -> Finding | None:
    """A06: answers grow (alone a note: often the sign of success) or run into the token budget."""
    length, cut = h.ready("length/mean"), h.ready("length/truncated")
    if cut is not None and cut.baseline is not None and risen_by(cut, t["points"]):
        points = cut.mean() - cut.baseline.mean
        evidence = numbers(truncated=cut.mean(), growth=points) | {"window": cut.span()}
        text = f"Truncated answers grew by {100 * points:.0f} points to {percent(cut.mean())}"
        if fell(h, t["fall"]):
            return Finding("stop", f"{text} and the train reward fell.", evidence, points)
        return Finding("flag", text + ".", evidence, points)
    times = growth(length) if length is not None else 0.0
    if length is not None and times > t["idle_ratio"] and reward_flat(h) and not gained(h):
        evidence = numbers(length=length.mean(), ratio=times) | {"window": length.span()}
        message = f"Answers are {multiple(times)} as long as at the start, without any gain in reward."
        return Finding("flag", message, evidence, times)
    if length is not None and times > t["ratio"]:
        evidence = numbers(length=length.mean(), ratio=times) | {"window": length.span()}
        return Finding("note", f"Answers are {multiple(times)} as long as at the start.", evidence, times)
    return None


def length_collapse(h: History, t: Limits) -> Finding | None:
    """A07: answers shrink to a fraction of the start; with a fallen reward the reasoning is gone."""
    length = h.ready("length/mean")
    if length is None or growth(length) >= t["ratio"]:
        return None
    share = growth(length)
    evidence = numbers(length=length.mean(), ratio=share) | {"window": length.span()}
    text = f"Answers are {percent(share)} as long as at the start"
    if fell(h, t["fall"]):
        return Finding("stop", f"{text} and the train reward fell.", evidence, 1 / max(share, 1e-9))
    return Finding("note", text + ".", evidence, 1 / max(share, 1e-9))


def all_truncated(h: History, t: Limits) -> Finding | None:
    """A08: in the first rows every answer is cut off and earns nothing: the token budget is too small."""
    cut, reward = h.train.get("length/truncated"), h.train.get("reward/total")
    if cut is None or reward is None or cut.count < t["rows"]:
        return None
    if cut.count > t["first_rows"]:
        return _mostly_truncated(h, cut, t)
    if cut.lowest < t["share"] or reward.highest > 0 or reward.lowest != reward.highest:
        return None
    spread, flat = h.train.get("reward/std"), h.train.get("groups/flat")
    if (spread is not None and spread.highest > 0) or (flat is not None and flat.lowest < 1):
        return None
    if reward.highest < 0 and cut.count < 3 * t["rows"]:  # a penalty may well be the floor, but 0 surely is
        return None
    evidence = numbers(truncated=cut.mean(), reward=reward.last) | {"window": [cut.first_step, cut.last_step]}
    message = f"Every answer of the first {cut.count} rows is cut off and none earns a reward."
    return Finding("stop", message + " Easier problems would not help; more tokens would.", evidence, 1)


def _mostly_truncated(h: History, cut: Series, t: Limits) -> Finding | None:
    """Later on: from the start nearly all answers are cut off, and the reward does not move."""
    if cut.count < 2 * t["first_rows"] or not cut.full or gained(h) or not h.ready("reward/total"):
        return None
    if min(cut.opening, cut.mean()) < t["mostly"]:
        return None
    evidence = numbers(truncated=cut.mean(), first=cut.opening) | {"window": cut.span()}
    return Finding("flag", f"{percent(cut.mean())} of answers are cut off and the reward does not move.", evidence, 1)


def repetition(h: History, t: Limits) -> Finding | None:
    """A13: n-gram repetition grows together with truncation."""
    loops, cut = h.ready("text/repetition"), h.ready("length/truncated")
    if loops is None or cut is None or not risen_by(loops, t["growth"]) or not risen_by(cut, t["points"]):
        return None
    more = loops.mean() - (loops.baseline.mean if loops.baseline else 0.0)
    points = cut.mean() - (cut.baseline.mean if cut.baseline else 0.0)
    evidence = numbers(repetition=loops.mean(), growth=more, truncated=points) | {"window": loops.span()}
    text = f"Repeated n-grams grew by {100 * more:.0f} points and truncated answers by {100 * points:.0f}"
    if fell(h, t["fall"]):
        return Finding("stop", f"{text}, and the train reward fell.", evidence, more)
    return Finding("flag", text + ".", evidence, more)

"""Graded rules about the update and the policy: finite numbers, entropy, clipping, shift, KL.

Every rule is a pure function of the history and its limits: None, or a `Finding`. Waiting (warm-up, confirmation,
hysteresis) is the monitor's business, so no rule keeps a state of its own.
"""

from __future__ import annotations

import math

from reasonrl.alerts.history import History
from reasonrl.alerts.readings import (
    fell,
    gained,
    held_out_defends,
    held_out_fell,
    held_out_flat,
    multiple,
    not_rising,
    nothing_gained,
    numbers,
    percent,
    recent_fall,
    risen_by,
    saturated,
    short,
    stalled_for,
)
from reasonrl.alerts.series import Series
from reasonrl.alerts.types import Finding, Limits


def non_finite(h: History, t: Limits) -> Finding | None:
    """A01: a NaN or infinite field; a stop when the update's own numbers are, twice in a row, or the weights."""
    window = {"window": [h.step, h.step]}
    if h.row.get("optim/weights_nonfinite", 0) > 0:
        return Finding("stop", "The weights hold NaN or infinite values.", window, math.inf)
    if not h.bad_fields:
        return None
    names = sorted(h.bad_fields)
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    evidence = {"fields": names[:50], "rows_in_a_row": h.bad_rows} | window
    if not h.bad_vital:
        return Finding("note", f"NaN or infinite, though not in the update itself: {shown}.", evidence, 1)
    if h.bad_rows >= t["rows"]:
        return Finding("stop", f"NaN or infinite for {h.bad_rows} rows in a row: {shown}.", evidence, h.bad_rows)
    return Finding("flag", f"NaN or infinite: {shown}.", evidence, 1)


def no_update(h: History, t: Limits) -> Finding | None:
    """A02: rewards differ within groups, but the gradient norm and every sign of a moving policy are exactly 0."""
    signs = [h.row[name] for name in ("shift/kl_old", "kl/ref", "clip/fraction") if name in h.row]
    spread, grad = h.row.get("reward/std"), h.row.get("optim/grad_norm")
    if spread is None or grad is None or not signs or not spread > 0 or grad != 0 or any(signs):
        return None
    if h.row.get("groups/flat", 0.0) > t["flat"] or h.row.get("optim/lr", 1.0) == 0:
        return None
    # A log of every tenth step shows the mean spread of ten steps beside the gradient norm of one of them, which
    # may have been empty; only KL to the reference, which never returns to exactly 0, settles that.
    if h.spacing() > h.unit and "kl/ref" not in h.row:
        return None
    held = h.held("A02")
    evidence = numbers(reward_spread=spread, grad_norm=grad) | {"rows_in_a_row": held}
    evidence["window"] = [h.since.get("A02", h.step), h.step]
    severity = "stop" if held >= t["rows"] else "flag" if held >= t["rows"] - 1 else "note"
    message = f"Rewards differ within groups (std {short(spread)}), yet gradient norm and policy shift are exactly 0."
    return Finding(severity, message + " Check that the optimizer holds the trained weights.", evidence, held)


def entropy_collapse(h: History, t: Limits) -> Finding | None:
    """A03: the entropy window is under half its baseline; what the reward does decides how bad that is."""
    entropy = h.ready("entropy/mean")
    if entropy is None or entropy.baseline is None:
        return None
    base = entropy.baseline.mean
    if entropy.early > 0.05 * base:  # a surge inside the baseline is no level to fall from
        base = min(base, 2 * entropy.early)
    if base <= 0 or entropy.mean() >= t["ratio"] * base:
        return None
    now = entropy.level()
    evidence = numbers(entropy=now.mean, baseline=base, ratio=now.mean / base) | {"window": [now.start, now.end]}
    text = f"Entropy {short(now.mean)} nats is {percent(now.mean / base)} of its baseline {short(base)}"
    badness = base / now.mean if now.mean > 0 else math.inf
    if not not_rising(h):
        return Finding("note", text + ".", evidence, badness)
    text += f" and the {'reward' if held_out_flat(h) is None else 'held-out score'} no longer rises"
    reasons = []
    if held_out_fell(h):
        reasons.append("the held-out score fell")
    if fell(h, t["fall"]):
        reasons.append("the train reward fell")
    if nothing_gained(h) and risen_by(h.ready("groups/flat"), t["flat_growth"]) and not saturated(h):
        reasons.append("flat groups grew without any gain in reward")
    floor = min(t["stop_ratio"] * base, t["stop_nats"])
    for_long = now.mean < floor and max(level for _, level in list(entropy.blocks)[-3:]) < 2 * floor
    if for_long and stalled_for(h, t["stalled"]) and not saturated(h):
        reasons.append("too little is left to explore with")
    if reasons:
        return Finding("stop", f"{text}; {' and '.join(reasons)}.", evidence, badness)
    return Finding("flag", text + ".", evidence, badness)


def entropy_surge(h: History, t: Limits) -> Finding | None:
    """A04: entropy far above its start and above one nat."""
    entropy, reward = h.train.get("entropy/mean"), h.train.get("reward/total")
    if entropy is None or entropy.count < 5:
        return None
    base = min(entropy.early, entropy.baseline.mean if entropy.baseline else math.inf)
    now = entropy.recent()
    if base <= 0 or min(now, entropy.last) <= max(t["ratio"] * base, t["nats"]):
        return None
    window = [entropy.window.steps[len(entropy.window.steps) // 2], entropy.last_step]
    evidence = numbers(entropy=now, baseline=base, last=entropy.last) | {"window": window}
    text = f"Entropy {short(now)} nats is {multiple(now / base)} its start ({short(base)})"
    lost = recent_fall(reward) if reward is not None else 0.0
    if lost >= t["fall"]:
        return Finding("stop", f"{text} and the train reward is {percent(lost)} down.", evidence, now / base)
    lowest = min(base, entropy.lowest_window.mean if entropy.lowest_window else base)
    if now > t["garbage_nats"] and now > t["garbage_ratio"] * lowest:
        return Finding("stop", f"{text}: close to random tokens.", evidence, now / base)
    return Finding("flag", text + ".", evidence, now / base)


def kl_growth(h: History, t: Limits) -> Finding | None:
    """A09: KL to the reference rises in four half windows in a row, or ever faster."""
    kl = h.series("kl/ref")
    if kl is None:
        return None
    if len(kl.blocks) < 5:
        return _large_kl(h, kl, t)
    levels = [level for _, level in kl.blocks][-5:]
    rises = [b - a for a, b in zip(levels[:-1], levels[1:], strict=True)]
    faster = rises[-1] > rises[-2] > rises[-3] > 0 and rises[-1] > 2 * rises[-3]
    if levels[-1] < max(t["level"], t["growth"] * levels[0]) or not (faster or min(rises) > 0):
        return _large_kl(h, kl, t)
    evidence = numbers(kl=levels[-1], before=levels[0]) | {"window": [kl.blocks[-5][0], kl.blocks[-1][0]]}
    text = f"KL to the reference rose {'ever faster' if faster else 'in four windows in a row'} to {short(levels[-1])}"
    steep = faster or levels[-1] >= t["stop_growth"] * levels[0]
    # KL creeps up in good runs too, where harder data can lower the reward
    if fell(h, t["fall"] if steep else t["fall_creeping"]) and not held_out_defends(h, "A09"):
        return Finding("stop", f"{text} while the train reward fell.", evidence, levels[-1])
    if held_out_flat(h) or held_out_fell(h):
        return Finding("flag", f"{text} while the held-out score is flat or down.", evidence, levels[-1])
    return _large_kl(h, kl, t) or Finding("note", text + ".", evidence, levels[-1])


def _large_kl(h: History, kl: Series, t: Limits) -> Finding | None:
    """A flag for a KL far from where it began, with nothing to show for it."""
    if kl.mean() < t["far"] or kl.mean() < 10 * kl.early or gained(h) or not h.ready("reward/total"):
        return None
    evidence = numbers(kl=kl.mean(), start=kl.early) | {"window": kl.span()}
    return Finding(
        "flag", f"KL to the reference is {short(kl.mean())} without any gain in reward.", evidence, kl.mean()
    )


def clip_fraction(h: History, t: Limits) -> Finding | None:
    """A14: far more clipping than at the start and still rising, or none at all where there used to be some."""
    clip = h.ready("clip/fraction")
    if clip is None or clip.baseline is None or clip.baseline.mean <= 0:
        return None
    base, now = clip.baseline.mean, clip.mean()
    evidence = numbers(clip=now, baseline=base) | {"window": clip.span()}
    if now > t["level"] and now > t["ratio"] * base and clip.recent() > now:
        message = f"The clip fraction {short(now)} is {multiple(now / base)} its start and rising."
        return Finding("flag", message, evidence, now / base)
    if now == 0 and base > clip.baseline.std:
        rate = h.train.get("optim/lr")
        if rate is None or rate.last > 0.1 * rate.highest:
            message = f"Nothing is clipped any more (at the start {short(base)}): the policy hardly moves."
            return Finding("flag", message, evidence, 1)
    return None


def off_policy(h: History, t: Limits) -> Finding | None:
    """A15: within one rollout step the policy leaves the one that sampled the data."""
    found: dict[str, float] = {}
    for name, limit in (("shift/kl_old", t["kl"]), ("shift/ratio_q99", t["ratio"])):
        series = h.series(name)
        if series is not None and abs(series.recent()) > limit:
            found[name] = series.recent()
    low, mean = h.series("shift/ratio_q01"), h.series("shift/ratio_mean")
    if low is not None and low.recent() < 1 / t["ratio"]:
        found["shift/ratio_q01"] = low.recent()
    if mean is not None and abs(mean.recent() - 1) > t["mean"]:
        found["shift/ratio_mean"] = mean.recent()
    if not found:
        return None
    evidence = numbers(**found) | {"window": [h.step - h.window * h.unit + 1, h.step]}
    text = "The policy leaves the one that sampled: " + ", ".join(f"{name} {short(v)}" for name, v in found.items())
    badness = max(abs(value) for value in found.values())
    if fell(h, t["fall"]):
        return Finding("stop", f"{text}, and the train reward fell.", evidence, badness)
    return Finding("flag", text + ".", evidence, badness)


def low_entropy_tokens(h: History, t: Limits) -> Finding | None:
    """A16: nearly all tokens are decided; a flag together with A03."""
    share = h.series("entropy/low_share")
    if share is None or share.mean() <= t["share"]:
        return None
    evidence = numbers(low_share=share.mean()) | {"window": share.span()}
    severity = "flag" if h.raised.get("A03", [""])[0] in ("flag", "stop") else "note"
    return Finding(severity, f"{percent(share.mean())} of tokens have almost no entropy.", evidence, share.mean())


def sampler_mismatch(h: History, t: Limits) -> Finding | None:
    """A17: before any update the trainer's probabilities must equal the sampler's."""
    error = h.train.get("shift/first_ratio_error")
    if error is None or error.count > t["first_rows"] or min(error.window.values) <= t["tolerance"]:
        return None
    evidence = numbers(error=error.mean()) | {"window": [error.first_step, error.last_step]}
    message = f"On fresh samples the log-ratio is off 0 by {short(error.mean())}: sampler and trainer disagree."
    advice = " Use the same temperature and top-p/top-k filter on both sides."
    return Finding("stop", message + advice, evidence, error.mean())

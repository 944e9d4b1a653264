"""The literal alert table of the textbook chapters, each row a stop: for comparison, and for who wants exactly it.

Windows are the chapters' own: the last 10 rows against the first 10, nothing before row 20. Literal also means
without regard for the log's step unit.
"""

from __future__ import annotations

from reasonrl.alerts.history import History
from reasonrl.alerts.readings import multiple, numbers, percent, short
from reasonrl.alerts.series import Series
from reasonrl.alerts.types import Finding, Limits, Rule

ROWS = 20


def _ready(h: History, name: str) -> Series | None:
    series = h.series(name)
    return series if series is not None and series.count >= ROWS else None


def entropy_halved(h: History, t: Limits) -> Finding | None:
    """Entropy, mean of the last 10 rows under 50 % of the first 10."""
    entropy = _ready(h, "entropy/mean")
    if entropy is None or entropy.mean() >= t["ratio"] * entropy.opening:
        return None
    evidence = numbers(entropy=entropy.mean(), first=entropy.opening) | {"window": entropy.span()}
    message = f"Entropy {short(entropy.mean())} is under half of its first rows ({short(entropy.opening)})."
    return Finding("stop", message, evidence, entropy.opening / max(entropy.mean(), 1e-9))


def many_flat_groups(h: History, t: Limits) -> Finding | None:
    """Zero-advantage share, mean of the last 10 rows over 30 %."""
    flat = _ready(h, "groups/flat")
    if flat is None or "groups/flat" in h.estimated or flat.mean() <= t["share"]:
        return None
    evidence = numbers(flat=flat.mean()) | {"window": flat.span()}
    return Finding("stop", f"{percent(flat.mean())} of groups have no advantage.", evidence, flat.mean())


def empty_steps(h: History, t: Limits) -> Finding | None:
    """Advantage std zero in more than half of the last 10 rows."""
    std = _ready(h, "advantage/std") or _ready(h, "reward/std")
    if std is None:
        return None
    share = sum(value < 1e-6 for value in std.window.values) / len(std.window.values)
    if share <= t["share"]:
        return None
    evidence = numbers(share=share) | {"window": std.span()}
    return Finding("stop", f"The advantage std is 0 in {percent(share)} of the last rows.", evidence, share)


def length_tripled(h: History, t: Limits) -> Finding | None:
    """Length, mean of the last 10 rows over 3 times the first 10."""
    length = _ready(h, "length/mean")
    if length is None or length.mean() <= t["ratio"] * length.opening:
        return None
    evidence = numbers(length=length.mean(), first=length.opening) | {"window": length.span()}
    times = length.mean() / max(length.opening, 1e-9)
    return Finding("stop", f"Answers are {multiple(times)} as long as at first.", evidence, times)


def kl_rises(h: History, t: Limits) -> Finding | None:
    """KL rising over four windows."""
    kl = h.series("kl/ref")
    halves = 2 * int(t["windows"])
    if kl is None or len(kl.blocks) < halves:
        return None
    blocks = list(kl.blocks)[-halves:]
    levels = [(a + b) / 2 for (_, a), (_, b) in zip(blocks[::2], blocks[1::2], strict=True)]
    if not all(b > a for a, b in zip(levels[:-1], levels[1:], strict=True)):
        return None
    evidence = numbers(kl=levels[-1], before=levels[0]) | {"window": [blocks[0][0], blocks[-1][0]]}
    return Finding("stop", f"KL rose over four windows, to {short(levels[-1])}.", evidence, levels[-1])


def train_up_validation_flat(h: History, t: Limits) -> Finding | None:
    """Train reward up while a validation score found no new best in its last three evaluations."""
    reward = _ready(h, "reward/total")
    if reward is None or reward.mean() <= reward.opening:
        return None
    for name, scores in h.held_out.items():
        if scores.count > t["evals"] and scores.count - scores.best_row >= t["evals"]:
            evidence = numbers(score=scores.last, best=scores.best) | {"name": name}
            evidence["window"] = [scores.best_step, scores.last_step]
            return Finding("stop", f"The train reward is up while {name} is flat.", evidence, 1)
    return None


def _rule(code: str, title: str, check, needs, intervention: str, name: str = "", **limits: float) -> Rule:  # type: ignore[no-untyped-def]
    return Rule(code, title, check, needs, (), limits, (intervention,), warmup=0, confirm=1, name=name)


FLAT_NAME = "A05 empty updates"
TEXTBOOK: tuple[Rule, ...] = (
    _rule("A03", "entropy halved", entropy_halved, ("entropy/mean",), "loss=clip_higher", ratio=0.5),
    _rule("A05", "zero-advantage share", many_flat_groups, ("groups/flat",), "data=dynamic_sampling", share=0.3),
    _rule("A05", "empty updates", empty_steps, (("advantage/std", "reward/std"),), "data=dynamic_sampling",
          name=FLAT_NAME, share=0.5),
    _rule("A06", "length tripled", length_tripled, ("length/mean",), "overlong=soft", ratio=3.0),
    _rule("A09", "KL rises", kl_rises, ("kl/ref",), "kl.coef * 2", windows=4),
    _rule("A10", "train up, validation flat", train_up_validation_flat, ("reward/total", "eval"), "kl=k3_unbiased",
          evals=3),
)  # fmt: skip

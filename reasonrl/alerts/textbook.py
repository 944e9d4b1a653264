"""The literal alert table of the textbook chapters, each row a stop: for comparison, and for whoever wants exactly it.

Windows are the chapters' own: the last 10 rows against the first 10, nothing before row 20.
"""

from __future__ import annotations

from reasonrl.alert_history import History
from reasonrl.alert_rules import Finding, Limits, Rule, numbers, span

ROWS = 20


def entropy_halved(h: History, t: Limits) -> Finding | None:
    """Entropy, mean of the last 10 rows under 50 % of the first 10."""
    entropy = h.series("entropy/mean")
    if entropy is None or entropy.count < ROWS:
        return None
    now, first = entropy.long.mean(), entropy.opening
    if now >= t["ratio"] * first:
        return None
    evidence = numbers(entropy=now, first=first) | {"window": span(entropy)}
    return Finding("stop", f"Entropy {now:.3g} is under half of its first rows ({first:.3g}).", evidence, 1)


def many_flat_groups(h: History, t: Limits) -> Finding | None:
    """Zero-advantage share, mean of the last 10 rows over 30 %."""
    flat = h.series("groups/flat")
    if flat is None or "groups/flat" in h.estimated or flat.count < ROWS or flat.long.mean() <= t["share"]:
        return None
    evidence = numbers(flat=flat.long.mean()) | {"window": span(flat)}
    return Finding("stop", f"{100 * flat.long.mean():.0f} % of groups have no advantage.", evidence, 1)


def empty_steps(h: History, t: Limits) -> Finding | None:
    """Advantage std zero in more than half of the last 10 rows."""
    std = h.series("advantage/std") or h.series("reward/std")
    if std is None or std.count < ROWS:
        return None
    share = sum(value < 1e-6 for _, value in std.long.items) / len(std.long.items)
    if share <= t["share"]:
        return None
    evidence = numbers(share=share) | {"window": span(std)}
    return Finding("stop", f"The advantage std is 0 in {100 * share:.0f} % of the last rows.", evidence, 1)


def length_tripled(h: History, t: Limits) -> Finding | None:
    """Length, mean of the last 10 rows over 3 times the first 10."""
    length = h.series("length/mean")
    if length is None or length.count < ROWS or length.long.mean() <= t["ratio"] * length.opening:
        return None
    evidence = numbers(length=length.long.mean(), first=length.opening) | {"window": span(length)}
    return Finding(
        "stop",
        f"Answers are {length.long.mean() / length.opening:.1f} times as long as at first.",
        evidence,
        1,
    )


def kl_rises(h: History, t: Limits) -> Finding | None:
    """KL rising over four windows."""
    kl = h.series("kl/ref")
    if kl is None or len(kl.blocks) < t["windows"]:
        return None
    blocks = list(kl.blocks)[-int(t["windows"]) :]
    levels = [level for _, level in blocks]
    if not all(b > a for a, b in zip(levels, levels[1:], strict=False)):
        return None
    evidence = numbers(kl=levels[-1], before=levels[0]) | {"window": [blocks[0][0], blocks[-1][0]]}
    return Finding("stop", f"KL rose over four windows, to {levels[-1]:.3g}.", evidence, 1)


def train_up_validation_flat(h: History, t: Limits) -> Finding | None:
    """Train reward up while the validation score found no new best in its last three evaluations."""
    reward = h.series("reward/total")
    if reward is None or reward.count < ROWS or reward.long.mean() <= reward.opening:
        return None
    for name, scores in h.held_out.items():
        if scores.count >= t["evals"] + 1 and scores.count - scores.best_row >= t["evals"]:
            evidence = numbers(score=scores.last, best=scores.best) | {"name": name}
            evidence["window"] = [scores.best_step, scores.last_step]
            return Finding("stop", f"The train reward is up while {name} is flat.", evidence, 1)
    return None


TEXTBOOK: tuple[Rule, ...] = (
    Rule("A03", "entropy halved", entropy_halved, ("entropy/mean",), warmup=0, confirm=1, limits={"ratio": 0.5},
         intervention=("loss=clip_higher",)),
    Rule("A05", "zero-advantage share", many_flat_groups, ("groups/flat",), warmup=0, confirm=1, limits={"share": 0.3},
         intervention=("data=dynamic_sampling",)),
    Rule("A05", "empty updates", empty_steps, (("advantage/std", "reward/std"),), warmup=0, confirm=1,
         limits={"share": 0.5}, intervention=("data=dynamic_sampling",), name="A05 empty"),
    Rule("A06", "length tripled", length_tripled, ("length/mean",), warmup=0, confirm=1, limits={"ratio": 3.0},
         intervention=("overlong=soft",)),
    Rule("A09", "KL rises", kl_rises, ("kl/ref",), warmup=0, confirm=1, limits={"windows": 4},
         intervention=("kl.coef * 2",)),
    Rule("A10", "train up, validation flat", train_up_validation_flat, ("reward/total", "eval"), warmup=0, confirm=1,
         limits={"evals": 3}, intervention=("kl=k3_unbiased",)),
)  # fmt: skip

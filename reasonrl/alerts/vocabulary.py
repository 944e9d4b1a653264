"""What a metric name says: a held-out score, a format or a correctness part, or a number that must stay finite."""

from __future__ import annotations

import functools
import re

# Held-out numbers that are no "higher is better" score.
NOT_SCORES = frozenset(
    """
    loss length truncated entropy kl std runtime second clip clipped epoch flat step steps token tokens time min max
    ratio majority distinct samples problems count lr error wer cer penalty perplexity ppl format num maj best
    sequence sequences lengths len stop advantages advantage none turns memory coef variance
    """.split()  # noqa: SIM905
)
CORRECT = (
    "correct", "accura", "answer", "solv", "success", "succeed", "pass", "exact", "check_", "/acc", "outcome",
)  # fmt: skip
FORMAT = (
    "format", "xml", "tag", "think", "compil", "struct", "json", "syntax", "style", "function_works", "proxy",
    "template",
)  # fmt: skip
NOT_PARTS = ("reward/total", "reward/std", "reward/mean")
# Words of metrics whose NaN says nothing about the weights: a reward function that abstained, an evaluation that
# did not run, the spread of one value, a timer.
HARMLESS = frozenset(
    "eval val test validation time timing timer speed perf data std terminated reward rewards throughput".split()  # noqa: SIM905
)


@functools.cache
def words(name: str) -> frozenset[str]:
    """The lower-case words of a metric name, split at slashes, underscores, dashes, dots, @ and blanks."""
    return frozenset(re.split(r"[/_\-. @:]+", name.lower()))


@functools.cache
def is_score(name: str) -> bool:
    """True for held-out scores (`eval/accuracy`, `eval/math`), false for eval/length and the like."""
    return name.startswith("eval/") and name != "eval/pass_at_k" and NOT_SCORES.isdisjoint(words(name))


@functools.cache
def part_kind(name: str) -> str | None:
    """Return 'format', 'correct' or 'other' for a reward part `reward/<name>`, else None; format words win."""
    if not name.startswith("reward/") or name in NOT_PARTS or name.endswith("/std"):
        return None
    lower = name.lower()
    if any(word in lower for word in FORMAT):
        return "format"
    return "correct" if any(word in lower for word in CORRECT) else "other"


@functools.cache
def is_vital(name: str) -> bool:
    """True when a non-finite value of this metric means that the update or the policy is broken."""
    return name in ("reward/total", "reward", "score") or HARMLESS.isdisjoint(words(name))

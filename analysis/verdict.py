"""What the comparison comes to: a sentence per arm that says "not distinguishable" when it is so."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from analysis.compare import FINISHED, LAST_SCORE, Comparison, arm_runs
from analysis.load import Results
from analysis.records import is_searched


def label(arm: str) -> str:
    """An arm's name as it is printed; one made of keys and values stays as it can be typed."""
    return arm if "=" in arm else arm.replace("_", "-")


def number(value: float, digits: int) -> str:
    """A value with `digits` decimals; "n/a" when it is not finite, no minus before a zero."""
    if not math.isfinite(value):
        return "n/a"
    text = f"{value:.{digits}f}"
    return text.lstrip("-") if float(text) == 0 else text


def enough_digits(values: Iterable[float], digits: int) -> int:
    """`digits`, or up to two more where a value that is not zero would read as zero."""
    for more in range(3):
        if all(value == 0 or float(f"{value:.{digits + more}f}") != 0 for value in values):
            return digits + more
    return digits + 2


def seeds_text(count: int) -> str:
    """ "1 seed", "3 seeds"."""
    return "1 seed" if count == 1 else f"{count} seeds"


def verdict(results: Results, comparisons: Sequence[Comparison]) -> list[str]:
    """The answer in plain sentences: one per arm, then what must be known about stopped and missing runs.

    Stopped runs count as their last score; where leaving them out would change the answer, that is said.
    """
    if results.runs.empty:
        return ["No runs are recorded: there is nothing to say."]
    if is_searched(results.plan):
        return [_search_verdict(results)]
    if len(results.arms) < 2:
        return [_one_arm(results)]
    sentences = [_arm_sentence(arm, comparisons) for arm in results.arms if arm != results.baseline]
    return [*sentences, *_stopped(results), *_undecided(results)]


def _arm_sentence(arm: str, comparisons: Sequence[Comparison]) -> str:
    mine = [each for each in comparisons if each.arm == arm]
    main = [each for each in mine if each.reading == LAST_SCORE]
    other = {each.measure.column: each for each in mine if each.reading == FINISHED}
    if not main or all(each.paired.n == 0 for each in main):
        base = main[0].baseline if main else "the baseline"
        return f"{label(arm)} and {label(base)} share no seed with a result: they cannot be compared."
    if max(each.paired.n for each in main) == 1:
        return _one_seed(main)
    clear = [_clear(each, first=i == 0) for i, each in enumerate(e for e in main if e.distinguishable)]
    rest = [each for each in main if not each.distinguishable]
    parts = ([f"{label(arm)} " + " and ".join(clear)] if clear else []) + _unclear(rest, bool(clear))
    parts += _changed(main, other)
    head = "" if clear else f"{label(arm)} against {label(main[0].baseline)}: "
    return head + "; ".join(parts) + "."


def _clear(each: Comparison, first: bool) -> str:
    """For instance: keeps 0.05 nats more entropy than symmetric (95 % 0.02 to 0.08, 3 seeds)."""
    paired, measure = each.paired, each.measure
    assert paired.t is not None
    words = measure.more if paired.mean > 0 else measure.less
    low, high = sorted(abs(end) for end in (paired.t.low, paired.t.high))
    digits = enough_digits((paired.mean, low, high), measure.digits)
    size = words.format(number(abs(paired.mean), digits)) + (f" than {label(each.baseline)}" if first else "")
    return f"{size} (95 % {number(low, digits)} to {number(high, digits)}, {seeds_text(paired.n)})"


def _unclear(rest: Sequence[Comparison], after: bool) -> list[str]:
    groups: dict[str, list[str]] = {}
    for each in rest:
        groups.setdefault(_why_unclear(each), []).append(each.measure.noun)
    return [f"{_and(nouns)} {why}" for why, nouns in groups.items()]


def _why_unclear(each: Comparison) -> str:
    paired = each.paired
    if paired.n == 0:
        return "not recorded in both arms"
    if paired.n == 1:
        return "known for one shared seed only, no interval"
    if paired.t is None:
        if paired.mean == 0:
            return f"identical in all {paired.n} seeds"
        size = number(abs(paired.mean), enough_digits([paired.mean], each.measure.digits))
        return f"not distinguishable: {size} apart in each of {paired.n} seeds, which gives no interval"
    if paired.t.excludes(0.0):
        return f"not distinguishable with {seeds_text(paired.n)} after Holm's correction over the arms"
    return f"not distinguishable with {seeds_text(paired.n)}"


def _one_seed(main: Sequence[Comparison]) -> str:
    known = [each for each in main if each.paired.n == 1]
    values = [
        f"{each.measure.noun} {number(each.values[0], each.measure.digits)} against "
        f"{number(each.baseline_values[0], each.measure.digits)}"
        for each in known
    ]
    head = f"{label(known[0].arm)} against {label(known[0].baseline)}, one seed ({known[0].seeds[0]})"
    return f"{head}: {', '.join(values)}. One seed gives no interval and no verdict."


def _changed(main: Sequence[Comparison], other: dict[str, Comparison]) -> list[str]:
    """Measures whose answer depends on how stopped runs are read."""
    out = []
    for each in main:
        alone = other.get(each.measure.column)
        if alone is None or alone.seeds == each.seeds or alone.distinguishable == each.distinguishable:
            continue
        if alone.distinguishable:
            out.append(f"with finished runs only it {_clear(alone, first=False)}")
        else:
            out.append(f"with finished runs only {each.measure.noun} is {_why_unclear(alone)}")
    return out


def _stopped(results: Results) -> list[str]:
    runs = arm_runs(results)
    sentences = []
    for outcome, words in (
        ("stopped", "stopped by an alert"),
        ("failed", "failed by its own numbers or size"),
    ):
        parts = []
        for arm in results.arms:
            mine = runs[runs["arm"] == arm]
            hit = mine[mine["outcome"] == outcome]
            if len(hit):
                codes = sorted(
                    {label(code or error) for code, error in zip(hit["reason_code"], hit["error_class"], strict=True)}
                )
                parts.append(f"{len(hit)} of {len(mine)} {label(arm)} ({', '.join(codes)})")
        if parts:
            sentences.append(f"{words.capitalize()}: {', '.join(parts)}; such a run counts as its last score.")
    return sentences


def _undecided(results: Results) -> list[str]:
    runs = arm_runs(results)
    open_runs = runs[runs["outcome"].isin(["unfinished", "lost", "ended"])]
    if open_runs.empty:
        return []
    names = ", ".join(f"{label(arm)} {count}" for arm, count in open_runs["arm"].value_counts(sort=False).items())
    have = "has" if len(open_runs) == 1 else "have"
    return [f"{len(open_runs)} of {len(runs)} runs {have} no result (unfinished, lost or ended early): {names}."]


def _one_arm(results: Results) -> str:
    if not results.arms:
        return "No run of the plan is recorded: nothing to compare."
    runs = arm_runs(results)
    done = int((runs["outcome"] == "finished").sum())
    head = f"Only one arm ({label(results.arms[0])}, {done} of {len(runs)} runs finished)"
    return f"{head}: nothing to compare."


def _search_verdict(results: Results) -> str:
    runs = arm_runs(results)
    scored = runs[runs["final_accuracy"].notna() & (runs["outcome"] == "finished")]
    head = f"A search of {runs['arm'].nunique()} configurations ({len(runs)} runs, {len(scored)} finished)"
    if scored.empty:
        return f"{head}: none has a final accuracy."
    means = scored.groupby("arm", sort=False)["final_accuracy"].agg(["mean", "count"])
    best = means["mean"].idxmax()
    mean, count = float(means.at[best, "mean"]), int(means.at[best, "count"])
    caution = "one seed and the best of many" if count == 1 else "the best of many"
    best_text = f"the best is {best} with accuracy {number(mean, 2)} ({seeds_text(count)})"
    advice = "so this number is too good: run it again with fresh seeds before believing it"
    return f"{head}: {best_text}. It is {caution}, {advice}."


def _and(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]

"""Tables of a sweep: one row per arm, differences with intervals, problem-level tests, stopped runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pandas as pd

from analysis.captions import arms_caption, differences_caption, problems_caption, stops_caption
from analysis.compare import (
    FINISHED,
    LAST_SCORE,
    MEASURES,
    Comparison,
    Measure,
    ProblemComparison,
    arm_runs,
    by_seed,
)
from analysis.learning import learning_table
from analysis.load import Results
from analysis.records import OUTCOMES, is_searched
from analysis.stats import Interval, mean_interval, seeds_needed, wilson
from analysis.typeset import Table
from analysis.verdict import enough_digits, label, number

MANY_ARMS = 12  # a search has hundreds: the printed table shows the best ones, the CSV has all
MANY_SEEDS = 6
Rows = list[Mapping[str, object]]


def make_tables(
    results: Results, comparisons: Sequence[Comparison], problems: Sequence[ProblemComparison]
) -> list[Table]:
    """All tables of a sweep; one with nothing to show says what is missing."""
    return [
        arms_table(results, comparisons),
        differences_table(results, comparisons),
        problems_table(results, problems),
        learning_table(results),
        stops_table(results),
    ]


def arms_table(results: Results, comparisons: Sequence[Comparison]) -> Table:
    """Final accuracy, entropy and length per arm with 95 % t intervals, steps, what was stopped or failed.

    Accuracy stands under both readings as soon as a run was stopped or failed. Bold: accuracy above the
    baseline's and distinguishable from it.
    """
    runs = arm_runs(results)
    better = {
        (each.arm, each.reading)
        for each in comparisons
        if each.distinguishable and each.paired.mean > 0 and each.measure.column == "final_accuracy"
    }
    both = bool(runs["outcome"].isin(["stopped", "failed"]).any())
    frame: Rows = []
    shown: Rows = []
    bold: set[tuple[int, str]] = set()
    for arm in _ranked(results, runs):
        mine = runs[runs["arm"] == arm]
        raw: dict[str, object] = {
            "arm": arm,
            "baseline": arm == results.baseline and not is_searched(results.plan),
        }
        raw |= _counts(mine)
        cells = {"Arm": label(arm), "Finished": f"{raw['finished']} of {raw['runs']}"}
        for measure in MEASURES:
            split = both and measure.column == "final_accuracy"
            for reading in (LAST_SCORE, FINISHED) if split else (LAST_SCORE,):
                values = by_seed(runs, arm, measure.column, reading)
                raw |= _mean_columns(measure, reading, values)
                head = _unit_name(measure).capitalize() + (f", {reading}" if split else "")
                cells[head] = _mean_cell(values, measure)
                if measure.column == "final_accuracy" and (arm, reading) in better:
                    bold.add((len(shown), head))
        cells["Accuracy by seed"] = _points(by_seed(runs, arm, "final_accuracy", LAST_SCORE))
        cells["Steps"] = _range(mine.loc[mine["steps_done"] > 0, "steps_done"])
        if both:
            cells["Stopped or failed"] = _rate_cell(raw)
        frame.append(raw)
        shown.append(cells)
    title = "Best configurations" if is_searched(results.plan) else "Arms"
    missing = "" if frame else "No arm has a recorded run."
    printed = pd.DataFrame(shown[:MANY_ARMS])
    caption = arms_caption(results, runs, both, len(shown) - len(printed))
    return Table("arms", title, caption, pd.DataFrame(frame), printed, bold, missing)


def differences_table(results: Results, comparisons: Sequence[Comparison]) -> Table:
    """Paired differences from the baseline per arm, measure and reading, with every interval and test."""
    same = same_readings(comparisons)
    frame: Rows = []
    shown: Rows = []
    bold: set[tuple[int, str]] = set()
    measures = list(dict.fromkeys(each.measure.column for each in comparisons))
    for each in sorted(comparisons, key=lambda c: (measures.index(c.measure.column), results.arms.index(c.arm))):
        frame.append(_difference_row(each))
        if same and each.reading == FINISHED:
            continue  # nothing was stopped: the two readings are one
        digits = _difference_digits(each)
        cells = {
            "Arm": f"{label(each.arm)} minus {label(each.baseline)}",
            "Measure": _unit_name(each.measure),
        }
        cells |= {} if same else {"Reading": each.reading}
        cells |= {
            "Difference": number(each.paired.mean, digits),
            "95 % t": _interval_cell(each.paired.t, digits),
            "95 % bootstrap": _interval_cell(each.paired.bootstrap, digits),
            "Seeds": str(each.paired.n),
            "Sign-flip p": _p(each.paired.sign_flip_p),
            "Holm p": _p(each.holm_p),
            "Seeds needed": _needed_cell(each),
            "Verdict": _verdict_cell(each),
        }
        if each.distinguishable:
            bold.add((len(shown), "Difference"))
        shown.append(cells)
    missing = "" if frame else _why_no_differences(results)
    caption = differences_caption(results, comparisons, same)
    title = "Differences from the baseline"
    return Table("differences", title, caption, pd.DataFrame(frame), pd.DataFrame(shown), bold, missing)


def problems_table(results: Results, problems: Sequence[ProblemComparison]) -> Table:
    """Accuracy on the same held-out problems: bootstrap over problems, McNemar's test for each seed.

    Nothing is bold: with the runs held fixed the interval leaves out 0 in half of all cases in which arms differ
    only by their seeds (benchmarks/coverage.py).
    """
    frame: Rows = []
    shown: Rows = []
    for each in problems:
        row: dict[str, object] = {"arm": each.arm, "baseline": each.baseline, "skipped": each.skipped}
        gap = each.difference
        if gap is not None:
            row |= {
                "seeds": " ".join(map(str, each.seeds)),
                "num_problems": gap.num_problems,
                "difference": gap.mean,
            }
            row |= _ends("problems", gap.problems) | _ends("both", gap.both)
            row |= {"mcnemar_only_arm": " ".join(str(test.only_a) for test in each.tests)}
            row |= {"mcnemar_only_baseline": " ".join(str(test.only_b) for test in each.tests)}
            row |= {"mcnemar_p": " ".join(f"{test.p:.4g}" for test in each.tests)}
            tests = "; ".join(f"{t.only_a} to {t.only_b}, p {_p(t.p)}" for t in each.tests[:MANY_SEEDS])
            more = "; ..." if len(each.tests) > MANY_SEEDS else ""
            shown.append(
                {"Arm": f"{label(each.arm)} minus {label(each.baseline)}", "Problems": str(gap.num_problems)}
                | {"Seeds": ", ".join(map(str, each.seeds)), "Difference": number(gap.mean, 3)}
                | {"95 % over problems": _interval_cell(gap.problems, 3)}
                | {
                    "95 % over seeds and problems": _interval_cell(gap.both, 3),
                    "McNemar per seed": tests + more,
                }
            )
        frame.append(row)
    skipped = [f"{label(each.arm)}: {each.skipped}" for each in problems if each.skipped]
    missing = "" if shown else "; ".join(skipped) or _why_no_differences(results)
    caption = problems_caption(results, skipped)
    title = "The same held-out problems"
    return Table("problems", title, caption, pd.DataFrame(frame), pd.DataFrame(shown), set(), missing)


def stops_table(results: Results) -> Table:
    """Every run that did not finish: when, why, steps saved, and what the alert advises to try."""
    runs = results.runs
    early = runs[runs["outcome"].isin(["stopped", "failed", "ended", "lost"])]
    frame: Rows = []
    shown: Rows = []
    for _, run in early.iterrows():
        alerts = results.alerts[(results.alerts["key"] == run["key"]) & (results.alerts["code"] == run["reason_code"])]
        advice = list(alerts["intervention"].iloc[-1]) if len(alerts) else []
        saved = max(0, int(run["steps_planned"]) - int(run["steps_done"]))
        names = ["key", "arm", "seed", "parent", "outcome", "steps_done", "steps_planned", "reason_code"]
        names += ["reason_title", "reason_message", "error_class", "final_accuracy"]
        frame.append({name: run[name] for name in names} | {"steps_saved": saved, "advice": " ".join(advice)})
        why = " ".join(part for part in (run["reason_code"], run["reason_title"]) if part)
        shown.append(
            {"Run": f"{label(run['arm'])} seed {run['seed']}", "Ended": run["outcome"]}
            | {"Step": f"{run['steps_done']} of {run['steps_planned']}"}
            | {"Reason": why or label(run["error_class"]) or "n/a", "Evidence": run["reason_message"] or "n/a"}
            | {"Try": " or ".join(advice) or "n/a"}
        )
    total = sum(int(str(row["steps_saved"])) for row in frame if row["outcome"] == "stopped")
    missing = "" if frame else "No run was stopped, failed or lost."
    caption = stops_caption(results, early, total)
    return Table("stops", "Runs that did not finish", caption, pd.DataFrame(frame), pd.DataFrame(shown), set(), missing)


def same_readings(comparisons: Sequence[Comparison]) -> bool:
    """True when leaving stopped runs out changes nothing, because none was stopped."""
    pairs: dict[tuple[str, str], set[tuple[int, ...]]] = {}
    for each in comparisons:
        pairs.setdefault((each.arm, each.measure.column), set()).add(each.seeds)
    return all(len(seeds) == 1 for seeds in pairs.values())


def _ranked(results: Results, runs: pd.DataFrame) -> list[str]:
    if not is_searched(results.plan):
        return results.arms
    scores = runs.groupby("arm", sort=False)["final_accuracy"].mean()
    return list(scores.sort_values(ascending=False, kind="stable", na_position="last").index)


def _counts(mine: pd.DataFrame) -> dict[str, object]:
    out: dict[str, object] = {"runs": len(mine)}
    out |= {outcome: int((mine["outcome"] == outcome).sum()) for outcome in OUTCOMES}
    seeds = sorted(seed for seed in set(mine["seed"]) if seed >= 0)
    return out | {"seeds": " ".join(map(str, seeds)), **_rate_columns(mine)}


def _rate_columns(mine: pd.DataFrame) -> dict[str, object]:
    """Stopped or failed among the runs whose end says something of the arm."""
    counted = mine[mine["outcome"].isin(["finished", "stopped", "failed"])]
    rate = wilson(int((counted["outcome"] != "finished").sum()), len(counted))
    return {"failure_rate": rate.value, "failure_n": rate.n, **_ends("failure", rate.interval)}


def _rate_cell(raw: dict[str, object]) -> str:
    n = int(str(raw["failure_n"]))
    if not n:
        return "n/a"
    hits = round(float(str(raw["failure_rate"])) * n)
    low, high = (round(100 * float(str(raw[f"failure_{end}"]))) for end in ("low", "high"))
    return f"{hits} of {n} ({low} to {high} %)"


def _mean_columns(measure: Measure, reading: str, values: pd.Series) -> dict[str, object]:
    estimate = mean_interval(values)
    stem = measure.noun if reading == LAST_SCORE else f"{measure.noun}_finished"
    out: dict[str, object] = {stem: estimate.value, f"{stem}_n": estimate.n}
    return out | _ends(stem, estimate.interval)


def _mean_cell(values: pd.Series, measure: Measure) -> str:
    estimate = mean_interval(values)
    if estimate.n == 0:
        return "n/a"
    mean = number(estimate.value, measure.digits)
    if estimate.interval is None:
        return f"{mean} (1 seed)" if estimate.n == 1 else f"{mean} (all {estimate.n} equal)"
    low, high = (number(end, measure.digits) for end in (estimate.interval.low, estimate.interval.high))
    return f"{mean} ({low} to {high})"


def _points(values: pd.Series) -> str:
    shown = ", ".join(number(float(value), 2) for value in values.iloc[:MANY_SEEDS])
    more = f", {len(values) - MANY_SEEDS} more" if len(values) > MANY_SEEDS else ""
    return shown + more or "n/a"


def _range(steps: pd.Series) -> str:
    if steps.empty:
        return "n/a"
    low, high = int(steps.min()), int(steps.max())
    return str(low) if low == high else f"{low} to {high}"


def _unit_name(measure: Measure) -> str:
    return f"{measure.noun} ({measure.unit})" if measure.unit else measure.noun


def _difference_row(each: Comparison) -> dict[str, object]:
    paired, needed = each.paired, _needed(each)
    row: dict[str, object] = {"arm": each.arm, "baseline": each.baseline, "measure": each.measure.noun}
    row |= {"unit": each.measure.unit or "share", "reading": each.reading, "difference": paired.mean}
    row |= _ends("t", paired.t) | _ends("bootstrap", paired.bootstrap)
    row |= {"sd": paired.sd, "n": paired.n, "seeds": " ".join(map(str, each.seeds)), "t_p": paired.t_p}
    row |= {
        "holm_p": each.holm_p,
        "sign_flip_p": paired.sign_flip_p,
        "sign_flip_smallest_p": paired.smallest_p,
    }
    row |= {"distinguishable": each.distinguishable, "precision": each.measure.precision}
    row |= {"seeds_needed": needed[0], "seeds_needed_cautious": needed[1]}
    return row | {"differences": " ".join(f"{value:.6g}" for value in paired.differences)}


def _difference_digits(each: Comparison) -> int:
    interval = each.paired.t
    ends = (interval.low, interval.high) if interval is not None else ()
    finite = [value for value in (each.paired.mean, *ends) if math.isfinite(value)]
    return enough_digits(finite, each.measure.digits)


def _needed(each: Comparison) -> tuple[float, float]:
    needed = seeds_needed(each.paired.sd, each.measure.precision, each.paired.n)
    return (math.nan, math.nan) if needed is None else (needed.seeds, needed.cautious)


def _needed_cell(each: Comparison) -> str:
    seeds, cautious = _needed(each)
    return "n/a" if math.isnan(seeds) else f"{seeds:g} to {cautious:g}" if cautious > seeds else f"{seeds:g}"


def _verdict_cell(each: Comparison) -> str:
    if each.distinguishable:
        return "higher" if each.paired.mean > 0 else "lower"
    if each.paired.n == 0:
        return "not recorded"
    if each.paired.n == 1:
        return "one seed"
    return "no spread" if each.paired.t is None else "not distinguishable"


def _ends(stem: str, interval: Interval | None) -> dict[str, object]:
    low, high = (math.nan, math.nan) if interval is None else (interval.low, interval.high)
    return {f"{stem}_low": low, f"{stem}_high": high}


def _interval_cell(interval: Interval | None, digits: int) -> str:
    return "n/a" if interval is None else f"{number(interval.low, digits)} to {number(interval.high, digits)}"


def _p(p: float) -> str:
    if not math.isfinite(p):
        return "n/a"
    return "<0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def _why_no_differences(results: Results) -> str:
    if results.runs.empty:
        return "No runs are recorded."
    if is_searched(results.plan):
        return "A search has no arms to compare."
    return "There is only one arm: nothing to compare."

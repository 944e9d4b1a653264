"""The words under a table: seeds, steps, model, task, what was stopped, and how to read the numbers."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from analysis.compare import ALPHA, MEASURES, Comparison, arm_runs
from analysis.load import Results
from analysis.records import FINAL_ROWS, is_searched
from analysis.verdict import label

_ENDINGS = {
    "stopped": "Stopped",
    "failed": "Failed",
    "ended": "Ended early",
    "lost": "Lost",
    "unfinished": "Unfinished",
}


def setting(results: Results) -> str:
    """Seeds, rollout steps, model, task and held-out set of the sweep in one sentence."""
    runs = arm_runs(results)
    seeds = sorted({int(seed) for seed in runs["seed"] if seed >= 0})
    steps = sorted({int(steps) for steps in runs["steps_planned"] if steps > 0})
    parts = []
    if seeds:
        parts.append(("seed " if len(seeds) == 1 else "seeds ") + _join([str(seed) for seed in seeds]))
    if steps:
        span = str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
        parts.append(f"{span} rollout steps")
    for word, values in (("model", _model(runs)), ("task", _task(runs))):
        if values:
            parts.append(f"{word} {_join(values)}")
    problems, samples = _values(runs, "eval.problems"), _values(runs, "eval.samples")
    if len(problems) == 1 and len(samples) == 1:
        parts.append(f"{problems[0]} held-out problems x {samples[0]} samples")
    text = "; ".join(parts)
    return text[:1].upper() + text[1:] + "." if text else "Seeds, steps, model and task are not recorded."


def stopped_text(results: Results, most: int = 6) -> str:
    """Which runs were stopped, failed, lost or are unfinished, in a sentence."""
    runs = arm_runs(results)
    columns = ["arm", "seed", "steps_done", "steps_planned", "reason_code", "error_class"]
    out = []
    for outcome, word in _ENDINGS.items():
        group = runs[runs["outcome"] == outcome][columns]
        names = [
            f"{label(arm)} seed {seed} at step {done} of {planned}"
            + (f" ({label(code or error)})" if code or error else "")
            for arm, seed, done, planned, code, error in group.itertuples(index=False)
        ]
        if names:
            out.append(f"{word}: {_join(names, most)}.")
    return " ".join(out) or "No run was stopped."


def arms_caption(results: Results, runs: pd.DataFrame, both: bool, hidden: int) -> str:
    """What the table of arms shows."""
    parts = [
        "Final held-out accuracy, policy entropy (nats per token) and response length (tokens): mean over "
        "seeds with the 95 % t interval of that mean in brackets. "
        f"Entropy and length are means of a run's last {FINAL_ROWS} steps.",
        setting(results),
        stopped_text(results),
    ]
    if both:
        parts.append(
            "Accuracy is given twice: a stopped or failed run counting as its last score, and finished runs "
            "only (a selection). Stopped or failed with 95 % Wilson interval; runs lost to the machine do "
            "not count."
        )
    if not is_searched(results.plan) and len(results.arms) > 1:
        parts.append(
            f"Bold: higher than {label(results.baseline)} and distinguishable from it (paired t test over "
            f"seeds, Holm over arms, {ALPHA:g}). Overlapping intervals of two arms do not decide: see the "
            "differences."
        )
    if hidden > 0:
        parts.append(f"{hidden} further rows are in the CSV.")
    return " ".join(parts)


def differences_caption(results: Results, comparisons: Sequence[Comparison], same: bool) -> str:
    """How the differences were computed and what a reader must not conclude from them."""
    wanted = ", ".join(f"{each.noun} {each.precision:g}{' ' + each.unit if each.unit else ''}" for each in MEASURES)
    least = min((each.paired.smallest_p for each in comparisons if each.paired.n > 1), default=None)
    parts = [
        "Paired by seed: both arms of a pair see the same problems and random draws. The t interval is the "
        "one to read; with few seeds the percentile bootstrap is too narrow and stands here for comparison. "
        "Holm p: paired t test, corrected over the arms within a measure, not over measures.",
    ]
    if least is not None and least > ALPHA:
        parts.append(f"With so few seeds the exact sign-flip test cannot fall below {least:g}.")
    parts.append(
        f"Seeds needed for a 95 % half width of {wanted}: with the spread as estimated, and with its upper 80 % limit."
    )
    if not same:
        parts.append("Both readings of stopped and failed runs are shown; leaving them out is a selection.")
    return " ".join([*parts, "Bold: distinguishable.", setting(results), stopped_text(results)])


def problems_caption(results: Results, skipped: Sequence[str]) -> str:
    """What the problem-level numbers answer, and what they do not."""
    parts = [
        "Accuracy at each run's last evaluation, the same problems in both arms. Over problems: these "
        "training runs held fixed, so it tells whether the difference is luck of the test set, not whether it comes "
        "back with another seed. Over seeds and problems: both drawn anew (too narrow with few seeds).",
        "McNemar: problems that only the arm and only the baseline solve (more than half of the samples "
        "right), exact two-sided p, for each seed.",
        "Nothing is bold here: whether arms are distinguishable is decided over seeds.",
    ]
    if skipped:
        parts.append(f"Left out: {'; '.join(skipped)}.")
    return " ".join([*parts, setting(results)])


def stops_caption(results: Results, early: pd.DataFrame, saved: int) -> str:
    """How many runs ended early and what stopping saved."""
    count, total = int((early["outcome"] == "stopped").sum()), int(results.runs["steps_planned"].sum())
    text = f"{len(early)} of {len(results.runs)} runs did not finish"
    if count:
        text += f", {count} of them stopped by an alert: {saved} of {total} planned rollout steps were saved"
    return f"{text}. Try: the alert's advice, as overrides."


def _values(runs: pd.DataFrame, key: str) -> list[str]:
    """The different recorded values of a config key, in order, as text."""
    column = f"config.{key}"
    if column not in runs:
        return []
    known = [value for value in runs[column] if value is not None and value != "" and value == value]
    texts = [f"{value:g}" if isinstance(value, float) else str(value) for value in known]
    return list(dict.fromkeys(texts))


def _model(runs: pd.DataFrame) -> list[str]:
    paths = [path.rstrip("/").rsplit("/", 1)[-1] for path in _values(runs, "model.path")]
    kinds = _values(runs, "model.kind")
    return paths if paths and kinds != ["tiny"] else kinds or paths


def _task(runs: pd.DataFrame) -> list[str]:
    kinds = _values(runs, "task.kind")
    extra = _values(runs, "task.name") or [path.rsplit("/", 1)[-1] for path in _values(runs, "task.path")]
    return [f"{kinds[0]} ({_join(extra)})"] if len(kinds) == 1 and extra else kinds or extra


def _join(values: Sequence[str], most: int = 8) -> str:
    more = f" and {len(values) - most} more" if len(values) > most else ""
    return ", ".join(values[:most]) + more

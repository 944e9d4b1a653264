"""The sections of a report about runs: those that were stopped and what came of it, alerts, completions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from analysis.compare import arm_runs
from analysis.figures.curves import shown_arms
from analysis.load import Results
from analysis.report.blocks import Answer, Block, Compared, Fold, Grid, Section, Text
from analysis.report.history import decision_blocks, finding_blocks, read_ledger
from analysis.shapes import mapping, number
from analysis.verdict import label

_PROBLEMS = 4
_ANSWER_LENGTH = 1500  # characters shown of one completion


def stopped_section(results: Results) -> Section:
    """Every run that did not come to its end: where, why, what to try, and what was tried."""
    runs = arm_runs(results)
    early = runs[runs["outcome"].isin(("stopped", "failed", "ended", "lost"))]
    if early.empty:
        waiting = int((runs["outcome"] == "unfinished").sum())
        still = f" {waiting} have not finished yet." if waiting else ""
        return Section("stopped", "Stopped runs", [Text(f"No run was stopped or failed.{still}")])
    rows = [_stopped_row(results, run) for run in early.to_dict("records")]
    columns = ("Run", "Ended", "At step", "Why", "Evidence", "To try", "Tried")
    caption = "A stopped run counts as a failure of its arm; a run lost to the machine does not."
    blocks: list[Block] = [Grid(columns, rows, caption, numeric=frozenset({2}))]
    return Section("stopped", "Stopped runs", [*blocks, *_children(results)])


def _stopped_row(results: Results, run: Mapping[str, Any]) -> tuple[str, ...]:
    alerts = results.alerts[(results.alerts["key"] == run["key"]) & (results.alerts["severity"] == "stop")]
    alert = alerts.iloc[-1].to_dict() if len(alerts) else {}
    why = ": ".join(
        filter(None, [" ".join(filter(None, [run["reason_code"], run["reason_title"]])), run["reason_message"]])
    )
    tried = results.runs[results.runs["parent"] == run["key"]]
    return (
        f"{label(run['arm'])} seed {run['seed']}",
        str(run["outcome"]),
        f"{run['steps_done']} of {run['steps_planned']}",
        why or str(run["error_class"]) or "no reason recorded",
        evidence(alert.get("evidence") or {}) or "none recorded",
        " ".join(map(str, alert.get("intervention") or [])) or "no advice recorded",
        "; ".join(_tried(child) for child in tried.to_dict("records")) or "nothing",
    )


def evidence(facts: Mapping[str, Any]) -> str:
    """An alert's numbers as words: `value 0.97, window 11 to 20`."""
    out = []
    for name, value in facts.items():
        if isinstance(value, list | tuple) and len(value) == 2:
            text = f"{_short(value[0])} to {_short(value[1])}"
        else:
            text = _short(value)
        out.append(f"{str(name).replace('_', ' ')} {text}")
    return ", ".join(out)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _tried(child: Mapping[str, Any]) -> str:
    score = child["final_accuracy"]
    text = f", accuracy {score:.3f}" if isinstance(score, float) and math.isfinite(score) else ""
    return f"{child['name']} ({child['outcome']} at step {child['steps_done']}{text})"


def _children(results: Results) -> list[Block]:
    """Parent and child side by side: what was changed and how both ended."""
    children = results.runs[results.runs["parent"].fillna("") != ""]
    if children.empty:
        return []
    by_key = {run["key"]: run for run in results.runs.to_dict("records")}
    config = [column for column in results.runs.columns if column.startswith("config.")]
    rows = []
    for child in children.to_dict("records"):
        parent = by_key.get(child["parent"])
        changed = [] if parent is None else [c for c in config if not _same(parent[c], child[c])]
        text = ", ".join(f"{c.removeprefix('config.')} {parent[c]} to {child[c]}" for c in changed) if parent else ""
        rows.append(
            (
                f"{label(parent['arm'])} seed {parent['seed']}" if parent else str(child["parent"]),
                text or "not recorded",
                _ending(parent) if parent else "not recorded",
                _ending(child),
            )
        )
    caption = "Copies of stopped runs, forked from the last healthy checkpoint; they never count as data of an arm."
    return [Grid(("Stopped run", "Changed", "It ended", "The copy ended"), rows, caption)]


def _same(one: Any, two: Any) -> bool:
    return one == two or (pd.isna(one) and pd.isna(two))


def _ending(run: Mapping[str, Any]) -> str:
    score, entropy = run["final_accuracy"], run["final_entropy"]
    parts = [f"{run['outcome']} at step {run['steps_done']}"]
    parts += [f"accuracy {score:.3f}"] if math.isfinite(score) else []
    parts += [f"entropy {entropy:.3f}"] if math.isfinite(entropy) else []
    return ", ".join(parts)


def alerts_section(results: Results) -> Section:
    """All alerts by code and severity, with how many runs of each arm raised them; each one behind a fold."""
    alerts, ledger = results.alerts, read_ledger(results.path)
    around = [*finding_blocks(ledger), *decision_blocks(ledger)]
    if alerts.empty:
        return Section("alerts", "Alerts", [Text("No run raised an alert."), *around])
    arms = [arm for arm in shown_arms(results) if (alerts["arm"] == arm).any()]
    rows = []
    for (code, title, severity), part in alerts.groupby(["code", "title", "severity"], sort=True):
        every_run = str(part["key"].nunique())
        per_arm = [str(part.loc[part["arm"] == arm, "key"].nunique()) for arm in arms]
        rows.append((str(code), str(title), str(severity), every_run, *per_arm, str(int(part["step"].min()))))
    columns = ("Code", "Signal", "Severity", "Runs", *(f"of {label(arm)}" for arm in arms), "First at step")
    every = [
        (f"{label(a['arm'])} seed {a['seed']}", str(a["step"]), f"{a['code']} {a['severity']}", str(a["message"]))
        for a in alerts.sort_values(["arm", "seed", "step"]).to_dict("records")
    ]
    numbers = frozenset(range(3, len(columns)))
    fold = Fold(f"All {len(every)} alerts", [Grid(("Run", "Step", "Alert", "Message"), every, numeric=frozenset({1}))])
    return Section("alerts", "Alerts", [Grid(columns, rows, numeric=numbers), fold, *around])


def completions_section(results: Results) -> Section:
    """What each arm answers to the same few problems, before training and at its last evaluation."""
    runs = arm_runs(results)
    runs = runs[runs["steps_done"] > 0]
    seed = _common_seed(runs)
    chosen = runs[runs["seed"] == seed].drop_duplicates("arm")
    samples = results.samples(list(chosen["key"]))
    samples = samples[samples["prompt"].map(lambda text: isinstance(text, str)) & samples["step"].map(_is_step)]
    if samples.empty:
        return Section("completions", "Completions", [Text("No completions were recorded.", "note")])
    arms = [arm for arm in shown_arms(results) if (samples["arm"] == arm).any()]
    samples = samples[samples["arm"].isin(arms)]
    last = samples.groupby("arm")["step"].transform("max")
    shown = samples[(samples["step"] == last) | ((samples["step"] == 0) & (samples["arm"] == arms[0]))]
    spread = (
        shown[shown["step"] > 0]
        .groupby("prompt", sort=False)["arm"]
        .nunique()
        .sort_values(ascending=False, kind="stable")
    )
    blocks: list[Block] = [
        Text(
            f"The same held-out problems answered by each arm at its last evaluation (seed {seed}), and before "
            "training. A few samples, not evidence."
        )
    ]
    for prompt in spread.index[:_PROBLEMS]:
        mine = shown[shown["prompt"] == prompt]
        answers = []
        for arm, step in [(arms[0], 0), *((arm, None) for arm in arms)]:
            part = mine[(mine["arm"] == arm) & ((mine["step"] == 0) if step == 0 else (mine["step"] > 0))]
            if not part.empty:
                answers.append(_answer(part.iloc[0], "before training" if step == 0 else label(arm)))
        gold = mine["gold"].iloc[0] if "gold" in mine else None
        blocks.append(Compared(str(prompt), answers, gold if isinstance(gold, str) else ""))
    return Section("completions", "Completions", blocks)


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _common_seed(runs: pd.DataFrame) -> int:
    """The lowest seed that most arms have."""
    counts = runs.groupby("seed")["arm"].nunique()
    best = counts[counts == counts.max()] if len(counts) else counts
    return int(best.index.min()) if len(best) else 0


def _answer(row: pd.Series, head: str) -> Answer:
    text = str(row["completion"])
    cut = len(text) - _ANSWER_LENGTH
    if cut > 0:
        text = f"{text[:_ANSWER_LENGTH]} … ({cut} more characters)"
    text = "".join(char if char.isprintable() or char in "\n\t" else "�" for char in text)
    parts = mapping(row["parts"])
    reward = number(row["reward"])
    words = [f"reward {reward:.3g}" if reward is not None else "reward not recorded"]
    words += [f"{name} {value:.3g}" for name, value in parts.items() if number(value) is not None]
    reason = row.get("reason")  # the verifier's word on a wrong answer
    words += [str(reason)] if isinstance(reason, str) and reason and reason not in ("right", "correct") else []
    words += ["cut at the length limit"] if row["finish"] == "length" else []
    right = number(parts.get("correctness", reward)) or 0.0
    return Answer(f"{head}, step {row['step']}" if row["step"] else head, text, ", ".join(words), right > 0)

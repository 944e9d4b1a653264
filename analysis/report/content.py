"""The sections of a sweep's report about its plan: arms, what differs between them, seeds, environment, cost."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.compare import arm_runs
from analysis.load import Results, run_folders
from analysis.report.blocks import Block, Code, Fold, Grid, Section, Text


def state_line(results: Results) -> str:
    """One sentence: how many runs there are and how they ended."""
    runs = arm_runs(results)
    if runs.empty:
        return "No runs are recorded here."
    words = {
        "finished": "finished",
        "stopped": "stopped by an alert",
        "failed": "failed",
        "ended": "ended early",
        "lost": "lost to the machine",
        "unfinished": "not finished",
    }
    counts = runs["outcome"].value_counts()
    parts = [f"{counts[name]} {text}" for name, text in words.items() if counts.get(name)]
    arms, seeds = runs["arm"].nunique(), runs.loc[runs["seed"] >= 0, "seed"].nunique()
    children = len(results.runs) - len(runs)
    more = (
        f"; {children} repaired {'copies' if children > 1 else 'copy'} of stopped runs beside them" if children else ""
    )
    return f"{_count(arms, 'arm')}, {_count(seeds, 'seed')}, {_count(len(runs), 'run')}: {', '.join(parts)}{more}."


def plan_section(results: Results) -> Section:
    """The arms with their overrides, seeds, steps, and the command that runs it again."""
    plan, runs = results.plan, arm_runs(results)
    sweep = plan.get("sweep") or {}
    blocks: list[Block] = []
    if sweep.get("description"):
        blocks.append(Text(str(sweep["description"])))
    arms = sweep.get("arms") or {}
    rows = []
    for arm in results.arms:
        mine = runs[runs["arm"] == arm]
        settings = arms.get(arm)
        seeds = sorted(int(seed) for seed in mine["seed"] if seed >= 0)
        steps = sorted({int(step) for step in mine["steps_planned"]})
        name = f"{arm} (baseline)" if arm == results.baseline and len(results.arms) > 1 else arm
        text = " ".join(map(str, settings)) if isinstance(settings, list) else ""
        rows.append((name, text or "as the base", listed(seeds), listed(steps)))
    columns = ("Arm", "Settings", "Seeds", "Rollout steps")
    if rows:
        blocks.append(Grid(columns, rows, numeric=frozenset({3})))
    blocks += _search(plan)
    command = plan.get("command")
    if isinstance(command, list) and command:
        blocks.append(Text("The same command resumes it, or repeats it elsewhere:"))
        blocks.append(Code(f"python sweep.py {' '.join(map(str, command))} -m"))
    blocks += [Text(str(warning), "note") for warning in plan.get("warnings") or []]
    if not plan:
        blocks.append(Text("plan.json is missing or damaged; this is what the event logs say.", "note"))
    return Section("plan", "Plan", blocks)


def _search(plan: Mapping[str, Any]) -> list[Block]:
    study = plan.get("study") or {}
    blocks: list[Block] = []
    if study.get("sampler", "none") != "none":
        words = [
            f"{name} {study[name]}" for name in ("sampler", "trials", "metric", "direction", "pruner") if name in study
        ]
        blocks.append(Text(f"Search: {', '.join(words)}."))
    rows = []
    for entry in plan.get("space") or []:
        choices = entry.get("choices") or []
        between = f"{entry.get('low')} to {entry.get('high')}{', log scale' if entry.get('log') else ''}"
        rows.append((str(entry.get("key")), listed(choices) if choices else between))
    if rows:
        blocks.append(Grid(("Searched key", "Values"), rows))
    stages = [(str(s.get("name")), str(s.get("sampler")), f"{s.get('share', 0):.0%}") for s in plan.get("stages") or []]
    if stages:
        blocks.append(Grid(("Stage", "Sampler", "Share of the budget"), stages))
    return blocks


def differences_section(results: Results) -> Section:
    """The config keys in which the arms differ, one column per arm; the shared config behind a fold."""
    runs = arm_runs(results)
    columns = [c for c in runs.columns if c.startswith("config.") and c not in ("config.seed", "config.run_dir")]
    arms = results.arms
    if not columns or not arms:
        return Section("config", "Configuration", [Text("No configuration was recorded.", "note")])
    rows, shared = [], []
    for column in columns:
        values = [listed(dict.fromkeys(map(_value, runs.loc[runs["arm"] == arm, column]))) for arm in arms]
        key = column.removeprefix("config.")
        if len(set(values)) > 1:
            rows.append((key, *values))
        else:
            shared.append(f"{key}: {values[0]}")
    blocks: list[Block] = []
    if rows and len(arms) <= 12:
        blocks.append(Grid(("Key", *arms), rows, caption="Where the arms differ; everything else is equal."))
    elif rows:
        blocks.append(Text(f"The {len(arms)} arms differ in: {', '.join(row[0] for row in rows)}."))
    elif len(arms) > 1:
        blocks.append(Text("The recorded configurations of the arms do not differ.", "note"))
    blocks.append(Fold(f"What all runs share ({len(shared)} keys)", [Code("\n".join(shared))]))
    return Section("config", "Configuration", blocks)


def _value(value: Any) -> str:
    return "none" if value is None or value != value else f"{value:g}" if isinstance(value, float) else str(value)


def cost_section(results: Results) -> Section:
    """Hours, generated tokens and steps per arm, forks of stopped runs in a row of their own."""
    runs = results.runs
    is_child = runs["parent"].fillna("") != ""
    groups = [(arm, runs[(runs["arm"] == arm) & ~is_child]) for arm in results.arms]
    groups += [("repaired copies", runs[is_child])] if is_child.any() else []
    groups += [("**all**", runs)] if len(groups) > 1 else []
    rows = [
        (
            name,
            str(len(part)),
            f"{int(part['steps_done'].sum())} of {int(part['steps_planned'].sum())}",
            duration(part["seconds"].sum()),
            quantity(part["generated_tokens"].sum()),
        )
        for name, part in groups
    ]
    columns = ("Arm", "Runs", "Rollout steps", "Run time", "Generated tokens")
    caption = "Run time is the sum over runs of the time in steps; runs beside each other on one machine count twice."
    blocks: list[Block] = [Grid(columns, rows, caption, numeric=frozenset({1, 2, 3, 4}), swatches=0)]
    saved = runs[~is_child & (runs["outcome"] == "stopped")]
    if not saved.empty:
        steps = int((saved["steps_planned"] - saved["steps_done"]).clip(lower=0).sum())
        planned = int(runs[~is_child]["steps_planned"].sum())
        blocks.append(Text(f"Stopping early saved {steps} of {planned} planned rollout steps ({steps / planned:.0%})."))
    started = runs["started"].dropna()
    if not started.empty:
        begin = pd.Timestamp(started.min(), unit="s").strftime("%Y-%m-%d %H:%M UTC")
        blocks.append(Text(f"First run started {begin}."))
    return Section("cost", "Cost", blocks)


def environment_section(results: Results) -> Section:
    """Versions, machine and git state as the runs recorded them; differences between runs are shown."""
    seen: dict[str, dict[str, int]] = {}
    for start in _starts(results.path):
        recorded = {
            **(start.get("versions") or {}),
            **(start.get("machine") or {}),
            **(start.get("git") or {}),
        }
        for name, value in recorded.items():
            counts = seen.setdefault(str(name), {})
            counts[_value(value)] = counts.get(_value(value), 0) + 1
    rows = []
    for name, counts in seen.items():
        text = ", ".join(value if len(counts) == 1 else f"{value} ({_count(n, 'run')})" for value, n in counts.items())
        rows.append((name, text))
    version = results.plan.get("code_version")
    if version:
        rows.append(("code version of the plan", str(version)))
    engine = results.plan.get("engine") or {}
    if engine:
        rows.append(("engine", ", ".join(f"{key} {value}" for key, value in engine.items() if value is not None)))
    if not rows:
        return Section("environment", "Environment", [Text("The runs recorded no versions.", "note")])
    return Section("environment", "Environment", [Grid(("What", "Recorded"), rows)])


def _starts(path: Path) -> Iterable[dict[str, Any]]:
    """The first line of every event log that can be read."""
    for folder in run_folders(path):
        try:
            with (folder / "events.jsonl").open("rb") as file:
                event = json.loads(file.readline(1_000_000))
        except (OSError, ValueError):
            continue
        if isinstance(event, dict) and event.get("type") == "start":
            yield event


def listed(values: Iterable[Any]) -> str:
    """Values as words; a run of whole numbers is shortened (0 to 4)."""
    items = list(values)
    whole = all(isinstance(item, int) and not isinstance(item, bool) for item in items)
    if whole and len(items) > 3 and items == list(range(items[0], items[0] + len(items))):
        return f"{items[0]} to {items[-1]}"
    return ", ".join(f"{item:g}" if isinstance(item, float) else str(item) for item in items)


def duration(seconds: float) -> str:
    """Seconds, minutes or hours, whichever is readable."""
    if not math.isfinite(seconds):
        return "not recorded"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def quantity(value: float) -> str:
    """A large count with its prefix: 12.3 k, 4.56 M."""
    if not math.isfinite(value):
        return "not recorded"
    for size, prefix in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value / size:.3g}{prefix}"
    return f"{value:.0f}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"

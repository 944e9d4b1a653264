"""The sections of a sweep's report about its plan: arms, what differs between them, seeds, environment, cost."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from analysis.compare import arm_runs
from analysis.figures.curves import shown_arms
from analysis.load import Results
from analysis.report.blocks import Block, Code, Fold, Grid, Section, Text
from analysis.report.history import Entry, num_gpus, read_ledger, wall_seconds
from analysis.shapes import items, mapping, number, records

_MANY = 20  # rows of a table that is shown at once
# What names a run or says where its files go: it differs between any two runs and changes nothing in them.
_NAMES = ("config.seed", "config.name", "config.run_dir", "config.quiet", "config.tracking.")


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
    sweep = mapping(plan.get("sweep"))
    blocks: list[Block] = []
    if sweep.get("description"):
        blocks.append(Text(str(sweep["description"])))
    arms = mapping(sweep.get("arms"))
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
        table = Grid(columns, rows, numeric=frozenset({3}))
        blocks.append(table if len(rows) <= _MANY else Fold(f"All {len(rows)} arms", [table]))
    blocks += _search(plan)
    command = plan.get("command")
    if isinstance(command, list) and command:
        blocks.append(Text("The same command resumes it, or repeats it elsewhere:"))
        blocks.append(Code(f"python sweep.py {shlex.join(map(str, command))} -m"))
    blocks += [Text(str(warning), "note") for warning in items(plan.get("warnings"))]
    if not plan:
        blocks.append(Text("plan.json is missing or damaged; this is what the event logs say.", "note"))
    return Section("plan", "Plan", blocks)


def _search(plan: Mapping[str, Any]) -> list[Block]:
    study = mapping(plan.get("study"))
    blocks: list[Block] = []
    if study.get("sampler", "none") != "none":
        words = [
            f"{name} {study[name]}" for name in ("sampler", "trials", "metric", "direction", "pruner") if name in study
        ]
        blocks.append(Text(f"Search: {', '.join(words)}."))
    rows = []
    for entry in records(plan.get("space")):
        choices = items(entry.get("choices"))
        between = f"{entry.get('low')} to {entry.get('high')}{', log scale' if entry.get('log') else ''}"
        rows.append((str(entry.get("key")), listed(choices) if choices else between))
    if rows:
        blocks.append(Grid(("Searched key", "Values"), rows))
    stages = [
        (str(stage.get("name")), str(stage.get("sampler")), f"{number(stage.get('share')) or 0:.0%}")
        for stage in records(plan.get("stages"))
    ]
    if stages:
        blocks.append(Grid(("Stage", "Sampler", "Share of the budget"), stages))
    return blocks


def differences_section(results: Results) -> Section:
    """The config keys in which the arms differ, one column per arm; the shared config behind a fold."""
    runs = arm_runs(results)
    columns = [c for c in runs.columns if c.startswith("config.") and not c.startswith(_NAMES)]
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
    shown = shown_arms(results)
    groups = [(arm, runs[(runs["arm"] == arm) & ~is_child]) for arm in shown]
    others = runs[~runs["arm"].isin(shown) & ~is_child]
    groups += [(_count(others["arm"].nunique(), "further arm"), others)] if len(others) else []
    groups += [("repaired copies", runs[is_child])] if is_child.any() else []
    groups += [("**all**", runs)] if len(groups) > 1 else []
    ledger = read_ledger(results.path)
    gpus = {str(entry.get("key")): num_gpus(entry) for entry in ledger if entry.get("type") == "start"}
    on_gpu = any(gpus.values())
    rows = []
    for name, part in groups:
        steps = f"{int(part['steps_done'].sum())} of {int(part['steps_planned'].sum())}"
        row = [name, str(len(part)), steps, duration(part["seconds"].sum())]
        if on_gpu:
            row.append(f"{float((part['seconds'] * part['key'].map(gpus).fillna(0)).sum()) / 3600:.2f}")
        rows.append([*row, quantity(part["generated_tokens"].sum())])
    columns = ["Arm", "Runs", "Rollout steps", "Run time", *(["GPU-hours"] if on_gpu else []), "Generated tokens"]
    caption = "Run time is the sum over runs of the time in steps; runs side by side each count in full."
    caption += "" if on_gpu else " No GPU was used." if gpus else ""
    numeric = frozenset(range(1, len(columns)))
    blocks: list[Block] = [Grid(columns, rows, caption, numeric=numeric, swatches=0)]
    return Section("cost", "Cost", [*blocks, *_savings(runs[~is_child]), *_when(runs, ledger)])


def _savings(runs: pd.DataFrame) -> list[Block]:
    stopped = runs[runs["outcome"] == "stopped"]
    planned = int(runs["steps_planned"].sum())
    if stopped.empty or not planned:
        return []
    steps = int((stopped["steps_planned"] - stopped["steps_done"]).clip(lower=0).sum())
    return [Text(f"Stopping early saved {steps} of {planned} planned rollout steps ({steps / planned:.0%}).")]


def _when(runs: pd.DataFrame, ledger: Sequence[Entry]) -> list[Block]:
    started = runs["started"].dropna()
    if started.empty:
        return []
    text = f"First run started {pd.Timestamp(started.min(), unit='s').strftime('%Y-%m-%d %H:%M UTC')}."
    walls = wall_seconds(ledger)
    if walls:
        text += f" The sweep took {duration(sum(walls))}{f' in {len(walls)} sittings' if len(walls) > 1 else ''}."
    return [Text(text)]


def environment_section(results: Results) -> Section:
    """Versions, machine and git state as the runs recorded them; differences between runs are shown."""
    rows = [(name, ", ".join(values)) for name, values in results.versions.items()]
    version = results.plan.get("code_version")
    if version:
        rows.append(("code version of the plan", str(version)))
    engine = mapping(results.plan.get("engine"))
    if engine:
        rows.append(("engine", ", ".join(f"{key} {value}" for key, value in engine.items() if value is not None)))
    if not rows:
        return Section("environment", "Environment", [Text("The runs recorded no versions.", "note")])
    return Section("environment", "Environment", [Grid(("What", "Recorded"), rows)])


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

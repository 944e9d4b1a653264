"""The plan as a table: every run, what it costs, and what to expect of its groups."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from sweeps import overrides as ov
from sweeps.choices import flatten, is_under
from sweeps.ledger import warnings_of
from sweeps.space import stage_cells
from sweeps.speed import Speed, SpeedBook, num_gpus, num_slots
from sweeps.types import Plan, RunSpec, SpaceEntry, Stage

SUCCESS_RATES = (0.1, 0.5, 0.9)


def print_plan(plan: Plan, results: Path, console: Console | None = None) -> None:
    """Print runs, search space, costs, expected flat groups and warnings; writes nothing to disk."""
    if console is None:
        # A pipe has no width of its own, and a key cut in two cannot be copied.
        console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    book = SpeedBook(results)
    speeds = {run.key: book.estimate(run.config) for run in plan.runs}
    console.print(Text(f"Plan of {plan.name}", style="bold"), Text(f"-> {plan.directory}", style="dim"))
    if plan.question:
        console.print(f"Question: {plan.question}", markup=False)
    if plan.runs:
        _print_runs(plan, speeds, console)
    _print_search(plan, console)
    _print_cost(plan, speeds, book, console)
    _print_flat(plan, console)
    for warning in warnings_of(plan):
        console.print(Text(f"Warning: {warning}", style="yellow"), soft_wrap=True)
    console.print(Text("Nothing was run (plan=true).", style="dim"))


def flat_share(rate: float, group_size: int) -> float:
    """Expected share of groups without a signal, p^G + (1-p)^G, for success probability p."""
    return float(rate**group_size + (1 - rate) ** group_size)


def duration(seconds: float) -> str:
    """Seconds as a person says them: 42 s, 7 min, 3.2 h, 4.0 d."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172800 else f"{seconds / 86400:.1f} d"


def _print_runs(plan: Plan, speeds: dict[str, Speed | None], console: Console) -> None:
    differs = _differences(plan)
    rows = [_row(run, speeds[run.key], differs) for run in plan.runs]
    header = ["key", "arm", "seed", "stage", "steps", "time", "differs from the base in"]
    if not any(run.stage for run in plan.runs):
        header.pop(3)
        rows = [row[:3] + row[4:] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for number, row in enumerate([header, *rows]):
        cells = [
            cell.rjust(width) if name in ("seed", "steps", "time") else cell.ljust(width)
            for cell, width, name in zip(row[:-1], widths, header, strict=False)
        ]
        # No table of a library: a key cut in two, or overrides folded into a column, cannot be copied.
        console.print(Text("  ".join([*cells, row[-1]]), style="" if number else "bold"), soft_wrap=True)


def _row(run: RunSpec, speed: Speed | None, differs: Callable[[RunSpec], str]) -> list[str]:
    time = duration(speed.seconds * run.steps) if speed else "?"
    return [run.key, run.arm, str(run.seed), run.stage, str(run.steps), time, differs(run)]


def _differences(plan: Plan) -> Callable[[RunSpec], str]:
    """Names the overrides of a run that change a value of the base config, `-` without one."""
    base = dict(flatten(_base_config(plan)))
    assert plan.composer is not None
    choices = plan.composer.choices

    def differs(run: RunSpec) -> str:
        own = dict(flatten(run.config))
        changed = [key for key in {*own, *base} if own.get(key) != base.get(key)]

        def counts(text: str) -> bool:
            key = ov.key_of(text)
            if choices.is_choice(text):
                sets = [key, *choices.values(key, str(ov.parse(text).value()))]
                return any(is_under(other, part) for other in changed for part in sets)
            return any(is_under(other, key) for other in changed)

        return " ".join(filter(counts, run.overrides)) or "-"

    return differs


def _print_search(plan: Plan, console: Console) -> None:
    seeds = ", ".join(map(str, plan.seeds))
    if plan.stages:
        for number, stage in enumerate(plan.stages, 1):
            fixed = "the base" if number == 1 else "the winners so far"
            console.print(
                f"Stage {number} {stage.name}: {_stage_size(stage)} x seeds {seeds}, on top of {fixed}; "
                f"{stage.share:.0%} of the budget",
                markup=False,
            )
            _print_space(stage.space, console)
            for row in stage.zipped:
                console.print(f"  together: {row}", markup=False)
            for arm, overrides in stage.arms.items():
                console.print(f"  arm {arm}: {' '.join(overrides) or '-'}", markup=False)
    elif plan.searched:
        console.print(
            f"Search: {plan.study['trials']} configurations by {plan.study['sampler']} x seeds {seeds}; "
            f"{plan.study['direction']} {plan.study['metric']}; pruner {plan.study['pruner']}",
            markup=False,
        )
        _print_space(plan.space, console)


def _stage_size(stage: Stage) -> str:
    cells = stage_cells(stage)
    if cells is None:
        return f"{stage.trials} configurations by {stage.sampler} and the default"
    return f"{len(cells) + len(stage.arms)} configurations and the default"


def _print_space(space: Sequence[SpaceEntry], console: Console) -> None:
    for entry in space:
        if entry.kind == "choice":
            text = ", ".join(map(str, entry.choices))
        else:
            text = f"{entry.low:g} to {entry.high:g}" + (", log" if entry.log else "")
            text += f", step {entry.step:g}" if entry.step else ""
            text += " (whole numbers)" if entry.kind == "int" else ""
        when = " and ".join(f"{key} in {'/'.join(map(str, values))}" for key, values in entry.when.items())
        console.print(f"  {entry.key}: {text}" + (f"   when {when}" if when else ""), markup=False)


def _print_cost(plan: Plan, speeds: dict[str, Speed | None], book: SpeedBook, console: Console) -> None:
    runs = num_runs(plan)
    if plan.runs:
        known = [(speeds[run.key], run.steps) for run in plan.runs]
        steps = sum(run.steps for run in plan.runs)
    else:
        config = _base_config(plan)
        known = [(book.estimate(config), int(config["steps"]))] * runs
        steps = runs * int(config["steps"])
    slots = num_slots(plan.engine)
    line = f"{runs} run{'s' * (runs != 1)}, {steps} rollout steps, {slots} at a time"
    if all(speed for speed, _ in known) and known:
        work = sum(speed.seconds * steps for speed, steps in known if speed)
        gpus = num_gpus() if not plan.engine["devices"] else len(plan.engine["devices"])
        share = plan.engine["per_trial_gpus"] / plan.engine["trials_per_gpu"]
        hours = f"{work * share / 3600:.2f} GPU-hours" if gpus else f"0 GPU-hours (CPU: {work / 3600:.2f} slot-hours)"
        sources = ", ".join(dict.fromkeys(speed.source for speed, _ in known if speed))
        line += f": about {duration(work / min(slots, max(runs, 1)))}, {hours}. Speed: {sources}"
    else:
        line += "; no recorded speed for this model here, so no estimate before its first run"
    console.print(line + ".", markup=False, soft_wrap=True)
    limits = ", ".join(f"{key} {value:g}" for key, value in plan.sweep["budget"].items() if value is not None)
    if limits:
        console.print(f"Budget: {limits}; the sweep ends there.", markup=False)


def num_runs(plan: Plan) -> int:
    """Runs the whole plan asks for; stages and searches count every configuration with every seed."""
    if plan.stages:
        sizes = [
            1 + (stage.trials if (cells := stage_cells(stage)) is None else len(cells) + len(stage.arms))
            for stage in plan.stages
        ]
        return sum(sizes) * len(plan.seeds)
    if plan.searched:
        return int(plan.study["trials"]) * len(plan.seeds)
    return len(plan.runs)


def _base_config(plan: Plan) -> dict:
    assert plan.composer is not None
    return plan.composer.config()


def _print_flat(plan: Plan, console: Console) -> None:
    configs = [run.config for run in plan.runs] or [_base_config(plan)]
    entries = (*plan.space, *(entry for stage in plan.stages for entry in stage.space))
    searched = [int(str(size)) for entry in entries if entry.key == "sampling.group_size" for size in entry.choices]
    sizes = sorted({*searched, *(int(config["sampling"]["group_size"]) for config in configs)})
    for size in sizes:
        shares = ", ".join(f"{flat_share(rate, size):.0%} at p={rate:g}" for rate in SUCCESS_RATES)
        console.print(f"Groups of {size} without a signal (p^G + (1-p)^G): {shares}.", markup=False)

"""The story of one run, or of one sweep, told from its files alone: for `python -m sweeps status` and `why`."""

from __future__ import annotations

import glob
import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reasonrl.errors import ReasonRLError
from reasonrl.events import count_damaged, read_events
from sweeps.interventions import cured, overrides_of
from sweeps.ledger import other_runs, read_ledger, read_specs
from sweeps.lock import live_holders
from sweeps.progress import alert_codes, duration, number
from sweeps.state import RunState, read_state
from sweeps.types import Plan, RunSpec


def read_plan(directory: Path) -> Plan | None:
    """The sweep's stored plan, None without a readable one."""
    try:
        return Plan.from_json((directory / "plan.json").read_text())
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_runs(directory: Path) -> dict[str, RunState]:
    """All runs of a sweep folder by key: those of its plan, then everything ever started, forks included."""
    plan = read_plan(directory)
    metric = str(plan.study.get("metric")) if plan else "eval/accuracy"
    specs = {run.key: run for run in plan.runs} if plan else {}
    for key, spec in read_specs(directory).items():
        specs.setdefault(key, spec)
    states = {key: read_state(spec, directory / "runs" / key, metric) for key, spec in specs.items()}
    _add_ledger(directory, states, min((holder.since for holder in live_holders(directory)), default=math.inf))
    return states


def _add_ledger(directory: Path, states: Mapping[str, RunState], since: float) -> None:
    """Mark what was started, or put in line again, after its last event: its worker may not have spoken before it died.

    `since` is when the longest of the live coordinators came: what was started later runs.
    """
    last = {str(entry["key"]): entry for entry in read_ledger(directory) if entry.get("key")}
    for state in states.values():
        entry = last.get(state.key, {})
        kind, newer = entry.get("type"), entry.get("time", 0.0) >= state.last_time
        if kind == "start" and entry.get("time", 0.0) >= since and (newer or state.status == "partial"):
            state.status = "running"
        elif kind in ("start", "retry") and newer and state.status == "failed":
            state.status = "partial"


def sweeps_in(results: Path) -> list[Path]:
    """The sweep folders below `results`, newest first."""
    found = [path.parent for path in results.glob("*/plan.json")]
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def find(results: Path, words: list[str]) -> tuple[Path, str | None]:
    """(sweep folder, run key or None) for `NAME`, `RUN` or `NAME RUN`; a run is meant by its name or its key's start.

    ReasonRLError says what there is when nothing, or more than one thing, is meant.
    """
    folders = sweeps_in(results)
    names = {folder.name: folder for folder in folders}
    if not words:
        raise ReasonRLError(f"Name a sweep: {', '.join(names) or f'there is none in {results}'}.")
    if words[0] in names:
        folder = names[words[0]]
        return folder, _key_in(folder, words[1]) if len(words) > 1 else None
    hits = [(folder, key) for folder in folders for key in _keys(folder, words[0])]
    if len(hits) == 1:
        return hits[0]
    if not hits and find_single(results, words):
        raise ReasonRLError(
            f"{words[0]} is a single run: see python -m sweeps why {words[0]}. Ctrl-C pauses it where it runs, and the "
            "same command continues it."
        )
    if not hits:
        known = ", ".join(names) or f"none in {results} (--results DIR looks elsewhere)"
        raise ReasonRLError(f"{words[0]} is neither a sweep nor the name or key of a run. Sweeps: {known}.")
    raise ReasonRLError(
        f"{words[0]} fits {len(hits)} runs: {', '.join(key for _, key in hits[:10])}. Write more of it."
    )


def find_single(results: Path, words: list[str]) -> Path | None:
    """The folder of the single run whose key begins with the only word, None when it means something else."""
    if len(words) != 1:
        return None
    hits = [path.parent for path in (results / "single").glob(f"{glob.escape(words[0])}*/events.jsonl")]
    return hits[0] if len(hits) == 1 and not (results / words[0] / "plan.json").exists() else None


def _keys(folder: Path, word: str) -> list[str]:
    """The runs of a sweep that `word` means: by their name, else by the start of their key."""
    plan = read_plan(folder)
    specs = {**{run.key: run for run in (plan.runs if plan else ())}, **read_specs(folder)}
    return [key for key, spec in specs.items() if spec.name == word] or [key for key in specs if key.startswith(word)]


def _key_in(folder: Path, start: str) -> str:
    hits = _keys(folder, start)
    if len(hits) != 1:
        what = f"fits {len(hits)} runs" if hits else "is no run"
        raise ReasonRLError(f"{start} {what} of {folder.name}. See: python -m sweeps status {folder.name}")
    return hits[0]


def status_lines(directory: Path) -> Iterator[str]:
    """Who works on a sweep, how far it is, and a line for every run."""
    runs = read_runs(directory)
    holders = live_holders(directory)
    plan = read_plan(directory)
    others = other_runs(plan) if plan else set()
    counts: dict[str, int] = {}
    for run in runs.values():
        counts[run.status] = counts.get(run.status, 0) + 1
    yield f"{directory.name}: {', '.join(f'{count} {status}' for status, count in counts.items()) or 'no runs yet'}"
    if plan and plan.question:
        yield f"  {plan.question}"
    yield from [f"  held by {holder.describe()}" for holder in holders] or ["  no coordinator works on it now"]
    yield f"  {'key':<13}{'run':<28}{'status':<10}{'step':>9}  {'reward':>7} {'entropy':>8} {'metric':>8}  alerts"
    for run in runs.values():
        step = f"{run.step}/{run.spec.steps}"
        name = f"{run.spec.name} (fork of {run.spec.parent[:6]})" if run.spec.parent else run.spec.name
        name += " (earlier plan)" if run.key in others else ""
        yield (
            f"  {run.key:<13}{name:<27} {run.status:<10}{step:>9}  {number(run.shown.get('reward/total')):>7}"
            f" {number(run.shown.get('entropy/mean')):>8} {number(run.value):>8}  {alert_codes(run)}"
        )


def why_lines(directory: Path, key: str) -> Iterator[str]:
    """The story of one run: what is special about it, what happened to it, why it ended, what to try."""
    runs = read_runs(directory)
    run = runs[key]
    spec = run.spec
    yield f"{spec.name} [{key}] of {directory.name}: {run.status} at step {run.step}/{spec.steps}"
    yield f"  arm {spec.arm}, seed {spec.seed}" + (f", stage {spec.stage}" if spec.stage else "")
    yield f"  overrides: {' '.join(spec.overrides) or 'none'}"
    if spec.parent:
        yield f"  a fork of {spec.parent} from step {spec.parent_step}; it counts for no arm"
    path = directory / "runs" / key / "events.jsonl"
    if not path.exists():
        yield "  it has not started yet"
        return
    yield from _chapters(path)
    yield from _ledger_lines(directory, key)
    yield from _moral(run)
    if run.status == "partial" and not live_holders(directory):
        yield f"  interrupted: the same command continues it from step {run.resumes_from}"
    for child in runs.values():
        if child.spec.parent == key:
            verdict = {True: "it worked", False: "it did not help", None: "it is still open"}[cured(child)]
            what = " ".join(child.spec.overrides)
            yield f"  fork {child.key} from step {child.spec.parent_step} with {what}: {verdict}"
    if (path.parent / "error.txt").exists():
        yield f"  its traceback: {path.parent / 'error.txt'}"


def single_lines(run_dir: Path) -> Iterator[str]:
    """The story of a run of `python sweep.py`, which has no sweep around it."""
    path = run_dir / "events.jsonl"
    start = next((event for event in read_events(path) if event["type"] == "start"), {})
    steps = int(start.get("steps", 0))
    spec = RunSpec(run_dir.name, "single", "", int(start.get("seed", 0)), "", [], dict(start.get("config", {})), steps)
    run = read_state(spec, run_dir)
    status = "not ended" if run.status == "partial" else run.status
    yield f"single run [{run.key}] with seed {spec.seed}: {status} at step {run.step}/{steps}"
    yield f"  its settings: the start event of {path}"
    yield from _chapters(path)
    yield from _moral(run, in_sweep=False)


def _chapters(path: Path) -> Iterator[str]:
    """What the event log tells, without its rows."""
    rows, began = 0, None
    for event in read_events(path):
        kind, when = event["type"], _clock(event)
        if kind == "start":
            began = event.get("time")
            resumed = event.get("resumed_from")
            yield f"  {when} starts" + (f" from the checkpoint of step {resumed}" if resumed else "")
        elif kind == "step":
            rows += 1
        elif kind == "alert":
            what = f"{event['severity']} {event['code']} {event['title']}: {event['message']}"
            yield f"  {when} step {event['step']}: {what}"
            yield f"           evidence: {_short(event.get('evidence'))}"
        elif kind == "warning":
            yield f"  {when} warning: {event.get('message')}"
        elif kind == "decision":
            why = _short(event.get("reason", event.get("value")))
            yield f"  {when} step {event.get('step')}: told to {event['action']}: {why}"
        elif kind == "retry":
            yield f"  {when} put in line again by hand"
        elif kind == "end":
            took = f" after {duration(event['time'] - began)}" if began and event.get("time") else ""
            kind_of = f" ({event['error_class']})" if event.get("error_class") else ""
            reason = event.get("reason")
            why = f": {reason}" if isinstance(reason, str) else ""
            yield f"  {when} {event['status']}{kind_of}{took}, {rows} rows{why}"
    damaged = count_damaged(path)
    if damaged:
        yield f"  {damaged} line(s) of its event log cannot be read and were left out"


def _ledger_lines(directory: Path, key: str) -> Iterator[str]:
    for entry in read_ledger(directory):
        if entry.get("key") == key and entry["type"] in ("retry", "abandon", "no_fork"):
            what = {
                name: value
                for name, value in entry.items()
                if name in ("error_class", "micro_batch_size", "reason", "why")
            }
            yield f"  {_clock(entry)} coordinator: {entry['type']} {_short(what)}"


def _moral(run: RunState, in_sweep: bool = True) -> Iterator[str]:
    """What to try next."""
    if run.status == "stopped":
        reason = run.stop_reason() or {}
        yield f"  stopped because of {reason.get('code')} {reason.get('title')}: {reason.get('message')}"
        cures = overrides_of(reason)
        if cures:
            yield f"  try: {'  or  '.join(cures)}"
            if in_sweep:
                yield "  or let the sweep try it: sweep.on_alert=intervene"
    elif run.status == "failed":
        cure = {
            "oom": "less memory: optim.micro_batch_size, sampling.max_new_tokens or engine.trials_per_gpu down",
            "killed": "see who killed it (memory limit, pre-emption)",
            "hung": "its worker.log; engine.hang_timeout_s when steps really take so long",
            "non_finite": "a smaller optim.lr, or optim.max_grad_norm",
            "user_code": "fix the bug; its run gets a new key when the code of reasonrl changes",
            "infrastructure": "disk, network and driver; then try again",
        }.get(str(run.error_class), "its worker.log")
        again = f"python -m sweeps retry {run.key}" if in_sweep else "the same command"
        yield f"  failed ({run.error_class}). Try: {cure}. Again: {again}"


def _clock(event: Mapping[str, Any]) -> str:
    at = event.get("time")
    return time.strftime("%H:%M:%S", time.localtime(at)) if at else "--:--:--"


def _short(value: Any, most: int = 300) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= most else text[: most - 3] + "..."

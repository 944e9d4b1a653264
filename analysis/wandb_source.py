"""Runs of Weights & Biases -> a results folder of event logs, so that everything else reads them like its own.

python -m analysis pull ENTITY/PROJECT --group clip_ablation
python -m analysis pull --offline results/clip_ablation --out results/from_wandb
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.wandb_offline import PulledRun, read_offline
from reasonrl.errors import AnalysisError
from reasonrl.events import encode_line

SOURCE = "wandb"
_STEPS = ("step", "global_step", "train/global_step", "trainer/global_step", "_step")


def fetch_runs(path: str, group: str | None, api: Any = None) -> list[PulledRun]:
    """Ask W&B for the runs of ENTITY/PROJECT (all, or one group) with every logged row.

    The only place that talks to the server. AnalysisError when it refuses, is away, or knows no such runs.
    """
    if api is None:
        api = _open_api()
    try:
        filters = {"group": group} if group else {}
        found = [
            PulledRun(
                id=run.id,
                name=run.name or run.id,
                group=run.group or "",
                job_type=run.job_type or "",
                state=run.state,
                config={key: value for key, value in dict(run.config).items() if not key.startswith("_")},
                summary=dict(run.summary),
                history=list(run.scan_history(page_size=1000)),
            )
            for run in api.runs(path, filters=filters, order="+created_at")
        ]
    except Exception as error:  # the client raises many kinds, and its own wrappers of requests' kinds
        raise AnalysisError(f"W&B: {path} cannot be read: {_first_line(error)}") from None
    if not found:
        where = f"{path}, group {group}" if group else path
        raise AnalysisError(f"W&B: there are no runs in {where}.")
    return found


def _open_api() -> Any:
    from reasonrl.tracking import logged_in

    if not logged_in():  # the client would ask for a key and wait
        raise AnalysisError("W&B: not logged in. Run `wandb login`, or set WANDB_API_KEY.")
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    try:
        return wandb.Api(timeout=60)
    except Exception as error:
        raise AnalysisError(f"W&B: the client could not start: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def write_results(runs: Sequence[PulledRun], out: Path, source: str, baseline: str | None = None) -> list[str]:
    """Write `out` as a results folder (plan.json, runs/ID/events.jsonl) and return notes on what was left out.

    `baseline` is the arm to compare with; else the one the sweep's summary run names, else the first. A folder
    that was pulled before is replaced; one that holds anything else is left alone (AnalysisError).
    """
    _check_target(out)
    kept = [run for run in runs if run.job_type != "summary" and run.history]
    notes = _left_out(runs)
    if not kept:
        raise AnalysisError(f"{source}: no run has logged anything. {' '.join(notes)}".strip())
    seeds = _seeds(kept, notes)
    draft = out.with_name(f".{out.name}.{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    unknown: set[str] = set()
    for run in kept:
        folder = draft / "runs" / _safe(run.id)
        folder.mkdir(parents=True, exist_ok=True)
        lines = [encode_line(event) for event in run_events(run, seeds[run.id], unknown)]
        (folder / "events.jsonl").write_text("".join(lines), encoding="utf-8")
    if unknown:
        names = ", ".join(sorted(unknown)[:12]) + (" ..." if len(unknown) > 12 else "")
        notes.append(f"{len(unknown)} metric names are not known here and keep their own: {names}.")
    plan = {"name": out.name, **_about(runs, kept, baseline), "runs": [], "source": source}
    (draft / "plan.json").write_text(json.dumps({**plan, "pulled_from": SOURCE, "notes": notes}, indent=1))
    shutil.rmtree(out, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    draft.replace(out)
    return notes


def _about(runs: Sequence[PulledRun], kept: Sequence[PulledRun], baseline: str | None) -> dict[str, Any]:
    """Question, arms and baseline, as the sweep's summary run tells them."""
    said = next((run.config for run in runs if run.job_type == "summary"), {})
    arms = list(dict.fromkeys(arm_of(run) for run in kept))
    if baseline is not None and baseline not in arms:
        raise AnalysisError(f"--baseline {baseline}: no such arm; there are {', '.join(arms)}.")
    told = said.get("arms")
    order = [str(arm) for arm in told] if isinstance(told, list | dict) else []
    arms = [*(arm for arm in order if arm in arms), *(arm for arm in arms if arm not in order)]
    named = baseline or said.get("baseline")
    return {
        "question": str(said.get("question") or ""),
        "arms": arms,
        "baseline": named if named in arms else arms[0],
    }


def _check_target(out: Path) -> None:
    if not out.exists():
        return
    try:
        pulled = json.loads((out / "plan.json").read_text()).get("pulled_from") == SOURCE
    except (OSError, ValueError, AttributeError):
        pulled = False
    if not pulled and (not out.is_dir() or any(out.iterdir())):
        raise AnalysisError(f"{out} exists and was not pulled from W&B: give another folder with --out.")


def _left_out(runs: Sequence[PulledRun]) -> list[str]:
    notes = []
    empty = [run.name or run.id for run in runs if not run.history and run.job_type != "summary"]
    if empty:
        notes.append(f"{len(empty)} W&B runs have logged nothing and were left out: {', '.join(empty[:8])}.")
    damaged = {run.name or run.id: run.damaged for run in runs if run.damaged}
    if damaged:
        each = ", ".join(f"{name} {count}" for name, count in list(damaged.items())[:8])
        notes.append(f"Pieces of W&B files that cannot be read (a killed process leaves one): {each}.")
    return notes


def _seeds(runs: Sequence[PulledRun], notes: list[str]) -> dict[str, int]:
    """Each run's seed; one that records none gets -1, so that it is never paired with another arm's."""
    out = {}
    for run in runs:
        seed = run.config.get("seed")
        out[run.id] = int(seed) if isinstance(seed, int | float) and math.isfinite(seed) else -1
    missing = sum(seed < 0 for seed in out.values())
    if missing:
        notes.append(f"{missing} of {len(runs)} W&B runs record no seed: they cannot be paired across arms.")
    return out


def arm_of(run: PulledRun) -> str:
    """The run's arm: as configured, else its job type, else its name without a trailing seed."""
    arm = run.config.get("arm") or (run.job_type if run.job_type not in ("", "train") else "")
    return str(arm) if arm else re.sub(r"[-_.]?(?:s|seed)[-_=]?\d+$", "", run.name or run.id) or run.id


def run_events(run: PulledRun, seed: int, unknown: set[str]) -> Iterable[dict[str, Any]]:
    """The run as events of this project; names of other trainers are translated, those not known are collected."""
    own = "run_key" in run.config
    times = [row["_timestamp"] for row in run.history if isinstance(row.get("_timestamp"), int | float)]
    config = {key: value for key, value in run.config.items() if key not in ("run_key", "arm")}
    steps = config.get("steps")
    last = 0
    yield {
        "type": "start",
        "time": times[0] if times else None,
        "key": _safe(run.id),
        "name": run.name or run.id,
        "arm": arm_of(run),
        "seed": seed,
        "steps": steps if isinstance(steps, int) else None,
        "config": config,
        "versions": {},
        "resumed_from": None,
    }
    for row in run.history:
        step = next((int(row[name]) for name in _STEPS if _is_whole(row.get(name))), None)
        metrics = _metrics(row, own, unknown)
        if step is None or not metrics:
            continue
        last = max(last, step)
        held_out = {name: value for name, value in metrics.items() if name.startswith("eval/") or name == "time/eval"}
        training = {name: value for name, value in metrics.items() if name not in held_out}
        head: dict[str, Any] = {"time": row.get("_timestamp"), "step": step}
        if any(name.startswith("eval/") for name in held_out):
            yield {"type": "eval", **head, "metrics": held_out, "problems": None, "samples": None}
        if training:
            yield {"type": "step", **head, "metrics": training}
    yield from _alert_events(run.summary)
    end = _end_event(run, last, times[-1] if times else None)
    if end:
        yield end


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value == int(value)


def _metrics(row: Mapping[str, Any], own: bool, unknown: set[str]) -> dict[str, float]:
    """The numbers of one logged row under our names; of several spellings of one metric the best known wins."""
    from reasonrl.alerts.names import translate

    out: dict[str, tuple[int, float]] = {}
    for name, value in row.items():
        if name in _STEPS or name.startswith("_") or value is None:
            continue
        try:
            number = float(value)
        except (TypeError, ValueError):
            continue  # tables, images, text
        ours: tuple[str, int] | None = (name, 0) if own else translate(name)
        if ours is None:
            unknown.add(name)
            ours = (name, 0)
        if ours[0] and (ours[0] not in out or ours[1] < out[ours[0]][0]):
            out[ours[0]] = (ours[1], number)
    return {name: number for name, (_, number) in out.items()}


def _alert_events(summary: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    for text in summary.get("alerts") or []:
        match = re.fullmatch(r"(\w+)@(\d+)", str(text))
        if match:
            stop = match[1] == summary.get("stop_code")
            words = {"title": "", "message": str(summary.get("stop_reason") or "") if stop else ""}
            yield {"type": "alert", "step": int(match[2]), "code": match[1], **words} | {
                "severity": "stop" if stop else "flag",
                "evidence": {},
                "intervention": [],
            }


def _end_event(run: PulledRun, step: int, time: float | None) -> dict[str, Any] | None:
    status = run.summary.get("status")
    if status not in ("finished", "stopped", "paused", "failed"):
        known = {"finished": "finished", "failed": "failed", "crashed": "failed", "killed": "failed"}
        status = known.get(run.state)
    if status is None:
        return None
    code, text = run.summary.get("stop_code"), run.summary.get("stop_reason")
    reason = {"code": code, "title": "", "message": text or "", "step": step} if code else text
    error = {"crashed": "killed", "killed": "killed"}.get(run.state, "user_code") if status == "failed" else None
    return {"type": "end", "time": time, "step": step, "status": status, "reason": reason, "error_class": error}


def _safe(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name) or "run"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command `pull`; returns 0. AnalysisError is left to the caller."""
    parser = argparse.ArgumentParser(
        prog="python -m analysis pull",
        description="Write runs of Weights & Biases as a results folder, for export, report and notebooks.",
    )
    parser.add_argument("project", nargs="?", help="ENTITY/PROJECT, or PROJECT of your default entity")
    parser.add_argument("--group", help="only the runs of this group (a sweep's name)")
    parser.add_argument("--baseline", help="the arm the others are compared with")
    parser.add_argument("--offline", type=Path, help="read W&B's offline files in and under this folder instead")
    parser.add_argument("--out", type=Path, help="results folder to write (default: results/GROUP or results/PROJECT)")
    args = parser.parse_args(arguments)
    if bool(args.project) == bool(args.offline):
        raise AnalysisError("pull: give either ENTITY/PROJECT, or --offline FOLDER.")
    if args.offline:
        runs = [run for run in read_offline(args.offline) if args.group in (None, run.group)]
        if not runs:
            raise AnalysisError(f"{args.offline}: no run belongs to group {args.group}.")
        name, source = args.group or f"{args.offline.resolve().name}_wandb", f"offline files in {args.offline.name}"
    else:
        name, source = args.group or args.project.rsplit("/", 1)[-1], args.project
    out = args.out or Path("results") / _safe(name)
    _check_target(out)  # before minutes of download
    if not args.offline:
        runs = fetch_runs(args.project, args.group)
    notes = write_results(runs, out, source, args.baseline)
    print(f"{len(runs)} W&B runs from {source} in {out}")
    for note in notes:
        print(f"note: {note}")
    print(f"next: python -m analysis export {out}")
    return 0

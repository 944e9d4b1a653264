"""A results folder -> two tidy tables, `runs` and `rows`, with evaluations and alerts beside them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from analysis.cache import Stamp, read_cache, stamp, write_cache
from analysis.eventlog import RunLog
from analysis.readers import read_logs
from analysis.records import RUN_COLUMNS, Record, gradient_steps, make_record, notes_about, order_records
from reasonrl.errors import AnalysisError

ID_COLUMNS = ("key", "arm", "seed", "step", "gradient_step")
ALERT_COLUMNS = (
    "key",
    "arm",
    "seed",
    "step",
    "code",
    "title",
    "severity",
    "message",
    "evidence",
    "intervention",
)


@dataclass
class Results:
    """The tables of one results folder.

    `runs`: one row per run, columns RUN_COLUMNS of analysis/records.py and `config.<dotted key>`.
    `rows`: one row per run and rollout step: key, arm, seed, step, gradient_step (cumulative), metrics.
    `evals`: the same for held-out evaluations (step 0 = before training), with problems (number right per
    held-out problem, an array or None) and samples (tries per problem).
    `alerts`: key, arm, seed, step, code, title, severity, message, evidence (dict), intervention (list).
    `plan`: plan.json as it stands ({} without one). `notes`: what is missing, damaged or left out, in words.
    `versions`: what the runs were trained with, library -> versions.
    """

    path: Path
    runs: pd.DataFrame
    rows: pd.DataFrame
    evals: pd.DataFrame
    alerts: pd.DataFrame
    plan: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    versions: dict[str, list[str]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The sweep's name: from the plan, else the folder's."""
        return str(self.plan.get("name") or self.path.name)

    @property
    def arms(self) -> list[str]:
        """The arms that have runs, baseline first, then in the plan's order; forked children do not count."""
        mine = self.runs[self.runs["parent"] == ""]["arm"]
        found = list(dict.fromkeys(mine))
        return sorted(found, key=lambda arm: (arm != self.baseline, found.index(arm)))

    @property
    def baseline(self) -> str:
        """The arm the others are compared with: the plan's, else the first one ("" without runs)."""
        arms = list(dict.fromkeys(self.runs["arm"]))
        named = str(self.plan.get("baseline") or "")
        return named if named in arms else (arms[0] if arms else "")

    def samples(self, keys: Sequence[str] | None = None) -> pd.DataFrame:
        """Recorded completions with prompt, gold answer, reward, its parts (dict), finish and why it was wrong."""
        chosen = self.runs if keys is None else self.runs[self.runs["key"].isin(keys)]
        folders = {folder.name: folder for folder in run_folders(self.path)}
        out = []
        for key, arm, seed in zip(chosen["key"], chosen["arm"], chosen["seed"], strict=True):
            if key in folders:
                head = {"key": key, "arm": arm, "seed": seed}
                out += [head | row for row in _sample_rows(folders[key] / "events.jsonl")]
        columns = ["key", "arm", "seed", "step", "prompt", "gold", "completion", "reward", "parts", "finish", "reason"]
        return pd.DataFrame(out, columns=columns)


def find(name: str | Path, root: Path | None = None) -> Path:
    """The results folder of a sweep given by name (`root`/NAME, root "results") or by path.

    AnalysisError names the sweeps there are.
    """
    root = Path("results") if root is None else root
    for candidate in (root / name, Path(name)):
        if candidate.is_dir():
            return candidate
    known = sorted(path.parent.name for path in root.glob("*/plan.json")) if root.is_dir() else []
    there = ", ".join(known) if known else "none yet"
    raise AnalysisError(
        f"{name}: no such results folder ({root / name} and {name} were tried). Sweeps in {root}: {there}."
    )


def run_folders(path: Path) -> list[Path]:
    """The run folders of a results folder: runs/*, or the folders with an event log, or the folder itself."""
    if (path / "events.jsonl").is_file():
        return [path]
    inside = path / "runs" if (path / "runs").is_dir() else path
    return sorted(folder for folder in inside.glob("*") if (folder / "events.jsonl").is_file())


def load(path: str | Path, cache: bool = True) -> Results:
    """Read a results folder (or the folder of one run); only logs that changed since last time are parsed.

    A path that is not a folder raises AnalysisError; whatever is missing or damaged inside becomes a note.
    """
    path = Path(path)
    if not path.is_dir():
        raise AnalysisError(f"{path} is not a folder of results.")
    notes: list[str] = []
    plan = _read_plan(path, notes)
    folders = {folder.name: folder for folder in run_folders(path)}
    logs, stamps = _read_logs(path, folders, cache, notes)
    with ThreadPoolExecutor(1) as pool:  # the cache is written while the tables are put together
        writing = pool.submit(write_cache, path / "cache", stamps, logs) if cache and stamps else None
        results = _assemble(path, plan, folders, logs, notes)
        if writing is not None:
            writing.result()
    return results


def _assemble(
    path: Path, plan: dict[str, Any], folders: dict[str, Path], logs: dict[str, RunLog], notes: list[str]
) -> Results:
    planned = _planned(plan)
    records = [
        make_record(key, logs.get(key), planned.get(key), plan, folders.get(key))
        for key in dict.fromkeys([*planned, *folders])
    ]
    records, left_out = order_records(records, plan)
    notes += notes_about(records, left_out)
    runs = pd.DataFrame([record.row for record in records]).reindex(columns=_run_columns(records))
    held = [(record, logs[record.key]) for record in records if record.key in logs]
    rows = _frame([(record, log, log.steps) for record, log in held])
    evals = _frame([(record, log, log.evals) for record, log in held])
    return Results(path, runs, rows, evals, _alerts(records), plan, notes, _versions(records))


def _read_plan(path: Path, notes: list[str]) -> dict[str, Any]:
    file = path / "plan.json"
    if not file.is_file():
        if not (path / "events.jsonl").is_file():
            notes.append("plan.json is missing: arms and runs are taken from the event logs alone.")
        return {}
    try:
        plan = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        notes.append(f"plan.json cannot be read ({error}): arms and runs are taken from the event logs alone.")
        return {}
    if not isinstance(plan, dict):
        notes.append("plan.json holds no plan: arms and runs are taken from the event logs alone.")
        return {}
    said = plan.get("notes")  # by `analysis pull`
    notes += [str(note) for note in said] if isinstance(said, list) else []
    return plan


def _planned(plan: dict[str, Any]) -> dict[str, dict[str, Any]]:
    runs = plan.get("runs")
    return {
        str(run["key"]): run
        for run in (runs if isinstance(runs, list) else [])
        if isinstance(run, dict) and "key" in run
    }


def _read_logs(
    path: Path, folders: dict[str, Path], cache: bool, notes: list[str]
) -> tuple[dict[str, RunLog], dict[str, Stamp]]:
    """Take what the cache has and parse the rest.

    Also gives the stamps with which the cache is to be written again ({} when nothing is new).
    """
    stamps: dict[str, Stamp] = {}
    for key, folder in folders.items():
        try:
            stamps[key] = stamp(folder / "events.jsonl")
        except OSError as error:
            notes.append(f"run {key}: events.jsonl cannot be read ({error.strerror}).")
    logs = read_cache(path / "cache", stamps) if cache else {}
    fresh = [key for key in stamps if key not in logs]
    paths = [folders[key] / "events.jsonl" for key in fresh]
    for key, log in zip(fresh, read_logs(paths, sum(stamps[key][0] for key in fresh)), strict=True):
        if isinstance(log, OSError):
            notes.append(f"run {key}: events.jsonl cannot be read ({log.strerror}).")
            del stamps[key]
        else:
            logs[key] = log
    return {key: logs[key] for key in stamps}, stamps if fresh and logs else {}


def _run_columns(records: list[Record]) -> list[str]:
    names = dict.fromkeys(name for record in records for name in record.row)
    return [*RUN_COLUMNS, *(name for name in names if name not in RUN_COLUMNS)]


def _frame(parts: list[tuple[Record, RunLog, pa.Table]]) -> pd.DataFrame:
    """Stack the runs' tables and put key, arm, seed and gradient_step in front of the metrics."""
    if not parts:
        return pd.DataFrame(columns=list(ID_COLUMNS))
    table = pa.concat_tables([part for _, _, part in parts], promote_options="default")
    records = [record for record, _, _ in parts]
    counts = [part.num_rows for _, _, part in parts]
    updates = [gradient_steps(log, part.column("step").to_numpy(), record.updates) for record, log, part in parts]
    identity = {
        "key": _repeat([record.key for record in records], counts),
        "arm": _repeat([record.row["arm"] for record in records], counts),
        "seed": pa.array(np.repeat([record.row["seed"] for record in records], counts)),
        "step": table.column("step"),
        "gradient_step": pa.array(np.concatenate(updates), pa.float64()),
    }
    metrics = {name: table.column(name) for name in table.column_names if name != "step"}
    return pa.table(identity | metrics).to_pandas()


def _repeat(values: list[str], counts: list[int]) -> pa.Array:
    return pa.array(values, pa.string()).take(pa.array(np.repeat(np.arange(len(values)), counts)))


def _alerts(records: list[Record]) -> pd.DataFrame:
    out = []
    for record in records:
        for alert in record.alerts:
            row: dict[str, Any] = {name: str(alert.get(name, "")) for name in ("code", "title", "severity", "message")}
            evidence, advice, step = alert.get("evidence"), alert.get("intervention"), alert.get("step")
            row["evidence"] = evidence if isinstance(evidence, dict) else {}
            row["intervention"] = [str(text) for text in advice] if isinstance(advice, list) else []
            row["step"] = step if isinstance(step, int) and 0 <= step < 2**53 else -1
            out.append({"key": record.key, "arm": record.row["arm"], "seed": record.row["seed"], **row})
    return pd.DataFrame(out, columns=list(ALERT_COLUMNS))


def _versions(records: list[Record]) -> dict[str, list[str]]:
    seen: dict[str, set[str]] = {}
    for record in records:
        versions = (record.header.get("start") or {}).get("versions")
        for name, version in versions.items() if isinstance(versions, dict) else ():
            seen.setdefault(str(name), set()).add(str(version))
    return {name: sorted(seen[name]) for name in sorted(seen)}


def _sample_rows(path: Path) -> list[dict[str, Any]]:
    by_step: dict[Any, list[dict[str, Any]]] = {}  # a resumed run writes the samples of a step again
    with path.open("rb") as file:
        for line in file:
            if not line.startswith((b'{"type":"samples"', b'{"type": "samples"')) or not line.endswith(b"\n"):
                continue
            try:
                event = json.loads(line)
            except ValueError:
                continue
            step, rows = event.get("step"), event.get("rows")
            if isinstance(step, int) and isinstance(rows, list):
                by_step[step] = [{"step": step, **row} for row in rows if isinstance(row, dict)]
    return [row for rows in by_step.values() for row in rows]

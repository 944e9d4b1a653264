"""One row of the `runs` table: what a run was meant to do, how far it came, how it ended, last values."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import yaml

from analysis.eventlog import RunLog

RUN_COLUMNS = (
    "key",
    "name",
    "arm",
    "seed",  # -1 when none is recorded
    "stage",
    "parent",  # key of the run it was forked from, "" for a run of the plan
    "status",  # as recorded: finished, stopped, paused, failed; or unfinished, empty, not started
    "outcome",  # one of OUTCOMES
    "steps_planned",
    "steps_done",
    "reason_code",  # of the alert that stopped it, else ""
    "reason_title",
    "reason_message",
    "error_class",
    "final_step",  # rollout step of the last evaluation
    "final_accuracy",  # of the last evaluation
    "final_entropy",  # nats per token, mean of the last FINAL_ROWS recorded steps
    "final_length",  # tokens per response, likewise
    "generated_tokens",  # sum over all steps
    "seconds",  # of steps and evaluations, else last event minus first
    "started",  # unix seconds
)
FINAL_ROWS = 5
# finished; stopped = by an alert; failed = by its own numbers or size (non_finite, oom): these two count
# against the arm. ended = early, by the pruner, the budget or a person; lost = by the machine or the program;
# unfinished = has not ended: these three say nothing of the arm.
OUTCOMES = ("finished", "stopped", "failed", "ended", "lost", "unfinished")
_ARMS_FAULT = ("non_finite", "oom")
_ALERT_CODE = re.compile(r"A\d+")


@dataclass
class Record:
    """A row of `runs` with what else is needed of it: alerts, gradient steps per rollout step, log header."""

    key: str
    row: dict[str, Any]
    alerts: list[dict[str, Any]] = field(default_factory=list)
    updates: float = math.nan
    blank: int = 0
    header: dict[str, Any] = field(default_factory=dict)
    planned: bool = False


def make_record(
    key: str,
    log: RunLog | None,
    entry: Mapping[str, Any] | None,
    plan: Mapping[str, Any],
    folder: Path | None,
) -> Record:
    """The record of one run from its log (None: there is none yet) and its entry in the plan, if any."""
    planned = entry is not None
    entry = entry or _own_spec(folder)
    header = log.header if log is not None else {}
    start = header.get("start") or {}
    config = _config(start, entry, plan, folder)
    arm = entry.get("arm") or start.get("arm") or entry.get("name") or start.get("name") or key
    row: dict[str, Any] = dict.fromkeys(RUN_COLUMNS, "")
    row |= {
        "key": key,
        "name": str(entry.get("name") or start.get("name") or key),
        "arm": str(arm),
        "seed": _first_int(entry.get("seed"), start.get("seed"), config.get("seed"), default=-1),
        "stage": str(entry.get("stage") or start.get("stage") or ""),
        "parent": str(entry.get("parent") or start.get("parent") or ""),
        "steps_planned": _first_int(entry.get("steps"), start.get("steps"), config.get("steps"), default=0),
        "steps_done": 0,
        "started": header.get("first_time") or math.nan,
    }
    row |= _ending(log) | _last_numbers(log)
    row |= {f"config.{name}": value for name, value in flatten(config).items()}
    return Record(key, row, list(header.get("alerts", [])), _updates(config), _blank(log), header, planned)


def gradient_steps(log: RunLog, steps: np.ndarray, updates: float) -> np.ndarray:
    """Optimizer updates by the end of each rollout step in `steps`: as recorded, else steps x `updates`."""
    counted = steps * updates
    recorded = _column(log.steps, "optim/gradient_steps")
    if len(recorded):
        place = np.searchsorted(log.steps.column("step").to_numpy(), steps, side="right") - 1
        found = np.where(place >= 0, recorded[place], 0.0)
        counted = np.where(np.isfinite(found), found, counted)
    return counted


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as {dotted key: value}; lists become JSON text, so that every value can be compared."""
    out: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict) and value:
            out |= flatten(value, f"{prefix}{name}.")
        else:
            out[f"{prefix}{name}"] = json.dumps(value) if isinstance(value, list | dict) else value
    return out


def _config(
    start: Mapping[str, Any], entry: Mapping[str, Any], plan: Mapping[str, Any], folder: Path | None
) -> dict[str, Any]:
    """The resolved config: from the start event, else config.yaml, else the plan."""
    if isinstance(start.get("config"), dict):
        return start["config"]
    if folder is not None:
        try:
            read = yaml.load((folder / "config.yaml").read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        except (OSError, ValueError, yaml.YAMLError):
            read = None
        if isinstance(read, dict):
            return read
    given = entry.get("config")
    if isinstance(given, str) and isinstance(plan.get("configs"), dict):
        given = plan["configs"].get(given)
    return dict(given) if isinstance(given, dict) else {}


def _own_spec(folder: Path | None) -> dict[str, Any]:
    """What the run folder itself says of a run that the plan does not name (a searched one, or a fork)."""
    try:
        spec = json.loads((folder / "run.json").read_text()) if folder is not None else {}
    except (OSError, ValueError):
        return {}
    return spec if isinstance(spec, dict) else {}


def _first_int(*values: Any, default: int) -> int:
    for value in values:
        if isinstance(value, int | float) and not isinstance(value, bool) and -(2**53) < value < 2**53:
            return int(value)
    return default


def _updates(config: Mapping[str, Any]) -> float:
    optim = config.get("optim")
    if not isinstance(optim, Mapping):
        return math.nan
    counts = [count for count in (optim.get("minibatches"), optim.get("inner_epochs")) if isinstance(count, int)]
    return float(math.prod(counts)) if len(counts) == 2 else math.nan


def _ending(log: RunLog | None) -> dict[str, Any]:
    if log is None:
        return {"status": "not started", "outcome": "unfinished"}
    end = log.header.get("end")
    if not end:
        nothing = log.steps.num_rows == 0 and log.evals.num_rows == 0
        return {"status": "empty" if nothing else "unfinished", "outcome": "unfinished"}
    status, reason = str(end.get("status")), end.get("reason")
    error = str(end.get("error_class") or "")
    alert = _reason_of(log.header) if status == "stopped" else {"message": reason or ""}
    out = {"status": status, "error_class": error, "reason_message": str(alert.get("message", ""))}
    out |= {"reason_code": str(alert.get("code", "")), "reason_title": str(alert.get("title", ""))}
    if status == "finished":
        out["outcome"] = "finished"
    elif status == "failed":
        out["outcome"] = "failed" if error in _ARMS_FAULT else "lost"
    elif status == "stopped":
        out["outcome"] = "stopped" if _ALERT_CODE.fullmatch(out["reason_code"]) else "ended"
    else:
        out["outcome"] = "unfinished"
    return out


def _reason_of(header: Mapping[str, Any]) -> Mapping[str, Any]:
    """Why a run was stopped: the coordinator's decision, else the log's reason, else the last stop alert."""
    reason = (header.get("end") or {}).get("reason")
    for source in (header.get("decision"), reason):
        if isinstance(source, dict) and source.get("code"):
            return source
    stops = [alert for alert in header.get("alerts", []) if alert.get("severity") == "stop"]
    if stops and not reason:
        return stops[-1]
    return {"message": str(reason or "")}


def _last_numbers(log: RunLog | None) -> dict[str, Any]:
    names = ("final_step", "final_accuracy", "final_entropy", "final_length", "generated_tokens", "seconds")
    out = dict.fromkeys(names, math.nan)
    if log is None:
        return out
    steps, evals, header = log.steps, log.evals, log.header
    if evals.num_rows:
        out["final_step"] = evals.column("step")[-1].as_py()
        if "eval/accuracy" in evals.column_names:
            value = evals.column("eval/accuracy")[-1].as_py()
            out["final_accuracy"] = math.nan if value is None else value
    if steps.num_rows:
        out["steps_done"] = steps.column("step")[-1].as_py()
        out["final_entropy"] = _tail_mean(steps, "entropy/mean")
        out["final_length"] = _tail_mean(steps, "length/mean")
        out["generated_tokens"] = _total(steps, "data/generated_tokens")
        out["seconds"] = _total(steps, "time/step") + np.nan_to_num(_total(evals, "time/eval"))
    if math.isnan(out["seconds"]) and header.get("last_time") is not None:
        out["seconds"] = header["last_time"] - header["first_time"]
    return out


def _blank(log: RunLog | None) -> int:
    """Rows whose reward, entropy or length is recorded as no number."""
    if log is None or not log.steps.num_rows:
        return 0
    columns = [_column(log.steps, name) for name in ("reward/total", "entropy/mean", "length/mean")]
    bad = [~np.isfinite(column) for column in columns if len(column)]
    return int(np.any(bad, axis=0).sum()) if bad else 0


def _column(table: pa.Table, name: str, last: int = 0) -> np.ndarray:
    place = table.schema.get_field_index(name)
    if place < 0:
        return np.array([])
    column = table.column(place)
    return column.slice(max(0, len(column) - last) if last else 0).to_numpy()


def _tail_mean(table: pa.Table, name: str) -> float:
    values = _column(table, name, FINAL_ROWS)
    values = values[np.isfinite(values)]
    return float(values.mean()) if len(values) else math.nan


def _total(table: pa.Table, name: str) -> float:
    values = _column(table, name)
    values = values[np.isfinite(values)]
    return float(values.sum()) if len(values) else math.nan


def order_records(records: list[Record], plan: Mapping[str, Any]) -> tuple[list[Record], list[Record]]:
    """Arms in the plan's order, then seeds; runs that the plan would not make today come apart.

    Those are the ones that a plan of named runs no longer holds, and of a search, those made by other code or
    outside of its space.
    """
    planned = {record.key for record in records if record.planned}
    kept: list[Record] = []
    left_out: list[Record] = []
    for record in records:
        unnamed = bool(planned) and not is_searched(plan) and not {record.key, record.row["parent"]} & planned
        stale = unnamed or (is_searched(plan) and (_by_other_code(record, plan) or _outside(record, plan)))
        (left_out if stale else kept).append(record)
    named = plan.get("arms")
    arms = {str(arm): index for index, arm in enumerate(named if isinstance(named, list | dict) else [])}

    def place_of(record: Record) -> tuple[Any, ...]:
        row, started = record.row, record.row["started"]
        known = arms.get(row["arm"], len(arms))
        late = started if math.isfinite(started) else math.inf
        return (
            known,
            row["arm"] if known < len(arms) else "",
            row["parent"] != "",
            row["seed"],
            late,
            record.key,
        )

    return sorted(kept, key=place_of), left_out


def _by_other_code(record: Record, plan: Mapping[str, Any]) -> bool:
    versions = (record.header.get("start") or {}).get("versions")
    code = versions.get("code") if isinstance(versions, Mapping) else None
    return bool(code and plan.get("code_version")) and code != plan["code_version"]


def _outside(record: Record, plan: Mapping[str, Any]) -> bool:
    """True when a searched value is none that the plan's space, as it is today, could give."""
    space = plan.get("space")
    for entry in space if isinstance(space, list) else []:
        if not isinstance(entry, Mapping) or entry.get("kind") == "choice":  # which may be a group of settings
            continue
        value = record.row.get(f"config.{entry.get('key')}")
        if not isinstance(value, int | float):
            continue
        low, high = entry.get("low"), entry.get("high")
        if (low is not None and value < low) or (high is not None and value > high):
            return True
    return False


def is_searched(plan: Mapping[str, Any]) -> bool:
    """True when runs are suggested while the sweep goes on, so that the plan does not name them."""
    study = plan.get("study")
    sampler = study.get("sampler", "none") if isinstance(study, Mapping) else "none"
    return sampler not in ("none", "grid") or bool(plan.get("stages"))


def notes_about(records: list[Record], left_out: list[Record]) -> list[str]:
    """Everything about the runs that a reader of the numbers must know, one sentence for each kind."""

    def having(test: Callable[[Record], Any]) -> list[Record]:
        return [record for record in records if test(record)]

    notes = []
    if not records:
        notes.append("There are no runs in this folder.")
    kinds: list[tuple[str, list[Record], Callable[[Record], str]]] = [
        ("not started yet", having(lambda r: r.row["status"] == "not started"), _title),
        ("empty log, nothing recorded", having(lambda r: r.row["status"] == "empty"), _title),
        ("not finished (running, paused or killed)", having(_half_done), _progress),
        ("stopped by an alert", having(lambda r: r.row["outcome"] == "stopped"), _reason),
        ("failed by its own numbers or size", having(lambda r: r.row["outcome"] == "failed"), _reason),
        ("ended early, not by an alert", having(lambda r: r.row["outcome"] == "ended"), _reason),
        ("lost to the machine or the program", having(lambda r: r.row["outcome"] == "lost"), _reason),
        ("lines that cannot be read, left out", having(lambda r: r.header.get("damaged")), _count("damaged", "line")),
        (
            "steps written twice, the last writing kept",
            having(lambda r: r.header.get("repeated")),
            _count("repeated", "step"),
        ),
        (
            "values that are not numbers, left out",
            having(lambda r: r.header.get("bad_values")),
            _count("bad_values", "value"),
        ),
        (
            "rows whose reward, entropy or length is not a number",
            having(lambda r: r.blank),
            lambda r: f"{_title(r)} ({r.blank} of {r.row['steps_done']})",
        ),
        ("last evaluation is not a number", having(_nan_accuracy), _title),
        ("no evaluation recorded", having(_no_eval), _title),
        ("from an earlier plan or space, or made by other code, left out", left_out, lambda r: f"{_title(r)} {r.key}"),
    ]
    for words, group, describe in kinds:
        if group:
            runs = "1 run" if len(group) == 1 else f"{len(group)} runs"
            notes.append(f"{runs}: {words}: {_list(map(describe, group))}.")
    return notes + _unequal(records)


def _list(names: Iterable[str], most: int = 8) -> str:
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _title(record: Record) -> str:
    return f"{record.row['arm']} seed {record.row['seed']}" if record.row["seed"] >= 0 else str(record.row["arm"])


def _progress(record: Record) -> str:
    return f"{_title(record)} at step {record.row['steps_done']} of {record.row['steps_planned']}"


def _reason(record: Record) -> str:
    row = record.row
    why = " ".join(part for part in (row["reason_code"], row["reason_title"]) if part)
    return f"{_title(record)} at step {row['steps_done']} ({why or row['reason_message'] or row['error_class']})"


def _count(name: str, noun: str) -> Callable[[Record], str]:
    def words(record: Record) -> str:
        count = record.header[name]
        return f"{_title(record)} ({count} {noun}{'' if count == 1 else 's'})"

    return words


def _half_done(record: Record) -> bool:
    return record.row["outcome"] == "unfinished" and record.row["status"] not in ("not started", "empty")


def _nan_accuracy(record: Record) -> bool:
    return math.isnan(record.row["final_accuracy"]) and math.isfinite(record.row["final_step"])


def _no_eval(record: Record) -> bool:
    return math.isnan(record.row["final_step"]) and record.row["status"] not in ("not started", "empty")


def _unequal(records: list[Record]) -> list[str]:
    seeds: dict[str, set[int]] = {}
    for record in records:
        if not record.row["parent"] and record.row["seed"] >= 0:
            seeds.setdefault(record.row["arm"], set()).add(record.row["seed"])
    if len(seeds) < 2 or len({frozenset(group) for group in seeds.values()}) == 1:
        return []
    each = ", ".join(f"{arm} {len(group)} ({_list(map(str, sorted(group)))})" for arm, group in seeds.items())
    return [f"The arms have different seeds: {each}; comparisons use the seeds two arms share."]

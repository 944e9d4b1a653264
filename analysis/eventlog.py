"""One run's event log -> Arrow tables of its step rows and evaluations, and a header of everything else."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from analysis.fastlog import line_bounds, read_fast

_SAMPLES = (b'{"type":"samples"', b'{"type": "samples"')
_RESERVED = ("step", "time", "problems", "samples")


@dataclass
class RunLog:
    """What one event log holds.

    `steps`: columns step (int64) and one float64 per metric, sorted, one row per step. `evals`: the same for
    evaluations, with problems (list of int64: number right per held-out problem) and samples (int64: tries
    per problem). `header` is JSON-able: start, end, decision (why the coordinator stopped it), alerts,
    warnings, first_time, last_time (unix seconds), starts (how often the run was begun), and the counts
    damaged, repeated, bad_values.
    """

    steps: pa.Table
    evals: pa.Table
    header: dict[str, Any]


def read_log(path: Path) -> RunLog:
    """Parse an events.jsonl; lines that cannot be read are left out and counted in `header["damaged"]`."""
    return parse_log(path.read_bytes())


def parse_log(data: bytes, fast: bool = True) -> RunLog:
    """Parse the bytes of an event log; `fast=False` reads every line as plain JSON (same result)."""
    bounds = line_bounds(data)
    torn = bool(data[bounds[-1, 1] if len(bounds) else 0 :].strip())  # a line without its newline was cut by a kill
    header: dict[str, Any] = {"start": None, "end": None, "decision": None, "alerts": [], "warnings": []}
    header |= {"starts": 0, "first_time": None, "last_time": None}
    header |= {"damaged": int(torn), "repeated": 0, "bad_values": 0}
    table, quick = read_fast(data, bounds, _RESERVED) if fast else (None, np.array([], int))
    careful = np.ones(len(bounds), bool)
    careful[quick] = False
    rows: list[dict[str, Any]] = []
    order: list[int] = []
    evals: dict[int, dict[str, Any]] = {}
    for index in np.flatnonzero(careful).tolist():
        line = data[bounds[index, 0] : bounds[index, 1] - 1]
        if line.startswith(_SAMPLES) or not line.strip():
            continue
        row = _take(_parse(line), header, evals)
        if row is not None:
            rows.append(row)
            order.append(index)
    if table is not None:
        _see_time(header, table.column("time"))
    steps = _merge(table, _columns(rows), np.concatenate([quick, np.array(order, int)]), header)
    return RunLog(steps, _eval_table([evals[step] for step in sorted(evals)]), header)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and isinstance(event.get("type"), str) else None


def _take(
    event: dict[str, Any] | None, header: dict[str, Any], evals: dict[int, dict[str, Any]]
) -> dict[str, Any] | None:
    """Put one event where it belongs; a step event is given back as a row."""
    if event is None:
        header["damaged"] += 1
        return None
    _see_time(header, [event.get("time")])
    kind = event["type"]
    if kind in ("step", "eval"):
        step = _whole(event.get("step"))
        if step is None:
            header["damaged"] += 1
            return None
        metrics = _numbers(event.get("metrics"), header)
        if kind == "step":
            return {**metrics, "step": step}
        evals[step] = {"step": step, "metrics": metrics, **_problems(event)}
    elif kind == "start":
        resumed = _whole(event.get("resumed_from")) or 0
        alerts = [alert for alert in header["alerts"] if (_whole(alert.get("step")) or 0) <= resumed]
        header.update(start=event, end=None, decision=None, alerts=alerts, starts=header["starts"] + 1)
    elif kind == "alert":
        header["alerts"].append(event)
    elif kind == "warning":
        header["warnings"].append(str(event.get("message", "")))
    elif kind == "decision" and event.get("action") == "stop":
        header["decision"] = event.get("reason")
    elif kind == "retry":
        header.update(end=None, decision=None)
    elif kind == "end":
        header["end"] = event
    return None


def _see_time(header: dict[str, Any], times: Iterable[Any]) -> None:
    if isinstance(times, pa.ChunkedArray):
        values = times.to_numpy()
        values = values[np.isfinite(values)]
        times = (float(values.min()), float(values.max())) if len(values) else ()
    for time in times:
        if isinstance(time, int | float) and not isinstance(time, bool) and 0 <= time < 1e12:
            first, last = header["first_time"], header["last_time"]
            header["first_time"] = float(time) if first is None else min(first, float(time))
            header["last_time"] = float(time) if last is None else max(last, float(time))


def _whole(value: Any) -> int | None:
    """A count: a whole number from 0 on that a table can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**53:
        return None
    return int(value) if value == int(value) else None


def _numbers(metrics: Any, header: dict[str, Any]) -> dict[str, float]:
    """The metrics that are numbers (the strings "nan", "inf", "-inf" are); the others are counted."""
    if not isinstance(metrics, dict):
        return {}
    out = {}
    for name, value in metrics.items():
        if name in _RESERVED:
            name = f"metric/{name}"
        try:
            out[name] = float("nan") if value is None else float(value)
        except (TypeError, ValueError, OverflowError):
            header["bad_values"] += 1
    return out


def _problems(event: dict[str, Any]) -> dict[str, Any]:
    right, samples = event.get("problems"), event.get("samples")
    counts = [_whole(count) for count in right] if isinstance(right, list) else []
    return {"problems": counts if counts and None not in counts else None, "samples": _whole(samples)}


def _eval_table(evals: list[dict[str, Any]]) -> pa.Table:
    table = _columns([{**each["metrics"], "step": each["step"]} for each in evals])
    if table is None:
        table = pa.table({"step": pa.array([], pa.int64())})
    problems = pa.array([each["problems"] for each in evals], pa.list_(pa.int64()))
    samples = pa.array([each["samples"] for each in evals], pa.int64())
    return table.append_column("problems", problems).append_column("samples", samples)


def _columns(rows: list[dict[str, Any]]) -> pa.Table | None:
    if not rows:
        return None
    names = dict.fromkeys(name for row in rows for name in row)
    nan = float("nan")
    columns = {name: pa.array([row.get(name, nan) for row in rows], pa.float64()) for name in names}
    return pa.table(columns | {"step": pa.array([row["step"] for row in rows], pa.int64())})


def _merge(quick: pa.Table | None, slow: pa.Table | None, lines: np.ndarray, header: dict[str, Any]) -> pa.Table:
    """Both readers' rows by step; `lines` are their places in the log: the last writing of a step is kept."""
    parts = [quick.drop_columns("time")] if quick is not None else []
    parts += [slow] if slow is not None else []
    if not parts:
        return pa.table({"step": pa.array([], pa.int64())})
    table = pa.concat_tables(parts, promote_options="default")
    if np.any(np.diff(lines) < 0):
        table = table.take(pa.array(np.argsort(lines, kind="stable")))
    step = table.column("step").to_numpy()
    if np.all(np.diff(step) > 0):
        return table
    _, first = np.unique(step[::-1], return_index=True)
    header["repeated"] = len(step) - len(first)
    return table.take(pa.array(len(step) - 1 - first))

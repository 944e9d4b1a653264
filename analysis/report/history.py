"""What the ledger adds to a report: findings on a search, retries, forks, decisions; GPU-hours and wall time."""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.report.blocks import Block, Fold, Grid
from analysis.shapes import items, number
from analysis.verdict import label
from reasonrl.events import read_events

Entry = dict[str, Any]
_ORDINARY = ("sweep", "start", "finished", "stopped", "concluded", "finding")
_PLACE = ("type", "time", "key", "arm", "seed", "stage", "parent", "parent_step")
_MOST = 200  # entries shown


def read_ledger(path: Path) -> list[Entry]:
    """The entries of the sweep's ledger that can be read; none without one."""
    found: list[list[Entry]] = []
    for file in sorted(path.glob("ledger*.jsonl")):  # coordinators that share a folder write one each
        with contextlib.suppress(OSError):
            found.append(list(read_events(file)))
    return list(heapq.merge(*found, key=lambda entry: number(entry.get("time")) or 0.0))


def num_gpus(entry: Mapping[str, Any]) -> int:
    """GPUs of the slot a run was started on: "gpu 0,1" has two, "cpu 0" none."""
    kind, _, devices = str(entry.get("slot", "")).partition(" ")
    return len(devices.split(",")) if kind == "gpu" and devices else 0


def wall_seconds(entries: Sequence[Entry]) -> list[float]:
    """How long each sitting of the sweep took, in seconds."""
    spans = [number(entry.get("seconds")) for entry in entries if entry.get("type") == "concluded"]
    return [span for span in spans if span is not None]


def finding_blocks(entries: Sequence[Entry]) -> list[Block]:
    """Findings on the sweep as a whole, each once (a resumed sweep finds them again)."""
    rows = []
    for entry in entries:
        if entry.get("type") == "finding":
            advice = ", ".join(map(str, items(entry.get("intervention")))) or "no advice recorded"
            rows.append((str(entry.get("code", "")), str(entry.get("message", "")), advice))
    return [Grid(("Code", "Finding", "To try"), list(dict.fromkeys(rows)))] if rows else []


def decision_blocks(entries: Sequence[Entry]) -> list[Block]:
    """Everything else the coordinator noted: retries, forks, budgets, commands, warnings; behind a fold."""
    noted = [entry for entry in entries if entry.get("type") not in _ORDINARY]
    if not noted:
        return []
    begin = next((time for time in (number(entry.get("time")) for entry in entries) if time is not None), None)
    rows = [(_after(entry, begin), str(entry.get("type")), _run(entry), _details(entry)) for entry in noted[:_MOST]]
    more = f" (the first {_MOST})" if len(noted) > _MOST else ""
    grid = Grid(("After", "What", "Run", "Details"), rows, numeric=frozenset({0}))
    return [Fold(f"What was decided on the way: {len(noted)} entries{more}", [grid])]


def _after(entry: Entry, begin: float | None) -> str:
    time = number(entry.get("time"))
    return f"{(time - begin) / 60:.1f} min" if time is not None and begin is not None else ""


def _run(entry: Entry) -> str:
    return f"{label(str(entry['arm']))} seed {entry.get('seed')}" if entry.get("arm") else str(entry.get("key", ""))


def _details(entry: Entry) -> str:
    return ", ".join(f"{name} {_words(value)}" for name, value in entry.items() if name not in _PLACE and value)


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(str(value[name]) for name in ("code", "title") if value.get(name)) or str(dict(value))
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)

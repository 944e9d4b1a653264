"""What the coordinator did and why, one JSON object per line: starts, ends, retries, stops, forks, winners.

The ledger is for people and reports. It decides nothing: what a run did stands in its own event log.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from reasonrl.events import EventLog, read_events
from sweeps.types import Plan, RunSpec

NAME = "ledger.jsonl"
FILES = "ledger*.jsonl"  # coordinators that share a folder write one each
SPEC = "run.json"
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # the C one is ten times faster


class Ledger:
    """Append-only record of a sweep folder; every entry has a type, a time and mostly a run's key."""

    def __init__(self, directory: Path, owner: str = "") -> None:
        self.name = f"ledger-{owner}.jsonl" if owner else NAME
        self._log = EventLog(directory / self.name)

    def note(self, action: str, spec: RunSpec | None = None, **details: Any) -> None:
        """Write one entry; `spec` adds key, arm, seed and stage."""
        entry: dict[str, Any] = {"type": action, "time": time.time()}
        if spec is not None:
            entry.update(key=spec.key, arm=spec.arm, seed=spec.seed, stage=spec.stage)
            if spec.parent:
                entry.update(parent=spec.parent, parent_step=spec.parent_step)
        self._log.append({**entry, **details})

    def close(self) -> None:
        """Close the file."""
        self._log.close()


def read_ledger(directory: Path) -> Iterator[dict[str, Any]]:
    """The readable entries of a sweep's ledger, oldest first; none without a ledger."""
    files = [list(read_events(path)) for path in sorted(directory.glob(FILES))]
    yield from heapq.merge(*files, key=lambda entry: float(entry["time"]))


def write_atomic(path: Path, text: str, sync: bool = True) -> None:
    """Replace `path` as a whole: a reader, or a killed process, never meets half of it; `sync` waits for the disk."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")  # pids repeat across the machines of a folder
    try:
        with draft.open("w") as file:
            file.write(text)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def save_spec(run_dir: Path, spec: RunSpec) -> None:
    """Store the run's spec (run.json) and its config (config.yaml) beside its event log, once."""
    if not (run_dir / SPEC).exists():
        run_dir.mkdir(parents=True, exist_ok=True)
        write_atomic(run_dir / "config.yaml", yaml.dump(spec.config, Dumper=_DUMPER, sort_keys=False), sync=False)
        write_atomic(run_dir / SPEC, json.dumps(spec.to_dict(), indent=1), sync=False)


def drop_spec(run_dir: Path) -> None:
    """Take back the spec of a run that never started and never will."""
    for name in (SPEC, "config.yaml"):
        (run_dir / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # something else lies there
        run_dir.rmdir()


def read_specs(directory: Path, also: Iterable[str] = ()) -> dict[str, RunSpec]:
    """The specs of all runs that were ever started in this sweep folder, by key; unreadable ones are left out.

    `also` are keys that are looked for by name: a network folder may list later what it opens already.
    """
    keys = {path.parent.name for path in (directory / "runs").glob(f"*/{SPEC}")}
    found = [read_spec(directory / "runs" / key) for key in sorted(keys.union(also))]
    return {spec.key: spec for spec in found if spec is not None}


def other_runs(plan: Plan) -> set[str]:
    """Keys of runs in the plan's folder that it does not ask for: the same name, with other settings or code."""
    if not plan.runs:  # a search decides as it goes
        return set()
    there = {path.parent.name for path in (plan.directory / "runs").glob(f"*/{SPEC}")} - {run.key for run in plan.runs}
    return {key for key in there if (spec := read_spec(plan.directory / "runs" / key)) and not spec.parent}


def warnings_of(plan: Plan) -> list[str]:
    """What will most likely disappoint about a plan, and what its folder holds of other plans."""
    count = len(other_runs(plan))
    if not count:
        return plan.warnings
    text = f"{plan.directory} holds {count} run{'s' * (count != 1)} of this name with other settings or code"
    return [*plan.warnings, f"{text}: they stay, the report is made without them. sweep.name=OTHER keeps sweeps apart."]


def read_spec(run_dir: Path) -> RunSpec | None:
    """The spec stored in a run's folder, None without a readable one."""
    try:
        return RunSpec.from_dict(json.loads((run_dir / SPEC).read_text()))
    except (OSError, ValueError, TypeError):
        return None

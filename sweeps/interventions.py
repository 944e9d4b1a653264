"""Forks: a stopped run goes on from its last healthy checkpoint with the overrides its alert recommends."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reasonrl.errors import ConfigError
from sweeps.book import Book
from sweeps.ledger import save_spec
from sweeps.state import RunState
from sweeps.types import Plan


def sick_since(run: RunState) -> int:
    """The first rollout step at which something was wrong: where the window of the earliest finding of the
    stopping rule begins (its baseline is not sick), else where it was raised."""
    stop = run.stop_reason() or {}
    related = [alert for alert in run.alerts if alert.get("code") == stop.get("code")] or [stop]
    starts = []
    for alert in related:
        window = (alert.get("evidence") or {}).get("window")
        at = window[0] if isinstance(window, list | tuple) and window else alert.get("step")
        if isinstance(at, int | float):
            starts.append(int(at))
    return min(starts, default=run.step)


def healthy_checkpoint(run: RunState, run_dir: Path) -> Path | None:
    """The newest checkpoint folder taken before the run got sick, None when there is none left."""
    limit = sick_since(run)
    found = []
    for folder in (run_dir / "checkpoints").glob("step_*"):
        step = int(folder.name.removeprefix("step_"))
        if step < limit:
            found.append((step, folder))
    return max(found)[1] if found else None


def overrides_of(alert: Mapping[str, Any]) -> list[str]:
    """The alert's recommendations that are config overrides; advice in words is left out."""
    return [text for text in alert.get("intervention") or [] if "=" in text and " " not in text.split("=")[0].strip()]


def fork(plan: Plan, book: Book, run: RunState, most: int) -> tuple[RunState | None, str]:
    """(child, its overrides in words), or (None, why there is none).

    At most `most` forks descend from one planned run; each tries the first recommendation not tried before it in
    this line. The child starts with a copy of the checkpoint in a folder of its own; it never counts for an arm.
    """
    root, tried, line = _lineage(book, run)
    if line >= most:
        return None, f"{most} fork(s) were made already (sweep.max_children)"
    wanted = [text for text in overrides_of(run.stop_reason() or {}) if text not in tried]
    if not wanted:
        return None, "the alert recommends no override that was not tried"
    checkpoint = healthy_checkpoint(run, book.run_dir(run.key))
    if checkpoint is None:
        return None, "no checkpoint from before it got sick"
    step = int(checkpoint.name.removeprefix("step_"))
    problems = []
    for text in wanted:
        try:
            spec = plan.make_child(run.spec, [text], step)
        except ConfigError as error:
            problems.append(str(error))
            continue
        folder = book.run_dir(spec.key)
        target = folder / "checkpoints" / checkpoint.name
        if not target.exists():
            _copy_tree(checkpoint, target)
        save_spec(folder, spec)
        return book.add_run(spec), text
    return None, "; ".join(problems)


def _lineage(book: Book, run: RunState) -> tuple[RunState, set[str], int]:
    """(the planned run at the root, overrides tried in this line, forks below the root)."""
    tried: set[str] = set()
    root = run
    while root.spec.parent and root.spec.parent in book.runs:
        parent = book.runs[root.spec.parent]
        tried |= set(root.spec.overrides) - set(parent.spec.overrides)
        root = parent
    count, layer = 0, [root.key]
    while layer:
        layer = [child.key for key in layer for child in book.children_of(key)]
        count += len(layer)
    return root, tried, count


def _copy_tree(source: Path, target: Path) -> None:
    """Copy a checkpoint so that it appears whole or not at all; hard links where they work, it never changes."""
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)

    def link(a: str, b: str) -> str:
        try:
            os.link(a, b)
        except OSError:
            shutil.copy2(a, b)
        return b

    draft.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, draft, copy_function=link)
    os.replace(draft, target)


def cured(child: RunState) -> bool | None:
    """Whether the intervention worked: the fork finished without a stop; None while it runs."""
    return None if child.open else child.status == "finished"

"""What has to be the same on every machine of a sweep: Python, the packages that decide numbers, code and plan."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from typing import Any

from sweeps.types import Plan

PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "accelerate", "optuna")


def versions() -> dict[str, str]:
    """The versions of Python and of the packages whose results a run's rows depend on."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name).split("+")[0]  # +cpu and +cu128 are the same release
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def about(plan: Plan) -> dict[str, Any]:
    """What coordinators compare before they work on one sweep."""
    found = {**versions(), "code": plan.code_version, "runs": f"{len(plan.runs)} ({_short(sorted(plan.by_key()))})"}
    if plan.searched:
        space = [[asdict(entry) for entry in plan.space], [asdict(stage) for stage in plan.stages]]
        base = plan.make_run({}, plan.seeds[0]).key
        settings = {name: value for name, value in plan.study.items() if name not in ("storage", "lease_s")}
        found["search"] = _short([space, plan.seeds, plan.zipped, base, settings])
    return found


def _short(what: Any) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:8]


def differences(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
    """`torch: 2.13.0 there, 2.12.0 here` for everything that is not the same."""
    return [
        f"{name}: {theirs.get(name, 'unknown')} there, {mine.get(name, 'unknown')} here"
        for name in dict.fromkeys([*theirs, *mine])
        if theirs.get(name) != mine.get(name)
    ]

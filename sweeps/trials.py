"""What a trial says of its configuration: the user attributes that name it, and those that tell how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sweeps.configuration import Configuration
from sweeps.pruner import stop_attributes


def describe(configuration: Configuration, extra: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes a trial has from its start."""
    return {
        "configuration": configuration.name,
        "arm": configuration.arm,
        "stage": configuration.stage,
        "runs": {str(run.spec.seed): run.key for run in configuration.runs},
        **extra,
    }


def outcome_attributes(configuration: Configuration) -> dict[str, Any]:
    """The user attributes that say how a configuration ended and why."""
    attributes: dict[str, Any] = {
        "seeds": sorted(run.spec.seed for run in configuration.counted()),
        "runs": {str(run.spec.seed): run.key for run in configuration.runs},
        "values": {str(seed): value for seed, value in configuration.values().items()},
    }
    stops = [
        {"seed": run.spec.seed, "key": run.key, **stop_attributes(run.stop_reason() or {}), "at_step": run.step}
        for run in configuration.stopped()
    ]
    if configuration.pruned is not None:
        attributes["pruned"] = configuration.pruned
    elif stops:
        attributes["stops"] = stops
        attributes.update({name: value for name, value in stops[0].items() if name not in ("seed", "key", "at_step")})
    if configuration.abandoned is not None:
        attributes["abandoned"] = configuration.abandoned
    failures = [
        {"seed": run.spec.seed, "key": run.key, "error_class": run.error_class, "reason": str(run.reason)[:500]}
        for run in configuration.failed()
    ]
    if failures:
        attributes["failures"] = failures
    return attributes

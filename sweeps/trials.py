"""What a trial says of its configuration: the user attributes that name it, and those that tell how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sweeps.configuration import Configuration, identity
from sweeps.pruner import stop_attributes


def describe(configuration: Configuration, extra: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes a trial has from its start; as few as will do, each is a transaction of its own."""
    named: dict[str, Any] = {"arm": configuration.arm}
    if configuration.stage:
        named["stage"] = configuration.stage
    if configuration.searched:
        named["configuration"] = configuration.name
    seeds = sorted([*(run.spec.seed for run in configuration.runs), *configuration.pending_seeds])
    runs = {str(run.spec.seed): run.key for run in configuration.runs}
    return {**named, "seeds": seeds, "runs": runs, **extra}


def name_of(attributes: Mapping[str, Any]) -> str:
    """The name of the configuration a trial belongs to; empty for a trial that is nobody's."""
    if "configuration" in attributes:
        return str(attributes["configuration"])
    return identity(attributes.get("stage", ""), attributes["arm"], {}) if "arm" in attributes else ""


def outcome_attributes(configuration: Configuration) -> dict[str, Any]:
    """The user attributes that say how a configuration ended and why."""
    attributes: dict[str, Any] = {"values": {str(seed): value for seed, value in configuration.values().items()}}
    if configuration.searched:  # seeds joined, or were given up, after the trial was described
        attributes["seeds"] = sorted(run.spec.seed for run in configuration.counted())
        attributes["runs"] = {str(run.spec.seed): run.key for run in configuration.runs}
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

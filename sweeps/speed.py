"""How long a run will take: from earlier event logs where there are any, else a stated guess."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Seconds per rollout step of the built-in task on one CPU core: generation, then one pass of 256 samples.
GUESS_BASE_S = 0.06
GUESS_PASS_S = 0.31
MAX_LOGS = 40


@dataclass(frozen=True)
class Speed:
    """Seconds per rollout step and where the number comes from."""

    seconds: float
    source: str


class SpeedBook:
    """Recorded seconds per step of earlier runs below a results folder, by what a step costs."""

    def __init__(self, results: Path) -> None:
        self.records: dict[tuple[Any, ...], list[float]] = {}
        self.num_logs = 0
        for config, seconds in _recorded(results):
            self.records.setdefault(_signature(config), []).append(seconds)
            self.num_logs += 1

    def estimate(self, config: Mapping[str, Any]) -> Speed | None:
        """Median of recorded runs like this one, else one scaled by the work per step, else a guess.

        None when nothing is known: a model other than the built-in one that was never run here.
        """
        wanted = _signature(config)
        if wanted in self.records:
            values = self.records[wanted]
            return Speed(statistics.median(values), f"recorded ({len(values)} run{'s' * (len(values) != 1)} like this)")
        kin = [(key, value) for key, values in self.records.items() if key[:3] == wanted[:3] for value in values]
        if kin:
            scaled = [value * _work(config) / key[-1] for key, value in kin]
            return Speed(
                statistics.median(scaled),
                f"recorded ({len(kin)} run{'s' * (len(kin) != 1)} of this model, scaled by work)",
            )
        if config["model"]["kind"] == "tiny":
            return Speed(GUESS_BASE_S + GUESS_PASS_S * _work(config), "a guess (one CPU core, nothing recorded yet)")
        return None


def num_gpus() -> int:
    """GPUs this process may use, without torch: CUDA_VISIBLE_DEVICES, else what the driver lists."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([item for item in visible.split(",") if item.strip() and item.strip() != "-1"])
    try:
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        return 0


def num_slots(engine: Mapping[str, Any]) -> int:
    """Runs at a time: `engine.slots`, else one per GPU (times trials_per_gpu), else two CPU slots."""
    if engine["slots"]:
        return int(engine["slots"])
    gpus = len(engine["devices"]) if engine["devices"] else num_gpus()
    if gpus:
        return max(1, gpus * engine["trials_per_gpu"] // engine["per_trial_gpus"])
    return min(2, os.cpu_count() or 1)


def _work(config: Mapping[str, Any]) -> float:
    """Passes over 256 samples that one step trains on; training dominates the cost of a step."""
    samples = config["data"]["prompts_per_step"] * config["sampling"]["group_size"]
    return float(config["optim"]["inner_epochs"] * samples / 256)


def _signature(config: Mapping[str, Any]) -> tuple[Any, ...]:
    model, task = config["model"], config["task"]
    return (
        model["kind"], model.get("path"), task["kind"], config["sampling"]["max_new_tokens"],
        config["data"]["kind"], config["kl"]["kind"], _work(config),
    )  # fmt: skip


def _recorded(results: Path) -> Iterator[tuple[dict[str, Any], float]]:
    logs = sorted(results.glob("*/runs/*/events.jsonl")) + sorted(results.glob("single/*/events.jsonl"))
    newest = sorted(logs, key=lambda path: path.stat().st_mtime, reverse=True)[:MAX_LOGS]
    for path in newest:
        config, seconds = None, []
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    event = json.loads(line)
                except ValueError:
                    continue  # a torn line: its run is still readable
                if event.get("type") == "start":
                    config = event.get("config")
                elif event.get("type") == "step":
                    value = event.get("metrics", {}).get("time/step")
                    seconds += [value] if isinstance(value, int | float) else []
        try:
            if config and len(seconds) >= 3:
                _signature(config)
                yield config, statistics.median(seconds)
        except (KeyError, TypeError, AttributeError):
            continue  # written by another version: its config lacks a key

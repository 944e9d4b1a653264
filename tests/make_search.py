"""A synthetic search folder: random configurations whose score is known, some of them stopped."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
from make_results import make_results

SPACE = [
    {"key": "optim.lr", "kind": "float", "low": 1e-6, "high": 1e-3, "log": True, "choices": []},
    {"key": "loss.high", "kind": "float", "low": 0.2, "high": 0.4, "log": False, "choices": []},
    {"key": "advantage.kind", "kind": "choice", "low": None, "high": None, "log": False, "choices": ["grpo", "rloo"]},
]


def make_search(folder: Path, configurations: int = 24, seeds: int = 2, peak: float = 5e-5) -> Path:
    """Accuracy peaks at learning rate `peak` and depends on nothing else; rates above 4e-4 are stopped."""
    rng = np.random.default_rng(3)
    arms = {}
    for index in range(configurations):
        lr = float(10 ** rng.uniform(-6, -3))
        arms[f"t{index:03d}"] = {
            "optim.lr": lr,
            "loss.high": float(rng.uniform(0.2, 0.4)),
            "advantage.kind": str(rng.choice(["grpo", "rloo"])),
        }
    faults = {(arm, seed): "stopped" for arm in arms for seed in range(seeds) if arms[arm]["optim.lr"] > 4e-4}
    make_results(folder, arms=arms, seeds=range(seeds), faults=faults)
    plan = json.loads((folder / "plan.json").read_text())
    plan["space"] = SPACE
    plan["study"] = {"sampler": "random", "metric": "eval/accuracy", "direction": "maximize", "trials": configurations}
    (folder / "plan.json").write_text(json.dumps(plan))
    for run in plan["runs"]:
        _score(folder / "runs" / run["key"] / "events.jsonl", arms[run["arm"]]["optim.lr"], peak, run["seed"])
    return folder


def _score(path: Path, lr: float, peak: float, seed: int) -> None:
    """Replace the recorded accuracy by a bell over the logarithm of the learning rate."""
    final = 0.3 + 0.5 * math.exp(-(math.log10(lr / peak) ** 2)) + 0.01 * seed
    lines = []
    for line in path.read_text().splitlines():
        event = json.loads(line)
        if event["type"] == "eval":
            event["metrics"]["eval/accuracy"] = 0.2 + (final - 0.2) * event["step"] / 20
        lines.append(json.dumps(event, separators=(",", ":")))
    path.write_text("\n".join(lines) + "\n")

"""What a sweep adds to the config of one run: engine, study and plan; registered as Hydra's `base_config`."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from reasonrl import sharding, zero
from reasonrl.config import Config
from reasonrl.errors import Mistake
from reasonrl.validate import infinite
from sweeps.quick import speed_up

ENGINES = ("local", "ray")
SAMPLERS = ("none", "grid", "random", "tpe", "cmaes", "gp")
PRUNERS = ("none", "median", "halving", "hyperband", "wilcoxon")
DIRECTIONS = ("maximize", "minimize")
SCHEDULES = ("depth", "breadth")
ON_ALERT = ("stop", "continue", "intervene")

CONF = Path(__file__).parent.parent.absolute() / "conf"

# Sections that belong to the sweep; what is left is the config of one run.
SWEEP_SECTIONS = ("engine", "study", "sweep", "plan", "results")


@dataclass
class EngineConfig:
    """Where runs execute: worker processes of this machine (`local`) or of a Ray cluster (`ray`)."""

    kind: str = "local"
    slots: int | None = None  # runs at a time; null: one per GPU, else two CPU slots
    devices: list[str] | None = None  # GPU indices or UUIDs; null: those visible
    threads: int | None = None  # per slot; null: cores / slots
    per_trial_gpus: int = 1  # more than 1: launched through accelerate
    accelerate_config: str | None = None  # file for its launcher (FSDP); null: a whole copy of the model per GPU
    trials_per_gpu: int = 1
    hang_timeout_s: float = 600.0  # a run without progress for so long (thrice while it loads) counts as hung
    max_retries: int = 2  # per run, for failures that may pass (killed, hung, infrastructure)
    address: str | None = None  # of a running Ray cluster (kind=ray)
    train: str = "reasonrl.train:train"  # the function a worker calls


@dataclass
class StudyConfig:
    """How runs are chosen and judged: the Optuna study behind the sweep."""

    storage: str | None = None  # database URL; null: SQLite in the results folder; postgresql:// is shared by machines
    lease_s: float = 60.0  # a coordinator not heard of for so long loses its runs to the others (postgresql)
    sampler: str = "none"  # none and grid enumerate every run; the others search
    trials: int = 0  # configurations to try (each with every seed of the sweep)
    metric: str = "eval/accuracy"
    direction: str = "maximize"
    pruner: str = "none"  # by the metric, never across ablation arms; alerts stop runs in any case
    seed: int = 0  # of the sampler
    startup_trials: int = 10  # tried at random before the sampler learns
    abandon: bool = True  # skip the remaining seeds of a configuration that is clearly behind


@dataclass
class BudgetConfig:
    """Where a sweep ends early; null means no limit."""

    runs: int | None = None
    steps: int | None = None  # rollout steps over all runs
    minutes: float | None = None  # wall time
    gpu_hours: float | None = None


@dataclass
class SweepConfig:
    """The question a sweep asks and the runs that answer it."""

    name: str | None = None  # of the results folder; null: derived from the swept keys
    question: str = ""
    description: str = ""
    base: list[str] = field(default_factory=list)  # overrides under every arm
    arms: dict[str, Any] = field(default_factory=dict)  # name: list of overrides
    baseline: str | None = None  # the arm the others are compared with; null: the first
    factors: list[str] = field(default_factory=list)  # what arms may differ in; "a+b": both at once
    seeds: list[int] = field(default_factory=lambda: [0])
    space: dict[str, Any] = field(default_factory=dict)  # key: choice(...), interval(...) or an entry
    zip: dict[str, Any] = field(default_factory=dict)  # keys that move together: key: list of values
    stages: list[Any] = field(default_factory=list)
    schedule: str = "depth"  # breadth: every run reaches a rung before any goes on
    rungs: int = 4  # equal parts of a run (schedule=breadth)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    on_alert: str = "stop"
    max_children: int = 1  # forks per run (on_alert=intervene)


@dataclass
class SweepRoot(Config):
    """The whole configuration of `sweep.py`: one run, plus everything around it."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    study: StudyConfig = field(default_factory=StudyConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    plan: bool = False  # print the plan and run nothing
    results: str = "results"  # folder that holds every results folder


def register() -> None:
    """Store the schema as `base_config`: an unknown key or a wrong type is an error at composition."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="base_config", node=SweepRoot, provider="reasonrl")
    speed_up()


def run_section(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """The config of one run: `cfg` without the sections of the sweep and without Hydra's."""
    return {key: value for key, value in cfg.items() if key not in (*SWEEP_SECTIONS, "hydra")}


def validate_sweep(cfg: Mapping[str, Any]) -> list[Mistake]:
    """Every mistake in the sections `engine`, `study` and `sweep` of a resolved config."""
    engine, study, sweep = cfg["engine"], cfg["study"], cfg["sweep"]
    mistakes = [
        Mistake(key, value, f"unknown; choose {', '.join(allowed)}")
        for key, value, allowed in (
            ("engine.kind", engine["kind"], ENGINES),
            ("study.sampler", study["sampler"], SAMPLERS),
            ("study.pruner", study["pruner"], PRUNERS),
            ("study.direction", study["direction"], DIRECTIONS),
            ("sweep.schedule", sweep["schedule"], SCHEDULES),
            ("sweep.on_alert", sweep["on_alert"], ON_ALERT),
        )
        if value not in allowed
    ]
    for section, keys in (
        ("engine", ("slots", "threads", "per_trial_gpus", "trials_per_gpu", "hang_timeout_s")),
        ("study", ("lease_s",)),
        ("sweep", ("rungs",)),
    ):
        for key in keys:
            value = cfg[section][key]
            if value is not None and value <= 0:
                mistakes.append(Mistake(f"{section}.{key}", value, "must be above 0"))
    for section in SWEEP_SECTIONS[:3]:
        mistakes += [Mistake(key, value, "must be a finite number") for key, value in infinite(cfg[section], section)]
    for key, value in sweep["budget"].items():
        if value is not None and value <= 0:
            mistakes.append(Mistake(f"sweep.budget.{key}", value, "must be above 0, or null for no limit"))
    if engine["per_trial_gpus"] > 1 and engine["trials_per_gpu"] > 1:
        mistakes.append(
            Mistake(
                "engine.trials_per_gpu",
                engine["trials_per_gpu"],
                f"cannot be shared when a run takes {engine['per_trial_gpus']} GPUs",
                "Set engine.per_trial_gpus=1 or engine.trials_per_gpu=1.",
            )
        )
    mistakes += _accelerate_mistakes(engine)
    if sweep["name"] and not re.fullmatch(r"[\w.+-]*\w[\w.+-]*", sweep["name"]):
        allowed = "names a folder: letters, digits and . _ + - only"
        mistakes.append(Mistake("sweep.name", sweep["name"], allowed, "Choose the parent folder with results=DIR."))
    if not sweep["seeds"]:
        mistakes.append(Mistake("sweep.seeds", [], "needs at least one seed", "For instance sweep.seeds=[0,1,2]."))
    return mistakes


def _accelerate_mistakes(engine: Mapping[str, Any]) -> list[Mistake]:
    """What is wrong with the file that accelerate's launcher is to read."""
    import yaml

    key, file = "engine.accelerate_config", engine["accelerate_config"]
    if file is None:
        return []
    if engine["per_trial_gpus"] == 1:
        allowed = "is read where a run takes several GPUs"
        return [Mistake(key, file, allowed, "Set engine.per_trial_gpus=2, or leave it out.")]
    try:
        environment = sharding.environment_of(Path(file).expanduser())
    except (OSError, ValueError, yaml.YAMLError) as error:
        return [Mistake(key, file, f"is no configuration of accelerate ({error})", "`accelerate config` writes one.")]
    found = [replace(mistake, key=f"{key}: {mistake.key}") for mistake in sharding.mistakes(environment)]
    if zero.asked(environment) and importlib.util.find_spec("deepspeed") is None:
        allowed = "has distributed_type: DEEPSPEED, for which accelerate's launcher needs the package deepspeed"
        found.append(Mistake(key, file, allowed, "pip install deepspeed, or use distributed_type: FSDP."))
    if not found and not {f"{sharding.USE}{kind}" for kind in ("FSDP", "MULTI_GPU", "DEEPSPEED")} & set(environment):
        return [Mistake(key, file, "must have distributed_type: FSDP, DEEPSPEED or MULTI_GPU")]
    return found


def folder_mistakes(key: str, value: Any, folder: Path) -> list[Mistake]:
    """Why `folder`, which `key`=`value` asks for, cannot be made or written to; makes nothing."""
    place = folder.absolute()
    while not os.path.lexists(place):  # False below a file and in a folder that may not be entered
        place = place.parent
    if not place.is_dir():
        return [Mistake(key, value, f"needs the folder {folder}, and {place} is no folder", f"Set {key}=DIR.")]
    if not os.access(place, os.W_OK | os.X_OK):
        return [Mistake(key, value, f"needs the folder {folder}, and {place} is not writable", f"Set {key}=DIR.")]
    return []

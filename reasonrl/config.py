"""The configuration of one run: it joins the dataclasses that stand beside the code they configure.

Nothing here imports torch: plans and `--help` use this module.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reasonrl import __version__
from reasonrl.advantages import AdvantageConfig
from reasonrl.alerts import AlertsConfig
from reasonrl.checkpoint import CheckpointConfig
from reasonrl.data import DataConfig
from reasonrl.entropy import EntropyConfig
from reasonrl.evaluate import EvalConfig
from reasonrl.kl import KlConfig
from reasonrl.loss import LossConfig
from reasonrl.models import ModelConfig
from reasonrl.optim import OptimConfig
from reasonrl.overlong import OverlongConfig
from reasonrl.rewards import RewardConfig
from reasonrl.rollout import SamplingConfig
from reasonrl.tasks import TaskConfig
from reasonrl.tracking import TrackingConfig
from reasonrl.trl_options import TrlConfig


@dataclass
class Config:
    """Everything one training run depends on."""

    seed: int = 0
    steps: int = 50  # rollout steps
    run_dir: str | None = None  # null = results/single/<key>
    name: str | None = None
    quiet: bool = False
    trainer: str = "ours"  # ours, or trl: TRL's GRPOTrainer does sampling and updates (reasonrl/trl_trainer.py)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    kl: KlConfig = field(default_factory=KlConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    entropy: EntropyConfig = field(default_factory=EntropyConfig)
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    alerts: AlertsConfig = field(default_factory=AlertsConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    trl: TrlConfig = field(default_factory=TrlConfig)


def from_dict(values: Mapping[str, Any]) -> Config:
    """Return a Config from plain values; an unknown key or a wrong type raises omegaconf's error."""
    from omegaconf import OmegaConf

    merged = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(dict(values)))
    config = OmegaConf.to_object(merged)
    assert isinstance(config, Config)
    return config


def to_dict(config: Config) -> dict[str, Any]:
    """Return the configuration as plain values."""
    return dataclasses.asdict(config)


@functools.cache
def code_version() -> str:
    """Return the version of the code that decides what a run computes: release and digest of this package."""
    digest = hashlib.sha256()
    root = Path(__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return f"{__version__}+{digest.hexdigest()[:8]}"


# Sections that change what is watched or kept, never what is computed.
_OUTSIDE = ("run_dir", "name", "quiet", "tracking", "checkpoint")

_ARITHMETIC = ("operands", "operand_weights", "heldout_operands", "guess_right")
_RECORDS = (
    "path", "question_key", "answer_key", "domain_key", "choices_key", "split", "heldout_path", "heldout_split",
    "heldout_fraction", "limit",
    "filter", "prompt", "system", "chat", "verifier", "percent", "timeout_s", "max_prompt_tokens",
)  # fmt: skip
_CODE = ("tests_key", "memory_mb", "unsafe")
_TASK_FIELDS = {
    "arithmetic": _ARITHMETIC,
    "records": _RECORDS,
    "reasoning_gym": ("datasets", "prompt", "system", "chat", "timeout_s", "heldout_fraction", "max_prompt_tokens"),
    "code": (*_RECORDS, *_CODE),
}
_TINY = (
    "careful", "mode_share", "noise", "noise_from", "bracket_share", "guess_bracket", "base_operands",
    "base_steps", "base_seed",
)  # fmt: skip
_FOREIGN = ("path", "gguf_file", "revision", "trust_remote_code", "safetensors_only")
_INERT_ADVANTAGE = {"gdpo": (), "dr_grpo": ("batch_norm", "eps"), "rloo": ("batch_norm", "eps")}
_ENTROPY_FIELDS = {
    "none": (),
    "top_mask": ("rho", "scope"),
    "bonus": ("coef",),
    "thermostat": ("target", "delta", "max_coef"),
    "clip_cov": ("cov_share", "cov_low", "cov_high"),
    "kl_cov": ("cov_share", "cov_coef"),
}


def _inert_keys(config: Config) -> dict[str, tuple[str, ...]]:
    """Return, per section, the fields that have no effect under the chosen kinds."""
    loss, kl, overlong = config.loss, config.kl, config.overlong
    task_fields = set(_TASK_FIELDS.get(config.task.kind, ()))
    inert: dict[str, tuple[str, ...]] = {
        "loss": {"cispo": ("low", "high", "dual_clip")}.get(loss.kind, ("cap",)),
        "data": () if config.data.kind == "dynamic_sampling" else ("max_rounds", "patience"),
        "advantage": _INERT_ADVANTAGE.get(config.advantage.kind, ("batch_norm",)),
        "sampling": ("replay_filter",) if config.sampling.top_p == 1 and config.sampling.top_k == 0 else (),
        "entropy": tuple(
            name.name
            for name in dataclasses.fields(EntropyConfig)
            if name.name != "kind" and name.name not in _ENTROPY_FIELDS.get(config.entropy.kind, ())
        ),
        "overlong": () if overlong.kind == "soft" else ("cache_tokens",),
        "task": tuple(
            name.name for name in dataclasses.fields(TaskConfig) if name.name != "kind" and name.name not in task_fields
        ),
        "model": _FOREIGN if config.model.kind == "tiny" else _TINY,
    }
    if kl.in_reward:
        inert["kl"] = ("token_weight", "reasoning_weight", "answer_tokens")
    if kl.kind == "off":
        inert["kl"] = ("coef", "in_reward", "token_weight", "reasoning_weight", "answer_tokens")
    elif not kl.in_reward and kl.token_weight != "answer":
        inert["kl"] = ("reasoning_weight", "answer_tokens")
    if config.optim.updates_per_rollout == 1 and loss.kind in ("clip", "gspo", "cispo"):
        # r = 1 on the only update: no clip acts, and GSPO and CISPO have the gradient of the plain loss
        inert["loss"] = ("kind", "low", "high", "dual_clip", "cap")
    if config.reward.parts and "repetition" not in config.reward.parts:
        inert["reward"] = ("ngram",)
    return inert


def canonical(config: Config) -> dict[str, Any]:
    """Return what the run computes from: plain values without paths, labels and knobs that change nothing here.

    Two configurations with equal canonical form are the same experiment.
    """
    values = to_dict(config)
    for section in _OUTSIDE:
        values.pop(section)
    if config.trainer != "trl":
        values.pop("trl")
    for section, names in _inert_keys(config).items():
        for name in names:
            values[section].pop(name, None)
    for part in values["reward"]["parts"].values():
        if part["decay_to"] is None:
            part.pop("decay_at"), part.pop("decay_steps")
    if not values["model"]["lora"]["r"]:
        values["model"]["lora"] = {"r": 0}
    return values


def inert(config: Config) -> set[str]:
    """Return the dotted keys that have no effect under the chosen kinds."""
    return {f"{section}.{name}" for section, names in _inert_keys(config).items() for name in names}


def run_key(config: Config) -> str:
    """Return the run's identity: 12 hex digits over canonical form (seed included) and code version."""
    text = json.dumps([canonical(config), code_version()], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def doubts(config: Config) -> list[str]:
    """Return what is allowed and most likely not wanted, for the plan and the run's warnings."""
    from reasonrl.validate import doubts_about

    return doubts_about(config)


def validate(config: Config) -> list:
    """Return every mistake in `config` as a list of `Mistake`; needs no torch and touches no data."""
    from reasonrl.validate import mistakes_of

    return mistakes_of(config)

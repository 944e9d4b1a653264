"""`trainer=trl`: which of our settings TRL's GRPOTrainer (1.16) has, under which names, and which it lacks.

Needs neither torch nor TRL, so that a plan can refuse a setting before anything runs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from reasonrl import distributed, trl_deepspeed
from reasonrl.errors import Mistake

if TYPE_CHECKING:
    from reasonrl.config import Config

TRAINERS = ("ours", "trl")
EPS = 1e-4  # TRL's constant in advantages
SCALES = {"grpo": "group", "dr_grpo": "none", "batch_std": "batch", "gdpo": "group"}
LOSS_TYPES = {"sequence_mean": "grpo", "constant": "dr_grpo"}
WHOLE_STATE = ("fsdp", "fsdp_config")
CURE = "Use trainer=ours, or leave it at its default."
DIFFERENCES = (
    "trainer=trl: minibatches are rows in random order, the same in every inner epoch; entropy is measured during the "
    "updates, at the sampling temperature; with micro-batches, token_mean divides by the mean token count of the "
    "step's minibatches; ratios and the shift from the old policy are not measured; non-finite updates are not skipped."
)


@dataclass
class TrlConfig:
    """Only with trainer=trl."""

    # further fields of GRPOConfig by name, for instance {use_vllm: true, vllm_mode: colocate}
    options: dict[str, Any] = field(default_factory=dict)


def mistakes(config: Config) -> Iterator[Mistake]:
    """Yield what keeps this configuration from running under TRL."""
    if config.trainer != "trl":
        if config.trl.options:
            yield Mistake("trl.options", config.trl.options, f"has no effect with trainer={config.trainer}")
        return
    if importlib.util.find_spec("trl") is None:
        yield Mistake("trainer", "trl", "needs TRL, which is not installed", "pip install 'reasonrl[trl]'.")
    for key, value, what in _absent(config):
        yield Mistake(key, value, f"{what} is not in TRL's GRPOTrainer", CURE)
    yield from _shapes(config)
    arguments = grpo_arguments(config, config.steps, 1)
    for name in config.trl.options:
        if name in arguments or name in ("output_dir", "seed", "max_steps"):
            cure = "Set the setting it is made from."
            yield Mistake(f"trl.options.{name}", config.trl.options[name], "is set by this project", cure)
        elif name in WHOLE_STATE:
            allowed = "splits weights and optimizer over processes, which the checkpoints of a run cannot hold"
            yield Mistake(f"trl.options.{name}", config.trl.options[name], allowed, "Use trl.options.deepspeed.")
        elif name == "deepspeed":
            yield from trl_deepspeed.mistakes(config.trl.options[name])


def _absent(config: Config) -> Iterator[tuple[str, Any, str]]:
    """Yield (key, value, what is missing) of settings without a counterpart."""
    loss, kl, advantage, entropy, sampling = (
        config.loss,
        config.kl,
        config.advantage,
        config.entropy,
        config.sampling,
    )
    table: tuple[tuple[bool, str, Any, str], ...] = (
        (config.data.kind != "plain", "data.kind", config.data.kind, "refilling groups"),
        (config.data.difficulty_gate > 0, "data.difficulty_gate", config.data.difficulty_gate, "a difficulty gate"),
        (loss.aggregation == "prompt_mean", "loss.aggregation", loss.aggregation, "a mean over prompts"),
        (
            loss.kind == "cispo" and loss.aggregation != "token_mean",
            "loss.aggregation",
            loss.aggregation,
            "CISPO with another aggregation than token_mean",
        ),
        (
            loss.dual_clip is not None and loss.dual_clip < 1 + loss.high,
            "loss.dual_clip",
            loss.dual_clip,
            f"dual clip below 1 + loss.high={1 + loss.high:g}",
        ),
        (kl.kind not in ("off", "k3", "k3_unbiased"), "kl.kind", kl.kind, "this KL estimator"),
        (kl.monitor, "kl.monitor", kl.monitor, "measuring KL without a penalty"),
        (isinstance(kl.coef, dict), "kl.coef", kl.coef, "a coefficient per domain"),
        (kl.kind != "off" and kl.token_weight != "constant", "kl.token_weight", kl.token_weight, "a weight per token"),
        (
            kl.kind == "k3_unbiased" and loss.kind == "gspo",
            "kl.kind",
            kl.kind,
            "unbiased KL with token ratios beside sequence ratios",
        ),
        (
            kl.kind != "off" and config.model.gguf_file is not None,
            "model.gguf_file",
            config.model.gguf_file,
            "a reference model from a GGUF file",
        ),
        (advantage.kind not in SCALES, "advantage.kind", advantage.kind, "this advantage"),
        (
            advantage.kind != "dr_grpo" and advantage.eps != EPS,
            "advantage.eps",
            advantage.eps,
            f"another eps than {EPS}",
        ),
        (
            advantage.kind == "gdpo" and not advantage.batch_norm,
            "advantage.batch_norm",
            advantage.batch_norm,
            "GDPO without the batch step",
        ),
        (entropy.kind in ("clip_cov", "kl_cov"), "entropy.kind", entropy.kind, "this entropy control"),
        (
            entropy.kind == "top_mask" and entropy.scope != "batch",
            "entropy.scope",
            entropy.scope,
            "a mask per sequence",
        ),
        (
            sampling.temperature_high is not None,
            "sampling.temperature_high",
            sampling.temperature_high,
            "two temperatures",
        ),
        (sampling.top_p < 1, "sampling.top_p", sampling.top_p, "the sampling filter in the log-probs"),
        (sampling.top_k > 0, "sampling.top_k", sampling.top_k, "the sampling filter in the log-probs"),
    )
    yield from ((key, value, what) for wrong, key, value, what in table if wrong)
    for name, part in config.reward.parts.items():
        if part.decay_to is not None:
            yield f"reward.parts.{name}.decay_to", part.decay_to, "a weight that changes during the run"


def _shapes(config: Config) -> Iterator[Mistake]:
    optim, processes = config.optim, distributed.launched_size()
    rows = config.data.prompts_per_step * config.sampling.group_size
    if config.data.prompts_per_step % processes:
        allowed = f"must be a multiple of the {processes} processes with trainer=trl"
        yield Mistake("data.prompts_per_step", config.data.prompts_per_step, allowed)
    elif rows % (optim.minibatches * processes):
        allowed = f"must divide the {rows} rows of a step among {processes} process(es) with trainer=trl"
        yield Mistake("optim.minibatches", optim.minibatches, allowed)
    elif optim.micro_batch_size and (rows // optim.minibatches // processes) % optim.micro_batch_size:
        allowed = f"must divide the {rows // optim.minibatches // processes} rows of a minibatch with trainer=trl"
        yield Mistake("optim.micro_batch_size", optim.micro_batch_size, allowed)


def micro_batches(config: Config, processes: int) -> tuple[int, int]:
    """Return (rows per micro-batch and process, micro-batches per update)."""
    rows = config.data.prompts_per_step * config.sampling.group_size // (config.optim.minibatches * processes)
    size = config.optim.micro_batch_size or rows
    return max(min(size, rows), 1), max(rows // max(min(size, rows), 1), 1)


def reward_weights(config: Config) -> list[float]:
    """Return the weight of every reward part, in order, the soft overlong punishment last."""
    return [part.weight for part in config.reward.parts.values()] + [1.0] * (config.overlong.kind == "soft")


def grpo_arguments(config: Config, steps: int, processes: int) -> dict[str, Any]:
    """Return the fields of GRPOConfig for `steps` rollout steps on so many processes.

    The learning rate itself comes from our own schedule, per rollout step.
    """
    loss, kl, entropy, optim = config.loss, config.kl, config.entropy, config.optim
    rows, accumulation = micro_batches(config, processes)
    # bnpo is the mean over the tokens of one micro-batch, dapo that over the step's mean minibatch
    token_mean = "bnpo" if accumulation == 1 and processes == 1 else "dapo"
    arguments = {
        "max_steps": steps * optim.updates_per_rollout,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": optim.minibatches * accumulation,
        "num_iterations": optim.inner_epochs,
        "num_generations": config.sampling.group_size,
        "max_completion_length": config.sampling.max_new_tokens,
        "temperature": config.sampling.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "max_grad_norm": optim.max_grad_norm,
        "epsilon": loss.low,
        "epsilon_high": loss.cap if loss.kind == "cispo" else loss.high,
        "delta": loss.dual_clip,
        "loss_type": "cispo" if loss.kind == "cispo" else LOSS_TYPES.get(loss.aggregation, token_mean),
        "importance_sampling_level": "sequence" if loss.kind == "gspo" else "token",
        "beta": 0.0 if kl.kind == "off" or isinstance(kl.coef, dict) else float(kl.coef),
        "use_bias_correction_kl": kl.kind == "k3_unbiased",
        "scale_rewards": SCALES.get(config.advantage.kind, "group"),
        "multi_objective_aggregation": "normalize_then_sum"
        if config.advantage.kind == "gdpo"
        else "sum_then_normalize",
        "reward_weights": reward_weights(config),
        "mask_truncated_completions": config.overlong.kind == "filter",
        "top_entropy_quantile": entropy.rho if entropy.kind == "top_mask" else 1.0,
        "entropy_coef": entropy.coef if entropy.kind == "bonus" else 0.0,
        "gradient_checkpointing": config.model.gradient_checkpointing,
        "shuffle_dataset": False,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    if entropy.kind == "thermostat":
        arguments |= {
            "use_adaptive_entropy": True,
            "entropy_target": entropy.target,
            "entropy_coef_delta": entropy.delta,
            "entropy_coef_max": entropy.max_coef,
        }
    return arguments

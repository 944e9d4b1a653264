"""Everything that can be known to be wrong with a configuration before any work starts."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from reasonrl import advantages, entropy, kl, loss, overlong, rewards, sharding, trl_options, zero
from reasonrl.errors import Mistake
from reasonrl.models import path_mistake
from reasonrl.optim import SCHEDULES
from reasonrl.tasks import TASKS, arithmetic, records

if TYPE_CHECKING:
    from reasonrl.config import Config

DTYPES = ("auto", "float32", "bfloat16", "float16")
GSPO_LARGEST = 0.05  # a clip bound above this is of token size


def mistakes_of(config: Config) -> list[Mistake]:
    """Return all mistakes; the order is that of the configuration's sections."""
    checks = (
        _choices,
        _numbers,
        _sampling,
        _losses,
        _kl,
        _rewards,
        _task_and_model,
        _alerts,
        _launch,
        trl_options.mistakes,
    )
    found = [Mistake(key, value, "must be a finite number") for key, value in infinite(config)]
    named = {mistake.key for mistake in found}
    return found + [mistake for check in checks for mistake in check(config) if mistake.key not in named]


def infinite(node: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """Yield (dotted key, value) of every inf and nan in a tree of dataclasses, mappings and lists."""
    if isinstance(node, float):
        if not math.isfinite(node):
            yield key, node
    elif isinstance(node, (list, tuple)):
        for index, item in enumerate(node):
            yield from infinite(item, f"{key}[{index}]")
    elif isinstance(node, dict) or dataclasses.is_dataclass(node):
        for name, item in (node if isinstance(node, dict) else vars(node)).items():
            yield from infinite(item, f"{key}.{name}" if key else str(name))


def _choices(config: Config) -> Iterator[Mistake]:
    table: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
        ("trainer", config.trainer, trl_options.TRAINERS),
        ("data.kind", config.data.kind, ("plain", "dynamic_sampling")),
        ("loss.kind", config.loss.kind, tuple(loss.LOSSES)),
        ("loss.aggregation", config.loss.aggregation, loss.AGGREGATIONS),
        ("kl.kind", config.kl.kind, kl.KINDS),
        ("kl.token_weight", config.kl.token_weight, kl.TOKEN_WEIGHTS),
        ("optim.schedule", config.optim.schedule, SCHEDULES),
        ("advantage.kind", config.advantage.kind, advantages.KINDS),
        ("entropy.kind", config.entropy.kind, entropy.KINDS),
        ("entropy.scope", config.entropy.scope, ("batch", "sequence")),
        ("overlong.kind", config.overlong.kind, overlong.KINDS),
        ("task.kind", config.task.kind, tuple(TASKS)),
        ("model.kind", config.model.kind, ("tiny", "hf")),
        ("model.dtype", config.model.dtype, DTYPES),
        ("tracking.kind", config.tracking.kind, ("none", "wandb")),
        ("tracking.mode", config.tracking.mode, ("online", "offline", "disabled")),
    )
    for key, value, allowed in table:
        if value not in allowed:
            yield Mistake(key, value, f"unknown; choose {', '.join(allowed)}")


def _numbers(config: Config) -> Iterator[Mistake]:
    at_least: tuple[tuple[str, Any, float], ...] = (
        ("steps", config.steps, 1),
        ("data.prompts_per_step", config.data.prompts_per_step, 1),
        ("data.max_rounds", config.data.max_rounds, 1),
        ("data.patience", config.data.patience, 1),
        ("data.difficulty_gate", config.data.difficulty_gate, 0),
        ("optim.minibatches", config.optim.minibatches, 1),
        ("optim.inner_epochs", config.optim.inner_epochs, 1),
        ("optim.warmup_steps", config.optim.warmup_steps, 0),
        ("optim.max_grad_norm", config.optim.max_grad_norm, 0),
        ("optim.weight_decay", config.optim.weight_decay, 0),
        ("sampling.max_new_tokens", config.sampling.max_new_tokens, 1),
        ("eval.problems", config.eval.problems, 1),
        ("eval.samples", config.eval.samples, 1),
        ("eval.every", config.eval.every, 0),
        ("eval.batch_problems", config.eval.batch_problems, 1),
        ("reward.ngram", config.reward.ngram, 1),
        ("kl.answer_tokens", config.kl.answer_tokens, 1),
        ("kl.reasoning_weight", config.kl.reasoning_weight, 0),
        ("entropy.coef", config.entropy.coef, 0),
        ("entropy.target", config.entropy.target, 0),
        ("entropy.delta", config.entropy.delta, 0),
        ("entropy.max_coef", config.entropy.max_coef, 0),
        ("entropy.cov_coef", config.entropy.cov_coef, 0),
        ("model.base_steps", config.model.base_steps, 1),
        ("checkpoint.every", config.checkpoint.every, 0),
        ("checkpoint.keep", config.checkpoint.keep, 1),
        ("advantage.eps", config.advantage.eps, 0),
    )
    for key, value, low in at_least:
        if value < low:
            yield Mistake(key, value, f"must be at least {low:g}")
    for key, value in (
        ("optim.lr", config.optim.lr),
        ("sampling.temperature", config.sampling.temperature),
        ("eval.temperature", config.eval.temperature),
    ):
        if value <= 0:
            yield Mistake(key, value, "must be above 0")
    if config.eval.max_new_tokens is not None and config.eval.max_new_tokens < 1:
        allowed = "must be at least 1, or null for sampling.max_new_tokens"
        yield Mistake("eval.max_new_tokens", config.eval.max_new_tokens, allowed)
    micro = config.optim.micro_batch_size
    if micro is not None and micro < 1:
        yield Mistake("optim.micro_batch_size", micro, "must be at least 1, or null for the whole minibatch")
    if config.optim.minibatches > config.data.prompts_per_step:
        allowed = f"at most data.prompts_per_step={config.data.prompts_per_step}: minibatches are made of whole prompts"
        yield Mistake("optim.minibatches", config.optim.minibatches, allowed)
    if len(config.optim.betas) != 2 or not all(0 <= beta < 1 for beta in config.optim.betas):
        yield Mistake("optim.betas", config.optim.betas, "two numbers from 0 to below 1")


def _sampling(config: Config) -> Iterator[Mistake]:
    sampling = config.sampling
    if sampling.group_size < 2:
        yield Mistake(
            "sampling.group_size",
            sampling.group_size,
            "needs at least 2: an advantage compares the completions of one problem",
            "Use 8, or 4 when memory is short.",
        )
    if not 0 < sampling.top_p <= 1:
        yield Mistake("sampling.top_p", sampling.top_p, "must be above 0 and at most 1")
    if sampling.top_k < 0:
        yield Mistake("sampling.top_k", sampling.top_k, "must be at least 0 (0 = off)")
    if (sampling.top_p < 1 or sampling.top_k > 0) and not sampling.replay_filter:
        key, value = ("sampling.top_p", sampling.top_p) if sampling.top_p < 1 else ("sampling.top_k", sampling.top_k)
        yield Mistake(
            key,
            value,
            "would train on log-probs of another distribution than the sampler's",
            "Use top_p=1.0 top_k=0, or sampling.replay_filter=true to apply the same filter in the log-probs.",
        )
    if (sampling.temperature_high is None) != (sampling.entropy_threshold is None):
        yield Mistake(
            "sampling.temperature_high",
            sampling.temperature_high,
            "goes with sampling.entropy_threshold: set both or neither",
        )
    elif sampling.temperature_high is not None and not sampling.temperature_high > 0:
        yield Mistake("sampling.temperature_high", sampling.temperature_high, "must be above 0")


def _losses(config: Config) -> Iterator[Mistake]:
    chosen = config.loss
    if not 0 < chosen.low <= 1:
        yield Mistake("loss.low", chosen.low, "must be above 0 and at most 1")
    if chosen.high <= 0:
        yield Mistake("loss.high", chosen.high, "must be above 0")
    if chosen.dual_clip is not None and chosen.dual_clip <= 1:
        yield Mistake("loss.dual_clip", chosen.dual_clip, "must be above 1 (3 in Ye et al. 2020), or null")
    if chosen.cap <= 0:
        yield Mistake("loss.cap", chosen.cap, "must be above 0")
    if config.entropy.kind == "top_mask" and not 0 < config.entropy.rho <= 1:
        yield Mistake("entropy.rho", config.entropy.rho, "must be above 0 and at most 1")
    if config.entropy.kind in ("clip_cov", "kl_cov") and not 0 < config.entropy.cov_share <= 1:
        yield Mistake("entropy.cov_share", config.entropy.cov_share, "must be above 0 and at most 1")
    if config.entropy.kind == "clip_cov" and not config.entropy.cov_low < config.entropy.cov_high:
        allowed = f"must be below entropy.cov_high={config.entropy.cov_high}"
        yield Mistake("entropy.cov_low", config.entropy.cov_low, allowed)
    limit = config.sampling.max_new_tokens
    if config.overlong.kind == "soft" and not 0 < config.overlong.cache_tokens < limit:
        allowed = f"must be above 0 and below sampling.max_new_tokens={limit}"
        yield Mistake("overlong.cache_tokens", config.overlong.cache_tokens, allowed)


def _kl(config: Config) -> Iterator[Mistake]:
    chosen = config.kl
    values = chosen.coef.values() if isinstance(chosen.coef, dict) else [chosen.coef]
    numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
    if len(numbers) != len(list(values)) or any(value < 0 for value in numbers):
        yield Mistake("kl.coef", chosen.coef, "a number >= 0, or one per domain such as {math: 0, code: 0.001}")
    elif chosen.kind == "off" and any(numbers):
        yield Mistake("kl.coef", chosen.coef, "has no effect with kl.kind=off", "Choose kl=k3_unbiased, k3 or k2.")
    elif chosen.kind in kl.ESTIMATORS and not any(numbers) and not chosen.monitor:
        cure = "Set kl.coef, or kl=off kl.monitor=true to measure only."
        yield Mistake("kl.coef", chosen.coef, f"is 0, so kl.kind={chosen.kind} changes nothing", cure)
    if chosen.kind == "k1" and not chosen.in_reward:
        yield Mistake(
            "kl.kind",
            "k1",
            "as a loss has an expected gradient of zero",
            "Set kl.in_reward=true to use it as a reward penalty, or choose k3_unbiased.",
        )
    if chosen.in_reward and chosen.kind != "k1":
        yield Mistake("kl.in_reward", True, f"uses k1, not {chosen.kind}", "Set kl.kind=k1 or kl.in_reward=false.")


def _reward_source(key: str, name: str, part: rewards.PartConfig) -> Iterator[Mistake]:
    """A part is built in, a function, or a model: one of the three."""
    if part.function is None and part.model is None and name not in rewards.BUILT_IN_PARTS:
        allowed = f"unknown part; built in are {', '.join(rewards.BUILT_IN_PARTS)}"
        cure = f"Give it a source: '+reward.parts={{{name}:{{function:package.module.fn}}}}' or {{model:{{path:DIR}}}}."
        yield Mistake(key, name, allowed, cure)
    if part.model is None:
        return
    if part.function is not None:
        yield Mistake(f"{key}.model", part.model.path, "excludes .function", "Keep one of the two.")
    if not part.model.path:
        yield Mistake(f"{key}.model.path", "''", "must be a folder or a hub name", f"Set {key}.model.path=DIR.")
    if part.model.dtype not in DTYPES:
        yield Mistake(f"{key}.model.dtype", part.model.dtype, f"must be one of {', '.join(DTYPES)}")
    if part.model.batch_size < 1:
        yield Mistake(f"{key}.model.batch_size", part.model.batch_size, "must be at least 1")


def _rewards(config: Config) -> Iterator[Mistake]:
    parts = config.reward.parts
    if not parts:
        yield Mistake("reward.parts", parts, "needs at least one part", "Use reward=correctness.")
    for name, part in parts.items():
        yield from _reward_source(f"reward.parts.{name}", name, part)
        if part.decay_to is not None and part.decay_steps < 1:
            yield Mistake(f"reward.parts.{name}.decay_steps", part.decay_steps, "must be at least 1")
    if parts and not any(part.weight or part.decay_to for part in parts.values()):
        yield Mistake("reward.parts", ", ".join(parts), "all weigh 0, so nothing is rewarded", "Give one a weight.")
    if config.reward.correct <= config.reward.wrong:
        yield Mistake("reward.correct", config.reward.correct, f"must be above reward.wrong={config.reward.wrong}")
    count = len(parts) + (config.overlong.kind == "soft")
    if config.advantage.kind == "gdpo" and count < 2:
        yield Mistake(
            "advantage.kind",
            "gdpo",
            f"needs two or more reward parts, reward.parts has {count} ({', '.join(parts)})",
            "Use reward=correctness_format or advantage=grpo.",
        )
    if config.reward.random and "correctness" not in parts:
        yield Mistake("reward.random", True, "replaces the correctness part, which reward.parts lacks")


def _task_and_model(config: Config) -> Iterator[Mistake]:
    if config.task.kind == "arithmetic":
        yield from arithmetic.check(config.task)
        counts = config.model.base_operands
        if counts is not None and not all(2 <= count <= arithmetic.MAX_OPERANDS for count in counts or [0]):
            allowed = f"counts from 2 to {arithmetic.MAX_OPERANDS}, or null for those of the task"
            yield Mistake("model.base_operands", counts, allowed)
    elif config.model.kind == "tiny":
        yield Mistake(
            "model.kind",
            "tiny",
            f"knows only the characters of task=arithmetic, not task={config.task.kind}",
            "Use model=hf model.path=DIR.",
        )
    if config.task.kind in ("records", "code"):
        yield from records.mistakes(config.task)
    if config.model.kind == "hf" and (mistake := path_mistake(config.model, config.model.path)):
        yield mistake
    lora = config.model.lora
    if lora.r < 0:
        yield Mistake("model.lora.r", lora.r, "must be at least 1, or 0 to train all weights")
    if lora.dropout:
        allowed = "is never applied: dropout stays off, so that the ratio of the first minibatch is 1"
        yield Mistake("model.lora.dropout", lora.dropout, allowed, "Set it to 0.")
    for name in ("careful", "mode_share", "noise", "bracket_share"):
        value = getattr(config.model, name)
        if not 0 <= value <= 1:
            yield Mistake(f"model.{name}", value, "a share from 0 to 1")


def _alerts(config: Config) -> Iterator[Mistake]:
    yield from config.alerts.mistakes()


def _launch(config: Config) -> Iterator[Mistake]:
    """What accelerate's configuration asks for and no run here does; it would be ignored without a word."""
    yield from sharding.mistakes()
    if config.trainer == "trl" and sharding.asked():
        allowed = "splits weights that the evaluation and the checkpoints of trainer=trl need whole"
        cure = "Use distributed_type: MULTI_GPU and +trl.options.deepspeed=FILE, or trainer=ours."
        yield Mistake("accelerate", "DeepSpeed" if zero.asked(os.environ) else "FSDP", allowed, cure)


def doubts_about(config: Config) -> list[str]:
    """Return what is allowed and most likely not wanted, in one sentence each."""
    doubt = sharding.doubt()
    found = [] if doubt is None else [doubt]
    chosen = config.loss
    if chosen.kind == "gspo" and max(chosen.low, chosen.high) > GSPO_LARGEST:
        found.append(
            f"loss.low={chosen.low:g} loss.high={chosen.high:g} are bounds for token ratios; with loss.kind=gspo the "
            "mean over a sequence moves about a thousand times less and is never clipped. GSPO uses 3e-4 and 4e-4 "
            "(loss=gspo)."
        )
    if config.kl.kind == "off" and any(part.model is not None for part in config.reward.parts.values()):
        found.append(
            "A reward model without a KL term: the policy drifts to what the model overrates. Take kl=k3_unbiased."
        )
    if config.sampling.group_size == 2:
        found.append(
            "sampling.group_size=2 gives at most half of the groups a signal (p^2 + (1-p)^2 are flat); take 8."
        )
    return found

"""Rewards, kept in parts to the end: correctness, format, soft overlong, repetition, functions, reward models."""

from __future__ import annotations

import functools
import importlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reasonrl.errors import ConfigError, Mistake, VerifierError
from reasonrl.lazy import torch
from reasonrl.overlong import OverlongConfig, soft_overlong_penalty
from reasonrl.reward_model import RewardModelConfig, load_reward_model
from reasonrl.types import Completions, Problem, Rollouts


@dataclass
class PartConfig:
    """One reward part: its weight, and for a user's own part the function or the model that computes it."""

    weight: float = 1.0
    function: str | None = None  # dotted path; called with (problems, texts) of B rows, returns B numbers
    model: RewardModelConfig | None = None  # a model that scores (problem, completion) pairs
    decay_to: float | None = None  # weight after the part is learned; None = constant
    decay_at: float = 0.9  # running mean of the part that starts the decay
    decay_steps: int = 20  # rollout steps from `weight` to `decay_to`


@dataclass
class RewardConfig:
    """Which parts make up the reward and what right and wrong are worth."""

    correct: float = 1.0
    wrong: float = 0.0
    parts: dict[str, PartConfig] = field(default_factory=lambda: {"correctness": PartConfig()})
    ngram: int = 4  # repetition: length of the n-grams, tokens
    random: bool = False  # replace correctness by a coin flip per row: a drift test of the clip, not training


THINK = re.compile(r"\s*<think>(?!.*<think>)(.*?)</think>(?!.*</think>)\s*(\S.*)", re.DOTALL)


def think_format(text: str) -> bool:
    """Return whether `<think>...</think>` is there once, in order, with an answer behind it."""
    match = THINK.fullmatch(text)
    return match is not None and "<think>" not in match.group(1)


def think_format_ids(ids: Sequence[int], open_id: int, close_id: int, blank_ids: frozenset[int] = frozenset()) -> bool:
    """The same check on token ids, for tokenizers in which the two tags are single tokens."""
    tags = [token for token in ids if token in (open_id, close_id)]
    if tags != [open_id, close_id]:
        return False
    before = ids[: ids.index(open_id)]
    after = ids[ids.index(close_id) + 1 :]
    return all(token in blank_ids for token in before) and any(token not in blank_ids for token in after)


def format_check(policy: Any, task: Any) -> Callable[[list[int], list[int], str], bool]:
    """Return the format checker (prompt ids, completion ids, text) -> bool of a task under a policy's tokenizer.

    Where the two tags are special tokens, decoded text has lost them, so the ids are looked at. A chat template
    that ends in `<think>` has opened the tag for the completion.
    """
    if not getattr(task, "thinks", False):
        return lambda prompt, ids, text: task.format_ok(text)
    tags = _special_tags(policy.tokenizer)
    blank = functools.cache(lambda token: not policy.decode([token]).strip())

    def check(prompt: list[int], ids: list[int], text: str) -> bool:
        opened = policy.tokenizer.decode(prompt[-8:], skip_special_tokens=False).rstrip().endswith("<think>")
        if tags is None:
            return task.format_ok("<think>" + text if opened else text)
        blank_ids = frozenset(token for token in set(ids) if token not in tags and blank(token))
        return think_format_ids([tags[0], *ids] if opened else ids, *tags, blank_ids)

    return check


def _special_tags(tokenizer: Any) -> tuple[int, int] | None:
    """Return the ids of `<think>` and `</think>` where decoding without special tokens drops them."""
    special = {str(token): index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return (special["<think>"], special["</think>"]) if {"<think>", "</think>"} <= set(special) else None


def repetition_share(ids: Sequence[int], n: int = 4) -> float:
    """Return the share of n-grams that repeat an earlier one: 0 = none, near 1 = a loop."""
    total = len(ids) - n + 1
    if total <= 0:
        return 0.0
    return 1.0 - len({tuple(ids[i : i + n]) for i in range(total)}) / total


Scorer = Callable[[list[Problem], list[str]], Sequence[float | None]]


def load_function(path: str, key: str) -> Scorer:
    """Import a user's reward function by dotted path; raises ConfigError naming `key`."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        allowed = f"must be the dotted path of a function ({error})"
        raise ConfigError([Mistake(key, path, allowed, "Put its module on PYTHONPATH.")]) from error


def reward_parts(
    config: RewardConfig,
    overlong: OverlongConfig,
    rollouts: Rollouts,
    max_new_tokens: int,
    format_ok: Callable,
    scorers: Mapping[str, Scorer],
) -> dict[str, torch.Tensor]:
    """Return every configured part as a (P, G) tensor of raw values, before weights.

    `scorers` are the users' functions and reward models, from `load_scorers`.
    correctness lies between `wrong` and `correct`; format is 0 or 1; repetition is minus the repeated share;
    overlong_soft is DAPO's punishment times (correct - wrong) / 2, because its -1 belongs to a +-1 reward.
    """
    shape = rollouts.correct_PG.shape
    lengths = rollouts.completions.lengths_B
    span = config.correct - config.wrong
    parts: dict[str, torch.Tensor] = {}
    for name in config.parts:
        if name in scorers:
            problems = [problem for problem in rollouts.problems for _ in range(shape[1])]
            values = list(scorers[name](problems, rollouts.texts))
            if len(values) != len(rollouts.texts):
                raise VerifierError(f"reward.parts.{name} gave {len(values)} rewards for {len(problems)} completions.")
            parts[name] = torch.tensor([math.nan if v is None else float(v) for v in values]).view(shape)
        elif name == "correctness":
            parts[name] = config.wrong + span * rollouts.correct_PG
        elif name == "format":
            prompts = [prompt for prompt in rollouts.prompts for _ in range(shape[1])]
            rows = zip(prompts, rows_of(rollouts.completions), rollouts.texts, strict=True)
            parts[name] = torch.tensor([float(format_ok(*row)) for row in rows]).view(shape)
        elif name == "repetition":
            shares = [repetition_share(ids, config.ngram) for ids in rows_of(rollouts.completions)]
            parts[name] = -torch.tensor(shares).view(shape)
    if overlong.kind == "soft":
        penalty = soft_overlong_penalty(lengths, max_new_tokens, overlong.cache_tokens)
        parts["overlong_soft"] = (penalty * span / 2).view(shape)
    return parts


def rows_of(completions: Completions) -> list[list[int]]:
    """Return the token ids of every completion, without padding."""
    lengths = completions.lengths_B.tolist()
    return [ids[:length] for ids, length in zip(completions.ids_BT.tolist(), lengths, strict=True)]


BUILT_IN_PARTS = ("correctness", "format", "repetition")


def load_scorers(config: RewardConfig) -> dict[str, Scorer]:
    """Import the users' reward functions and load the reward models, by part.

    Raises ConfigError with every function that is not there, ModelError for a model that cannot be used.
    """
    scorers: dict[str, Scorer] = {}
    mistakes: list[Mistake] = []
    for name, part in config.parts.items():
        try:
            if part.function is not None:
                scorers[name] = load_function(part.function, f"reward.parts.{name}.function")
        except ConfigError as error:
            mistakes += error.mistakes
    if mistakes:
        raise ConfigError(mistakes)
    for name, part in config.parts.items():
        if part.model is not None:
            scorers[name] = load_reward_model(part.model, f"reward.parts.{name}.model")
    return scorers


@dataclass
class WeightSchedule:
    """Weights of the parts over the run: a part with `decay_to` keeps its weight until the running mean of its
    raw value passes `decay_at`, then goes down linearly over `decay_steps` and stays there."""

    parts: dict[str, PartConfig]
    running: dict[str, float] = field(default_factory=dict)
    learned_at: dict[str, int] = field(default_factory=dict)

    def update(self, step: int, means: dict[str, float]) -> None:
        """Take in this step's mean raw values (running mean with momentum 0.9)."""
        for name, part in self.parts.items():
            if part.decay_to is None or not math.isfinite(means.get(name, math.nan)):
                continue
            value = 0.9 * self.running.get(name, means[name]) + 0.1 * means[name]
            self.running[name] = value
            if value > part.decay_at:
                self.learned_at.setdefault(name, step)

    def weight(self, name: str, step: int) -> float:
        """Return the weight of part `name` at rollout step `step`; parts without a setting weigh 1."""
        part = self.parts.get(name)
        if part is None:
            return 1.0
        if part.decay_to is None or name not in self.learned_at:
            return part.weight
        done = min((step - self.learned_at[name]) / max(part.decay_steps, 1), 1.0)
        return part.weight + done * (part.decay_to - part.weight)

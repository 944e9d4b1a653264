"""Held-out accuracy with the same problems and the same draws every time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import reasonrl.randomness as randomness
from reasonrl.lazy import torch
from reasonrl.models.policy import Policy
from reasonrl.rollout import SamplingConfig
from reasonrl.rollout.generate import generate
from reasonrl.tasks import Task
from reasonrl.types import Problem


@dataclass
class EvalConfig:
    """When and how held-out accuracy is measured; it is also measured before the first step and after the last."""

    every: int = 5  # rollout steps; 0 = only before and after
    problems: int = 200
    samples: int = 4  # k: completions per problem
    temperature: float = 1.0
    max_new_tokens: int | None = None  # null = sampling.max_new_tokens
    batch_problems: int = 100  # problems per generation batch


@dataclass
class Evaluation:
    """Metrics, how many of k samples were right per problem, and a few completions to read."""

    metrics: dict[str, float]
    right: list[int]
    samples: list[dict[str, Any]]


def evaluate(
    policy: Policy, task: Task, problems: list[Problem], config: EvalConfig, sampling: SamplingConfig
) -> Evaluation:
    """Sample k completions per held-out problem and score them.

    eval/accuracy is mean@k, pass_at_k the share with at least one right, majority the share whose most frequent
    answer is right (ties go to the answer seen first), distinct the mean number of different right completions.
    Draws depend on problem and sample only, so that two steps or two arms differ by the policy alone. Sampling is
    unfiltered at `eval.temperature`.
    """
    limit = config.max_new_tokens or sampling.max_new_tokens
    plain = replace(
        sampling, temperature=config.temperature, temperature_high=None, top_p=1.0, top_k=0, max_new_tokens=limit
    )
    right: list[int] = []
    lengths: list[int] = []
    truncated = majority = distinct = 0
    samples: list[dict[str, Any]] = []
    for start in range(0, len(problems), config.batch_problems):
        batch = problems[start : start + config.batch_problems]
        draws = [randomness.uniforms(config.samples, limit, "eval", problem.id) for problem in batch]
        prompts = [policy.encode(problem) for problem in batch]
        out = generate(policy, prompts, config.samples, plain, torch.cat([torch.from_numpy(d) for d in draws]))
        row_lengths = out.lengths_B.tolist()
        lengths += row_lengths
        truncated += out.finish.count("length")
        for index, problem in enumerate(batch):
            rows = range(index * config.samples, (index + 1) * config.samples)
            texts = [policy.decode(out.ids_BT[row, : row_lengths[row]].tolist()) for row in rows]
            finish = [out.finish[row] for row in rows]
            verdicts = [task.score(problem, text, end) for text, end in zip(texts, finish, strict=True)]
            values = [verdict.value >= 1.0 for verdict in verdicts]
            right.append(sum(values))
            majority += _majority_is_right(task, texts, values)
            distinct += len({text for text, value in zip(texts, values, strict=True) if value})
            if len(samples) < 4:
                row = {"prompt": problem.prompt, "gold": problem.gold, "completion": texts[0], "finish": finish[0]}
                samples.append({**row, "reward": verdicts[0].value, "reason": verdicts[0].reason})
    count = max(len(problems), 1)
    metrics = {
        "eval/accuracy": sum(right) / (count * config.samples),
        "eval/pass_at_k": sum(value > 0 for value in right) / count,
        "eval/majority": majority / count,
        "eval/distinct": distinct / count,
        "eval/length": sum(lengths) / max(len(lengths), 1),
        "eval/truncated": truncated / max(len(lengths), 1),
    }
    return Evaluation(metrics, right, samples)


def _majority_is_right(task: Task, texts: list[str], values: list[bool]) -> bool:
    """Vote by extracted answer where the task can extract one, else by the whole text."""
    extract = getattr(task, "answer", lambda text: text)
    votes = [extract(text) for text in texts]
    counted = Counter(vote for vote in votes if vote is not None)
    if not counted:
        return False
    winner = counted.most_common(1)[0][0]
    return any(value for vote, value in zip(votes, values, strict=True) if vote == winner)

"""Held-out accuracy with the same problems and the same draws every time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from reasonrl import distributed, randomness
from reasonrl.lazy import torch
from reasonrl.models.policy import Policy
from reasonrl.rewards import format_check
from reasonrl.rollout import SamplingConfig
from reasonrl.rollout.generate import generate
from reasonrl.tasks import Task, score_all
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


SHOWN = 4  # completions kept to read


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
    own = problems[distributed.share(len(problems))]
    judged: list[_Judged] = []
    for start in range(0, len(own), config.batch_problems):
        judged += _judge(policy, task, own[start : start + config.batch_problems], config.samples, plain)
    judged = distributed.gather(judged)
    count = max(len(judged), 1)
    rows = count * config.samples
    metrics = {
        "eval/accuracy": sum(one.right for one in judged) / rows,
        "eval/pass_at_k": sum(one.right > 0 for one in judged) / count,
        "eval/majority": sum(one.majority for one in judged) / count,
        "eval/distinct": sum(one.distinct for one in judged) / count,
        "eval/length": sum(one.tokens for one in judged) / rows,
        "eval/truncated": sum(one.truncated for one in judged) / rows,
    }
    return Evaluation(metrics, [one.right for one in judged], [one.sample for one in judged[:SHOWN]])


@dataclass
class _Judged:
    """What k samples of one problem came to."""

    right: int
    majority: bool
    distinct: int
    tokens: int
    truncated: int
    sample: dict[str, Any]


def _judge(policy: Policy, task: Task, problems: list[Problem], k: int, sampling: SamplingConfig) -> list[_Judged]:
    limit = sampling.max_new_tokens
    draws = [torch.from_numpy(randomness.uniforms(k, limit, "eval", problem.id)) for problem in problems]
    prompts, well_formed = [policy.encode(problem) for problem in problems], format_check(policy, task)
    out = generate(policy, prompts, k, sampling, torch.cat(draws))
    lengths = out.lengths_B.tolist()
    all_texts = [policy.decode(ids[:length]) for ids, length in zip(out.ids_BT.tolist(), lengths, strict=True)]
    owners = [problem for problem in problems for _ in range(k)]
    scored = score_all(task, list(zip(owners, all_texts, out.finish, strict=True)))
    judged = []
    for index, problem in enumerate(problems):
        rows = range(index * k, (index + 1) * k)
        texts, finish = all_texts[rows.start : rows.stop], out.finish[rows.start : rows.stop]
        verdicts = scored[index * k : (index + 1) * k]
        values = [verdict.value >= 1.0 for verdict in verdicts]
        form = well_formed(prompts[index], out.ids_BT[rows.start, : lengths[rows.start]].tolist(), texts[0])
        parts = {"correctness": verdicts[0].value, "format": float(form)}
        shown = {"prompt": problem.prompt, "gold": problem.gold, "completion": texts[0], "finish": finish[0]}
        judged.append(
            _Judged(
                right=sum(values),
                majority=_majority_is_right(task, texts, values),
                distinct=len({text for text, value in zip(texts, values, strict=True) if value}),
                tokens=sum(lengths[row] for row in rows),
                truncated=finish.count("length"),
                sample={**shown, "reward": verdicts[0].value, "parts": parts, "reason": verdicts[0].reason},
            )
        )
    return judged


def _majority_is_right(task: Task, texts: list[str], values: list[bool]) -> bool:
    """Vote by extracted answer where the task can extract one, else by the whole text."""
    extract = getattr(task, "answer", lambda text: text)
    votes = [extract(text) for text in texts]
    counted = Counter(vote for vote in votes if vote is not None)
    if not counted:
        return False
    winner = counted.most_common(1)[0][0]
    return any(value for vote, value in zip(votes, values, strict=True) if vote == winner)

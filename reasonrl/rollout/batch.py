"""From problems to scored groups, and from groups to one rollout batch."""

from __future__ import annotations

from dataclasses import dataclass

from reasonrl.lazy import torch
from reasonrl.models.policy import Policy
from reasonrl.randomness import stream, uniforms
from reasonrl.rollout import SamplingConfig
from reasonrl.rollout.generate import generate
from reasonrl.tasks import Task, score_all
from reasonrl.types import Completions, Problem, Rollouts


@dataclass
class Group:
    """G scored completions of one problem; `completions` has G rows."""

    problem: Problem
    prompt: list[int]
    completions: Completions
    texts: list[str]
    reasons: list[str]
    correct_G: torch.Tensor
    flat: bool = False

    @property
    def num_tokens(self) -> int:
        """Completion tokens generated for this group."""
        return int(self.completions.mask_BT.sum())


def sample_groups(
    policy: Policy,
    task: Task,
    problems: list[Problem],
    config: SamplingConfig,
    draw_keys: tuple[int, ...],
    random_reward: bool = False,
) -> list[Group]:
    """Sample and score G completions for each problem; `draw_keys` = (seed, step, offset of the first problem)."""
    if not problems:
        return []
    seed, step, offset = draw_keys
    size, limit = config.group_size, config.max_new_tokens
    prompts = [policy.encode(problem) for problem in problems]
    draws = [
        uniforms(size, limit, "rollout", seed, step, problem.id, offset + index)
        for index, problem in enumerate(problems)
    ]
    out = generate(policy, prompts, size, config, torch.cat([torch.from_numpy(draw) for draw in draws]))
    texts = [
        policy.decode(ids[:length]) for ids, length in zip(out.ids_BT.tolist(), out.lengths_B.tolist(), strict=True)
    ]
    owners = [problem for problem in problems for _ in range(size)]
    scored = score_all(task, list(zip(owners, texts, out.finish, strict=True)))
    groups = []
    for index, problem in enumerate(problems):
        rows = slice(index * size, (index + 1) * size)
        own, verdicts = select(out, rows), scored[rows]
        correct = torch.tensor([verdict.value for verdict in verdicts])
        if random_reward:
            coin = stream("coin", seed, step, problem.id, offset + index)
            correct = torch.from_numpy(coin.integers(0, 2, size)).float()
        groups.append(Group(problem, prompts[index], own, texts[rows], [v.reason for v in verdicts], correct))
    return groups


def odd_lengths(rollouts: Rollouts) -> str | None:
    """Return what is suspicious about the completions' lengths, or None.

    All empty, none ended, or equal lengths of different texts: the last is what a mask made from a pad token that
    equals EOS looks like.
    """
    lengths, texts = rollouts.completions.lengths_B.tolist(), set(rollouts.texts)
    if not any(text.strip() for text in texts):
        return (
            f"All {len(lengths)} completions are empty: the policy ends at once. Look at the prompts in the samples, "
            "the chat template (task.chat) and the end-of-sequence token."
        )
    if len(set(lengths)) > 1 or len(texts) < 2:
        return None
    if rollouts.completions.finish.count("length") == len(lengths):
        return (
            f"All {len(lengths)} completions were cut at the limit of {lengths[0]} tokens. Raise "
            "sampling.max_new_tokens; if it stays so, the policy does not know its end-of-sequence token."
        )
    return (
        f"All {len(lengths)} completions have {lengths[0]} tokens although their texts differ. Unless answers of one "
        "length are wanted, look at the end-of-sequence token."
    )


def select(completions: Completions, rows: slice) -> Completions:
    """Return the completions of some rows, cut at their own longest one."""
    mask = completions.mask_BT[rows]
    width = max(int(mask.sum(-1).max()), 1)
    return Completions(
        completions.ids_BT[rows, :width],
        mask[:, :width],
        completions.logprobs_BT[rows, :width],
        completions.entropy_BT[rows, :width],
        completions.temperature_BT[rows, :width],
        completions.finish[rows],
        None if completions.kept is None else completions.kept[rows],
    )


def join(groups: list[Group], pad_id: int) -> Rollouts:
    """Put groups into one batch; row p * G + g is completion g of problem p."""
    width = max(group.completions.ids_BT.shape[1] for group in groups)
    parts = [group.completions for group in groups]

    def stack(name: str, fill: float) -> torch.Tensor:
        tensors = [getattr(part, name) for part in parts]
        return torch.cat([torch.nn.functional.pad(t, (0, width - t.shape[1]), value=fill) for t in tensors])

    kept = [row for part in parts for row in part.kept or []]
    completions = Completions(
        stack("ids_BT", pad_id),
        stack("mask_BT", 0),
        stack("logprobs_BT", 0.0),
        stack("entropy_BT", 0.0),
        stack("temperature_BT", 1.0),
        [reason for part in parts for reason in part.finish],
        kept or None,
    )
    return Rollouts(
        problems=[group.problem for group in groups],
        prompts=[group.prompt for group in groups],
        completions=completions,
        texts=[text for group in groups for text in group.texts],
        reward_parts={},
        correct_PG=torch.stack([group.correct_G for group in groups]),
        reasons=[reason for group in groups for reason in group.reasons],
    )

"""Small training batches sampled from a policy, and an optimizer that only looks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from reasonrl import distributed
from reasonrl.entropy import EntropyConfig
from reasonrl.kl import KlConfig
from reasonrl.loss import LossConfig
from reasonrl.randomness import uniforms
from reasonrl.rollout import SamplingConfig
from reasonrl.rollout.generate import generate
from reasonrl.tasks import TaskConfig, load_task
from reasonrl.update import TrainBatch, UpdateSettings

PROMPTS, GROUP, LIMIT = 4, 4, 10


def make_batch(policy: Any, drift: float = 0.3, **fields: Any) -> TrainBatch:
    """4 prompts of two lengths x 4 sampled completions, with advantages -1.5 to 1.5, none of them 0.

    The sampler's log-probs are moved by up to `drift` nats a token, so that ratios differ from 1 and clips act.
    """
    task = load_task(TaskConfig(operands=[4, 6]))
    prompts = [policy.encode(task.train_problem(i)) for i in range(PROMPTS)]
    noise = torch.from_numpy(uniforms(PROMPTS * GROUP, LIMIT, "batch"))
    done = generate(policy, prompts, GROUP, SamplingConfig(max_new_tokens=LIMIT, group_size=GROUP), noise)
    moved = torch.from_numpy(uniforms(*done.ids_BT.shape, "drift")) * 2 - 1
    rows = PROMPTS * GROUP
    batch = TrainBatch(
        prompts=prompts,
        owner_B=torch.arange(PROMPTS).repeat_interleave(GROUP),
        completions=replace(done, logprobs_BT=(done.logprobs_BT + drift * moved) * done.mask_BT),
        advantages_B=torch.linspace(-1.5, 1.5, rows),
        loss_mask_BT=done.mask_BT.float(),
        beta_B=torch.zeros(rows),
        kl_weight_BT=torch.ones_like(done.logprobs_BT),
    )
    return replace(batch, **fields)


def make_settings(**fields: Any) -> UpdateSettings:
    """One update with the symmetric clip."""
    plain = UpdateSettings(
        loss=LossConfig(),
        kl=KlConfig(),
        entropy=EntropyConfig(),
        minibatches=1,
        inner_epochs=1,
        micro_batch_size=None,
        max_new_tokens=LIMIT,
        lr=1e-3,
        bonus=0.0,
        seed=0,
        step=1,
    )
    return replace(plain, **fields)


class Onlooker:
    """Takes the place of the optimizer: keeps every gradient as one flat tensor and changes no weight."""

    def __init__(self, policy: Any) -> None:
        self.parameters = self.masters = policy.trainable()
        self.gradients: list[torch.Tensor] = []

    def accumulate(self) -> None:
        """Weights in fp32 are their own masters."""

    def step(self, lr: float) -> float:
        """Note the gradient and return its norm."""
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        self.gradients.append(torch.cat([distributed.whole(part).flatten() for part in parts]))
        for parameter in self.parameters:
            parameter.grad = None
        return float(self.gradients[-1].norm())

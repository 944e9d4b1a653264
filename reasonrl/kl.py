"""KL to the reference policy, per token: d = log pi - log pi_ref, in nats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from reasonrl.lazy import torch


@dataclass
class KlConfig:
    """The pull towards the reference model; `off` loads no reference model at all.

    In the loss it acts on every row that is trained on, those of flat groups included; tokens that the loss leaves
    out (overlong rows, low-entropy tokens) have no KL term either.
    """

    kind: str = "off"  # off, k1 (as a reward penalty only), k2, k3, k3_unbiased
    coef: Any = 0.0  # beta: a number, or one per domain, e.g. {math: 0, code: 0.001}
    in_reward: bool = False  # subtract coef * k1 from the reward instead of adding to the loss
    monitor: bool = False  # measure kl/ref although no coefficient uses it (costs a reference model)
    token_weight: str = "constant"  # constant, linear (0 to 1 over the completion), answer
    reasoning_weight: float = 0.1  # token_weight=answer: weight before the final answer's last tokens
    answer_tokens: int = 8  # token_weight=answer: how many last tokens count as the answer


def k1(logprobs_BT: torch.Tensor, ref_BT: torch.Tensor, old_BT: torch.Tensor) -> torch.Tensor:
    """d. As an on-policy loss its expected gradient is zero, so it is allowed as a reward penalty only."""
    return logprobs_BT - ref_BT


def k2(logprobs_BT: torch.Tensor, ref_BT: torch.Tensor, old_BT: torch.Tensor) -> torch.Tensor:
    """d^2 / 2; its on-policy gradient is that of the reverse KL. log(ref/pi) = ln 2 gives 0.240."""
    return (logprobs_BT - ref_BT).square() / 2


def k3(logprobs_BT: torch.Tensor, ref_BT: torch.Tensor, old_BT: torch.Tensor) -> torch.Tensor:
    """exp(-d) - 1 + d; unbiased value, gradient of the forward KL (Schulman; GRPO). ln 2 gives 0.307."""
    d = logprobs_BT - ref_BT
    return (-d).exp() - 1 + d


def k3_unbiased(logprobs_BT: torch.Tensor, ref_BT: torch.Tensor, old_BT: torch.Tensor) -> torch.Tensor:
    """(pi / pi_old) k3 with a differentiable ratio; gradient of the reverse KL (DeepSeek-V3.2)."""
    return (logprobs_BT - old_BT).exp() * k3(logprobs_BT, ref_BT, old_BT)


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3, "k3_unbiased": k3_unbiased}
KINDS = ("off", *ESTIMATORS)
TOKEN_WEIGHTS = ("constant", "linear", "answer")


def needs_reference(config: KlConfig) -> bool:
    """Return whether a reference model must be held in memory."""
    return config.kind != "off" or config.monitor


def coefficients(config: KlConfig, domains: list[str]) -> torch.Tensor:
    """Return beta per row (B,); with a mapping, a domain that is not named has beta 0."""
    if isinstance(config.coef, (int, float)):
        return torch.full((len(domains),), float(config.coef))
    return torch.tensor([float(config.coef.get(domain, 0.0)) for domain in domains])


def position_weights(config: KlConfig, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return the per-token weight (B, T) of the KL term over positions of the completion."""
    if config.token_weight == "constant":
        return torch.ones_like(mask_BT, dtype=torch.float32)
    lengths = mask_BT.sum(-1, keepdim=True)
    positions = torch.arange(mask_BT.shape[-1], device=mask_BT.device)
    if config.token_weight == "linear":
        return (positions + 1) / lengths.clamp(min=1)
    answer = positions >= lengths - config.answer_tokens
    return torch.where(answer, 1.0, config.reasoning_weight)

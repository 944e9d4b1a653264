"""Policy losses and their aggregation: pure functions on (B, T) tensors.

r_t = pi(y_t) / pi_old(y_t), both with logits divided by the temperature that sampled token t. A loss function
returns the negative objective per token (`mask_BT`: the completion's tokens); `token_weights` turns the sum over
tokens into the wanted mean, with the denominator of the whole minibatch, so that micro-batches and processes only
have to add up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from reasonrl.lazy import torch


@dataclass
class LossConfig:
    """The policy objective (spec table of policy losses)."""

    kind: str = "clip"  # clip, gspo, cispo
    low: float = 0.2  # the ratio may fall to 1 - low
    high: float = 0.2  # the ratio may rise to 1 + high
    dual_clip: float | None = None  # c of dual clip (negative advantages only); 3 in Ye et al. 2020
    cap: float = 5.0  # cispo: largest ratio used as a weight
    aggregation: str = "token_mean"  # token_mean, prompt_mean, sequence_mean, constant


@dataclass
class TokenLoss:
    """Per-token loss with the ratio it used and where a clip was active (the clipped branch decided)."""

    loss_BT: torch.Tensor
    ratio_BT: torch.Tensor
    clipped_low_BT: torch.Tensor
    clipped_high_BT: torch.Tensor


def clip_loss(
    logprobs_BT: torch.Tensor,
    old_BT: torch.Tensor,
    advantages_B: torch.Tensor,
    mask_BT: torch.Tensor,
    config: LossConfig,
) -> TokenLoss:
    """-min(r A, clip(r, 1-low, 1+high) A), min for both signs of A; PPO, DAPO eq. 8.

    ratio 1.3, A=+1, high 0.28: loss -1.28; ratio 0.7, A=-1, low 0.2: +0.8 without gradient; ratio 1.5, A=-1:
    +1.5 with gradient. Dual clip (Ye et al. 2020): for A<0 the objective is at least c A.
    """
    return _clipped((logprobs_BT - old_BT).exp(), advantages_B, config)


def gspo_loss(
    logprobs_BT: torch.Tensor,
    old_BT: torch.Tensor,
    advantages_B: torch.Tensor,
    mask_BT: torch.Tensor,
    config: LossConfig,
) -> TokenLoss:
    """Clip loss on the sequence ratio s = exp(mean_t log r_t); GSPO eq. 5-7, in the GSPO-token form (eq. 13-17).

    The value is s on every token; the gradient reaches token t through pi_t / sg[pi_t]. Log-ratios (ln 2, 0)
    give s = 1.414. The mean is over all tokens of the completion, whatever the loss leaves out.
    """
    log_ratio = (logprobs_BT - old_BT) * mask_BT
    sequence_B1 = (log_ratio.sum(-1) / mask_BT.sum(-1).clamp(min=1)).unsqueeze(-1).detach()
    return _clipped((sequence_B1 + (logprobs_BT - logprobs_BT.detach())).exp(), advantages_B, config)


def cispo_loss(
    logprobs_BT: torch.Tensor,
    old_BT: torch.Tensor,
    advantages_B: torch.Tensor,
    mask_BT: torch.Tensor,
    config: LossConfig,
) -> TokenLoss:
    """-sg(min(r, cap)) A log pi; MiniMax-M1 (CISPO). No token loses its gradient; `low` and `high` have no part."""
    ratio = (logprobs_BT - old_BT).exp()
    loss = -ratio.detach().clamp(max=config.cap) * advantages_B.unsqueeze(-1) * logprobs_BT
    capped = ratio > config.cap
    return TokenLoss(loss, ratio, torch.zeros_like(capped), capped)


def _clipped(ratio_BT: torch.Tensor, advantages_B: torch.Tensor, config: LossConfig) -> TokenLoss:
    advantage = advantages_B.unsqueeze(-1)
    free = ratio_BT * advantage
    objective = torch.minimum(free, ratio_BT.clamp(1 - config.low, 1 + config.high) * advantage)
    if config.dual_clip is not None:
        objective = torch.where(advantage < 0, torch.maximum(objective, config.dual_clip * advantage), objective)
    low = (ratio_BT < 1 - config.low) & (advantage < 0)
    high = (ratio_BT > 1 + config.high) & (advantage > 0)
    return TokenLoss(-objective, ratio_BT, low, high)


LOSSES: dict[str, Callable[..., TokenLoss]] = {"clip": clip_loss, "gspo": gspo_loss, "cispo": cispo_loss}
AGGREGATIONS = ("token_mean", "prompt_mean", "sequence_mean", "constant")


def token_weights(
    mask_BT: torch.Tensor, prompt_B: torch.Tensor, aggregation: str, max_new_tokens: int
) -> tuple[torch.Tensor, float]:
    """Return weights (B, T) whose product with the token losses sums to the aggregated loss, and the denominator.

    token_mean: all unmasked tokens of the minibatch (DAPO's code); prompt_mean: tokens of one prompt's group,
    then prompts (DAPO eq. 12 literally); sequence_mean: tokens of a row, then rows (GRPO); constant:
    B * max_new_tokens (Dr.GRPO). Rows and prompts without an unmasked token do not count in a mean. `prompt_B`
    numbers the prompt of each row. The denominator is in tokens (rows or prompts for the nested means).
    """
    mask = mask_BT.float()
    lengths_B = mask.sum(-1)
    if aggregation == "token_mean":
        denominator = lengths_B.sum().clamp(min=1)
        weights = mask / denominator
    elif aggregation == "constant":
        denominator = torch.tensor(float(mask.shape[0] * max_new_tokens))
        weights = mask / denominator
    elif aggregation == "sequence_mean":
        denominator = (lengths_B > 0).sum().clamp(min=1)
        weights = mask / lengths_B.clamp(min=1).unsqueeze(-1) / denominator
    else:
        per_prompt = torch.zeros(int(prompt_B.max()) + 1, device=mask.device).index_add_(0, prompt_B, lengths_B)
        denominator = (per_prompt > 0).sum().clamp(min=1)
        weights = mask / per_prompt[prompt_B].clamp(min=1).unsqueeze(-1) / denominator
    return weights, float(denominator)

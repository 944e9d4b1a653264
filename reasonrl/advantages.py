"""Group-relative advantages: pure functions from rewards in parts (P, G, J) to advantages (P, G).

Every estimator uses the sample standard deviation (n-1), statistics over valid (finite) rows only, and gives
exactly 0 to groups without spread and to invalid rows. eps is 1e-4: at 1e-6 and below the fp32 rounding of nearly
equal rewards becomes an advantage.
"""

from __future__ import annotations

from dataclasses import dataclass

from reasonrl.data import is_flat
from reasonrl.lazy import torch


@dataclass
class AdvantageConfig:
    """How rewards become advantages."""

    kind: str = "grpo"  # grpo, dr_grpo, rloo, batch_std, gdpo
    eps: float = 1e-4
    batch_norm: bool = True  # gdpo only: z-score over the batch after the weighted sum (GDPO eq. 8)


def _mean(values: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    return (values * valid).sum(-1, keepdim=True) / valid.sum(-1, keepdim=True).clamp(min=1)


def _std(values: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Sample standard deviation over valid entries of the last axis, kept as (..., 1)."""
    centred = (values - _mean(values, valid)) * valid
    return (centred.square().sum(-1, keepdim=True) / (valid.sum(-1, keepdim=True) - 1).clamp(min=1)).sqrt()


def grpo(total_PG: torch.Tensor, valid_PG: torch.Tensor, eps: float = 1e-4) -> torch.Tensor:
    """(r - group mean) / (group std + eps); GRPO (DeepSeekMath eq. 3). 1,0,0,0 gives +1.5 and -0.5."""
    return _divide(dr_grpo(total_PG, valid_PG), _std(total_PG, valid_PG) + eps)


def dr_grpo(total_PG: torch.Tensor, valid_PG: torch.Tensor, eps: float = 0.0) -> torch.Tensor:
    """r - group mean; Dr.GRPO. 1,0,0,0 gives +0.75 and -0.25. Rounding of equal rewards is cut to exactly 0."""
    flat_P1 = is_flat(torch.where(valid_PG, total_PG, torch.nan)).unsqueeze(-1)
    return torch.where(valid_PG & ~flat_P1, total_PG - _mean(total_PG, valid_PG), 0.0)


def _divide(centred: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """0 stays 0, also over a std of 0."""
    return torch.where(centred == 0, 0.0, centred / scale)


def rloo(total_PG: torch.Tensor, valid_PG: torch.Tensor, eps: float = 0.0) -> torch.Tensor:
    """r - mean of the other rows of the group; RLOO. 1,0,0,0 gives +1 and -1/3."""
    count = valid_PG.sum(-1, keepdim=True)
    return dr_grpo(total_PG, valid_PG) * count / (count - 1).clamp(min=1)


def batch_std(total_PG: torch.Tensor, valid_PG: torch.Tensor, eps: float = 1e-4) -> torch.Tensor:
    """(r - group mean) / (std over the batch + eps); Lite-PPO (arXiv 2508.08221)."""
    return _divide(dr_grpo(total_PG, valid_PG), _std(total_PG.flatten(), valid_PG.flatten()) + eps)


def gdpo(
    parts_PGJ: torch.Tensor,
    weights_J: torch.Tensor,
    valid_PG: torch.Tensor,
    eps: float = 1e-4,
    batch_norm: bool = True,
) -> torch.Tensor:
    """Sum of weighted per-part group z-scores, then a z-score over the batch; GDPO eq. 4-8.

    The weights multiply z-scores, not rewards. Parts (0,0) and (1,1) give -+1.4142 before the batch step.
    """
    per_part = [grpo(parts_PGJ[..., j], valid_PG, eps) for j in range(parts_PGJ.shape[-1])]
    summed = (torch.stack(per_part, -1) * weights_J).sum(-1)
    if not batch_norm:
        return summed
    flat, valid = summed.flatten(), valid_PG.flatten()
    return _divide(flat - _mean(flat, valid), _std(flat, valid) + eps).view_as(summed) * valid_PG


ESTIMATORS = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo, "batch_std": batch_std}
KINDS = (*ESTIMATORS, "gdpo")


def compute_advantages(
    config: AdvantageConfig, parts_PGJ: torch.Tensor, weights_J: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return advantages (P, G), flat groups (P,) bool and valid rows (P, G) bool.

    A row is valid when all its parts are finite. A group is flat when every part's raw spread is below 1e-6 or fewer
    than 2 rows are valid; it gets exactly 0. The batch step of GDPO would move flat groups off 0, so zeroing comes
    last.
    """
    valid_PG = parts_PGJ.isfinite().all(-1)
    masked = torch.where(valid_PG.unsqueeze(-1), parts_PGJ, torch.nan)
    flat_P = torch.stack([is_flat(masked[..., j]) for j in range(parts_PGJ.shape[-1])]).all(0)
    filled = masked.nan_to_num(nan=0.0)
    if config.kind == "gdpo":
        advantages = gdpo(filled, weights_J, valid_PG, config.eps, config.batch_norm)
    else:
        advantages = ESTIMATORS[config.kind]((filled * weights_J).sum(-1), valid_PG, config.eps)
    advantages = torch.where(valid_PG & ~flat_P.unsqueeze(-1), advantages, 0.0)
    return advantages, flat_P, valid_PG

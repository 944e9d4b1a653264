"""What happens to completions that the token limit cut: filtering and the soft punishment."""

from __future__ import annotations

from dataclasses import dataclass

from reasonrl.lazy import torch


@dataclass
class OverlongConfig:
    """Treatment of long completions; `none` leaves a cut completion as the wrong answer it usually is."""

    kind: str = "none"  # none, filter (loss mask 0 for truncated rows), soft (DAPO's length penalty)
    cache_tokens: int = 20  # soft: length of the zone before the limit in which the penalty grows, tokens


KINDS = ("none", "filter", "soft")


def soft_overlong_penalty(lengths: torch.Tensor, max_tokens: int, cache_tokens: int) -> torch.Tensor:
    """Return DAPO's soft overlong punishment (eq. 13), from 0 down to -1; lengths in tokens.

    0 up to max - cache, then ((max - cache) - L) / cache, -1 beyond max. L = 90 of 100 with cache 20 gives -0.5.
    """
    start = max_tokens - cache_tokens
    return ((start - lengths.float()) / cache_tokens).clamp(-1.0, 0.0)


def keep_rows(config: OverlongConfig, truncated_B: torch.Tensor) -> torch.Tensor:
    """Return which rows take part in the loss; a filtered row keeps its place in the group statistics."""
    return ~truncated_B if config.kind == "filter" else torch.ones_like(truncated_B)

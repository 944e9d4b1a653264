"""Records that travel through the training loop.

Shape legend, used as suffixes of names everywhere: P problems, G rollouts per problem, B = P * G rows,
L prompt tokens (left-padded), T completion tokens (right-padded), V vocabulary, J reward parts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from reasonrl.lazy import torch

FINISH_REASONS = ("stop", "length", "error")


@dataclass(frozen=True)
class Problem:
    """One question with its gold answer.

    `id` is stable between runs; `domain` selects the KL coefficient and the per-domain metrics; `meta`
    carries whatever the task's own scorer needs.
    """

    id: str
    prompt: str
    gold: str
    domain: str = "default"
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """What a verifier says of one completion: 1.0 right or 0.0 wrong (or between), and why."""

    value: float
    reason: str = "wrong"


@dataclass
class Completions:
    """What the sampler produced, row by row; tensors end at the longest completion.

    ids_BT, mask_BT (1 up to and including the first EOS), logprobs_BT (nats, of the sampling distribution),
    entropy_BT (nats, of the untempered distribution), temperature_BT, finish: one of FINISH_REASONS per row.
    kept: per row, how many tokens the top-p / top-k filter left in at each position (length,) and which, one position
    after the other (int32); None where no filter was used.
    """

    ids_BT: torch.Tensor
    mask_BT: torch.Tensor
    logprobs_BT: torch.Tensor
    entropy_BT: torch.Tensor
    temperature_BT: torch.Tensor
    finish: list[str]
    kept: list[tuple[torch.Tensor, torch.Tensor]] | None = None

    @property
    def lengths_B(self) -> torch.Tensor:
        """Completion lengths in tokens, EOS included."""
        return self.mask_BT.sum(-1)


@dataclass
class Rollouts:
    """One batch of P problems times G completions, with rewards kept in parts.

    `reward_parts` maps a part's name to a (P, G) tensor (NaN = could not be scored); `correct_PG` is the
    verifier's value before weights. Advantages are a field of the training batch, never written over rewards.
    """

    problems: list[Problem]
    prompts: list[list[int]]
    completions: Completions
    texts: list[str]
    reward_parts: dict[str, torch.Tensor]
    correct_PG: torch.Tensor
    reasons: list[str]

    @property
    def num_problems(self) -> int:
        """P."""
        return len(self.problems)

    @property
    def group_size(self) -> int:
        """G."""
        return self.correct_PG.shape[1]

    @property
    def truncated_B(self) -> torch.Tensor:
        """True where the token limit ended the row; taken from the finish reason, never from the length."""
        return torch.tensor([reason == "length" for reason in self.completions.finish])


@dataclass
class Summary:
    """How a run ended: `status` is finished, stopped, paused or failed; metrics are the last ones seen."""

    key: str
    status: str
    step: int
    reason: dict[str, Any] | str | None
    metrics: dict[str, float]
    run_dir: str

"""Sampling completions from the policy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class SamplingConfig:
    """How completions are drawn."""

    temperature: float = 1.0
    temperature_high: float | None = None  # used where the untempered entropy is above the threshold
    entropy_threshold: float | None = None  # nats
    top_p: float = 1.0  # below 1 only with replay_filter
    top_k: int = 0  # above 0 only with replay_filter
    replay_filter: bool = False  # store the filter of every token and apply it again in the log-probs
    max_new_tokens: int = 28
    group_size: int = 8  # G, completions per problem

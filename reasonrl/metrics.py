"""What is measured at every rollout step: one table of names, and the arithmetic of means that carry counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from reasonrl.lazy import torch


class Metric(NamedTuple):
    """Meaning, unit, and which direction is better (up, down, or - where neither is)."""

    meaning: str
    unit: str
    better: str


METRICS: dict[str, Metric] = {
    # advantages and groups
    "advantage/mean": Metric("mean advantage over valid rows", "1", "-"),
    "advantage/std": Metric("std of advantages over valid rows (0.94 at G=8 when no group is flat)", "1", "-"),
    "groups/flat": Metric("share of generated groups with equal correctness in all rows", "share", "down"),
    "groups/all_right": Metric("share of generated groups that are all right", "share", "-"),
    "groups/all_wrong": Metric("share of generated groups that are all wrong", "share", "down"),
    # entropy, of the untempered policy that sampled, valid tokens
    "entropy/mean": Metric("mean policy entropy", "nats/token", "-"),
    "entropy/std": Metric("spread of the entropy over tokens", "nats/token", "-"),
    "entropy/min": Metric("smallest token entropy", "nats/token", "-"),
    "entropy/max": Metric("largest token entropy", "nats/token", "-"),
    "entropy/low_share": Metric("share of tokens below 0.1 nat", "share", "-"),
    "entropy/cov": Metric("cov(log pi, A) over tokens (Cui et al.)", "nats", "-"),
    "entropy/predicted_change": Metric("-lr * cov * updates of the step before, to set beside it", "nats/token", "-"),
    "entropy/measured_change": Metric("entropy now minus entropy at the step before", "nats/token", "-"),
    "entropy/bonus_coef": Metric("entropy bonus coefficient in use", "1", "-"),
    # policy shift
    "shift/kl_old": Metric("k3(old || new) over the updates of the step", "nats/token", "down"),
    "shift/ratio_mean": Metric("mean ratio pi/pi_old (1 in expectation for any two policies)", "1", "-"),
    "shift/ratio_q01": Metric("1 % quantile of the ratio", "1", "-"),
    "shift/ratio_q50": Metric("median ratio", "1", "-"),
    "shift/ratio_q99": Metric("99 % quantile of the ratio", "1", "-"),
    "shift/first_ratio_error": Metric("mean |log ratio| on the first minibatch after generation", "nats/token", "down"),
    "clip/fraction": Metric("share of tokens whose clipped branch is active", "share", "-"),
    "clip/low": Metric("share of tokens clipped at the lower bound (A<0)", "share", "-"),
    "clip/high": Metric("share of tokens clipped at the upper bound (A>0)", "share", "-"),
    # KL to the reference
    "kl/ref": Metric("k3(policy || reference) at generation", "nats/token", "down"),
    # rewards
    "reward/total": Metric("mean weighted reward", "1", "up"),
    "reward/std": Metric("std within a group, mean over groups", "1", "-"),
    "reward/correctness": Metric("mean of the correctness part", "1", "up"),
    "reward/format": Metric("share of completions in the wanted form", "share", "up"),
    "reward/repetition": Metric("minus the repeated share of n-grams", "share", "up"),
    "reward/overlong_soft": Metric("mean soft overlong punishment", "1", "up"),
    # length
    "length/mean": Metric("mean completion length", "tokens", "-"),
    "length/min": Metric("shortest completion", "tokens", "-"),
    "length/max": Metric("longest completion", "tokens", "-"),
    "length/truncated": Metric("share of completions ended by the token limit", "share", "down"),
    "text/repetition": Metric("share of repeated n-grams", "share", "down"),
    # loss and optimizer
    "loss/total": Metric("mean loss over the updates of the step (no sign of progress)", "1", "-"),
    "loss/policy": Metric("policy part of the loss", "1", "-"),
    "loss/kl": Metric("KL part of the loss", "1", "-"),
    "loss/bonus": Metric("entropy bonus part of the loss", "1", "-"),
    "loss/denominator": Metric("mean denominator of a minibatch", "tokens or rows", "-"),
    "optim/grad_norm": Metric("gradient norm before clipping, mean over updates", "1", "-"),
    "optim/lr": Metric("learning rate", "1", "-"),
    "optim/skipped": Metric("updates skipped for non-finite gradients or empty minibatches", "count", "down"),
    "optim/updates": Metric("optimizer updates made in the step", "count", "-"),
    "optim/gradient_steps": Metric("optimizer updates since the start", "count", "-"),
    # data
    "data/rounds": Metric("generation rounds of the step", "count", "down"),
    "data/generated_tokens": Metric("completion tokens generated in the step", "tokens", "down"),
    "data/kept": Metric("groups trained on", "count", "up"),
    "data/dropped": Metric("groups generated and not trained on (flat, or surplus)", "count", "down"),
    "data/short": Metric("groups missing from the batch after the last round", "count", "down"),
    "data/invalid": Metric("rows without a usable reward", "count", "down"),
    "data/gated": Metric("problems held back by the difficulty gate since the start", "count", "-"),
    # time
    "time/step": Metric("whole step", "s", "down"),
    "time/generate": Metric("sampling", "s", "down"),
    "time/train": Metric("forward, backward and updates", "s", "down"),
    "time/eval": Metric("held-out evaluation", "s", "down"),
    "speed/tokens_per_s": Metric("generated tokens per second of the step", "tokens/s", "up"),
    # held out
    "eval/accuracy": Metric("held-out mean@k", "share", "up"),
    "eval/pass_at_k": Metric("held-out problems with at least one right sample", "share", "up"),
    "eval/majority": Metric("held-out problems whose most frequent answer is right", "share", "up"),
    "eval/distinct": Metric("different right completions per held-out problem", "count", "up"),
    "eval/length": Metric("mean held-out completion length", "tokens", "-"),
    "eval/truncated": Metric("held-out completions ended by the token limit", "share", "down"),
}

TIMINGS = ("time/", "speed/")


@dataclass
class Means:
    """Sums and counts over micro-batches and updates; divided once, at the end."""

    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, value: float, count: float = 1.0) -> None:
        """Add a sum over `count` items."""
        self.sums[name] = self.sums.get(name, 0.0) + value
        self.counts[name] = self.counts.get(name, 0.0) + count

    def result(self) -> dict[str, float]:
        """Return the means; a name without items is left out."""
        return {name: self.sums[name] / self.counts[name] for name in self.sums if self.counts[name]}

    def join(self, other: Means) -> None:
        """Add the sums and counts of another process."""
        for name, value in other.sums.items():
            self.add(name, value, other.counts[name])


def quantiles(values: torch.Tensor, points: tuple[float, ...] = (0.01, 0.5, 0.99)) -> list[float]:
    """Return quantiles by sorting; torch.quantile refuses more than 2**24 values."""
    ordered = values.flatten().sort().values
    return [float(ordered[min(int(point * len(ordered)), len(ordered) - 1)]) for point in points]

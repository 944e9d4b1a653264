"""One training run. The loop reads like the paper: sample, generate, reward, filter, advantage, loss, step, log,
alert; every line is one named call. What a run needs to continue is in `run.py`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from reasonrl import distributed, kl
from reasonrl.advantages import compute_advantages
from reasonrl.config import Config, validate
from reasonrl.data import Collected, collect
from reasonrl.entropy import covariance_terms, entropy_stats
from reasonrl.errors import ConfigError
from reasonrl.events import Event
from reasonrl.lazy import torch
from reasonrl.logprobs import completion_logprobs
from reasonrl.optim import learning_rate
from reasonrl.overlong import keep_rows
from reasonrl.rewards import format_check, repetition_share, reward_parts, rows_of
from reasonrl.rollout.batch import join, odd_lengths, sample_groups
from reasonrl.run import Run, open_run
from reasonrl.types import Problem, Rollouts, Summary
from reasonrl.update import TrainBatch, UpdateSettings, loss_mask, update

REFERENCE_ROWS = 64  # rows per forward pass of the reference model


def train(config: Config, run_dir: Path, on_event: Callable[[Event], str | None] = lambda event: None) -> Summary:
    """Train one policy and return how it ended; every event goes to `run_dir/events.jsonl` and then to `on_event`.

    `on_event` may answer "stop" or "pause", which act within the step. A run_dir with checkpoints is continued
    and repeats the same rows bit for bit. Raises ConfigError, DataError, ModelError, TrainingError.
    """
    mistakes = validate(config)
    if mistakes:
        raise ConfigError(mistakes)
    if config.trainer == "trl":
        from reasonrl.trl_trainer import train_with_trl

        return train_with_trl(config, Path(run_dir), on_event)
    with distributed.process_group(), open_run(config, Path(run_dir), on_event) as run:
        run.begin()
        while run.goes_on():
            train_step(run, run.step + 1)
        return run.finish()


def train_step(run: Run, step: int) -> None:
    """One rollout step: problems, completions, rewards, advantages, updates, record."""
    config = run.config
    clock = _Clock()
    lr = learning_rate(config.optim, step, config.steps)

    def generate(problems: list[Problem], offset: int) -> list:
        own = distributed.share(len(problems))
        keys = (config.seed, step, offset + own.start)
        groups = sample_groups(run.policy, run.task, problems[own], config.sampling, keys, config.reward.random)
        return distributed.gather(groups)

    collected = collect(config.data, run.problems, generate, step, run.starved)
    clock.mark("time/generate")
    metrics = _cost_metrics(run, collected)
    run.starved = 0 if collected.groups else run.starved + 1
    if collected.groups:
        rollouts = join(collected.groups, run.policy.pad_id)
        run.warn_once(odd_lengths(rollouts))
        ref_BT = reference_logprobs(run, rollouts)
        batch, reward_metrics = score(run, rollouts, ref_BT, step)
        entropy = entropy_stats(rollouts.completions.entropy_BT[rollouts.completions.mask_BT.bool()])
        bonus = _bonus(run, entropy["entropy/mean"])
        with run.learner() as policy:
            updates = update(policy, run.optimizer, batch, _settings(config, lr, bonus, step))
        metrics |= reward_metrics | entropy | rollout_metrics(rollouts, config.reward.ngram) | updates
        metrics |= _entropy_change(run, batch, entropy["entropy/mean"], lr * updates["optim/updates"], bonus)
        run.gradient_steps += int(updates["optim/updates"])
    clock.mark("time/train")
    metrics |= {"optim/lr": lr, "optim/gradient_steps": float(run.gradient_steps), **clock.times()}
    metrics["speed/tokens_per_s"] = metrics["data/generated_tokens"] / max(metrics["time/step"], 1e-9)
    run.record_step(metrics)


def reference_logprobs(run: Run, rollouts: Rollouts) -> torch.Tensor | None:
    """Log-probs (B, T) of the sampled tokens under the frozen reference, or None without one."""
    if run.reference is None:
        return None
    done = rollouts.completions
    rows = torch.arange(len(done.finish))
    out = torch.zeros_like(done.logprobs_BT)
    own = distributed.share(len(rows))
    with torch.no_grad(), run.reference.active() as reference:
        for part in rows[own].split(REFERENCE_ROWS):
            owner = part // rollouts.group_size
            logprobs, _ = completion_logprobs(reference, rollouts.prompts, owner, done, part)
            out[part, : logprobs.shape[1]] = logprobs.cpu()
    return torch.cat(distributed.gather([out[own]]))


def score(run: Run, rollouts: Rollouts, ref_BT: torch.Tensor | None, step: int) -> tuple[TrainBatch, dict[str, float]]:
    """Rewards in parts, advantages, and the masks and coefficients of the loss."""
    config, done, size = run.config, rollouts.completions, rollouts.group_size
    mask = done.mask_BT.float()
    limit, format_ok = config.sampling.max_new_tokens, format_check(run.policy, run.task)
    # a user's function need not give the same answer twice, so one process asks for all
    parts = distributed.from_main(
        lambda: reward_parts(config.reward, config.overlong, rollouts, limit, format_ok, run.scorers)
    )
    names = list(parts)
    weights = [run.weights.weight(name, step) for name in names]
    domains = [problem.domain for problem in rollouts.problems for _ in range(size)]
    beta_B = torch.zeros(len(domains))
    if ref_BT is not None and config.kl.kind != "off":
        beta_B = kl.coefficients(config.kl, domains)
        if config.kl.in_reward:
            d_B = (kl.k1(done.logprobs_BT, ref_BT, done.logprobs_BT) * mask).sum(-1)
            parts["kl_penalty"] = -(beta_B * d_B).view(-1, size)
            names, weights, beta_B = [*names, "kl_penalty"], [*weights, 1.0], torch.zeros(len(domains))
    rollouts.reward_parts = parts
    run.weights.update(step, {name: float(part.nanmean()) for name, part in parts.items()})
    parts_PGJ, weights_J = torch.stack([parts[name] for name in names], -1), torch.tensor(weights)
    advantages_PG, flat_P, valid_PG = compute_advantages(config.advantage, parts_PGJ, weights_J)
    keep_B = keep_rows(config.overlong, rollouts.truncated_B) & valid_PG.flatten()
    batch = TrainBatch(
        prompts=rollouts.prompts,
        owner_B=torch.arange(rollouts.num_problems).repeat_interleave(size),
        completions=done,
        advantages_B=advantages_PG.flatten(),
        loss_mask_BT=loss_mask(done, keep_B, config.entropy),
        beta_B=beta_B,
        kl_weight_BT=kl.position_weights(config.kl, done.mask_BT),
        ref_BT=ref_BT,
    )
    metrics = reward_metrics(parts_PGJ, weights_J, names, advantages_PG, valid_PG)
    if ref_BT is not None:
        metrics |= _kl_metrics(done.logprobs_BT, ref_BT, mask, domains)
    return batch, metrics


class _Clock:
    """Seconds between marks, and in all."""

    def __init__(self) -> None:
        self.started = self.last = time.perf_counter()
        self.parts: dict[str, float] = {}

    def mark(self, name: str) -> None:
        now = time.perf_counter()
        self.parts[name], self.last = now - self.last, now

    def times(self) -> dict[str, float]:
        return {**self.parts, "time/step": self.last - self.started}


def _settings(config: Config, lr: float, bonus: float, step: int) -> UpdateSettings:
    optim = config.optim
    return UpdateSettings(
        loss=config.loss,
        kl=config.kl,
        entropy=config.entropy,
        minibatches=optim.minibatches,
        inner_epochs=optim.inner_epochs,
        micro_batch_size=optim.micro_batch_size,
        max_new_tokens=config.sampling.max_new_tokens,
        lr=lr,
        bonus=bonus,
        seed=config.seed,
        step=step,
    )


def _bonus(run: Run, entropy: float) -> float:
    """The entropy bonus coefficient of this step."""
    kind = run.config.entropy.kind
    if kind == "thermostat":
        return run.thermostat.update(entropy)
    return run.config.entropy.coef if kind == "bonus" else 0.0


def _entropy_change(run: Run, batch: TrainBatch, entropy: float, distance: float, bonus: float) -> dict[str, float]:
    """Covariance now, and the change since the step before beside what was predicted then (-lr * updates * cov)."""
    mask = batch.completions.mask_BT.bool()
    advantages = batch.advantages_B.unsqueeze(-1).expand_as(mask)[mask]
    cov = float(covariance_terms(batch.completions.logprobs_BT[mask], advantages).mean())
    metrics = {"entropy/cov": cov}
    if run.entropy is not None:
        metrics["entropy/predicted_change"] = run.predicted_change
        metrics["entropy/measured_change"] = entropy - run.entropy
    if run.config.entropy.kind in ("bonus", "thermostat"):
        metrics["entropy/bonus_coef"] = bonus
    run.entropy, run.predicted_change = entropy, -distance * cov
    return metrics


def _cost_metrics(run: Run, collected: Collected) -> dict[str, float]:
    wanted = run.config.data.prompts_per_step
    return {
        "groups/flat": collected.flat,
        "groups/all_right": collected.all_right,
        "groups/all_wrong": collected.all_wrong,
        "data/rounds": float(collected.rounds),
        "data/generated_tokens": float(collected.generated_tokens),
        "data/kept": float(len(collected.groups)),
        "data/dropped": float(collected.num_groups_seen - len(collected.groups)),
        "data/short": float(wanted - len(collected.groups)),
        "data/gated": float(run.problems.gated),
    }


def rollout_metrics(rollouts: Rollouts, ngram: int) -> dict[str, float]:
    """Lengths, truncation and repetition of a step's completions."""
    done = rollouts.completions
    lengths = done.lengths_B
    repeated = [repetition_share(ids, ngram) for ids in rows_of(done)]
    return {
        "length/mean": float(lengths.float().mean()),
        "length/min": float(lengths.min()),
        "length/max": float(lengths.max()),
        "length/truncated": float(rollouts.truncated_B.float().mean()),
        "text/repetition": sum(repeated) / len(repeated),
    }


def reward_metrics(
    parts_PGJ: torch.Tensor,
    weights_J: torch.Tensor,
    names: list[str],
    advantages_PG: torch.Tensor,
    valid_PG: torch.Tensor,
) -> dict[str, float]:
    total_PG = (parts_PGJ * weights_J).sum(-1)
    usable = advantages_PG[valid_PG]
    within = [row[~row.isnan()].std() for row in total_PG if int((~row.isnan()).sum()) > 1]
    means = {f"reward/{name}": float(parts_PGJ[..., j].nanmean()) for j, name in enumerate(names)}
    metrics = {name: value for name, value in means.items() if math.isfinite(value)}
    metrics["data/invalid"] = float((~valid_PG).sum())
    if usable.numel() > 1:
        metrics["reward/total"] = float(total_PG.nanmean())
        metrics["reward/std"] = float(torch.stack(within).mean()) if within else 0.0
        metrics["advantage/mean"] = float(usable.mean())
        metrics["advantage/std"] = float(usable.std())
    return metrics


@dataclass
class _Domain:
    total: float = 0.0
    tokens: float = 0.0


def _kl_metrics(logprobs: torch.Tensor, ref: torch.Tensor, mask: torch.Tensor, domains: list[str]) -> dict[str, float]:
    per_row = (kl.k3(logprobs, ref, logprobs) * mask).sum(-1).tolist()
    tokens = mask.sum(-1).tolist()
    by_domain: dict[str, _Domain] = {}
    for domain, value, count in zip(domains, per_row, tokens, strict=True):
        entry = by_domain.setdefault(domain, _Domain())
        entry.total, entry.tokens = entry.total + value, entry.tokens + count
    metrics = {"kl/ref": sum(per_row) / max(sum(tokens), 1)}
    if len(by_domain) > 1:
        metrics |= {f"kl/{name}": d.total / max(d.tokens, 1) for name, d in sorted(by_domain.items())}
    return metrics

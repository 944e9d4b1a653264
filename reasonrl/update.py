"""The updates of one rollout step: minibatches of whole prompts, micro-batches that add up exactly."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from reasonrl import distributed
from reasonrl import kl as kl_terms
from reasonrl.entropy import EntropyConfig, clip_cov_mask, covariance_terms, kl_cov_mask, top_entropy_mask
from reasonrl.kl import KlConfig
from reasonrl.lazy import torch
from reasonrl.logprobs import completion_logprobs
from reasonrl.loss import LOSSES, LossConfig, token_weights
from reasonrl.metrics import Means, quantiles
from reasonrl.models.policy import Policy
from reasonrl.optim import Optimizer
from reasonrl.packing import packed_tokens
from reasonrl.randomness import stream
from reasonrl.types import Completions

LENGTH_BUCKETS = 2  # rows are split by length so that short ones are not padded to the longest


@dataclass
class TrainBatch:
    """What the updates of one step need; B = P * G rows, all on the CPU until used.

    loss_mask_BT is 1 where a token takes part in the loss (overlong rows, invalid rows and low-entropy tokens may
    be out); beta_B and kl_weight_BT scale the KL term; ref_BT are reference log-probs or None.
    """

    prompts: list[list[int]]
    owner_B: torch.Tensor
    completions: Completions
    advantages_B: torch.Tensor
    loss_mask_BT: torch.Tensor
    beta_B: torch.Tensor
    kl_weight_BT: torch.Tensor
    ref_BT: torch.Tensor | None = None


@dataclass
class UpdateSettings:
    """The parts of the configuration that the updates read."""

    loss: LossConfig
    kl: KlConfig
    entropy: EntropyConfig
    minibatches: int
    inner_epochs: int
    micro_batch_size: int | None
    max_new_tokens: int
    lr: float
    bonus: float
    seed: int
    step: int


@dataclass
class _Seen:
    """Running sums over the updates of the step."""

    means: Means = field(default_factory=Means)
    ratios: list[torch.Tensor] = field(default_factory=list)
    minibatches: int = 0
    skipped: int = 0  # no token in the loss, or a gradient that is not finite
    updates: int = 0  # minibatches that were run


def loss_mask(completions: Completions, keep_B: torch.Tensor, entropy: EntropyConfig) -> torch.Tensor:
    """Return the tokens (B, T) of kept rows that take part in the loss, as float."""
    mask = completions.mask_BT.bool() & keep_B.unsqueeze(-1)
    if entropy.kind == "top_mask" and bool(mask.any()):
        mask = top_entropy_mask(completions.entropy_BT, mask, entropy.rho, entropy.scope)
    return mask.float()


def update(policy: Policy, optimizer: Optimizer, batch: TrainBatch, settings: UpdateSettings) -> dict[str, float]:
    """Make all updates of one rollout step and return their metrics (`data flow`: PPO with G-grouped minibatches)."""
    seen = _Seen()
    for epoch in range(settings.inner_epochs):
        for groups in _minibatches(len(batch.prompts), settings, epoch):
            rows = torch.isin(batch.owner_B, groups).nonzero().squeeze(-1)
            weights, denominator = token_weights(
                batch.loss_mask_BT[rows], batch.owner_B[rows], settings.loss.aggregation, settings.max_new_tokens
            )
            seen.minibatches += 1
            if not bool(batch.loss_mask_BT[rows].any()):
                seen.skipped += 1
                continue
            seen.means.add("loss/denominator", denominator)
            _accumulate(policy, optimizer, batch, rows, weights, settings, seen)
            if distributed.size() > 1:
                optimizer.accumulate()
                if policy.root is None:  # sharded gradients are summed in backward
                    distributed.sum_gradients(optimizer.masters)
            norm = optimizer.step(settings.lr)
            seen.means.add("optim/grad_norm", norm)
            seen.updates += 1
            seen.skipped += not math.isfinite(norm)
    return _metrics(seen)


def _minibatches(num_prompts: int, settings: UpdateSettings, epoch: int) -> Iterator[torch.Tensor]:
    order = stream("minibatch", settings.seed, settings.step, epoch).permutation(num_prompts)
    yield from torch.from_numpy(order).tensor_split(min(settings.minibatches, num_prompts))


def _accumulate(
    policy: Policy,
    optimizer: Optimizer,
    batch: TrainBatch,
    rows: torch.Tensor,
    weights: torch.Tensor,
    settings: UpdateSettings,
    seen: _Seen,
) -> None:
    """Add up the gradients of this process's rows of one minibatch over its micro-batches.

    Rows that cannot contribute (advantage 0, no KL, no bonus) are left out of forward and backward; the weights
    already hold the whole minibatch's denominator, so this is exact. A flat group keeps its KL and bonus terms.
    """
    cov_cut, cov_penalty = _covariance_masks(batch, rows, settings)
    live = weights.sum(-1) > 0
    if settings.bonus == 0 and cov_penalty is None:
        live &= (batch.advantages_B[rows] != 0) | (batch.beta_B[rows] > 0)
    index = live.nonzero().squeeze(-1)
    index = index[distributed.share(len(index))]
    if distributed.is_main():  # rows left out have no clipped token, but they count
        for name in ("clip/low", "clip/high", "clip/fraction"):
            seen.means.add(name, 0.0, float(batch.loss_mask_BT[rows[~live]].sum()))
    total = 0.0
    lengths = batch.completions.lengths_B[rows[index]]
    packed = packed_tokens(batch.prompts, batch.owner_B[rows[index]].tolist(), lengths.tolist()) <= policy.pack_tokens
    parts = list(_micro_batches(lengths, settings.micro_batch_size, packed))
    idle = 0 if policy.root is None else max(distributed.gather([len(parts)])) - len(parts)
    for number, part in enumerate(parts):
        if number:
            optimizer.accumulate()  # what the pass before left
        chosen = index[part]
        extra = [None if mask is None else mask[chosen] for mask in (cov_cut, cov_penalty)]
        loss = _micro_loss(policy, batch, rows[chosen], weights[chosen], extra, settings, seen)
        loss.backward()
        total += float(loss.detach())
    one = rows[:1]
    for _ in range(idle):  # passes of the other processes, which gather weights and add up gradients together
        logprobs, _ = policy.forward(
            lambda: completion_logprobs(policy, batch.prompts, batch.owner_B[one], batch.completions, one)
        )
        (0.0 * logprobs.sum()).backward()
        optimizer.accumulate()
    seen.means.add("loss/total", total)
    if seen.updates == 0 and seen.ratios:
        errors = torch.cat(seen.ratios).log().abs()
        seen.means.add("shift/first_ratio_error", float(errors.sum()), len(errors))


def _micro_batches(lengths: torch.Tensor, size: int | None, packed: bool) -> Iterator[torch.Tensor]:
    """Yield positions sorted by length, in parts of `size` rows, or in two length buckets when that saves padding.

    `packed` rows have no padding.
    """
    count = len(lengths)
    if count == 0:
        return
    order = lengths.argsort(descending=True, stable=True)
    if size is not None:
        yield from order.split(size)
        return
    longest, middle = int(lengths[order[0]]), int(lengths[order[count // 2]])
    # the second bucket has `middle` tokens a row instead of `longest`; below a fifth it does not pay for the call
    saves = (longest - middle) / (2 * longest) > 0.2
    split = saves and not packed and count >= 2 * LENGTH_BUCKETS
    yield from order.tensor_split(LENGTH_BUCKETS) if split else (order,)


def _covariance_masks(
    batch: TrainBatch, rows: torch.Tensor, settings: UpdateSettings
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if settings.entropy.kind not in ("clip_cov", "kl_cov"):
        return None, None
    mask = batch.loss_mask_BT[rows].bool()
    advantages = batch.advantages_B[rows].unsqueeze(-1).expand_as(mask)
    cov = covariance_terms(batch.completions.logprobs_BT[rows][mask], advantages[mask])
    whole = torch.zeros_like(mask)
    if settings.entropy.kind == "kl_cov":
        whole[mask] = kl_cov_mask(cov, settings.entropy)
        return None, whole
    seed = int(stream("clip_cov", settings.seed, settings.step, int(rows[0])).integers(2**31))
    whole[mask] = clip_cov_mask(cov, settings.entropy, torch.Generator().manual_seed(seed))
    return whole, None


def _micro_loss(
    policy: Policy,
    batch: TrainBatch,
    rows: torch.Tensor,
    weights_BT: torch.Tensor,
    covariance: list[torch.Tensor | None],
    settings: UpdateSettings,
    seen: _Seen,
) -> torch.Tensor:
    """Return the loss of some rows, already divided by the minibatch's denominator, and note its metrics."""
    done = batch.completions
    logprobs, entropy = policy.forward(
        lambda: completion_logprobs(
            policy, batch.prompts, batch.owner_B[rows], done, rows, with_entropy=settings.bonus > 0
        )
    )
    width, device = logprobs.shape[1], logprobs.device

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:, :width].to(device)

    old, mask = cut(done.logprobs_BT[rows]), cut(batch.loss_mask_BT[rows])
    weights = cut(weights_BT)
    advantages = batch.advantages_B[rows].to(device)
    token = LOSSES[settings.loss.kind](logprobs, old, advantages, cut(done.mask_BT[rows]), settings.loss)
    cov_cut, cov_penalty = covariance
    per_token = token.loss_BT
    if cov_cut is not None:
        per_token = torch.where(cut(cov_cut), per_token.detach(), per_token)
    policy_loss = (per_token * weights).sum()
    loss = policy_loss
    if cov_penalty is not None:
        loss = loss + settings.entropy.cov_coef * ((logprobs - old).abs() * cut(cov_penalty) * weights).sum()
    if batch.ref_BT is not None and settings.kl.kind != "off" and not settings.kl.in_reward:
        term = kl_terms.ESTIMATORS[settings.kl.kind](logprobs, cut(batch.ref_BT[rows]), old)
        scale = batch.beta_B[rows].to(device).unsqueeze(-1) * cut(batch.kl_weight_BT[rows])
        kl_loss = (term * scale * weights).sum()
        seen.means.add("loss/kl", float(kl_loss.detach()))
        loss = loss + kl_loss
    if entropy is not None:
        bonus = settings.bonus * (entropy * weights).sum()
        seen.means.add("loss/bonus", -float(bonus.detach()))
        loss = loss - bonus
    with torch.no_grad():
        _observe(seen, token, logprobs - old, mask.bool(), float(policy_loss))
    return loss


def _observe(seen: _Seen, token, log_ratio_BT, mask_BT: torch.Tensor, policy_loss: float) -> None:  # noqa: ANN001
    count = float(mask_BT.sum())
    log_ratio = log_ratio_BT[mask_BT]
    ratio = log_ratio.exp()
    means = seen.means
    means.add("loss/policy", policy_loss)
    means.add("shift/kl_old", float((ratio - 1 - log_ratio).sum()), count)
    means.add("shift/ratio_mean", float(ratio.sum()), count)
    low, high = float(token.clipped_low_BT[mask_BT].sum()), float(token.clipped_high_BT[mask_BT].sum())
    means.add("clip/low", low, count)
    means.add("clip/high", high, count)
    means.add("clip/fraction", low + high, count)
    seen.ratios.append(ratio.cpu())


def _metrics(seen: _Seen) -> dict[str, float]:
    means, ratios = Means(), []
    for other in distributed.gather([(seen.means, seen.ratios)]):
        means.join(other[0])
        ratios += other[1]
    metrics = means.result()
    # loss parts were added per micro-batch and process but belong to whole updates
    for name in ("loss/total", "loss/policy", "loss/kl", "loss/bonus"):
        if name in metrics:
            metrics[name] = means.sums[name] / max(seen.updates, 1)
    if ratios:
        q01, q50, q99 = quantiles(torch.cat(ratios))
        metrics.update({"shift/ratio_q01": q01, "shift/ratio_q50": q50, "shift/ratio_q99": q99})
    metrics["optim/skipped"] = float(seen.skipped)
    metrics["optim/updates"] = float(seen.minibatches - seen.skipped)
    return metrics

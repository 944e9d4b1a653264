"""The updates of a step: what is left out, what is divided by what, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from batches import GROUP, LIMIT, PROMPTS, Onlooker, make_batch, make_settings

from reasonrl.entropy import EntropyConfig
from reasonrl.kl import KlConfig
from reasonrl.logprobs import completion_logprobs
from reasonrl.loss import AGGREGATIONS, LossConfig
from reasonrl.optim import OptimConfig, Optimizer
from reasonrl.update import loss_mask, update

NEITHER = EntropyConfig()


def gradients(policy, batch, settings):
    """The gradient of every update, and the metrics."""
    onlooker = Onlooker(policy)
    metrics = update(policy, onlooker, batch, settings)
    return onlooker.gradients, metrics


def slow_gradient(policy, batch, settings, weights):
    """All rows in one forward, nothing skipped, the clip loss and its extra terms written out."""
    rows = torch.arange(len(batch.owner_B))
    logp, entropy = completion_logprobs(policy, batch.prompts, batch.owner_B, batch.completions, rows, True)
    ratio = (logp - batch.completions.logprobs_BT).exp()
    advantage = batch.advantages_B.unsqueeze(-1)
    low, high = settings.loss.low, settings.loss.high
    loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    if batch.ref_BT is not None:
        d = logp - batch.ref_BT
        loss = loss + batch.beta_B.unsqueeze(-1) * batch.kl_weight_BT * ((-d).exp() - 1 + d)
    loss = loss - settings.bonus * entropy
    policy.model.zero_grad()
    (loss * weights).sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in policy.trainable()])
    policy.model.zero_grad()
    return gradient


def near(one, other, tolerance=1e-5):
    return (one - other).norm() <= tolerance * other.norm()


def weights_by_hand(batch, aggregation):
    """One number per row, straight from the definitions; rows are grouped 4 by 4."""
    lengths = batch.loss_mask_BT.sum(-1).tolist()
    groups = [sum(lengths[start : start + GROUP]) for start in range(0, len(lengths), GROUP)]
    per_row = {
        "token_mean": lambda row: 1 / sum(lengths),
        "sequence_mean": lambda row: 1 / lengths[row] / sum(n > 0 for n in lengths),
        "prompt_mean": lambda row: 1 / groups[row // GROUP] / sum(n > 0 for n in groups),
        "constant": lambda row: 1 / (len(lengths) * LIMIT),
    }[aggregation]
    values = torch.tensor([per_row(row) if lengths[row] else 0.0 for row in range(len(lengths))])
    return batch.loss_mask_BT * values.unsqueeze(-1)


def with_reference(batch, beta=0.3):
    """The batch with a reference policy 0.4 nats away and a KL coefficient on every row."""
    rows = len(batch.owner_B)
    return replace(batch, ref_BT=batch.completions.logprobs_BT - 0.4, beta_B=torch.full((rows,), beta))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_every_aggregation_gives_the_gradient_of_its_definition(policy, aggregation):
    mask = make_batch(policy).loss_mask_BT
    mask[2] = 0.0  # a filtered row
    mask[GROUP : 2 * GROUP] = 0.0  # and a whole prompt
    batch = make_batch(policy, loss_mask_BT=mask)
    settings = make_settings(loss=LossConfig(aggregation=aggregation))
    found, metrics = gradients(policy, batch, settings)
    assert near(found[0], slow_gradient(policy, batch, settings, weights_by_hand(batch, aggregation)))
    tokens, rows = float(mask.sum()), float((mask.sum(-1) > 0).sum())
    expected = {"token_mean": tokens, "sequence_mean": rows, "prompt_mean": 3.0, "constant": 16.0 * LIMIT}
    assert metrics["loss/denominator"] == expected[aggregation]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("rows", [1, 4, 7])
def test_micro_batches_add_up_to_the_gradient_of_the_minibatch(policy, aggregation, rows):
    batch = with_reference(make_batch(policy))
    settings = make_settings(loss=LossConfig(aggregation=aggregation), kl=KlConfig(kind="k3"), bonus=0.01)
    whole, one = gradients(policy, batch, settings)
    parts, many = gradients(policy, batch, replace(settings, micro_batch_size=rows))
    assert near(parts[0], whole[0])
    assert {name: many[name] for name in one} == pytest.approx(one, rel=1e-4, abs=1e-6)


def test_rows_without_advantage_are_left_out_exactly(policy):
    batch = make_batch(policy)
    batch.advantages_B[:GROUP] = 0.0  # a flat group
    batch.advantages_B[9] = 0.0
    settings = make_settings()
    rows_seen = []
    inner = policy.body

    def spy(**kwargs):
        rows_seen.append(kwargs["input_ids"].shape[0])
        return inner(**kwargs)

    found, metrics = gradients(replace(policy, body=spy, pack_tokens=0), batch, settings)
    assert max(rows_seen) == PROMPTS * GROUP - GROUP - 1
    assert near(found[0], slow_gradient(policy, batch, settings, weights_by_hand(batch, "token_mean")))
    assert metrics["loss/denominator"] == float(batch.loss_mask_BT.sum())


def test_a_flat_group_keeps_its_kl_and_bonus_terms(policy):
    batch = replace(with_reference(make_batch(policy)), advantages_B=torch.zeros(PROMPTS * GROUP))
    settings = make_settings(kl=KlConfig(kind="k3"), bonus=0.02)
    found, metrics = gradients(policy, batch, settings)
    assert found[0].norm() > 1e-3
    assert near(found[0], slow_gradient(policy, batch, settings, weights_by_hand(batch, "token_mean")))
    assert metrics["loss/policy"] == 0.0
    assert metrics["loss/kl"] > 0
    assert metrics["loss/total"] == pytest.approx(metrics["loss/kl"] + metrics["loss/bonus"], rel=1e-5)


def test_kl_pulls_only_where_its_domain_has_a_coefficient(policy):
    batch = replace(with_reference(make_batch(policy)), advantages_B=torch.zeros(PROMPTS * GROUP))
    batch.beta_B[GROUP:] = 0.0
    settings = make_settings(kl=KlConfig(kind="k3"))
    found, _ = gradients(policy, batch, settings)
    assert near(found[0], slow_gradient(policy, batch, settings, weights_by_hand(batch, "token_mean")))
    batch.beta_B[:] = 0.0
    assert gradients(policy, batch, settings)[0][0].norm() == 0


def test_kl_in_the_reward_adds_nothing_to_the_loss(policy):
    batch = with_reference(make_batch(policy))
    settings = make_settings(kl=KlConfig(kind="k1", coef=0.3, in_reward=True))
    plain = gradients(policy, make_batch(policy), make_settings())[0][0]
    assert near(gradients(policy, batch, settings)[0][0], plain)


def test_entropy_bonus_points_towards_more_entropy(policy):
    batch = replace(make_batch(policy), advantages_B=torch.zeros(PROMPTS * GROUP))
    rows = torch.arange(PROMPTS * GROUP)

    def entropy():
        with torch.no_grad():
            done = batch.completions
            return completion_logprobs(policy, batch.prompts, batch.owner_B, done, rows, True)[1].sum().item()

    before = entropy()
    update(policy, Optimizer(policy.trainable(), OptimConfig()), batch, make_settings(bonus=0.1, lr=1e-3))
    assert entropy() > before


def test_a_minibatch_without_a_token_in_the_loss_is_skipped_and_counted(policy):
    batch = make_batch(policy)
    batch.loss_mask_BT[: 2 * GROUP] = 0.0
    found, metrics = gradients(policy, batch, make_settings(minibatches=4))
    assert len(found) == 2
    assert (metrics["optim/skipped"], metrics["optim/updates"]) == (2.0, 2.0)
    batch.loss_mask_BT[:] = 0.0
    found, metrics = gradients(policy, batch, make_settings(minibatches=4))
    assert found == []
    assert (metrics["optim/skipped"], metrics["optim/updates"]) == (4.0, 0.0)
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("micro", [None, 1])
def test_one_nan_leaves_weights_and_moments_untouched_and_training_goes_on(policy, micro):
    batch = make_batch(policy)
    optimizer = Optimizer(policy.trainable(), OptimConfig())
    update(policy, optimizer, batch, make_settings())  # moments exist
    before = [p.detach().clone() for p in policy.trainable()]
    moments = {name: value.clone() for name, value in optimizer.tensors().items()}
    sick = replace(batch, advantages_B=batch.advantages_B.clone())
    sick.advantages_B[5] = math.nan
    metrics = update(policy, optimizer, sick, make_settings(micro_batch_size=micro))
    assert (metrics["optim/skipped"], metrics["optim/updates"]) == (1.0, 0.0)
    assert not math.isfinite(metrics["optim/grad_norm"])  # told, so that an alert can act
    assert all(torch.equal(one, p) for one, p in zip(before, policy.trainable(), strict=True))
    assert all(torch.equal(value, optimizer.tensors()[name]) for name, value in moments.items())
    assert update(policy, optimizer, batch, make_settings())["optim/updates"] == 1.0
    assert not all(torch.equal(one, p) for one, p in zip(before, policy.trainable(), strict=True))


def test_minibatches_are_whole_prompts_each_once_per_epoch(policy):
    batch = make_batch(policy)
    seen = []
    inner = policy.body

    def spy(**kwargs):
        seen.append(kwargs["input_ids"].shape[0])
        return inner(**kwargs)

    settings = make_settings(minibatches=4, inner_epochs=3, micro_batch_size=GROUP)
    found, metrics = gradients(replace(policy, body=spy, pack_tokens=0), batch, settings)
    assert len(found) == 12
    assert set(seen) == {1, GROUP}  # a prompt, then its group
    assert metrics["optim/updates"] == 12.0
    # no weight changed, so an epoch is the same four gradients in another order
    norms = [sorted(round(float(g.norm()), 4) for g in found[i : i + 4]) for i in (0, 4, 8)]
    assert norms[0] == norms[1] == norms[2]
    orders = [[round(float(g.norm()), 4) for g in found[i : i + 4]] for i in (0, 4, 8)]
    assert len({tuple(order) for order in orders}) > 1


def test_more_minibatches_than_prompts_become_one_per_prompt(policy):
    assert len(gradients(policy, make_batch(policy), make_settings(minibatches=9))[0]) == PROMPTS


def test_top_entropy_tokens_alone_are_trained_and_alone_are_counted(policy):
    whole = make_batch(policy)
    keep = torch.ones(PROMPTS * GROUP, dtype=torch.bool)
    mask = loss_mask(whole.completions, keep, EntropyConfig(kind="top_mask", rho=0.2))
    tokens = float(whole.completions.mask_BT.sum())
    assert 0.15 * tokens < float(mask.sum()) < 0.25 * tokens
    found, metrics = gradients(policy, replace(whole, loss_mask_BT=mask), make_settings())
    assert metrics["loss/denominator"] == float(mask.sum())
    batch = replace(whole, loss_mask_BT=mask)
    assert near(found[0], slow_gradient(policy, batch, make_settings(), mask / mask.sum()))


def test_filtered_rows_leave_the_mask_and_the_denominator(policy):
    batch = make_batch(policy)
    keep = torch.tensor([finish != "length" for finish in batch.completions.finish])
    assert 0 < int(keep.sum()) < len(keep)
    mask = loss_mask(batch.completions, keep, NEITHER)
    assert torch.equal(mask, batch.completions.mask_BT * keep.unsqueeze(-1))
    _, metrics = gradients(policy, replace(batch, loss_mask_BT=mask), make_settings())
    assert metrics["loss/denominator"] == float(batch.completions.lengths_B[keep].sum())


def test_gspo_ratio_is_that_of_the_whole_sequence_whatever_is_masked(policy):
    batch = make_batch(policy)
    half = batch.loss_mask_BT.clone()
    half[:, 1::2] = 0.0
    settings = make_settings(loss=LossConfig(kind="gspo", low=0.9, high=9.0))
    rows = torch.arange(len(batch.owner_B))
    logp, _ = completion_logprobs(policy, batch.prompts, batch.owner_B, batch.completions, rows)
    done = batch.completions
    s = (((logp - done.logprobs_BT) * done.mask_BT).sum(-1) / done.lengths_B).exp().detach()
    policy.model.zero_grad()
    (-(s * batch.advantages_B).unsqueeze(-1) * logp * half / half.sum()).sum().backward()
    expected = torch.cat([p.grad.flatten() for p in policy.trainable()])
    policy.model.zero_grad()
    assert near(gradients(policy, replace(batch, loss_mask_BT=half), settings)[0][0], expected)


def test_clip_cov_cuts_the_gradient_of_what_it_chooses(policy):
    batch = make_batch(policy)
    everything = EntropyConfig(kind="clip_cov", cov_share=1.0, cov_low=-math.inf, cov_high=math.inf)
    assert gradients(policy, batch, make_settings(entropy=everything))[0][0].norm() == 0
    nothing = EntropyConfig(kind="clip_cov", cov_share=1.0, cov_low=1e9, cov_high=1e10)
    plain = gradients(policy, batch, make_settings())[0][0]
    assert near(gradients(policy, batch, make_settings(entropy=nothing))[0][0], plain)


def test_kl_cov_pulls_chosen_tokens_back_to_the_old_policy(policy):
    batch = replace(make_batch(policy), advantages_B=torch.zeros(PROMPTS * GROUP))
    settings = make_settings(entropy=EntropyConfig(kind="kl_cov", cov_share=1.0, cov_coef=0.5))
    rows = torch.arange(len(batch.owner_B))
    logp, _ = completion_logprobs(policy, batch.prompts, batch.owner_B, batch.completions, rows)
    policy.model.zero_grad()
    distance = (logp - batch.completions.logprobs_BT).abs() * batch.loss_mask_BT
    (0.5 * distance.sum() / batch.loss_mask_BT.sum()).backward()
    expected = torch.cat([p.grad.flatten() for p in policy.trainable()])
    policy.model.zero_grad()
    assert near(gradients(policy, batch, settings)[0][0], expected)


def test_first_minibatch_after_generation_has_ratio_one(policy):
    _, metrics = gradients(policy, make_batch(policy, drift=0.0), make_settings(minibatches=4))
    assert metrics["shift/first_ratio_error"] < 1e-5
    assert metrics["clip/fraction"] == 0.0
    assert metrics["shift/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    _, off = gradients(policy, make_batch(policy, drift=0.3), make_settings())
    assert off["shift/first_ratio_error"] == pytest.approx(0.15, abs=0.02)  # mean |uniform(-.3, .3)|


def test_clip_fraction_counts_the_tokens_of_rows_left_out(policy):
    batch = make_batch(policy)
    _, alone = gradients(policy, batch, make_settings())
    batch.advantages_B[: 2 * GROUP] = 0.0
    _, half = gradients(policy, batch, make_settings())
    tokens = batch.loss_mask_BT.sum(-1)
    clipped = half["clip/fraction"] * float(tokens.sum())
    assert clipped == pytest.approx(round(clipped), abs=1e-3)
    assert 0 < half["clip/fraction"] < alone["clip/fraction"]
    assert half["clip/fraction"] == pytest.approx(half["clip/low"] + half["clip/high"])


def test_shift_is_the_k3_of_old_against_new(policy):
    batch = make_batch(policy)
    rows = torch.arange(len(batch.owner_B))
    with torch.no_grad():
        logp, _ = completion_logprobs(policy, batch.prompts, batch.owner_B, batch.completions, rows)
    d = (logp - batch.completions.logprobs_BT)[batch.completions.mask_BT.bool()]
    _, metrics = gradients(policy, batch, make_settings())
    assert metrics["shift/kl_old"] == pytest.approx(float((d.exp() - 1 - d).mean()), rel=1e-4)
    assert metrics["shift/ratio_q50"] == pytest.approx(float(d.exp().median()), rel=2e-2)
    assert metrics["shift/ratio_q01"] < 0.8 < 1.25 < metrics["shift/ratio_q99"]

"""Policy losses and their aggregation, against numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from reasonrl.loss import AGGREGATIONS, LossConfig, cispo_loss, clip_loss, gspo_loss, token_weights

CLIP_HIGHER = LossConfig(low=0.2, high=0.28)


def loss_and_gradient(function, ratios, advantage, config, mask=None):
    """Token losses, d(sum of them)/d(log pi) and the whole record, for one row with the given ratios to pi_old."""
    old = torch.full((1, len(ratios)), -1.5)
    logprobs = (old + torch.tensor([ratios]).log()).requires_grad_()
    mask = torch.ones(1, len(ratios)) if mask is None else torch.tensor([mask])
    token = function(logprobs, old, torch.tensor([advantage]), mask, config)
    (token.loss_BT * mask).sum().backward()
    return token.loss_BT[0].tolist(), logprobs.grad[0].tolist(), token


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.3, 1.0, -1.28, 0.0),  # min(1.3, 1.28): the clipped branch, a constant
        (1.1, 1.0, -1.1, -1.1),  # inside the band: -r A, and d(-r A)/d log pi = -r A
        (0.7, 1.0, -0.7, -0.7),  # min(0.7, 0.8) = 0.7: a good token that became rarer keeps its pull
        (0.7, -1.0, 0.8, 0.0),  # min(-0.7, -0.8) = -0.8: a bad token already rarer is let go
        (1.5, -1.0, 1.5, 1.5),  # min(-1.5, -1.28) = -1.5: a bad token that became likelier is not clipped
        (1.5, 2.0, -2.56, 0.0),
    ],
)
def test_clip_takes_the_minimum_for_both_signs_of_the_advantage(ratio, advantage, loss, gradient):
    losses, gradients, _ = loss_and_gradient(clip_loss, [ratio], advantage, CLIP_HIGHER)
    assert losses == pytest.approx([loss], abs=1e-5)
    assert gradients == pytest.approx([gradient], abs=1e-5)


def test_symmetric_clip_cuts_at_one_point_two():
    assert loss_and_gradient(clip_loss, [1.3], 1.0, LossConfig())[0] == pytest.approx([-1.2], abs=1e-5)


def test_dual_clip_bounds_the_loss_of_a_bad_token_and_leaves_good_ones_alone():
    config = LossConfig(dual_clip=3.0)
    # A = -1, r = 5: min gives -5, max(-5, 3 * -1) = -3, so loss 3 and no gradient
    assert loss_and_gradient(clip_loss, [5.0], -1.0, config)[:2] == (pytest.approx([3.0], abs=1e-4), [0.0])
    assert loss_and_gradient(clip_loss, [2.0], -1.0, config)[0] == pytest.approx([2.0], abs=1e-5)
    assert loss_and_gradient(clip_loss, [5.0], 1.0, config)[0] == pytest.approx([-1.2], abs=1e-5)


def test_only_clips_that_decide_are_counted():
    ratios = [0.7, 1.0, 1.3]
    good = loss_and_gradient(clip_loss, ratios, 1.0, CLIP_HIGHER)[2]
    bad = loss_and_gradient(clip_loss, ratios, -1.0, CLIP_HIGHER)[2]
    assert good.clipped_low_BT.tolist() == [[False, False, False]]
    assert good.clipped_high_BT.tolist() == [[False, False, True]]
    assert bad.clipped_low_BT.tolist() == [[True, False, False]]
    assert bad.clipped_high_BT.tolist() == [[False, False, False]]


def test_gspo_uses_the_geometric_mean_of_the_token_ratios():
    # log-ratios (ln 2, 0): s = exp(ln 2 / 2) = 1.41421 on both tokens; the padding token's ratio 9 has no part
    losses, gradients, token = loss_and_gradient(gspo_loss, [2.0, 1.0, 9.0], 1.0, LossConfig(high=1.0), [1.0, 1.0, 0.0])
    assert token.ratio_BT[0, :2].tolist() == pytest.approx([1.41421, 1.41421], abs=1e-5)
    assert losses[:2] == pytest.approx([-1.41421, -1.41421], abs=1e-5)
    # through sg[s] pi_t / sg[pi_t] every token gets -s A, not -s A / length
    assert gradients[:2] == pytest.approx([-1.41421, -1.41421], abs=1e-5)


def test_gspo_clips_a_whole_sequence_at_once():
    config = LossConfig(low=3e-4, high=4e-4)
    # token ratios 1.001 and 1: s = 1.0005 > 1.0004, clipped although no single token is far off
    losses, gradients, token = loss_and_gradient(gspo_loss, [1.001, 1.0], 1.0, config)
    assert losses == pytest.approx([-1.0004, -1.0004], abs=1e-6)
    assert gradients == [0.0, 0.0]
    assert token.clipped_high_BT.all()
    # 1.0006: s = 1.0003, inside
    assert not loss_and_gradient(gspo_loss, [1.0006, 1.0], 1.0, config)[2].clipped_high_BT.any()


def test_cispo_caps_the_weight_and_keeps_every_gradient():
    # loss -sg(min(r, 5)) A log pi; with log pi_old = -1.5 and r = 10: log pi = -1.5 + ln 10 = 0.80259
    losses, gradients, token = loss_and_gradient(cispo_loss, [10.0, 2.0], 1.0, LossConfig(cap=5.0))
    assert losses == pytest.approx([-5 * (math.log(10) - 1.5), -2 * (math.log(2) - 1.5)], abs=1e-4)
    assert gradients == pytest.approx([-5.0, -2.0], abs=1e-5)
    assert token.clipped_high_BT.tolist() == [[True, False]]


def test_all_losses_have_one_gradient_at_ratio_one():
    for advantage in (2.0, -2.0):
        gradients = [
            loss_and_gradient(f, [1.0, 1.0], advantage, LossConfig())[1] for f in (clip_loss, gspo_loss, cispo_loss)
        ]
        assert gradients == [[-advantage, -advantage]] * 3


# Rows of lengths 1, 3, 2 and 0; the first two belong to prompt 0, the others to prompt 1.
MASK = torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]])
PROMPTS = torch.tensor([0, 0, 1, 1])


@pytest.mark.parametrize(
    ("aggregation", "per_row", "denominator"),
    [
        ("token_mean", [1 / 6, 1 / 6, 1 / 6], 6.0),  # 1 + 3 + 2 tokens
        ("prompt_mean", [1 / 8, 1 / 8, 1 / 4], 2.0),  # prompt 0 has 4 tokens, prompt 1 has 2, then 2 prompts
        ("sequence_mean", [1 / 3, 1 / 9, 1 / 6], 3.0),  # rows of 1, 3, 2 tokens, then 3 rows that have any
        ("constant", [1 / 40, 1 / 40, 1 / 40], 40.0),  # 4 rows times max_new_tokens = 10
    ],
)
def test_each_aggregation_divides_by_its_own_denominator(aggregation, per_row, denominator):
    weights, found = token_weights(MASK, PROMPTS, aggregation, max_new_tokens=10)
    assert found == denominator
    assert [weights[row, 0].item() for row in range(3)] == pytest.approx(per_row, rel=1e-6)
    assert torch.equal(weights > 0, MASK > 0)  # masked tokens weigh nothing
    if aggregation != "constant":
        assert weights.sum().item() == pytest.approx(1.0, rel=1e-6)


def test_a_minibatch_without_any_token_gives_zeros_not_nan():
    for aggregation in AGGREGATIONS:
        weights, denominator = token_weights(torch.zeros(2, 3), torch.tensor([0, 1]), aggregation, 10)
        assert weights.tolist() == [[0.0] * 3] * 2
        assert denominator >= 1


def test_token_mean_and_sequence_mean_disagree_on_long_answers():
    # losses 1 on the 3-token row and 0 elsewhere: 3/6 against (3/3)/3
    losses = torch.zeros(4, 4)
    losses[1] = 1.0
    token = (losses * token_weights(MASK, PROMPTS, "token_mean", 10)[0]).sum().item()
    sequence = (losses * token_weights(MASK, PROMPTS, "sequence_mean", 10)[0]).sum().item()
    assert (token, sequence) == (pytest.approx(0.5), pytest.approx(1 / 3))

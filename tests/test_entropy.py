"""Entropy: one pass with the log-probs, statistics, masks, bonus control and covariance methods."""

from __future__ import annotations

import math

import pytest
import torch

from reasonrl.entropy import (
    EntropyConfig,
    Thermostat,
    clip_cov_mask,
    covariance_terms,
    entropy_stats,
    kl_cov_mask,
    logprob_and_entropy,
    top_entropy_mask,
)

LN2 = math.log(2)


def test_logprob_and_entropy_of_a_known_distribution():
    # probabilities 1/2, 1/4, 1/4: H = 1/2 ln 2 + 1/2 ln 4 = 1.5 ln 2
    chosen, entropy = logprob_and_entropy(torch.tensor([[0.5, 0.25, 0.25]]).log(), torch.tensor([1]))
    assert chosen.item() == pytest.approx(-2 * LN2)
    assert entropy.item() == pytest.approx(1.5 * LN2)


def test_temperature_divides_the_logits_row_by_row():
    # logits (2 ln 3, 0): p = .9 at T = 1, and at T = 2 (ln 3, 0) p = .75
    logits = torch.tensor([[2 * math.log(3), 0.0]] * 2)
    chosen, _ = logprob_and_entropy(logits, torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
    assert chosen.exp().tolist() == pytest.approx([0.9, 0.75])
    assert logprob_and_entropy(logits, torch.tensor([0, 0]), 2.0)[0].exp().tolist() == pytest.approx([0.75, 0.75])


def test_excluded_tokens_give_no_nan_in_value_or_gradient():
    logits = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
    chosen, entropy = logprob_and_entropy(logits, torch.tensor([0]))
    (chosen + entropy).sum().backward()
    assert entropy.item() == pytest.approx(LN2)
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[0, 2] == 0


def test_half_precision_logits_are_measured_in_single():
    logits = torch.tensor([[3.0, 1.0, -2.0]], dtype=torch.bfloat16)
    chosen, entropy = logprob_and_entropy(logits, torch.tensor([0]))
    assert chosen.dtype == entropy.dtype == torch.float32
    assert chosen.item() == pytest.approx(-0.13285, abs=1e-4)  # -ln(1 + e^-2 + e^-5)


def test_entropy_has_the_analytic_gradient():
    # dH/dlogit_i = -p_i (ln p_i + H)
    logits = torch.tensor([[0.2, -0.7, 1.1]], requires_grad=True)
    logprob_and_entropy(logits, torch.tensor([0]))[1].sum().backward()
    p = logits.detach().softmax(-1)
    assert torch.allclose(logits.grad, -p * (p.log() - (p * p.log()).sum()), atol=1e-6)


@pytest.mark.parametrize("elements", [1, 12, 1 << 20])  # a row at a time, two rows, all at once
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chosen_log_probs_in_chunks_equal_a_plain_log_softmax(monkeypatch, elements, dtype):
    monkeypatch.setattr("reasonrl.entropy.CHUNK_ELEMENTS", elements)
    generator = torch.Generator().manual_seed(0)
    values = (3 * torch.randn(5, 6, generator=generator)).to(dtype)
    values[1, 2] = -math.inf  # a token that top-p left out
    ids, temperature = torch.tensor([0, 5, 2, 2, 4]), torch.tensor([1.0, 0.5, 2.0, 1.0, 1.3])
    weight = torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0])
    fast, plain = values.clone().requires_grad_(), values.clone().requires_grad_()
    found, _ = logprob_and_entropy(fast, ids, temperature, with_entropy=False)
    scaled = plain.float() / temperature.unsqueeze(-1)
    expected = scaled.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    assert torch.allclose(found, expected, atol=1e-5)
    (found * weight).sum().backward()
    (expected * weight).sum().backward()
    assert torch.allclose(fast.grad, plain.grad, atol=1e-6 if dtype == torch.float32 else 2e-2)


def test_entropy_is_not_computed_unless_asked_for():
    assert logprob_and_entropy(torch.zeros(1, 2), torch.tensor([0]), 1.0, with_entropy=False)[1] is None


def test_statistics_over_valid_tokens():
    stats = entropy_stats(torch.tensor([0.0, 0.05, 0.3, 0.65]))
    assert stats == pytest.approx(
        {
            "entropy/mean": 0.25,
            "entropy/std": math.sqrt((0.0625 + 0.04 + 0.0025 + 0.16) / 4),
            "entropy/min": 0.0,
            "entropy/max": 0.65,
            "entropy/low_share": 0.5,
        }
    )


def test_covariance_is_that_of_the_textbook():
    # log-probs -1, -3 (mean -2) and advantages 1, -1: (1 * 1 + -1 * -1) / 2 = 1
    assert covariance_terms(torch.tensor([-1.0, -3.0]), torch.tensor([1.0, -1.0])).mean().item() == 1.0
    assert covariance_terms(torch.tensor([-1.0, -3.0]), torch.tensor([1.0, 1.0])).mean().item() == 0.0


ENTROPY = torch.tensor([[0.1, 0.2, 0.3, 9.0], [0.4, 0.5, 9.0, 9.0]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])


def test_top_entropy_mask_takes_one_quantile_over_all_valid_tokens():
    # valid .1 .2 .3 .4 .5; rho .4: the 60 % quantile is .34, two tokens lie above, both in the second row
    kept = top_entropy_mask(ENTROPY, MASK, 0.4)
    assert kept.int().tolist() == [[0, 0, 0, 0], [1, 1, 0, 0]]


def test_top_entropy_mask_per_sequence_keeps_some_of_every_row():
    # row 1: the 60 % quantile of (.1, .2, .3) is .22; row 2: of (.4, .5) it is .46
    kept = top_entropy_mask(ENTROPY, MASK, 0.4, "sequence")
    assert kept.int().tolist() == [[0, 0, 1, 0], [0, 1, 0, 0]]


def test_top_entropy_mask_depends_on_tokens_not_on_rows_or_padding():
    wide = torch.cat([ENTROPY, torch.full((2, 6), 5.0)], 1)
    wide_mask = torch.cat([MASK, torch.zeros(2, 6, dtype=torch.long)], 1)
    for scope in ("batch", "sequence"):
        assert torch.equal(
            top_entropy_mask(wide, wide_mask, 0.4, scope)[:, :4], top_entropy_mask(ENTROPY, MASK, 0.4, scope)
        )


def test_rows_without_a_token_stay_empty_per_sequence():
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0]])
    assert top_entropy_mask(ENTROPY, mask, 0.4, "sequence").int().tolist() == [[0, 0, 1, 0], [0, 0, 0, 0]]


def test_rho_one_keeps_everything():
    assert torch.equal(top_entropy_mask(ENTROPY, MASK, 1.0), MASK.bool())


def test_thermostat_moves_by_delta_and_acts_only_below_its_target():
    thermostat = Thermostat(target=0.2, delta=1e-4, max_coef=2.5e-4)
    assert thermostat.update(0.5) == 0.0  # above: alpha would be -1e-4, held at 0
    assert thermostat.update(0.1) == pytest.approx(1e-4)
    assert thermostat.update(0.1) == pytest.approx(2e-4)
    assert thermostat.update(0.1) == pytest.approx(2.5e-4)  # clamped
    assert thermostat.update(0.2) == pytest.approx(1.5e-4)  # at the target: down, and still applied
    assert thermostat.update(0.3) == 0.0  # above the target nothing is applied ...
    assert thermostat.alpha == pytest.approx(0.5e-4)  # ... but alpha is remembered


def test_clip_cov_cuts_a_share_of_all_tokens_among_those_in_the_band():
    cov = torch.tensor([0.0, 1.5, 2.0, 9.0, 1.2, -3.0, 0.5, 0.1, 0.2, 0.3])
    config = EntropyConfig(cov_share=0.2, cov_low=1.0, cov_high=5.0)
    cut = clip_cov_mask(cov, config, torch.Generator().manual_seed(0))
    assert cut.sum() == 2  # 20 % of 10 tokens
    assert set(cut.nonzero().squeeze(-1).tolist()) < {1, 2, 4}
    again = clip_cov_mask(cov, config, torch.Generator().manual_seed(0))
    assert torch.equal(cut, again)


def test_clip_cov_cuts_nothing_when_no_token_lies_in_the_band():
    assert not clip_cov_mask(torch.tensor([0.1, 0.2]), EntropyConfig(cov_share=1.0)).any()


def test_kl_cov_marks_the_largest_covariances():
    chosen = kl_cov_mask(torch.tensor([0.1, 3.0, -5.0, 2.0]), EntropyConfig(cov_share=0.5))
    assert chosen.tolist() == [False, True, False, True]

"""KL estimators: their values, and their exact expected gradients on a small softmax."""

from __future__ import annotations

import math

import pytest
import torch

from reasonrl.kl import ESTIMATORS, KlConfig, coefficients, needs_reference, position_weights

LOGITS = torch.tensor([0.3, -1.0, 1.2, 0.0], dtype=torch.float64)
REFERENCE = torch.tensor([-0.5, 0.4, 0.9, 0.1], dtype=torch.float64).log_softmax(-1)
OTHER = torch.tensor([1.0, 0.5, -0.5, 0.2], dtype=torch.float64).log_softmax(-1)


def expected_gradient(kind, sampler=None):
    """sum_y sampler(y) * d estimator(y) / d logits: all four outcomes enumerated, nothing sampled."""
    logits = LOGITS.clone().requires_grad_()
    logp = logits.log_softmax(-1)
    old = logp.detach() if sampler is None else sampler
    (old.exp() * ESTIMATORS[kind](logp, REFERENCE, old)).sum().backward()
    return logits.grad


def exact_gradient(direction):
    """Gradient of the true KL, reverse = KL(pi || ref), forward = KL(ref || pi)."""
    logits = LOGITS.clone().requires_grad_()
    logp = logits.log_softmax(-1)
    reverse = (logp.exp() * (logp - REFERENCE)).sum()
    forward = (REFERENCE.exp() * (REFERENCE - logp)).sum()
    (reverse if direction == "reverse" else forward).backward()
    return logits.grad


def test_k1_as_a_loss_pulls_nowhere():
    assert expected_gradient("k1").abs().max() < 1e-12


@pytest.mark.parametrize(("kind", "direction"), [("k2", "reverse"), ("k3", "forward"), ("k3_unbiased", "reverse")])
def test_expected_on_policy_gradient(kind, direction):
    assert torch.allclose(expected_gradient(kind), exact_gradient(direction), atol=1e-12)
    # the two directions differ by far more than that here, so the test can tell them apart
    other = "forward" if direction == "reverse" else "reverse"
    assert (expected_gradient(kind) - exact_gradient(other)).abs().max() > 0.05


def test_k3_unbiased_keeps_the_reverse_gradient_off_policy_and_k2_does_not():
    assert torch.allclose(expected_gradient("k3_unbiased", OTHER), exact_gradient("reverse"), atol=1e-12)
    assert (expected_gradient("k2", OTHER) - exact_gradient("reverse")).abs().max() > 0.05


def test_k1_and_k3_have_the_kl_as_their_mean():
    logp = LOGITS.log_softmax(-1)
    kl = (logp.exp() * (logp - REFERENCE)).sum()
    for kind in ("k1", "k3", "k3_unbiased"):
        assert torch.isclose((logp.exp() * ESTIMATORS[kind](logp, REFERENCE, logp)).sum(), kl)


def test_values_at_a_reference_twice_as_likely():
    # log(ref/pi) = ln 2, so d = -ln 2: k3 = 2 - 1 - .693 = .307, k2 = .480 / 2
    logp, reference = torch.tensor([-2.0]), torch.tensor([-2.0 + math.log(2)])
    values = {kind: estimator(logp, reference, logp).item() for kind, estimator in ESTIMATORS.items()}
    assert values == pytest.approx({"k1": -0.6931, "k2": 0.2402, "k3": 0.3069, "k3_unbiased": 0.3069}, abs=1e-4)


def test_a_coefficient_per_domain_falls_on_its_rows_only():
    config = KlConfig(kind="k3", coef={"math": 0.0, "code": 0.001})
    assert coefficients(config, ["math", "code", "logic", "code"]).tolist() == pytest.approx([0, 0.001, 0, 0.001])
    assert coefficients(KlConfig(kind="k3", coef=0.02), ["a", "b"]).tolist() == pytest.approx([0.02, 0.02])


def test_token_weights_over_the_completion():
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    constant = position_weights(KlConfig(), mask)
    linear = position_weights(KlConfig(token_weight="linear"), mask)
    answer = position_weights(KlConfig(token_weight="answer", reasoning_weight=0.1, answer_tokens=1), mask)
    assert constant.tolist() == [[1.0] * 4] * 2
    assert linear[0].tolist() == [0.25, 0.5, 0.75, 1.0]
    assert linear[1, :2].tolist() == [0.5, 1.0]
    assert answer[0].tolist() == pytest.approx([0.1, 0.1, 0.1, 1.0])
    assert answer[1, :2].tolist() == pytest.approx([0.1, 1.0])


def test_a_reference_is_held_only_for_a_coefficient_or_on_request():
    assert not needs_reference(KlConfig())
    assert needs_reference(KlConfig(monitor=True))
    assert needs_reference(KlConfig(kind="k2", coef=0.1))

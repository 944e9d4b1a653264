"""Learning-rate schedules, and the optimizer on weights of either precision."""

from __future__ import annotations

import math

import pytest
import torch

from reasonrl.optim import OptimConfig, Optimizer, learning_rate


def parameter(value=1.0, dtype=torch.float32, count=4):
    return torch.nn.Parameter(torch.full((count,), value, dtype=dtype))


def test_warm_up_rises_in_a_line_and_reaches_the_rate_at_its_last_step():
    config = OptimConfig(lr=1e-3, warmup_steps=4)
    assert [learning_rate(config, step, 10) for step in (1, 2, 4, 5, 10)] == pytest.approx(
        [2.5e-4, 5e-4, 1e-3, 1e-3, 1e-3]
    )
    assert learning_rate(OptimConfig(lr=1e-3, warmup_steps=0), 1, 10) == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("schedule", "middle"),
    [("linear", 0.5), ("cosine", 0.5), ("constant", 1.0)],  # step 6 of 2 + 8: half of the way down
)
def test_decay_goes_to_zero_at_the_last_step(schedule, middle):
    config = OptimConfig(lr=1.0, warmup_steps=2, schedule=schedule)
    assert learning_rate(config, 6, 10) == pytest.approx(middle)
    assert learning_rate(config, 10, 10) == pytest.approx(0.0 if schedule != "constant" else 1.0, abs=1e-12)
    quarter = learning_rate(config, 4, 10)
    assert quarter == pytest.approx({"linear": 0.75, "cosine": 0.5 + math.sqrt(0.5) / 2, "constant": 1.0}[schedule])


def test_first_step_moves_every_weight_by_the_learning_rate():
    # Adam's first step is lr * g / (|g| + 1e-8), whatever the size of g
    weights = parameter()
    optimizer = Optimizer([weights], OptimConfig(max_grad_norm=0))
    weights.grad = torch.tensor([3.0, -0.5, 1e-3, 100.0])
    norm = optimizer.step(0.01)
    assert weights.tolist() == pytest.approx([0.99, 1.01, 0.99, 0.99], abs=1e-6)
    assert norm == pytest.approx(math.sqrt(9 + 0.25 + 1e-6 + 1e4))
    assert weights.grad is None


def test_norm_is_reported_before_clipping_and_clipping_keeps_the_direction():
    weights = parameter(count=2)
    optimizer = Optimizer([weights], OptimConfig(max_grad_norm=1.0))
    weights.grad = torch.tensor([3.0, 4.0])
    assert optimizer.step(0.01) == pytest.approx(5.0)
    assert optimizer.tensors()["0.exp_avg"].tolist() == pytest.approx([0.06, 0.08], rel=1e-4)  # .1 * (.6, .8)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad):
    weights = parameter()
    optimizer = Optimizer([weights], OptimConfig())
    weights.grad = torch.ones(4)
    optimizer.step(0.01)
    before, moments = weights.detach().clone(), {k: v.clone() for k, v in optimizer.tensors().items()}
    weights.grad = torch.tensor([1.0, bad, 1.0, 1.0])
    assert not math.isfinite(optimizer.step(0.01))
    assert torch.equal(weights, before)
    assert all(torch.equal(moments[name], value) for name, value in optimizer.tensors().items())


def test_a_parameter_without_gradient_counts_as_zero_and_keeps_its_momentum():
    one, other = parameter(), parameter()
    optimizer = Optimizer([one, other], OptimConfig())
    one.grad, other.grad = torch.ones(4), torch.ones(4)
    optimizer.step(0.01)
    at = other.detach().clone()
    one.grad = torch.ones(4)
    optimizer.step(0.01)
    assert (other < at).all()


def test_half_precision_weights_collect_updates_smaller_than_their_rounding():
    # a bf16 weight of 1 has steps of 1/128 below it: 100 updates of 1e-4 are lost one by one without a master copy
    weights = parameter(1.0, torch.bfloat16)
    optimizer = Optimizer([weights], OptimConfig(weight_decay=0.0))
    for _ in range(100):
        weights.grad = torch.ones(4, dtype=torch.bfloat16)
        optimizer.step(1e-4)
    assert weights.tolist() == pytest.approx([0.99] * 4, abs=3e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_goes_through_tensors_and_continues_bit_for_bit(dtype):
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(4, generator=generator).to(dtype) for _ in range(6)]

    def steps(optimizer, weights, some):
        for gradient in some:
            weights.grad = gradient.clone()
            optimizer.step(1e-2)

    whole = parameter(dtype=dtype)
    steps(Optimizer([whole], OptimConfig()), whole, gradients)
    first = parameter(dtype=dtype)
    optimizer = Optimizer([first], OptimConfig())
    steps(optimizer, first, gradients[:3])
    second = torch.nn.Parameter(first.detach().clone())
    resumed = Optimizer([second], OptimConfig())
    resumed.load_tensors({name: value.clone() for name, value in optimizer.tensors().items()})
    steps(resumed, second, gradients[3:])
    assert torch.equal(second, whole)


def test_updates_per_rollout_is_the_product():
    assert OptimConfig(minibatches=4, inner_epochs=3).updates_per_rollout == 12


def test_micro_batches_of_low_precision_weights_add_up_in_fp32():
    # in bfloat16, 1 + 1/512 is 1: 256 such parts would be lost
    weights = parameter(dtype=torch.bfloat16, count=1)
    optimizer = Optimizer([weights], OptimConfig(max_grad_norm=0))
    for part in [1.0] + [1 / 512] * 256:
        weights.grad = torch.full((1,), part, dtype=torch.bfloat16)
        optimizer.accumulate()
    assert optimizer.step(0.01) == pytest.approx(1.5)

"""Advantages from rewards in parts, against numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from reasonrl.advantages import AdvantageConfig, compute_advantages
from reasonrl.data import is_flat

NAN = math.nan


def advantages(kind, groups, weights=(1.0,), **settings):
    """Advantages of groups of scalar rewards, or of tuples of parts."""
    rows = [[value if isinstance(value, tuple) else (value,) for value in group] for group in groups]
    config = AdvantageConfig(kind=kind, **settings)
    found, flat, valid = compute_advantages(config, torch.tensor(rows), torch.tensor(weights))
    assert torch.isfinite(found).all()
    return found.tolist(), flat.tolist(), valid.tolist()


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        ("grpo", 1.5, -0.5),  # mean 1/4, sample std sqrt((9/16 + 3/16) / 3) = 0.5
        ("dr_grpo", 0.75, -0.25),
        ("rloo", 1.0, -1 / 3),  # 1 - 0, and 0 - 1/3
    ],
)
def test_one_right_answer_of_four(kind, right, wrong):
    # eps 1e-4 beside a std of 0.5 shrinks by 2e-4
    assert advantages(kind, [[1.0, 0.0, 0.0, 0.0]])[0][0] == pytest.approx([right, wrong, wrong, wrong], rel=3e-4)


def test_batch_std_divides_by_the_std_of_all_rewards():
    # groups 1,0 and 1,1: centred +-.5 and 0; std of (1,0,1,1) = sqrt((3/16 + 9/16) / 3) = 0.5
    found, flat, _ = advantages("batch_std", [[1.0, 0.0], [1.0, 1.0]])
    assert found[0] == pytest.approx([1.0, -1.0], rel=3e-4)
    assert (found[1], flat) == ([0.0, 0.0], [False, True])


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "batch_std"])
@pytest.mark.parametrize("eps", [1e-4, 1e-8, 0.0])
def test_equal_rewards_get_exactly_zero_whatever_eps(kind, eps):
    found, flat, _ = advantages(kind, [[0.7] * 8, [0.1 + 0.2] * 8], eps=eps)
    assert found == [[0.0] * 8] * 2
    assert flat == [True, True]


def test_flat_groups_at_different_levels_are_flat_although_the_batch_varies():
    found, flat, _ = advantages("batch_std", [[3.0] * 4, [-5.0] * 4])
    assert (found, flat) == ([[0.0] * 4] * 2, [True, True])


def test_flatness_is_decided_on_raw_rewards_and_a_small_true_spread_counts():
    assert is_flat(torch.tensor([[0.5, 0.5 + 5e-7], [0.5, 0.502]])).tolist() == [True, False]
    # std of (.5, .502) is .00141421: -+.001 / (.00141421 + .0001) = -+.660
    assert advantages("grpo", [[0.5, 0.502]])[0][0] == pytest.approx([-0.6604, 0.6604], abs=2e-3)


def test_gdpo_keeps_apart_what_the_sum_makes_equal():
    # totals (0,1) and (0,2): both -+.7071 under grpo
    groups = [[(0.0, 0.0), (1.0, 0.0)], [(0.0, 0.0), (1.0, 1.0)]]
    summed = advantages("grpo", groups, (1.0, 1.0))[0]
    assert summed[0] == pytest.approx([-0.7071, 0.7071], rel=3e-4)
    assert summed[1] == pytest.approx([-0.7071, 0.7071], rel=3e-4)
    apart = advantages("gdpo", groups, (1.0, 1.0), batch_norm=False)[0]
    assert apart[0] == pytest.approx([-0.7071, 0.7071], rel=3e-4)
    assert apart[1] == pytest.approx([-1.4142, 1.4142], rel=3e-4)


def test_gdpo_batch_step_is_a_z_score_over_all_samples():
    # -+.7071 and -+1.4142: mean 0, sample std sqrt((2 * .5 + 2 * 2) / 3) = 1.2910
    groups = [[(0.0, 0.0), (1.0, 0.0)], [(0.0, 0.0), (1.0, 1.0)]]
    found = advantages("gdpo", groups, (1.0, 1.0))[0]
    assert found[0] == pytest.approx([-0.5477, 0.5477], rel=1e-3)
    assert found[1] == pytest.approx([-1.0954, 1.0954], rel=1e-3)


def test_gdpo_worked_example_of_two_weighted_parts():
    # correctness 4,2,1,0: mean 1.75, std 1.7078; format 0,3,0,3: mean 1.5, std 1.7321; weights 2:1 on the z-scores
    group = [[(4.0, 0.0), (2.0, 3.0), (1.0, 0.0), (0.0, 3.0)]]
    assert advantages("grpo", group, (2.0, 1.0))[0][0] == pytest.approx([1.019, 0.679, -1.019, -0.679], abs=1e-3)
    plain = advantages("gdpo", group, (2.0, 1.0), batch_norm=False)[0][0]
    assert plain == pytest.approx([1.769, 1.159, -1.744, -1.183], abs=1e-3)
    assert advantages("gdpo", group, (2.0, 1.0))[0][0] == pytest.approx([1.026, 0.672, -1.012, -0.687], abs=1e-3)


def test_gdpo_gives_a_part_without_spread_exactly_nothing():
    # eight rewards of .7 next to a part that varies: rounding of .7 must not leak in, at any eps
    rows = [[(0.7, float(i == 0)) for i in range(8)]]
    alone = advantages("gdpo", [[(float(i == 0),) for i in range(8)]], (1.0,), batch_norm=False, eps=0.0)[0][0]
    assert advantages("gdpo", rows, (1000.0, 1.0), batch_norm=False, eps=0.0)[0][0] == pytest.approx(alone, rel=1e-6)


def test_gdpo_batch_step_leaves_flat_groups_at_zero():
    found, flat, _ = advantages(
        "gdpo", [[(1.0, 1.0)] * 4, [(1.0, 0.0), (0.0, 1.0), (0.0, 0.0), (1.0, 1.0)]], (1.0, 0.3)
    )
    assert flat == [True, False]
    assert found[0] == [0.0] * 4


def test_a_group_is_flat_only_if_every_part_is():
    assert advantages("grpo", [[(1.0, 0.0), (1.0, 1.0)]], (1.0, 0.3))[1] == [False]


def test_parts_that_cancel_give_zero_not_rounding():
    # 0.1 * 3 - 0.3 is 5.6e-17 in float64 and about 1e-8 in float32, far from an advantage
    found = advantages("grpo", [[(3.0, 0.0), (0.0, 1.0)]], (0.1, 0.3), eps=1e-8)[0]
    assert found == [[0.0, 0.0]]


def test_rows_without_a_reward_get_zero_and_leave_the_statistics():
    # over the valid rows 1, 0, 0: mean 1/3, sample std .57735: +1.1547, -.57735
    found, flat, valid = advantages("grpo", [[1.0, NAN, 0.0, 0.0]])
    assert found[0] == pytest.approx([1.1547, 0.0, -0.57735, -0.57735], rel=3e-4)
    assert (flat, valid) == ([False], [[True, False, True, True]])


def test_infinite_rewards_are_no_rewards():
    found, _, valid = advantages("grpo", [[1.0, math.inf, 0.0, -math.inf]])
    assert found[0] == pytest.approx([0.7071, 0.0, -0.7071, 0.0], rel=3e-4)
    assert valid == [[True, False, True, False]]


def test_rloo_averages_over_the_other_valid_rows():
    # 1 - mean(0, 0) = 1; 0 - mean(1, 0) = -1/2
    assert advantages("rloo", [[1.0, NAN, 0.0, 0.0]])[0][0] == pytest.approx([1.0, 0.0, -0.5, -0.5])


def test_one_missing_part_makes_the_row_invalid():
    found, _, valid = advantages("gdpo", [[(1.0, NAN), (1.0, 1.0), (0.0, 0.0)]], (1.0, 1.0))
    assert (found[0][0], valid[0]) == (0.0, [False, True, True])


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "batch_std", "gdpo"])
def test_fewer_than_two_valid_rows_make_a_flat_group(kind):
    for group in ([[1.0]], [[NAN, NAN]], [[1.0, NAN]]):
        found, flat, _ = advantages(kind, group)
        assert (found, flat) == ([[0.0] * len(group[0])], [True])


def test_share_of_flat_groups_shows_in_the_advantage_std():
    # half of 400 groups flat, G = 8: sqrt((1 - .5) * 7 / 8) = .6614
    mixed, flat = [[1.0] * 4 + [0.0] * 4], [[1.0] * 8]
    found = torch.tensor(advantages("grpo", mixed * 200 + flat * 200)[0])
    assert found.std(correction=0).item() == pytest.approx(0.6614, abs=1e-3)

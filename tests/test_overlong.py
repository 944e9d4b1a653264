"""Cut completions: the soft punishment, the filter, and where truncation is read from."""

from __future__ import annotations

import pytest
import torch

from reasonrl.overlong import OverlongConfig, keep_rows, soft_overlong_penalty
from reasonrl.types import Completions, Rollouts


def test_soft_punishment_at_every_corner():
    # max 100, cache 20: free up to 80, then (80 - L) / 20, -1 from 100 on
    lengths = torch.tensor([1, 80, 85, 90, 100, 130])
    assert soft_overlong_penalty(lengths, 100, 20).tolist() == pytest.approx([0, 0, -0.25, -0.5, -1, -1])


def test_filter_takes_cut_rows_out_of_the_loss_only_when_chosen():
    cut = torch.tensor([False, True, False])
    assert keep_rows(OverlongConfig(kind="filter"), cut).tolist() == [True, False, True]
    assert keep_rows(OverlongConfig(kind="soft"), cut).tolist() == [True] * 3
    assert keep_rows(OverlongConfig(), cut).tolist() == [True] * 3


def test_truncation_is_a_finish_reason_never_a_length():
    # both rows are as long as the limit; only the one without EOS was cut, and an error is not a truncation
    zeros = torch.zeros(3, 4)
    done = Completions(zeros.long(), torch.ones(3, 4).long(), zeros, zeros, zeros, ["stop", "length", "error"])
    rollouts = Rollouts([], [], done, [], {}, torch.zeros(1, 3), [])
    assert rollouts.truncated_B.tolist() == [False, True, False]

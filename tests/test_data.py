"""Problems in a fixed order, the difficulty gate, and dynamic sampling."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from reasonrl.data import DataConfig, ProblemStream, collect
from reasonrl.errors import TrainingError
from reasonrl.randomness import uniforms
from reasonrl.tasks import TaskConfig, load_task
from reasonrl.types import Problem


class FiniteTask:
    """`size` problems named by their index."""

    def __init__(self, size: int) -> None:
        self.size = size

    def train_problem(self, index: int) -> Problem:
        return Problem(str(index), f"question {index}", "")


@dataclass
class FakeGroup:
    problem: Problem
    correct_G: torch.Tensor
    num_tokens: int = 10
    flat: bool = False


MIXED, RIGHT, WRONG, UNSCORED = (1.0, 0.0), (1.0, 1.0), (0.0, 0.0), (math.nan, math.nan)


def scripted(outcomes, asked=None):
    """A generator that hands out group outcomes in order, then the last one for ever; notes what it was asked."""
    script = iter(outcomes)
    last = outcomes[-1]

    def generate(problems, offset):
        if asked is not None:
            asked.append((len(problems), offset))
        return [FakeGroup(problem, torch.tensor(next(script, last))) for problem in problems]

    return generate


def dynamic(outcomes, wanted=4, asked=None, starved=0, **settings):
    config = DataConfig(kind="dynamic_sampling", prompts_per_step=wanted, **settings)
    return collect(config, ProblemStream(FiniteTask(1000), seed=0), scripted(outcomes, asked), 1, starved)


def ids(problems):
    return [problem.id for problem in problems]


# -- the stream ----------------------------------------------------------------------------------------------


def test_an_epoch_visits_every_problem_once_in_an_order_of_its_own():
    stream = ProblemStream(FiniteTask(7), seed=3)
    first, second = ids(stream.take(7)), ids(stream.take(7))
    assert sorted(first) == sorted(second) == [str(i) for i in range(7)]
    assert first != second


def test_the_order_depends_on_the_seed_and_not_on_how_it_is_asked_for():
    def order(seed, *counts):
        stream = ProblemStream(FiniteTask(50), seed)
        return [problem for count in counts for problem in ids(stream.take(count))]

    assert order(1, 30) == order(1, 7, 3, 20)
    assert order(1, 30) != order(2, 30)


def test_an_endless_task_gives_the_same_problems_again_after_a_resume():
    task = load_task(TaskConfig())
    whole = ids(ProblemStream(task, 5).take(20))
    stream = ProblemStream(task, 5)
    stream.take(8)
    resumed = ProblemStream(task, 5)
    resumed.load_state(stream.state())
    assert ids(resumed.take(12)) == whole[8:]


def test_gate_holds_back_a_problem_flat_in_its_last_k_visits_and_a_mixed_visit_frees_it():
    stream = ProblemStream(FiniteTask(3), seed=0, gate=2)
    hard, easy, good = stream.take(3)
    for flat in (True, True):
        stream.record(hard, flat)
    stream.record(easy, True)
    stream.record(easy, False)
    stream.record(easy, True)
    assert set(ids(stream.take(2))) == {easy.id, good.id}
    assert stream.gated <= 1  # counted only where it was passed over on the way
    assert set(ids(stream.take(10))) == {easy.id, good.id}
    assert stream.gated >= 4  # once in each of the epochs that ten problems take


def test_gate_of_nothing_but_gated_problems_uses_them_instead_of_hanging():
    stream = ProblemStream(FiniteTask(4), seed=0, gate=1)
    for problem in stream.take(4):
        stream.record(problem, True)
    assert len(stream.take(4)) == 4


def test_gate_survives_a_resume():
    stream = ProblemStream(FiniteTask(4), seed=0, gate=1)
    bad = stream.take(1)[0]
    stream.record(bad, True)
    resumed = ProblemStream(FiniteTask(4), seed=0, gate=1)
    resumed.load_state(stream.state())
    assert bad.id not in ids(resumed.take(12))


def test_without_a_gate_nothing_is_remembered_or_held_back():
    stream = ProblemStream(FiniteTask(1), seed=0)
    for problem in stream.take(1):
        stream.record(problem, True)
    assert (ids(stream.take(1)), stream.flat_visits, stream.gated) == (["0"], {}, 0)


# -- dynamic sampling ----------------------------------------------------------------------------------------


def test_plain_data_is_one_round_and_keeps_flat_groups():
    asked = []
    config = DataConfig(prompts_per_step=3)
    found = collect(config, ProblemStream(FiniteTask(9), 0), scripted([RIGHT, WRONG, MIXED], asked), 1, 0)
    assert (found.rounds, len(found.groups), asked) == (1, 3, [(3, 0)])
    assert (found.flat, found.all_right, found.all_wrong) == pytest.approx((2 / 3, 1 / 3, 1 / 3))


def test_refills_until_every_group_has_a_signal_and_reports_what_it_cost():
    asked = []
    found = dynamic([MIXED, RIGHT, WRONG, MIXED, MIXED, WRONG, MIXED, MIXED], asked=asked)
    # round 1: 2 of 4 kept, so 2 more need 2 / (1/2) = 4; round 2 keeps 3, one too many
    assert asked == [(4, 0), (4, 4)]
    assert (found.rounds, found.num_groups_seen, found.generated_tokens) == (2, 8, 80)
    assert all(not group.flat for group in found.groups)
    assert (found.all_right, found.all_wrong) == pytest.approx((1 / 8, 2 / 8))


def test_surplus_groups_are_dropped_in_order_of_generation():
    seen = []

    def generate(problems, offset):
        groups = [
            FakeGroup(problem, torch.tensor(MIXED if offset or i else WRONG)) for i, problem in enumerate(problems)
        ]
        seen.extend(group for group in groups if group.correct_G[0])
        return groups

    found = collect(
        DataConfig(kind="dynamic_sampling", prompts_per_step=2), ProblemStream(FiniteTask(99), 0), generate, 1, 0
    )
    assert len(seen) == 3
    assert found.groups == seen[:2]


def test_gives_up_after_max_rounds_and_trains_on_what_there_is():
    found = dynamic([MIXED] + [WRONG] * 99, max_rounds=3)
    assert (found.rounds, len(found.groups)) == (3, 1)


def test_never_asks_for_more_than_a_batch_at_once():
    asked = []
    dynamic([WRONG], asked=asked, max_rounds=4)
    assert [count for count, _ in asked] == [4, 4, 4, 4]


def test_an_empty_step_is_allowed_and_patience_steps_in_a_row_are_not():
    assert dynamic([WRONG], max_rounds=2, patience=3, starved=1).groups == []
    with pytest.raises(TrainingError, match="3 steps.*too hard or too easy"):
        dynamic([WRONG], max_rounds=2, patience=3, starved=2)


def test_plain_data_never_raises_for_flat_groups():
    config = DataConfig(prompts_per_step=2, patience=1)
    assert len(collect(config, ProblemStream(FiniteTask(9), 0), scripted([WRONG]), 1, 9).groups) == 2


def test_groups_nobody_could_score_are_flat_but_neither_right_nor_wrong():
    found = dynamic([UNSCORED, RIGHT, WRONG, MIXED], max_rounds=1)
    assert (found.flat, found.all_right, found.all_wrong) == pytest.approx((0.75, 0.25, 0.25))


def test_visits_reach_the_gate_during_sampling():
    stream = ProblemStream(FiniteTask(100), seed=0, gate=1)
    config = DataConfig(kind="dynamic_sampling", prompts_per_step=2, max_rounds=1)
    collect(config, stream, scripted([WRONG, MIXED]), 1, 0)
    assert sorted(stream.flat_visits.values()) == [0, 1]


# -- common random numbers -----------------------------------------------------------------------------------


def test_draws_are_a_function_of_what_they_are_for():
    assert (uniforms(2, 5, "rollout", 1, 2, "p") == uniforms(2, 5, "rollout", 1, 2, "p")).all()
    for other in (("rollout", 2, 2, "p"), ("rollout", 1, 3, "p"), ("rollout", 1, 2, "q")):
        assert not (uniforms(2, 5, "rollout", 1, 2, "p") == uniforms(2, 5, *other)).any()


def test_more_rollouts_or_tokens_keep_the_earlier_draws():
    small, large = uniforms(2, 5, "x"), uniforms(4, 9, "x")
    assert (large[:2, :5] == small).all()
    assert not (large[0] == large[1]).any()

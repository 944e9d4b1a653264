"""Held-out scores: mean, pass and majority at k by hand, and what they must not depend on."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from reasonrl import evaluate as module
from reasonrl.evaluate import EvalConfig, evaluate
from reasonrl.rollout import SamplingConfig
from reasonrl.tasks import TaskConfig, load_task
from reasonrl.types import Problem, Verdict

PLAIN = SamplingConfig(max_new_tokens=12)


class Scripted:
    """A task and a policy in one: the texts of every sample are written down beforehand."""

    def __init__(self, texts_of, lengths=None, finish=None):
        self.problems = [Problem(name, name, "4") for name in texts_of]
        self.texts = [text for texts in texts_of.values() for text in texts]
        self.lengths = lengths or [3] * len(self.texts)
        self.finish = finish or ["stop"] * len(self.texts)

    def encode(self, problem):
        return [self.problems.index(problem)]

    def decode(self, ids):
        return self.texts[ids[0]] if ids else ""

    def score(self, problem, text, finish):
        return Verdict(1.0, "correct") if text[-1:] == problem.gold and finish == "stop" else Verdict(0.0)

    def format_ok(self, text):
        return text.startswith("a")

    def answer(self, text):
        return text[-1] if text else None

    def generate(self, policy, prompts, k, config, draws):
        import torch

        rows = [prompt[0] * k + i for prompt in prompts for i in range(k)]
        ids = torch.tensor(rows).unsqueeze(-1).repeat(1, max(self.lengths))
        lengths = torch.tensor([self.lengths[row] for row in rows])
        return SimpleNamespace(ids_BT=ids, lengths_B=lengths, finish=[self.finish[row] for row in rows])


def measured(monkeypatch, texts_of, samples, **settings):
    scripted = Scripted(texts_of, settings.pop("lengths", None), settings.pop("finish", None))
    monkeypatch.setattr(module, "generate", scripted.generate)
    return evaluate(scripted, scripted, scripted.problems, EvalConfig(samples=samples, **settings), PLAIN)


def test_mean_pass_majority_and_distinct_at_k(monkeypatch):
    texts = {
        "p": ["a4", "b4", "c5", "d6"],  # 2 right; votes 4:2 5:1 6:1
        "q": ["a4", "b5", "c5", "d5"],  # 1 right; the majority says 5
        "r": ["a1", "b2", "c3", "d1"],  # none
        "s": ["a4", "a4", "a4", "a4"],  # all, one and the same text
    }
    found = measured(monkeypatch, texts, samples=4)
    assert found.right == [2, 1, 0, 4]
    assert found.metrics == pytest.approx(
        {
            "eval/accuracy": 7 / 16,
            "eval/pass_at_k": 3 / 4,
            "eval/majority": 2 / 4,
            "eval/distinct": (2 + 1 + 0 + 1) / 4,
            "eval/length": 3.0,
            "eval/truncated": 0.0,
        }
    )


def test_a_tie_of_votes_goes_to_the_answer_seen_first(monkeypatch):
    assert measured(monkeypatch, {"p": ["a4", "b5"]}, 2).metrics["eval/majority"] == 1.0
    assert measured(monkeypatch, {"p": ["b5", "a4"]}, 2).metrics["eval/majority"] == 0.0


def test_texts_without_an_answer_do_not_vote(monkeypatch):
    assert measured(monkeypatch, {"p": ["", "", "a4"]}, 3).metrics["eval/majority"] == 1.0
    assert measured(monkeypatch, {"p": ["", ""]}, 2).metrics["eval/majority"] == 0.0


def test_cut_completions_are_counted_by_finish_reason(monkeypatch):
    texts = {"p": ["a4", "b4"], "q": ["c4", "d4"]}
    finish = ["stop", "length", "stop", "error"]
    found = measured(monkeypatch, texts, 2, lengths=[2, 12, 4, 6], finish=finish)
    assert found.right == [1, 1]
    assert (found.metrics["eval/length"], found.metrics["eval/truncated"]) == (6.0, 0.25)


def test_a_few_completions_are_kept_to_read(monkeypatch):
    found = measured(monkeypatch, {name: ["a4"] for name in "pqrstu"}, 1)
    assert len(found.samples) == 4
    assert found.samples[0] == {
        "prompt": "p",
        "gold": "4",
        "completion": "a4",
        "finish": "stop",
        "reward": 1.0,
        "parts": {"correctness": 1.0, "format": 1.0},
        "reason": "correct",
    }


def test_batches_change_nothing_and_neither_do_training_filters(policy):
    task = load_task(TaskConfig())
    problems = task.heldout(5)
    whole = evaluate(policy, task, problems, EvalConfig(samples=3), PLAIN)
    parts = evaluate(policy, task, problems, EvalConfig(samples=3, batch_problems=2), PLAIN)
    filtered = replace(PLAIN, top_p=0.5, top_k=3, temperature=2.0, temperature_high=3.0, entropy_threshold=0.1)
    plain = evaluate(policy, task, problems, EvalConfig(samples=3), filtered)
    assert whole == parts == plain
    assert whole.metrics["eval/length"] > 1


def test_a_limit_of_its_own(policy):
    task = load_task(TaskConfig())
    found = evaluate(policy, task, task.heldout(5), EvalConfig(samples=3, max_new_tokens=2), PLAIN)
    assert found.metrics["eval/length"] <= 2


def test_held_out_problems_are_the_same_for_every_seed_and_never_trained_on():
    task = load_task(TaskConfig(), seed=0)
    held_out = [problem.id for problem in task.heldout(50)]
    assert held_out == [problem.id for problem in load_task(TaskConfig(), seed=7).heldout(50)]
    for operands in ([2, 3], [4, 5, 6], [8]):  # 72 prompts of two digits: every one of them comes up in training
        task = load_task(TaskConfig(operands=operands))
        trained = {task.train_problem(index).prompt for index in range(800)}
        assert not {problem.prompt for problem in task.heldout(100)} & trained

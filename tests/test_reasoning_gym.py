"""Task reasoning_gym: any dataset with its own scorer, mixtures with weights and domains, held-out questions apart."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

pytest.importorskip("reasoning_gym")

from reasonrl.errors import ConfigError  # noqa: E402
from reasonrl.tasks import TaskConfig, load_task  # noqa: E402
from reasonrl.tasks.reasoning_gym import ReasoningGymTask, final_answer  # noqa: E402
from reasonrl.types import Problem  # noqa: E402

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def gym(datasets: dict, **settings) -> ReasoningGymTask:
    task = load_task(TaskConfig(kind="reasoning_gym", datasets=datasets, **settings))
    assert isinstance(task, ReasoningGymTask)
    return task


@pytest.fixture(scope="module")
def mixture() -> ReasoningGymTask:
    return gym(
        {"chain_sum": {"weight": 3, "domain": "sums", **SUMS}, "spell_backward": {"weight": 1}, "countdown": 0.2}
    )


def problem_of(task: ReasoningGymTask, domain: str) -> Problem:
    return next(p for p in map(task.train_problem, range(200)) if p.domain == domain)


def test_mixture_follows_its_weights_and_names_its_domains(mixture: ReasoningGymTask) -> None:
    counts = Counter(mixture.train_problem(index).domain for index in range(400))
    assert set(counts) == {"sums", "spell_backward", "countdown"}
    assert 240 < counts["sums"] < 330 and 60 < counts["spell_backward"] < 130 and counts["countdown"] < 50


def test_index_alone_decides_a_problem_in_every_process(mixture: ReasoningGymTask) -> None:
    code = (
        "from reasonrl.tasks import TaskConfig, load_task\n"
        "task = load_task(TaskConfig(kind='reasoning_gym', datasets={'chain_sum': 1, 'spell_backward': 2}))\n"
        "print([task.train_problem(i).prompt for i in (3, 2**61, 5)])\n"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    task = gym({"chain_sum": 1, "spell_backward": 2})
    assert printed == str([task.train_problem(i).prompt for i in (3, 2**61, 5)]) + "\n"


def test_held_out_questions_are_different_and_never_trained_on() -> None:
    task = gym({"chain_sum": SUMS})
    held = [problem.prompt for problem in task.heldout(1000)]
    assert 5 < len(held) < 100 and len(set(held)) == len(held)
    assert task.notes == [f"Only {len(held)} different held-out problems exist with these datasets."]
    assert not set(held) & {task.train_problem(index).prompt for index in range(1500)}
    assert [p.prompt for p in task.heldout(3)] == held[:3]


def test_long_prompts_are_drawn_again_and_counted() -> None:
    task = gym({"spell_backward": {"min_word_len": 3, "max_word_len": 12}})
    long = 55
    share = task.drop_long_prompts(lambda problem: len(problem.prompt), long)
    assert 0 < share < 100 and task.notes == [
        f"About {share} % of the prompts are longer than 55 tokens: others are drawn instead."
    ]
    assert all(len(task.train_problem(index).prompt) <= long for index in range(100))
    assert all(len(problem.prompt) <= long for problem in task.heldout(20))


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        ("GOLD", "correct"),
        ("The answer is GOLD.", "correct"),
        ("<answer>GOLD</answer>", "correct"),
        ("<answer> GOLD </answer> done", "correct"),
        ("\\boxed{GOLD}", "correct"),
        ("So the sum is = GOLD", "correct"),
        ("GOLD.0", "correct"),
        ("999", "wrong"),
        ("<answer>GOLD</answer> no, <answer>999</answer>", "wrong"),
        ("<answer>0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18</answer>", "wrong"),
        ("<answer>it is 999, not GOLD</answer>", "not_extracted"),
        ("I do not know", "not_extracted"),
        ("9^9^9^9", "not_extracted"),
    ],
)
def test_numbers_are_judged_by_value_and_lists_earn_nothing(
    mixture: ReasoningGymTask, answer: str, wanted: str
) -> None:
    problem = problem_of(mixture, "sums")
    verdict = mixture.score(problem, answer.replace("GOLD", problem.gold), "stop")
    assert (verdict.reason, verdict.value) == (wanted, float(wanted == "correct"))


def test_texts_are_judged_by_the_scorer_and_containing_the_answer_is_not_enough(mixture: ReasoningGymTask) -> None:
    problem = problem_of(mixture, "spell_backward")
    right, padded = f"<answer>{problem.gold}</answer>", f"<answer>abc {problem.gold} def</answer>"
    verdicts = mixture.score_many([(problem, right, "stop"), (problem, padded, "stop"), (problem, "", "stop")])
    assert [verdict.reason for verdict in verdicts] == ["correct", "wrong", "not_extracted"]
    assert [verdict.value for verdict in verdicts] == [1.0, 0.0, 0.0]


def test_partial_marks_count_only_when_asked_for() -> None:
    strict, partial = gym({"spell_backward": 1}), gym({"spell_backward": {"partial": True}})
    problem = partial.train_problem(0)
    padded = f"<answer>{problem.gold}x</answer>"
    assert strict.score(problem, padded, "stop").value == 0.0
    assert 0.0 < partial.score(problem, padded, "stop").value < 1.0
    assert partial.score(problem, padded, "stop").reason == "wrong"


def test_other_solution_than_the_oracle_is_right_and_a_hanging_one_costs_only_itself(mixture: ReasoningGymTask) -> None:
    problem = problem_of(mixture, "countdown")
    other = f"<answer>({problem.gold})</answer>"
    texts = [other, "<answer>9**9**9**9</answer>", "<answer>1 + 1</answer>", f"<answer>{problem.gold}</answer>"]
    reasons = [verdict.reason for verdict in mixture.score_many([(problem, text, "stop") for text in texts])]
    assert reasons == ["correct", "timeout", "wrong", "correct"]


def test_scorer_that_accepts_anything_is_said() -> None:
    task = gym({"game_of_life_halting": 1})
    assert any("game_of_life_halting gives full marks to a text without an answer" in note for note in task.notes)


@pytest.mark.parametrize(
    ("text", "finished", "multiline", "wanted"),
    [
        ("<answer>a\nb</answer>", False, True, "a\nb"),
        ("1 2\n3 4", True, True, "1 2\n3 4"),
        ("first\n**last**.", True, False, "last"),
        ("<think>x</think>\nlast", True, False, "last"),
        ("cut off", False, False, None),
        ("", True, False, None),
    ],
)
def test_final_answer_is_the_tag_or_the_end(text: str, finished: bool, multiline: bool, wanted: str | None) -> None:
    assert final_answer(text, finished, multiline) == wanted


def test_mistakes_are_said_all_at_once_with_what_is_allowed() -> None:
    bad = {"chainsum": 1, "chain_sum": {"weight": -1, "max_term": 3}}
    with pytest.raises(ConfigError) as caught:
        gym(bad, prompt="no placeholder", heldout_fraction=0.0)
    text = str(caught.value)
    for part in (
        "5 mistakes",
        "task.prompt='no placeholder': must contain {question}",
        "task.heldout_fraction=0.0",
        "task.datasets.chainsum=1: is none of the",
        "Did you mean chain_sum",
        "task.datasets.chain_sum.weight=-1: must be a number above 0",
        "task.datasets.chain_sum.max_term=3: is no setting of this dataset; choose weight, domain, partial, min_terms",
    ):
        assert part in text, text
    with pytest.raises(ConfigError, match="task.datasets={}: needs at least one dataset"):
        gym({})
    with pytest.raises(ConfigError, match="cannot be made: min_terms must be positive"):
        gym({"chain_sum": {"min_terms": 0}})

"""Tasks: where problems come from and how an answer is scored.

A task is an object with `train_problem`, `heldout`, `score`, `format_ok` and `size`; `load_task` turns the
`task` group of the configuration into one. Each kind lives in its own module and is imported only when used.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from reasonrl.errors import ConfigError, Mistake
from reasonrl.types import Problem, Verdict

TASKS = {
    "arithmetic": "reasonrl.tasks.arithmetic",
    "records": "reasonrl.tasks.records",
    "reasoning_gym": "reasonrl.tasks.reasoning_gym",
    "code": "reasonrl.tasks.code",
}


@dataclass
class TaskConfig:
    """Problems to train on and how they are scored; fields of other kinds are refused when set."""

    kind: str = "arithmetic"
    # arithmetic: digits to add up, how often each count appears, share of prompts a guess gets right
    operands: list[int] = field(default_factory=lambda: [4, 5, 6])
    operand_weights: list[float] | None = None
    heldout_operands: list[int] | None = None
    guess_right: float | None = None
    # records and code: a file, its keys, and how a row becomes a prompt
    path: str | None = None
    question_key: str = "question"
    answer_key: str = "answer"
    domain_key: str | None = None
    choices_key: str | None = None
    tests_key: str = "tests"
    split: str | None = None
    heldout_path: str | None = None
    heldout_split: str | None = None
    heldout_fraction: float = 0.1
    limit: int | None = None
    filter: str | None = None
    prompt: str = "{question}"
    system: str | None = None
    chat: bool | None = None
    verifier: str = "numeric"
    percent: bool = False
    timeout_s: float = 3.0
    max_prompt_tokens: int | None = None
    # reasoning_gym: dataset names with weights and their settings
    datasets: dict[str, Any] = field(default_factory=dict)
    # code: how untrusted programs are run
    memory_mb: int = 256
    unsafe: bool = False


class Task(Protocol):
    """What the trainer needs of a task."""

    size: int | None  # number of training problems; None = generated without end
    # thinks = True, where a task has it: the form is `<think>...</think>`, also looked for in token ids

    def train_problem(self, index: int) -> Problem:
        """Return training problem `index`; the same index gives the same problem in every process."""

    def heldout(self, count: int) -> list[Problem]:
        """Return the first `count` held-out problems, fixed for all runs and never trained on."""

    def score(self, problem: Problem, text: str, finish: str) -> Verdict:
        """Score one completion text (special tokens removed); `finish` is stop, length or error."""

    def format_ok(self, text: str) -> bool:
        """Return whether the completion has the wanted form, right or wrong."""


def score_all(task: Task, rows: Sequence[tuple[Problem, str, str]]) -> list[Verdict]:
    """Score (problem, text, finish) rows; a task with `score_many` compares them side by side."""
    many = getattr(task, "score_many", None)
    return many(rows) if many is not None else [task.score(*row) for row in rows]


def load_task(config: TaskConfig, seed: int = 0) -> Task:
    """Build the task of `config.kind`; raises ConfigError for an unknown kind and DataError for bad data."""
    if config.kind not in TASKS:
        raise ConfigError([Mistake("task.kind", config.kind, f"choose one of {', '.join(TASKS)}")])
    return importlib.import_module(TASKS[config.kind]).build(config, seed)

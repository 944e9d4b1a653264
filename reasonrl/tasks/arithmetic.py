"""The built-in task "digit pot": add up distinct digits, answer with a letter (sum mod 10).

A prompt is `^3815=`. A worked-out trace lists (digit, running-sum letter) pairs in any order, for example
`[1b3e5j8h]h$`: n! right paths, so entropy is legitimate at full accuracy. A guess is `?` and the letter of the
last digit: short, deterministic and rarely right. Results use letters and operands digits, which makes "which
digit is still unused" easy for a tiny model. Nine operands are refused: they always sum to 45.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from reasonrl.errors import ConfigError, Mistake
from reasonrl.randomness import stream
from reasonrl.tasks import TaskConfig
from reasonrl.types import Problem, Verdict

if TYPE_CHECKING:
    import numpy as np

LETTERS = "abcdefghij"
MAX_OPERANDS = 8


def digits_of(prompt: str) -> list[int]:
    """Return the operands of a prompt such as `^381=`."""
    return [int(char) for char in prompt if char.isdigit()]


def is_held_out(prompt: str) -> bool:
    """Return whether a prompt belongs to the fifth of all prompts that is never trained on."""
    return hashlib.blake2b(prompt.encode(), digest_size=1).digest()[0] % 5 == 0


def answer_of(digits: list[int]) -> str:
    """Return the letter of the sum of `digits` modulo 10."""
    return LETTERS[sum(digits) % 10]


class Arithmetic:
    """Endless training problems and a fixed held-out set; the same index is the same problem everywhere."""

    size = None

    def __init__(self, config: TaskConfig) -> None:
        self.config = config

    def train_problem(self, index: int) -> Problem:
        """Return training problem `index`."""
        weights = self.config.operand_weights
        return self._problem(
            stream("arithmetic", "train", index), self.config.operands, weights, self.config.guess_right
        )

    def heldout(self, count: int) -> list[Problem]:
        """Return `count` held-out problems with `heldout_operands` (null = the training ones), guesses at chance."""
        operands = self.config.heldout_operands or self.config.operands
        return [self._problem(stream("arithmetic", "heldout", i), operands, None, None, i) for i in range(count)]

    def _problem(
        self,
        rng: np.random.Generator,
        operands: list[int],
        weights: list[float] | None,
        guess_right: float | None,
        held_out: int | None = None,
    ) -> Problem:
        shares = None if weights is None else [weight / sum(weights) for weight in weights]
        count = int(rng.choice(operands, p=shares))
        wanted = None if guess_right is None else bool(rng.random() < guess_right)
        while True:
            digits = [int(digit) for digit in rng.choice(range(1, 10), size=count, replace=False)]
            prompt = "^" + "".join(map(str, digits)) + "="
            right = wanted is None or (answer_of(digits) == LETTERS[digits[-1]]) == wanted
            if right and is_held_out(prompt) == (held_out is not None):
                break
        name = prompt if held_out is None else f"h{held_out}{prompt}"
        return Problem(name, prompt, answer_of(digits), domain=f"n{count}")

    def answer(self, text: str) -> str | None:
        """Return the answer letter at the end of a completion, or None."""
        return text[-1] if text and text[-1] in LETTERS else None

    def score(self, problem: Problem, text: str, finish: str) -> Verdict:
        """Right if the completed text ends in the right letter; a truncated text has no answer."""
        letter = self.answer(text) if finish == "stop" else None
        if letter is None:
            return Verdict(0.0, "not_extracted")
        return Verdict(1.0, "correct") if letter == problem.gold else Verdict(0.0, "wrong")

    def format_ok(self, text: str) -> bool:
        """Return whether a closing bracket stands right before the answer."""
        return len(text) >= 2 and text[-2] == "]" and text[-1] in LETTERS


def check(config: TaskConfig) -> list[Mistake]:
    """Return what is wrong with the arithmetic fields of `config`."""
    mistakes = []
    for key in ("operands", "heldout_operands"):
        counts = getattr(config, key)
        if counts is not None and (not counts or min(counts) < 2 or max(counts) > MAX_OPERANDS):
            allowed = f"counts from 2 to {MAX_OPERANDS} (nine digits always sum to 45)"
            cure = f"For instance task.{key}=[5,6]" + (", or null for task.operands." if key != "operands" else ".")
            mistakes.append(Mistake(f"task.{key}", counts, allowed, cure))
    weights = config.operand_weights
    count = len(config.operands)
    if count and weights is not None and (len(weights) != count or min(weights) < 0 or sum(weights) <= 0):
        allowed = f"one weight >= 0 for each of the {count} entries of task.operands, not all 0"
        mistakes.append(Mistake("task.operand_weights", weights, allowed, "Or null: all are as frequent."))
    if config.guess_right is not None and not 0 <= config.guess_right <= 1:
        mistakes.append(Mistake("task.guess_right", config.guess_right, "a share from 0 to 1, or null for chance"))
    if config.guess_right and 2 in config.operands:
        # a guess is right when the other digits sum to a multiple of 10, which one digit never does
        mistakes.append(Mistake("task.guess_right", config.guess_right, "0 or null when task.operands has 2"))
    return mistakes


def build(config: TaskConfig, seed: int = 0) -> Arithmetic:
    """Return the task; raises ConfigError when its fields make no sense."""
    mistakes = check(config)
    if mistakes:
        raise ConfigError(mistakes)
    return Arithmetic(config)

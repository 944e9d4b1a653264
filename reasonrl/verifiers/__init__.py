"""Verifiers: is the answer of a completion the gold answer, and if not, why not.

Reasons: correct, wrong, not_extracted (no answer was found), undecided (the rule cannot compare the two),
timeout (the comparison passed its limit of time or memory). Everything but correct is worth 0.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass

from reasonrl.errors import ConfigError, Mistake
from reasonrl.types import Verdict

VERIFIERS = {
    "numeric": "reasonrl.verifiers.numeric",
    "math": "reasonrl.verifiers.math",
    "exact": "reasonrl.verifiers.exact",
    "choice": "reasonrl.verifiers.choice",
}
REASONS = ("correct", "wrong", "not_extracted", "undecided", "timeout")


@dataclass(frozen=True)
class Options:
    """What a task says of its answers: whether 13% means 0.13, and how long one comparison may take (seconds)."""

    percent: bool = False
    timeout_s: float = 3.0


class Verifier:
    """One of VERIFIERS with a task's options; raises ConfigError for an unknown name."""

    def __init__(self, name: str, options: Options | None = None) -> None:
        if name not in VERIFIERS:
            raise ConfigError([Mistake("task.verifier", name, f"choose one of {', '.join(VERIFIERS)}")])
        self.name = name
        self.options = options or Options()
        self._rule = importlib.import_module(VERIFIERS[name])

    def read_gold(self, text: str) -> str | None:
        """Return the final answer that a gold text states, in one canonical spelling; None when none can be read."""
        return self._rule.read_gold(text, self.options)

    def answer(self, text: str) -> str | None:
        """Return the final answer that a completion states, or None; equal answers are spelled alike where known."""
        return self._rule.answer(text, self.options)

    def check(self, gold: str, text: str, finished: bool = True) -> Verdict:
        """Judge one completion against a gold from `read_gold`; `finished` is False where the token limit cut it."""
        return self.check_many([(gold, text, finished)])[0]

    def check_many(self, rows: Sequence[tuple[str, str, bool]]) -> list[Verdict]:
        """Judge (gold, text, finished) rows; one that hangs costs its own time limit and nothing else."""
        many = getattr(self._rule, "verify_many", None)
        if many is not None:
            return many(rows, self.options)
        return [self._rule.verify(gold, text, self.options, finished) for gold, text, finished in rows]


__all__ = ["REASONS", "VERIFIERS", "Options", "Verdict", "Verifier"]

"""One tree of exceptions; all of them survive pickling, so a worker's error comes back whole."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


class ReasonRLError(Exception):
    """Base of every error this project raises on purpose."""


class DataError(ReasonRLError):
    """A data file is missing, unreadable or holds nothing usable."""


class ModelError(ReasonRLError):
    """A model directory is missing, is not a model, or does not fit the task."""


class CheckpointError(ReasonRLError):
    """No sound checkpoint could be read or written."""


class VerifierError(ReasonRLError):
    """A verifier itself failed; a wrong answer is data, not an error."""


class EngineError(ReasonRLError):
    """A worker, slot or device could not be used as asked."""


class TrainingError(ReasonRLError):
    """Training cannot go on (for instance: no usable group in `data.patience` steps)."""


class AnalysisError(ReasonRLError):
    """Recorded runs cannot answer what was asked of them."""


@dataclass(frozen=True)
class Mistake:
    """One thing wrong with a configuration: the key, its value, what is allowed, the cure."""

    key: str
    value: object
    allowed: str
    cure: str = ""

    def __str__(self) -> str:
        cure = f" {self.cure}" if self.cure else ""
        return f"{self.key}={self.value}: {self.allowed}.{cure}"


class ConfigError(ReasonRLError):
    """Everything that is wrong with a configuration, reported at once."""

    def __init__(self, mistakes: Iterable[Mistake]) -> None:
        self.mistakes = tuple(mistakes)
        super().__init__(self.mistakes)

    def __str__(self) -> str:
        count = len(self.mistakes)
        head = "1 mistake" if count == 1 else f"{count} mistakes"
        return "\n".join([f"The configuration has {head}:"] + [f"  - {mistake}" for mistake in self.mistakes])

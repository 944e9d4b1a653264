"""One tree of exceptions; all of them survive pickling, so a worker's error comes back whole."""

from __future__ import annotations

import errno
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
    """One thing wrong with a configuration: key, value (`...`: none to show), what is allowed, the cure."""

    key: str
    value: object
    allowed: str
    cure: str = ""

    def __str__(self) -> str:
        cure = f" {self.cure}" if self.cure else ""
        value = "null" if self.value is None else "''" if self.value == "" else self.value
        where = self.key if self.value is ... else f"{self.key}={value}"
        return f"{where}: {self.allowed}.{cure}"


class ConfigError(ReasonRLError):
    """Everything that is wrong with a configuration, reported at once."""

    def __init__(self, mistakes: Iterable[Mistake]) -> None:
        self.mistakes = tuple(mistakes)
        super().__init__(self.mistakes)

    def __str__(self) -> str:
        count = len(self.mistakes)
        head = "1 mistake" if count == 1 else f"{count} mistakes"
        return "\n".join([f"The configuration has {head}:"] + [f"  - {mistake}" for mistake in self.mistakes])


_DISK = {errno.ENOSPC, errno.EDQUOT}
_OOM_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory", "defaultcpuallocator")
_HARDWARE_WORDS = ("cuda error", "nccl", "cudnn_status", "cublas_status", "uncorrectable ecc", "device-side")
_MACHINE = {errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EMFILE, errno.ENFILE}


def classify(error: BaseException) -> str:
    """Return which way a run failed: oom, killed, non_finite, infrastructure, or user_code when it is none of these."""
    text = f"{type(error).__name__}: {error}".lower()
    if isinstance(error, KeyboardInterrupt):
        return "killed"
    if isinstance(error, MemoryError) or "outofmemory" in text or any(word in text for word in _OOM_WORDS):
        return "oom"
    if isinstance(error, FloatingPointError) or "non-finite" in text:
        return "non_finite"
    if is_disk_full(error) or any(word in text for word in _HARDWARE_WORDS):
        return "infrastructure"
    if isinstance(error, (ConnectionError, TimeoutError, CheckpointError, EngineError)):
        return "infrastructure"
    if isinstance(error, OSError) and error.errno in _MACHINE:
        return "infrastructure"
    return "user_code"


def is_disk_full(error: BaseException) -> bool:
    """Return whether the disk (or a quota) is full; also where that is the cause of another exception, or its text."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in _DISK:
            return True
        seen = seen.__cause__ or seen.__context__
    return "no space left on device" in str(error).lower()

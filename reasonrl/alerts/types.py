"""The records that rules and monitor exchange: a rule, what it found, and the alert raised from that."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reasonrl.alerts.history import History

SEVERITIES = ("note", "flag", "stop")
Limits = Mapping[str, float]


@dataclass(frozen=True)
class Finding:
    """What a rule found, in one sentence, with the numbers behind it.

    badness: any number that doubles when the finding is twice as bad; it is raised again only then.
    intervention: config overrides that replace the rule's own.
    """

    severity: str
    message: str
    evidence: dict[str, Any] = field(default_factory=dict)
    badness: float = 0.0
    intervention: tuple[str, ...] | None = None


Check = Callable[["History", Limits], Finding | None]
Needs = tuple[str | tuple[str, ...], ...]


@dataclass(frozen=True)
class Rule:
    """A check with its code, title, inputs and limits.

    needs: metric names without which it is skipped; a tuple among them means any one of its names. `eval` stands
    for any held-out score, `parts` for a format and a correctness reward part, `any` for any row.
    helps: inputs without which it cannot reach its higher severities.
    warmup: rollout steps before it may speak, confirm: evaluations in a row; None takes the configured value.
    """

    code: str
    title: str
    check: Check
    needs: Needs = ()
    helps: Needs = ()
    limits: Mapping[str, float] = field(default_factory=dict)
    intervention: tuple[str, ...] = ()
    warmup: int | None = None
    confirm: int | None = None
    name: str = ""

    @property
    def key(self) -> str:
        """Unique name of the rule within a profile (two rules may share a code)."""
        return self.name or self.code

    def inputs(self) -> frozenset[str]:
        """Every metric name the rule may read."""
        return frozenset(flatten(self.needs + self.helps))


def flatten(names: Needs) -> list[str]:
    """The names of a `needs` tuple, alternatives included."""
    return [name for item in names for name in (item if isinstance(item, tuple) else (item,))]


@dataclass(frozen=True)
class Alert:
    """One raised finding; `step` and the evidence's window are in the log's own steps."""

    code: str
    title: str
    severity: str
    step: float
    message: str
    evidence: dict[str, Any]
    intervention: list[str]

    def to_event(self) -> dict[str, Any]:
        """Return the event that the run's log keeps."""
        step = int(self.step) if float(self.step).is_integer() else self.step
        return {"type": "alert", "time": time.time(), **asdict(self), "step": step}

    def __str__(self) -> str:
        hint = f" Try {' or '.join(self.intervention)}." if self.intervention else ""
        return f"{self.severity} {self.code} {self.title} at step {self.step:g}: {self.message}{hint}"

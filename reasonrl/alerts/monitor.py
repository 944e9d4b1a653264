"""`AlertMonitor`: feeds a run's rows to the rules and guards against false alarms.

Guards: warm-up, confirmation in a row, hysteresis (raised once, and again only when worse), and saying which rules
were skipped or limited because an input was never logged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from reasonrl.alerts.config import AlertsConfig
from reasonrl.alerts.history import History
from reasonrl.alerts.plugins import load_rules
from reasonrl.alerts.types import SEVERITIES, Alert, Finding, Needs, Rule, flatten
from reasonrl.alerts.vocabulary import is_score, part_kind
from reasonrl.errors import ConfigError, Mistake

WORSE = 2.0  # a finding is raised again at the same severity once its badness grew by this factor
ALWAYS_TRACKED = ("reward/total", "reward/std", "entropy/mean", "groups/flat", "groups/all_wrong", "optim/lr")


class AlertMonitor:
    """Feed rows, get alerts. Work per row is constant; `state` and `load_state` make a resumed run raise the same.

    unit: logged steps per rollout step ("rollout" = 1; 16 for curves over gradient steps with 16 updates each).
    settings: dotted config values of the run (optim.lr, kl.coef, ...), from which interventions get their numbers;
    eval.problems and eval.samples tell how noisy an evaluation is.
    group_size: rollouts per problem, for the flat share expected by chance.
    """

    def __init__(
        self,
        config: AlertsConfig | None = None,
        unit: float | str = 1,
        *,
        settings: Mapping[str, Any] | None = None,
        group_size: int = 0,
    ) -> None:
        self.config = config or AlertsConfig()
        self.rules = load_rules(self.config)
        self.settings = dict(settings or {})
        self.limits = {r.key: {**r.limits, **self.config.rules.get(r.code, {})} for r in self.rules}
        tracked = {name for rule in self.rules for name in rule.inputs()} | set(ALWAYS_TRACKED)
        evaluation = _count(self.settings, "eval.problems"), _count(self.settings, "eval.samples")
        self.history = History(self.config.window, _unit(unit), tracked, group_size, evaluation)
        self._wakes = [frozenset(flatten(rule.needs)) for rule in self.rules]
        self._awake: dict[frozenset[str], list[tuple[Rule, str, int]]] = {}

    def update(self, step: float, metrics: Mapping[str, float]) -> list[Alert]:
        """Add the metrics of one step and return the alerts they raise; several calls for one step are merged.

        A rule speaks only in a row that brought one of its needed inputs, so that an evaluation row between two
        train rows neither breaks nor lengthens a streak.
        """
        history = self.history
        names = history.push(step, metrics)
        if not names and not history.bad_fields:
            return []
        passed = history.rollouts()
        raised = []
        for rule, key, warmup in self._rules_for(frozenset(names)):
            if passed < warmup:
                continue
            finding = rule.check(history, self.limits[key])
            if finding is None:
                self._clear(key)
            elif (alert := self._judge(rule, finding)) is not None:
                raised.append(alert)
        return raised

    def _rules_for(self, names: frozenset[str]) -> list[tuple[Rule, str, int]]:
        """The rules that a row with these metrics wakes, with their keys and warm-ups."""
        if names not in self._awake:
            woken = names | {"any"}
            woken |= {"eval"} if any(is_score(name) for name in names) else set()
            woken |= {"parts"} if any(part_kind(name) for name in names) else set()
            rules = [rule for rule, wake in zip(self.rules, self._wakes, strict=True) if not wake.isdisjoint(woken)]
            if len(self._awake) > 100:  # a log whose every row has other columns
                self._awake.clear()
            self._awake[names] = [(r, r.key, self.config.warmup if r.warmup is None else r.warmup) for r in rules]
        return self._awake[names]

    def _clear(self, key: str) -> None:
        if key in self.history.streaks:
            del self.history.streaks[key]
            del self.history.since[key]

    def _judge(self, rule: Rule, finding: Finding) -> Alert | None:
        """Apply confirmation and hysteresis; streaks count findings in a row at or above each severity."""
        history, key = self.history, rule.key
        rank = SEVERITIES.index(finding.severity)
        before = history.streaks.get(key, [0, 0, 0])
        streaks = [count + 1 if index <= rank else 0 for index, count in enumerate(before)]
        history.streaks[key] = streaks
        history.since.setdefault(key, history.step)
        confirm = self.config.confirm if rule.confirm is None else rule.confirm
        confirmed = max((index for index in range(3) if streaks[index] >= confirm), default=-1)
        severity, badness = history.raised.get(key, ("", 0.0))
        known = SEVERITIES.index(severity) if severity else -1
        if confirmed < 0 or confirmed < known:
            return None
        if confirmed == known and not finding.badness >= WORSE * badness > 0:
            return None
        history.raised[key] = [SEVERITIES[confirmed], finding.badness]
        wanted = rule.intervention if finding.intervention is None else finding.intervention
        evidence = {name: _rounded(value) for name, value in finding.evidence.items()}
        return Alert(
            rule.code, rule.title, SEVERITIES[confirmed], history.step, finding.message, evidence,
            [self._resolve(text) for text in wanted],
        )  # fmt: skip

    def _resolve(self, text: str) -> str:
        """Turn 'optim.lr / 3' into 'optim.lr=1.33e-05' where the present value is known."""
        match = re.fullmatch(r"([\w.]+) ([*/]) ([\d.]+)", text)
        if match is None:
            return text
        key, factor = match[1], float(match[3])
        value = self.settings.get(key)
        rate = self.history.train.get("optim/lr")
        if key == "optim.lr" and value is None and rate is not None:
            value = rate.highest
        if isinstance(value, bool) or not isinstance(value, int | float):
            return text
        if key == "kl.coef" and value == 0:
            return "kl.coef=0.001"
        new = value * factor if match[2] == "*" else value / factor
        return f"{key}={max(1, round(new))}" if isinstance(value, int) else f"{key}={new:.3g}"

    # ---- what could not be judged
    def skipped(self) -> dict[str, list[str]]:
        """Return {rule: inputs never seen} for the rules that could not be applied at all."""
        return {rule.key: missing for rule in self.rules if (missing := self._missing(rule.needs))}

    def limited(self) -> dict[str, list[str]]:
        """Return {rule: inputs never seen} for rules that ran without inputs of their higher severities."""
        skipped = self.skipped()
        rules = [rule for rule in self.rules if rule.key not in skipped]
        return {rule.key: missing for rule in rules if (missing := self._missing(rule.helps))}

    def _missing(self, needs: Needs) -> list[str]:
        options = [item if isinstance(item, tuple) else (item,) for item in needs]
        return [" or ".join(names) for names in options if not any(self._was_seen(name) for name in names)]

    def _was_seen(self, name: str) -> bool:
        seen = self.history.seen
        if name == "any":
            return self.history.rows > 0
        if name == "eval":
            return any(is_score(known) for known in seen)
        if name == "parts":
            return {"format", "correct"} <= {part_kind(known) for known in seen}
        return name in seen

    # ---- resuming
    def state(self) -> dict[str, Any]:
        """Return everything needed to continue, as JSON-able data."""
        return {"version": 1, "profile": self.config.profile, "history": self.history.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state` was taken."""
        self.history.load_state(state["history"])


def _rounded(value: Any) -> Any:
    """Floats to six digits and spelled out when not finite, also inside lists and mappings, so that JSON holds them."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(name): _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


def _count(settings: Mapping[str, Any], key: str) -> int:
    value = settings.get(key)
    return value if isinstance(value, int) and value > 0 else 0


def _unit(unit: float | str) -> float:
    value = 1.0 if unit == "rollout" else unit
    if isinstance(value, str) or not 0 < value < float("inf"):
        raise ConfigError([Mistake("unit", unit, "logged steps per rollout step, above 0, or 'rollout'")])
    return float(value)

"""Alerts: rules over recorded history, raised with a code, a severity, the evidence and what to try next.

`AlertMonitor` feeds a run's rows to the rules of a profile and does everything that protects against false
alarms: warm-up, confirmation, hysteresis, and saying which rules were skipped for missing inputs. The rules are in
`alert_rules` (graded) and `alert_textbook`; docs/alerts.md shows how to add one.
"""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from reasonrl.alert_history import History, is_score, part_kind
from reasonrl.alert_rules import GRADED, SEVERITIES, Finding, Rule
from reasonrl.alert_textbook import TEXTBOOK
from reasonrl.errors import ConfigError, Mistake

PROFILES: dict[str, tuple[Rule, ...]] = {"graded": GRADED, "textbook": TEXTBOOK, "off": ()}
KNOWN_CODES = tuple(f"A{number:02d}" for number in range(1, 20))


@dataclass
class AlertsConfig:
    """Which rules watch a run and how patient they are."""

    profile: str = "graded"  # graded, textbook or off
    on_stop: str = "stop"  # what a single run does on a stop: stop or continue
    warmup: int = 20  # rollout steps before the trend rules may speak
    window: int = 10  # rollout steps and rows a level is averaged over, whichever is longer
    confirm: int = 3  # evaluations in a row before a finding is raised
    rules: dict[str, dict[str, float]] = field(
        default_factory=dict
    )  # {code: {limit: value}} over the defaults
    disable: list[str] = field(default_factory=list)  # codes that stay silent
    plugins: list[str] = field(default_factory=list)  # dotted paths of user rules, package.module.function

    def mistakes(self) -> list[Mistake]:
        """Return everything that is wrong here, without importing the plugins' modules."""
        found = []
        if self.profile not in PROFILES:
            found.append(Mistake("alerts.profile", self.profile, "choose graded, textbook or off"))
        if self.on_stop not in ("stop", "continue"):
            found.append(Mistake("alerts.on_stop", self.on_stop, "choose stop or continue"))
        for name, least in (("warmup", 0), ("window", 2), ("confirm", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                found.append(Mistake(f"alerts.{name}", value, f"a whole number of at least {least}"))
        limits: dict[str, set[str]] = {}
        for rule in PROFILES.get(self.profile, ()):
            limits.setdefault(rule.code, set()).update(rule.limits)
        for code, values in self.rules.items():
            found += self._limit_mistakes(code, values, limits)
        for code in self.disable:
            if code not in KNOWN_CODES and not self.plugins:
                found.append(Mistake("alerts.disable", code, f"known codes are {', '.join(KNOWN_CODES)}"))
        for path in self.plugins:
            if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", path):
                found.append(Mistake("alerts.plugins", path, "a dotted path such as my_rules.too_short"))
        return found

    def _limit_mistakes(self, code: str, values: Any, limits: Mapping[str, set[str]]) -> list[Mistake]:
        key = f"alerts.rules.{code}"
        if code not in limits:
            if self.plugins or (code in KNOWN_CODES and self.profile != "graded"):
                return []  # may belong to a plugin, or to the other profile
            return [Mistake(key, values, f"rules with limits are {', '.join(sorted(limits))}")]
        if not isinstance(values, Mapping):
            return [Mistake(key, values, f"a mapping of limits: {', '.join(sorted(limits[code]))}")]
        found = []
        for name, value in values.items():
            if name not in limits[code]:
                found.append(
                    Mistake(f"{key}.{name}", value, f"limits of {code} are {', '.join(sorted(limits[code]))}")
                )
            elif isinstance(value, bool) or not isinstance(value, (int, float)):
                found.append(Mistake(f"{key}.{name}", value, "a number"))
        return found


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
        return {"type": "alert", "time": time.time(), **asdict(self)}

    def __str__(self) -> str:
        hint = f" Try {' or '.join(self.intervention)}." if self.intervention else ""
        return f"{self.severity} {self.code} {self.title} at step {self.step:g}: {self.message}{hint}"


def alert_rule(
    code: str, title: str, needs: Iterable[str | tuple[str, ...]], *, warmup: int | None = None,
    confirm: int | None = None, intervention: Iterable[str] = (), **limits: float,
) -> Callable[[Callable[..., Finding | None]], Callable[..., Finding | None]]:  # fmt: skip
    """Mark a function `(history, limits) -> Finding | None` as a rule; name its dotted path in `alerts.plugins`."""

    def mark(check: Callable[..., Finding | None]) -> Callable[..., Finding | None]:
        rule = Rule(code, title, check, tuple(needs), (), limits, warmup, confirm, tuple(intervention))
        check.alert_rule = rule  # type: ignore[attr-defined]
        return check

    return mark


def load_plugin(path: str) -> Rule:
    """Import a user rule by its dotted path; raises ConfigError when there is none."""
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            [Mistake("alerts.plugins", path, f"cannot be imported ({error})", "Is it on PYTHONPATH?")]
        ) from error
    rule = getattr(found, "alert_rule", None)
    if not isinstance(rule, Rule):
        raise ConfigError(
            [Mistake("alerts.plugins", path, "is no rule", "Decorate it with reasonrl.alerts.alert_rule.")]
        )
    return rule


def load_rules(config: AlertsConfig) -> list[Rule]:
    """Return the rules of the profile and the plugins, without the disabled ones; raises ConfigError."""
    mistakes = config.mistakes()
    if mistakes:
        raise ConfigError(mistakes)
    rules = [*PROFILES[config.profile], *(load_plugin(path) for path in config.plugins)]
    return [rule for rule in rules if rule.code not in config.disable]


class AlertMonitor:
    """Feed rows, get alerts. Work per row is constant; `state` and `load_state` make a resumed run raise the same.

    unit: logged steps per rollout step (16 for the published DAPO curves, which count gradient steps).
    settings: dotted config values of the run (optim.lr, kl.coef, ...), from which interventions get their numbers.
    group_size: rollouts per problem, for the flat share expected by chance.
    """

    def __init__(
        self,
        config: AlertsConfig,
        unit: float = 1,
        *,
        settings: Mapping[str, Any] | None = None,
        group_size: int = 0,
    ) -> None:
        if not unit > 0:
            raise ConfigError([Mistake("unit", unit, "logged steps per rollout step, above 0")])
        self.config = config
        self.rules = load_rules(config)
        self.settings = dict(settings or {})
        self.limits = {rule.key: {**rule.limits, **config.rules.get(rule.code, {})} for rule in self.rules}
        inputs = {name for rule in self.rules for name in _flatten((*rule.needs, *rule.helps))}
        tracked = inputs | {"reward/total", "reward/std", "entropy/mean", "groups/flat", "optim/lr"}
        self.history = History(config.window, unit, tracked, group_size=group_size)
        self._wakes = [self._waking_inputs(rule) for rule in self.rules]

    @staticmethod
    def _waking_inputs(rule: Rule) -> frozenset[str] | None:
        """Names whose new values let a rule speak again; None: every row."""
        names = set(_flatten(rule.needs))
        return None if "any" in names else frozenset(names)

    def update(self, step: float, metrics: Mapping[str, float]) -> list[Alert]:
        """Add the metrics of one step and return the alerts raised by it (several calls per step are merged)."""
        history = self.history
        fresh = history.push(step, metrics)
        if not fresh and not history.bad_fields:
            return []
        raised = []
        passed = history.rollouts()
        has_eval = any(name.startswith("eval/") for name in fresh)
        has_part = any(part_kind(name) for name in fresh)
        for rule, wakes in zip(self.rules, self._wakes, strict=True):
            if wakes is not None and wakes.isdisjoint(fresh):
                woken = ("eval" in wakes and has_eval) or ("reward parts" in wakes and has_part)
                if not woken:
                    continue
            if passed < (self.config.warmup if rule.warmup is None else rule.warmup):
                continue
            finding = rule.check(history, self.limits[rule.key])
            alert = self._judge(rule, finding)
            if alert is not None:
                raised.append(alert)
        return raised

    def _judge(self, rule: Rule, finding: Finding | None) -> Alert | None:
        """Apply confirmation and hysteresis; the streaks count findings in a row at or above each severity."""
        history, key = self.history, rule.key
        if finding is None:
            history.streaks.pop(key, None)
            history.since.pop(key, None)
            return None
        rank = SEVERITIES.index(finding.severity)
        streaks = history.streaks.setdefault(key, [0, 0, 0])
        history.since.setdefault(key, history.step)
        for index in range(3):
            streaks[index] = streaks[index] + 1 if index <= rank else 0
        confirm = self.config.confirm if rule.confirm is None else rule.confirm
        confirmed = max((index for index in range(3) if streaks[index] >= confirm), default=-1)
        before = SEVERITIES.index(history.raised[key]) if key in history.raised else -1
        if confirmed <= before:
            return None
        history.raised[key] = SEVERITIES[confirmed]
        wanted = rule.intervention if finding.intervention is None else finding.intervention
        return Alert(
            rule.code, rule.title, SEVERITIES[confirmed], history.step, finding.message, dict(finding.evidence),
            self._interventions(wanted),
        )  # fmt: skip

    def _interventions(self, wanted: Iterable[str]) -> list[str]:
        """Turn 'optim.lr / 3' into 'optim.lr=1.33e-05' where the present value is known."""
        out = []
        for text in wanted:
            match = re.fullmatch(r"([\w.]+) ([*/]) ([\d.]+)", text)
            if match is None:
                out.append(text)
                continue
            key, sign, factor = match[1], match[2], float(match[3])
            value = self.settings.get(key)
            if key == "optim.lr" and value is None and "optim/lr" in self.history.train:
                value = self.history.train["optim/lr"].highest
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                if key == "kl.coef" and value == 0:
                    out.append("kl.coef=0.001")
                    continue
                new = value * factor if sign == "*" else value / factor
                out.append(f"{key}={max(1, round(new))}" if isinstance(value, int) else f"{key}={new:.3g}")
            else:
                out.append(f"{key} {sign} {factor:g}")
        return out

    def skipped(self) -> dict[str, list[str]]:
        """Return {rule key: inputs never seen} for the rules that could not be applied at all."""
        return {rule.key: missing for rule in self.rules if (missing := self._missing(rule.needs))}

    def limited(self) -> dict[str, list[str]]:
        """Return {rule key: inputs never seen} for rules that ran but without some that raise their severity."""
        skipped = self.skipped()
        return {
            rule.key: missing
            for rule in self.rules
            if rule.key not in skipped and (missing := self._missing(rule.helps))
        }

    def _missing(self, names: Iterable[str | tuple[str, ...]]) -> list[str]:
        missing = []
        for item in names:
            options = item if isinstance(item, tuple) else (item,)
            if not any(self._was_seen(name) for name in options):
                missing.append(" or ".join(options))
        return missing

    def _was_seen(self, name: str) -> bool:
        if name == "any":
            return self.history.rows > 0
        if name == "eval":
            return any(is_score(seen) for seen in self.history.seen)
        if name == "reward parts":
            kinds = {part_kind(seen) for seen in self.history.seen}
            return {"format", "correct"} <= kinds
        return name in self.history.seen

    def state(self) -> dict[str, Any]:
        """Return everything needed to continue, as JSON-able data."""
        return {"version": 1, "profile": self.config.profile, "history": self.history.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state` was taken."""
        self.history.load_state(state["history"])


def _flatten(names: Iterable[str | tuple[str, ...]]) -> list[str]:
    return [name for item in names for name in (item if isinstance(item, tuple) else (item,))]


def edge_alert(
    key: str, value: float, low: float, high: float, log: bool = False, share: float = 0.05
) -> Alert | None:
    """A18: return a flag when the best `value` of a search lies within `share` of an edge of its range, else None."""
    import math

    if log:
        value_at, low_at, high_at = math.log(value), math.log(low), math.log(high)
    else:
        value_at, low_at, high_at = value, low, high
    place = (value_at - low_at) / (high_at - low_at) if high_at > low_at else 0.5
    if share < place < 1 - share:
        return None
    edge, wider = ("lower", low) if place <= share else ("upper", high)
    width = high / low if log else high - low
    new = (
        (low / width, high)
        if edge == "lower" and log
        else (low, high * width)
        if log
        else (low - width, high)
        if edge == "lower"
        else (low, high + width)
    )
    evidence = {"key": key, "value": value, "low": low, "high": high, "edge": edge}
    message = f"The best {key} ({value:.4g}) lies at the {edge} edge of its range ({wider:.4g}): the optimum may lie beyond."
    return Alert(
        "A18",
        "best value at the edge",
        "flag",
        0,
        message,
        evidence,
        [f"sweep.space.{key}=interval({new[0]:.4g},{new[1]:.4g})"],
    )

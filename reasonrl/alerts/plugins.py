"""Rules of the user's own: mark a function with `alert_rule`, name its dotted path in `alerts.plugins`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable

from reasonrl.alerts.config import AlertsConfig
from reasonrl.alerts.types import Check, Needs, Rule
from reasonrl.errors import ConfigError, Mistake


def alert_rule(
    code: str, title: str, needs: Needs, *, warmup: int | None = None, confirm: int | None = None,
    intervention: Iterable[str] = (), **limits: float,
) -> Callable[[Check], Check]:  # fmt: skip
    """Mark a function `(history, limits) -> Finding | None` as a rule; its limits become `alerts.rules.<code>`."""

    def mark(check: Check) -> Check:
        rule = Rule(code, title, check, tuple(needs), (), limits, tuple(intervention), warmup, confirm)
        check.alert_rule = rule  # type: ignore[attr-defined]
        return check

    return mark


def load_plugin(path: str) -> Rule:
    """Import a user rule by its dotted path, from the working folder too; raises ConfigError when there is none."""
    module, _, name = path.rpartition(".")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        cure = "Its file must be in the working folder or on PYTHONPATH."
        raise ConfigError([Mistake("alerts.plugins", path, f"cannot be imported ({error})", cure)]) from error
    rule = getattr(found, "alert_rule", None)
    if not isinstance(rule, Rule):
        cure = "Decorate it with reasonrl.alerts.alert_rule."
        raise ConfigError([Mistake("alerts.plugins", path, "is no alert rule", cure)])
    return rule


def load_rules(config: AlertsConfig) -> list[Rule]:
    """Return the rules of the profile and the plugins, without the disabled ones; raises ConfigError."""
    from reasonrl.alerts.profiles import PROFILES

    mistakes = config.mistakes()
    if mistakes:
        raise ConfigError(mistakes)
    rules = [*PROFILES[config.profile], *(load_plugin(path) for path in config.plugins)]
    keys = [rule.key for rule in rules]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        cure = "Give your rule a code of its own, e.g. U01."
        raise ConfigError([Mistake("alerts.plugins", key, "is the code of two rules", cure) for key in twice])
    return [rule for rule in rules if rule.code not in config.disable]

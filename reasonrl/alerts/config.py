"""The user's choices about alerts, and everything that can be wrong with them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from reasonrl.errors import Mistake


@dataclass
class AlertsConfig:
    """Which rules watch a run, and how patient they are."""

    profile: str = "graded"  # graded, textbook or off
    on_stop: str = "stop"  # what a single run does on a stop: stop or continue
    warmup: int = 20  # rollout steps before the trend rules may speak
    window: int = 10  # rollout steps and rows a level is averaged over, whichever is longer
    confirm: int = 3  # evaluations in a row before a finding is raised
    rules: dict[str, dict[str, float]] = field(default_factory=dict)  # {code: {limit: value}} over the defaults
    disable: list[str] = field(default_factory=list)  # codes that stay silent
    plugins: list[str] = field(default_factory=list)  # dotted paths of user rules, package.module.function

    def mistakes(self) -> list[Mistake]:
        """Return everything that is wrong here; plugins are looked at by name only."""
        return [*self._plain_mistakes(), *self._limit_mistakes()]

    def _plain_mistakes(self) -> Iterator[Mistake]:
        from reasonrl.alerts.profiles import CODES, PROFILES

        if self.profile not in PROFILES:
            yield Mistake("alerts.profile", self.profile, "choose graded, textbook or off")
        if self.on_stop not in ("stop", "continue"):
            yield Mistake("alerts.on_stop", self.on_stop, "choose stop or continue")
        for name, least in (("warmup", 0), ("window", 2), ("confirm", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                yield Mistake(f"alerts.{name}", value, f"a whole number of at least {least}")
        for code in self.disable:
            if code not in CODES and not self.plugins:
                yield Mistake("alerts.disable", code, f"known codes are {', '.join(CODES)}")
        for path in self.plugins:
            if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", str(path)):
                yield Mistake("alerts.plugins", path, "a dotted path such as my_rules.too_short")

    def _limit_mistakes(self) -> Iterator[Mistake]:
        from reasonrl.alerts.profiles import PROFILES

        known: dict[str, set[str]] = {}
        for rule in (rule for rules in PROFILES.values() for rule in rules):
            known.setdefault(rule.code, set()).update(rule.limits)
        for code, values in self.rules.items():
            key = f"alerts.rules.{code}"
            if code not in known:
                if not self.plugins:
                    yield Mistake(key, values, f"rules with limits are {', '.join(sorted(known))}")
                continue
            allowed = f"limits of {code} are {', '.join(sorted(known[code]))}"
            if not isinstance(values, Mapping):
                yield Mistake(key, values, allowed)
                continue
            for name, value in values.items():
                if name not in known[code]:
                    yield Mistake(f"{key}.{name}", value, allowed)
                elif not _is_number(value):
                    yield Mistake(f"{key}.{name}", value, "a finite number")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value - value == 0

"""A diagnosis as text: the verdict on top, then one line per rule that found something, its evidence and its cure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from reasonrl.alerts import Alert
from reasonrl.alerts.readings import short
from reasonrl.alerts.types import SEVERITIES
from reasonrl.alerts.vocabulary import is_score

if TYPE_CHECKING:
    from analysis.diagnose import Diagnosis

SHOWN_NAMES = 12


def describe(found: Diagnosis) -> str:
    """The findings as text; a rule that raised its finding several times gets one line, `--json` has each."""
    unit = "rollout steps" if found.updates_per_rollout == 1 else f"{found.updates_per_rollout:g} per rollout step"
    lines = [
        f"{found.path}",
        f"  {found.kind}, {found.rows} rows, steps {found.first_step:g} to {found.last_step:g} ({unit})",
        f"  verdict: {verdict(found)}",
    ]
    lines += [f"  note: {note}" for note in found.notes]
    for alerts in by_rule(found.alerts):
        lines += _finding(alerts)
    for words, rules in _inputs(found):
        if rules:
            lines.append(f"  {words}: " + "; ".join(f"{code} ({', '.join(names)})" for code, names in rules.items()))
    if found.unknown:
        more = len(found.unknown) - SHOWN_NAMES
        names = ", ".join(found.unknown[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")
        lines.append(f"  unknown names (checked for NaN only): {names}")
    return "\n".join(lines)


def _inputs(found: Diagnosis) -> list[tuple[str, dict[str, list[str]]]]:
    """What the rules lacked, in words: columns that are missing, and columns that are there and never finite."""
    parts = []
    for words, rules in (("skipped, input", found.skipped), ("judged in part,", found.limited)):
        for end, wanted in (("not logged", False), ("logged but never finite", True)):
            chosen = {code: [n for n in names if _is_empty(n, found) == wanted] for code, names in rules.items()}
            parts.append((f"{words} {end}", {code: names for code, names in chosen.items() if names}))
    return parts


def _is_empty(names: str, found: Diagnosis) -> bool:
    """Whether an input (`a or b`, `eval`) was logged without any finite value."""
    if names == "eval":
        return any(is_score(name) for name in found.never_finite)
    return any(name in found.never_finite for name in names.split(" or "))


def verdict(found: Diagnosis) -> str:
    """One line: the worst that was found, by which rules, when first, and on how many rules this rests."""
    skipped = f"; {len(found.skipped)} rules had no input" if found.skipped else ""
    if not found.judged:
        return f"cannot judge: no rule found its inputs{skipped}"
    if not found.alerts:
        return f"no findings{skipped}"
    parts = []
    for severity in reversed(SEVERITIES):
        first: dict[str, float] = {}
        for alert in found.alerts:
            if alert.severity == severity:
                first.setdefault(f"{alert.code} {alert.title}", alert.step)
        if first:
            names = ", ".join(f"{name} (step {step:g})" for name, step in first.items())
            parts.append(f"{severity.upper()} {names}")
    if found.worst == "note":
        parts = [part.replace("NOTE", "only notes,", 1) for part in parts]
    else:
        parts = [part for part in parts if not part.startswith("NOTE")]
    return "; ".join(parts) + skipped


def by_rule(alerts: Sequence[Alert]) -> list[list[Alert]]:
    """The alerts of each rule, the most severe rule first, then the one that spoke first."""
    groups: dict[tuple[str, str], list[Alert]] = {}
    for alert in alerts:
        groups.setdefault((alert.code, alert.title), []).append(alert)
    return sorted(groups.values(), key=lambda group: (-SEVERITIES.index(group[-1].severity), _first(group)))


def _first(alerts: Sequence[Alert]) -> float:
    """The step at which a rule first reached its worst severity."""
    return next(alert.step for alert in alerts if alert.severity == alerts[-1].severity)


def _finding(alerts: Sequence[Alert]) -> list[str]:
    """One rule's line with the worst of its alerts: the last, since a finding is raised again only when worse."""
    worst, at = alerts[-1], _first(alerts)
    history = [f"{alerts[0].severity} from {alerts[0].step:g}"] if alerts[0].step != at else []
    history += [f"worst and last at {worst.step:g}"] if worst.step != at else []
    history += [f"raised {len(alerts)} times"] if len(alerts) > 1 else []
    when = f"step {at:g}" + (f" ({', '.join(history)})" if history else "")
    head = f"  {worst.severity.upper():4} {worst.code} {worst.title}, {when}: {worst.message}"
    lines = [head, f"       evidence: {_evidence(worst.evidence)}"]
    if worst.intervention:
        lines.append(f"       try: {' or '.join(worst.intervention)}")
    return lines


def _evidence(evidence: Mapping[str, Any]) -> str:
    return ", ".join(_item(name, value) for name, value in evidence.items())


def _item(name: str, value: Any) -> str:
    if name.endswith("window") and isinstance(value, list) and len(value) == 2:
        return f"{name.replace('_', ' ')} {value[0]:g} to {value[1]:g}"
    if isinstance(value, Mapping):
        return f"{name} " + " and ".join(f"{key} {_number(item)}" for key, item in value.items())
    if isinstance(value, list):
        return f"{name} {', '.join(_number(item) for item in value[:6]) or 'none'}"
    return f"{name} {_number(value)}"


def _number(value: Any) -> str:
    return short(value) if isinstance(value, int | float) and not isinstance(value, bool) else str(value)

"""`python -m analysis diagnose PATH...`: the alert rules on finished runs and on other trainers' logs.

Reads our event logs, TRL/transformers trainer_state.json, JSONL, CSV, HTML tables, TRL and verl console output,
TensorBoard event files and W&B offline runs. Exit code: 0, or 1 when a finding reaches `--fail-on`, or 2 when a
log cannot be read, or when no rule found its inputs in any log of a PATH.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from analysis.diagnosis_text import describe
from analysis.logs import Log, find_logs, read_log
from reasonrl.alerts import Alert, AlertMonitor, AlertsConfig
from reasonrl.alerts.names import translate_row, unknown
from reasonrl.alerts.types import SEVERITIES
from reasonrl.errors import ConfigError, Mistake, ReasonRLError

EXAMPLES = """examples:
  python -m analysis diagnose results/single/1f0c2a9b7d3e
  python -m analysis diagnose outputs/checkpoint-400/trainer_state.json verl.log runs/*.csv
  python -m analysis diagnose --updates-per-rollout 16 --json curves.csv
  python -m analysis diagnose --picture findings.png --fail-on flag train.jsonl
"""
BLIND = -1  # a log that no rule could judge; a folder with others that could be judged does not fail for it


@dataclass
class Diagnosis:
    """What the rules say about one log; `skipped` and `limited` give the inputs that were never logged.

    never_finite: metrics that were logged, but never with a finite value. judged: false when no rule found its inputs.
    """

    path: str
    kind: str
    rows: int
    first_step: float
    last_step: float
    updates_per_rollout: float
    alerts: list[Alert]
    skipped: dict[str, list[str]]
    limited: dict[str, list[str]]
    unknown: list[str]
    never_finite: list[str]
    judged: bool
    notes: list[str] = field(default_factory=list)

    @property
    def worst(self) -> str | None:
        """The highest severity found."""
        ranks = [SEVERITIES.index(alert.severity) for alert in self.alerts]
        return SEVERITIES[max(ranks)] if ranks else None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able data."""
        return asdict(self) | {"worst": self.worst}


def diagnose(
    log: Log, config: AlertsConfig | None = None, updates_per_rollout: float = 1, group_size: int = 0
) -> Diagnosis:
    """Run the rules over a log, row by row, as they would have run while it was written."""
    monitor = AlertMonitor(
        config, updates_per_rollout, settings=log.settings, group_size=group_size or log.group_size
    )  # fmt: skip
    alerts: list[Alert] = []
    empty: dict[str, bool] = {}  # per metric: no finite value so far
    for step, row in log.rows:
        metrics = translate_row(row)
        alerts += monitor.update(step, metrics)
        empty |= {name: empty.get(name, True) and value - value != 0 for name, value in metrics.items()}
    skipped = monitor.skipped()
    judged = any(rule.key not in skipped and rule.needs != ("any",) for rule in monitor.rules)
    return Diagnosis(
        str(log.path), log.kind, len(log.rows), log.rows[0][0], log.rows[-1][0], updates_per_rollout, alerts,
        skipped, monitor.limited(), unknown(log.names), [name for name in empty if empty[name]],
        judged or bool(alerts) or bool(monitor.rules and not skipped), list(log.notes),
    )  # fmt: skip


# ---- command line
def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "diagnose",
        help="run the alert rules over finished runs and other trainers' logs",
        description=(__doc__ or "").split("\n\n")[1],
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    parser.set_defaults(main=main)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `diagnose`."""
    parser.add_argument(
        "paths", nargs="+", type=Path, metavar="PATH", help="log files, run folders, or folders of them"
    )
    parser.add_argument(
        "--updates-per-rollout", type=float, default=1, metavar="N",
        help="logged steps per rollout step: 1 when the log counts rollout steps (default), minibatches times epochs "
        "when it counts optimizer updates",
    )  # fmt: skip
    parser.add_argument("--profile", choices=("graded", "textbook"), default="graded")
    parser.add_argument("--group-size", type=int, default=0, metavar="G", help="rollouts per problem")
    parser.add_argument(
        "--limit", action="append", default=[], metavar="CODE.NAME=X", help="change a limit, e.g. A03.ratio=0.4"
    )
    parser.add_argument("--disable", action="append", default=[], metavar="CODE", help="leave a rule out")
    parser.add_argument("--plugin", action="append", default=[], metavar="MODULE.FUNCTION", help="add a rule of yours")
    parser.add_argument("--json", action="store_true", help="print one JSON object per log")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the curves with the alert windows shaded")
    parser.add_argument(
        "--fail-on", choices=("note", "flag", "stop", "never"), default="stop", help="severity that makes exit code 1"
    )


def config_of(args: argparse.Namespace) -> AlertsConfig:
    """Return the rules' configuration; raises ConfigError with every mistake in the options."""
    rules: dict[str, dict[str, float]] = {}
    mistakes = []
    for text in args.limit:
        name, equals, value = text.partition("=")
        code, dot, limit = name.partition(".")
        try:
            rules.setdefault(code, {})[limit] = float(value)
        except ValueError:
            equals = ""
        if not (equals and dot):
            mistakes.append(Mistake("--limit", text, "CODE.NAME=number, e.g. A03.ratio=0.4"))
    if not (math.isfinite(args.updates_per_rollout) and args.updates_per_rollout > 0):
        mistakes.append(Mistake("--updates-per-rollout", args.updates_per_rollout, "a number above 0"))
    config = AlertsConfig(profile=args.profile, rules=rules, disable=args.disable, plugins=args.plugin)
    if config.profile == "textbook":
        config.warmup, config.confirm = 0, 1
    mistakes += config.mistakes() if not mistakes else []
    if mistakes:
        raise ConfigError(mistakes)
    return config


def main(args: argparse.Namespace) -> int:
    """Diagnose every log under the given paths; return the exit code."""
    try:
        config = config_of(args)
        AlertMonitor(config)  # plugins are imported before any log is read
    except ReasonRLError as error:
        print(error, file=sys.stderr)
        return 2
    code, done = 0, 0
    for path in args.paths:
        try:
            logs = find_logs(path)
        except ReasonRLError as error:
            print(error, file=sys.stderr)
            code = 2
            continue
        codes = [_one(file, args, config, done + number) for number, file in enumerate(logs)]
        done += len(logs)
        blind = codes.count(BLIND)
        if blind and blind < len(logs):
            print(f"{path}: {blind} of {len(logs)} logs cannot be judged: no rule found its inputs.", file=sys.stderr)
            codes = [one for one in codes if one != BLIND]
        code = max(code, *(2 if one == BLIND else one for one in codes))
    return code


def _one(file: Path, args: argparse.Namespace, config: AlertsConfig, number: int) -> int:
    try:
        log = read_log(file)
        found = diagnose(log, config, args.updates_per_rollout, args.group_size)
    except (ReasonRLError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(found.to_dict(), allow_nan=False) if args.json else describe(found) + "\n")
    if args.picture and not _draw(log, found, args.picture, number):
        return 2
    if not found.judged:
        return BLIND
    if args.fail_on == "never" or found.worst is None:
        return 0
    return int(SEVERITIES.index(found.worst) >= SEVERITIES.index(args.fail_on))


def _draw(log: Log, found: Diagnosis, target: Path, number: int) -> bool:
    """Draw one log's picture (`found.png`, `found_2.png`, ...); False, and why, when it cannot be written."""
    from analysis.diagnosis_picture import draw

    if number:
        target = target.with_name(f"{target.stem}_{number + 1}{target.suffix}")
    try:
        draw(log, found.alerts, target)
    except ReasonRLError as error:
        print(error, file=sys.stderr)
        return False
    except OSError as error:
        print(f"--picture {target}: {error.strerror or error}.", file=sys.stderr)
        return False
    return True

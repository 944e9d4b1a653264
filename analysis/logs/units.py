"""Other units than the rules': shares in percent or as counts, entropies with a minus sign, a reward without a total.

What is changed or left out is said in the log's notes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from analysis.logs.table import Log
from reasonrl.alerts.names import normalise, translate
from reasonrl.alerts.vocabulary import is_score, part_kind

SHARES = (
    "length/truncated", "groups/flat", "groups/all_right", "groups/all_wrong", "clip/fraction", "clip/low", "clip/high",
    "entropy/low_share",
)  # fmt: skip
ACCURACY = re.compile(r"acc|pass|correct|solve|success|gsm|math|aime|amc|gpqa|exact|percent|pct|rate")
SOLVED = {"solve_none": "frac_all_wrong", "solve_all": "frac_all_right", "solve_partial": ""}


def settle(log: Log) -> None:
    """Bring a log's columns into the rules' units, in place."""
    ours = {name: found[0] for name in log.names if (found := translate(name)) is not None and found[0]}
    _groups_counted(log)
    for name, known in ours.items():
        values = [row[name] for _, row in log.rows if name in row and math.isfinite(row[name])]
        if not values:
            continue
        if known in SHARES and max(values) > 1.001:
            _share(log, name, values)
        elif known == "entropy/mean" and min(values) < 0 and max(values) <= 0:
            _change(log, name, lambda value: -value)
            log.notes.append(f"{name} is logged with a minus sign (as a loss): read as entropy")
        elif is_score(known) and ACCURACY.search(known) and 1.5 < max(values) <= 100 and min(values) >= 0:
            _change(log, name, lambda value: value / 100)
            log.notes.append(f"{name} is in percent: divided by 100")
    _lone_reward(log, ours)


def _share(log: Log, name: str, values: list[float]) -> None:
    percent = re.search(r"percent|pct|perc|%", name.lower()) is not None
    whole = all(value == int(value) for value in values)
    if max(values) <= 100.1 and (percent or not whole):
        _change(log, name, lambda value: value / 100)
        log.notes.append(f"{name} is in percent: divided by 100")
        return
    for _, row in log.rows:
        row.pop(name, None)
    log.notes.append(f"{name} counts and gives no share (up to {max(values):g}): left out")


def _change(log: Log, name: str, convert: Callable[[float], float]) -> None:
    for _, row in log.rows:
        if name in row:
            row[name] = convert(row[name])


def _groups_counted(log: Log) -> None:
    """Numbers of problems solved by no, by every and by some of their samples become shares."""
    found = {key: name for name in log.names for key in SOLVED if re.fullmatch(rf"(?:.*/)?{key}", normalise(name))}
    if len(found) < len(SOLVED):
        return
    for _, row in log.rows:
        counts = {key: row.pop(name) for key, name in found.items() if name in row}
        total = sum(counts.values())
        if len(counts) == len(SOLVED) and total > 0:
            row |= {SOLVED[key]: count / total for key, count in counts.items() if SOLVED[key]}
    log.notes.append("solve_none, solve_all and solve_partial are read as shares of the groups")


def _lone_reward(log: Log, ours: dict[str, str]) -> None:
    """Without any total the only correctness part stands for the reward."""
    parts = [name for name, known in ours.items() if part_kind(known) == "correct"]
    if "reward/total" in ours.values() or len(parts) != 1:
        return
    for _, row in log.rows:
        if parts[0] in row:
            row["reward"] = row[parts[0]]
    log.notes.append(f"no total reward is logged: {parts[0]} stands for it")

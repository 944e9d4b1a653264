"""What trainers print: verl's `step:3 - a:1 - b:2`, and the dict lines of TRL, Unsloth, ms-swift and OpenRLHF."""

from __future__ import annotations

import re
from pathlib import Path

from analysis.logs.table import Log, Table, step_name, to_number
from reasonrl.alerts.names import translate

COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
VERL = re.compile(r"\bstep:\s*(\d+)\s+- (?=\S+:)")
PAIR = re.compile(r"""['"]([^'"]+)['"]\s*:\s*(?:'([^']*)'|"([^"]*)"|([^,{}\[\]]+))""")
BAR = re.compile(r"(\d+)/(\d+)\s*\[\d+:\d+")
COUNTED = "no step numbers in this console output: log lines are counted, the unit is the logging interval"
NUMBER = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?%?|[-+]?nan|[-+]?inf(?:inity)?"
STEP_WORD = re.compile(
    r"(?<![\w/])(?:global|train(?:ing)?|rollout|optimizer)?[ _]?(?:step|iter(?:ation)?|update)[ :=#\[]*(\d+)",
    re.IGNORECASE,
)
PLAIN = re.compile(rf"(?<![\w/.])([A-Za-z][\w/@.\-]*)(?:\s*[:=]\s*|\s+)({NUMBER})(?![\w.:])", re.IGNORECASE)
GLOBAL_STEP = re.compile(r"global[ _]?step(?:/max_steps)?['\"]?[ :=]+['\"]?(\d+)", re.IGNORECASE)


def read_console(path: Path, text: str) -> Log | None:
    """Parse console output; None when no line holds metrics."""
    lines = COLOURS.sub("", text.replace("\r", "\n")).split("\n")
    for reader in (_read_verl, _read_dicts, _read_pairs):
        log = reader(path, lines)
        if log is not None:
            return log
    return None


def _read_verl(path: Path, lines: list[str]) -> Log | None:
    table, notes = Table(), []
    torn = 0
    for line in lines:
        found = VERL.search(line)
        if not found:
            continue
        record = {}
        for item in line[found.end() :].strip().split(" - "):
            name, colon, value = item.rpartition(":")
            if not colon or to_number(value) is None:
                torn += 1
                continue
            record[name.strip()] = value
        table.add(float(found[1]), record)
    if not table.rows:
        return None
    if torn:
        notes.append(f"{torn} items without a number were left out (a torn line, or text)")
    rows, more = table.finish()
    return Log(path, "verl console", rows, notes + more)


def _read_dicts(path: Path, lines: list[str]) -> Log | None:
    """Dict lines carry no step of their own: a global step on the line, or the progress bar, or their order."""
    bars = [(int(done), int(total)) for line in lines for done, total in BAR.findall(line)]
    longest = max((total for _, total in bars), default=0)
    found: list[tuple[float | None, dict[str, str]]] = []
    done: float | None = None
    torn = 0
    for line in lines:
        for at, total in BAR.findall(line):
            if int(total) == longest:
                done = float(at)
        record = _dict_of(line)
        if record is None:
            torn += "{'" in line and "}" not in line and len(PAIR.findall(line)) > 1
            continue
        column, named = step_name(record), GLOBAL_STEP.search(line)
        own = to_number(record.pop(column)) if column else float(named[1]) if named else None
        found.append((done if own is None else own, record))
    if not found:
        return None
    train = [step for step, record in found if not _only_eval(record)]
    counted = any(step is None for step in train) or any(b <= a for a, b in zip(train, train[1:], strict=False))  # type: ignore[operator]
    table, notes = Table(), []
    number = 0
    for step, record in found:
        number += not _only_eval(record)
        table.add(float(number) if counted or step is None else step, record)
    if counted:
        notes.append(COUNTED)
    if torn:
        notes.append(f"{torn} torn line{'s' if torn > 1 else ''} left out")
    rows, more = table.finish()
    return Log(path, "console", rows, notes + more)


def _read_pairs(path: Path, lines: list[str]) -> Log | None:
    """Lines such as `step 12 | reward 0.31 | kl 0.002`, or a progress bar that carries `reward=0.31, kl=0.002`."""
    found: list[tuple[float, dict[str, str]]] = []
    by_bar = False
    for line in lines:
        step = STEP_WORD.search(line) or BAR.search(line)
        if step is None:
            continue
        record = dict(PLAIN.findall(line[: step.start()] + " " + line[step.end() :]))
        useful = [name for name in record if (known := translate(name)) is not None and known[0]]
        if len(useful) > 1:
            found.append((float(step[1]), record))
            by_bar |= step.re is BAR
    if len(found) < 2:
        return None
    steps = [step for step, _ in found]
    counted = by_bar and any(b <= a for a, b in zip(steps, steps[1:], strict=False))
    table = Table()
    for number, (own, record) in enumerate(found, 1):
        table.add(float(number) if counted else own, record)
    rows, notes = table.finish()
    return Log(path, "console", rows, ([COUNTED] if counted else []) + notes)


def _only_eval(record: dict[str, str]) -> bool:
    return all(name.startswith("eval_") or name in ("epoch",) for name in record)


def _dict_of(line: str) -> dict[str, str] | None:
    """The name-value pairs of a printed dict with two or more numbers, else None."""
    start, end = line.find("{"), line.rfind("}")
    if start < 0 or end < start:
        return None
    pairs = {m[0]: next((v for v in m[1:] if v), "").strip() for m in PAIR.findall(line[start : end + 1])}
    record = {name: value for name, value in pairs.items() if to_number(value) is not None}
    return record if len(record) >= 2 else None

"""From loose records to a table: numbers parsed, rows sorted by step, restarts resolved, and all of it said."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reasonrl.alerts.names import STEP_NAMES, counts_steps, normalise, translate

MISSING = {"", "none", "null", "no log", "n/a", "na", "-", "--", "<na>", "missing"}
NAN = {"nan", "-nan", "+nan", "nan(ind)", "-nan(ind)", "1.#qnan", "#num!"}
INFINITE = {"inf": 1, "+inf": 1, "infinity": 1, "+infinity": 1, "-inf": -1, "-infinity": -1, "1.#inf": 1, "-1.#inf": -1}
CONTAINERS = ("metrics", "data", "logs", "log", "stats", "scalars")
THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?")
# A diverged run never makes these NaN; where they are, a table of unequal rows was filled up with NaN.
NEVER_NAN = re.compile(
    r"(?:.*/)?(?:epoch|lr|learning_rate|num_tokens|step_time|(?:response_|completion_)?length/mean|mean_length|"
    r"completion_length|runtime|_runtime|_timestamp)"
)
WRAPPED = re.compile(r"(?:(?:np|numpy)\.\w+|tensor)\((.+?)(?:,\s*(?:device|dtype)=.*)?\)")


@dataclass
class Log:
    """One training log.

    rows: (step, {name as printed: number}) sorted by step, one per step. notes: what the reader had to decide.
    settings and group_size are known for our own runs only.
    """

    path: Path
    kind: str
    rows: list[tuple[float, dict[str, float]]]
    notes: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    group_size: int = 0

    @property
    def names(self) -> list[str]:
        """Every metric name, in order of appearance."""
        return list(dict.fromkeys(name for _, row in self.rows for name in row))


def to_number(value: Any) -> float | None:
    """Return the number a log cell holds; None when it holds none (a missing value is not NaN)."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:  # nearly every cell; "1_000" is a number to Python but not to any trainer
        return float(value) if not isinstance(value, str) or "_" not in value else None
    except ValueError:
        return _odd_number(value.strip().lower()) if isinstance(value, str) else None
    except OverflowError:
        return None


def _odd_number(text: str) -> float | None:
    """Numbers as people and programs dress them: nan(ind), 1.#inf, np.float64(0.5), 1,234, 12 %."""
    if text in MISSING:
        return None
    if text in NAN:
        return float("nan")
    if text in INFINITE:
        return INFINITE[text] * float("inf")
    wrapped = WRAPPED.fullmatch(text)
    if wrapped:
        return to_number(wrapped[1])
    if THOUSANDS.fullmatch(text):
        return float(text.replace(",", ""))
    share = to_number(text[:-1]) if text.endswith("%") else None
    return None if share is None else share / 100


def flatten(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested objects as 'outer/inner'; a plain container (`metrics`, `data`, ...) adds nothing to the name."""
    out: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            out |= flatten(value, prefix if name in CONTAINERS else f"{prefix}{name}/")
        else:
            out[f"{prefix}{name}"] = value
    return out


def step_name(names: Iterable[str]) -> str | None:
    """The column that counts steps, in the spelling of the log; None without one."""
    given = list(names)
    known = {normalise(name): name for name in reversed(given)}
    first = next((known[name] for name in STEP_NAMES if name in known), None)
    return first or next((name for name in given if counts_steps(name)), None)


class Table:
    """Collects records of (step, row) and resolves restarts: sorted, the last writing of a step kept, and said."""

    def __init__(self) -> None:
        self.rows: dict[float, dict[str, float]] = {}
        self.order: dict[float, int] = {}  # attempt that wrote a step last
        self.attempt = 0
        self.last: float | None = None
        self.rewritten: set[float] = set()
        self.texts: dict[str, int] = {}
        self.merged = 0

    def add(self, step: float, record: Mapping[str, Any]) -> None:
        """Add one record; values that are no numbers are counted by name."""
        row: dict[str, float] = {}
        for name, value in record.items():
            number = to_number(value)
            if number is not None:
                row[name] = number
            elif isinstance(value, str) and value.strip().lower() not in MISSING:
                self.texts[name] = self.texts.get(name, 0) + 1
        if any(row[name] != row[name] and NEVER_NAN.fullmatch(normalise(name)) for name in row):
            self.merged += 1
            row = {name: value for name, value in row.items() if value == value}
        if not row:
            return
        if self.last is not None and step < self.last:
            self.attempt += 1
        self.last = step
        old = self.rows.get(step)
        if old is None:
            self.rows[step] = row
        elif any(
            name in old and not _is_bookkeeping(name) for name in row
        ):  # written again; an evaluation beside it stays
            self.rewritten.add(step)
            self.rows[step] = {name: v for name, v in old.items() if _is_eval(name) and name not in row} | row
        else:
            old.update(row)
        self.order[step] = self.attempt

    def finish(self) -> tuple[list[tuple[float, dict[str, float]]], list[str]]:
        """Return the sorted rows and the notes."""
        notes = []
        if self.attempt or self.rewritten:
            times = f"steps go back {self.attempt} time{'s' if self.attempt != 1 else ''}" if self.attempt else ""
            again = f"{len(self.rewritten)} steps were written again" if self.rewritten else ""
            notes.append(f"restarted log: {' and '.join(t for t in (times, again) if t)}; the last writing is kept")
        old = [step for step in self.rows if self.order[step] < self.attempt]
        if old and self.attempt and self.last is not None:
            after = [step for step in old if step > self.last]
            if after:
                notes.append(f"{len(after)} steps after {self.last:g} come from an attempt before the last restart")
        if self.merged:
            notes.append(f"{self.merged} rows have NaN even where none can arise: read as not logged")
        texts = [name for name in self.texts if self.texts[name] > 1]
        if texts:
            notes.append(f"columns with text, left out: {', '.join(texts[:8])}{' ...' if len(texts) > 8 else ''}")
        return sorted(self.rows.items()), notes


def _is_bookkeeping(name: str) -> bool:
    """Columns that train and evaluation rows of one step share: epoch, clocks, counters."""
    found = translate(name)
    return found is not None and not found[0]


def _is_eval(name: str) -> bool:
    return re.match(r"(eval|val|validation|test)[/_-]", normalise(name)) is not None


def _never_changes(records: list[dict[str, Any]], column: str) -> bool:
    """True when one metric has three values or more, all at the same step: a restart repeats a whole series."""
    if len({step for record in records if (step := step_number(record.get(column))) is not None}) != 1:
        return False
    counts: dict[str, int] = {}
    for record in records:
        for name, value in record.items():
            if name != column and not _is_bookkeeping(name) and to_number(value) is not None:
                counts[name] = counts.get(name, 0) + 1
    return max(counts.values(), default=0) >= 3


STEP_TEXT = re.compile(r"[A-Za-z_ #:=-]*(\d+(?:\.\d+)?)\s*(k?)\s*(?:(?:/|of)\s*\d+(?:\.\d+)?\s*k?)?", re.IGNORECASE)


def step_number(value: Any) -> float | None:
    """The step a cell names: a number, or text such as 12/120, step_12 or 1.5k."""
    found = to_number(value)
    if found is not None or not isinstance(value, str):
        return found
    text = STEP_TEXT.fullmatch(value.strip())
    return float(text[1]) * (1000 if text[2] else 1) if text else None


def build(path: Path, kind: str, records: Iterable[Mapping[str, Any]], notes: Iterable[str] = ()) -> Log:
    """Make a Log of records that carry their step among their values; without one, rows are counted."""
    flat = [flatten(record) for record in records]
    names = dict.fromkeys(name for record in flat for name in record)
    column = step_name(names)
    table, notes = Table(), list(notes)
    if column is not None and _never_changes(flat, column):
        notes.append(f"the step column {column} never changes: rows are counted")
        flat = [{name: value for name, value in record.items() if name != column} for record in flat]
        column = None
    elif column is None and flat:
        notes.append("no step column: rows are counted")
    without = 0
    for number, record in enumerate(flat, 1):
        step = step_number(record.get(column)) if column is not None else float(number)
        if step is None or step - step != 0:
            without += 1
            step = table.last if table.last is not None else 0.0
        table.add(step, {name: value for name, value in record.items() if name != column})
    if without:
        notes.append(f"{without} rows without a step were added to the row before them")
    rows, more = table.finish()
    return Log(path, kind, rows, notes + more)

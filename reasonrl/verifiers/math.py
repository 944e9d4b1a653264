r"""Answers that are expressions, sets, intervals, tuples or matrices, compared by value (Math-Verify and SymPy).

The answer is the last `\boxed{}`, `####` line or answer tag; boxes side by side are one list. Equal texts and plain
numbers are settled here; everything else goes to the pool of verifier processes (`pool.py`), gold first, since
Math-Verify is not symmetric. "undecided" means that gold or answer could not be read as mathematics.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from reasonrl.types import Verdict
from reasonrl.verifiers import numeric
from reasonrl.verifiers.extract import after_thinking, cued, stated
from reasonrl.verifiers.pool import shared_pool
from reasonrl.verifiers.reading import read_span

if TYPE_CHECKING:
    from reasonrl.verifiers import Options

WORKER = "reasonrl.verifiers.math_worker"
MAX_BARE = 400  # characters of a gold or completion that may be nothing but an expression
_DOLLARS = re.compile(r"\$\$?([^$]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_COMMAND = re.compile(r"\\(?:text|mathrm|textbf|operatorname|begin|end)\s*\{[^{}]*\}|\\[a-zA-Z]+")
_WORD = re.compile(r"[^\W\d_]{3,}")
_KNOWN_WORDS = frozenset(("exp", "sqrt", "sin", "cos", "tan", "sec", "csc", "cot", "log", "arcsin", "arccos", "arctan",
                          "sinh", "cosh", "tanh", "inf", "infinity"))  # fmt: skip


def read_gold(text: str, options: Options) -> str | None:
    """Return the expression a gold text states: its marker or last box, "answer is", or the whole short text."""
    found = stated(text)
    if found:
        return tidy(", ".join(found)) or None
    cue = cued(text)
    if cue and len(text) > len(cue[0]) + 40:
        return _sentence(cue[0])
    return tidy(text) or None if _is_expression(text) else None


def answer(text: str, options: Options, finished: bool = True) -> str | None:
    """Return the expression a completion states last; without box, marker or cue the last formula of a text."""
    text = after_thinking(text)
    found = stated(text)
    if found:
        return tidy(", ".join(found)) or None
    cue = cued(text)
    if cue:
        return _sentence(cue[0])
    if _is_expression(text):
        return tidy(text) or None
    lines = [line for line in text.splitlines() if line.strip()]
    formulas = _formulas(lines[-1]) if lines and finished else []
    return tidy(formulas[-1]) if formulas else None


def verify_many(rows: Sequence[tuple[str, str, bool]], options: Options) -> list[Verdict]:
    """Judge (gold, completion, finished) rows; only those that need algebra are sent to the pool."""
    verdicts: list[Verdict | None] = []
    hard: list[tuple[int, tuple[str, str]]] = []
    for index, (gold, text, finished) in enumerate(rows):
        said = answer(text, options, finished)
        verdicts.append(Verdict(0.0, "not_extracted") if said is None else _simple(gold, said))
        if verdicts[-1] is None and said is not None:
            hard.append((index, (gold, said)))
    if hard:
        reasons = shared_pool(WORKER, options.timeout_s).compare([row for _, row in hard])
        for (index, _), reason in zip(hard, reasons, strict=True):
            verdicts[index] = Verdict(1.0 if reason == "correct" else 0.0, reason)
    return [verdict for verdict in verdicts if verdict is not None]


def tidy(text: str) -> str:
    """Return an expression without math quotes, outer spaces and the final period."""
    text = text.strip()
    for _ in range(4):
        before = text
        text = text.strip().removesuffix("\\\\").rstrip(";,").strip("*").strip()
        text = text[:-1].strip() if text.endswith(".") else text
        whole = _DOLLARS.fullmatch(text)
        text = next(group for group in whole.groups() if group).strip() if whole else text
        if text == before:
            break
    return text


def _simple(gold: str, said: str) -> Verdict | None:
    """Settle equal texts and plain numbers; None when it takes algebra."""
    if "".join(gold.split()) == "".join(said.split()):
        return Verdict(1.0, "correct")
    if len(gold) > MAX_BARE or len(said) > MAX_BARE:
        return None
    left, right = read_span(gold, False, prose=False), read_span(said, False, prose=False)
    if left and right and left.value is not None and right.value is not None and not (left.several or right.several):
        same = numeric.equal(Fraction(left.value), Fraction(right.value))
        return Verdict(1.0, "correct") if same else Verdict(0.0, "wrong")
    return None


def _formulas(text: str) -> list[str]:
    return [next(group for group in match.groups() if group) for match in _DOLLARS.finditer(text)]


def _sentence(text: str) -> str | None:
    """Return the formulas of a sentence, or the sentence itself when it is one."""
    formulas = _formulas(text)
    if formulas:
        return tidy(", ".join(formulas))
    reading = read_span(text, False, prose=True)
    if not _is_expression(text) and reading is not None and reading.value is not None and not reading.several:
        return str(reading.value)
    return tidy(text) or None


def _is_expression(text: str) -> bool:
    """Whether a text is one line of mathematics, or a single word, and not a sentence."""
    text = text.strip()
    bare = _COMMAND.sub(" ", text)
    words = [word for word in _WORD.findall(bare) if word.lower() not in _KNOWN_WORDS]
    spoken = len(words) > 1 or (len(words) == 1 and len(bare.split()) > 1)
    return bool(text) and "\n" not in text and not spoken and (not words or len(text) <= MAX_BARE)

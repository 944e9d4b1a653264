"""Answers that are one text, compared after folding case, spaces, wrapping and the final period."""

from __future__ import annotations

import re
import unicodedata
from typing import TYPE_CHECKING

from reasonrl.types import Verdict
from reasonrl.verifiers.extract import after_thinking, cued, stated

if TYPE_CHECKING:
    from reasonrl.verifiers import Options

_WRAPPING = re.compile(r"^\\(?:text|mathrm|textbf|mathbf|boxed)\s*\{(.*)\}$", re.DOTALL)


def normalise(text: str) -> str:
    """Return `text` without case, outer quotes, Markdown or LaTeX wrapping, doubled spaces and a final period."""
    text = unicodedata.normalize("NFKC", text).strip()
    for _ in range(5):
        before = text
        text = text.strip().strip("*_`\"'$").strip()
        text = text[:-1] if text.endswith(".") and not text.endswith("..") else text
        wrapped = _WRAPPING.match(text)
        text = wrapped.group(1) if wrapped else text
        if text == before:
            break
    return " ".join(text.split()).casefold()


def read_gold(text: str, options: Options) -> str | None:
    """Return the answer a gold text states: its marker or last box if it has one, else the whole text."""
    found = stated(text)
    gold = normalise(found[0] if len(found) == 1 else text)
    return gold or None


def answer(text: str, options: Options, finished: bool = True) -> str | None:
    """Return what is stated last: box, `####` or tag; else behind "answer is"; else a one-line completion."""
    text = after_thinking(text)
    found = stated(text)
    if found:
        return normalise(", ".join(found)) or None
    cue = cued(text)
    if cue:
        return normalise(cue[0]) or None
    lines = [line for line in text.splitlines() if line.strip()]
    return normalise(lines[0]) or None if len(lines) == 1 and finished else None


def verify(gold: str, text: str, options: Options, finished: bool = True) -> Verdict:
    """Compare by equality of the normalised texts; several answers side by side are one other text."""
    said = answer(text, options, finished)
    if said is None:
        return Verdict(0.0, "not_extracted")
    return Verdict(1.0, "correct") if said == gold else Verdict(0.0, "wrong")

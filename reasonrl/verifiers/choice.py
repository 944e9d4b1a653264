r"""Answers that are one letter of a list of options: B, (b), B), \boxed{\text{B}}, "option B", "B. Paris"."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from reasonrl.types import Verdict
from reasonrl.verifiers.extract import after_thinking, cued, stated
from reasonrl.verifiers.notation import plain

if TYPE_CHECKING:
    from reasonrl.verifiers import Options

_LETTER = re.compile(
    r"^\W*(?i:(?:the\s+)?(?:(?:correct|right|best|final)\s+)?(?:(?:option|choice|answer|letter)\s*(?:is\b)?\W*)?)"
    r"(?:\(?([A-Z])\)|([A-Z])(?=[.:)\]}\s,;*$\"'!]|$)|\(?([a-z])(?:\)|\s*[.*]?\s*$))"
)
_LISTING = re.compile(
    r"\s*\W{0,3}\s*(?:,|;|/|&|\band\b|\bor\b|\s)\s*(?:(?:and|or)\s+)?\(?([A-Za-z])\)?(?=[\s.,;:/&)]|$)"
)


def read_gold(text: str, options: Options) -> str | None:
    """Return the gold letter in upper case; a bare index 0-25 counts from A, as in MMLU."""
    text = text.strip()
    if text.isdigit() and int(text) < 26:
        return chr(ord("A") + int(text))
    return answer(text, options)


def answer(text: str, options: Options, finished: bool = True) -> str | None:
    """Return the letter stated last, or letters such as "A,B" when several were given; None when there is none."""
    text = after_thinking(text)
    found = stated(text)
    cue = None if found else cued(text)
    if found:
        spans = found
    elif cue:
        spans = [cue[0]]
    else:
        lines = [line for line in text.splitlines() if line.strip()]
        spans = [lines[0]] if len(lines) == 1 and finished else lines[-1:] if finished else []
    letters = [_letters(span) for span in spans]
    if not letters or not all(letters):
        return None
    return ",".join(dict.fromkeys(letter for group in letters for letter in group))


def verify(gold: str, text: str, options: Options, finished: bool = True) -> Verdict:
    """Compare letters; naming several options is wrong whichever they are."""
    said = answer(text, options, finished)
    if said is None:
        return Verdict(0.0, "not_extracted")
    return Verdict(1.0, "correct") if said == gold else Verdict(0.0, "wrong")


def _letters(span: str) -> list[str]:
    """Return the letter that opens a span and those listed right behind it; [] when it opens with something else."""
    span = " ".join(plain(span).split())
    match = _LETTER.match(span)
    if match is None:
        return []
    first = next(group for group in match.groups() if group)
    rest = span[match.end() :]
    if first in "AI" and re.match(r"\s+(?!(?:and|or)\b)[a-z]{2,}", rest) and not match.group(1):
        return []  # the article or the pronoun that opens a sentence
    letters = [first.upper()]
    while following := _LISTING.match(rest):
        if following.group(1) in "aI" and re.match(r"\s+[a-z]", rest[following.end() :]):
            break
        letters.append(following.group(1).upper())
        rest = rest[following.end() :]
    return letters

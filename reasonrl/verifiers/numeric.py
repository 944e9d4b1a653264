r"""Answers that are one number: 70000 = 70,000 = $70,000.00 = 70000 dollars = 7 x 10^4 = 140000/2.

Units and currency are dropped, not converted. A percent sign is a unit like any other unless `percent=True`,
which reads 13% as 0.13 in gold and answer alike. A comma is a thousands separator only between groups of three
digits, so `1,5` is no number at all. Values are exact fractions; two that are not both whole also count as equal
within one part in 10^9. A product, a sum, a power tower or a list is no number and is not worked out.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from reasonrl.types import Verdict
from reasonrl.verifiers.extract import after_thinking, cued, stated
from reasonrl.verifiers.reading import Reading, read_last, read_span

if TYPE_CHECKING:
    from reasonrl.verifiers import Options

TOLERANCE = Fraction(1, 10**9)
MAX_BARE = 200  # characters of a completion that may be nothing but its answer


def read_gold(text: str, options: Options) -> str | None:
    """Return the gold number as text ("180", "1/3"), reduced from a bare number or a worked solution; else None.

    A solution is reduced by its marker, its last box or its last "the answer is"; its other numbers never count.
    """
    return _single(_readings(text, options.percent, bare=True, fallback=False))


def answer(text: str, options: Options) -> str | None:
    """Return the number a completion states, as a fraction in lowest terms; None when there is none or several."""
    return _single(_readings(after_thinking(text), options.percent, bare=True, fallback=True))


def verify(gold: str, text: str, options: Options, finished: bool = True) -> Verdict:
    """Compare the number a completion states with `gold` (a text from `read_gold`).

    Order: the box, `####` line or answer tag stated last; then the last "the answer is"; then, if the text is
    `finished`, the whole of it when it is a number and nothing else, and its last number. "wrong" is also the reason
    when several different numbers are given as the answer.
    """
    readings = _readings(after_thinking(text), options.percent, bare=finished, fallback=finished)
    if not readings:
        return Verdict(0.0, "not_extracted")
    said = _single(readings)
    return Verdict(1.0, "correct") if said and equal(Fraction(gold), Fraction(said)) else Verdict(0.0, "wrong")


def _single(readings: list[Reading]) -> str | None:
    if not readings or any(reading.several for reading in readings) or len({r.value for r in readings}) != 1:
        return None
    return str(readings[0].value)


def equal(gold: Fraction, answer: Fraction) -> bool:
    """Exact equality, or for values that are not both whole: within one part in 10^9 of gold."""
    if gold == answer:
        return True
    whole = gold.denominator == 1 and answer.denominator == 1
    return not whole and abs(gold - answer) <= TOLERANCE * abs(gold)


def _readings(text: str, percent: bool, bare: bool, fallback: bool) -> list[Reading]:
    """Return what is stated as the answer; [] when nothing readable is."""

    def readable(line: str) -> bool:
        return read_span(line, percent, prose=False) is not None

    found = stated(text, readable)
    if found:
        readings = [read_span(item, percent, prose=True) for item in found]
        known = [reading for reading in readings if reading is not None]
        return known if len(known) == len(readings) else []
    cue = cued(text)
    if cue:
        reading = read_span(cue[0], percent, prose=True)
        if reading is not None:
            return [reading]
        text = cue[1]
    elif bare and len(text) <= MAX_BARE and "\n" not in text.strip():
        reading = read_span(text, percent, prose=False)
        if reading is not None:
            return [reading]
    last = read_last(text, percent) if fallback else None
    return [last] if last is not None else []

r"""Read one number out of a short text: sign, currency, digits, fraction, power of ten, percent, unit, list.

The reader refuses what is not one number (`1,5`, `4x`, `2+3`, `\pi`, `3:30`) rather than taking the digits it
knows, and says when several different numbers were listed (`3 or 4`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from reasonrl.verifiers.notation import THIN, plain

MAX_DIGITS = 1000  # longer digit strings and larger exponents are not read
MAX_SPAN = 4000  # characters of a stated answer that are looked at
MAX_TAIL = 20_000  # characters from the end in which `read_last` looks

_GROUPED = (
    rf"(?:[1-9][0-9]{{0,2}}(?:,[0-9]{{3}})+|[1-9][0-9]?(?:,[0-9]{{2}})+,[0-9]{{3}}|"
    rf"[1-9][0-9]{{0,2}}(?:[_'{THIN}][0-9]{{3}})+|SPACED[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
)
_TAIL = r"(?:[eE][+-]?[0-9]+(?![0-9A-Za-z]))?"
_WORDS = r"[A-Za-z\u00b5\u0370-\u03ff]+(?:['-][A-Za-z]+)*\.?"
_TOKENS = rf"(?P<bad>(?>NUMBER)[,.'_:][0-9][0-9,.'_:]*|\\[A-Za-z]+|\\.)|(?P<number>(?>NUMBER){_TAIL})|" \
          rf"(?P<money>US\$|[$\u20ac\u00a3\u00a5\u20b9])|(?P<word>{_WORDS})|(?P<sign>\S)"  # fmt: skip


def _token_pattern(spaced: str) -> re.Pattern[str]:
    return re.compile(_TOKENS.replace("NUMBER", _GROUPED.replace("SPACED", spaced)))


_STRICT = _token_pattern(r"[1-9][0-9]{0,2}(?: [0-9]{3})+(?![0-9,]| ?[0-9/])|")
_PROSE = _token_pattern("")

_HEDGES = frozenset(("approximately", "approx", "about", "around", "roughly", "exactly", "only", "just", "simply", "so",
                     "thus", "hence", "therefore", "then", "equals", "equal", "to", "a", "the", "final", "answer", "is",
                     "total", "of", "result", "usd", "eur", "gbp", "rs"))  # fmt: skip
_LIST_WORDS = frozenset(("and", "or", "to", "through", "maybe", "perhaps", "possibly", "also", "either", "then"))
_PART_SIGNS = frozenset("+*/^<>{|\u221a\u2264\u2265")  # a number right behind one of these is a part of something
_LIST_SIGNS = frozenset(",;|&/")
_MATH_WORDS = frozenset(("x", "y", "z", "n", "i", "j", "e", "p", "q", "pi", "sqrt", "exp", "log", "ln", "sin", "cos",
                         "tan", "theta", "mod", "\u03c0", "\u03b8", "\u03c4", "\u03c6"))  # fmt: skip
_UNIT_LETTERS = frozenset("mgshdlwvajcftkLWVAJNCFK\u00b5")
_REFUSED_PROSE = frozenset(("not", "less", "more", "greater", "than", "between", "least", "most", "under", "over",
                            "below", "above", "no"))  # fmt: skip
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_LETTER_SCALES = {"k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9}
_PERCENT = frozenset(("%", "percent", "pct", "percentage"))
_BRACKETS = {"(": ")", "[": "]", "{": "}", '"': '"', "'": "'"}


@dataclass(frozen=True)
class Token:
    """One piece of text; `glued` says that no space stands before it."""

    kind: str
    text: str
    glued: bool
    start: int


@dataclass(frozen=True)
class Reading:
    """A number read at some place: its value (None: unreadable there), the next token, whether others were listed."""

    value: Fraction | None
    next: int
    several: bool = False


def tokens_of(text: str, prose: bool) -> list[Token]:
    """Split a plain text (see `plain`) into tokens; in prose a space never groups digits."""
    tokens, last_end = [], 0
    for match in (_PROSE if prose else _STRICT).finditer(text):
        tokens.append(Token(match.lastgroup or "sign", match.group(), match.start() == last_end, match.start()))
        last_end = match.end()
    return tokens


def read_span(text: str, percent: bool, prose: bool) -> Reading | None:
    r"""Read the number that a whole answer states, or None.

    The number leads the text, follows words (only with `prose`), or stands right of the last equals sign
    (`x = 42`, `6*7 = 42 dollars`); a text after the number is ignored unless it lists another number.
    """
    tokens = _unwrap(tokens_of(plain(text[:MAX_SPAN]), prose=False))
    if not tokens:
        return None
    start = _skip_words(tokens, prose)
    reading = read_at(tokens, start, percent)
    sides = _sides(tokens)
    if reading.value is None:
        if len(sides) < 2 or any(token.text in ",;" for side in sides[1:-1] for token in side):
            return None
        right = sides[-1]
        reading = read_at(right, _skip_words(right, prose=False), percent)
        return reading if reading.value is not None else None
    if reading.next < len(tokens) and tokens[reading.next].text in "=~":
        right = tokens[reading.next + 1 :]
        other = read_at(right, _skip_words(right, prose=False), percent)
        if other.value is not None and other.value != reading.value:
            return Reading(other.value, len(tokens), several=True)
    if start and _natural(tokens[:start]) and _other_numbers(tokens[reading.next :], reading.value):
        return None
    return reading


def read_last(text: str, percent: bool) -> Reading | None:
    """Read the last number of a running text, or None when there is none or its end is no plain number."""
    tokens = tokens_of(plain(text[-MAX_TAIL:]), prose=True)
    last, index = None, 0
    while index < len(tokens):
        token, before = tokens[index], tokens[index - 1] if index else None
        sign = token.text in "+-" and (before is None or before.kind not in ("number", "word"))
        sign = sign and _number_soon(tokens, index) and tokens[index + 1].glued
        name = before is not None and before.kind == "word" and token.glued  # the 2 of x2
        if name and before is not None and before.text.lower().rstrip(".") not in ("usd", "eur", "gbp", "rs"):
            index += 1
            continue
        if token.kind not in ("number", "money", "bad") and not sign:
            index += 1
            continue
        last = read_at(tokens, index, percent)
        if before is not None and (before.text in _PART_SIGNS or before.kind == "bad" or _is_minus(tokens, index)):
            last = Reading(None, last.next)
        index = max(last.next, index + 1)
    return last if last and last.value is not None else None


def _is_minus(tokens: list[Token], index: int) -> bool:
    """Whether the dash before this number subtracts it from something (a dash that opens a line is a bullet)."""
    return tokens[index - 1].text == "-" and index > 1 and tokens[index - 2].kind in ("number", "word")


def read_at(tokens: list[Token], index: int, percent: bool) -> Reading:
    """Read one value at `index` with its unit, and any list that goes on from there."""
    value, place = _quantity(tokens, index, percent)
    if value is None:
        return Reading(None, place)
    several = False
    while True:
        following = _after_list_sign(tokens, place)
        if following is None:
            return Reading(value, place, several)
        other, after = _quantity(tokens, following, percent)
        if other is None:
            return Reading(value, place, several)
        several, place = several or other != value, after
        value = other


def _quantity(tokens: list[Token], index: int, percent: bool) -> tuple[Fraction | None, int]:
    """Return (value, next index) of `[-][$]number[%|scale][unit]`; value None when it is part of something else."""
    sign, money = 1, False
    last = min(len(tokens), index + 4)
    while index < last and (tokens[index].text in "+-" or tokens[index].kind == "money"):
        sign = -sign if tokens[index].text == "-" else sign
        money = money or tokens[index].kind == "money"
        index += 1
    if index >= len(tokens) or tokens[index].kind != "number":
        return None, index + 1
    value, index = _magnitude(tokens, index)
    if value is None:
        return None, _expression_end(tokens, index)
    value *= sign
    if index < len(tokens):
        token = tokens[index]
        word = token.text.rstrip(".")
        if word.lower() in _PERCENT:
            value, index = (value / 100 if percent else value), index + 1
        elif word.lower() in _SCALES:
            value, index = value * _SCALES[word.lower()], index + 1
        elif token.glued and (word == "k" or (money and word in _LETTER_SCALES)):
            value, index = value * _LETTER_SCALES[word], index + 1
    if _continues(tokens, index):
        return None, _expression_end(tokens, index)
    return value, index


def _magnitude(tokens: list[Token], index: int) -> tuple[Fraction | None, int]:
    """Read digits with an optional fraction, mixed fraction, power of ten or plain power behind them."""
    value = _value(tokens[index].text)
    rest = [token.text for token in tokens[index + 1 : index + 9]]
    if value is None or not rest:
        return value, index + 1
    if rest[0] in ("*", "x") and rest[1:3] == ["10", "^"]:
        power, used = _integer(rest[3:])
        return (None if power is None else value * Fraction(10) ** power), index + 4 + used
    if rest[0] == "^":
        power, used = _integer(rest[1:])
        if power is None or value.denominator != 1 or (not value and power < 0):
            return None, index + 2 + used
        small = value.numerator.bit_length() * abs(power) <= 4 * MAX_DIGITS
        return (value**power if small else None), index + 2 + used
    if rest[0] == "/" and len(rest) > 1:
        negative = rest[1] == "-" and len(rest) > 2
        bottom = _value(rest[2 if negative else 1])
        if bottom is not None:
            quotient = value / bottom if bottom else None
            return (-quotient if negative and quotient else quotient), index + 3 + negative
    joined = int(rest[0] == "and")  # 2 and 1/2
    mixed = rest[joined : joined + 3]
    if len(mixed) == 3 and mixed[1] == "/" and all(part.isdigit() for part in (tokens[index].text, mixed[0], mixed[2])):
        above, below = int(mixed[0][:MAX_DIGITS]), int(mixed[2][:MAX_DIGITS])
        if above < below:
            return value + Fraction(above, below), index + 4 + joined
    return value, index + 1


def _value(text: str) -> Fraction | None:
    """Return the exact value of a number token, or None for a word or an unreasonable size."""
    if not re.match(r"\.?[0-9]", text) or len(text) > MAX_DIGITS:
        return None
    digits = re.sub(rf"[,_' {THIN}]", "", text)
    exponent = re.search(r"[eE]([+-]?[0-9]+)$", digits)
    return None if exponent and abs(int(exponent.group(1))) > MAX_DIGITS else Fraction(digits)


def _integer(texts: list[str]) -> tuple[int | None, int]:
    """Read an exponent, bare or in brackets; return (value, tokens used)."""
    used, sign = 0, 1
    while used < len(texts) and texts[used] in "({-+":
        sign = -sign if texts[used] == "-" else sign
        used += 1
    if used >= len(texts) or not texts[used].isdigit() or len(texts[used]) > 4 or int(texts[used]) > MAX_DIGITS:
        return None, used
    value = sign * int(texts[used])
    used += 1
    while used < len(texts) and texts[used] in ")}":
        used += 1
    return value, used


def _continues(tokens: list[Token], index: int) -> bool:
    """Whether the digits just read are only a part: of a product, a sum, a variable's factor, a ratio."""
    if index >= len(tokens):
        return False
    token = tokens[index]
    word = token.text.rstrip(".")
    if token.kind == "bad" or (token.glued and token.text in "([{\\"):
        return True
    if token.kind == "word":
        odd_letter = token.glued and len(word) == 1 and word not in _UNIT_LETTERS
        if word.lower() in _MATH_WORDS or odd_letter:
            return True
        units = 0
        while index < len(tokens) and tokens[index].kind == "word" and units < 3 and not _joins(tokens[index]):
            index, units = index + 1, units + 1
        if index < len(tokens) and tokens[index].text == "^":
            index += 2
        signs = "+-*/"
    else:
        signs = "+-*/^<>:\u221a"
    if index >= len(tokens) or tokens[index].text not in signs:
        return False
    spaced_dash = tokens[index].text == "-" and not tokens[index].glued
    following = tokens[index + 1] if index + 1 < len(tokens) else None
    if following is None:
        return False
    if following.kind in ("number", "money", "bad") or following.text in "({\u221a":
        return not (spaced_dash and following.text == "(")
    return following.kind == "word" and following.text.lower() in _MATH_WORDS


def _joins(token: Token) -> bool:
    return token.text.lower().rstrip(".") in _LIST_WORDS or token.text.endswith(".") and len(token.text) > 4


def _after_list_sign(tokens: list[Token], index: int) -> int | None:
    """Return where a listed next value starts: after a comma, "or", a bare space, with up to 3 unit words before."""
    if index < len(tokens) and tokens[index].kind in ("number", "money"):
        return index
    for _ in range(3):
        if index < len(tokens) and tokens[index].kind == "word" and not _joins(tokens[index]):
            index += 1
    seen = False
    while index < len(tokens) and (tokens[index].text in _LIST_SIGNS or tokens[index].text.lower() in _LIST_WORDS):
        seen, index = True, index + 1
    if [token.text for token in tokens[index + 1 : index + 2]] == ["="] and len(tokens[index].text) == 1:
        index += 2  # the y of "x = 3, y = 4"
    starts = index < len(tokens) and (tokens[index].kind in ("number", "money") or tokens[index].text in "+-")
    return index if seen and starts else None


def _expression_end(tokens: list[Token], index: int) -> int:
    """Return the index behind an unreadable run of numbers and operators."""
    while index < len(tokens) and (
        tokens[index].kind in ("number", "bad", "money") or tokens[index].text in "+-*/^({)}"
    ):
        index += 1
    return index


def _skip_words(tokens: list[Token], prose: bool) -> int:
    """Return where the number starts: behind hedges ("about"), or with `prose` behind any ordinary words."""
    index = 0
    while index < len(tokens):
        token = tokens[index]
        word = token.text.lower().rstrip(".")
        if token.kind == "word" and word in ("negative", "minus") and _number_soon(tokens, index):
            tokens[index] = Token("sign", "-", False, token.start)
            return index
        natural = token.kind == "word" and word not in _MATH_WORDS and word not in _REFUSED_PROSE
        hedge = natural and word in _HEDGES or (token.text in "~:" and (prose or index == 0))
        if not hedge and not (prose and (natural or (token.text in ",:" and index))):
            return index
        index += 1
    return index


def _natural(tokens: list[Token]) -> bool:
    return any(token.kind == "word" and token.text.lower() not in _HEDGES for token in tokens)


def _number_soon(tokens: list[Token], index: int) -> bool:
    following = tokens[index + 1 : index + 3]
    return bool(following) and (following[0].kind == "number" or [t.kind for t in following] == ["money", "number"])


def _other_numbers(tokens: list[Token], value: Fraction) -> bool:
    return any(token.kind == "bad" or _value(token.text) not in (None, value) for token in tokens)


def _sides(tokens: list[Token]) -> list[list[Token]]:
    sides: list[list[Token]] = [[]]
    for token in tokens:
        if token.text in "=~":
            sides.append([])
        else:
            sides[-1].append(token)
    return [side for side in sides if side]


def _unwrap(tokens: list[Token]) -> list[Token]:
    """Drop trailing punctuation, dollar signs used as math quotes, and brackets around the whole."""
    while tokens:
        if tokens[-1].text in (".", ",", ";", "!", "?", "*", "$", ":"):
            tokens = tokens[:-1]
        elif tokens[0].text in _BRACKETS and tokens[-1].text == _BRACKETS[tokens[0].text] and _encloses(tokens):
            tokens = tokens[1:-1]
        elif tokens[0].text == "*":
            tokens = tokens[1:]
        else:
            break
    return tokens


def _encloses(tokens: list[Token]) -> bool:
    """Whether the first bracket is closed by the last token and not before."""
    opening, closing = tokens[0].text, tokens[-1].text
    depth = 0
    for place, token in enumerate(tokens):
        if opening == closing:
            return len(tokens) > 1 and all(inner.text != opening for inner in tokens[1:-1])
        depth += (token.text == opening) - (token.text == closing)
        if depth == 0:
            return place == len(tokens) - 1
    return False

r"""Turn the many ways of writing one number into plain ASCII: LaTeX, Unicode signs and fractions, Markdown."""

from __future__ import annotations

import re
import unicodedata

THIN = "\u2009"  # stands for every spacing that groups digits: thin, no-break and LaTeX spaces between digits
_MINUS = dict.fromkeys(map(ord, "\u2212\u2010\u2011\u2012\u2013\u2014\ufe63\uff0d\u207b"), "-")
_SIGNS = {
    **_MINUS,
    **dict.fromkeys(map(ord, "\u00d7\u22c5\u00b7\u2217\u2715\u2716"), "*"),
    **dict.fromkeys(map(ord, "\u00f7\u2044\u2215"), "/"),
    **dict.fromkeys(map(ord, "\u202f\u00a0\u2007\u2008"), THIN),
    **dict.fromkeys(map(ord, "\u2018\u2019\u02bc"), "'"),
    **dict.fromkeys(map(ord, "\u2248\u2243\u2245\u223c"), "~"),
    **dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff\u00ad\u200e\u200f"), None),
    ord("\u00b0"): " degrees ",
    ord("\uff05"): "%",
    ord("\uff0e"): ".",
    ord("\uff0c"): ",",
    ord("\uff04"): "$",
}
_SUPERSCRIPT = re.compile("[\u207a\u207b\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+")
_VULGAR = re.compile("[\u00bc-\u00be\u2150-\u215e\u2189]")
_TEXT = re.compile(
    r"\\(?:text|textrm|textbf|textit|textsf|texttt|mathrm|mathbf|mathit|mathsf|mathtt|mbox|hbox|operatorname|boldsymbol|"
    r"bm|boxed|fbox|underline|ensuremath|emph|bf|rm)\*?\s*\{([^{}]*)\}"
)
_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{([^{}]*)\}|([0-9]))\s*(?:\{([^{}]*)\}|([0-9]))")
_SIMPLE = re.compile(r"\s*[-+]?\s*[0-9.,]+\s*")
_COMMANDS = (
    (re.compile(r"\\(?:left|right|big|Big|bigg|Bigg|displaystyle|textstyle|limits|bf|rm|it)(?![a-zA-Z])\.?"), ""),
    (re.compile(r"\^\s*(?:\\circ(?![a-zA-Z])|\{\s*\\circ\s*\})|\\degrees?(?![a-zA-Z])"), " degrees "),
    (re.compile(r"(?<=[0-9])(?:\\[,;:!> ]|\\thinspace|~)\s*(?=[0-9]{3})"), THIN),
    (re.compile(r"(?<=[0-9])\{,\}\\?!?(?=[0-9])"), ","),
    (re.compile(r"(?<=[0-9]),\\!(?=[0-9])"), ","),
    (re.compile(r"\\[,;:!> ]|~(?=[a-zA-Z\\])|\\(?:quad|qquad|thinspace|hspace\{[^{}]*\})(?![a-zA-Z])"), " "),
    (re.compile(r"\\(?:times|cdot|ast)(?![a-zA-Z])"), "*"),
    (re.compile(r"\\div(?![a-zA-Z])"), "/"),
    (re.compile(r"\\(?:approx|simeq|sim|cong)(?![a-zA-Z])"), "~"),
    (re.compile(r"\\(?:minus)(?![a-zA-Z])"), "-"),
    (re.compile(r"\\(?:euro|pounds|yen)(?![a-zA-Z])(?:\{\})?"), "$"),
    (re.compile(r"\\[()\[\]]"), " "),
    (re.compile(r"\\([$%&#_{}])"), r"\1"),
)


def plain(text: str) -> str:
    """Return `text` with signs, digits, fractions and spacing in one plain notation; meaning is kept.

    `\\dfrac{3}{4}` becomes `3/4`, `3\\frac12` becomes `3 1/2`, `10³` becomes `10^3`, `½` becomes `1/2`; unknown
    LaTeX commands stay, so a reader of numbers refuses them instead of guessing.
    """
    text = _VULGAR.sub(lambda match: " " + unicodedata.normalize("NFKC", match.group()), text)
    text = _SUPERSCRIPT.sub(lambda match: "^" + unicodedata.normalize("NFKC", match.group()), text)
    text = text.translate(_SIGNS)
    if not text.isascii():
        text = "".join(_ascii_digit(char) for char in text)
    if "\\" in text:
        for _ in range(6):
            replaced = _TEXT.sub(r" \1 ", text)
            replaced = _FRACTION.sub(_fraction, replaced)
            if replaced == text:
                break
            text = replaced
    for pattern, replacement in _COMMANDS:
        text = pattern.sub(replacement, text)
    text = re.sub(r"(?<=[0-9)])\*\*(?=[0-9(])", "^", text)
    return re.sub(r"\*\*|__|`", "", text)


def _ascii_digit(char: str) -> str:
    digit = unicodedata.decimal(char, None)
    return char if digit is None else str(digit)


def _fraction(match: re.Match[str]) -> str:
    top = match.group(1) if match.group(1) is not None else match.group(2)
    bottom = match.group(3) if match.group(3) is not None else match.group(4)
    top, bottom = plain(top), plain(bottom)
    if _SIMPLE.fullmatch(top) and _SIMPLE.fullmatch(bottom):
        return f" {top.replace(' ', '')}/{bottom.replace(' ', '')} "
    return f" (({top})/({bottom})) "

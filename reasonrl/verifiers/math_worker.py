r"""The process that compares two expressions with Math-Verify and SymPy; started by `pool.py`."""

from __future__ import annotations

import functools
import re
import unicodedata
from typing import Any

from reasonrl.verifiers.serving import serve

WARM_UP = (("\\frac{1}{2}", "x"), ("(x+1)^2", "x^2+2x+1"), ("\\sqrt{2}\\pi", "[1, 2)"), ("1,2", "(3,4)"))
_SIGNS = {
    **dict.fromkeys(map(ord, "\u2212\u2010\u2011\u2012\u2013\u2014\ufe63\uff0d"), "-"),
    **dict.fromkeys(map(ord, "\u00d7\u22c5\u00b7\u2217"), "\\cdot "),
    **dict.fromkeys(map(ord, "\u00f7\u2215\u2044"), "/"),
    **dict.fromkeys(map(ord, "\u202f\u00a0\u2009\u2007"), " "),
    **dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff"), None),
    ord("\u03c0"): "\\pi ",
    ord("\u03b8"): "\\theta ",
    ord("\u221e"): "\\infty ",
    ord("\u2264"): "\\le ",
    ord("\u2265"): "\\ge ",
    ord("\u222a"): "\\cup ",
    ord("\u2229"): "\\cap ",
    ord("\u2208"): "\\in ",
    ord("\u00b1"): "\\pm ",
    ord("\u00b0"): "^\\circ ",
}
_SUPERSCRIPT = re.compile("[\u207a\u207b\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+")
_VULGAR = re.compile("[\u00bc-\u00be\u2150-\u215e]")
_ROOT = re.compile("\u221a\\s*(?:\\(([^()]*)\\)|([0-9]+|[a-zA-Z]))")
_NAMES = "pi|theta|alpha|beta|gamma|lambda|infty|sin|cos|tan|sec|csc|cot|log|ln|arcsin|arccos|arctan|sinh|cosh|tanh"
_NAME = re.compile(rf"(?<![a-zA-Z\\])({_NAMES})(?![a-zA-Z])")
_INFINITY = re.compile(r"(?<![a-zA-Z\\])(?:oo|inf|infinity)(?![a-zA-Z])", re.IGNORECASE)
_CALL = re.compile(r"(?<![a-zA-Z\\])(exp|sqrt|abs)\s*\(|(?:\^|\*\*)\s*\(")
_POWER = re.compile(r"(?:\^|\*\*)\s*(-?\s*[0-9]+(?:\.[0-9]+)?|-\s*[a-zA-Z])")
_TOWER = re.compile(r"(?:\b[0-9]+|\b[a-zA-Z])(?:\s*(?:\^|\*\*)\s*(?:[0-9]+|[a-zA-Z])){2,}")
_OPEN = {"exp": "e^{", "sqrt": "\\sqrt{", "abs": "|", None: "^{"}
_WORD = re.compile(r"(?:\\(?:text|mathrm|textbf|operatorname)\s*\{)?\s*([a-zA-Z]{3,}(?:[ -]+[a-zA-Z]+)*)\s*\.?\s*\}?")


def to_latex(text: str) -> str:
    r"""Return plain notation as LaTeX: `exp(16)` as `e^{16}`, `pi` as `\pi`, `x**12` as `x^{12}`, `+ -` as `-`."""
    text = _SUPERSCRIPT.sub(
        lambda m: "^{" + unicodedata.normalize("NFKC", m.group()).replace("\u2212", "-") + "}", text
    )
    text = _VULGAR.sub(
        lambda m: "\\frac{{{}}}{{{}}}".format(*tuple(unicodedata.normalize("NFKC", m.group()).split("\u2044"))), text
    )
    text = _ROOT.sub(lambda m: "\\sqrt{" + (m.group(1) or m.group(2)) + "}", text).translate(_SIGNS)
    text = _braces(text)
    text = _TOWER.sub(lambda m: _nested(re.split(r"\^|\*\*", m.group())), text)
    text = _POWER.sub(lambda m: "^{" + m.group(1).replace(" ", "") + "}", text)
    text = _INFINITY.sub(r"\\infty ", _NAME.sub(r"\\\1 ", text))
    text = re.sub(r"\+\s*-", "-", re.sub(r"-\s*-", "+", text))
    return text.replace("<=", "\\le ").replace(">=", "\\ge ").replace("**", "^")


def _braces(text: str) -> str:
    """Write the brackets of `exp(...)`, `sqrt(...)`, `abs(...)` and `^(...)` as LaTeX does, if all are closed."""
    starts = {match.start(): match for match in _CALL.finditer(text)}
    out, closing, position = [], [], 0
    while position < len(text):
        match = starts.get(position)
        if match is not None:
            out.append(_OPEN[match.group(1)])
            closing.append("|" if match.group(1) == "abs" else "}")
            position = match.end()
            continue
        char = text[position]
        if char == "(":
            closing.append(")")
        elif char == ")" and closing:
            char = closing.pop()
        out.append(char)
        position += 1
    return text if closing else "".join(out)


def _nested(parts: list[str]) -> str:
    """Return `9^9^9` as a tower read from the top: `9^{9^{9}}`."""
    return "^{".join(part.strip() for part in parts) + "}" * (len(parts) - 1)


def compare(gold: str, said: str) -> str:
    """Return correct, wrong or undecided; gold goes first, since Math-Verify is not symmetric."""
    from math_verify import verify

    words = _WORD.fullmatch(gold), _WORD.fullmatch(said)
    if words[0]:
        return "correct" if words[1] and _fold(words[0].group(1)) == _fold(words[1].group(1)) else "wrong"
    left, right = parsed(gold), parsed(said)
    if left is None or right is None:
        return "undecided"
    if same_value(left, right):
        return "correct"
    return "correct" if verify([left], [right], timeout_seconds=None, raise_on_error=True) else "wrong"


def _fold(text: str) -> str:
    return " ".join(re.split(r"[\s-]+", text.strip())).casefold()


@functools.lru_cache(maxsize=4096)
def parsed(text: str) -> Any:
    """Return the SymPy object that a formula stands for, or None when it is none."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    if _WORD.fullmatch(text):
        return None
    config = [LatexExtractionConfig(), ExprExtractionConfig()]
    found = parse(
        f"${to_latex(text)}$", config, fallback_mode="no_fallback", extraction_mode="first_match", parsing_timeout=None
    )
    return next((item for item in found if not isinstance(item, str)), None)


def same_value(left: Any, right: Any) -> bool:
    """Whether both are numbers, real or complex, that agree in 12 digits (a lone symbol i is the imaginary unit)."""
    import sympy

    values = []
    for item in (left, right):
        if not isinstance(item, sympy.Expr):
            return False
        item = item.subs({symbol: sympy.I for symbol in item.free_symbols if symbol.name == "i"})
        if item.free_symbols:
            return False
        value = sympy.N(item, 30)
        if not value.is_number or value.has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo):
            return False
        values.append(complex(value))
    scale = max(abs(values[0]), abs(values[1]))
    return scale < 1e300 and abs(values[0] - values[1]) <= 1e-12 * scale


def warm_up() -> None:
    """Import and fill the parser's caches before the first clock runs."""
    for gold, said in WARM_UP:
        compare(gold, said)


if __name__ == "__main__":
    serve(compare, warm_up)

r"""Find the stated answer in a completion: the last box, marker or answer tag, else the last "the answer is".

Last means last in the text, wherever it stands and whatever follows it. Answers given side by side (`\boxed{3}
\boxed{4}`, `#### 3 #### 4`) are one list, so naming every candidate is never the same as naming the right one.
Every function here takes time linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![a-zA-Z])[ \t]*")
_BRACE = re.compile(r"\\[\\{}]|[{}]|\\(?:boxed|fbox|framebox)(?![a-zA-Z])[ \t]*\{?")
_BARE_BOX = re.compile(r"-?(?:\\[a-zA-Z]+|[^\s{}$\\,;.]+(?:[.,][0-9]+)*)")
_MARKER = re.compile(r"(?<!#)####(?!#)")
_TAG = re.compile(r"</?answer>", re.IGNORECASE)
_CUE = re.compile(
    r"\banswers?\b(?P<between>[^.\n:=]{0,80}?)(?:\bis\b|\bare\b|:|=)(?P<marks>[\s:*_=]{0,20})", re.IGNORECASE
)
_FILLER_WORDS = re.compile(
    r"\\[a-zA-Z]+|\b(?:and|or|maybe|perhaps|possibly|also|either|[a-zA-Z]|[0-9]{1,3})\b", re.IGNORECASE
)
_INNER = (("box", "tag"), ("box", "marker"), ("tag", "marker"))  # what may stand inside what, and is then meant
_THINK_END = "</think>"


@dataclass(frozen=True)
class Span:
    """One stated answer: its place in the text, what it says, and how it was stated (box, marker or tag)."""

    start: int
    end: int
    text: str
    kind: str


def after_thinking(text: str) -> str:
    """Return what follows the last `</think>`, or the whole text when there is none or nothing follows."""
    tail = text[text.rfind(_THINK_END) + len(_THINK_END) :] if _THINK_END in text else text
    return tail if tail.strip() else text


def boxes(text: str) -> list[Span]:
    r"""Return the outermost `\boxed{...}` spans in order; a last box that is never closed has text "".

    Braces are matched, `\{` and `\}` do not count, and `\boxed 4` without braces takes the next word.
    """
    stack: list[tuple[int, int] | None] = []
    found: list[Span] = []
    position = 0
    while match := _BRACE.search(text, position):
        position = match.end()
        token = match.group()
        if token == "{":
            stack.append(None)
        elif token == "}":
            opened = stack.pop() if stack else None
            if opened is not None:
                while found and found[-1].start > opened[0]:
                    found.pop()
                found.append(Span(opened[0], position, text[opened[1] : match.start()], "box"))
        elif _BOX.match(token):
            if token.endswith("{"):
                stack.append((match.start(), match.end()))
            elif bare := _BARE_BOX.match(text, match.end()):
                found.append(Span(match.start(), bare.end(), bare.group(), "box"))
                position = bare.end()
    unclosed = [opened[0] for opened in stack if opened is not None]
    if unclosed and (not found or unclosed[-1] > found[-1].start):
        found.append(Span(unclosed[-1], len(text), "", "box"))
    return found


def markers(text: str, accept: Callable[[str], bool]) -> list[Span]:
    """Return the `####` answers whose line `accept` can read (others are headings, which end nothing)."""
    found = []
    starts = [match.start() for match in _MARKER.finditer(text)]
    for start, following in zip(starts, [*starts, len(text)][1:], strict=True):
        body = start + 4
        while body < following and text[body] in " \t\r\n:*":
            body += 1
        end = text.find("\n", body, following)
        end = following if end < 0 else end
        line = text[body:end].strip()
        if line and accept(line):
            found.append(Span(start, end, line, "marker"))
    return found


def tags(text: str) -> list[Span]:
    """Return the `<answer>...</answer>` spans in order; an opening tag counts from its last repetition."""
    found, opened = [], None
    for match in _TAG.finditer(text):
        if match.group()[1] != "/":
            opened = match
        elif opened is not None:
            found.append(Span(opened.start(), match.end(), text[opened.end() : match.start()].strip(), "tag"))
            opened = None
    return found


def stated(text: str, accept_marker: Callable[[str], bool] = bool) -> list[str]:
    """Return the answers stated last: one text, several when they were listed side by side, [] when none."""
    spans = boxes(text) + markers(text, accept_marker) + tags(text)
    spans = _without_nested(sorted(spans, key=lambda span: (span.start, -span.end)))
    if not spans:
        return []
    last = [spans[-1]]
    for span in reversed(spans[:-1]):
        if not _is_filler(text[span.end : last[0].start]):
            break
        last.insert(0, span)
    distinct = dict.fromkeys("".join(span.text.split()) for span in last)
    return [last[-1].text] if len(distinct) == 1 else [span.text for span in last]


def cued(text: str) -> tuple[str, str] | None:
    """Return (sentence, rest) behind the last "answer is" or "answer:", or None.

    The sentence ends at a newline or at a period followed by a space; the rest is all that comes after the cue.
    """
    match = None
    for match in _CUE.finditer(text):  # noqa: B007 - the last match is wanted
        pass
    if match is None:
        return None
    rest = text[match.end() :]
    return re.split(r"\n|(?<=[.!?])\s", rest.strip(), maxsplit=1)[0], rest


def _without_nested(spans: list[Span]) -> list[Span]:
    """Keep the box inside a tag or marker line rather than the wrapping, and no span twice."""
    kept: list[Span] = []
    for span in spans:
        if kept and span.start < kept[-1].end and (span.kind, kept[-1].kind) in _INNER:
            if not span.text and span.end > kept[-1].end:
                continue
            kept.pop()
        elif kept and span.end <= kept[-1].end:
            continue
        kept.append(span)
    return kept


def _is_filler(gap: str) -> bool:
    """Whether two answers with this text between them belong to one list."""
    if len(gap) > 200:
        return False
    return re.search(r"[^\W_]", _FILLER_WORDS.sub(" ", gap)) is None

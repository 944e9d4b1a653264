"""Hydra overrides as text: reading, writing and layering them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from reasonrl.errors import Mistake

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

_PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./@+-]*")
_WORDS = {"null", "true", "false", "nan", "inf"}


@lru_cache(maxsize=65536)
def parse(text: str) -> Override:
    """One override; raises hydra.errors.HydraException when it cannot be read."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create().parse_override(text)


def key_of(text: str) -> str:
    """The key an override sets, without its prefix: `+sweep=x` gives `sweep`."""
    return text.split("=", 1)[0].lstrip("+~")


def write_value(value: Any) -> str:
    """A Python value in the syntax of an override, quoted where it must be."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{write_value(k)}:{write_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(write_value(item) for item in value) + "]"
    text = str(value)
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(text, Quote.single).with_quotes()


def write(key: str, value: Any) -> str:
    """The override `key=value`."""
    return f"{key}={write_value(value)}"


def layer(*layers: Iterable[str]) -> list[str]:
    """Overrides on top of each other: a later one replaces an earlier one of the same key."""
    merged: dict[str, str] = {}
    for text in (text for texts in layers for text in texts):
        key = key_of(text)
        if key in merged and text[0] not in "+~" and merged[key][0] == "+":
            # `+sweep=a` followed by `sweep=b` still has to append.
            text = "+" * (len(merged[key]) - len(merged[key].lstrip("+"))) + text
        merged.pop(key, None)
        merged[key] = text
    return list(merged.values())


def chosen_sweep(texts: Iterable[str]) -> str | None:
    """The sweep file that the last `+sweep=NAME` chooses, None without one."""
    values = [text.partition("=")[2] for text in texts if key_of(text) == "sweep" and text[0] != "~"]
    return values[-1] if values and re.fullmatch(r"[^{\[,]+", values[-1]) else None


def repeated(texts: Iterable[str]) -> list[Mistake]:
    """Keys that are given more than once: all but the last would be lost without a word."""
    first: dict[str, str] = {}
    mistakes = []
    for text in texts:
        key = key_of(text)
        if key in first:
            mistakes.append(Mistake(key, text.partition("=")[2], f"was given before, as {first[key]}", "Give it once."))
        first[key] = text
    return mistakes


def ignored(config: Mapping[str, Any], texts: Iterable[str]) -> list[Mistake]:
    """Overrides like `sweep.arms={}` that emptied nothing in the resolved `config`: mappings are merged."""
    mistakes = []
    for text in texts:
        override = parse(text)
        if override.value() != {} or override.is_sweep_override():
            continue
        node: Any = config
        for part in override.key_or_group.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        if isinstance(node, Mapping) and node:
            allowed = f"empties nothing: mappings are merged, and {', '.join(map(str, node))} stays"
            cure = "Leave it out, or take what should go out of the file that sets it."
            mistakes.append(Mistake(override.key_or_group, "{}", allowed, cure))
    return mistakes


def as_list(value: Any) -> list[str]:
    """Overrides as a user may write them in a sweep file: one text, a list of texts, or a mapping."""
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [write(str(key), item) for key, item in value.items()]
    if isinstance(value, Sequence) and all(isinstance(item, str) for item in value):
        return list(value)
    raise ValueError(f"expected a list of overrides like ['loss.high=0.28'], got {json.dumps(value)}")


def label(params: Mapping[str, Any]) -> str:
    """A short name for chosen values: {"optim.lr": 3e-5, "loss": "gspo"} gives `lr=3e-05,loss=gspo`."""
    shorts = [key.rsplit(".", 1)[-1] for key in params]
    parts = []
    for (key, value), short in zip(params.items(), shorts, strict=True):
        name = short if shorts.count(short) == 1 else key
        parts.append(f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}")
    return ",".join(parts)

"""Every mistake in a set of overrides at once, where Hydra stops at the first."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from reasonrl.config import validate
from reasonrl.errors import ConfigError, Mistake
from sweeps import overrides as ov
from sweeps.compose import first_line, resolve, typed_config, unknown_keys
from sweeps.config import SweepRoot, run_section

_FULL_KEY = re.compile(r"full_key:[ \t]*(\S+)")
_KINDS = (
    ("to Integer", "must be a whole number"),
    ("to Float", "must be a number"),
    ("not a valid bool", "must be true or false"),
    ("ListConfig", "must be a list, such as [1,2]"),
    ("is not Optional", "cannot be null"),
    ("Cannot convert", "must be a single value"),
    ("Incompatible value 'None'", "cannot be null"),
)
# What a sweep file may set beside `sweep`.
_TOP = {"hydra", *(field.name for field in dataclasses.fields(SweepRoot))}
_IN_FILE = re.compile(r"In '([^']+)'")


# What OmegaConf says of a file: (its words, key or "" for the one it names, what is allowed, cure)
_OF_FILES = (
    (r"(?:str|int|float|bool) is not a subclass of (?P<section>\w+)Config\. value: (?P<value>\S+)", "{section}",
     "is a section, not the value {value}", "For a variant write `defaults: [{{override /{section}: {value}}}]`."),
    (r"Cannot merge DictConfig with ListConfig", "", "a list stands where names are mapped (arms, space, zip)",
     "Write e.g. arms: {{a: [loss=symmetric]}}."),
    (r"is not a ListConfig", "", "must be a list", "Write e.g. [0, 1]."),
    (r"Key (?P<word>\w+) \(bool\) is incompatible", "", "YAML reads this name as {word}",
     "Put it into quotes (off, on, yes and no too)."),
)  # fmt: skip


def explain(loader: Any, texts: Sequence[str], config_name: str = "config") -> list[Mistake]:
    """The mistakes of `texts`, each judged apart, then those of the config composed from the sound ones."""
    mistakes, sound = judge(loader, texts, config_name)
    if sound is None:
        return mistakes
    try:
        cfg = _load(loader, sound, config_name)
        mistakes += unknown_keys(cfg) or validate(typed_config(run_section(resolve(cfg))))
    except ConfigError as error:
        mistakes += error.mistakes
    except Exception as error:
        mistakes.append(broken(error, _without_sweep(loader, sound, config_name)))
    return mistakes


def judge(
    loader: Any, texts: Sequence[str], config_name: str = "config", multirun: bool = True
) -> tuple[list[Mistake], list[str] | None]:
    """The mistakes of `texts`, each judged apart, and the sound ones (None when the groups do not compose).

    Without `multirun` (and without a sweep file) a swept value is a mistake too.
    """
    multirun = multirun or any(ov.key_of(text) == "sweep" for text in texts)
    mistakes: list[Mistake] = []
    sound: list[str] = []
    later: list[str] = []
    for text in texts:
        problem = _unreadable(text) or (None if multirun else _needs_multirun(text))
        if problem:
            mistakes.append(problem)
        elif _is_group(loader, text):
            wrong = _group_mistakes(loader, text)
            mistakes += wrong
            sound += [] if wrong else [text]
        else:
            later.append(text)
    try:
        cfg = _load(loader, [*sound, *_searchpath(later)], config_name)
    except Exception as error:
        return [*mistakes, broken(error, _without_sweep(loader, sound, config_name))], None
    for text in later:
        problem = _value_mistake(cfg, loader, text)
        if problem:
            mistakes.append(problem)
        else:
            sound.append(text)
    return mistakes, sound


def broken(error: BaseException, cfg: DictConfig | None) -> Mistake:
    """A composition error (a config file with an unknown key, a missing file) as one mistake."""
    if isinstance(error, YAMLError):
        mark = getattr(error, "problem_mark", None)
        where = f"{Path(mark.name).name}, line {mark.line + 1}" if mark else "a config file"
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        return Mistake(where, ..., f"is not YAML: {problem}")
    chain: list[str] = []
    current: BaseException | None = error
    while current is not None:
        chain.append(str(current))
        current = current.__cause__ or current.__context__
    text = "\n".join(chain)
    key = _FULL_KEY.search(text)
    file = _IN_FILE.search(text)
    where = f"{file.group(1)}.yaml" if file else "the configuration"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if key and "not in" in text:
        name = key.group(1)
        parts = name.split(".")
        if name == "sweep.seed":
            return Mistake(name, ..., f"unknown key in {where}", "Did you mean sweep.seeds?")
        if where.startswith("sweep/") and parts[0] == "sweep" and parts[1:2] and parts[1] in _TOP:
            allowed = f"puts {parts[1]} below sweep, where it means nothing: a line is missing"
            return Mistake(where, ..., allowed, "Begin the file with the line `# @package _global_`.")
        cure = "Write `defaults: [{override /algo: NAME}]`." if name == "algo" else _nearest(name, cfg)
        return Mistake(name, ..., f"unknown key in {where}", cure)
    for words, named, allowed, cure in _OF_FILES:
        if found := re.search(words, text):
            parts_of = {
                part: value.lower() if part == "section" else value for part, value in found.groupdict().items()
            }
            at = named.format(**parts_of) or (key.group(1) if key else where)
            inside = f" (in {where})" if file and at != where else ""
            return Mistake(at, ..., allowed.format(**parts_of) + inside, cure.format(**parts_of))
    # The innermost line says what is wrong; the outer ones say through which function it came.
    inner = [line for line in lines if not line.startswith(("full_key", "object_type", "reference_type", "In '"))]
    message = (inner[0] if inner else type(error).__name__) + (f" (in {where})" if file else "")
    return Mistake(key.group(1) if key else where, ..., message.rstrip("."))


def _load(loader: Any, texts: Sequence[str], config_name: str) -> DictConfig:
    from hydra.types import RunMode

    cfg: DictConfig = loader.load_configuration(
        config_name=config_name,
        overrides=list(texts),
        run_mode=RunMode.MULTIRUN,
        validate_sweep_overrides=False,
    )
    return cfg


def _without_sweep(loader: Any, texts: Sequence[str], config_name: str) -> DictConfig | None:
    """The config the sweep file would have changed, to look up which keys exist."""
    try:
        return _load(loader, [text for text in texts if ov.key_of(text) != "sweep"], config_name)
    except Exception:
        return None


def _unreadable(text: str) -> Mistake | None:
    if "=" not in text and not text.startswith("~"):
        return Mistake(text, ..., "is not an override", f"Write {text}=VALUE; flags begin with a dash.")
    try:
        ov.parse(text)
    except Exception as error:
        message = str(error).splitlines()[0].rstrip(".:") if str(error) else "cannot be read"
        key, _, value = text.partition("=")
        return Mistake(ov.key_of(text), value, message, f'Write "{key}={_quoted(value)}".')
    return None


_ASSIGNMENT = re.compile(r"(?<=[\[,])\s*([^\[\]{},'\"]*=[^\[\]{},'\"]*?)\s*(?=[\],])")  # bare, inside of a list


def _quoted(value: str) -> str:
    """`value` as Hydra reads it: with the assignments inside of its lists quoted, else quoted as a whole."""
    inside = _ASSIGNMENT.sub(lambda found: ov.write_value(found[1]), value)
    return inside if inside != value else ov.write_value(value)


def _needs_multirun(text: str) -> Mistake | None:
    if not ov.parse(text).is_sweep_override():
        return None
    key, _, value = text.partition("=")
    cure = f"Add -m, or write {key}=[{value}] for a list." if _takes_list(key) else "Add -m."
    return Mistake(key, value, "is several values, so it needs a sweep", cure)


def _takes_list(key: str) -> bool:
    node: Any = OmegaConf.structured(SweepRoot)
    for part in key.lstrip("+").split("."):
        node = node._get_node(part) if isinstance(node, DictConfig) and not node._is_none() else None
    return isinstance(node, ListConfig)


def _is_group(loader: Any, text: str) -> bool:
    override = ov.parse(text)
    value = override.value()
    if isinstance(value, dict | list):
        return False
    group = override.key_or_group
    return "." not in group and bool(loader.get_group_options(group))


def _group_mistakes(loader: Any, text: str) -> list[Mistake]:
    override = ov.parse(text)
    group = override.key_or_group
    options = sorted(loader.get_group_options(group))
    if override.is_choice_sweep():
        values = [str(getattr(value, "text", value)) for value in override.sweep_iterator()]
    elif override.value() is None:
        return [] if override.is_delete() else [_null_choice(group, options)]
    else:
        values = [str(override.value())]
    mistakes = []
    for value in values:
        if value not in options:
            near = difflib.get_close_matches(value, options, 1)
            mistakes.append(
                Mistake(
                    group,
                    value,
                    f"no conf/{group}/{value}.yaml; known: {', '.join(options)}",
                    f"Did you mean {group}={near[0]}?" if near else "",
                )
            )
    if not mistakes and override.is_add() and group not in ("sweep",) and not group.startswith("hydra/"):
        mistakes.append(Mistake(text, ..., f"{group} is already chosen in conf/config.yaml", f"Write {text[1:]}."))
    return mistakes


def _null_choice(group: str, options: Sequence[str]) -> Mistake:
    cure = f"Leave {group} out for none." if group in ("algo", "sweep") else ""
    return Mistake(group, None, f"is a choice; known: {', '.join(options)}", cure)


def _value_mistake(cfg: DictConfig, loader: Any, text: str) -> Mistake | None:
    override = ov.parse(text)
    key = override.key_or_group
    if key.startswith("hydra."):
        return None
    if "/" in key or override.package is not None:
        return Mistake(key, override.value(), "no such config group", "`python sweep.py --help` lists the groups.")
    if override.is_delete():
        return Mistake(text, ..., "keys are fixed and cannot be deleted", "Set another value instead.")
    if override.is_sweep_override():
        if override.is_interval_sweep():
            return None if _exists(cfg, key) else _unknown(cfg, key, text, loader)
        values = [getattr(value, "text", value) for value in override.sweep_iterator()]
    else:
        values = [override.value()]
    if not _adding(override) and not _exists(cfg, key):
        return _unknown(cfg, key, text, loader)
    for value in values:
        trial = copy.deepcopy(cfg)
        try:
            OmegaConf.update(trial, key, value, merge=True, force_add=_adding(override))
        except OmegaConfBaseException as error:
            return _misfit(cfg, override, value, text, error)
        if _adding(override) and (pushed := unknown_keys(trial)):
            return pushed[0]
    return None


def _misfit(cfg: DictConfig, override: Any, value: Any, text: str, error: Exception) -> Mistake:
    """Why OmegaConf refused a value, in the words of a user."""
    key, message = override.key_or_group, first_line(error, value)
    section = OmegaConf.select(cfg, key)
    if (
        isinstance(value, dict)
        and isinstance(section, DictConfig)
        and section._metadata.object_type not in (dict, None)
    ):
        unknown = next((str(name) for name in value if name not in section), None)
        if unknown is not None:
            return _unknown(cfg, f"{key}.{unknown}", f"{key}.{unknown}={value[unknown]}")
    if "not in" in message and isinstance(value, dict) and _exists(cfg, key):
        cure = f'Write "+{key}={ov.write_value(value)}".'
        allowed = "names something the section does not have yet"
        allowed += f" (it has {', '.join(map(str, section))}, which stay)" if section else ""
        return Mistake(key, ov.write_value(value), allowed, cure)
    if "not in" in message or "does not match" in message:
        return _unknown(cfg, key, text)
    if "is not a subclass of" in message and _adding(override):
        parent, value = _nest(cfg, key, value)
        cure = f'Write "+{parent}={ov.write_value(value)}".'
        return Mistake(key, ov.write_value(override.value()), f"{key} cannot be added by its full key", cure)
    if "is not a subclass of" in message:
        keys = ", ".join(f"{key}.{name}" for name in map(str, section)) if isinstance(section, DictConfig) else ""
        return Mistake(key, value, "is a section, not a value", f"Set {keys}." if keys else "")
    for sign, allowed in _KINDS:
        if sign in message:
            return Mistake(key, value, allowed, f"It is {ov.write_value(_plain(cfg, key))} without this.")
    return Mistake(key, value, message.rstrip("."))


def _adding(override: Any) -> bool:
    """True for overrides that begin with a plus."""
    return bool(override.is_add() or override.is_force_add())


def _nest(cfg: DictConfig, key: str, value: Any) -> tuple[str, Any]:
    """The nearest section that exists above `key`, and `value` wrapped in the names below it."""
    parts = key.split(".")
    for count in range(len(parts) - 1, 0, -1):
        parent = ".".join(parts[:count])
        value = {parts[count]: value}
        if _exists(cfg, parent):
            return parent, value
    return parts[0], value


def _plain(cfg: DictConfig, key: str) -> Any:
    value = OmegaConf.select(cfg, key)
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def _exists(cfg: DictConfig, key: str) -> bool:
    node: Any = cfg
    for part in key.split("."):
        if not isinstance(node, DictConfig) or node._is_none() or part not in node._content:  # type: ignore[operator]
            return False
        node = node._get_node(part)
    return True


def _unknown(cfg: DictConfig, key: str, text: str, loader: Any = None) -> Mistake:
    groups = loader.list_groups("") if loader is not None and "." not in key else []
    near = difflib.get_close_matches(key, groups, 1, 0.7)
    cure = f"Did you mean {near[0]}={text.split('=', 1)[-1]}?" if near else _nearest(key, cfg)
    return Mistake(key, text.split("=", 1)[-1], "unknown key", cure)


def _nearest(key: str, cfg: DictConfig | None) -> str:
    if cfg is None:
        return ""
    # What a sweep file says about keys are no keys themselves.
    quoted = ("sweep.arms.", "sweep.space.", "sweep.zip.")
    known = [name for name in _keys(cfg) if not name.startswith(quoted)]
    last = key.rsplit(".", 1)[-1]
    near = difflib.get_close_matches(key, known, 3, 0.75)
    near += [name for name in known if name.rsplit(".", 1)[-1] == last and name not in near]
    lasts = difflib.get_close_matches(last, {name.rsplit(".", 1)[-1] for name in known}, 3, 0.75)
    near += [name for name in known if name.rsplit(".", 1)[-1] in lasts and name not in near]
    parent = key.rpartition(".")[0]
    section = OmegaConf.select(cfg, parent) if parent else None
    opened = isinstance(section, DictConfig) and section._metadata.object_type in (dict, None)
    add = f" To add it to {parent}, write +{key}=VALUE." if opened else ""
    if near:
        return f"Did you mean {', '.join(near[:3])}?{add}"
    if add:
        return add.strip()
    children = [str(name) for name in section] if isinstance(section, DictConfig) else []
    if children:
        return f"{parent} has {', '.join(children)}."
    return "`python sweep.py --cfg job` prints every key; open sections take new ones as +key=value."


def _keys(node: DictConfig, prefix: str = "") -> list[str]:
    names = []
    for key in map(str, node):
        if prefix == "" and key == "hydra":
            continue
        child = node._get_node(key)
        names.append(f"{prefix}{key}")
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_missing():
            names += _keys(child, f"{prefix}{key}.")
    return names


def _searchpath(texts: Sequence[str]) -> list[str]:
    return [text for text in texts if text.startswith("hydra.searchpath")]

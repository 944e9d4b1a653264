"""Config group choices over a sweep file: a choice that was typed must act, although the file is merged later.

Hydra merges a sweep file (`+sweep=NAME`) after every group, so its values would silently beat `optim=large_model`
of the command line or `loss=gspo` of an arm. Here a typed choice sets all values of its own file. Single values
that were typed (`optim.lr=1e-5`) still win over both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra.core.default_element import GroupDefault
from omegaconf import DictConfig, OmegaConf

from sweeps import overrides as ov


class Choices:
    """The config groups behind a loader, and what their files set."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._options: dict[str, list[str]] = {}

    def options(self, group: str) -> list[str]:
        """The choices of a config group, [] when there is no such group."""
        if group not in self._options:
            found = [] if not group or "." in group else self.loader.get_group_options(group)
            self._options[group] = sorted(found)
        return self._options[group]

    def is_choice(self, text: str) -> bool:
        """True for overrides such as `loss=clip_higher`."""
        override = ov.parse(text)
        value = override.value()
        return isinstance(value, str) and value in self.options(override.key_or_group)

    def values(self, group: str, option: str) -> dict[str, Any]:
        """The values one choice sets, as {dotted key: value}; those of choices inside a preset come first."""
        inside, own = self._read(group, option)
        return {**inside, **own}

    def forced(self, texts: Sequence[str]) -> dict[str, Any]:
        """The values that the choices among `texts` must set, without the keys that `texts` set one by one.

        Within Hydra's order: choices inside a preset, then choices of single groups, then what a preset says itself.
        """
        chosen = [text for text in texts if self.is_choice(text) and ov.key_of(text) != "sweep"]
        typed = [ov.key_of(text) for text in texts if text not in chosen]
        inside: dict[str, Any] = {}
        single: dict[str, Any] = {}
        preset: dict[str, Any] = {}
        for text in chosen:
            group, option = ov.key_of(text), str(ov.parse(text).value())
            if group.startswith("hydra"):
                continue
            nested, own = self._read(group, option)
            inside |= nested
            (preset if self._is_global(group, option) else single).update(own)
        merged = {**inside, **single, **preset}
        return {key: value for key, value in merged.items() if not any(is_under(key, given) for given in typed)}

    def force(self, cfg: DictConfig, texts: Sequence[str]) -> None:
        """Put the forced values of `texts` into a composed config, where a sweep file took them away."""
        if not any(ov.key_of(text) == "sweep" for text in texts):
            return
        for key, value in self.forced(texts).items():
            if OmegaConf.select(cfg, key) != value:
                OmegaConf.update(cfg, key, value, merge=True)

    def _read(self, group: str, option: str) -> tuple[dict[str, Any], dict[str, Any]]:
        loaded = self.loader.repository.load_config(f"{group}/{option}")
        if loaded is None:
            return {}, {}
        inside: dict[str, Any] = {}
        for default in loaded.defaults_list or []:
            if isinstance(default, GroupDefault) and isinstance(default.value, str) and default.group:
                inside |= self.values(default.group.lstrip("/"), default.value)
        package = loaded.header.get("package")
        prefix = "" if package == "_global_" else f"{(package or group).replace('/', '.')}."
        content: Any = OmegaConf.to_container(loaded.config, resolve=False)
        leaves = {f"{prefix}{key}": value for key, value in flatten(content) if value != {}}
        own = {key: value for key, value in leaves.items() if not key.startswith("hydra.") and not _refers(value)}
        return inside, own

    def _is_global(self, group: str, option: str) -> bool:
        loaded = self.loader.repository.load_config(f"{group}/{option}")
        return loaded is not None and loaded.header.get("package") == "_global_"


def shown(loader: Any, texts: Sequence[str]) -> list[str]:
    """`texts` with forced values written out, for commands that only show the config Hydra composes."""
    if not any(ov.key_of(text) == "sweep" for text in texts):
        return list(texts)
    return [*texts, *(ov.write(key, value) for key, value in Choices(loader).forced(texts).items())]


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf; empty mappings are leaves."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def keys_set(text: str) -> list[str]:
    """The dotted keys that an override sets: `loss={low: 0.1}` gives `loss.low`."""
    override = ov.parse(text)
    value = None if override.is_sweep_override() else override.value()
    return [key for key, _ in flatten({override.key_or_group: value})]


def is_under(key: str, part: str) -> bool:
    """True when `key` is `part` or lies inside of it."""
    return key == part or key.startswith(f"{part}.")


def _refers(value: Any) -> bool:
    return isinstance(value, str) and "${" in value

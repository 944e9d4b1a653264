"""Hydra's own work made cheaper: one command is composed once and not twice, and files are read by the C parser."""

from __future__ import annotations

from typing import Any


def speed_up() -> None:
    """Patch Hydra for this process; what it composes stays the same."""
    import yaml
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.core.config_store import ConfigStore

    # Hydra copies its config repository, this store included, for every list of group options: 144 times for one
    # --help. The store hands out copies of its own anyway (`load`), so it can be shared.
    ConfigStore.__deepcopy__ = lambda self, memo: self  # type: ignore[attr-defined]
    yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # what OmegaConf derives its loader from
    if ConfigLoaderImpl.load_configuration.__module__ != __name__:
        ConfigLoaderImpl.load_configuration = _once(ConfigLoaderImpl.load_configuration)  # type: ignore[method-assign]


def _once(load: Any) -> Any:
    """`load_configuration` that hands the config composed only to read `hydra.mode` to the sweep that follows."""
    kept: dict[Any, Any] = {}

    def load_configuration(
        self: Any, config_name: Any, overrides: Any, run_mode: Any,
        from_shell: bool = True, validate_sweep_overrides: bool = True,
    ) -> Any:  # fmt: skip
        asked = (self, config_name, tuple(overrides), run_mode)
        if validate_sweep_overrides and asked in kept:
            return kept.pop(asked)
        kept.clear()
        cfg = load(self, config_name, overrides, run_mode, from_shell, validate_sweep_overrides)
        # With sweeps, validation only refuses swept keys of Hydra itself: those are composed again, to be judged.
        if not validate_sweep_overrides and not any(text.lstrip("+~").startswith("hydra") for text in overrides):
            kept[asked] = cfg
        return cfg

    return load_configuration

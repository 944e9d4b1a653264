"""Where runs execute: one module per engine, all with the same five verbs (slots, start, send, poll, kill)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reasonrl.errors import EngineError
from sweeps.engines.base import Engine


def make_engine(settings: Mapping[str, Any], logs: Path) -> Engine:
    """The engine that `settings` (the resolved `engine` section) asks for; EngineError when it cannot be had.

    `logs` is the folder for what workers print before their first run.
    """
    kind = settings.get("kind", "local")
    if kind == "local":
        from sweeps.engines.local import LocalEngine

        return LocalEngine(settings, logs)
    if kind == "ray":
        from sweeps.engines.ray import RayEngine

        return RayEngine(settings, logs)
    raise EngineError(f"engine.kind={kind} cannot be had here. Choose local or ray.")


__all__ = ["Engine", "make_engine"]

"""Where events go besides the event log: nowhere, or to W&B."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reasonrl.events import Event

if TYPE_CHECKING:
    from reasonrl.config import Config


@dataclass
class TrackingConfig:
    """Which tracker shows the run; the event log is written in any case."""

    kind: str = "none"  # none or wandb
    mode: str = "online"  # online, offline, disabled
    project: str = "reasonrl"
    entity: str | None = None
    group: str | None = None
    job_type: str | None = None
    tags: list[str] = field(default_factory=list)


class NoTracker:
    """Forgets everything."""

    def log(self, event: Event) -> None:
        """Take one event."""

    def finish(self, status: str) -> None:
        """The run has ended."""


def make_tracker(config: Config, run_dir: Path) -> Any:
    """Return the tracker of `config.tracking`."""
    return NoTracker()
